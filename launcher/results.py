"""The files that only verbs write, as models: the only schema, the only reader and the only writer of them.

A key that is not known is ignored and one that is missing has its default, so older files open; null is what
was not measured. Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares
and efficiencies are fractions, unless a name says otherwise. An interval is [low, high], of 95 %.
"""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from bert_dp import record
from bert_dp.config import ConfigError, plain_message
from bert_dp.config.stored import read_regular
from bert_dp.record.models import FailureKind, StoredFile, StoredModel

LATE = 1.05  # ready times over the backward pass: two clocks
SCHEMA_VERSION = record.SCHEMA_VERSION

Count = Annotated[int, Field(gt=0, le=10**9)]
Seconds = Annotated[float, Field(ge=1e-9, le=1e9)]
Bytes = Annotated[int | float, Field(ge=1, le=1e18)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]
Tokens = Annotated[int, Field(ge=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Point = Annotated[tuple[int | float, float | None], Field(strict=False)]
T = TypeVar("T")
OrNone = BeforeValidator(lambda value: [] if value is None else value)
Listed = Annotated[list[T], OrNone]
"""A list; null is an empty one."""


F = TypeVar("F", bound=StoredFile)


def read(path: Path, model: type[F]) -> F:
    """The file at `path`. Raises ConfigError, one line, when it is absent, foreign, damaged, too large or too
    deep."""
    return parse(load(path, model.remedy), model, str(path))


def load(path: Path, remedy: str) -> Any:
    """The JSON value at `path`. Raises ConfigError, one line."""
    try:
        return record.parse_json(read_regular(path, record.MAX_JSON_BYTES))
    except OSError as error:
        raise ConfigError([f"{path} cannot be read ({error.strerror}); {remedy}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON ({error}); {remedy}"]) from None


def find(path: Path, model: type[F]) -> F | None:
    """The same; None when it is absent or damaged, where both mean that it is to be written anew."""
    try:
        return read(path, model)
    except ConfigError:
        return None


def parse(data: Any, model: type[F], name: str) -> F:
    """What a file called `name` holds. Raises ConfigError, one line: the file, the key, what is wrong, what
    to do."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise ConfigError([f"{name} is damaged: {_problem(dict(problems[0]))}{more}; {model.remedy}"]) from None


def _problem(error: dict[str, Any]) -> str:
    """Where, what, and the value; a check of several fields names its own in the message."""
    place = ".".join(str(part) for part in error["loc"])
    text = plain_message(str(error["msg"]))
    if error["type"] not in ("missing", "value_error"):
        text += f", not {reprlib.repr(error['input'])}"
    return f"{place}: {text}" if place else text


def plain(part: StoredModel) -> dict[str, Any]:
    """As JSON values, in the order of the fields."""
    return part.model_dump(mode="json")


def write(path: Path, file: StoredFile) -> None:
    """Atomic: a reader sees the old file or the whole new one. Raises OSError."""
    record.write_json(path, plain(file))


def to_json(file: StoredFile) -> str:
    """What `--json` prints."""
    return json.dumps(plain(file), indent=1) + "\n"


# --- scaling.json

Mode = Literal["weak", "strong"]
CellKind = Literal["run", "ceiling", "synthetic"]
CellStatus = Literal["ok", "oom", "failed", "pending"]
VerdictKind = Literal[
    "out_of_memory",
    "failed",
    "no_baseline",
    "one_repeat",
    "not_measurable",
    "above_baseline",
    "scales",
    "intervals_overlap",
    "no_single_cause",
    "loader_bound",
    "straggler",
    "hardware_ceiling",
    "communication_bound",
    "launch_bound",
    "fastest",
]
VERDICTS: Mapping[VerdictKind, str] = {
    "out_of_memory": "out of memory",
    "failed": "failed",
    "no_baseline": "no baseline",
    "one_repeat": "no claim: one repeat",
    "not_measurable": "no claim: not measurable",
    "above_baseline": "above 100 %",
    "scales": "scales",
    "intervals_overlap": "no claim: intervals overlap",
    "no_single_cause": "no single cause",
    "loader_bound": "loader-bound",
    "straggler": "straggler",
    "hardware_ceiling": "hardware ceiling",
    "communication_bound": "communication-bound",
    "launch_bound": "launch-bound",
    "fastest": "fastest",
}
"""How the words of a verdict begin; what it is of may follow."""


class ScalingSettings(StoredModel):
    """What was asked for, and the model that was measured."""

    steps: int | None = None
    """Timed optimizer steps of a run."""
    warm_up: int | None = None
    """Steps before them."""
    repeats: int | None = None
    launcher: str | None = None
    engines: Listed[str] = []
    gpus: Listed[int] = []
    micro_batch: int | None = None
    accumulation: Count | None = None
    """Of the weak mode."""
    global_batch: int | None = None
    """Of the strong mode."""
    sequence_length: int | None = None
    parameters: int | None = None
    flops_per_token: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Forward and backward."""
    precision: str | None = None
    compiled: bool | None = None
    device: str | None = None
    optimizer: str | None = None
    model: str | None = None
    """In words."""


class MatmulRate(StoredModel):
    m: int
    n: int
    k: int
    flops: float
    """FLOP/s of [m, k] x [k, n]."""


class Peak(StoredModel):
    """FLOP/s of one device: by its data sheet, and the best of the measured shapes."""

    datasheet_flops: float | None = None
    matmul_flops: Positive | None = None
    matmul_precision: str | None = None
    """Of `matmul_flops`."""
    shapes: Listed[MatmulRate] = []


class PeakFile(StoredFile):
    """peak.json: what bert_dp.measure.peak measured."""

    remedy: ClassVar[str] = "remove it, and `bert-dp scale` measures it again"
    device: str | None = None
    precision: str | None = None
    matmul_flops: Positive
    """FLOP/s, the best of the shapes."""
    shapes: Listed[MatmulRate] = []


class MatmulRatio(StoredFile):
    """matmul_ratio.json in the cache: how fast a CPU multiplies bf16 beside fp32, by `bert-dp doctor`."""

    remedy: ClassVar[str] = "remove it, and `bert-dp doctor` measures it again"
    date: str
    cpu: list[str]
    """Its model and its bf16 units."""
    torch: str
    shape: Annotated[list[int], Field(min_length=3, max_length=3)]
    """M, N, K of [M, K] x [K, N]."""
    fp32_flops: Positive
    """FLOP/s, all cores."""
    bf16_flops: Positive

    @property
    def ratio(self) -> float:
        return self.bf16_flops / self.fp32_flops


class RepeatTime(StoredModel):
    median: Seconds | None = None
    p95: Seconds | None = None


class Repeat(StoredModel):
    """One run of a cell."""

    run: str
    """Its directory."""
    steps: int
    steps_per_s: float
    tokens_per_s: float
    step_time_s: RepeatTime


class StepTime(StoredModel):
    """Seconds of a step over all repeats."""

    median: Seconds | None = None
    p95: Seconds | None = None
    mean: Seconds | None = None
    ci95: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None
    """Of the mean; null of one repeat. Two repeats that differ much leave an end that is no time at all."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if self.ci95 is not None and self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95: {self.ci95} does not ascend")
        return self

    @property
    def typical(self) -> float | None:
        """The mean, which is what the interval is of; the median of a file that has none."""
        return self.mean if self.mean is not None else self.median


class SplitTime(StoredModel):
    """Seconds of a mean step, mean over ranks."""

    data: float
    forward_backward: float
    exposed_comm: float | None = None
    """null without a ceiling: then it stands in forward_backward and optimizer."""
    optimizer: float
    other: float


class FiveNumbers(StoredModel):
    """Of the seconds of all steps."""

    min: float
    q1: float
    median: float
    q3: float
    max: float


class RankTimes(StoredModel):
    """One rank over all repeats."""

    rank: int
    step_time_s: FiveNumbers
    own_work_s: FiveNumbers | None = None
    """Up to the last backward pass, before any reduction."""
    peak_memory_gib: float


class LossCurve(StoredModel):
    """Of the first repeat."""

    final: float | None = None
    curve: list[Point] = []
    """[[tokens, nats], ...]"""


class GridCell(StoredModel):
    """One configuration of the grid."""

    id: str
    mode: Mode = "weak"
    kind: CellKind = "run"
    engine: str
    world_size: Count
    tensor: Count = 1
    micro_batch: Count
    accumulation: Count
    global_batch: Count
    of: str | None = None
    """The run that a ceiling or a synthetic cell belongs to."""


class Cell(GridCell):
    """What was measured of it; one that did not run to its end has no figures."""

    launcher: str | None = None
    status: CellStatus
    failure_kind: FailureKind | None = None
    """Of one that is oom or failed."""
    cause: str | None = None
    repeats: Listed[Repeat] = []
    steps_per_s: float | None = None
    global_steps_per_s: float | None = None
    """Micro batches, summed over all replicas."""
    samples_per_s: float | None = None
    tokens_per_s: Positive | None = None
    tokens_per_s_per_gpu: float | None = None
    step_time_s: StepTime | None = None
    split_s: SplitTime | None = None
    data_wait_fraction: Share | None = None
    data_wait_fraction_ci95: Interval | None = None
    loader_fraction: float | None = None
    """Share of a step that the synthetic twin saves."""
    loader_fraction_ci95: Interval | None = None
    speedup: float | None = None
    """Throughput over that of `single` on one rank."""
    efficiency: Positive | None = None
    efficiency_ci95: Interval | None = None
    efficiency_ddp1: float | None = None
    """Against ddp on one rank."""
    efficiency_ddp1_ci95: Interval | None = None
    ceiling_tokens_per_s: float | None = None
    ceiling_efficiency: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """What as many independent copies reach of as many lone ranks."""
    ceiling_efficiency_ci95: Interval | None = None
    communication_efficiency: float | None = None
    """Throughput over that of the ceiling."""
    communication_efficiency_ci95: Interval | None = None
    exposed_comm_fraction: float | None = None
    """By the ceiling."""
    exposed_comm_ddp_fraction: float | None = None
    """By DDP's own counters."""
    straggler_ratio: float | None = None
    """Own work of the slowest rank over the median of the others', paired within a repeat; the geometric mean
    over the repeats."""
    straggler_ratio_ci95: Interval | None = None
    straggler_rank: int | None = None
    """The slowest rank, where the whole interval is above 1.2 and it is the slowest of every repeat."""
    ranks: Listed[RankTimes] = []
    peak_memory_gib: float | None = None
    """Of the rank with most."""
    energy_j: float | None = None
    """Joules of a run's real steps, all ranks."""
    energy_j_per_mtoken: float | None = None
    """Per million tokens."""
    mfu: float | None = None
    """Model FLOP/s over the data sheet's."""
    mamfu: float | None = None
    """Over the measured matmul rate."""
    launch_fraction: float | None = None
    """Host time to enqueue a step over the step; null on a CPU."""
    launch_fraction_ci95: Interval | None = None
    loss: LossCurve | None = None
    loss_agrees: bool | None = None
    loss_deviation: float | None = None
    """Greatest relative difference from one rank's."""
    skipped_steps: int | None = None
    flags: Listed[str] = []
    """What a reader must know before quoting the cell."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.world_size % self.tensor:
            raise ValueError(f"tensor: {self.tensor} does not divide world_size {self.world_size}")
        return self

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of the whole job."""
        return self.step_time_s.typical if self.step_time_s else None


class LinkPoint(StoredModel):
    """One size of an all-reduce."""

    bytes: Bytes
    seconds: Seconds
    busbw_gb_s: float | None = None
    algbw_gb_s: float | None = None
    repeats: int | None = None
    bucket: bool = False
    """Whether DDP reduces a bucket of this size."""


class Link(StoredFile):
    """links-N.json, and one of `links` of scaling.json: the all-reduce over some number of ranks."""

    remedy: ClassVar[str] = "remove it, and `bert-dp scale` measures it again"
    world_size: Annotated[int, Field(ge=2, le=10**9)]
    backend: str | None = None
    points: list[LinkPoint]


class Gradient(StoredModel):
    name: str | None = None
    bytes: Bytes
    ready_s: Share
    """From the begin of the backward pass."""


class Profile(StoredFile):
    """profile.json, and `profile` of scaling.json: one rank's micro batch (bert_dp/measure/profiling.py)."""

    remedy: ClassVar[str] = "remove it, and `bert-dp scale` measures it again"
    device: str = "GPU"
    precision: str | None = None
    compiled: bool | None = None
    engine: str | None = None
    micro_batch: Count
    sequence_length: Count
    parameters: Count | None = None
    num_layers: Count | None = None
    hidden_size: Count | None = None
    num_heads: Count | None = None
    forward_s: Seconds | None = None
    backward_s: Seconds
    optimizer_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    micro_s: Seconds | None = None
    gradients: list[Gradient] = Field(min_length=1)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.micro_s is None and self.forward_s is None:
            raise ValueError("micro_s: missing, and forward_s too")
        if self.backward_s > self.whole_s:
            raise ValueError(f"backward_s: {self.backward_s:g} is above micro_s, {self.whole_s:g}")
        for gradient in self.gradients:
            if gradient.ready_s > LATE * self.backward_s:
                raise ValueError(
                    f"ready_s of {gradient.name}: {gradient.ready_s:g} is above backward_s, "
                    f"{self.backward_s:g}"
                )
        if not 1 <= self.width <= 8:
            raise ValueError(f"parameters: {self.parameters} for gradients of {self.size:g} bytes")
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} does not divide hidden_size {self.hidden_size}")
        return self

    @property
    def whole_s(self) -> float:
        """Of a micro batch."""
        return self.micro_s if self.micro_s is not None else self.backward_s + (self.forward_s or 0.0)

    @property
    def size(self) -> float:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def width(self) -> float:
        """Bytes of a number."""
        return self.size / self.parameters if self.parameters else 4.0


class Verdict(StoredModel):
    """What a cell loses most, or which engine is the fastest."""

    cell: str
    kind: VerdictKind
    verdict: str
    """The kind in words."""
    evidence: str
    next: str
    """What to do."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_program(cls, data: Any) -> Any:
        if isinstance(data, dict) and "kind" not in data:
            text = str(data.get("verdict"))
            kinds = (kind for kind, words in VERDICTS.items() if text.startswith(words))
            return {**data, "kind": next(kinds, "no_single_cause")}
        return data


class PredictedSplit(StoredModel):
    """Seconds of a predicted step; the parts sum to it."""

    forward_backward: float
    optimizer: float
    straggler: float
    """Waiting for the slowest rank."""
    exposed_comm: float


class Lever(StoredModel):
    lever: str
    gain: float
    """Tokens/s with it over tokens/s now, less one."""
    tokens_per_s: float
    bound: bool = False
    """Whether it is no setting, but says what is lost there."""


class PredictedRow(StoredModel):
    """N GPUs."""

    world_size: int
    tensor: int = 1
    accumulation: int
    global_batch: int
    step_time_s: float
    split_s: PredictedSplit | None = None
    exposed_comm_fraction: float
    tokens_per_s: float
    samples_per_s: float | None = None
    speedup: float
    efficiency: float
    mfu: float | None = None
    state_gib: float | None = None
    """Weights, gradients and optimizer of a rank."""
    fits: bool | None = None
    """Whether the device holds them; null: its memory is not known."""
    levers: list[Lever] = []
    """Best first."""


class ComparedCell(StoredModel):
    """A measured cell beside its prediction."""

    cell: str
    ranks: int
    predicted_step_s: float
    measured_step_s: float | None = None
    ci95: Interval | None = None
    """Of the measured step, seconds."""
    within: bool | None = None
    """Whether the prediction lies in it."""
    predicted_tokens_per_s: float | None = None
    measured_tokens_per_s: float | None = None
    predicted_efficiency: float
    measured_efficiency: float | None = None
    measured_efficiency_ci95: Interval | None = None
    repeats: int = 0
    """Of the measurement."""


class Prediction(StoredFile):
    """`prediction` of scaling.json, and what `plan scaling --json` prints."""

    remedy: ClassVar[str] = "run `bert-dp plan scaling` again"
    schema_version: int = SCHEMA_VERSION
    engine: str
    warnings: list[str] = []
    assumptions: list[str] = []
    rows: list[PredictedRow]
    measured: list[ComparedCell] = []


def _ids(value: Any) -> Any:
    """An older program wrote them as one text."""
    return value.split(", ") if isinstance(value, str) else value


class Scaling(StoredFile):
    """scaling.json: what `bert-dp scale` measured."""

    remedy: ClassVar[str] = "`bert-dp scale` with the same --out writes it anew from its runs"
    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "partial"] = "complete"
    environment: dict[str, Any] = {}
    """The machine, as environment.json has it."""
    config_hash: str | None = None
    data_hash: str | None = None
    command: Listed[str] = []
    mode: Literal["weak", "strong", "both"] | None = None
    settings: Annotated[ScalingSettings, BeforeValidator(lambda value: {} if value is None else value)] = (
        ScalingSettings()
    )
    baseline: str | None = "single"
    baselines: dict[str, Annotated[list[str], BeforeValidator(_ids)]] = {}
    """Engine -> ids of the cells that the others are compared with, one of each mode."""
    peak: Peak = Peak()
    cells: Listed[Cell] = []
    links: Listed[Link] = []
    profile: Profile | None = None
    prediction: Prediction | None = None
    verdicts: Listed[Verdict] = []

    def alone(self) -> Cell | None:
        """The run of one rank without a process group; of several the one with the settings' accumulation."""
        runs = [
            cell
            for cell in self.cells
            if (cell.engine, cell.kind, cell.status, cell.world_size) == ("single", "run", "ok", 1)
            and cell.step_s is not None
        ]
        same = (cell for cell in runs if cell.accumulation == self.settings.accumulation)
        return next(same, runs[0] if runs else None)


# --- what a measurement of several runs tells, whatever it is of

MeasureStatus = Literal["complete", "partial", "failed"]


class Measurement(StoredFile):
    """What every verb tells that measures by several runs in one directory."""

    schema_version: int = SCHEMA_VERSION
    status: MeasureStatus = "complete"
    why: str | None = None
    """Why it failed."""
    date: str | None = None
    seconds: float | None = None
    """All trials took, in every call."""
    environment: dict[str, Any] = {}
    """The machine, as environment.json has it."""
    config_hash: str | None = None
    config: dict[str, Any] = {}
    """The resolved configuration of what was measured."""
    data_hash: str | None = None
    command: Listed[str] = []
    ranks: int | None = None
    """Of a trial."""


# --- tune.json


class TuneFile(Measurement):
    """What both searches tell."""

    remedy: ClassVar[str] = "the same `bert-dp tune` command with the same --out writes it anew"


# --- what is measured of a run after training


class PredictedTokens(StoredModel):
    """Tokens of a text that a run predicted, of all or of those that it saw in one way."""

    seen: Literal["all", "mask", "random", "original"]
    """As what: <mask>, a random token, or what it is."""
    tokens: Tokens
    documents: Tokens
    loss: float | None
    """Mean cross entropy, nats per predicted token."""
    loss_se: float | None
    """Standard error over documents, each drawn as a whole; null of one document."""
    accuracy: float | None
    """Share whose likeliest token is right."""


class HiddenWords(StoredModel):
    """Whole words that a run predicted, every token of a word hidden at once."""

    rate: float
    """Of the words, each drawn by (document, word): the same words for every vocabulary."""
    words: Tokens
    words_without_token: Tokens
    """Among them, of which the tokenizer keeps nothing: their bytes cost no bit."""
    bytes: Tokens
    """UTF-8, of the words as they stand in the text."""
    documents: Tokens
    tokens: Tokens
    unknown_tokens: Tokens
    nats: float
    bits_per_byte: float | None
    bits_per_byte_se: float | None


class TextLoss(StoredFile):
    """What `eval mlm --json` prints."""

    remedy: ClassVar[str] = "run `bert-dp eval mlm` again"
    schema_version: int = SCHEMA_VERSION
    run: str
    step: int
    """Of the checkpoint, optimizer steps."""
    tokenizer: str | None
    """SHA-256 of tokenizer.json."""
    vocab_size: int
    sequence_length: int
    device: str
    precision: str
    sources: list[dict[str, Any]]
    """name, bytes, sha256 (null with --max-bytes: no file is read whole) and documents read of each."""
    documents: Tokens
    documents_without_tokens: Tokens
    """Documents of which the tokenizer keeps nothing; only their separators are evaluated."""
    first_without_tokens: int | None
    """Index of the first of them, from 0 over all sources; null where there is none."""
    tokens: Tokens
    """With a separator after each document."""
    words: Tokens
    """Runs of characters between white space."""
    bytes: Tokens
    """UTF-8, of the documents."""
    mask_rate: float
    predicted: list[PredictedTokens]
    hidden: HiddenWords


# --- export check


class ExportBatch(StoredModel):
    """One batch, computed by a run and by what was exported of it."""

    batch: int
    length: int
    outputs: int
    """Numbers that were compared, of real tokens."""
    difference: float
    """The largest, over the largest output of the run where that is above 1."""
    top1: float | None
    """Share of the positions or examples with the same largest output; null of hidden states."""


class ExportCheck(StoredFile):
    """What `export check --json` prints."""

    remedy: ClassVar[str] = "run `bert-dp export check` again"
    schema_version: int = SCHEMA_VERSION
    ok: bool
    format: str
    kind: str
    precision: str
    architecture: str | None
    checkpoint: str
    tolerance: float | None
    """Of `difference`; null where another precision is measured and not judged."""
    rows: list[ExportBatch]
    parameters: int | None
    """Of the model as it was loaded; null where the format does not tell."""
    stored_parameters: int | None
    """In model.safetensors."""
    run_parameters: int
    not_loaded: list[str]
    """Parameters of the class that are not in the file, and the other way round."""
    again: float
    """Largest difference after it was saved and loaded again."""
    versions: dict[str, str]
    """Of Python and the packages that loaded it."""


# --- what an --out directory was begun with


class PlanFile(StoredFile):
    """What a directory that is gone on with was begun with."""

    remedy: ClassVar[str] = "choose another directory"
    schema_version: int = SCHEMA_VERSION
    config_hash: str
    config: dict[str, Any] = {}
    machine: dict[str, Any] | None = None
    """What must be the same for figures to compare."""


class GridFile(PlanFile):
    """grid.json of `scale`."""

    settings: dict[str, Any]
    cells: list[dict[str, Any]]
    order: list[list[Any]] = []
    """[cell id, repeat] as they run."""


class TimedPlanFile(PlanFile):
    seconds: float = 0.0
    """Of every call so far."""


class TrialFile(StoredFile):
    """trial.json: that a trial has ended, and how long it took."""

    remedy: ClassVar[str] = "remove its directory, and the trial runs again"
    seconds: float = 0.0
