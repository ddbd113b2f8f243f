"""Define the interface of a task, which provides a run's model, data, loss and evaluation."""

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

LENGTH_MULTIPLE = 16  # padded lengths are multiples of this, so that few shapes are compiled


class MicroBatch(Protocol):
    """Micro batch. It stays in host memory until `to` copies it to a device. Tasks add their own fields."""

    @property
    def sample_ids(self) -> NDArray[Any]:
        """Return the samples' positions [B] in the endless training stream."""

    def to(self, device: torch.device) -> Self: ...

    def pin(self) -> Self: ...


class Stream(Protocol):
    """Micro batches of a replica, in order."""

    wait_s: float
    """Total seconds for which `next` has blocked."""

    def next(self) -> MicroBatch: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Description of a task's data for checkpoints, the log and the summary."""

    data_hash: str
    """SHA-256 that identifies the data, in hexadecimal; a run resumes only with identical data."""
    tokenizer: str | None
    """SHA-256 of the tokenizer file."""
    num_samples: int
    """Number of samples in an epoch."""
    num_evaluated: int = 0
    """Number of samples in an evaluation."""
    tokenizer_file: Path | None = None
    """Tokenizer file to copy into the run directory, and from there into every checkpoint."""
    unigram_entropy_nats: float | None = None
    uniform_entropy_nats: float | None = None
    tokens_per_sample: float | None = None
    """Mean number of tokens per sample, without padding; None = data.sequence_length."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs of an evaluation besides the model."""

    comm: HostCollectives
    device: torch.device
    precision: Precision
    dp_rank: int
    dp_size: int
    tensor: int
    """Number of ranks per replica. All ranks of a replica receive the same batches."""
    progress: Callable[[], None]
    """Function that the task calls after each batch."""
    stopped: Callable[[], bool]
    """Function that the task calls before each batch; True = stop the evaluation. Collective: all ranks must
    call it the same number of times, and all get the same result."""
    run_dir: Path | None = None
    """Directory for the results of individual examples or sequences; None = this rank does not write them."""

    def sum_over_replicas(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sums of `values` over replicas, counting each replica once. Collective."""
        sums: list[float] = self.comm.all_gather(values)[:: self.tensor].sum(0).tolist()
        return sums


def write_or_warn(path: Path, text: str) -> None:
    """Replace a result file of an evaluation. Print a warning on failure: a full disk must not stop a run."""
    try:
        path.unlink(missing_ok=True)  # older results belong to an earlier model
        files.write_text(path, text)
    except OSError as error:
        sys.stdout.write(f"warning: {path.name} could not be written: {error}\n")


class Task(Protocol):
    """Model, data, loss and evaluation of a run. `make_task` creates a task from the configuration and the
    rank's device, without reading data. To add a task, write a module and a parity test, and add the task's
    name to TASKS and to `objective.name` in config/schema.py."""

    @property
    def flops_per_token(self) -> float | None:
        """Return the model FLOPs per input token, forward and backward (see cost.py); None = unknown."""

    def open_data(self) -> DatasetInfo:
        """Open or build the data. Called once, before the rendezvous. Raise ConfigError on failure."""

    def build_model(self, seed: int) -> Model:
        """Build the whole model on the CPU, with the same weights on every rank."""

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> Stream:
        """Return a replica's micro batches from `start_sample` on. Their contents depend only on (seed,
        epoch, sample). Micro batches are assigned to the replicas round-robin."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the SUM of the loss over a micro batch's targets, as a scalar on the device of `batch`."""

    def num_targets(self, first_sample: int, count: int) -> int:
        """Return the number of targets in `count` samples from `first_sample` on, without building the
        samples. All ranks get the same number."""

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, Any] | None:
        """Evaluate `model`, which is in eval mode, on all replicas. Return fields of files.models.HeldOut, or
        None if there is no held-out data or `context.stopped` returned True. Collective."""

    def example_batch(self, micro_size: int) -> MicroBatch:
        """Return a synthetic micro batch with the largest shapes that a run uses."""


MakeTask = Callable[[Config, torch.device], Task]

TASKS = {name: f"bert_dp.tasks.{name}" for name in ("mlm", "finetune", "distill")}
"""Map from objective.name to the module whose `make_task` creates the task."""


def make_task(config: Config, device: torch.device) -> Task:
    """Create the configured task."""
    module = TASKS[config.objective.name]
    make = load_function(config.task) if config.task else importlib.import_module(module).make_task
    task: Task = make(config, device)
    return task
