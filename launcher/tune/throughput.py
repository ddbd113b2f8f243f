"""Define the rules of `tune batch` (sizes, memory, rounds, choice) and the data models of tune.json."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.config.schema import divisors
from bert_dp.files.models import NoiseScale, StoredModel
from launcher.results import Count, Interval, Positive, TuneFile
from launcher.stats import student
from launcher.tune import with_settings

MIN_SHARE_OF_BEST = 0.97  # on a CPU, a smaller size is preferred if it reaches this share of the best rate
MEMORY_SHARE = 0.9  # a size fits if its predicted peak is at most this share of a rank's memory limit
MAX_SIZES, MIN_SIZES = 8, 3
MIN_STEPS, MAX_STEPS = 6, 60  # timed steps per run
MAX_ROUNDS = 6

SizeStatus = Literal["ok", "oom", "failed", "over"]  # over: the peak is above the limit


class BatchTrial(StoredModel):
    """A run with one micro batch size. The lists are empty if the run did not complete every step."""

    name: str
    micro_batch: int
    samples: int  # sequences per step, over all ranks
    seconds: float  # duration of the run, including its start-up
    status: SizeStatus
    reason: str | None = None
    peaks_gib: list[float] = []  # peak memory of each rank
    step_s: list[float] = []  # time of each timed step
    forward_backward_s: list[float] = []
    data_wait_s: list[float] = []
    exposed_s: float = 0.0  # reduction time per step that does not overlap the backward pass; 0: not reported

    @property
    def peak_gib(self) -> float | None:
        """Return the highest peak memory of any rank, or None if the run is incomplete."""
        return max(self.peaks_gib, default=None)


class MemoryLine(StoredModel):
    """Peak memory of a rank as a linear function of the micro batch."""

    intercept_gib: float
    gib_per_sequence: float

    def gib(self, micro: float) -> float:
        """Return the peak in GiB for a micro batch."""
        return self.intercept_gib + self.gib_per_sequence * micro


class SizeResult(StoredModel):
    """Results for a micro batch size. Rates are sequences/s over all ranks at the configured global batch."""

    micro_batch: int
    status: SizeStatus
    samples_per_s: float | None = None  # geometric mean over the runs
    samples_per_s_ci95: Interval | None = None
    peak_gib: float | None = None
    runs: int


class BatchChoice(StoredModel):
    """The chosen micro batch. Rates are sequences/s over all ranks at the configured global batch."""

    micro_batch: Count
    accumulation: int
    samples_per_s: Positive
    fastest_micro_batch: int
    share_of_best: float
    not_settled: list[int]  # sizes that may be faster than the choice (on a CPU, by more than 3 %)
    limited_by: Literal["memory", "budget", "global batch"]


class TuneBatch(TuneFile):
    """Contents of the tune.json that `tune batch` writes."""

    schema_version: Literal[1] = 1
    kind: Literal["batch"] = "batch"
    global_batch: int
    memory_limit_gib: float | None  # memory limit of a rank; null: unknown
    memory_line: MemoryLine | None = None  # line through the peaks of the two largest sizes that ran
    memory_trials: list[BatchTrial] = []
    trials: list[BatchTrial] = []  # timed trials
    sizes: list[SizeResult] = []  # by ascending micro batch
    choice: BatchChoice | None = None
    noise: NoiseScale | None = None


# --- sizes and memory


def with_micro(config: Config, micro: int) -> Config:
    """Return the configuration with another micro batch and the same global batch."""
    return with_settings(config, batch={"micro_size": micro})


def dividing_sizes(config: Config, ranks: int) -> list[int]:
    """Return, in ascending order, the micro-batch sizes with which `ranks` ranks can form the global batch.
    Raise ConfigError if there are none."""
    allowed = []
    for micro in divisors(config.batch.global_size):
        with contextlib.suppress(ConfigError):
            batch_layout(with_micro(config, micro), ranks)
            allowed.append(micro)
    if not allowed:
        batch_layout(with_micro(config, 1), ranks)
    return allowed


def sizes_to_time(sizes: Sequence[int]) -> list[int]:
    """Select at most MAX_SIZES of the sizes, in ascending order and spaced by nearly equal ratios.

    All of them divide the largest size, so that every trial can have the same number of sequences per step.
    """
    sizes = [size for size in sizes if sizes[-1] % size == 0]
    if len(sizes) <= MAX_SIZES:
        return sizes
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    even = [low + (high - low) * i / (MAX_SIZES - 1) for i in range(MAX_SIZES)]
    return sorted({min(sizes, key=lambda size: abs(math.log(size) - place)) for place in even})


def memory_line(trials: Sequence[BatchTrial], slope_gib: float) -> MemoryLine | None:
    """Return the line through the peaks of the two largest measured sizes. With a single size, the line has
    slope `slope_gib`. Return None if no size was measured."""
    peaks: dict[int, float] = {}
    for trial in trials:
        if trial.peak_gib is not None:
            peaks[trial.micro_batch] = max(trial.peak_gib, peaks.get(trial.micro_batch, 0.0))
    if not peaks:
        return None
    *smaller, last = sorted(peaks)
    if smaller:
        slope_gib = max(0.0, (peaks[last] - peaks[smaller[-1]]) / (last - smaller[-1]))
    return MemoryLine(intercept_gib=peaks[last] - slope_gib * last, gib_per_sequence=slope_gib)


# --- throughput

Rates = Mapping[int, Sequence[float]]  # micro batch -> sequences/s of each run


def run_rate(trial: BatchTrial, global_size: int) -> float:
    """Return the rate in sequences/s that a trial would reach with the configured global batch.

    The times of the data wait and of the forward and backward passes, excluding exposed reduction, are scaled
    with the number of sequences per step. Reduction and update occur once per step and are not scaled.
    """
    more = global_size / trial.samples - 1
    steps = [
        step + more * (max(0.0, passes - trial.exposed_s) + wait)
        for step, passes, wait in zip(trial.step_s, trial.forward_backward_s, trial.data_wait_s, strict=True)
    ]
    return global_size / statistics.fmean(steps)


def mean_rate(rates: Rates, micro: int) -> float:
    """Return the geometric mean of a size's rates over its runs."""
    return statistics.geometric_mean(rates[micro])


def deviation(rates: Rates) -> tuple[float, int]:
    """Return the standard deviation of a run's log rate, pooled over the sizes, and its degrees of freedom.
    The deviation is infinite if no size ran twice."""
    logs = [[math.log(rate) for rate in each] for each in rates.values()]
    degrees = sum(len(each) - 1 for each in logs)
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in logs if len(each) > 1)
    return (math.sqrt(squares / degrees), degrees) if degrees else (math.inf, 0)


def rate_interval(rates: Rates, micro: int) -> list[float] | None:
    """Return the 95 % interval of a size's mean rate, or None if no size ran twice."""
    sd, degrees = deviation(rates)
    if not degrees:
        return None
    half = student(degrees) * sd / math.sqrt(len(rates[micro]))
    return [mean_rate(rates, micro) * math.exp(sign * half) for sign in (-1, 1)]


def next_round(rates: Rates, sizes: Sequence[int]) -> list[int]:
    """Return the faster half of a round's sizes, at least two, fastest first."""
    order = sorted((size for size in sizes if size in rates), key=lambda size: -mean_rate(rates, size))
    return order[: max(2, math.ceil(len(order) / 2))]


def choose_size(rates: Rates, min_share: float = MIN_SHARE_OF_BEST) -> tuple[int, int, list[int]]:
    """Return (choice, fastest size, unsettled sizes).

    The choice is the smallest size whose rate relative to the fastest size, minus one standard error, is at
    least `min_share`. If `min_share` is 1, the choice is the fastest size. A size is unsettled if the 95 %
    interval of its rate relative to the choice extends above 1 / `min_share`.
    """
    (sd, degrees), least = deviation(rates), math.log(min_share)
    fastest = max(rates, key=lambda size: mean_rate(rates, size))

    def log_share(size: int, other: int) -> float:
        return math.log(mean_rate(rates, size) / mean_rate(rates, other))

    def error(size: int, other: int) -> float:
        return sd * math.sqrt(1 / len(rates[size]) + 1 / len(rates[other]))

    near = [s for s in rates if s < fastest and log_share(s, fastest) - error(s, fastest) >= least]
    chosen = min([*near, fastest])
    times = student(degrees) if degrees else math.inf
    others = [size for size in rates if size != chosen]
    unsettled = [s for s in others if log_share(s, chosen) + times * error(s, chosen) > -least]
    return chosen, fastest, sorted(unsettled)
