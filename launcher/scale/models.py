"""Define pydantic models for the files that `bert-dp scale` writes.

Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares and efficiencies
are fractions. Intervals are 95 % confidence intervals, [low, high]. null means that a value was not measured.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bert_dp.files.models import StoredFile, StoredModel
from launcher.report.formats import format_interval, format_step_time
from launcher.report.page import Quantity, Ratio, Table, TableCell, table
from launcher.results import Count, Interval, PlanFile, Positive

MEASURE_AGAIN = "remove the file and rerun `bert-dp scale` to repeat the measurement"

Seconds = Annotated[float, Field(ge=1e-9, le=1e9)]
Bytes = Annotated[int | float, Field(ge=1, le=1e18)]
Share = Annotated[float, Field(ge=0)]
Mode = Literal["weak", "strong"]
CellKind = Literal["run", "ceiling"]
CellStatus = Literal["ok", "oom", "failed", "pending"]
LossKind = Literal["loader_bound", "straggler", "hardware_ceiling", "communication_bound", "launch_bound"]
EndKind = Literal["out_of_memory", "failed", "no_baseline", "above_baseline", "scales", "fastest"]
OpenKind = Literal["one_repeat", "not_measurable", "intervals_overlap", "no_single_cause"]  # inconclusive
DiagnosisKind = Literal[LossKind, EndKind, OpenKind]


class GridCell(StoredModel):
    """One cell of the grid: a mode, an engine, a number of ranks and the resulting batch."""

    id: str
    mode: Mode = "weak"
    kind: CellKind = "run"
    engine: str
    world_size: Count
    tensor: Count = 1
    micro_batch: Count
    accumulation: Count
    global_batch: Count


class GridFile(PlanFile):
    """Contents of grid.json: the cells of a benchmark and the order of its runs."""

    settings: dict[str, Any]
    cells: list[dict[str, Any]]
    order: list[list[Any]] = []  # [cell id, repeat] of each run


class LinkPoint(StoredModel):
    """Time of an all-reduce at one message size."""

    bytes: Bytes
    seconds: Seconds
    busbw_gb_s: float | None = None


class MeasuredLink(StoredFile):
    """Times of all-reduces over N ranks, stored in links-N.json and under `links` in scaling.json."""

    hint: ClassVar[str] = MEASURE_AGAIN
    world_size: Annotated[int, Field(ge=2, le=10**9)]
    backend: str | None = None
    points: list[LinkPoint]


class MeasuredGradient(StoredModel):
    """One gradient of a profiled backward pass."""

    name: str | None = None
    bytes: Bytes
    ready_s: Share  # time since the start of the backward pass


class StepProfile(StoredFile):
    """Profile of one rank's step, stored in profile.json and under `profile` in scaling.json."""

    hint: ClassVar[str] = MEASURE_AGAIN
    device: str = "GPU"
    precision: str = "fp32"
    micro_batch: Count
    sequence_length: Count
    parameters: Count | None = None
    num_layers: Count
    hidden_size: Count
    num_heads: Count = 1
    micro_s: Seconds  # duration of the forward and backward passes
    backward_s: Seconds
    optimizer_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    gradients: list[MeasuredGradient] = Field(min_length=1)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.backward_s > self.micro_s:
            raise ValueError(f"backward_s: {self.backward_s:g} exceeds micro_s, {self.micro_s:g}")
        return self

    @property
    def size(self) -> float:
        """Return the total size of the gradients in bytes."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def width(self) -> float:
        """Return the bytes per gradient element."""
        return self.size / self.parameters if self.parameters else 4.0


class Peak(StoredFile):
    """Peak FLOP/s of one rank's device, stored in peak.json and under `peak` in scaling.json."""

    hint: ClassVar[str] = MEASURE_AGAIN
    precision: str | None = None  # precision of matmul_flops
    matmul_flops: Positive | None = None  # highest rate over several matrix shapes
    datasheet_flops: float | None = None


class ScalingSettings(StoredModel):
    """Options of the benchmark, and properties of the measured model."""

    steps: int | None = None  # timed optimizer steps per run
    warm_up: int | None = None  # untimed optimizer steps before the timed ones
    repeats: int | None = None
    micro_batch: int | None = None
    accumulation: Count | None = None  # in weak mode only
    global_batch: int | None = None  # in strong mode only
    sequence_length: int | None = None
    parameters: int | None = None
    flops_per_token: Annotated[float, Field(gt=0, le=1e18)] | None = None  # includes the backward pass
    precision: str | None = None
    device: str | None = None
    model: str | None = None


class StepTime(StoredModel):
    """Seconds per step, in one repeat or over all repeats."""

    median: Seconds | None = None
    p95: Seconds | None = None
    mean: Seconds | None = None
    ci95: Interval | None = None  # interval of the mean; null for one repeat


class RepeatMeasurement(StoredModel):
    """Figures for one repeat of a cell. `run`: the run directory of the repeat."""

    run: str
    steps: int
    steps_per_s: float
    tokens_per_s: float
    step_time_s: StepTime


class SplitTime(StoredModel):
    """Parts of the mean step in seconds, averaged over ranks."""

    data: float
    forward_backward: float
    exposed_comm: float | None = None
    """null if no ceiling was measured; forward_backward and optimizer then include exposed communication."""
    optimizer: float
    other: float


class CellMeasurement(GridCell):
    """Figures for one cell. They are null if a repeat failed or if no repeat has completed."""

    status: CellStatus
    cause: str | None = None
    repeats: list[RepeatMeasurement] = []
    steps_per_s: float | None = None
    global_steps_per_s: float | None = None  # micro batches per second, summed over all replicas
    samples_per_s: float | None = None
    tokens_per_s: Positive | None = None
    tokens_per_s_per_gpu: float | None = None
    step_time_s: StepTime | None = None
    split_s: SplitTime | None = None
    data_wait_fraction: Share | None = None
    data_wait_fraction_ci95: Interval | None = None
    speedup: float | None = None  # throughput / throughput of `single` on one rank
    efficiency: Positive | None = None
    efficiency_ci95: Interval | None = None
    efficiency_ddp1: float | None = None  # efficiency relative to ddp on one rank
    efficiency_ddp1_ci95: Interval | None = None
    ceiling_efficiency: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """Throughput of N independent runs on one rank each / (N x throughput of one rank)."""
    ceiling_efficiency_ci95: Interval | None = None
    communication_efficiency: float | None = None  # throughput / throughput of the ceiling
    communication_efficiency_ci95: Interval | None = None
    exposed_comm_fraction: float | None = None  # 1 - communication_efficiency
    exposed_comm_ddp_fraction: float | None = None  # share of a step that DDP counts as exposed
    straggler_ratio: float | None = None
    """Compute time before any reduction: slowest rank / median of the others; geometric mean over repeats."""
    straggler_ratio_ci95: Interval | None = None
    straggler_rank: int | None = None
    """The slowest rank; null unless it is the same in every repeat and straggler_ratio_ci95 is above 1.2."""
    peak_memory_gib: float | None = None  # highest peak of any rank
    mfu: float | None = None  # model FLOP/s / data-sheet FLOP/s
    mamfu: float | None = None  # model FLOP/s / measured matmul FLOP/s
    launch_fraction: float | None = None  # host time to enqueue a step / step time; null on a CPU
    launch_fraction_ci95: Interval | None = None
    loss_agrees: bool | None = None
    loss_deviation: float | None = None  # largest relative deviation from the single-rank run's losses
    skipped_steps: int | None = None
    flags: list[str] = []  # caveats that apply to the figures

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.world_size % self.tensor:
            raise ValueError(f"tensor: {self.tensor} does not divide world_size {self.world_size}")
        return self

    @property
    def step_s(self) -> float | None:
        """Return the mean step time of the whole job in seconds."""
        return self.step_time_s.mean if self.step_time_s else None


class BottleneckDiagnosis(StoredModel):
    """Finding about a cell: failure, largest loss of efficiency, or comparison with other engines."""

    cell: str
    kind: DiagnosisKind
    verdict: str  # the finding in words
    evidence: str
    next: str  # the suggested action


class PredictedSplit(StoredModel):
    """Parts of a predicted step in seconds. Their sum is the step time."""

    forward_backward: float
    optimizer: float
    straggler: float  # time spent waiting for the slowest rank
    exposed_comm: float


class Lever(StoredModel):
    """A change of settings and its predicted gain, or a bound on the gain from removing an overhead."""

    lever: str
    gain: float  # relative increase in tokens/s (0.1: 10 % more)
    tokens_per_s: float
    bound: bool = False  # True: `gain` and `tokens_per_s` are upper bounds


class PredictedRow(StoredModel):
    """Prediction for `world_size` GPUs."""

    world_size: int
    tensor: int = 1
    accumulation: int
    global_batch: int
    step_time_s: float
    split_s: PredictedSplit
    exposed_comm_fraction: float
    tokens_per_s: float
    speedup: float
    efficiency: float
    mfu: float | None = None
    levers: list[Lever] = []  # largest gain first


class ComparedCell(StoredModel):
    """A measured cell with its prediction."""

    cell: str
    predicted_step_s: float
    measured_step_s: float | None = None
    ci95: Interval | None = None  # interval of measured_step_s
    within: bool | None = None  # True: predicted_step_s is within ci95
    predicted_efficiency: float
    measured_efficiency: float | None = None
    measured_efficiency_ci95: Interval | None = None
    repeats: int = 0  # repeats of the measured cell


class Prediction(StoredFile):
    """Predictions of `plan scaling`, as in its JSON output and under `prediction` in scaling.json."""

    hint: ClassVar[str] = "run `bert-dp plan scaling` again"
    schema_version: Literal[1] = 1
    engine: str
    warnings: list[str] = []
    assumptions: list[str] = []
    rows: list[PredictedRow]
    measured: list[ComparedCell] = []


class Scaling(StoredFile):
    """Result of `bert-dp scale`, stored in scaling.json."""

    hint: ClassVar[str] = "rerun `bert-dp scale` with the same --out to rewrite the file from the runs"
    schema_version: Literal[1] = 1
    status: Literal["complete", "partial"] = "complete"
    environment: dict[str, Any] = {}  # the machine, as in environment.json
    config_hash: str | None = None
    data_hash: str | None = None
    command: list[str] = []
    mode: Literal["weak", "strong", "both"] | None = None
    settings: ScalingSettings = ScalingSettings()
    peak: Peak = Peak()
    cells: list[CellMeasurement] = []
    links: list[MeasuredLink] = []
    profile: StepProfile | None = None
    prediction: Prediction | None = None
    verdicts: list[BottleneckDiagnosis] = []

    def alone(self) -> CellMeasurement | None:
        """Return a measured cell of engine `single`, preferably one with the accumulation in `settings`."""
        runs = [
            cell
            for cell in self.cells
            if (cell.engine, cell.kind, cell.status, cell.world_size) == ("single", "run", "ok", 1)
            and cell.step_s is not None
        ]
        return max(runs, key=lambda cell: cell.accumulation == self.settings.accumulation, default=None)


# --- the table that `scale` and `plan scaling` show

COMPARED = (
    Quantity("predicted_step_s", "predicted step", "seconds"),
    Quantity("measured_step_s", "measured step", "seconds"),
    Quantity(lambda row: TableCell(format_interval(row.ci95, format_step_time)), "95 % interval"),
    Quantity("within", "within interval", "word"),
    Quantity("predicted_efficiency", "predicted efficiency", "percent"),
    Ratio("measured_efficiency", "measured efficiency", "percent", "measured_efficiency_ci95"),
)


def compared(prediction: Prediction, title: str = "") -> Table:
    """Return the table of the measured cells with their predictions."""
    return table([(row.cell, row) for row in prediction.measured], COMPARED, title=title, corner="cell")
