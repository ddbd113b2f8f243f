"""The trials of `eval glue` in their order: the rate, the tasks that start from RUN, those that start from a
task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from launcher.evaluate import glue_grid, glue_scores
from launcher.evaluate.glue_grid import Question, Task
from launcher.log import Log
from launcher.report.numbers import format_lr, format_points
from launcher.results import GlueTrial, RateScore
from launcher.run.trials import Progress, Runner, Trial, earlier_outcome


class NoRate(Exception):
    """No rate could be chosen; the text says why."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A trial and what it is of."""

    trial: Trial
    task: Task

    @property
    def lr(self) -> float:
        return glue_grid.rate_of(self.trial.config)

    @property
    def share(self) -> float:
        """Of the time: the tokens of its train set, as every trial has as many epochs."""
        return float(self.task.manifest.splits["train"].tokens)


class GlueRun:
    """`lr`, `rates` and `trials` hold what has been measured, also when the evaluation is stopped."""

    def __init__(
        self, q: Question, tasks: Mapping[str, Task], tenths: Mapping[str, Task], runs: Runner, log: Log
    ):
        """`tenths`: the tasks that choose the rate, with a part of train as dev."""
        self.q, self._tasks, self._tenths, self._runs, self._log = q, tasks, tenths, runs, log
        self.lr: float | None = None if q.options.rates else glue_grid.rate_of(q.base)
        self.rates: list[RateScore] = []
        self.trials: dict[str, list[GlueTrial]] = {name: [] for name in tasks}
        shares = [task.manifest.splits["train"].tokens for task in tasks.values() for _ in q.seeds]
        shares += [task.manifest.splits["train"].tokens for task in tenths.values() for _ in q.options.rates]
        self._progress = Progress(shares, log)

    def run(self) -> None:
        """To the last trial. Raises Stopped for a signal, NoRate."""
        rate = self._choose_rate() if self._tenths else None
        examples = {name: task.manifest.num_samples for name, task in self._tasks.items()}
        for names in glue_grid.rounds(self.q.options, examples):
            items = [self._item(name, rate, seed) for seed in self.q.seeds for name in names]
            for item, done in self._measure([item for item in items if item is not None]):
                self.trials[item.task.name].append(done)

    def _choose_rate(self) -> float:
        """By one seed of each task. Raises NoRate."""
        q = self.q
        items = [
            Item(glue_grid.make_trial(q, self._runs.out, task, lr, q.seeds[0], q.weights), task)
            for task in self._tenths.values()
            for lr in q.options.rates
        ]
        found: dict[float, dict[str, GlueTrial]] = {lr: {} for lr in q.options.rates}
        for item, done in self._measure(items):
            found[item.lr][item.task.name] = done
        metrics = {name: f"dev/{task.manifest.metrics[0]}" for name, task in self._tenths.items()}
        self.rates = [glue_scores.rate_score(lr, found[lr], metrics) for lr in q.options.rates]
        self.lr = glue_scores.choose_rate(self.rates)
        if self.lr is None:
            raise NoRate("a trial of every rate failed, so that none can be chosen")
        self._log(f"rate: {format_lr(self.lr)}, the highest mean score of {len(q.options.rates)}")
        return self.lr

    def _item(self, name: str, rate: float | None, seed: int) -> Item | None:
        """None where the trial that it would start from has failed: it has failed too."""
        q, task = self.q, self._tasks[name]
        weights, source = q.weights, q.options.init_task.get(name)
        if source is not None:
            before = next(trial for trial in self.trials[source] if trial.seed == seed)
            weights = self._runs.out / "trials" / before.trial
            if before.status != "ok":
                why = f"{before.trial}, from which it would start, has failed"
                item = Item(glue_grid.make_trial(q, self._runs.out, task, rate, seed, weights), task)
                self.trials[name].append(
                    GlueTrial(trial=item.trial.name, lr=item.lr, seed=seed, status="failed", cause=why)
                )
                self._progress.had(item.share)
                return None
        return Item(glue_grid.make_trial(q, self._runs.out, task, rate, seed, weights), task)

    def _measure(self, items: Sequence[Item]) -> Iterator[tuple[Item, GlueTrial]]:
        """Each with its result, as they end. Raises Stopped."""
        by_name = {item.trial.name: item for item in items}
        there = {item.trial.name for item in items if earlier_outcome(item.trial) is not None}
        if there:
            self._log(f"resuming: {len(there)} of {len(items)} trials already done")
        for trial, outcome in self._runs.run([item.trial for item in items]):
            item = by_name[trial.name]
            done = glue_scores.read_trial(trial, outcome, item.task, item.lr)
            if trial.name in there:
                self._progress.had(item.share)
            else:
                self._progress.ended(item.share, result_text(done))
            yield item, done


def result_text(trial: GlueTrial) -> str:
    """What is said of a trial."""
    if trial.status != "ok":
        return f"{trial.trial}: {trial.status}: {trial.cause}"
    return f"{trial.trial}: " + ", ".join(f"{name} {format_points(x)}" for name, x in trial.scores.items())
