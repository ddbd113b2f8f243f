"""Define models of the files in a run directory, shared by their writers (ranks, launcher) and readers.
Torch-free. Unknown keys are ignored; missing keys get their default."""

# ruff: noqa: RUF012 (pydantic copies a default)

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
"""Cause of a failure, in this order: an unusable configuration or file; too little device or host memory; a
full or broken disk; non-finite gradients; an earlier failure of another rank; no progress; a rank killed by a
signal; a node that no longer responds; a stop signal before the next checkpoint; an exit without a recorded
cause; any other exception."""

RunStatus = Literal["done", "stopped", "failed"]
"""stopped: by a signal, after saving a checkpoint."""
OUT_OF_MEMORY: tuple[FailureKind, ...] = ("device_memory", "host_memory")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)

# texts of library exceptions without a distinct type, matched from the start of "type: message"
_TEXTS: dict[FailureKind, str] = {
    "peer_gone": r".*(closed by peer|reset by peer|ncclRemoteError)",
    "device_memory": r"\w*OutOfMemoryError\b|\w+: .*\b(CUDA|HIP|CUBLAS|XPU)\b.*out of memory",
    "host_memory": r"MemoryError\b"
    r"|.*(DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory)",
    "disk": rf"\w+: \[Errno ({'|'.join(map(str, DISK_ERRORS))})\]",
    "bad_input": r"ConfigError\b",
}


def kind_of_text(text: str) -> FailureKind:
    """Classify an exception known only as "type: message". No other code parses these texts."""
    return next((kind for kind, pattern in _TEXTS.items() if re.match(pattern, text, re.DOTALL)), "error")


def kind_of_error(error: BaseException) -> FailureKind:
    """Classify an exception by its `failure_kind` attribute, else by errno, type and message."""
    own: FailureKind | None = getattr(error, "failure_kind", None)
    if own is not None:
        return own
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "disk"
    return kind_of_text(f"{type(error).__name__}: {error}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""Measured number; non-finite values become null because JSON cannot represent them."""


class StoredFile(StoredModel):
    """Base model for a whole file. `hint`: fix if the file is damaged."""

    hint: ClassVar[str] = "see the logs of its run"


class RunMemory(StoredModel):
    """Host memory of a run, sampled by its launcher."""

    peaks_gib: dict[str, float] = {}
    """Resident memory; keys "rank 0", ..."""
    oom_kills: int | None
    """Processes that the kernel killed for lack of memory; null: no readable counter."""
    counter: str | None
    """Path of the counter file."""


class Failure(StoredFile):
    """Reason why a run failed: in logs/rank-N.error.json as written by the rank, and in `failure` of
    summary.json, with fields added by the launcher."""

    kind: FailureKind = "error"
    message: str
    """`ExceptionType: message`, or how the process exited."""
    rank: int | None = None
    """First rank that failed; null if no rank recorded an error."""
    node: str | None = None
    """Number and host of the rank's node in a multi-node run."""
    time_ns: int = 0
    """CLOCK_MONOTONIC, which all processes on a machine share."""
    error_type: str | None = None
    """Name of the exception class."""
    where: str | None = None
    """file:line in the code of bert-dp or the user."""
    source: str | None = None
    """Source code of that line, with its function."""
    issues: list[dict[str, Any]] = []
    """Fields of each `Issue` if the input was bad."""
    agreed: bool = False
    """The ranks stopped the run together, by a rule; a restart would stop in the same way."""
    # by the launcher
    killed_by: int | None = None
    """Signal that killed the rank."""
    same_error_ranks: list[int] = []
    """Ranks that independently raised the same exception at the same line."""
    consequences: list[str] = []
    """One line per rank that failed as a result."""
    explanation: list[str] = []
    fix: list[str] = []
    log: str | None = None
    log_tail: list[str] = []
    """Last lines of the log, or the stack that a crash wrote to it."""
    memory: RunMemory | None = None
    """Set if the failure may be due to memory."""

    def headline(self) -> str:
        """Return the message, prefixed with rank and node."""
        rank = None if self.rank is None else f"rank {self.rank}"
        place = " on ".join(filter(None, (rank, self.node)))
        return f"{place}: {self.message}" if place else self.message


STRAGGLER_RATIO = 1.2  # a rank's compute time / the others' median above which it is reported


class Straggler(StoredModel):
    """Slowest rank, for which the others wait."""

    rank: int
    ratio: float
    """Its compute time before any reduction / the others' median."""
    seconds_per_step: float
    """Time that the others lose."""


class NoiseScale(StoredModel):
    """Gradient noise scale (bert_dp.training.noise) over the last measured steps."""

    verdict: Literal["ok", "inconclusive"]
    reason: str | None = None
    """Reason for an inconclusive verdict."""
    steps: int | None = None
    noise_scale: FiniteOrNone = None
    """In sequences."""
    interval: Annotated[list[float], Field(strict=False)] | None = None
    """95 % interval, in sequences."""
    grad_sq: FiniteOrNone = None
    """Squared norm of the true gradient."""
    trace: FiniteOrNone = None
    """Trace of the covariance of per-sequence gradients."""


class Restart(StoredModel):
    """One restart after a failure."""

    date: str
    step: int
    """Step of the checkpoint that it resumed from; -1 = from scratch."""
    ranks: int
    cause: str
    failure_kind: FailureKind = "error"


class HeldOut(StoredModel):
    """Results of an evaluation, as far as its task measures them. Lines of evals.jsonl have these keys and
    step, tokens and elapsed_s."""

    loss: FiniteOrNone = None
    """Mean over `masked_tokens` or `examples`, in `loss_unit`."""
    loss_unit: Literal["nats", "squared error"] = "nats"
    loss_se: FiniteOrNone = None
    """Standard error of the mean, assuming independent sequences; null for one sequence."""
    masked_accuracy: FiniteOrNone = None
    """Share of masked tokens that have the greatest logit."""
    mask_rate: FiniteOrNone = None
    masked_tokens: int | None = None
    sequences: int | None = None
    examples: int | None = None
    """Finetuning: number of dev examples."""
    scores: dict[str, FiniteOrNone] | None = None
    """Finetuning: "split/metric" -> score in the metric's unit; no entry if a logit was not finite, null if
    the metric is undefined, such as a correlation with a constant."""
    baseline: dict[str, FiniteOrNone] = {}
    """Finetuning: scores of a constant answer, the most frequent label in train."""
    f1_average: Literal["binary", "macro", "micro"] | None = None
    """Finetuning: F1 of the second label, the mean F1 over labels, or F1 over all decisions pooled."""
    one_class: list[str] = []
    """Finetuning: splits in which every example gets the same class."""


class SequenceLosses(StoredFile):
    """Contents of heldout_losses.json: pretraining loss of each held-out sequence at the last evaluation."""

    text_sha256: str
    """Hash of the sequences: the same text and mask rate give the same masks."""
    mask_rate: float
    losses: list[float]
    """Nats per masked token."""


class InitFrom(StoredModel):
    """Initial weights from run.init_from."""

    checkpoint: str
    sha256: str
    """Hash of its model.safetensors."""
    tensors: int
    """Tensors of the model that were loaded from it."""
    of: int
    """All tensors of the model; the others were initialized from the seed."""
    dropped: list[str] = []
    """Tensors in the checkpoint that the model does not have, such as a pooler or key biases."""


class Summary(StoredFile):
    """Contents of summary.json: outcome of a run. Rates cover real steps, not warm-up during set-up. If a run
    stopped before rank 0 could write the file, it contains only what the launcher knows."""

    status: RunStatus
    failure: Failure | None = None
    """null unless the run failed or was stopped before its next checkpoint."""
    signal: int | None = None
    step: int = 0
    samples: int | None = None
    tokens: int | None = None
    final_loss: FiniteOrNone = None
    heldout_loss: FiniteOrNone = None
    heldout: HeldOut | None = None
    """`heldout_loss` and its denominator."""
    heldout_step: int | None = None
    """Step of the evaluation; earlier than `step` if a signal or failure stopped the run."""
    since_step: int | None = None
    """Step at which this start began; rates, times, memory and energy cover the steps after it."""
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
    """Peak of the rank with the highest peak."""
    energy_j: FiniteOrNone = None
    """Joules of all ranks' GPUs in the steps, evaluations and saves of this start; null if not measured."""
    skipped_steps: int | None = None
    checkpoint: str | None = None
    """Relative to the run directory."""
    init_from: InitFrom | None = None
    straggler_ratio: FiniteOrNone = None
    """Compute time before any reduction: slowest rank / median of the others; null for a single rank."""
    straggler: Straggler | None = None
    """Set if the ratio over the run is above STRAGGLER_RATIO."""
    time_s: dict[str, float] = {}
    """Rank 0's clock: setup, compile, train, data_wait, forward_backward, optimizer, eval, save (stall)."""
    spent: Spent | None = None
    """Dollars, kWh and CO2 of all starts, recorded by the launcher."""
    command_s: FiniteOrNone = None
    """From the start of the command to the exit of the last rank, measured by the launcher."""
    bucket_bytes: list[int] = []
    """Sizes of DDP's reduction buckets; empty with other engines."""
    metrics: dict[str, FiniteOrNone] = {}
    """Other metrics by name, from the last line of metrics.jsonl."""
    loss_spikes: int | None = None
    """Logged losses far above the preceding ones."""
    failed_saves: int | None = None
    """Checkpoints that could not be written since the run was last started."""
    failed_writes: int | None = None
    """Failed writes of logs and records on any rank; their lines are missing."""
    noise_scale: NoiseScale | None = None
    """null without log.noise_scale."""
    profiled_steps: list[int] | None = None
    """First and last step under torch.profiler, which slows steps down; they count in the rates."""
    restarts: list[Restart] = []
    schema_version: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """Return the exit code of the command that started the run."""
        if self.status == "done":
            return 0
        kind = self.failure.kind if self.failure else None
        if self.signal and (self.status == "stopped" or kind == "stopped"):
            return 128 + self.signal
        return 2 if kind == "bad_input" else 1

    @property
    def out_of_memory(self) -> bool:
        """Return True if the run failed because device or host memory was too small."""
        return self.failure is not None and self.failure.kind in OUT_OF_MEMORY


class GpuMemory(StoredModel):
    memory_gib: float | None = None


class RecordedEnvironment(StoredFile):
    """Part of environment.json used by failure advice; the launcher writes the whole file."""

    gpus: list[GpuMemory] = []
    memory_gib: float | None = None
    """Memory of the machine."""
    memory_limit_gib: float | None = None
    """Limit of the control group; null = none."""
    bf16_units: list[str] = []
    """bf16 instruction sets of the CPU."""
