"""`bert-dp tune batch`: find the micro batch by real runs, then measure the gradient noise scale."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bert_dp import cost, files
from bert_dp.config import Config, ConfigError, Issue, batch_layout, parse_overrides
from bert_dp.cost import GIB
from bert_dp.files.models import FailureKind, NoiseScale
from launcher import job
from launcher.job import Output, Session, write_result
from launcher.log import Log, logger
from launcher.report.numbers import format_gib, format_si
from launcher.results import PlanFile
from launcher.run import trials
from launcher.run.trials import (
    Runner,
    SearchOutcome,
    Slot,
    Trial,
    TrialsFailed,
    cause,
    failure_kind,
    read_repeat,
    read_summary,
    run_to_end,
    timed_config,
)
from launcher.tune import throughput, with_settings, write_tuned
from launcher.tune.throughput import (
    MAX_ROUNDS,
    MAX_STEPS,
    MEMORY_SHARE,
    MIN_SIZES,
    MIN_STEPS,
    BatchChoice,
    BatchMemory,
    Goodput,
    MemoryTrial,
    SizeResult,
    SizeStatus,
    TimedRun,
    TuneBatch,
    with_micro,
)

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "plan.json"
FIXED = ("kind", "config_hash", "ranks", "sizes", "budget_s", "memory", "launcher")
GROWS = ("budget_s",)
CURVE_SHARE = 0.85  # of the budget; the noise scale takes the rest
STEPS_SHARE = 0.5  # of the budget, that the steps of MIN_SIZES runs may take
MEMORY_STEPS = 3
MEMORY_TRIAL_SHARE = 0.1  # of the budget, that the second memory trial may take
NOISE_STEPS, MIN_NOISE_STEPS = 400, 60
GUARD_GIB = 1.0  # address space above a rank's memory that is private and never touched


class BatchPlanFile(PlanFile):
    """plan.json: the options that a search was begun with."""

    kind: Literal["batch"] = "batch"
    ranks: int
    sizes: list[int]
    budget_s: float
    memory: float | None
    launcher: str


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of `tune batch`."""

    nproc: str  # auto or a number
    budget_s: float
    memory_gib: float | None  # of a rank; None: what its device has free, or its share of the host
    launcher: str


@dataclasses.dataclass(frozen=True)
class BatchSearchSpec:
    """The configuration and the limits of a search."""

    config: Config
    ranks: int
    sizes: tuple[int, ...]
    """Micro batches that divide the global batch, ascending."""
    budget_s: float
    limit_gib: float | None
    """Memory that a rank may use; None: unknown."""
    limit_of: str
    launcher: str
    on_gpu: bool
    precision: str
    """Precision of every trial."""

    @property
    def user_limit_gib(self) -> float | None:
        """Return the limit if the user set it."""
        return self.limit_gib if self.limit_of == "--memory" else None

    @property
    def dp(self) -> int:
        """Return the number of replicas."""
        return max(1, self.ranks // self.config.parallel.tensor)

    @property
    def global_size(self) -> int:
        """Return the declared global batch."""
        return self.config.batch.global_size

    @property
    def warm_up(self) -> int:
        """Return the number of steps before the timed ones."""
        return 10 if self.on_gpu else 3

    def formula_gib(self, micro: int) -> dict[str, float]:
        """Return the estimated peak of a rank by part."""
        return cost.memory_estimate_gib(with_micro(self.config, micro), self.precision, self.ranks)


# --- the verb


def tune_batch(
    name: str | None,
    overrides: Sequence[str],
    options: BatchOptions,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Run the search and return the exit code.

    Raises ConfigError with every problem of the input before any trial starts.
    """
    from launcher.tune.tune_page import batch_page

    setup = load(name, overrides)
    spec = search_spec(setup, options)
    folder = setup.directory(out, "tune", "batch")
    output = output_of(spec, folder)
    if issues := output.issues():
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in setup.device_warnings():
        log(f"warning: {line}")
    log(f"batch search: {folder}")
    devices = "GPUs" if spec.on_gpu else "CPU ranks"
    log(f"{spec.ranks} {devices}, global batch {spec.global_size}, budget about {spec.budget_s:.0f} s")
    log(f"micro batches that divide it: {', '.join(map(str, spec.sizes))}")
    if spec.config.compile == "auto" and not spec.on_gpu:
        log("trials on a CPU are not compiled; compile=on compiles them")
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.lock():
        tune, exit_code = measure(spec, output, log)
        write_tuned(tune, with_micro(spec.config, tune.choice.micro_batch) if tune.choice else None, folder)
        write_result(tune, batch_page(tune, folder), folder, as_json=as_json, console=console)
    return exit_code


def load(name: str | None, overrides: Sequence[str], run_dir: Path | None = None) -> job.Job:
    """Load the configuration with any micro batch. Raises ConfigError, also if `overrides` name one."""
    batch = parse_overrides(overrides).get("batch")
    micro = batch.get("micro_size", "auto") if isinstance(batch, dict) else "auto"
    if micro != "auto":
        message, hint = "the search chooses it", "leave it out"
        raise ConfigError([Issue("batch.micro_size", "no_effect", message, value=micro, hint=hint)])
    return job.load(name, [*overrides, "batch.micro_size=1"], run_dir)


def search_spec(setup: job.Job, options: BatchOptions) -> BatchSearchSpec:
    """Return what these options search. Raises ConfigError."""
    config, on_gpu = setup.config, setup.gpus > 0
    ranks = setup.choose_ranks(options.nproc)
    allowed = tuple(throughput.dividing_sizes(config, ranks))
    issues: list[Issue] = [*job.input_issues(config)]
    limit, limit_of = options.memory_gib, "--memory"
    if limit is None:
        limit, limit_of = setup.machine.rank_memory(ranks, on_gpu)
    elif not 0 < limit < math.inf:
        issues.append(
            Issue("--memory", "out_of_range", f"{limit} GiB", value=limit, hint="give a number above 0")
        )
    if issues:
        raise ConfigError(issues)
    precision = trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu)
    return BatchSearchSpec(
        config, ranks, allowed, options.budget_s, limit, limit_of, options.launcher, on_gpu, precision
    )


def output_of(spec: BatchSearchSpec, folder: Path) -> Output[BatchPlanFile]:
    """Return the output directory of a search, with the options that it must have been begun with."""
    plan = BatchPlanFile(
        config_hash=spec.config.hash(),
        config=spec.config.model_dump(mode="json"),
        ranks=spec.ranks,
        sizes=list(spec.sizes),
        budget_s=spec.budget_s,
        memory=spec.user_limit_gib,
        launcher=spec.launcher,
    )
    return Output(folder, "search", PLAN, plan, FIXED, GROWS)


def measure(spec: BatchSearchSpec, output: Output[BatchPlanFile], log: Log) -> tuple[TuneBatch, int]:
    """Run the search, or go on with it; return tune.json and the exit code."""
    out, session = output.path, output.begin(spec.config)
    with trials.runner(out, [Slot()], launcher=spec.launcher, on_gpu=spec.on_gpu, log=log) as runs:
        search = BatchSearch(spec, BatchTrials(spec, runs), log)
        outcome = run_to_end(search.run, out, log)
    if outcome.reason:
        log(f"error: {outcome.reason}")
    return search.result(outcome, session), outcome.exit_code


# --- trials


@dataclasses.dataclass(frozen=True)
class TrialMeasurement:
    """The outcome of one trial."""

    seconds: float
    """From its start to its end."""
    status: SizeStatus
    reason: str | None = None
    failure_kind: FailureKind | None = None
    run: TimedRun | None = None
    """None: not all steps were taken."""


class BatchTrials:
    """Trials as runs of the user's configuration at another batch. Raises Stopped for a signal."""

    def __init__(self, spec: BatchSearchSpec, runs: Runner):
        self._spec, self._runs = spec, runs

    def time_steps(self, name: str, micro: int, samples: int, warm_up: int, steps: int) -> TrialMeasurement:
        """Run steps of `samples` sequences, or read those that an earlier call ran."""
        return self._measure(self.trial(name, micro, samples, warm_up + steps), warm_up)

    def noise_scale(self, micro: int, steps: int) -> tuple[float, NoiseScale]:
        """Measure the noise scale over steps of the declared batch; return also the seconds."""
        trial = self.trial("noise", micro, self._spec.global_size, steps, noise=True)
        measured, summary = self._measure(trial, 0), read_summary(trial.directory)
        if measured.run is None or summary is None or summary.noise_scale is None:
            return measured.seconds, NoiseScale(verdict="inconclusive", reason=cause(trial.directory))
        return measured.seconds, summary.noise_scale

    def trial(self, name: str, micro: int, samples: int, steps: int, *, noise: bool = False) -> Trial:
        """Return the user's configuration at this batch for so many steps; nothing is saved."""
        spec, guard = self._spec, None
        config = timed_config(
            spec.config,
            on_gpu=spec.on_gpu,
            steps=steps,
            global_size=samples,
            micro_size=micro,
            noise_scale=noise,
            precision=spec.precision,
        )
        if not spec.on_gpu and spec.limit_gib is not None:
            # An allocation above it fails in the rank, before the machine's out-of-memory killer acts.
            guard = int((spec.limit_gib + GUARD_GIB) * GIB)
        return Trial(self._runs.out / "trials" / name, config, spec.ranks, data_bytes=guard)

    def _measure(self, trial: Trial, warm_up: int) -> TrialMeasurement:
        outcome, directory = self._runs.run_one(trial), trial.directory
        if outcome.status != "ok":
            kind = failure_kind(directory)
            return TrialMeasurement(outcome.seconds, outcome.status, cause(directory), kind)
        run = timed_run(trial, warm_up)
        status, reason = judge(run, self._spec.limit_gib)
        return TrialMeasurement(outcome.seconds, status, reason, run=run)


def judge(run: TimedRun, limit_gib: float | None) -> tuple[SizeStatus, str | None]:
    """Return the status of a run that took every step, and the reason if it is not ok."""
    peak = max(run.peak_gib)
    if limit_gib is not None and peak > limit_gib:
        return "over", f"its peak of {format_gib(peak)} is above the {format_gib(limit_gib)} of a rank"
    if run.alloc_retries:
        return "thrash", "the GPU's allocator freed its cache and tried again"
    return "ok", None


def timed_run(trial: Trial, warm_up: int) -> TimedRun:
    """Read the steps of a complete trial after the warm-up."""
    steps = (trial.config.schedule.steps or 0) - warm_up
    repeat = read_repeat(trial.directory, trial.ranks, warm_up, steps)
    return TimedRun(
        name=trial.name,
        step_s=repeat.parts["step_s"][0],
        forward_backward_s=repeat.parts["forward_backward_s"][0],
        peak_gib=repeat.memory_gib,
        exposed_s=statistics.median(repeat.exposed_s or [0.0]),
        data_wait_s=repeat.parts["data_wait_s"][0],
        alloc_retries=alloc_retries(trial.directory, trial.ranks, warm_up),
    )


def alloc_retries(directory: Path, ranks: int, warm_up: int) -> int | None:
    """Return the greatest number of allocator retries of a rank after the warm-up; None on a CPU."""
    retries = []
    for rank in range(ranks):
        lines = files.read_lines(directory / "steps" / f"rank-{rank}.jsonl")
        counts = [(n["step"], n["alloc_retries"]) for n in lines if n.get("alloc_retries") is not None]
        if counts:
            before = max(count for step, count in counts if step <= max(warm_up, counts[0][0]))
            retries.append(counts[-1][1] - before)
    return max(retries, default=None)


# --- the search


class BatchSearch:
    """Search of the micro batch. `result` can be called at any time, also for a search that was stopped.

    Every decision follows from the trials' records, so a search that goes on decides the same.
    """

    def __init__(self, spec: BatchSearchSpec, search_trials: BatchTrials, log: Log):
        self.spec, self._trials, self._log = spec, search_trials, log
        self.memory = BatchMemory(limit_gib=spec.limit_gib, limit_of=spec.limit_of)
        self.sizes: dict[int, SizeResult] = {}
        """Micro batches that are timed, ascending."""
        self.trial_samples = 0
        self.order: list[int] = []
        self.noise: NoiseScale | None = None
        self.used_s = 0.0
        self._startup_s = self._sequence_s = 0.0  # of a trial beside its steps; of a sequence at best
        self._limited_by: Literal["memory", "budget", "global batch"] = "global batch"

    def run(self) -> None:
        """Run the whole search. Raises Stopped for a signal and TrialsFailed if no size runs."""
        self._measure_memory()
        sizes = self._choose_sizes(self.spec.sizes)
        self._first_round(sizes)
        while not self.rates() and sizes[0] > self.spec.sizes[0]:
            sizes = self._choose_sizes([size for size in self.spec.sizes if size < sizes[0]])
            self._first_round(sizes)
        self._more_rounds()
        self._measure_noise()

    # --- memory

    def _measure_memory(self) -> None:
        """Run a few steps of the smallest size and of a larger one, and draw the line.

        The larger one is the largest that takes at most half of the memory that the smallest leaves, by the
        formula, and a tenth of the budget; if there is none, the second smallest if it fits.
        """
        smallest, *larger = self.spec.sizes
        first = self._memory_trial(smallest)
        if first.run is None:
            raise TrialsFailed(f"micro batch {smallest} does not run: {first.reason}")
        peak, limit = max(first.run.peak_gib), self.spec.limit_gib
        room_gib = peak if limit is None else MEMORY_SHARE * limit - peak
        before_gib = self._formula_gib(smallest)
        most_s = MEMORY_TRIAL_SHARE * self.spec.budget_s

        def is_cheap(micro: int) -> bool:
            share = 1.0 if micro == larger[0] else 0.5
            fits = self._formula_gib(micro) - before_gib <= share * room_gib
            return fits and MEMORY_STEPS * self._step_s(2 * micro) <= most_s

        if cheap := [micro for micro in larger if is_cheap(micro)]:
            self._memory_trial(cheap[-1])
        self._update_line()
        if line := self.memory.line:
            text = f"memory: {format_gib(line.intercept_gib)} + {line.gib_per_sequence:.4f} GiB a sequence"
            usable = "" if limit is None else f"; usable: {MEMORY_SHARE:.0%} of {format_gib(limit)}"
            self._log(text + usable)

    def _formula_gib(self, micro: int) -> float:
        return sum(self.spec.formula_gib(micro).values())

    def _memory_trial(self, micro: int) -> TrialMeasurement:
        samples = min(2 * micro * self.spec.dp, self.spec.global_size)
        measured = self._trials.time_steps(f"memory-{micro}", micro, samples, 0, MEMORY_STEPS)
        self._record(micro, measured)
        if measured.run is not None:
            self._startup_s = max(0.0, measured.seconds - sum(measured.run.step_s))
            self._sequence_s = min(measured.run.step_s) / samples
        return measured

    def _record(self, micro: int, measured: TrialMeasurement) -> None:
        """Count a trial's time and its memory."""
        self.used_s += measured.seconds
        peak = max(measured.run.peak_gib) if measured.run else None
        self.memory.trials.append(MemoryTrial(micro_batch=micro, status=measured.status, peak_gib=peak))

    def _update_line(self) -> None:
        slope_gib = self._formula_gib(2) - self._formula_gib(1)
        self.memory.line = throughput.memory_line(self.memory.trials, slope_gib)

    def _choose_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return those of `sizes` to time: they fit in memory and in the budget. Raises TrialsFailed."""
        spec = self.spec
        fitting = [micro for micro in sizes if self.memory.fits(micro)]
        if not fitting:
            peak, limit = format_gib(self.memory.peak_gib(sizes[0])), format_gib(spec.limit_gib)
            raise TrialsFailed(
                f"micro batch {sizes[0]} takes {peak}, above {MEMORY_SHARE:.0%} of the {limit} of a rank; "
                "use zero1 or fsdp, parallel.activation_checkpointing, more ranks, or a smaller model"
            )
        most_s = STEPS_SHARE * spec.budget_s / min(MIN_SIZES, len(fitting))
        affordable = [m for m in fitting if self._steps_s(m * spec.dp) <= most_s] or fitting[:1]
        if affordable[-1] < spec.sizes[-1]:
            self._limited_by = "budget" if affordable[-1] < fitting[-1] else "memory"
        timed = throughput.sizes_to_time(affordable)
        run_s = self._startup_s + self._steps_s(timed[-1] * spec.dp)
        while len(timed) > MIN_SIZES and 1.5 * len(timed) * run_s > self._left_s():  # two rounds
            timed = timed[1:]
        return timed

    # --- throughput

    def _first_round(self, sizes: Sequence[int]) -> None:
        """Run every size once, ascending, while the line through the last two says that the next one fits."""
        spec, self.trial_samples = self.spec, sizes[-1] * self.spec.dp
        self.sizes = {
            m: SizeResult(micro_batch=m, accumulation=spec.global_size // (m * spec.dp)) for m in sizes
        }
        self._log(
            f"throughput: micro batches {', '.join(map(str, sizes))}, {self.trial_samples} sequences a step"
        )
        for micro in sizes:
            if not self.memory.fits(micro):
                return self._drop_from(micro)
            self._time(micro, sizes)
            largest = max((t.micro_batch for t in self.memory.trials if t.status == "ok"), default=0)
            if self.sizes[micro].status in ("oom", "over", "thrash") and micro > largest:
                return self._drop_from(micro + 1)
            self._update_line()

    def _more_rounds(self) -> None:
        """Run the faster half of the sizes again, then the faster half of those, within the budget."""
        runs = list(self.rates())
        for _ in range(MAX_ROUNDS - 1 if len(runs) > 1 else 0):
            runs = throughput.next_round(self.rates(), runs)
            for micro in runs:
                if self._startup_s + self._steps_s(self.trial_samples) > self._left_s():
                    return
                self._time(micro, runs)

    def _drop_from(self, micro: int) -> None:
        """Remove the sizes from `micro` upwards that have not run: they need too much memory."""
        self._limited_by = "memory"
        self.sizes = {m: size for m, size in self.sizes.items() if m < micro}

    def _time(self, micro: int, round_: Sequence[int]) -> None:
        """Run a size once more, unless a run of it was lost."""
        size, warm_up = self.sizes[micro], self.spec.warm_up
        if size.status != "ok":
            return
        steps = self._timed_steps(len(round_))
        name = f"micro-{micro}-r{len(size.runs)}"
        measured = self._trials.time_steps(name, micro, self.trial_samples, warm_up, steps)
        self.order.append(micro)
        self._record(micro, measured)
        text = f"[{len(self.order)}] micro batch {micro}: "
        if measured.run is None or measured.status != "ok":
            size.status, size.reason, size.failure_kind = (
                measured.status,
                measured.reason,
                measured.failure_kind,
            )
            self._log(f"{text}{measured.status}: {measured.reason}")
            return
        size.runs.append(measured.run)
        size.measured_gib = max(*measured.run.peak_gib, size.measured_gib or 0.0)
        self._sequence_s = min(self._sequence_s, statistics.fmean(measured.run.step_s) / self.trial_samples)
        rate, peak = format_si(self.rates()[micro][-1], "sequences/s"), format_gib(size.measured_gib)
        self._log(f"{text}{rate}, {steps} steps, peak {peak}; {self._left_s():.0f} s left for throughput")

    def _timed_steps(self, runs: int) -> int:
        """Return the steps of a run: as long as its start-up if the budget allows it for a whole round."""
        step_s = max(self._step_s(self.trial_samples), 1e-9)
        each_s = min(self._startup_s, self._left_s() / runs - self._startup_s - self.spec.warm_up * step_s)
        return min(MAX_STEPS, max(MIN_STEPS, int(each_s / step_s)))

    def _step_s(self, samples: int) -> float:
        return samples * self._sequence_s

    def _steps_s(self, samples: int) -> float:
        """Return the expected seconds of the steps of the shortest run."""
        return (self.spec.warm_up + MIN_STEPS) * self._step_s(samples)

    def _left_s(self, share: float = CURVE_SHARE) -> float:
        return max(0.0, share * self.spec.budget_s - self.used_s)

    def rates(self) -> dict[int, list[float]]:
        """Return sequences/s at the declared global batch of every run, by micro batch."""
        return {
            micro: [throughput.run_rate(run, self.trial_samples, self.spec.global_size) for run in size.runs]
            for micro, size in self.sizes.items()
            if size.status == "ok" and size.runs
        }

    # --- noise scale

    def _measure_noise(self) -> None:
        choice = self.choice()
        if choice is None:
            lost = [f"micro batch {size.micro_batch}: {size.reason}" for size in self.sizes.values()]
            raise TrialsFailed("; ".join(lost))
        micro = choice.micro_batch
        if self.spec.dp == 1 and choice.accumulation == 1:  # the noise scale compares two batches
            micro = max((size for size in self.spec.sizes if size < micro), default=micro)
        step_s = self.spec.global_size / choice.samples_per_s
        steps = max(1, min(NOISE_STEPS, int((self._left_s(1.0) - self._startup_s) / step_s)))
        reason = self._no_noise(micro, steps)
        if reason is not None:
            self.noise = NoiseScale(verdict="inconclusive", reason=reason)
            self._log(f"noise scale: not measured: {reason}")
            return
        self._log(f"noise scale: {steps} steps of the declared batch")
        seconds, self.noise = self._trials.noise_scale(micro, steps)
        self.used_s += seconds

    def _no_noise(self, micro: int, steps: int) -> str | None:
        """Return the reason that the noise scale cannot be measured, if there is one."""
        config = with_micro(self.spec.config, micro)
        try:
            batch_layout(with_settings(config, log={"noise_scale": True}), self.spec.ranks)
        except ConfigError as error:
            return str(error.issues[0])
        if steps < MIN_NOISE_STEPS:
            return f"the budget leaves {steps} steps, {MIN_NOISE_STEPS} are needed; raise --budget"
        return None

    # --- the result

    def choice(self) -> BatchChoice | None:
        """Return the choice; None before the end of the first round, and if no size ran."""
        rates = self.rates()
        if not rates or any(size.status == "ok" and not size.runs for size in self.sizes.values()):
            return None
        # a GPU's memory serves nothing else, so there the fastest is taken
        share = 1.0 if self.spec.on_gpu else throughput.MIN_SHARE_OF_BEST
        micro, fastest, not_settled = throughput.choose_size(rates, share)
        rate = throughput.mean_rate(rates, micro)
        return BatchChoice(
            micro_batch=micro,
            accumulation=self.sizes[micro].accumulation,
            samples_per_s=rate,
            fastest_micro_batch=fastest,
            share_of_best=rate / throughput.mean_rate(rates, fastest),
            not_settled=not_settled,
            limited_by=self._limited_by,
        )

    def result(self, outcome: SearchOutcome, session: Session[BatchPlanFile]) -> TuneBatch:
        """Return tune.json."""
        spec, choice, rates = self.spec, self.choice(), self.rates()
        if choice is not None:
            self.memory.parts_gib = spec.formula_gib(choice.micro_batch)
        means = {micro: throughput.mean_rate(rates, micro) for micro in rates}
        for micro, mean in means.items():
            size = self.sizes[micro]
            size.samples_per_s, size.relative = mean, mean / max(means.values())
            size.samples_per_s_ci95 = throughput.rate_interval(rates, micro)
        return TuneBatch(
            status=outcome.status,
            reason=outcome.reason,
            date=datetime.date.today().isoformat(),
            seconds=self.used_s,
            budget_s=spec.budget_s,
            **session.facts(),
            config=spec.config.model_dump(mode="json"),
            ranks=spec.ranks,
            dp=spec.dp,
            global_batch=spec.global_size,
            sequence_length=spec.config.data.sequence_length,
            memory=self.memory,
            sizes=list(self.sizes.values()),
            order=self.order,
            trial_samples=self.trial_samples,
            choice=choice,
            noise=self.noise,
            goodput=self._goodput(choice),
        )

    def _goodput(self, choice: BatchChoice | None) -> Goodput | None:
        """Return goodput against the global batch; None without a noise scale."""
        noise = self.noise
        if choice is None or noise is None or noise.noise_scale is None or noise.interval is None:
            return None
        runs, per_pass = self.sizes[choice.micro_batch].runs, choice.micro_batch * self.spec.dp
        own_s = statistics.fmean(s for run in runs for s in throughput.passes_s(run))
        step_s = statistics.fmean(s for run in runs for s in run.step_s)
        return throughput.goodput(
            micro_s=own_s / (self.trial_samples / per_pass),
            update_s=step_s - own_s,
            per_pass=per_pass,
            global_size=self.spec.global_size,
            noise=noise.noise_scale,
            interval=noise.interval,
        )
