"""The files that only verbs write, as models: the only schema, the only reader and the only writer of them.

A key that is not known is ignored and one that is missing has its default, so older files open; null is what
was not measured. Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares
and efficiencies are fractions, unless a name says otherwise. An interval is [low, high], of 95 %.
"""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import json
import math
import reprlib
import statistics
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from bert_dp import record
from bert_dp.config import ConfigError, plain_message
from bert_dp.config.stored import read_regular
from bert_dp.cost import GIB
from bert_dp.record.models import FailureKind, HeldOut, NoiseScale, StoredFile, StoredModel

SCHEMA_VERSION = record.SCHEMA_VERSION

Count = Annotated[int, Field(gt=0, le=10**9)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Point = Annotated[tuple[int | float, float | None], Field(strict=False)]
CandidateFacts = Annotated[tuple[str, float, float], Field(strict=False)]
"""[optimizer, weight decay, learning rate]"""

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


# --- doctor


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

SizeStatus = Literal["ok", "oom", "failed", "over", "thrash"]
"""over: its peak is above the limit; thrash: the allocator had to free what it kept."""
TrialStatus = Literal["ok", "diverged", "oom", "failed"]
Side = Literal["high", "low"]


class TuneFile(Measurement):
    """What both searches tell."""

    remedy: ClassVar[str] = "the same `bert-dp tune` command with the same --out writes it anew"


class MemoryLineFile(StoredFile):
    """memory_line.json: what bert_dp.measure.memory_line counted at two sizes."""

    remedy: ClassVar[str] = "remove it, and `bert-dp tune batch` counts again"
    source: str | None = None
    """fake tensors | formula"""
    why: str | None = None
    """Why the formula."""
    state: str | None = None
    """Where weights, gradients and optimizer come from."""
    precision: str | None = None
    compiled: bool | None = None
    ranks: int | None = None
    sizes: list[int] = []
    """Micro batches."""
    peak_bytes: list[int | float] = []
    """At each of them."""
    intercept_bytes: float
    bytes_per_sequence: Positive
    parts: dict[str, Interval] = {}
    """Name -> [intercept, per sequence], bytes."""

    def gib(self, micro_batch: float) -> float:
        """What it counts at this size."""
        return (self.intercept_bytes + self.bytes_per_sequence * micro_batch) / GIB


class TriedSize(StoredModel):
    """The memory of one real trial."""

    micro_batch: int
    status: SizeStatus
    predicted_gib: float | None = None
    measured_gib: float | None = None
    """Of the rank with most."""
    rank: int | None = None
    """Which that is."""


class BatchMemory(StoredModel):
    """What a rank may use and what it was seen to use."""

    limit_gib: float | None = None
    """What a rank may use; null: not known."""
    limit_of: str | None = None
    spare: float | None = None
    """Share of it that stays free."""
    line: MemoryLineFile | None = None
    constant_gib: float | None = None
    """What the line does not count: the program and its libraries."""
    predicted_limit: int | None = None
    """The largest micro batch that fits by the line."""
    verified: int | None = None
    """The largest that a real step has shown to fit."""
    tried: list[TriedSize] = []
    parts_gib: dict[str, float] | None = None
    """Of the peak at the choice."""

    def predicted_gib(self, micro_batch: float) -> float:
        """Peak of a rank at this size, by the line and what it does not count."""
        assert self.line is not None
        return (self.constant_gib or 0.0) + self.line.gib(micro_batch)

    def parts_at(self, micro_batch: float) -> dict[str, float]:
        """The parts of that peak, GiB."""
        assert self.line is not None
        counted = {
            name: (start + each * micro_batch) / GIB for name, (start, each) in self.line.parts.items()
        }
        return {"program and libraries": self.constant_gib or 0.0, **counted}

    def largest_size(self) -> int:
        """The largest micro batch that leaves `spare` of the limit free, by the line; 0: none."""
        assert self.line is not None
        assert self.limit_gib is not None
        room_gib = (1 - (self.spare or 0.0)) * self.limit_gib - self.predicted_gib(0)
        return max(0, int(room_gib * GIB / self.line.bytes_per_sequence))


class TimedRun(StoredModel):
    """The timed steps of one run."""

    name: str
    step_s: Annotated[list[float], Field(min_length=1)]
    forward_backward_s: Annotated[list[float], Field(min_length=1)]
    peak_gib: Annotated[list[float], Field(min_length=1)]
    """Of each rank."""
    exposed_s: float = 0.0
    """Of a step's forward and backward: the reduction that no backward pass covered, by DDP's own median; 0
    where an engine does not tell."""
    data_wait_s: list[float] = []
    """Of each step, as far as nothing else ran; [] in the files of older versions."""
    alloc_retries: int | None = None
    """How often the GPU's allocator had to free what it kept, after the warm-up."""


class SizeResult(StoredModel):
    """One micro batch. Rates are of the declared global batch."""

    micro_batch: int
    accumulation: int
    trial_accumulation: int | None = None
    """Of its trials, whose step may take fewer sequences."""
    status: SizeStatus
    failure_kind: FailureKind | None = None
    """Of one that is oom or failed."""
    why: str | None = None
    samples_per_s: float | None = None
    samples_per_s_ci95: Interval | None = None
    relative: float | None = None
    """Over the best."""
    predicted_gib: float | None = None
    measured_gib: float | None = None
    runs: list[TimedRun] = []


class Drift(StoredModel):
    """The size that ran first, against its run at the end of the first round; sequences/s."""

    micro_batch: int
    first: float
    last: float
    ratio: float


class BatchChoice(StoredModel):
    """The micro batch that was chosen, and by what. Rates are sequences/s of the declared global batch."""

    micro_batch: Count
    accumulation: int | None = None
    best_micro_batch: int
    """The fastest."""
    samples_per_s: Positive
    best_samples_per_s: float
    share_of_best: float
    flat: bool = False
    """Whether every size is as fast."""
    not_settled: list[int] = []
    """Smaller sizes that may be as fast."""
    limited_by: str | None = None
    """memory | global batch | budget"""
    why: str | None = None


class NoisePair(StoredModel):
    """Squared gradient norms of steps up to `step` at two batches (sequences)."""

    step: int
    small_batch: int
    big_batch: int
    small_sq: list[float]
    big_sq: list[float]


class Noise(NoiseScale):
    """The noise scale of one trial."""

    of_steps: int | None = None
    """Steps of the trial."""
    init_from: str | None = None
    pairs: list[NoisePair] = []


class GoodputPoint(StoredModel):
    """One global batch."""

    global_batch: int
    samples_per_s: float
    efficiency: float
    """What a sequence is worth, of one in the declared batch."""
    goodput: float
    """Worth of a second: samples/s x efficiency."""
    low: float
    high: float
    """At the ends of the noise scale's interval."""


class Goodput(StoredModel):
    points: list[GoodputPoint]
    recommended: int
    """Global batch, sequences."""
    recommended_interval: list[int]
    gain: float
    """Over the declared one, less one."""
    declared: int
    at_edge: bool = False


class TuneBatch(TuneFile):
    """tune.json of `tune batch`."""

    kind: Literal["batch"] = "batch"
    cached: bool = False
    budget_s: float | None = None
    dp: int | None = None
    tensor: int | None = None
    engine: str | None = None
    launcher: str | None = None
    device: str | None = None
    """cpu | cuda"""
    global_batch: int | None = None
    sequence_length: int | None = None
    trials: int | None = None
    memory: BatchMemory | None = None
    sizes: list[SizeResult] | None = None
    choice: BatchChoice | None = None
    noise: Noise | None = None
    goodput: Goodput | None = None
    order: list[int] | None = None
    """Micro batches as they ran."""
    trial_samples: int | None = None
    """Sequences of a trial's step."""
    drift: Drift | None = None


class LrOptions(StoredModel):
    """What was asked for."""

    ranks: int | None = None
    rates: int = 5
    seeds: int = 3
    tokens: int | None = None
    """Of a whole run."""
    budget_s: float | None = None
    launcher: str = "torchrun"


class LrSettings(LrOptions):
    """What was asked for, and what was made of it."""

    optimizers: list[str] = []
    weight_decays: list[float] = []
    tokens_why: str | None = None
    seeds_used: list[int] = []


class RangeTest(StoredModel):
    """A run whose rate rises until it breaks."""

    optimizer: str | None = None
    points: list[Point]
    """[[rate, loss or null], ...]"""
    edge: float | None = None
    """The lowest rate at which it broke; null: none."""
    why: str | None = None
    trial: str | None = None


class LrTrial(StoredModel):
    """One complete run."""

    trial: str
    lr: float
    weight_decay: float
    optimizer: str
    seed: int
    status: TrialStatus
    failure_kind: FailureKind | None = None
    """Of one whose run failed."""
    cause: str | None = None
    heldout_loss: float | None = None
    heldout: HeldOut | None = None
    """`heldout_loss` with its denominator."""
    tokens: int
    seconds: float | None = None
    curve: list[Point] = []
    """[[tokens, held-out loss], ...]"""

    @property
    def score(self) -> float:
        """Nats; infinite for what cannot be chosen."""
        return self.heldout_loss if self.status == "ok" and self.heldout_loss is not None else math.inf


class Rung(StoredModel):
    """Trials of one length."""

    tokens: int
    seeds: list[int] = []
    last: bool = False
    trials: list[LrTrial] = []
    kept: list[CandidateFacts] = []

    @property
    def rates(self) -> list[float]:
        """Ascending."""
        return sorted({trial.lr for trial in self.trials})

    def scores(self, lr: float) -> list[float]:
        """Of its trials here."""
        return [trial.score for trial in self.trials if trial.lr == lr]

    def mean(self, lr: float) -> float:
        """Mean score over its trials here: infinite when one of them is, not a number when there is none."""
        scores = self.scores(lr)
        return statistics.fmean(scores) if scores else math.nan


class LrChoice(StoredModel):
    """The rate that was chosen, and by what."""

    optimizer: str
    weight_decay: float
    lr: Positive
    heldout_loss: float
    """Mean over the seeds."""
    band: Interval
    """Least and greatest of the seeds."""
    sd: float | None = None
    """Standard deviation of a seed; null of one seed."""
    seeds: int
    at_edge: bool = False
    edge_side: Side | None = None
    """Where no worse rate was measured."""
    tied: list[CandidateFacts] = []
    why: str | None = None


class LrCost(StoredModel):
    tokens: int
    grid_tokens: int
    """Of a grid of the first rung's candidates with every seed."""
    trials: int


class TransferRule(StoredModel):
    """The rate at the other batch by one published rule."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)
    rule: str
    for_: str = Field(alias="for")
    """Optimizers."""
    lr: float
    source: str
    equation: str
    beta1: float | None = None
    beta2: float | None = None
    """null: the rule does not set it, or it would be below 0."""
    eps: float | None = None


class Transfer(StoredFile):
    """A rate carried from one global batch to another."""

    from_batch: int
    to_batch: int
    ratio: float
    lr: float
    lr_source: str
    optimizer: str
    rules: list[TransferRule]
    ours: str | None = None
    """The rule that the configuration follows."""


class TuneLr(TuneFile):
    """tune.json of `tune lr`."""

    kind: Literal["lr"] = "lr"
    settings: LrSettings = LrSettings()
    at_a_time: int | None = None
    """Trials."""
    unigram_entropy_nats: float | None = None
    range_test: RangeTest | None = None
    rungs: list[Rung] = []
    choice: LrChoice | None = None
    cost: LrCost | None = None
    transfer: Transfer | None = None

    @property
    def trials(self) -> list[LrTrial]:
        """Of every rung."""
        return [trial for rung in self.rungs for trial in rung.trials]


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


class BatchPlanFile(PlanFile):
    """plan.json of `tune batch`."""

    kind: Literal["batch"] = "batch"
    ranks: int
    sizes: list[int]
    budget_s: float
    memory: float | None = None
    launcher: str


class TimedPlanFile(PlanFile):
    seconds: float = 0.0
    """Of every call so far."""


class LrPlanFile(TimedPlanFile):
    """search.json of `tune lr`; `tokens` is settled once, so that going on has the same length."""

    kind: Literal["lr"] = "lr"
    settings: dict[str, Any]
    tokens: int | None = None
    tokens_why: str | None = None


class TrialFile(StoredFile):
    """trial.json: that a trial has ended, and how long it took."""

    remedy: ClassVar[str] = "remove its directory, and the trial runs again"
    seconds: float = 0.0


# --- a service that a run is also sent to


class LoggerRun(StoredFile):
    """NAME/run.json in a run directory: the run of the service NAME that its records are sent to."""

    remedy: ClassVar[str] = "remove its directory, and all is sent again as a new run"
    id: str
    where: str
    """A path or an address at which it can be seen."""
    destination: str = ""
    """What the environment said of it; a run of another destination is a new one."""
    sent: dict[str, int] = {}
    """Record file -> the last step that was sent."""
