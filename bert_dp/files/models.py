"""Model the files that a rank or its launcher writes into a run directory: one schema for writer and reader.
Torch-free. An unknown key is ignored and a missing one has its default."""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import errno
import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, computed_field

from bert_dp.config.errors import StoredModel
from bert_dp.files.ledger import Spent

FailureKind = Literal[
    "bad_input",
    "device_memory",
    "host_memory",
    "disk",
    "not_finite",
    "peer_gone",
    "hang",
    "killed",
    "node_lost",
    "stopped",
    "no_cause",
    "error",
]
"""What ended a run: a configuration or file that cannot be used; too little memory of the device or of the
host; a disk that is full or broken; gradients that are not finite; another rank that went first; no progress;
a signal that killed a rank; a node that is not heard of any more; a signal to stop, before the next
checkpoint; an exit that left no cause; any other exception."""

RunStatus = Literal["done", "stopped", "failed"]
"""stopped: by a signal, after a checkpoint."""
OUT_OF_MEMORY: tuple[FailureKind, ...] = ("device_memory", "host_memory")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)

# what libraries say in exceptions that have no type of their own, of "type: message" from its beginning
_TEXTS: dict[FailureKind, str] = {
    "peer_gone": r".*(closed by peer|reset by peer|ncclRemoteError)",
    "device_memory": r"\w*OutOfMemoryError\b|\w+: .*\b(CUDA|HIP|CUBLAS|XPU)\b.*out of memory",
    "host_memory": r"MemoryError\b"
    r"|.*(DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory)",
    "disk": rf"\w+: \[Errno ({'|'.join(map(str, DISK_ERRORS))})\]",
    "bad_input": r"ConfigError\b",
}


def kind_of_text(text: str) -> FailureKind:
    """Classify an exception that is only known as "type: message"; nothing else reads the words."""
    return next((kind for kind, pattern in _TEXTS.items() if re.match(pattern, text, re.DOTALL)), "error")


def kind_of_error(error: BaseException) -> FailureKind:
    """Classify an exception by its own `failure_kind`, else by its errno, its type and its words."""
    own: FailureKind | None = getattr(error, "failure_kind", None)
    if own is not None:
        return own
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "disk"
    return kind_of_text(f"{type(error).__name__}: {error}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""A measured number; one that is not finite becomes null: JSON has none."""


class StoredFile(StoredModel):
    """Model a whole file. `hint`: fix of a damaged one."""

    hint: ClassVar[str] = "see the logs of its run"


class RunMemory(StoredModel):
    """Hold the memory of a run as its launcher sampled it."""

    peaks_gib: dict[str, float] = {}
    """Resident memory; keys "rank 0", ..."""
    oom_kills: int | None
    """Processes that the kernel killed for lack of memory; null: no counter is readable."""
    counter: str | None
    """The file that counts them."""


class Failure(StoredFile):
    """Describe why a run failed: logs/rank-N.error.json as the rank wrote it, and `failure` of summary.json,
    which the launcher has completed."""

    kind: FailureKind = "error"
    message: str
    """`TypeOfTheException: message`, or how the process ended."""
    rank: int | None = None
    """The first rank that failed; null if no rank recorded an error."""
    node: str | None = None
    """Number and host of the rank's node in a run over several."""
    time_ns: int = 0
    """CLOCK_MONOTONIC: one clock for all processes of a machine."""
    error_type: str | None = None
    """Name of the exception's class."""
    where: str | None = None
    """file:line of our code or the user's"""
    source: str | None = None
    """The code of that line, with its function."""
    issues: list[dict[str, Any]] = []
    """Fields of each `Issue` of bad input."""
    agreed: bool = False
    """The ranks ended the run together, by a rule; a restart would end the same way."""
    # by the launcher
    killed_by: int | None = None
    """The signal that ended the rank."""
    same_error_ranks: list[int] = []
    """Ranks that independently raised the same exception at the same line."""
    consequences: list[str] = []
    """One line for each rank that failed because this one did."""
    explanation: list[str] = []
    fix: list[str] = []
    log: str | None = None
    log_tail: list[str] = []
    """Last lines of the log, or the stack that a crash left there."""
    memory: RunMemory | None = None
    """Of a failure that may be due to memory."""

    def headline(self) -> str:
        """Return the message after the rank and node that it comes from."""
        rank = None if self.rank is None else f"rank {self.rank}"
        place = " on ".join(filter(None, (rank, self.node)))
        return f"{place}: {self.message}" if place else self.message


STRAGGLER_RATIO = 1.2  # of own work to the others' median, from which on a rank is named


class Straggler(StoredModel):
    """Name the rank that the others wait for."""

    rank: int
    ratio: float
    """Its own work before any reduction over the others' median."""
    seconds_per_step: float
    """Lost by the others."""


class NoiseScale(StoredModel):
    """Hold the gradient noise scale (bert_dp.training.noise) over the last measured steps."""

    verdict: Literal["ok", "inconclusive"]
    reason: str | None = None
    """Why it is inconclusive."""
    steps: int | None = None
    noise_scale: FiniteOrNone = None
    """Sequences."""
    interval: Annotated[list[float], Field(strict=False)] | None = None
    """95 %, sequences."""
    grad_sq: FiniteOrNone = None
    """Squared norm of the true gradient."""
    trace: FiniteOrNone = None
    """Of the covariance of the gradient of one sequence."""


class Restart(StoredModel):
    """Describe one restart after a failure."""

    date: str
    step: int
    """Of the checkpoint it began from; -1 = the start."""
    ranks: int
    cause: str
    failure_kind: FailureKind = "error"


class HeldOut(StoredModel):
    """Hold the results of an evaluation, as far as its task measures them. A line of evals.jsonl has these
    keys beside step, tokens and elapsed_s."""

    loss: FiniteOrNone = None
    """Mean over `masked_tokens` or `examples`, in `loss_unit`."""
    loss_unit: Literal["nats", "squared error"] = "nats"
    loss_se: FiniteOrNone = None
    """Standard error of the mean, over sequences as if they were independent; null of one sequence."""
    masked_accuracy: FiniteOrNone = None
    """Share of the masked tokens that have the greatest logit."""
    mask_rate: FiniteOrNone = None
    masked_tokens: int | None = None
    sequences: int | None = None
    examples: int | None = None
    """Of finetuning: those of dev."""
    scores: dict[str, FiniteOrNone] | None = None
    """Of finetuning: "split/metric", in the metric's own unit; none where a logit was not finite, null where
    the metric is not defined, as a correlation with what is constant."""
    baseline: dict[str, FiniteOrNone] = {}
    """Of finetuning: the scores of a constant answer, the most frequent label of train."""
    f1_average: Literal["binary", "macro", "micro"] | None = None
    """Of finetuning: f1 is that of the second label, the mean over labels, or over all decisions together."""
    one_class: list[str] = []
    """Of finetuning: the splits whose every example gets the same class."""


class SequenceLosses(StoredFile):
    """heldout_losses.json of a pretraining: the loss of each held-out sequence at the last evaluation."""

    text_sha256: str
    """Of the sequences: the same text has the same masks at the same rate."""
    mask_rate: float
    losses: list[float]
    """Nats per masked token."""


class InitFrom(StoredModel):
    """Describe the weights that run.init_from gave a run."""

    checkpoint: str
    sha256: str
    """Of its model.safetensors."""
    tensors: int
    """Of the model that were taken from it."""
    of: int
    """Of the model in all; the others began as the seed makes them."""
    dropped: list[str] = []
    """Tensors there that the model has no place for: a pooler, biases of the keys."""


class Summary(StoredFile):
    """summary.json: how a run ended. Rates are over the real steps, warm-up of set-up excluded. Of a run that
    ended before rank 0 could write it there is only what its launcher knows."""

    status: RunStatus
    failure: Failure | None = None
    """null if the run did not fail and was not stopped before its next checkpoint."""
    signal: int | None = None
    step: int = 0
    samples: int | None = None
    tokens: int | None = None
    final_loss: FiniteOrNone = None
    heldout_loss: FiniteOrNone = None
    heldout: HeldOut | None = None
    """`heldout_loss` with its denominator."""
    heldout_step: int | None = None
    """Of the evaluation: before `step` where a signal or a failure ended the run."""
    since_step: int | None = None
    """Where this start began: rates, times, memory, energy are of the steps after it."""
    unigram_entropy_nats: FiniteOrNone = None
    uniform_entropy_nats: FiniteOrNone = None
    world_size: int | None = None
    device: str | None = None
    parameters: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    compiled: bool | None = None
    steps_per_s: FiniteOrNone = None
    global_steps_per_s: FiniteOrNone = None
    samples_per_s: FiniteOrNone = None
    tokens_per_s: FiniteOrNone = None
    tokens_per_s_per_gpu: FiniteOrNone = None
    mfu: FiniteOrNone = None
    peak_memory_gib: FiniteOrNone = None
    """Of the rank with most."""
    energy_j: FiniteOrNone = None
    """Joules of all ranks' GPUs in the steps, evaluations and saves of this start; null if not counted."""
    skipped_steps: int | None = None
    checkpoint: str | None = None
    """Relative to the run directory."""
    init_from: InitFrom | None = None
    straggler_ratio: FiniteOrNone = None
    """Own work (before any reduction) of the slowest rank over the others' median; null for a lone rank."""
    straggler: Straggler | None = None
    """When the ratio is above STRAGGLER_RATIO over the run."""
    time_s: dict[str, float] = {}
    """Rank 0's clock: setup, compile, train, data_wait, forward_backward, optimizer, eval, save (stall)."""
    spent: Spent | None = None
    """Dollars, kWh and CO2 of all starts, by our launcher."""
    command_s: FiniteOrNone = None
    """From the start of the command to the end of the last rank, by the launcher."""
    bucket_bytes: list[int] = []
    """Of DDP's reduction buckets; empty under other engines."""
    metrics: dict[str, FiniteOrNone] = {}
    """Other metrics by their names in metrics.jsonl, at the last line."""
    loss_spikes: int | None = None
    """Logged losses far above the ones before."""
    failed_saves: int | None = None
    """Checkpoints that could not be written, since the run was last started."""
    failed_writes: int | None = None
    """Writes of logs and records that failed on any rank: lines are missing there."""
    noise_scale: NoiseScale | None = None
    """null without log.noise_scale."""
    profiled_steps: list[int] | None = None
    """First and last of those that ran under torch.profiler, which slows them: they count in the rates."""
    restarts: list[Restart] = []
    schema_version: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """Exit code of the command that ran it."""
        if self.status == "done":
            return 0
        kind = self.failure.kind if self.failure else None
        if self.signal and (self.status == "stopped" or kind == "stopped"):
            return 128 + self.signal
        return 2 if kind == "bad_input" else 1

    @property
    def out_of_memory(self) -> bool:
        """True if the memory of a device or of the host did not suffice."""
        return self.failure is not None and self.failure.kind in OUT_OF_MEMORY


class GpuMemory(StoredModel):
    memory_gib: float | None = None


class RecordedEnvironment(StoredFile):
    """Model the part of environment.json that a failure's advice reads; the launcher writes the whole."""

    gpus: list[GpuMemory] = []
    memory_gib: float | None = None
    """Of the machine."""
    memory_limit_gib: float | None = None
    """Of the control group; null = no limit."""
    bf16_units: list[str] = []
    """Of the CPU."""
