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
from launcher.log import Log
from launcher.output import KeptPlan
from launcher.report.numbers import count_of, format_duration, format_si
from launcher.results import LrOptions, LrPlanFile, LrTrial, RangeTest, Rung
from launcher.run.read_run import cause, failure_kind, read_summary
from launcher.run.trials import Progress, Runner, Trial, TrialsFailed, earlier_outcome
from launcher.tune import ladder, rate_trials
from launcher.tune.ladder import FINALISTS

SHORT = 8  # the first rung trains this part of the whole budget; the whole has as many steps at least


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
class Pace:
    """What trials take, as the range test was seen to."""

    tokens_per_s: float
    fixed_s: float
    """Of a trial beside its training."""
    eval_s: float
    """Of one evaluation."""
    range_s: float
    """Of the range test."""

    def trial_s(self, tokens: int, *, last: bool) -> float:
        """Predicted seconds of a trial of the first or the last rung."""
        evaluations = (rate_trials.CURVE_POINTS - 1) * self.eval_s if last else 0.0
        return self.fixed_s + evaluations + tokens / (self.tokens_per_s or math.inf)

    def rungs_s(self, q: Question, tokens: int) -> float:
        """Predicted seconds of both rungs, for whole runs of `tokens`."""
        rungs = planned(q.settings, tokens)
        return sum(math.ceil(count / q.at_a_time) * self.trial_s(n, last=last) for count, n, last in rungs)


def planned(settings: LrOptions, tokens: int) -> tuple[tuple[int, int, bool], ...]:
    """(trials, tokens of each, whether it is the last) of both rungs, one rate beside the best included."""
    return (settings.rates, tokens // SHORT, False), (FINALISTS * settings.seeds + 1, tokens, True)


def whole_budget(q: Question, pace: Pace) -> tuple[int, str]:
    """Tokens of a whole run, and where they come from."""
    config, wanted, full = q.config, q.settings.tokens, rate_trials.full_tokens(q.config)
    if wanted is not None:
        tokens = rate_trials.whole(config, wanted)
        why = f"{tokens:,} tokens, as asked"
    elif full is not None:
        tokens = rate_trials.whole(config, full)
        why = f"{tokens:,} tokens, the configuration's"
    else:
        hours = config.schedule.hours or 0.0
        tokens = rate_trials.whole(config, hours * 3600 * pace.tokens_per_s)
        speed = format_si(pace.tokens_per_s, "tokens/s")
        why = (
            f"{hours:g} h at the measured {speed} of {count_of(q.ranks, 'rank')} = {tokens:,} tokens; more "
            "ranks would train more: then give --tokens"
        )
    if q.settings.budget_s is None:
        return tokens, why
    left_s = q.settings.budget_s - pace.range_s
    whole_s, fixed_s = pace.rungs_s(q, tokens), pace.rungs_s(q, 0)
    if whole_s <= left_s:
        return tokens, why
    share = max(0.0, left_s - fixed_s) / (whole_s - fixed_s)
    least = SHORT * rate_trials.step_tokens(config)
    fitting = max(least, rate_trials.whole(config, math.floor(share * tokens)))
    why = f"{fitting:,} tokens instead of {tokens:,}, for --budget; a shorter run takes a higher rate"
    return fitting, why


class RateSearch:
    """`range_test` and `rungs` hold what has been measured, also when the search is stopped."""

    def __init__(self, question: Question, runs: Runner, plan: KeptPlan[LrPlanFile], log: Log):
        self.q, self._runs, self.plan, self._log = question, runs, plan, log
        self.range_test: RangeTest | None = None
        self.range_tokens = 0
        self.rungs: list[Rung] = []
        self._pace = Pace(0.0, 0.0, 0.0, 0.0)  # until the range test has shown it
        self._progress = Progress([], log)

    def run(self) -> None:
        """To the last rung. Raises Stopped for a signal, TrialsFailed, ConfigError for a budget too small."""
        test = self.range_test = self._test_range()
        tokens = self._settle_tokens()
        rungs = planned(self.q.settings, tokens)
        expected = [self._pace.trial_s(n, last=last) for count, n, last in rungs for _ in range(count)]
        self._progress = Progress(expected, self._log, self.q.at_a_time)
        first = self._climb(test, tokens // SHORT)
        order = ladder.ranked(first)
        if not order:
            raise TrialsFailed("no rate of the first rung can be chosen")
        first.kept.extend(ladder.candidates(first, order[:FINALISTS]))
        self._train_finalists(order, tokens)

    def _test_range(self) -> RangeTest:
        """Raises TrialsFailed when nothing trains."""
        config = self.q.config
        steps = rate_trials.range_steps(config, self.q.settings.tokens or rate_trials.full_tokens(config))
        name = f"range-{config.optim.name}"
        trial = self._trial(name, rate_trials.range_config(config, self.q.shards, steps))
        top = rate_trials.RANGE_TOP
        self._log(f"range test: {steps} steps, the rate rising from {1e-4 * top:g} to {top:g}")
        outcome, directory = self._runs.run_one(trial), trial.directory
        points = rate_trials.range_points(directory)
        self.range_tokens = len(points) * rate_trials.step_tokens(config)
        if not points or (outcome.status != "ok" and failure_kind(directory) != "not_finite"):
            raise TrialsFailed(f"{name}: {outcome.status}: {cause(directory)}")
        edge, why = ladder.find_edge(points)
        self._log(f"  edge at {edge:.3g}: {why}" if edge is not None else f"  {why}")
        summary = read_summary(directory) or Summary(status="failed")
        self._pace = Pace(
            tokens_per_s=summary.tokens_per_s or 0.0,
            fixed_s=max(0.0, outcome.seconds - summary.time_s.get("train", 0.0)),
            eval_s=summary.time_s.get("eval", 0.0),
            range_s=outcome.seconds,
        )
        pairs = [(lr, loss) for lr, loss, _ in points]
        return RangeTest(optimizer=config.optim.name, points=pairs, edge=edge, why=why, trial=name)

    def _settle_tokens(self) -> int:
        """Tokens of a whole run; what is about to run is said."""
        q = self.q
        if self.plan.plan.tokens is None:
            tokens, why = whole_budget(q, self._pace)
            if tokens < SHORT * rate_trials.step_tokens(q.config):
                raise ConfigError(
                    [f"schedule: {tokens:,} tokens are fewer than {SHORT} steps; raise schedule.hours"]
                )
            self.plan.save(tokens=tokens, tokens_why=why)
        tokens = self.plan.plan.tokens or 0
        rungs = planned(q.settings, tokens)
        trained = format_si(sum(count * each for count, each, _ in rungs), "tokens")
        self._log(f"whole run: {self.plan.plan.tokens_why}")
        self._log(
            f"{sum(count for count, *_ in rungs)} trials, {trained}, {q.at_a_time} at a time: about "
            f"{format_duration(self._pace.rungs_s(q, tokens))}, and up to {2 * ladder.EXTENSIONS} more where "
            "the best stands at an end"
        )
        return tokens

    def _open_rung(self, tokens: int, seeds: tuple[int, ...], *, last: bool) -> Rung:
        rung = Rung(tokens=rate_trials.whole(self.q.config, tokens), seeds=list(seeds), last=last)
        self.rungs.append(rung)
        length = format_si(rung.tokens, "tokens")
        self._log(f"{'last' if last else 'first'} rung: {length} a run, {count_of(len(seeds), 'seed')}")
        return rung

    def _climb(self, test: RangeTest, tokens: int) -> Rung:
        """The first rung: a ladder of rates below the edge, longer while the best stands at an end."""
        rung = self._open_rung(tokens, self.q.seeds[:1], last=False)
        rates = ladder.first_ladder(test, self.q.settings.rates)
        self._train(rung, rates, rung.seeds)
        while (more := ladder.extension(rung.trials, test.edge, rates)) is not None:
            self._log(f"the best rate stands at the end of the ladder; next to it: {more:g}")
            self._progress.expect(self._trial_s(rung))
            self._train(rung, [more], rung.seeds)
        return rung

    def _train_finalists(self, order: Sequence[float], tokens: int) -> None:
        """The last rung: every seed of the best of `order`, and of the rates beside the best until it has
        neighbours here. Where that takes the devices several turns, a rate that is behind after the first
        seed trains the others only if the best turns out worse than that. A rate further down takes the place
        of finalists that cannot be chosen."""
        last = self._open_rung(tokens, self.q.seeds, last=True)
        finalists, spare, seeds = order[:FINALISTS], order[FINALISTS:], last.seeds
        at_once = self.q.at_a_time >= len(finalists) * len(seeds)
        self._train(last, finalists, seeds if at_once else seeds[:1])
        while (more := ladder.beside(self.rungs, last)) is not None:
            self._log(f"next to the best, not yet trained in full: {more:g}")
            self._train(last, [more], seeds if at_once else seeds[:1])
        near = ladder.near(last)
        for lr in ladder.ranked(last):
            if lr not in near and len(last.scores(lr)) < len(seeds):
                behind = last.mean(lr) - last.mean(near[0])
                self._log(f"{lr:g} is {behind:.4f} nats behind after one seed: left out")
        self._train(last, near[:FINALISTS], seeds[1:])
        while (ranked := ladder.ranked(last)) and len(last.scores(ranked[0])) < len(seeds):
            self._train(last, ranked[:1], seeds[1:])
        for lr in spare:
            if ladder.ranked(last):
                break
            self._log(f"no finalist can be chosen; next: {lr:g}")
            self._train(last, [lr], seeds)
        if not ladder.ranked(last):
            raise TrialsFailed("no rate of the last rung can be chosen")

    def _train(self, rung: Rung, rates: Sequence[float], seeds: Sequence[int]) -> None:
        """Each rate with each of these seeds that it has not had; the results in that order."""
        q, had = self.q, {(trial.lr, trial.seed) for trial in rung.trials}
        todo = [
            self._trial(
                rate_trials.trial_name(q.config, lr, rung.tokens, seed),
                rate_trials.trial_config(q.config, q.shards, lr, rung.tokens, seed, last=rung.last),
            )
            for seed in seeds
            for lr in rates
            if (lr, seed) not in had
        ]
        earlier = {trial.name for trial in todo if earlier_outcome(trial) is not None}
        if earlier:
            self._log(f"resuming: {len(earlier)} of {len(todo)} trials already done")
        done: dict[str, LrTrial] = {}
        try:
            for trial, outcome in self._runs.run(todo):
                result = done[trial.name] = rate_trials.read_trial(trial, outcome)
                if trial.name in earlier:
                    self._progress.had(self._trial_s(rung))
                else:
                    text = result_text(result, rung)
                    self._progress.ended(self._trial_s(rung), outcome.seconds, text)
        finally:
            trials = [*rung.trials, *(done[trial.name] for trial in todo if trial.name in done)]
            rung.trials[:] = ladder.marked_diverged(trials, q.unigram)
            self.plan.save()

    def _trial(self, name: str, config: Config) -> Trial:
        config = config.model_copy(update={"precision": self.q.precision})
        return Trial(self._runs.out / "trials" / name, config, self.q.ranks)

    def _trial_s(self, rung: Rung) -> float:
        """Predicted seconds of a trial of this rung."""
        return self._pace.trial_s(rung.tokens, last=rung.last)


def result_text(trial: LrTrial, rung: Rung) -> str:
    """What is said of a trial."""
    how = f"held-out {trial.score:.4f}" if trial.score < math.inf else f"{trial.status}: {trial.cause}"
    return f"rate {trial.lr:g}, {format_si(rung.tokens, 'tokens')}, seed {trial.seed}: {how}"
