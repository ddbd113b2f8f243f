"""Define the contents of files in a run directory, for their writers (ranks, launcher) and readers. Unknown
keys are ignored, and missing optional keys get default values. Torch-free."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import errno
import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, computed_field

from bert_dp.config.errors import StoredModel
from bert_dp.files.ledger import Spent

FailureKind = Literal[
    "bad_input",  # the configuration or a file is unusable
    "device_memory",  # the device has too little memory
    "host_memory",  # the machine has too little memory
    "disk",  # the disk is full or broken
    "not_finite",  # gradients, weights or outputs are not finite
    "peer_gone",  # another rank failed first
    "hang",  # a rank makes no progress
    "killed",  # a signal killed the rank
    "node_lost",  # a node does not respond
    "stopped",  # a stop signal ended the run before its next checkpoint
    "no_cause",  # the rank exited without recording a cause
    "error",  # any other exception
]

RunStatus = Literal["done", "stopped", "failed"]
"""stopped = after a stop signal, the run saved a checkpoint and ended."""
OUT_OF_MEMORY: tuple[FailureKind, ...] = ("device_memory", "host_memory")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)

# patterns for library exceptions without a distinct type, matched at the start of "type: message"
_TEXTS: dict[FailureKind, str] = {
    "peer_gone": r".*(closed by peer|reset by peer|ncclRemoteError)",
    "device_memory": r"\w*OutOfMemoryError\b|\w+: .*\b(CUDA|HIP|CUBLAS|XPU)\b.*out of memory",
    "host_memory": r"MemoryError\b"
    r"|.*(DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory)",
    "disk": rf"\w+: \[Errno ({'|'.join(map(str, DISK_ERRORS))})\]",
    "bad_input": r"ConfigError\b",
}


def kind_of_text(text: str) -> FailureKind:
    """Classify an exception by its text, "type: message"."""
    return next((kind for kind, pattern in _TEXTS.items() if re.match(pattern, text, re.DOTALL)), "error")


def kind_of_error(error: BaseException) -> FailureKind:
    """Classify an exception by its attribute `failure_kind`, or else by its errno, type and message."""
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
    """Base model for a whole file. `hint`: suggested fix if the file is damaged."""

    hint: ClassVar[str] = "see the logs of the run"


class RunMemory(StoredModel):
    """Host memory that a run uses, sampled by the launcher."""

    peaks_gib: dict[str, float] = {}
    """Process name, such as "rank 0" -> peak resident memory in GiB."""
    oom_kills: int | None
    """Number of processes that the kernel killed for lack of memory; null = no readable counter."""
    counter: str | None
    """Path of the file from which `oom_kills` was read."""


class Failure(StoredFile):
    """Cause of a run's failure. A failing rank writes it to logs/rank-N.error.json; the launcher
    completes it and stores it as `failure` in summary.json."""

    kind: FailureKind = "error"
    message: str
    """`ExceptionType: message`, or a description of what happened."""
    rank: int | None = None
    """First rank that failed; null if it is unknown, or if the failure is not specific to one rank."""
    node: str | None = None
    """Number and host of the rank's node in a multi-node run."""
    time_ns: int = 0
    """Time of the failure on CLOCK_MONOTONIC, which all processes on a machine share."""
    error_type: str | None = None
    """Name of the exception class."""
    where: str | None = None
    """file:line of the failure, in bert-dp's or the user's code if possible."""
    source: str | None = None
    """Name of the function at `where` and, if known, the source line."""
    issues: list[dict[str, Any]] = []
    """For bad input, the fields of each `Issue`."""
    agreed: bool = False
    """True if all ranks stopped together for a reason that would recur after a restart."""
    # added by the launcher
    killed_by: int | None = None
    """Signal that killed the rank."""
    same_error_ranks: list[int] = []
    """Ranks that independently raised the same exception at the same line."""
    consequences: list[str] = []
    """One line for each rank that failed as a consequence of this failure."""
    explanation: list[str] = []
    fix: list[str] = []
    log: str | None = None
    log_tail: list[str] = []
    """Last lines of the file `log`, the stack that a crash wrote to it, or the report of a hang."""
    memory: RunMemory | None = None
    """Set if a lack of memory may have caused the failure."""

    def headline(self) -> str:
        """Return the message, prefixed with rank and node."""
        rank = None if self.rank is None else f"rank {self.rank}"
        place = " on ".join(filter(None, (rank, self.node)))
        return f"{place}: {self.message}" if place else self.message


STRAGGLER_RATIO = 1.2  # a rank is a straggler if its compute time exceeds this multiple of the others' median


class Straggler(StoredModel):
    """Slowest rank, for which the other ranks wait."""

    rank: int
    ratio: float
    """This rank's compute time before the first reduction of a step, divided by the other ranks' median."""
    seconds_per_step: float
    """Seconds that the other ranks lose in each step."""


class NoiseScale(StoredModel):
    """Gradient noise scale over the last measured steps, computed by bert_dp.training.noise."""

    verdict: Literal["ok", "inconclusive"]
    reason: str | None = None
    """Reason for an inconclusive verdict."""
    steps: int | None = None
    noise_scale: FiniteOrNone = None
    """Noise scale in sequences."""
    interval: Annotated[list[float], Field(strict=False)] | None = None
    """95 % interval of the noise scale in sequences."""
    grad_sq: FiniteOrNone = None
    """Estimate of the squared norm of the true gradient."""
    trace: FiniteOrNone = None
    """Estimate of the trace of the covariance of per-sequence gradients."""


class Restart(StoredModel):
    """Restart of a run after a failure."""

    date: str
    step: int
    """Step of the checkpoint from which the run resumed; -1 = no checkpoint."""
    ranks: int
    cause: str
    failure_kind: FailureKind = "error"


class HeldOut(StoredModel):
    """Results of an evaluation; a result is null if the task does not measure it. Lines of evals.jsonl also
    contain step, tokens and elapsed_s."""

    loss: FiniteOrNone = None
    """Mean loss over `masked_tokens` or `examples`, in `loss_unit`."""
    loss_unit: Literal["nats", "squared error"] = "nats"
    loss_se: FiniteOrNone = None
    """Standard error of `loss`, assuming independent sequences; null for a single sequence."""
    masked_accuracy: FiniteOrNone = None
    """Share of masked positions at which the original token has the greatest logit."""
    mask_rate: FiniteOrNone = None
    masked_tokens: int | None = None
    sequences: int | None = None
    examples: int | None = None
    """Finetuning: number of dev examples."""
    scores: dict[str, FiniteOrNone] | None = None
    """Finetuning: "split/metric" -> score in the metric's unit. A score is missing if a logit was not finite,
    and null if its metric is undefined, for example a correlation with a constant."""
    baseline: dict[str, FiniteOrNone] = {}
    """Finetuning: scores of a constant prediction: the most frequent label (single_label), the most
    frequent value of each label (multi_label) or the mean score (regression) in the train split."""
    f1_average: Literal["binary", "macro", "micro"] | None = None
    """Finetuning: kind of F1. binary = F1 of the second label; macro = mean of the labels' F1; micro = F1 of
    all decisions pooled."""
    one_class: list[str] = []
    """Finetuning: splits in which all examples have the same predicted class."""


class SequenceLosses(StoredFile):
    """Contents of heldout_losses.json: pretraining loss of each held-out sequence at the last evaluation."""

    text_sha256: str
    """Hash of the held-out sequences. Equal hashes and mask rates imply equal masks."""
    mask_rate: float
    losses: list[float]
    """Nats per masked token."""


class InitFrom(StoredModel):
    """Source of a run's initial weights, if run.init_from is set."""

    checkpoint: str
    sha256: str
    """SHA-256 of the checkpoint's model.safetensors."""
    tensors: int
    """Number of the model's tensors that were loaded from the checkpoint."""
    of: int
    """Number of tensors in the model; those that were not loaded were initialized from the seed."""
    dropped: list[str] = []
    """Tensors in the checkpoint that the model does not have, such as a pooler or key biases."""


class Summary(StoredFile):
    """Contents of summary.json: outcome of a run. Rates exclude set-up and the dry run before training.
    If a run stopped before rank 0 could write the file, the launcher writes only the fields that it knows."""

    status: RunStatus
    failure: Failure | None = None
    """null unless the run failed, or a stop signal ended it before its next checkpoint."""
    signal: int | None = None
    step: int = 0
    samples: int | None = None
    tokens: int | None = None
    final_loss: FiniteOrNone = None
    heldout_loss: FiniteOrNone = None
    heldout: HeldOut | None = None
    """All results of the last evaluation. Its `loss` equals `heldout_loss`."""
    heldout_step: int | None = None
    """Step of the last evaluation. It can be less than `step` if a signal or a failure stopped the run."""
    since_step: int | None = None
    """Step at which this start or resumption began. Rates, times, memory and energy cover later steps."""
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
    """Highest peak memory of any rank."""
    energy_j: FiniteOrNone = None
    """Joules that all ranks' GPUs used in this start, excluding set-up; null = not measured."""
    skipped_steps: int | None = None
    checkpoint: str | None = None
    """Path of the newest checkpoint, relative to the run directory."""
    init_from: InitFrom | None = None
    straggler_ratio: FiniteOrNone = None
    """`ratio` of the slowest rank, as in `Straggler`; null if it is undefined, for example with one rank."""
    straggler: Straggler | None = None
    """Null unless `straggler_ratio` is above STRAGGLER_RATIO and enough steps were measured."""
    time_s: dict[str, float] = {}
    """Rank 0's seconds in setup, compile, train, data_wait, forward_backward, optimizer, eval and save.
    `save` counts only the time that training waits for checkpoints."""
    spent: Spent | None = None
    """Dollars, kWh and CO2 of all starts, as recorded in ledger.json."""
    command_s: FiniteOrNone = None
    """Seconds from the start of the command to the exit of the last rank, measured by the launcher."""
    bucket_bytes: list[int] = []
    """Sizes of DDP's gradient buckets; empty with other engines."""
    metrics: dict[str, FiniteOrNone] = {}
    """Other metrics, by name, from the last line of metrics.jsonl."""
    loss_spikes: int | None = None
    """Number of logged losses far above the preceding losses."""
    failed_saves: int | None = None
    """Number of checkpoints that this start could not write."""
    failed_writes: int | None = None
    """Number of failed writes of logs, records, checkpoints and profiles, over all ranks."""
    noise_scale: NoiseScale | None = None
    """null unless log.noise_scale is true."""
    profiled_steps: list[int] | None = None
    """First and last step recorded by torch.profiler, which slows steps down. Rates include these steps."""
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
        """Return True if the run failed because it had too little device or host memory."""
        return self.failure is not None and self.failure.kind in OUT_OF_MEMORY


class GpuMemory(StoredModel):
    memory_gib: float | None = None


class RecordedEnvironment(StoredFile):
    """Fields of environment.json that the advice after a failure uses. The file has other fields as well."""

    gpus: list[GpuMemory] = []
    memory_gib: float | None = None
    """Host memory of the machine."""
    memory_limit_gib: float | None = None
    """Memory limit of the control group; null = no limit."""
    bf16_units: list[str] = []
    """bf16 instruction sets of the CPU."""
