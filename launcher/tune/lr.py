"""`bert-dp tune lr`: choose the learning rate with short runs, then with whole runs.

Every run completes its schedule.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, Manifest, batch_at, batch_layout, schema, with_budget
from bert_dp.files.models import Summary
from launcher import job, results
from launcher.job import Output, VerbOptions
from launcher.log import Log
from launcher.report.formats import count_of, format_duration, format_si
from launcher.report.page import Report
from launcher.run import trials
from launcher.tune import SearchPlan, lr_search, search_output, with_settings, write_tuned
from launcher.tune.lr_search import FINALISTS, LrOptions, LrTrial, LrTrialStatus, RangeTest, Rung, TuneLr

# tokens of a whole run / tokens of a short run; also the minimum number of steps of a whole run
SHORT_RATIO = 8
RANGE_STEPS, MIN_RANGE_STEPS = 100, 25
RANGE_RATIO = 16  # steps of a whole run / steps of a range test
Predict = Callable[[job.Job, int], tuple[float, float] | None]
"""(job, ranks) -> (predicted tokens/s of a trial, factor); None if unknown. The 95 % interval runs from the
prediction divided by the factor to the prediction times the factor."""


@dataclasses.dataclass(frozen=True)
class LrSearchSpec:
    """Configuration, data and devices of a search."""

    config: Config
    options: LrOptions
    ranks: int  # ranks per trial
    shards: Path
    unigram: float | None  # unigram entropy of the data in nats per token; None: unknown
    at_a_time: int  # number of concurrent trials
    precision: str  # precision of every trial

    @property
    def seeds(self) -> list[int]:
        """Return the seeds with which each finalist is trained."""
        return [self.config.run.seed + k for k in range(self.options.seeds)]


# --- the verb


def tune_lr(
    name: str | None,
    overrides: Sequence[str],
    options: LrOptions,
    how: VerbOptions,
    predict: Predict = lambda setup, ranks: None,
) -> int:
    """Run the search and return the exit code. A dry run estimates the duration of the search with `predict`.

    Raise ConfigError with all issues in the input before any trial starts.
    """
    from launcher.tune.tune_page import lr_page

    setup = job.load(name, overrides)
    config = setup.config
    ranks = options.ranks or config.parallel.tensor
    folder = setup.directory(how.out, "tune", "lr")
    output = search_output(folder, config, results.plain(options))
    layout = batch_layout(with_settings(config, optim=fixed_rate(1.0)), ranks)
    issues = [*job.input_issues(config), *setup.device_issues(ranks), *length_issues(config, options)]
    if issues := [*issues, *output.issues()]:
        raise ConfigError(issues)

    log = how.log(setup)
    log(f"learning rate search: {folder}")
    log(
        f"{options.rates} rates, a factor of 2 apart, in runs with 1/{SHORT_RATIO} of the tokens; then whole "
        f"runs at the best {FINALISTS} rates, with {count_of(options.seeds, 'seed')} each; {layout}"
    )
    if how.dry_run:
        log(length_text(setup, options, ranks, predict))

    def run() -> tuple[TuneLr, Report, int]:
        tuned, exit_code = measure(setup, options, ranks, output, log)
        return tuned, lr_page(tuned, folder), exit_code

    return how.measure(output, run)


def planned(options: LrOptions) -> tuple[tuple[int, float], ...]:
    """Return (number of trials, share of a whole run's tokens that each trial trains on) for each rung."""
    whole_runs = FINALISTS * options.seeds + 1  # + 1: a neighbour of the best rate
    return (options.rates, 1 / SHORT_RATIO), (whole_runs, 1.0)


def trial_count(options: LrOptions) -> int:
    """Return the total number of planned trials in both rungs."""
    return sum(count for count, _ in planned(options))


def slots_of(setup: job.Job, options: LrOptions, ranks: int) -> list[trials.Slot]:
    """Divide the devices into slots, one for each concurrent trial."""
    cores, most = int(setup.machine.usable_cores), max(options.rates, FINALISTS * options.seeds)
    return trials.device_slots(ranks, gpus=setup.gpus, cores=cores, most=most)


def length_text(setup: job.Job, options: LrOptions, ranks: int, predict: Predict) -> str:
    """Describe the planned length of a search as a number of whole runs and, if known, as a duration."""
    config, at_a_time = setup.config, len(slots_of(setup, options, ranks))
    rungs, tokens = planned(options), options.tokens or full_tokens(config)
    runs = sum(math.ceil(count / at_a_time) * share for count, share in rungs)
    unit, steps = config.schedule.unit, count_of(range_steps(config, tokens), "step")
    length = format_si(tokens, "tokens") if tokens else f"{getattr(config.schedule, unit):g} {unit}"
    trials_text = f"{trial_count(options)} trials, {at_a_time} at a time"
    text = f"a range test of {steps}, then {trials_text}: as long as {runs:.1f} runs of {length}"
    if options.budget_s is not None:
        return f"{text}, limited to {format_duration(options.budget_s)} in total"
    if tokens is None and config.schedule.hours:
        return f"{text}, {format_duration(runs * config.schedule.hours * 3600)}"
    rate = predict(setup, ranks)
    if rate is None or tokens is None:
        return f"{text}; the range test will measure the speed"
    seconds, factor = runs * tokens / rate[0], rate[1]
    between = f"{format_duration(seconds / factor)} to {format_duration(seconds * factor)}, 95 % interval"
    return f"{text}, {format_duration(seconds)} ({between}) plus start-up"


def length_issues(config: Config, options: LrOptions, tokens: int | None = None) -> list[Issue]:
    """Return issues with a whole run's length: the first of `tokens`, --tokens and `schedule` that is set."""
    tokens = tokens or options.tokens or full_tokens(config)
    if tokens is None and (unit := config.schedule.unit) in schema.METERED:
        message, hint = f"required for a budget in {unit}", "pass the number of tokens of a whole run"
        return [Issue("--tokens", "missing", message, None, f"schedule.{unit}", hint)]
    least = SHORT_RATIO * step_tokens(config)
    if tokens is None or tokens >= least:
        return []
    reason = f"{tokens:,} tokens make fewer than {SHORT_RATIO} steps, the minimum for a whole run"
    setting, hint = "--tokens" if options.tokens else "schedule", f"use at least {least:,} tokens"
    return [Issue(setting, "out_of_range", reason, value=tokens, hint=hint)]


def data_issues(config: Config, options: LrOptions, manifest: Manifest) -> list[Issue]:
    """Convert a budget in epochs to tokens, then return the issues that prevent a search on this data."""
    issues = length_issues(with_budget(config, manifest.train.sequences), options)
    if not manifest.held_out.sequences:
        hint = "raise data.build.held_out_fraction"
        issues.append(Issue("data", "missing", "no documents are held out for choosing the rate", hint=hint))
    return issues


def measure(
    setup: job.Job, options: LrOptions, ranks: int, output: Output[SearchPlan], log: Log
) -> tuple[TuneLr, int]:
    """Run or resume the search. Return the contents of tune.json (partial after a stop) and the exit code."""
    config, out, on_gpu = setup.config, output.path, setup.gpus > 0
    facts, shards, manifest = output.begin(config, lambda m: data_issues(config, options, m))
    slots = slots_of(setup, options, ranks)
    spec = LrSearchSpec(
        with_budget(config, manifest.train.sequences),
        options,
        ranks,
        shards,
        manifest.unigram_entropy_nats,
        len(slots),
        trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu),
    )
    with trials.runner(out, slots, launcher=options.launcher, on_gpu=on_gpu, log=log) as runs:
        search = LrSearch(spec, runs, log)
        outcome = trials.run_to_end(search.run, out, log)
    tuned = search.result(outcome, facts)
    write_tuned(tuned, tuned_config(config, tuned.choice.lr) if tuned.choice else None, out)
    return tuned, outcome.exit_code


# --- the search


class LrSearch:
    """Search for the learning rate. `range_test` and `rungs` keep all measurements, even after a stop.

    Decisions depend only on the records of trials, so a resumed search makes the same decisions.
    """

    def __init__(self, spec: LrSearchSpec, runs: trials.Runner, log: Log):
        self.spec, self._runs, self._log = spec, runs, log
        self.range_test: RangeTest | None = None
        self.tokens: int | None = None  # tokens of a whole run
        self.rungs: list[Rung] = []
        self._tokens_per_s = self._fixed_s = self._range_s = 0.0  # results of the range test
        self._progress = trials.Progress([], log)

    def run(self) -> None:
        """Run the whole search. Raise Stopped after a stop signal, TrialsFailed if no rate can be chosen,
        and ConfigError if whole runs are too short."""
        test = self.range_test = self._test_range()
        tokens = self.tokens = self._choose_tokens()
        expected = [
            self._trial_s(share * tokens) for count, share in planned(self.spec.options) for _ in range(count)
        ]
        self._progress = trials.Progress(expected, self._log, self.spec.at_a_time)
        self.train_rungs(test, tokens)

    def train_rungs(self, test: RangeTest, tokens: int) -> None:
        """Do the short runs, then whole runs at the best rates. Raise TrialsFailed if every rate fails."""
        first = self._open_rung("first", tokens // SHORT_RATIO, self.spec.seeds[:1])
        ladder = lr_search.first_ladder(test, self.spec.options.rates)
        while more := lr_search.next_short_rates(first, ladder, test.edge):
            self._train(first, [(lr, first.seeds[0]) for lr in more])
        if not first.ranked():
            raise trials.TrialsFailed("in the first rung, every rate has a failed or diverged run")
        last = self._open_rung("last", tokens, self.spec.seeds)
        while todo := lr_search.next_whole_runs(first, last):
            self._train(last, todo)
        if not last.ranked():
            raise trials.TrialsFailed("in the last rung, every rate has a failed or diverged run")

    def _test_range(self) -> RangeTest:
        """Run the range test: train with a rising rate. Raise TrialsFailed if it fails or has no steps."""
        config = self.spec.config
        steps = range_steps(config, self.spec.options.tokens or full_tokens(config))
        trial = self._trial("range-test", range_config(config, self.spec.shards, steps))
        self._log(f"range test: {steps} steps, with the rate rising from 1e-4 to 1")
        outcome, directory = self._runs.run_one(trial), trial.directory
        lines = files.read_lines(directory / "metrics.jsonl")
        points = [(line["lr"], line["loss"], line["skipped_steps"]) for line in lines]
        if not points or (outcome.status != "ok" and trials.failure_kind(directory) != "not_finite"):
            raise trials.TrialsFailed(f"{trial.name}: {outcome.status}: {trials.cause(directory)}")
        edge, reason = lr_search.find_edge(points)
        self._log(f"  divergence edge at {edge:.3g}: {reason}" if edge is not None else f"  {reason}")
        summary = trials.read_summary(directory) or Summary(status="failed")
        self._tokens_per_s, self._range_s = summary.tokens_per_s or 0.0, outcome.seconds
        self._fixed_s = max(0.0, outcome.seconds - summary.time_s.get("train", 0.0))
        return RangeTest(points=[(lr, loss) for lr, loss, _ in points], edge=edge, reason=reason)

    def _choose_tokens(self) -> int:
        """Log the plan. Return the length of a whole run in tokens; raise ConfigError if it is too short."""
        spec, config, options = self.spec, self.spec.config, self.spec.options
        tokens = options.tokens or full_tokens(config)
        reason = "as requested" if options.tokens else "from the configuration"
        if tokens is None:
            hours = config.schedule.hours or 0.0
            tokens = round(hours * 3600 * self._tokens_per_s)
            speed = f"{format_si(self._tokens_per_s, 'tokens/s')} on {count_of(spec.ranks, 'rank')}"
            reason = f"{hours:g} h at {speed} (measured); if training will use more ranks, pass --tokens"
        tokens = whole_steps(config, tokens)
        left_s = math.inf if options.budget_s is None else options.budget_s - self._range_s
        if (whole_s := self._rungs_s(tokens)) > left_s:
            fixed_s = self._rungs_s(0)
            share = max(0.0, left_s - fixed_s) / (whole_s - fixed_s)
            reason = f"instead of {tokens:,}, to fit --budget; shorter runs tend to favour higher rates"
            tokens = whole_steps(config, math.floor(share * tokens))
            tokens = max(SHORT_RATIO * step_tokens(config), tokens)
        if issues := length_issues(config, options, tokens):
            raise ConfigError(issues)
        self._log(f"whole run: {tokens:,} tokens, {reason}")
        count, duration = trial_count(spec.options), format_duration(self._rungs_s(tokens))
        self._log(f"about {count} trials, {spec.at_a_time} at a time: {duration}")
        return tokens

    def _trial_s(self, tokens: float) -> float:
        return self._fixed_s + tokens / (self._tokens_per_s or math.inf)

    def _rungs_s(self, tokens: int) -> float:
        return sum(
            math.ceil(count / self.spec.at_a_time) * self._trial_s(share * tokens)
            for count, share in planned(self.spec.options)
        )

    def _open_rung(self, name: str, tokens: int, seeds: list[int]) -> Rung:
        rung = Rung(tokens=whole_steps(self.spec.config, tokens), seeds=seeds)
        self.rungs.append(rung)
        self._log(f"{name} rung: {format_si(rung.tokens, 'tokens')} per run, {count_of(len(seeds), 'seed')}")
        return rung

    def _train(self, rung: Rung, runs: Sequence[tuple[float, int]]) -> None:
        """Train with each (rate, seed) and add the results to the rung, in the given order."""
        spec, trial_s = self.spec, self._trial_s(rung.tokens)
        todo = []
        for lr, seed in runs:
            config = trial_config(spec.config, spec.shards, lr, rung.tokens, seed)
            todo.append(self._trial(f"lr-{lr:g}-t{rung.tokens}-s{seed}", config))
        earlier = {trial.name for trial in todo if trials.earlier_outcome(trial) is not None}
        if earlier:
            self._log(f"resuming: {len(earlier)} of {len(todo)} trials already done")
        done: dict[str, LrTrial] = {}
        try:
            for trial, outcome in self._runs.run(todo):
                result = done[trial.name] = read_trial(trial, outcome)
                if trial.name in earlier:
                    self._progress.skip(trial_s)
                    continue
                failed = result.score == math.inf
                how = f"{result.status}: {result.reason}" if failed else f"held-out loss {result.score:.4f}"
                tokens = format_si(result.tokens, "tokens")
                text = f"rate {result.lr:g}, {tokens}, seed {result.seed}: {how}"
                self._progress.ended(trial_s, outcome.seconds, text)
        finally:
            results = [done[trial.name] for trial in todo if trial.name in done]
            rung.trials[:] = lr_search.mark_diverged([*rung.trials, *results], spec.unigram)

    def _trial(self, name: str, config: Config) -> trials.Trial:
        config = config.model_copy(update={"precision": self.spec.precision})
        return trials.Trial(self._runs.out / "trials" / name, config, self.spec.ranks)

    def result(self, outcome: trials.SearchOutcome, facts: Mapping[str, Any]) -> TuneLr:
        """Return the contents of tune.json."""
        spec, trained = self.spec, [trial for rung in self.rungs for trial in rung.trials]
        return TuneLr(
            status=outcome.status,
            reason=outcome.reason,
            date=datetime.date.today().isoformat(),
            seconds=self._range_s + sum(trial.seconds for trial in trained),
            **facts,
            config=spec.config.model_dump(mode="json"),
            settings=spec.options,
            tokens=self.tokens,
            ranks=spec.ranks,
            at_a_time=spec.at_a_time,
            range_test=self.range_test,
            rungs=self.rungs,
            choice=lr_search.choose_rate(self.rungs) if outcome.status == "complete" else None,
        )


# --- lengths of runs


def step_tokens(config: Config) -> int:
    """Return the number of tokens in a step with the full global batch."""
    return config.batch.global_size * config.data.sequence_length


def whole_steps(config: Config, tokens: float) -> int:
    """Round a number of tokens to a multiple of `step_tokens`, at least one step."""
    size = step_tokens(config)
    return max(1, round(tokens / size)) * size


def full_tokens(config: Config) -> int | None:
    """Return the number of tokens of the configured run, taking a batch ramp into account. Return None if the
    budget is neither in steps nor in tokens."""
    batch, steps = config.batch, config.schedule.steps
    if steps is None:
        return config.schedule.tokens
    ramped = math.ceil(batch.ramp_fraction * steps)  # steps before the batch reaches its full size
    samples = sum(batch_at(batch, step / steps) for step in range(ramped))
    return (samples + (steps - ramped) * batch.global_size) * config.data.sequence_length


def range_steps(config: Config, tokens: int | None) -> int:
    """Return the number of steps of the range test. `tokens`: tokens of a whole run; None = not yet known."""
    if tokens is None:
        return RANGE_STEPS
    return min(RANGE_STEPS, max(MIN_RANGE_STEPS, tokens // RANGE_RATIO // step_tokens(config)))


# --- trials


def trial_config(config: Config, shards: Path, lr: float, tokens: int, seed: int) -> Config:
    """Return the configuration of a run that completes its schedule in `tokens` tokens and then evaluates."""
    budget: dict[str, int | None] = {"tokens": tokens, "steps": None}
    if config.schedule.steps and config.batch.ramp_fraction:
        # keep a budget in steps, because a batch ramp over steps differs from one over tokens
        share = tokens / (full_tokens(config) or tokens)
        budget = {"tokens": None, "steps": max(1, round(share * config.schedule.steps))}
    return with_settings(_bare(config, shards, lr, seed), schedule=dict.fromkeys(schema.BUDGETS) | budget)


def range_config(config: Config, shards: Path, steps: int) -> Config:
    """Return the configuration of the range test: no batch ramp, and a rate that rises from 1e-4 to 1."""
    whole = {"ramp_fraction": 0.0, "ramp_quantum": None}
    trial = with_settings(_bare(config, shards, 1.0, config.run.seed), batch=whole)
    schedule = schema.ScheduleConfig(name="exponential", steps=steps)
    return trial.model_copy(update={"schedule": schedule, "log": schema.LogConfig(every_steps=1)})


def _bare(config: Config, shards: Path, lr: float, seed: int) -> Config:
    """Return a configuration that saves no checkpoints; all seeds use `shards` and share a held-out set."""
    trial = with_settings(
        config,
        run={"seed": seed},
        data={"path": str(shards), "sources": None, "tokenizer": None, "build": schema.BuildConfig()},
        optim=fixed_rate(lr),
        eval={"every_steps": 0},
    )
    log = schema.LogConfig(every_steps=config.log.every_steps)
    return trial.model_copy(update={"checkpoint": schema.CheckpointConfig(keep=0), "log": log})


def fixed_rate(lr: float) -> dict[str, Any]:
    """Return the `optim` settings that use `lr` without scaling."""
    return {"lr": lr, "lr_scaling": "none", "lr_batch": None}


def tuned_config(config: Config, lr: float) -> Config:
    """Return the configuration with rate `lr`, which lr_scaling leaves unchanged at the configured batch."""
    update = fixed_rate(lr)
    if config.optim.lr_scaling != "none":
        update |= {"lr_scaling": config.optim.lr_scaling, "lr_batch": config.batch.global_size}
    return with_settings(config, optim=update)


def read_trial(trial: trials.Trial, outcome: trials.TrialOutcome) -> LrTrial:
    """Read the result of a finished trial."""
    directory, config = trial.directory, trial.config
    summary = trials.read_summary(directory) or Summary(status="failed")
    status: LrTrialStatus = outcome.status
    reason = None if status == "ok" else trials.cause(directory)
    if status == "ok" and summary.heldout_loss is None:
        status, reason = "diverged", "the held-out loss is not finite"
    elif status == "failed" and trials.failure_kind(directory) == "not_finite":
        status = "diverged"
    return LrTrial(
        name=trial.name,
        lr=float(config.optim.lr),
        seed=config.run.seed,
        status=status,
        reason=reason,
        heldout_loss=summary.heldout_loss,
        heldout=summary.heldout,
        tokens=summary.tokens or step_tokens(config) * summary.step,
        seconds=outcome.seconds,
    )
