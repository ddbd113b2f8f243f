"""Define the interface of a task: a run's model, data, loss and evaluation. A task is one file."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert_dp import files
from bert_dp.config import Config
from bert_dp.config.own_code import load_function
from bert_dp.model.interface import Model
from bert_dp.training.devices import Precision
from bert_dp.training.distributed import HostCollectives

LENGTH_MULTIPLE = 16  # padded lengths are multiples of it: few shapes to compile


class MicroBatch(Protocol):
    """One micro batch, on the host until `to`; its other fields depend on the task."""

    @property
    def sample_ids(self) -> NDArray[Any]:
        """[B] positions in the endless training stream."""

    def to(self, device: torch.device) -> Self: ...

    def pin(self) -> Self: ...


class Stream(Protocol):
    """Yield a replica's micro batches in order."""

    wait_s: float
    """Seconds for which `next` has blocked so far."""

    def next(self) -> MicroBatch: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Description of a task's data for checkpoints, the log and the summary."""

    data_hash: str
    """SHA-256 in hexadecimal; a run resumes only with identical data."""
    tokenizer: str | None
    """SHA-256 of the tokenizer file."""
    num_samples: int
    """Samples in an epoch."""
    num_evaluated: int = 0
    """Samples in an evaluation."""
    tokenizer_file: Path | None = None
    """Copied into the run directory, and from there into every checkpoint."""
    unigram_entropy_nats: float | None = None
    uniform_entropy_nats: float | None = None
    tokens_per_sample: float | None = None
    """Mean over an epoch, without padding; None = data.sequence_length."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs of an evaluation other than the model."""

    comm: HostCollectives
    device: torch.device
    precision: Precision
    dp_rank: int
    dp_size: int
    tensor: int
    """Ranks in one replica, which receive the same batches."""
    progress: Callable[[], None]
    """Called by the task after each batch."""
    stopped: Callable[[], bool]
    """Called by the task before each batch; all ranks must call it equally often and get the same answer.
    Collective."""
    run_dir: Path | None = None
    """Directory in which this rank writes predictions per example; None = do not write."""

    def sum_over_replicas(self, values: Sequence[float]) -> list[float]:
        """Sum elementwise, counting each replica once. Collective."""
        sums: list[float] = self.comm.all_gather(values)[:: self.tensor].sum(0).tolist()
        return sums


def write_or_warn(path: Path, text: str) -> None:
    """Replace a result file of an evaluation. On failure print a warning: a full disk must not stop a run."""
    try:
        path.unlink(missing_ok=True)  # older results belong to an earlier model
        files.write_text(path, text)
    except OSError as error:
        sys.stdout.write(f"warning: {path.name} could not be written: {error}\n")


class Task(Protocol):
    """Define a run's model, data, loss and evaluation. A task is created from the configuration and the
    rank's device, without reading data. A new task is a file here, its name in TASKS and in `objective.name`
    of `config/schema.py`, and its own parity test."""

    @property
    def flops_per_token(self) -> float | None:
        """Model FLOPs of forward and backward per input token, from cost.py; None = unknown."""

    def open_data(self) -> DatasetInfo:
        """Build or find the data; called once, before the rendezvous. Raises ConfigError."""

    def build_model(self, seed: int) -> Model:
        """Build a whole model on the CPU, the same on every rank."""

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> Stream:
        """Return a replica's micro batches from `start_sample` on, a pure function of (seed, epoch, sample).
        Micro batches are assigned to the replicas round-robin."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the SUM over a micro batch's targets, a device scalar; the batch is on the device."""

    def num_targets(self, first_sample: int, count: int) -> int:
        """Return the number of targets in `count` samples, identical on every rank, without sampling them."""

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, Any] | None:
        """Return the fields of files.models.HeldOut over all replicas; None if there is no held-out data or
        `context.stopped` returned True. The model is in eval mode. Collective."""

    def example_batch(self, micro_size: int) -> MicroBatch:
        """Return a synthetic micro batch of the largest shapes."""


MakeTask = Callable[[Config, torch.device], Task]

TASKS = {name: f"bert_dp.tasks.{name}" for name in ("mlm", "finetune", "distill")}
"""Map from objective.name to the module whose `make_task` creates the task."""


def make_task(config: Config, device: torch.device) -> Task:
    """Create the configured task."""
    if config.task is not None:
        own: Task = load_function(config.task)(config, device)
        return own
    task: Task = importlib.import_module(TASKS[config.objective.name]).make_task(config, device)
    return task
