"""The learning rate search itself: range tests, then rungs of ever longer runs, one decision after the other.

What is done follows from the settings and the trials' records alone, so a search that was interrupted takes
the same way again over what is there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import Config, ConfigError
from bert_dp.record_models import Summary
from launcher import results
from launcher.report.numbers import format_duration, format_eta, format_si
from launcher.results import LrPlanFile
from launcher.scaling.raw import read_summary
from launcher.tune import ladder, lr_trials
from launcher.tune.ladder import FINALISTS, Candidate, Edge, Rung
from launcher.tune.search import Study
from launcher.tune.trials import Pool, Say, Trial, cause, failure_kind

STATE = "search.json"
RUNGS = (8, 4)  # parts of the whole budget that the first and the second rung train
LEAST_STEPS = 8  # of the whole budget: one in the first rung


class AllFailed(Exception):
    """Nothing could be measured; the text says why."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for."""

    ranks: int | None = None
    rates: int = 5
    seeds: int = 3
    optimizers: tuple[str, ...] = ()
    weight_decays: tuple[float, ...] = ()
    trials: int = 0
    """Drawn by Optuna in place of the first rung's ladder; 0 = the ladder."""
    tokens: int | None = None
    budget_s: float | None = None
    launcher: str = "torchrun"


@dataclasses.dataclass
class RangeTest:
    optimizer: str
    trial: str
    points: list[tuple[float, float | None, int]]
    edge: Edge
    summary: Summary
    seconds: float


class Search:
    """`state` is kept in OUT/STATE: the measured length of a run must not change when going on."""

    def __init__(
        self,
        config: Config,
        settings: Settings,
        ranks: int,
        pool: Pool,
        at_a_time: int,
        *,
        shards: Path,
        unigram: float | None,
        state: LrPlanFile,
        say: Say,
    ):
        self.config, self.settings, self.ranks, self.pool = config, settings, ranks, pool
        self.at_a_time, self.shards, self.unigram, self.state, self.say = (
            at_a_time,
            shards,
            unigram,
            state,
            say,
        )
        self.optimizers = settings.optimizers or (config.optim.name,)
        self.decays = settings.weight_decays or (config.optim.weight_decay,)
        self.seeds = tuple(config.run.seed + k for k in range(settings.seeds))
        self.range_tests: dict[str, RangeTest] = {}
        self.left_out: dict[str, str] = {}  # optimizers whose range test failed, and why
        self.left_out_tokens = 0
        self.rungs: list[Rung] = []
        self.tokens = 0
        self._work: list[tuple[int, int]] = []
        self._done = 0
        self._begun = self._kept = time.monotonic()
        self._predicted_here = 0.0

    @property
    def edges(self) -> dict[str, Edge]:
        return {name: test.edge for name, test in self.range_tests.items()}

    def run(self) -> None:
        """To the last rung. Raises Stopped for a signal, AllFailed, ConfigError for a budget too small."""
        self._measure_edges()
        self._settle_tokens()
        first = self._drawn_rung() if self.settings.trials else self._ladder_rung()
        order = ladder.ranked(first)
        if not order:
            raise AllFailed("no rate of the first rung can be chosen")
        num_second = ladder.num_second(len(order), drawn=self.settings.trials > 0)
        first.kept = order[: num_second or FINALISTS]
        if num_second:
            second = self._open_rung(self.tokens // RUNGS[1], self.seeds[:1])
            self._train(second, first.kept, second.seeds)
            better = ladder.ranked(second)
            second.kept = better[:FINALISTS]
            order = [*better, *[c for c in order if c not in first.kept]]
        last = self._open_rung(self.tokens, self.seeds, last=True)
        self._train_finalists(last, order[:FINALISTS])
        spare = order[FINALISTS:]
        while spare and not ladder.ranked(last):
            self.say(f"no finalist can be chosen; next: {ladder.told(spare[0])}")
            self._train(last, [spare.pop(0)], self.seeds)

    def _train_finalists(self, last: Rung, finalists: Sequence[Candidate]) -> None:
        """Every seed of every finalist, and of the rates beside the best until it has neighbours in this
        rung. Where that takes the devices several turns, a rate that is behind after the first seed trains
        the others only if the best turns out worse than that."""
        many = self.at_a_time >= len(finalists) * len(self.seeds)
        first = self.seeds if many else self.seeds[:1]
        self._train(last, finalists, first)
        while (more := ladder.beside(self.rungs, last)) is not None:
            self.say(f"next to the best, not yet trained in full: {ladder.told(more)}")
            self._train(last, [more], self.seeds[:1])
        near = ladder.near(last)
        for c in ladder.ranked(last):
            if c not in near and last.num_seeds(c) < len(self.seeds):
                behind = last.mean(c) - last.mean(near[0])
                self.say(f"{ladder.told(c)} is {behind:.4f} nats behind after one seed: left out")
        self._train(last, near[:FINALISTS], self.seeds[1:])
        while (order := ladder.ranked(last)) and last.num_seeds(order[0]) < len(self.seeds):
            self._train(last, order[:1], self.seeds[1:])

    def keep(self) -> None:
        """Write OUT/search.json, with the seconds of every call so far."""
        now = time.monotonic()
        seconds = self.state.seconds + now - self._kept
        self.state = self.state.model_copy(update={"seconds": seconds})
        self._kept = now
        results.write(self.pool.out / STATE, self.state)

    def _measure_edges(self) -> None:
        """One range test for each optimizer; one that cannot train is left out."""
        asked = self.settings.tokens or lr_trials.full_tokens(self.config)
        steps = lr_trials.range_steps(self.config, asked)
        tests = {
            name: Trial(
                f"range-{name}", lr_trials.range_config(self.config, self.shards, name, steps), self.ranks
            )
            for name in self.optimizers
        }
        self.say(
            f"range test: {steps} steps, the rate rising from {1e-4 * lr_trials.RANGE_TOP:g} to "
            f"{lr_trials.RANGE_TOP:g}, {', '.join(self.optimizers)}"
        )
        states = self.pool.run(list(tests.values()))
        for name, trial in tests.items():
            directory = self.pool.directory(trial)
            points = lr_trials.range_points(directory)
            why = cause(directory)
            broke = states[trial.name] == "ok" or failure_kind(directory) == "not_finite"
            if not points or not broke:
                self.left_out[name] = f"{trial.name}: {states[trial.name]}: {why}"
                self.left_out_tokens += len(points) * lr_trials.step_tokens(self.config)
                continue
            summary = read_summary(directory) or Summary(status="failed")
            edge = ladder.find_edge(points)
            self.range_tests[name] = RangeTest(
                name, trial.name, points, edge, summary, self.pool.seconds(trial)
            )
            told = f"edge at {edge.lr:.3g}: " if edge.lr is not None else ""
            self.say(f"  {name}: {told}{edge.why}")
        if not self.range_tests:
            raise AllFailed("; ".join(self.left_out.values()))
        self.optimizers = tuple(self.range_tests)
        for name, why in self.left_out.items():
            self.say(f"  {name} is left out: {why}")

    def _settle_tokens(self) -> None:
        """The whole budget of a run, T, and the search's length, told."""
        if self.state.tokens is None:
            tokens, why = self._whole_budget()
            if self.settings.budget_s is not None:
                tokens, why = self._within(self.settings.budget_s, tokens, why)
            if tokens < LEAST_STEPS * lr_trials.step_tokens(self.config):
                raise ConfigError(
                    [f"schedule: {tokens:,} tokens are fewer than {LEAST_STEPS} steps; raise schedule.hours"]
                )
            self.state = self.state.model_copy(update={"tokens": tokens, "tokens_why": why})
            self.keep()
        self.tokens = self.state.tokens or 0
        self._begun = time.monotonic()
        self._work = self._planned(self.tokens)
        seconds = self._predicted_s(self.tokens)
        total = sum(count * tokens for count, tokens in self._work)
        self.say(f"whole run: {self.state.tokens_why}")
        self.say(
            f"{sum(count for count, _ in self._work)} trials, {format_si(total, 'tokens')}, "
            f"{self.at_a_time} at a time: about {format_duration(seconds)}, and up to "
            f"{2 * ladder.EXTENSIONS} more where the best stands at an end"
        )

    def _whole_budget(self) -> tuple[int, str]:
        asked, full = self.settings.tokens, lr_trials.full_tokens(self.config)
        if asked is not None:
            tokens = lr_trials.whole(self.config, asked)
            return tokens, f"{tokens:,} tokens, as asked"
        if full is not None:
            tokens = lr_trials.whole(self.config, full)
            return tokens, f"{tokens:,} tokens, the configuration's"
        hours, rate = self.config.schedule.hours or 0.0, self._rate()
        tokens = lr_trials.whole(self.config, hours * 3600 * rate)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return tokens, (
            f"{hours:g} h at the measured {format_si(rate, 'tokens/s')} of {ranks} = {tokens:,} "
            "tokens; more ranks would train more: then give --tokens"
        )

    def _within(self, budget_s: float, tokens: int, why: str) -> tuple[int, str]:
        """The whole budget shortened so that the search fits into `budget_s`, range tests included."""
        used = sum(test.seconds for test in self.range_tests.values())
        fixed = self._predicted_s(0)
        if self._predicted_s(tokens) + used <= budget_s:
            return tokens, why
        share = max(0.0, budget_s - used - fixed) / (self._predicted_s(tokens) - fixed)
        least = LEAST_STEPS * lr_trials.step_tokens(self.config)
        fitting = max(least, lr_trials.whole(self.config, math.floor(share * tokens)))
        return fitting, (
            f"{fitting:,} tokens instead of {tokens:,}, for --budget; a shorter run takes a higher rate"
        )

    def _rate(self) -> float:
        """Tokens/s of one trial, from the first range test."""
        return self.range_tests[self.optimizers[0]].summary.tokens_per_s or 0.0

    def _planned(self, tokens: int) -> list[tuple[int, int]]:
        """(trials, tokens of each) of every rung, as far as it is known before."""
        axes = len(self.optimizers) * len(self.decays)
        first = self.settings.trials or self.settings.rates * axes
        num_second = ladder.num_second(first, drawn=self.settings.trials > 0)
        second = [(num_second, tokens // RUNGS[1])] if num_second else []
        finals = min(first, FINALISTS) * self.settings.seeds + (first > FINALISTS)  # and one beside the best
        return [(first, tokens // RUNGS[0]), *second, (finals, tokens)]

    def _trial_s(self, tokens: int, *, last: bool) -> float:
        """Predicted seconds of a trial, from the first range test's: what was not training, and its speed."""
        test = self.range_tests[self.optimizers[0]]
        spent = test.summary.time_s
        fixed = max(0.0, test.seconds - spent.get("train", 0.0))
        if last:
            fixed += (lr_trials.CURVE_POINTS - 1) * spent.get("eval", 0.0)
        return fixed + tokens / (self._rate() or math.inf)

    def _predicted_s(self, tokens: int) -> float:
        """Of all rungs, wall clock."""
        *short, whole = self._planned(tokens)
        return sum(
            math.ceil(count / self.at_a_time) * self._trial_s(each, last=last)
            for (count, each), last in [*((rung, False) for rung in short), (whole, True)]
        )

    def _open_rung(self, tokens: int, seeds: tuple[int, ...], *, last: bool = False) -> Rung:
        rung = Rung(lr_trials.whole(self.config, tokens), seeds, last)
        self.rungs.append(rung)
        name = "last rung" if last else f"rung {len(self.rungs)}"
        self.say(
            f"{name}: {format_si(rung.tokens, 'tokens')} a run, {len(seeds)} seed"
            f"{'s' if len(seeds) > 1 else ''}"
        )
        return rung

    def _ladder_rung(self) -> Rung:
        rung = self._open_rung(self.tokens // RUNGS[0], self.seeds[:1])
        first = [
            Candidate(name, decay, lr)
            for name in self.optimizers
            for decay in self.decays
            for lr in ladder.first_ladder(self.edges[name], self.settings.rates)
        ]
        self._train(rung, first, rung.seeds)
        while (more := ladder.extension(rung.outcomes, self.edges, first)) is not None:
            self.say(f"the best rate stands at the end of its ladder; next to it: {ladder.told(more)}")
            self._work[0] = (self._work[0][0] + 1, self._work[0][1])
            self._train(rung, [more], rung.seeds)
        return rung

    def _drawn_rung(self) -> Rung:
        rung = self._open_rung(self.tokens // RUNGS[0], self.seeds[:1])
        study = Study(
            self.pool.out / "optuna.db",
            self.edges,
            self.decays,
            count=self.settings.rates,
            seed=self.config.run.seed,
        )
        asked = 0
        while asked < self.settings.trials:
            drawn = study.ask(min(self.at_a_time, self.settings.trials - asked))
            asked += len(drawn)
            known = {o.candidate for o in rung.outcomes}
            self._train(rung, [c for c in dict.fromkeys(drawn) if c not in known], rung.seeds)
            for outcome in rung.outcomes:
                study.tell(outcome)
        return rung

    def _train(self, rung: Rung, candidates: Sequence[Candidate], seeds: Sequence[int]) -> None:
        """Each candidate with each of these seeds that it has not had; the results in that order."""
        had = {(o.candidate, o.seed) for o in rung.outcomes}
        named = {
            lr_trials.trial_name(c, rung.tokens, seed): (c, seed)
            for seed in seeds
            for c in candidates
            if (c, seed) not in had
        }
        configs = {
            name: lr_trials.trial_config(self.config, self.shards, c, rung.tokens, seed, last=rung.last)
            for name, (c, seed) in named.items()
        }
        todo = [Trial(name, config, self.ranks) for name, config in configs.items()]
        there = {trial.name for trial in todo if self.pool.ended(trial) is not None}
        if there:
            self.say(f"going on: {len(there)} of {len(todo)} trials are there")
        size = lr_trials.step_tokens(self.config)
        before = len(rung.outcomes)
        try:
            for trial, state in self.pool.outcomes(todo):
                outcome = lr_trials.read_outcome(
                    self.pool.directory(trial),
                    state,
                    *named[trial.name],
                    tokens_of_step=size,
                    seconds=self.pool.seconds(trial),
                )
                rung.outcomes.append(outcome)
                self._done += 1
                if trial.name not in there:
                    self._predicted_here += self._trial_s(rung.tokens, last=rung.last)
                    self._tell(outcome, rung)
        finally:
            places = {name: place for place, name in enumerate(named)}
            rung.outcomes[before:] = sorted(rung.outcomes[before:], key=lambda o: places[o.trial])
            ladder.mark_diverged(rung.outcomes, self.unigram)
            self.keep()

    def _tell(self, outcome: ladder.Outcome, rung: Rung) -> None:
        total = sum(count for count, _ in self._work)
        if outcome.heldout_loss is not None and outcome.status == "ok":
            how = f"held-out {outcome.heldout_loss:.4f}"
        else:
            how = f"{outcome.status}: {outcome.cause}"
        left = sum(n * self._trial_s(tokens, last=tokens == self.tokens) for n, tokens in self._work)
        left -= sum(self._trial_s(r.tokens, last=r.last) * len(r.outcomes) for r in self.rungs)
        rest = format_eta(max(0.0, left) * (time.monotonic() - self._begun) / max(self._predicted_here, 1e-9))
        self.say(
            f"[{self._done}/{max(total, self._done)}] {ladder.told(outcome.candidate)}, "
            f"{format_si(rung.tokens, 'tokens')}, seed {outcome.seed}: {how}; left {rest}"
        )
