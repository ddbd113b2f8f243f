"""`bert-dp tune batch`: choose the micro batch with short runs, then measure the gradient noise scale.

`resolve_auto_batch` replaces `batch.micro_size: auto` with a size from the cache or from a search.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_dp import cost, files
from bert_dp.config import Config, ConfigError, Issue, batch_layout, read_manifest
from bert_dp.config.load import load_config, parse_overrides, resolve
from bert_dp.config.manifest import hash_json
from bert_dp.cost import GIB
from bert_dp.files import PAGE
from bert_dp.files.models import NoiseScale
from launcher import job, results
from launcher.job import Output, VerbOptions, identity
from launcher.log import PLAIN, Log, show
from launcher.report.formats import format_gib, format_si
from launcher.report.page import Report
from launcher.run import trials
from launcher.run.restarts import RunOptions
from launcher.run.train import check_profile, start_issues
from launcher.tune import FILE, SearchPlan, search_output, throughput, with_settings, write_tuned
from launcher.tune.throughput import MEMORY_SHARE, BatchTrial, TuneBatch, with_micro

if TYPE_CHECKING:
    from rich.console import Console

MAX_BUDGETS = 1.25  # no trial starts after the trials have taken this multiple of the budget
THROUGHPUT_SHARE = 0.85  # share of the budget for memory trials and timed runs; the noise scale gets the rest
STEPS_SHARE = 0.5  # a size is too slow if the steps of MIN_SIZES runs take more than this share of the budget
MEMORY_STEPS = 3  # steps of a memory trial
TIMES = ("step_s", "forward_backward_s", "data_wait_s")
MEMORY_TRIAL_SHARE = 0.1  # share of the budget for the steps of the second memory trial
NOISE_STEPS, MIN_NOISE_STEPS = 400, 60
AUTO_BUDGET_S = 300.0
MAX_MEMORY_RATIO = 1.1  # a search limited by memory is repeated if the limit grew by more than this factor
GUARD_GIB = 1.0  # address space that a rank reserves but does not use; added to its memory limit


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of `tune batch`."""

    nproc: str  # `auto` or a number
    budget_s: float
    memory_gib: float | None  # memory limit of a rank; None: its free GPU memory or its share of host memory
    launcher: str


@dataclasses.dataclass(frozen=True)
class BatchSearchSpec:
    """Configuration and limits of a search."""

    config: Config
    options: BatchOptions
    ranks: int
    sizes: tuple[int, ...]  # micro batches that divide the global batch, ascending
    limit_gib: float | None  # memory that a rank may use; None: unknown
    on_gpu: bool
    precision: str  # precision of every trial

    @property
    def dp(self) -> int:
        """Return the number of replicas."""
        return max(1, self.ranks // self.config.parallel.tensor)

    @property
    def global_size(self) -> int:
        """Return the configured global batch."""
        return self.config.batch.global_size

    @property
    def warm_up(self) -> int:
        """Return the number of untimed steps before the timed ones."""
        return 10 if self.on_gpu else 3

    @property
    def latest_s(self) -> float:
        """Return the total trial time, in seconds, after which no further trial starts."""
        return MAX_BUDGETS * self.options.budget_s

    def formula_gib(self, micro: int) -> float:
        """Estimate the peak memory of a rank in GiB with `cost.memory_estimate_gib`."""
        parts = cost.memory_estimate_gib(with_micro(self.config, micro), self.precision, self.ranks)
        return sum(parts.values())


# --- the verb


def tune_batch(name: str | None, overrides: Sequence[str], options: BatchOptions, how: VerbOptions) -> int:
    """Run the search and return the exit code. Raise ConfigError for unusable input, before any trial."""
    from launcher.tune.tune_page import batch_page

    setup = load(name, overrides)
    spec = search_spec(setup, options)
    folder = setup.directory(how.out, "tune", "batch")
    output = output_of(spec, folder)
    if issues := output.issues():
        raise ConfigError(issues)

    log = how.log(setup)
    log(f"micro batch search: {folder}")
    devices = "GPUs" if spec.on_gpu else "CPU ranks"
    log(f"{spec.ranks} {devices}, global batch {spec.global_size}, budget {options.budget_s:.0f} s")
    log(f"micro batches that divide the global batch: {', '.join(map(str, spec.sizes))}")
    log(
        f"no trial starts once the trials have taken {spec.latest_s:.0f} s; "
        "the first trial shows how many more the budget allows"
    )
    if spec.config.compile == "auto" and not spec.on_gpu:
        log("trials on a CPU do not use torch.compile; pass compile=on to use it")

    def run() -> tuple[TuneBatch, Report, int]:
        tune, exit_code = measure(spec, output, log)
        write_tuned(tune, with_micro(spec.config, tune.choice.micro_batch) if tune.choice else None, folder)
        return tune, batch_page(tune, folder), exit_code

    return how.measure(output, run)


def load(name: str | None, overrides: Sequence[str], run_dir: Path | None = None) -> job.Job:
    """Load the job with a placeholder micro batch. Raise ConfigError if `overrides` set a micro batch."""
    batch = parse_overrides(overrides).get("batch")
    micro = batch.get("micro_size", "auto") if isinstance(batch, dict) else "auto"
    if micro != "auto":
        message, hint = "the search chooses the micro batch", "omit this setting"
        raise ConfigError([Issue("batch.micro_size", "no_effect", message, value=micro, hint=hint)])
    return job.load(name, [*overrides, "batch.micro_size=1"], run_dir)


def search_spec(setup: job.Job, options: BatchOptions) -> BatchSearchSpec:
    """Return the specification of the search. Raise ConfigError if the input is unusable."""
    config, on_gpu, limit = setup.config, setup.gpus > 0, options.memory_gib
    ranks = setup.choose_ranks(options.nproc)
    sizes = tuple(throughput.dividing_sizes(config, ranks))
    issues: list[Issue] = [*job.input_issues(config)]
    if limit is None:
        limit, _ = setup.machine.rank_memory(ranks, on_gpu)
    elif not 0 < limit < math.inf:
        hint = "use a finite number above 0"
        issues.append(Issue("--memory", "out_of_range", f"{limit:g} GiB", value=limit, hint=hint))
    if issues:
        raise ConfigError(issues)
    precision = trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu)
    return BatchSearchSpec(config, options, ranks, sizes, limit, on_gpu, precision)


def output_of(spec: BatchSearchSpec, folder: Path) -> Output[SearchPlan]:
    """Return a search's output directory. The search can be resumed later, even with a larger budget."""
    settings = {**dataclasses.asdict(spec.options), "nproc": spec.ranks}
    return search_output(folder, spec.config, settings, "budget_s")


def measure(spec: BatchSearchSpec, output: Output[SearchPlan], log: Log) -> tuple[TuneBatch, int]:
    """Run or resume the search; return the contents of tune.json and the exit code."""
    out, (facts, *_) = output.path, output.begin(spec.config)
    launcher = spec.options.launcher
    with trials.runner(out, [trials.Slot()], launcher=launcher, on_gpu=spec.on_gpu, log=log) as runs:
        search = BatchSearch(spec, runs, log)
        outcome = trials.run_to_end(search.run, out, log)
    return search.result(outcome, facts), outcome.exit_code


# --- the search


class BatchSearch:
    """Search for the micro batch. `result` can be called at any time, even after the search was stopped.

    Decisions depend only on the records of trials, so a resumed search makes the same decisions.
    """

    def __init__(self, spec: BatchSearchSpec, runner: trials.Runner, log: Log):
        self.spec, self._runner, self._log = spec, runner, log
        self.memory_trials: list[BatchTrial] = []
        self.trials: list[BatchTrial] = []  # timed trials, in order
        self.sizes: list[int] = []  # micro batches that were timed, ascending
        self.samples = 0  # sequences per step in timed trials
        self.line: throughput.MemoryLine | None = None
        self.noise: NoiseScale | None = None
        self.used_s = 0.0
        self._startup_s = self._sequence_s = 0.0  # start-up time of a trial; time per sequence
        self._limited_by: Literal["memory", "budget", "global batch"] = "global batch"

    def run(self) -> None:
        """Run the whole search. Raise Stopped after a stop signal, TrialsFailed if no size works."""
        self._measure_memory()
        sizes = self._choose_sizes(self.spec.sizes)
        self._first_round(sizes)
        while not self.rates() and sizes[0] > self.spec.sizes[0]:
            sizes = self._choose_sizes([size for size in self.spec.sizes if size < sizes[0]])
            self._first_round(sizes)
        self._more_rounds()
        self._measure_noise()

    def _add(self, trial: BatchTrial, done: list[BatchTrial]) -> BatchTrial:
        """Add a trial to `done`, with status `over` if it exceeds the memory limit, and refit `self.line`."""
        peak, limit = trial.peak_gib, self.spec.limit_gib
        if peak is not None and limit is not None and peak > limit:
            reason = f"a rank's peak memory of {format_gib(peak)} exceeds the limit of {format_gib(limit)}"
            trial = trial.model_copy(update={"status": "over", "reason": reason})
        done.append(trial)
        self.used_s += trial.seconds
        slope_gib = self.spec.formula_gib(2) - self.spec.formula_gib(1)
        self.line = throughput.memory_line([*self.memory_trials, *self.trials], slope_gib)
        return trial

    def _fits(self, micro: int) -> bool:
        limit = self.spec.limit_gib
        return limit is None or self.line is None or self.line.gib(micro) <= MEMORY_SHARE * limit

    # --- memory

    def _measure_memory(self) -> None:
        """Run a trial with the smallest size and, if possible, one with a larger size, to fit `self.line`.

        The larger size is the largest one that is expected to run its steps in at most MEMORY_TRIAL_SHARE of
        the budget and to use at most half of the memory that the smallest size leaves free. The second
        smallest size may use all of this free memory.
        """
        smallest, *larger = self.spec.sizes
        first, limit = self._memory_trial(smallest), self.spec.limit_gib
        if (peak := first.peak_gib) is None:
            raise trials.TrialsFailed(f"micro batch {smallest} failed: {first.reason}")
        affordable = max(0, int(self._left_s(1.0) / max(self._startup_s, 1e-9)))
        startup = f"a trial takes {self._startup_s:.1f} s to start"
        self._log(f"{startup}, so the budget allows at most {affordable} more trials")
        free_gib = peak if limit is None else MEMORY_SHARE * limit - peak
        before_gib = self.spec.formula_gib(smallest)
        most_s = MEMORY_TRIAL_SHARE * self.spec.options.budget_s

        def is_cheap(micro: int) -> bool:
            share = 1.0 if micro == larger[0] else 0.5
            fits = self.spec.formula_gib(micro) - before_gib <= share * free_gib
            return fits and MEMORY_STEPS * 2 * micro * self._sequence_s <= most_s

        has_time = self.used_s + 2 * self._startup_s <= self.spec.latest_s  # to start this and a timed trial
        if has_time and (cheap := [micro for micro in larger if is_cheap(micro)]):
            self._memory_trial(cheap[-1])
        if line := self.line:
            text = f"memory: {format_gib(line.intercept_gib)} + {line.gib_per_sequence:.4f} GiB per sequence"
            usable = "" if limit is None else f"; usable: {MEMORY_SHARE:.0%} of {format_gib(limit)}"
            self._log(text + usable)

    def _memory_trial(self, micro: int) -> BatchTrial:
        samples = min(2 * micro * self.spec.dp, self.spec.global_size)
        trial = self.time_steps(f"memory-{micro}", micro, samples, 0, MEMORY_STEPS)
        if trial.step_s:
            self._startup_s = max(0.0, trial.seconds - sum(trial.step_s))
            self._sequence_s = min(trial.step_s) / samples
        return self._add(trial, self.memory_trials)

    def _choose_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Choose the sizes to time. Raise TrialsFailed if no size fits in memory."""
        spec = self.spec
        fitting = [micro for micro in sizes if self._fits(micro)]
        if not fitting and self.line is not None:
            peak, limit = format_gib(self.line.gib(sizes[0])), format_gib(spec.limit_gib)
            raise trials.TrialsFailed(
                f"micro batch {sizes[0]} needs {peak}, more than {MEMORY_SHARE:.0%} of a rank's {limit}; "
                "use zero1 or fsdp, parallel.activation_checkpointing, more ranks, or a smaller model"
            )
        most_s = STEPS_SHARE * spec.options.budget_s / min(throughput.MIN_SIZES, len(fitting))
        affordable = [m for m in fitting if self._steps_s(m * spec.dp) <= most_s] or fitting[:1]
        if affordable[-1] < spec.sizes[-1]:
            self._limited_by = "budget" if affordable[-1] < fitting[-1] else "memory"
        timed = throughput.sizes_to_time(affordable)
        run_s = self._startup_s + self._steps_s(timed[-1] * spec.dp)
        # 1.5: the first round times all sizes, the second round half of them
        while len(timed) > throughput.MIN_SIZES and 1.5 * len(timed) * run_s > self._left_s():
            timed = timed[1:]
        while len(timed) > 1 and self.used_s + (len(timed) - 1) * run_s > spec.latest_s:
            timed = timed[1:]
        return timed

    # --- throughput

    def _first_round(self, sizes: Sequence[int]) -> None:
        """Time each size once, smallest first. Stop when a size does not fit in memory or no time is left."""
        self.sizes, self.samples = [], sizes[-1] * self.spec.dp
        self._log(f"throughput: micro batches {', '.join(map(str, sizes))}; {self.samples} sequences/step")
        for micro in sizes:
            if self.used_s > self.spec.latest_s:
                if not self.sizes:  # this round has timed no size, so use the memory trials
                    self._log("no time left for timed runs; resume in this directory with a larger --budget")
                    self.trials, self.memory_trials = [*self.trials, *self.memory_trials], []
                    self.sizes = sorted({trial.micro_batch for trial in self.trials})
                self._limited_by = "budget"
                return
            if self._fits(micro):
                trial = self._time(micro, sizes)
                self.sizes.append(micro)
                ran = [t.micro_batch for t in (*self.memory_trials, *self.trials) if t.status == "ok"]
                if trial.status not in ("oom", "over") or micro <= max(ran, default=0):
                    continue
            self._limited_by = "memory"  # stop, because larger sizes need more memory
            return

    def _more_rounds(self) -> None:
        """Time the faster half of the sizes again, then half of these, while time and MAX_ROUNDS allow."""
        runs = list(self.rates())
        for _ in range(throughput.MAX_ROUNDS - 1 if len(runs) > 1 else 0):
            runs = throughput.next_round(self.rates(), runs)
            for micro in runs:
                if self._startup_s + self._steps_s(self.samples) > self._left_s():
                    return
                self._time(micro, runs)

    def _time(self, micro: int, round_: Sequence[int]) -> BatchTrial:
        steps, samples = self._timed_steps(len(round_)), self.samples
        name = f"micro-{micro}-r{sum(trial.micro_batch == micro for trial in self.trials)}"
        measured = self.time_steps(name, micro, samples, self.spec.warm_up, steps)
        trial = self._add(measured, self.trials)
        text = f"[{len(self.trials)}] micro batch {micro}: "
        if trial.status != "ok":
            self._log(f"{text}{trial.status}: {trial.reason}")
            return trial
        self._sequence_s = min(self._sequence_s, statistics.fmean(trial.step_s) / samples)
        rate = format_si(throughput.run_rate(trial, self.spec.global_size), "sequences/s")
        peak, left = format_gib(trial.peak_gib), f"{self._left_s():.0f} s left for timed runs"
        self._log(f"{text}{rate}, {steps} steps, peak {peak}; {left}")
        return trial

    def _timed_steps(self, runs: int) -> int:
        """Return how many timed steps fit in the start-up time and the time left (MIN_STEPS to MAX_STEPS)."""
        step_s = max(self.samples * self._sequence_s, 1e-9)
        each_s = min(self._startup_s, self._left_s() / runs - self._startup_s - self.spec.warm_up * step_s)
        return min(throughput.MAX_STEPS, max(throughput.MIN_STEPS, int(each_s / step_s)))

    def _steps_s(self, samples: int) -> float:
        return (self.spec.warm_up + throughput.MIN_STEPS) * samples * self._sequence_s

    def _left_s(self, share: float = THROUGHPUT_SHARE) -> float:
        return max(0.0, share * self.spec.options.budget_s - self.used_s)

    def _runs(self, micro: int) -> list[BatchTrial]:
        return [trial for trial in self.trials if trial.micro_batch == micro]

    def rates(self) -> dict[int, list[float]]:
        """Return {micro batch: `throughput.run_rate` of each run}. Omit sizes with a failed run."""
        return {
            micro: [throughput.run_rate(trial, self.spec.global_size) for trial in self._runs(micro)]
            for micro in self.sizes
            if all(trial.status == "ok" for trial in self._runs(micro))
        }

    # --- noise scale

    def _measure_noise(self) -> None:
        choice = self.choice()
        if choice is None:
            lost = [f"micro batch {trial.micro_batch}: {trial.reason}" for trial in self.trials]
            raise trials.TrialsFailed("; ".join(lost))
        micro = choice.micro_batch
        if self.spec.dp == 1 and choice.accumulation == 1:  # the estimate needs several micro batches
            micro = max((size for size in self.spec.sizes if size < micro), default=micro)
        step_s = self.spec.global_size / choice.samples_per_s
        steps = max(1, min(NOISE_STEPS, int((self._left_s(1.0) - self._startup_s) / step_s)))
        config, reason = with_settings(with_micro(self.spec.config, micro), log={"noise_scale": True}), ""
        try:
            batch_layout(config, self.spec.ranks)
        except ConfigError as error:
            reason = str(error.issues[0])
        if steps < MIN_NOISE_STEPS:
            needed = f"{steps} of the {MIN_NOISE_STEPS} steps needed"
            reason = f"the budget leaves time for {needed}; raise --budget"
        if reason:
            self.noise = NoiseScale(verdict="inconclusive", reason=reason)
            self._log(f"noise scale not measured: {reason}")
            return
        self._log(f"noise scale: measuring {steps} steps with the configured global batch")
        seconds, self.noise = self.noise_scale(micro, steps)
        self.used_s += seconds

    # --- trials: runs of the user's configuration with other batch sizes

    def time_steps(self, name: str, micro: int, samples: int, warm_up: int, steps: int) -> BatchTrial:
        """Run a trial, unless it has already run, and read its records. Raise Stopped after a stop signal."""
        trial = self.trial(name, micro, samples, warm_up + steps)
        outcome = self._runner.run_one(trial)
        facts: dict[str, Any] = {"name": name, "micro_batch": micro, "samples": samples}
        if outcome.status == "ok":
            repeat = trials.read_repeat(trial.directory, trial.ranks, warm_up, steps)
            facts |= {part: repeat.parts[part][0] for part in TIMES}
            facts["exposed_s"] = statistics.median(repeat.exposed_s or [0.0])
            facts["peaks_gib"] = repeat.memory_gib
        else:
            facts["reason"] = trials.cause(trial.directory)
        return BatchTrial(**facts, status=outcome.status, seconds=outcome.seconds)

    def noise_scale(self, micro: int, steps: int) -> tuple[float, NoiseScale]:
        """Measure the noise scale over `steps` global batches. Return (duration in seconds, noise scale)."""
        trial = self.trial("noise", micro, self.spec.global_size, steps, noise=True)
        outcome, summary = self._runner.run_one(trial), trials.read_summary(trial.directory)
        if outcome.status != "ok" or summary is None or summary.noise_scale is None:
            return outcome.seconds, NoiseScale(verdict="inconclusive", reason=trials.cause(trial.directory))
        return outcome.seconds, summary.noise_scale

    def trial(self, name: str, micro: int, samples: int, steps: int, *, noise: bool = False) -> trials.Trial:
        """Return a trial of the user's configuration with these batch sizes and this number of steps."""
        spec, guard = self.spec, None
        config = trials.timed_config(
            spec.config,
            on_gpu=spec.on_gpu,
            steps=steps,
            global_size=samples,
            micro_size=micro,
            noise_scale=noise,
            precision=spec.precision,
        )
        if not spec.on_gpu and spec.limit_gib is not None:
            # an allocation above the limit then fails in the rank, before the kernel kills the process
            guard = int((spec.limit_gib + GUARD_GIB) * GIB)
        return trials.Trial(self._runner.out / "trials" / name, config, spec.ranks, data_bytes=guard)

    # --- the result

    def choice(self) -> throughput.BatchChoice | None:
        """Choose a size based on all runs so far. Return None if every size failed."""
        if not (rates := self.rates()):
            return None
        # on a GPU, always choose the fastest size, because memory saved there would remain unused
        share = 1.0 if self.spec.on_gpu else throughput.MIN_SHARE_OF_BEST
        micro, fastest, not_settled = throughput.choose_size(rates, share)
        rate = throughput.mean_rate(rates, micro)
        return throughput.BatchChoice(
            micro_batch=micro,
            accumulation=self.spec.global_size // (micro * self.spec.dp),
            samples_per_s=rate,
            fastest_micro_batch=fastest,
            share_of_best=rate / throughput.mean_rate(rates, fastest),
            not_settled=not_settled,
            limited_by=self._limited_by,
        )

    def _size(self, micro: int, rates: throughput.Rates) -> throughput.SizeResult:
        runs = self._runs(micro)
        return throughput.SizeResult(
            micro_batch=micro,
            status=runs[-1].status,
            samples_per_s=throughput.mean_rate(rates, micro) if micro in rates else None,
            samples_per_s_ci95=throughput.rate_interval(rates, micro) if micro in rates else None,
            peak_gib=max((peak for trial in runs for peak in trial.peaks_gib), default=None),
            runs=len(runs),
        )

    def result(self, outcome: trials.SearchOutcome, facts: Mapping[str, Any]) -> TuneBatch:
        """Return the contents of tune.json."""
        rates = self.rates()
        return TuneBatch(
            status=outcome.status,
            reason=outcome.reason,
            date=datetime.date.today().isoformat(),
            seconds=self.used_s,
            **facts,
            config=self.spec.config.model_dump(mode="json"),
            ranks=self.spec.ranks,
            global_batch=self.spec.global_size,
            memory_limit_gib=self.spec.limit_gib,
            memory_line=self.line,
            memory_trials=self.memory_trials,
            trials=self.trials,
            sizes=[self._size(micro, rates) for micro in self.sizes],
            choice=self.choice() if outcome.status == "complete" else None,
            noise=self.noise,
        )


# --- batch.micro_size: auto


def resolve_auto_batch(
    name: str | None, overrides: Sequence[str], run: RunOptions, console: Console
) -> tuple[list[str], int]:
    """Return the overrides with `batch.micro_size: auto` replaced by a number, and the search's exit code.

    A resumed run keeps its micro batch. Searches are cached, and a stopped search is resumed. A dry run does
    not search: without a cached result, it uses the smallest size. Raise ConfigError if the input is
    unusable, or if `run.profile` names steps or ranks that the run does not have.
    """
    run_dir, resume = run.run_dir, run.resume

    def found(size: int, origin: str) -> tuple[list[str], int]:
        show(console, f"batch.micro_size: auto = {size}, {origin}", **PLAIN)
        return [*overrides, f"batch.micro_size={size}"], 0

    if run_dir is not None and (run_dir / "config.yaml").exists():
        return found(load_config(run_dir / "config.yaml").batch.micro_size, "as in this run's config.yaml")
    if resume not in ("auto", "never") and (earlier := files.newest_checkpoint_facts(Path(resume))):
        return found(resolve([earlier[1].config]).batch.micro_size, "as in the run given by --resume")
    setup = load(name, overrides, run_dir)
    options = BatchOptions(run.nproc, AUTO_BUDGET_S, None, run.launcher)
    spec = search_spec(setup, options)
    folder = setup.directory(run_dir, "runs")
    if issues := start_issues(setup, folder, resume) or files.cache_issues():
        raise ConfigError(issues)
    check_profile(run.profile, setup.config, spec.ranks, folder, resume)
    machine = setup.machine.to_json()
    cached = files.cache_root() / "tune" / cache_key(spec, machine)
    for file in sorted(cached.glob(f"*/{FILE}")):
        kept = results.find(file, TuneBatch)
        if kept is not None and kept.choice is not None and is_still_valid(kept, spec.limit_gib):
            return found(kept.choice.micro_batch, f"measured on {kept.date}")
    if run.dry_run:
        minutes = f"{AUTO_BUDGET_S / 60:.0f} min"
        return found(spec.sizes[0], f"for this dry run only; a real run spends about {minutes} on a search")
    data_hash = read_manifest(job.prepare_data(spec.config)).hash
    out = cached / hash_json([spec.config.hash(), identity(machine, data_hash)])[:16]
    code = tune_batch(name, overrides, options, VerbOptions(out, False, False, console))
    if code:
        return list(overrides), code
    choice = results.read(out / FILE, TuneBatch).choice
    assert choice is not None  # exit code 0 means that the search chose a size
    return found(choice.micro_batch, f"measured just now; report: {out / PAGE}")


def cache_key(spec: BatchSearchSpec, machine: Mapping[str, Any]) -> str:
    """Hash everything that affects the speed and memory use of a trial, except the micro batch.

    `machine` is `Environment.to_json()`.
    """
    settings: dict[str, Any] = {
        "model": True,
        "data": {"sequence_length", "workers"},
        "objective": {"mask_rate"},
        "compile": True,
        "run": {"deterministic"},
        "parallel": True,
        "optim": {"name"},
        "batch": True,
        "log": {"noise_scale"},  # measuring the noise scale excludes some sizes
    }
    config = with_micro(spec.config, 1).model_dump(mode="json", include=settings)
    machine = identity(machine, None)
    decisive = [config, machine, spec.precision, spec.ranks, spec.options.launcher]
    return hash_json(decisive)[:16]


def is_still_valid(search: TuneBatch, limit_gib: float | None) -> bool:
    """Return True if a search is complete and its choice can be reused with the memory limit `limit_gib`.

    The limit must be at least the peak memory of the choice. If memory ruled out larger sizes, the limit must
    also be at most MAX_MEMORY_RATIO times the limit of the search; above that, a larger size may fit.
    """
    choice, before_gib = search.choice, search.memory_limit_gib
    if search.status != "complete" or choice is None:
        return False
    if limit_gib is None or before_gib is None:
        return limit_gib is None
    peaks = [size.peak_gib or 0.0 for size in search.sizes if size.micro_batch == choice.micro_batch]
    has_more = choice.limited_by == "memory" and limit_gib > MAX_MEMORY_RATIO * before_gib
    return max(peaks, default=math.inf) <= limit_gib and not has_more
