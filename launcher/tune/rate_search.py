"""The learning rate search: a range test, a ladder of rates on short runs, the best of them on whole runs.

What is done follows from the settings and the trials' records alone, so a search that was interrupted makes
the same decisions again from what is there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import Config, ConfigError
from bert_dp.record.models import Summary
from launcher.job import KeptPlan
from launcher.log import Log
from launcher.report.numbers import format_duration, format_si
from launcher.results import LrOptions, LrPlanFile, LrTrial, Rung
from launcher.run.read_run import cause, failure_kind, read_summary
from launcher.run.trials import Progress, Runner, Trial, earlier_outcome
from launcher.tune import ladder, rate_trials
from launcher.tune.ladder import FINALISTS, Edge

SHORT = 8  # the first rung trains this part of the whole budget
LEAST_STEPS = SHORT  # of the whole budget: one in the first rung


class AllFailed(Exception):
    """Nothing could be measured; the text says why."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What is searched, and on what."""

    config: Config
    settings: LrOptions
    ranks: int
    """Of a trial."""
    shards: Path
    unigram: float | None
    """Unigram entropy of the data, nats."""
    at_a_time: int
    """Trials."""
    precision: str
    """Of every trial."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.config.run.seed + k for k in range(self.settings.seeds))


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """A run whose rate rises until training breaks, and how fast it was."""

    trial: str
    points: list[tuple[float, float | None, int]]
    """(rate, loss, steps skipped so far) of each step."""
    edge: Edge
    tokens_per_s: float
    fixed_s: float
    """Seconds of a trial beside its training."""
    eval_s: float
    """Seconds of one evaluation."""
    seconds: float

    def trial_s(self, tokens: int, *, last: bool) -> float:
        """Predicted seconds of a trial of the first or the last rung."""
        evaluations = (rate_trials.CURVE_POINTS - 1) * self.eval_s if last else 0.0
        return self.fixed_s + evaluations + tokens / (self.tokens_per_s or math.inf)


def planned(settings: LrOptions, tokens: int) -> tuple[tuple[int, int, bool], ...]:
    """(trials, tokens of each, whether it is the last) of both rungs, one rate beside the best included."""
    return (settings.rates, tokens // SHORT, False), (FINALISTS * settings.seeds + 1, tokens, True)


def predicted_s(test: RangeTest, q: Question, tokens: int) -> float:
    """Of both rungs for a whole budget of `tokens`, wall clock."""
    rungs = planned(q.settings, tokens)
    return sum(math.ceil(count / q.at_a_time) * test.trial_s(n, last=last) for count, n, last in rungs)


def whole_budget(test: RangeTest, q: Question) -> tuple[int, str]:
    """Tokens of a whole run, and where they come from."""
    asked, full = q.settings.tokens, rate_trials.full_tokens(q.config)
    if asked is not None:
        tokens = rate_trials.whole(q.config, asked)
        why = f"{tokens:,} tokens, as asked"
    elif full is not None:
        tokens = rate_trials.whole(q.config, full)
        why = f"{tokens:,} tokens, the configuration's"
    else:
        hours = q.config.schedule.hours or 0.0
        tokens = rate_trials.whole(q.config, hours * 3600 * test.tokens_per_s)
        why = (
            f"{hours:g} h at the measured {format_si(test.tokens_per_s, 'tokens/s')} of {q.ranks} "
            f"rank{'s' if q.ranks > 1 else ''} = {tokens:,} tokens; more ranks would train more: then give "
            "--tokens"
        )
    return (
        (tokens, why) if q.settings.budget_s is None else _within(q.settings.budget_s, test, q, tokens, why)
    )


def _within(budget_s: float, test: RangeTest, q: Question, tokens: int, why: str) -> tuple[int, str]:
    """The whole budget shortened so that the search, its range test included, fits into `budget_s`."""
    whole, fixed = predicted_s(test, q, tokens), predicted_s(test, q, 0)
    if whole + test.seconds <= budget_s:
        return tokens, why
    share = max(0.0, budget_s - test.seconds - fixed) / (whole - fixed)
    least = LEAST_STEPS * rate_trials.step_tokens(q.config)
    fitting = max(least, rate_trials.whole(q.config, math.floor(share * tokens)))
    return (
        fitting,
        f"{fitting:,} tokens instead of {tokens:,}, for --budget; a shorter run takes a higher rate",
    )


class RateSearch:
    """`range_test` and `rungs` hold what has been measured, also when the search is stopped."""

    def __init__(self, question: Question, runs: Runner, file: KeptPlan[LrPlanFile], log: Log):
        self.q, self._runs, self._file, self._log = question, runs, file, log
        self.range_test: RangeTest | None = None
        self.range_tokens = 0
        self.tokens = 0
        """Of a whole run."""
        self.rungs: list[Rung] = []

    def run(self) -> None:
        """To the last rung. Raises Stopped for a signal, AllFailed, ConfigError for a budget too small."""
        test = self.range_test = self._test_range()
        self.tokens = self._settle_tokens(test)
        rungs = planned(self.q.settings, self.tokens)
        expected = [test.trial_s(n, last=last) for count, n, last in rungs for _ in range(count)]
        progress = Progress(expected, self._log)
        first = self._climb(test.edge, progress)
        order = ladder.ranked(first)
        if not order:
            raise AllFailed("no rate of the first rung can be chosen")
        first.kept.extend(ladder.candidates(first, order[:FINALISTS]))
        self._train_finalists(order, progress)

    def _test_range(self) -> RangeTest:
        """Raises AllFailed when nothing trains."""
        config = self.q.config
        steps = rate_trials.range_steps(config, self.q.settings.tokens or rate_trials.full_tokens(config))
        trial = self._trial(
            f"range-{config.optim.name}", rate_trials.range_config(config, self.q.shards, steps)
        )
        top = rate_trials.RANGE_TOP
        self._log(f"range test: {steps} steps, the rate rising from {1e-4 * top:g} to {top:g}")
        outcome, directory = self._runs.run_one(trial), trial.directory
        points, why = rate_trials.range_points(directory), cause(directory)
        self.range_tokens = len(points) * rate_trials.step_tokens(config)
        if not points or (outcome.status != "ok" and failure_kind(directory) != "not_finite"):
            raise AllFailed(f"{trial.name}: {outcome.status}: {why}")
        summary, seconds = read_summary(directory) or Summary(status="failed"), outcome.seconds
        edge = ladder.find_edge(points)
        self._log(f"  edge at {edge.lr:.3g}: {edge.why}" if edge.lr is not None else f"  {edge.why}")
        return RangeTest(
            trial.name,
            points,
            edge,
            summary.tokens_per_s or 0.0,
            max(0.0, seconds - summary.time_s.get("train", 0.0)),
            summary.time_s.get("eval", 0.0),
            seconds,
        )

    def _settle_tokens(self, test: RangeTest) -> int:
        """Tokens of a whole run; what is about to run is said."""
        if self._file.plan.tokens is None:
            tokens, why = whole_budget(test, self.q)
            if tokens < LEAST_STEPS * rate_trials.step_tokens(self.q.config):
                raise ConfigError(
                    [f"schedule: {tokens:,} tokens are fewer than {LEAST_STEPS} steps; raise schedule.hours"]
                )
            self._file.save(tokens=tokens, tokens_why=why)
        plan = self._file.plan
        tokens = plan.tokens or 0
        rungs = planned(self.q.settings, tokens)
        total = sum(count * each for count, each, _ in rungs)
        self._log(f"whole run: {plan.tokens_why}")
        self._log(
            f"{sum(count for count, *_ in rungs)} trials, {format_si(total, 'tokens')}, "
            f"{self.q.at_a_time} at a time: about {format_duration(predicted_s(test, self.q, tokens))}, and "
            f"up to {2 * ladder.EXTENSIONS} more where the best stands at an end"
        )
        return tokens

    def _open_rung(self, tokens: int, seeds: tuple[int, ...], *, last: bool) -> Rung:
        rung = Rung(tokens=rate_trials.whole(self.q.config, tokens), seeds=list(seeds), last=last)
        self.rungs.append(rung)
        self._log(
            f"{'last' if last else 'first'} rung: {format_si(rung.tokens, 'tokens')} a run, "
            f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        )
        return rung

    def _climb(self, edge: Edge, progress: Progress) -> Rung:
        """The first rung: a ladder of rates below the edge, longer while the best stands at an end."""
        rung = self._open_rung(self.tokens // SHORT, self.q.seeds[:1], last=False)
        rates = ladder.first_ladder(edge, self.q.settings.rates)
        self._train(rung, rates, rung.seeds, progress)
        while (more := ladder.extension(rung.trials, edge, rates)) is not None:
            self._log(f"the best rate stands at the end of the ladder; next to it: {more:g}")
            progress.expect(self._share(rung))
            self._train(rung, [more], rung.seeds, progress)
        return rung

    def _train_finalists(self, order: Sequence[float], progress: Progress) -> None:
        """The last rung: every seed of the best of `order`, and of the rates beside the best until it has
        neighbours here. Where that takes the devices several turns, a rate that is behind after the first
        seed trains the others only if the best turns out worse than that. A rate further down takes the place
        of finalists that cannot be chosen."""
        last = self._open_rung(self.tokens, self.q.seeds, last=True)
        finalists, spare = order[:FINALISTS], order[FINALISTS:]
        seeds = last.seeds
        at_once = self.q.at_a_time >= len(finalists) * len(seeds)
        self._train(last, finalists, seeds if at_once else seeds[:1], progress)
        while (more := ladder.beside(self.rungs, last)) is not None:
            self._log(f"next to the best, not yet trained in full: {more:g}")
            self._train(last, [more], seeds[:1], progress)
        near = ladder.near(last)
        for lr in ladder.ranked(last):
            if lr not in near and last.num_seeds(lr) < len(seeds):
                behind = last.mean(lr) - last.mean(near[0])
                self._log(f"{lr:g} is {behind:.4f} nats behind after one seed: left out")
        self._train(last, near[:FINALISTS], seeds[1:], progress)
        while (ranked := ladder.ranked(last)) and last.num_seeds(ranked[0]) < len(seeds):
            self._train(last, ranked[:1], seeds[1:], progress)
        for lr in spare:
            if ladder.ranked(last):
                break
            self._log(f"no finalist can be chosen; next: {lr:g}")
            self._train(last, [lr], seeds, progress)

    def _train(self, rung: Rung, rates: Sequence[float], seeds: Sequence[int], progress: Progress) -> None:
        """Each rate with each of these seeds that it has not had; the results in that order."""
        q = self.q
        had = {(t.lr, t.seed) for t in rung.trials}
        named = {
            rate_trials.trial_name(q.config, lr, rung.tokens, seed): (lr, seed)
            for seed in seeds
            for lr in rates
            if (lr, seed) not in had
        }
        todo = [
            self._trial(
                name, rate_trials.trial_config(q.config, q.shards, lr, rung.tokens, seed, last=rung.last)
            )
            for name, (lr, seed) in named.items()
        ]
        there = {trial.name for trial in todo if earlier_outcome(trial) is not None}
        if there:
            self._log(f"resuming: {len(there)} of {len(todo)} trials already done")
        before = len(rung.trials)
        try:
            for trial, ended in self._runs.run(todo):
                done = rate_trials.read_trial(
                    q.config, trial.directory, ended.status, *named[trial.name], ended.seconds
                )
                rung.trials.append(done)
                if trial.name in there:
                    progress.had(self._share(rung))
                else:
                    progress.ended(self._share(rung), result_text(done, rung))
        finally:
            places = {name: place for place, name in enumerate(named)}
            rung.trials[before:] = sorted(rung.trials[before:], key=lambda t: places[t.trial])
            rung.trials[:] = ladder.marked_diverged(rung.trials, q.unigram)
            self._file.save()

    def _trial(self, name: str, config: Config) -> Trial:
        config = config.model_copy(update={"precision": self.q.precision})
        return Trial(self._runs.out / "trials" / name, config, self.q.ranks)

    def _share(self, rung: Rung) -> float:
        """Predicted seconds of a trial of this rung."""
        return self.range_test.trial_s(rung.tokens, last=rung.last) if self.range_test else 0.0


def result_text(trial: LrTrial, rung: Rung) -> str:
    """What is said of a trial."""
    how = f"{trial.status}: {trial.cause}"
    if trial.score < math.inf:
        how = f"held-out {trial.score:.4f}"
    return f"rate {trial.lr:g}, {format_si(rung.tokens, 'tokens')}, seed {trial.seed}: {how}"
