"""Define a task: a run's model, data, loss and evaluation, which the loop does not know. A task is one
file."""

from __future__ import annotations

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

LENGTH_MULTIPLE = 16  # of a padded length: few shapes to compile


class MicroBatch(Protocol):
    """Hold one micro batch, on the host until `to`; its other content is the task's."""

    @property
    def sample_ids(self) -> NDArray[Any]:
        """[B] positions in the endless training stream."""

    def to(self, device: torch.device) -> Self: ...

    def pin(self) -> Self: ...


class Stream(Protocol):
    """Yield the micro batches of a replica, in order."""

    wait_s: float
    """Seconds `next` has blocked so far."""

    def next(self) -> MicroBatch: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Describe a task's data for checkpoints, the log and the summary."""

    data_hash: str
    """SHA-256 in hexadecimal: a run goes on only with the data that it began with."""
    tokenizer: str | None
    """SHA-256 of the tokenizer's file."""
    num_samples: int
    """Samples of an epoch."""
    num_evaluated: int = 0
    """Samples of an evaluation."""
    tokenizer_file: Path | None = None
    """Copied into the run directory, and from there into every checkpoint."""
    unigram_entropy_nats: float | None = None
    uniform_entropy_nats: float | None = None
    tokens_per_sample: float | None = None
    """Mean over an epoch, padding not counted; None = data.sequence_length."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Hold what an evaluation needs beside the model."""

    comm: HostCollectives
    device: torch.device
    precision: Precision
    dp_rank: int
    dp_size: int
    tensor: int
    """Ranks of one replica: they see the same batches."""
    progress: Callable[[], None]
    """Called by the task after each batch."""
    stopped: Callable[[], bool]
    """Called by the task before each batch, equally often on all ranks, which get the same answer.
    Collective."""
    run_dir: Path | None = None
    """The directory where this rank writes predictions of single examples; None = it writes none."""

    def sum_over_replicas(self, values: Sequence[float]) -> list[float]:
        """Sum elementwise; every replica counts once. Collective."""
        sums: list[float] = self.comm.all_gather(values)[:: self.tensor].sum(0).tolist()
        return sums


def write_or_warn(path: Path, text: str) -> None:
    """Replace a file of an evaluation. Where that fails, print a warning: a full disk ends no run."""
    try:
        path.unlink(missing_ok=True)  # older results are not those of this model
        files.write_text(path, text)
    except OSError as error:
        sys.stdout.write(f"warning: {path.name} could not be written: {error}\n")


class Task(Protocol):
    """Define the model, data, loss and evaluation of a run. A task is made from the configuration and the
    rank's device, without reading data.

    A new one is a file here, its name in TASKS and in `objective.name` of `config/schema.py`, and a parity
    test of its own.
    """

    @property
    def flops_per_token(self) -> float | None:
        """Model FLOPs of forward and backward per token of the input, by cost.py; None = unknown."""

    def open_data(self) -> DatasetInfo:
        """Make or find the data; called once, before the ranks meet. Raises ConfigError."""

    def build_model(self, seed: int) -> Model:
        """Build a whole model on the CPU, the same on every rank."""

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> Stream:
        """Return a replica's micro batches from `start_sample` on, a pure function of (seed, epoch, sample):
        micro batches go round-robin to the replicas."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the SUM over the targets of a micro batch on the device, a device scalar."""

    def num_targets(self, first_sample: int, count: int) -> int:
        """Return the targets of `count` samples of the stream, alike on every rank, without drawing them."""

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, Any] | None:
        """Return the fields of files.models.HeldOut over all replicas; None when nothing is held out or
        `context.stopped`. The model is in eval mode. Collective."""

    def example_batch(self, micro_size: int) -> MicroBatch:
        """Return a micro batch of the largest shapes, made of no data."""


MakeTask = Callable[[Config, torch.device], Task]

TASKS = {name: f"bert_dp.tasks.{name}" for name in ("mlm", "finetune", "distill")}
"""objective.name -> the module whose `make_task` makes it."""


def make_task(config: Config, device: torch.device) -> Task:
    """Make the task that the configuration names."""
    if config.task is not None:
        own: Task = load_function(config.task)(config, device)
        return own
    task: Task = importlib.import_module(TASKS[config.objective.name]).make_task(config, device)
    return task
