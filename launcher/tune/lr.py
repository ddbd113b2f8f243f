"""Find the learning rate by short complete runs, or carry one to another global batch by published rules."""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_dp import files
from bert_dp.config import (
    BuildConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    Issue,
    LogConfig,
    Manifest,
    ScheduleConfig,
    batch_at,
    batch_layout,
    with_budget,
)
from bert_dp.files.models import Summary
from launcher import job, results
from launcher.job import DataSession, Output, SearchState, write_result
from launcher.log import Log, logger
from launcher.report.numbers import count_of, format_duration, format_si
from launcher.results import TimedPlanFile
from launcher.run import trials
from launcher.run.trials import (
    Progress,
    Runner,
    SearchOutcome,
    Trial,
    TrialOutcome,
    TrialsFailed,
    cause,
    earlier_outcome,
    failure_kind,
    read_summary,
    run_to_end,
)
from launcher.tune import lr_search, with_settings, write_tuned
from launcher.tune.lr_search import FINALISTS, LrOptions, LrTrial, LrTrialStatus, RangeTest, Rung, TuneLr

if TYPE_CHECKING:
    from rich.console import Console
import json
import sys
from typing import TYPE_CHECKING

from bert_dp.config import load_config, parse_overrides, peak_lr, resolve
from bert_dp.config.batch import UNTUNED_BATCH, UNTUNED_LR
from launcher.log import PLAIN, show
from launcher.tune import FILE

STATE = "search.json"
FIXED = ("kind", "config_hash", "settings")
SHORT_RATIO = 8  # of a whole run over a run of the first rung; also the least steps of a whole run
RANGE_TOP = 1.0  # rate at the end of a range test, which begins at 1e-4 of it
RANGE_STEPS, MIN_RANGE_STEPS = 100, 25
RANGE_RATIO = 16  # of the steps of a whole run over those of a range test
SHORT_BUDGET_H = 0.5  # a budget in hours below it has a range test of MIN_RANGE_STEPS


class LrPlanFile(TimedPlanFile):
    """search.json: the options that a search was begun with, and the length of its runs once it is known."""

    kind: Literal["lr"] = "lr"
    settings: dict[str, Any]
    tokens: int | None = None
    tokens_why: str | None = None


@dataclasses.dataclass(frozen=True)
class LrSearchSpec:
    """The configuration, the data and the devices of a search."""

    config: Config
    options: LrOptions
    ranks: int
    """Ranks of a trial."""
    shards: Path
    unigram: float | None
    """Unigram entropy of the data, nats."""
    at_a_time: int
    """Trials that run at a time."""
    precision: str
    """Precision of every trial."""

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of a finalist."""
        return [self.config.run.seed + k for k in range(self.options.seeds)]

    @property
    def planned(self) -> tuple[tuple[int, float], ...]:
        """Return (trials, share of the tokens of a whole run) of both rungs."""
        whole_runs = FINALISTS * self.options.seeds + 1  # one neighbour of the best included
        return (self.options.rates, 1 / SHORT_RATIO), (whole_runs, 1.0)


# --- the verb


def tune_lr(
    name: str | None,
    overrides: Sequence[str],
    options: LrOptions,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Run the search and return the exit code.

    Raises ConfigError with every problem of the input before any trial starts.
    """
    from launcher.tune.tune_page import lr_page

    setup = job.load(name, overrides)
    config = setup.config
    ranks = options.ranks or config.parallel.tensor
    folder = setup.directory(out, "tune", "lr")
    plan = LrPlanFile(
        config_hash=config.hash(), config=config.model_dump(mode="json"), settings=results.plain(options)
    )
    output = Output(folder, "search", STATE, plan, FIXED)
    issues = [*job.input_issues(config), *setup.device_issues(ranks), *option_issues(config, options, ranks)]
    if issues := [*{str(issue): issue for issue in issues}.values(), *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in setup.device_warnings():
        log(f"warning: {line}")
    log(f"learning rate search: {folder}")
    log(
        f"{options.rates} rates spaced 2x at 1/{SHORT_RATIO} of a whole run, then {FINALISTS} with "
        f"{count_of(options.seeds, 'seed')} at all of it; {batch_layout(config, ranks)}"
    )
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.lock():
        tuned, exit_code = measure(setup, options, ranks, output, log)
        write_result(tuned, lr_page(tuned, folder), folder, as_json=as_json, console=console)
    return exit_code


def option_issues(config: Config, options: LrOptions, ranks: int) -> list[Issue]:
    """Return the reasons that these options cannot be searched with this configuration."""
    issues: list[Issue] = [*length_issues(config, options)]
    try:
        batch_layout(with_settings(config, optim=fixed_rate(1.0)), ranks)
    except ConfigError as error:
        issues += error.issues
    return issues


def length_issues(config: Config, options: LrOptions, tokens: int | None = None) -> list[Issue]:
    """Return why whole runs are too short for two rungs; `tokens`: as measured for a budget in hours."""
    tokens = tokens or options.tokens or full_tokens(config)
    least = SHORT_RATIO * step_tokens(config)
    if tokens is None or tokens >= least:
        return []
    reason = f"{tokens:,} tokens are fewer than {SHORT_RATIO} steps, of which the first rung takes one"
    setting, hint = "--tokens" if options.tokens else "schedule", f"give at least {least:,}"
    return [Issue(setting, "out_of_range", reason, value=tokens, hint=hint)]


def data_issues(config: Config, options: LrOptions, manifest: Manifest) -> list[Issue]:
    """Return why rates cannot be searched on this data, which decides the tokens of schedule.epochs."""
    issues = length_issues(with_budget(config, manifest.train.sequences), options)
    if not manifest.held_out.sequences:
        hint = "raise data.build.held_out_fraction"
        issues.append(Issue("data", "missing", "no documents are held out to choose the rate by", hint=hint))
    return issues


def measure(
    setup: job.Job, options: LrOptions, ranks: int, output: Output[LrPlanFile], log: Log
) -> tuple[TuneLr, int]:
    """Run the search, or go on with it; return tune.json, partial after a signal, and the exit code."""
    config, out, on_gpu = setup.config, output.path, setup.gpus > 0
    session = output.begin(config, lambda manifest: data_issues(config, options, manifest))
    slots = trials.device_slots(
        ranks,
        gpus=setup.gpus,
        cores=int(session.machine["usable_cores"]),
        most=max(options.rates, FINALISTS * options.seeds),
    )
    spec = LrSearchSpec(
        with_budget(config, session.manifest.train.sequences),
        options,
        ranks,
        session.shards,
        session.manifest.unigram_entropy_nats,
        len(slots),
        trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu),
    )
    plan = SearchState(out / STATE, session.plan)
    with trials.runner(out, slots, launcher=options.launcher, on_gpu=on_gpu, log=log) as runs:
        search = LrSearch(spec, runs, plan, log)
        outcome = run_to_end(search.run, out, log)
    plan.save()
    tuned = search.result(outcome, session)
    write_tuned(tuned, tuned_config(config, tuned.choice.lr) if tuned.choice else None, out)
    return tuned, outcome.exit_code


# --- the search


class LrSearch:
    """Search of the rate. `range_test` and `rungs` hold what was measured, also when the search is stopped.

    Every decision follows from the trials' records, so a search that goes on decides the same.
    """

    def __init__(self, spec: LrSearchSpec, runs: Runner, plan: SearchState[LrPlanFile], log: Log):
        self.spec, self._runs, self.plan, self._log = spec, runs, plan, log
        self.range_test: RangeTest | None = None
        self.range_tokens = 0
        self.rungs: list[Rung] = []
        self._tokens_per_s = self._fixed_s = self._range_s = 0.0  # as the range test measured
        self._progress = Progress([], log)

    def run(self) -> None:
        """Run the whole search. Raises Stopped for a signal, TrialsFailed, ConfigError for too few hours."""
        test = self.range_test = self._test_range()
        tokens = self._fix_tokens()
        expected = [self._trial_s(share * tokens) for count, share in self.spec.planned for _ in range(count)]
        self._progress = Progress(expected, self._log, self.spec.at_a_time)
        self.train_rungs(test, tokens)

    def train_rungs(self, test: RangeTest, tokens: int) -> None:
        """Train short runs of a ladder of rates, then whole runs of the best. Raises TrialsFailed."""
        first = self._open_rung("first", tokens // SHORT_RATIO, self.spec.seeds[:1])
        ladder = lr_search.first_ladder(test, self.spec.options.rates)
        while more := lr_search.next_short_rates(first, ladder, test.edge):
            self._train(first, [(lr, first.seeds[0]) for lr in more])
        if not first.ranked():
            raise TrialsFailed("no rate of the first rung can be chosen")
        last = self._open_rung("last", tokens, self.spec.seeds)
        while todo := lr_search.next_whole_runs(first, last):
            self._train(last, todo)
        if not last.ranked():
            raise TrialsFailed("no rate of the last rung can be chosen")

    def _test_range(self) -> RangeTest:
        """Train while the rate rises. Raises TrialsFailed if nothing trains."""
        config = self.spec.config
        steps = range_steps(config, self.spec.options.tokens or full_tokens(config))
        trial = self._trial(f"range-{config.optim.name}", range_config(config, self.spec.shards, steps))
        self._log(f"range test: {steps} steps, the rate rising from {1e-4 * RANGE_TOP:g} to {RANGE_TOP:g}")
        outcome, directory = self._runs.run_one(trial), trial.directory
        lines = files.read_lines(directory / "metrics.jsonl")
        points = [(line["lr"], line["loss"], line["skipped_steps"]) for line in lines]
        self.range_tokens = len(points) * step_tokens(config)
        if not points or (outcome.status != "ok" and failure_kind(directory) != "not_finite"):
            raise TrialsFailed(f"{trial.name}: {outcome.status}: {cause(directory)}")
        edge, reason = lr_search.find_edge(points)
        self._log(f"  edge at {edge:.3g}: {reason}" if edge is not None else f"  {reason}")
        summary = read_summary(directory) or Summary(status="failed")
        self._tokens_per_s, self._range_s = summary.tokens_per_s or 0.0, outcome.seconds
        self._fixed_s = max(0.0, outcome.seconds - summary.time_s.get("train", 0.0))
        pairs = [(lr, loss) for lr, loss, _ in points]
        return RangeTest(trial=trial.name, points=pairs, edge=edge, reason=reason)

    def _fix_tokens(self) -> int:
        """Decide the tokens of a whole run, once for all calls, and log what is about to run."""
        spec = self.spec
        if self.plan.plan.tokens is None:
            tokens, reason = self._whole_tokens()
            if issues := length_issues(spec.config, spec.options, tokens):
                raise ConfigError(issues)
            self.plan.save(tokens=tokens, tokens_why=reason)
        tokens = self.plan.plan.tokens or 0
        self._log(f"whole run: {self.plan.plan.tokens_why}")
        self._log(
            f"about {sum(count for count, _ in spec.planned)} trials, {spec.at_a_time} at a time: "
            f"{format_duration(self._rungs_s(tokens))}"
        )
        return tokens

    def _whole_tokens(self) -> tuple[int, str]:
        """Return the tokens of a whole run and where they come from."""
        config, options = self.spec.config, self.spec.options
        tokens = options.tokens or full_tokens(config)
        reason = "as asked" if options.tokens else "the configuration's"
        if tokens is None:
            hours = config.schedule.hours or 0.0
            tokens = round(hours * 3600 * self._tokens_per_s)
            speed = f"{format_si(self._tokens_per_s, 'tokens/s')} of {count_of(self.spec.ranks, 'rank')}"
            reason = f"{hours:g} h at the measured {speed}; for more ranks give --tokens"
        tokens = whole_steps(config, tokens)
        if options.budget_s is not None:
            left_s, whole_s, fixed_s = (
                options.budget_s - self._range_s,
                self._rungs_s(tokens),
                self._rungs_s(0),
            )
            if whole_s > left_s:
                share = max(0.0, left_s - fixed_s) / (whole_s - fixed_s)
                reason = f"instead of {tokens:,}, for --budget; shorter runs like higher rates"
                least = SHORT_RATIO * step_tokens(config)
                tokens = max(least, whole_steps(config, math.floor(share * tokens)))
        return tokens, f"{tokens:,} tokens, {reason}"

    def _trial_s(self, tokens: float) -> float:
        """Return the expected seconds of a trial."""
        return self._fixed_s + tokens / (self._tokens_per_s or math.inf)

    def _rungs_s(self, tokens: int) -> float:
        """Return the expected seconds of both rungs with whole runs of `tokens`."""
        return sum(
            math.ceil(count / self.spec.at_a_time) * self._trial_s(share * tokens)
            for count, share in self.spec.planned
        )

    def _open_rung(self, name: str, tokens: int, seeds: list[int]) -> Rung:
        rung = Rung(tokens=whole_steps(self.spec.config, tokens), seeds=seeds)
        self.rungs.append(rung)
        self._log(f"{name} rung: {format_si(rung.tokens, 'tokens')} a run, {count_of(len(seeds), 'seed')}")
        return rung

    def _train(self, rung: Rung, runs: Sequence[tuple[float, int]]) -> None:
        """Train each (rate, seed) and add the results to the rung, in this order."""
        spec, trial_s = self.spec, self._trial_s(rung.tokens)
        todo = []
        for lr, seed in runs:
            name = trial_name(spec.config, lr, rung.tokens, seed)
            todo.append(self._trial(name, trial_config(spec.config, spec.shards, lr, rung.tokens, seed)))
        earlier = {trial.name for trial in todo if earlier_outcome(trial) is not None}
        if earlier:
            self._log(f"resuming: {len(earlier)} of {len(todo)} trials already done")
        done: dict[str, LrTrial] = {}
        try:
            for trial, outcome in self._runs.run(todo):
                result = done[trial.name] = read_trial(trial, outcome)
                if trial.name in earlier:
                    self._progress.had(trial_s)
                else:
                    self._progress.ended(trial_s, outcome.seconds, describe_trial(result))
        finally:
            here = [done[trial.name] for trial in todo if trial.name in done]
            rung.trials[:] = lr_search.mark_diverged([*rung.trials, *here], spec.unigram)
            self.plan.save()

    def _trial(self, name: str, config: Config) -> Trial:
        config = config.model_copy(update={"precision": self.spec.precision})
        return Trial(self._runs.out / "trials" / name, config, self.spec.ranks)

    def result(self, outcome: SearchOutcome, session: DataSession[LrPlanFile]) -> TuneLr:
        """Return tune.json."""
        spec, plan = self.spec, self.plan.plan
        return TuneLr(
            status=outcome.status,
            reason=outcome.reason,
            date=datetime.date.today().isoformat(),
            seconds=plan.seconds,
            **session.facts(),
            config=spec.config.model_dump(mode="json"),
            settings=spec.options,
            tokens=plan.tokens,
            tokens_why=plan.tokens_why,
            ranks=spec.ranks,
            at_a_time=spec.at_a_time,
            unigram_entropy_nats=spec.unigram,
            range_test=self.range_test,
            rungs=self.rungs,
            choice=lr_search.choose_rate(self.rungs) if outcome.status == "complete" else None,
            trained_tokens=self.range_tokens + sum(t.tokens for rung in self.rungs for t in rung.trials),
        )


def describe_trial(trial: LrTrial) -> str:
    """Return one line about the result of a trial."""
    how = f"held-out {trial.score:.4f}" if trial.score < math.inf else f"{trial.status}: {trial.cause}"
    return f"rate {trial.lr:g}, {format_si(trial.tokens, 'tokens')}, seed {trial.seed}: {how}"


# --- lengths of runs


def step_tokens(config: Config) -> int:
    """Return the tokens of a step of the full global batch."""
    return config.batch.global_size * config.data.sequence_length


def whole_steps(config: Config, tokens: float) -> int:
    """Round tokens to whole steps of the full global batch, at least one."""
    size = step_tokens(config)
    return max(1, round(tokens / size)) * size


def full_tokens(config: Config) -> int | None:
    """Return the tokens of the configured run with its batch ramp; None for a budget in hours."""
    batch, steps = config.batch, config.schedule.steps
    if steps is None:
        return config.schedule.tokens
    samples = step = 0
    while step < steps:  # by the sizes of the ramp: there may be many steps
        size = batch_at(batch, step / steps)
        beyond = bisect.bisect_right(range(steps), size, lo=step, key=lambda k: batch_at(batch, k / steps))
        samples, step = samples + size * (beyond - step), beyond
    return samples * config.data.sequence_length


def range_steps(config: Config, tokens: int | None) -> int:
    """Return the steps of the range test for whole runs of `tokens`; None: not known yet."""
    if tokens is None:
        is_short = (config.schedule.hours or math.inf) < SHORT_BUDGET_H
        return MIN_RANGE_STEPS if is_short else RANGE_STEPS
    return min(RANGE_STEPS, max(MIN_RANGE_STEPS, tokens // RANGE_RATIO // step_tokens(config)))


# --- trials


def trial_name(config: Config, lr: float, tokens: int, seed: int) -> str:
    """Return the name of the trial's directory."""
    return f"{config.optim.name}-lr-{lr:g}-wd-{config.optim.weight_decay:g}-t{tokens}-s{seed}"


def trial_config(config: Config, shards: Path, lr: float, tokens: int, seed: int) -> Config:
    """Return one complete run of `tokens` tokens, its own schedule to the end, evaluated there."""
    budget: dict[str, int | None] = {"tokens": tokens, "steps": None}
    if config.schedule.steps and config.batch.ramp_fraction:
        # progress in steps ramps otherwise than in tokens
        share = tokens / (full_tokens(config) or tokens)
        budget = {"tokens": None, "steps": max(1, round(share * config.schedule.steps))}
    return with_settings(_bare(config, shards, lr, seed), schedule={**budget, "hours": None})


def range_config(config: Config, shards: Path, steps: int) -> Config:
    """Return a run whose rate rises over four decades, at the full batch from the start."""
    trial = with_settings(
        _bare(config, shards, RANGE_TOP, config.run.seed), batch={"ramp_fraction": 0.0, "ramp_quantum": None}
    )
    schedule = ScheduleConfig(name="exponential", steps=steps)
    return trial.model_copy(update={"schedule": schedule, "log": LogConfig(every_steps=1)})


def _bare(config: Config, shards: Path, lr: float, seed: int) -> Config:
    """Return the configuration without checkpoints, its data by directory: all seeds hold out the same."""
    trial = with_settings(
        config,
        run={"seed": seed},
        data={"path": str(shards), "sources": None, "tokenizer": None, "build": BuildConfig()},
        optim=fixed_rate(lr),
        eval={"every_steps": 0},
    )
    update = {"checkpoint": CheckpointConfig(keep=0), "log": LogConfig(every_steps=config.log.every_steps)}
    return trial.model_copy(update=update)


def fixed_rate(lr: float) -> dict[str, Any]:
    """Return the settings of `optim` for a rate that no rule scales."""
    return {"lr": lr, "lr_scaling": "none", "lr_batch": None}


def tuned_config(config: Config, lr: float) -> Config:
    """Return the user's run with this rate. Its rule for other batches starts from this batch."""
    update = fixed_rate(lr)
    if config.optim.lr_scaling != "none":
        update |= {"lr_scaling": config.optim.lr_scaling, "lr_batch": config.batch.global_size}
    return with_settings(config, optim=update)


def read_trial(trial: Trial, outcome: TrialOutcome) -> LrTrial:
    """Read the result of a trial that has ended."""
    directory, config = trial.directory, trial.config
    summary = read_summary(directory) or Summary(status="failed")
    status: LrTrialStatus = outcome.status
    reason, kind = (None, None) if status == "ok" else (cause(directory), failure_kind(directory))
    if status == "ok" and summary.heldout_loss is None:
        status, reason = "diverged", "the held-out loss is not finite"
    elif status == "failed" and kind == "not_finite":
        status = "diverged"
    return LrTrial(
        trial=trial.name,
        lr=float(config.optim.lr),
        seed=config.run.seed,
        status=status,
        failure_kind=kind,
        cause=reason,
        heldout_loss=summary.heldout_loss,
        heldout=summary.heldout,
        tokens=summary.tokens or step_tokens(config) * summary.step,
        seconds=outcome.seconds,
    )


def carry(
    name: str | None,
    overrides: Sequence[str],
    before: int,
    after: int,
    out: Path | None,
    *,
    as_json: bool,
    console: Console,
) -> int:
    """Print the configuration's rate, or the one found in OUT, carried from global batch `before` to `after`.

    Returns the exit code; raises ConfigError.
    """
    config = load_config(job.find_config(name), overrides)
    if out is None:
        lr = peak_lr(with_settings(config, batch={"global_size": before})).value
        source = "the configuration's"
    else:
        lr, config = found_rate(out / FILE, overrides, before)
        source = str(out / FILE)
    carried = transfer(config, lr, source, before, after)
    if as_json:
        sys.stdout.write(json.dumps(carried, indent=1) + "\n")
    else:
        for line in lines(carried):
            show(console, line, **PLAIN)
    return 0


def found_rate(path: Path, overrides: Sequence[str], before: int) -> tuple[float, Config]:
    """Return the rate that a search has found at global batch `before`, and its configuration at that rate.

    Raises ConfigError.
    """
    tuned = results.find(path, TuneLr)
    if tuned is None or tuned.choice is None:
        hint = "drop --out to carry the configuration's rate"
        raise ConfigError([Issue("--out", "not_found", f"{path} holds no chosen learning rate", hint=hint)])
    config = Config.model_validate_json(json.dumps(tuned.config))
    if before != config.batch.global_size:
        message = f"{path} was tuned at global batch {config.batch.global_size}, not {before}"
        raise ConfigError([Issue("--transfer", "conflict", message, before, str(path))])
    if resolve([tuned.config, parse_overrides(overrides)]).optim != config.optim:
        message = f"the search of {path} had another `optim`"
        raise ConfigError([Issue("optim", "conflict", message, other="--out", hint="drop --set or --out")])
    return tuned.choice.lr, tuned_config(config, tuned.choice.lr)


def transfer(config: Config, lr: float, source: str, before: int, after: int) -> dict[str, Any]:
    """Return `lr`, tuned at global batch `before`, at `after` by each rule.

    sqrt (Adam): lr sqrt(k), with 1 - beta -> k (1 - beta) and eps -> eps / sqrt(k), for k = after / before;
    null where a beta would fall below 0. linear (SGD): lr k. untuned_lamb: of the batch alone.
    """
    optim, k = config.optim, after / before
    root, untuned = k**0.5, UNTUNED_LR * (after / UNTUNED_BATCH) ** 0.5
    betas = {name: 1 - k * (1 - getattr(optim, name)) for name in ("beta1", "beta2")}
    papers = [
        ("sqrt", "Adam and AdamW", "arXiv 2205.10287", lr * root, f"{lr:g} x sqrt({after} / {before})"),
        ("linear", "SGD", "arXiv 1706.02677", lr * k, f"{lr:g} x {after} / {before}"),
        (
            "untuned_lamb",
            "LAMB",
            "arXiv 1904.00962",
            untuned,
            f"{UNTUNED_LR:g} x sqrt({after} / {UNTUNED_BATCH})",
        ),
    ]
    rules: list[dict[str, Any]] = [
        {"rule": rule, "for": use, "lr": rate, "source": paper, "equation": f"{rate:.4g} = {equation}"}
        for rule, use, paper, rate, equation in papers
    ]
    rules[0] |= {name: beta if beta >= 0 else None for name, beta in betas.items()}
    rules[0]["eps"] = optim.eps / root
    scaling = None if optim.lr_scaling == "none" else optim.lr_scaling
    return {
        "from_batch": before,
        "to_batch": after,
        "lr": lr,
        "lr_source": source,
        "rules": rules,
        "ours": "untuned_lamb" if optim.lr == "auto" else scaling,
    }


def lines(carried: dict[str, Any]) -> list[str]:
    """Return the lines to print."""
    lr, before, after = carried["lr"], carried["from_batch"], carried["to_batch"]
    out = [f"learning rate {lr:g} ({carried['lr_source']}), as tuned at global batch {before}, at {after}:"]
    for rule in carried["rules"]:
        out.append(f"  {rule['rule']:<13} {rule['equation']}  ({rule['for']}, {rule['source']})")
        if "eps" in rule:
            betas = {
                name: "below 0" if rule[name] is None else f"{rule[name]:.4g}" for name in ("beta1", "beta2")
            }
            also = ", ".join(f"{name} {text}" for name, text in betas.items())
            out.append(f"  {'':<13} the paper sets {also}, eps {rule['eps']:.3g}, unlike optim.lr_scaling")
    if carried["ours"] is None:
        advice = f"for the sqrt rule optim.lr_scaling=sqrt and optim.lr_batch={before}"
        out.append(f"the configuration keeps its rate at every batch (optim.lr_scaling: none); {advice}")
    else:
        out.append(f"the configuration follows {carried['ours']} (optim.lr: auto, or optim.lr_scaling)")
    return out
