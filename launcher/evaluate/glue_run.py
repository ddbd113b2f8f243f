"""The trials of `eval glue` in their order: the rate, the tasks that start from RUN, those that start from a
task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_dp.config import peak_lr
from launcher.evaluate import glue_grid, glue_scores
from launcher.evaluate.glue_grid import Grid, Task
from launcher.log import Log
from launcher.report.numbers import format_lr, format_points
from launcher.results import GlueTrial, RateScore
from launcher.run.trials import Progress, Runner, Trial, TrialsFailed, earlier_outcome


@dataclasses.dataclass(frozen=True)
class Item:
    """A trial and the task that it is of."""

    trial: Trial
    task: Task

    @property
    def lr(self) -> float:
        return peak_lr(self.trial.config).value

    @property
    def share(self) -> int:
        """Of the time: the tokens of its train set, as every trial has as many epochs."""
        return self.task.manifest.splits["train"].tokens


class GlueRun:
    """`lr`, `rates` and `trials` hold what has been measured, also when the evaluation is stopped."""

    def __init__(self, grid: Grid, runs: Runner, log: Log):
        self.grid, self._runs, self._log = grid, runs, log
        self.lr: float | None = None if grid.options.rates else peak_lr(grid.base).value
        self.rates: list[RateScore] = []
        self.trials: dict[str, list[GlueTrial]] = {name: [] for name in grid.tasks}
        planned = [*grid.tasks.values()] * len(grid.seeds)
        planned += [*grid.rate_tasks.values()] * len(grid.options.rates)
        shares = [task.manifest.splits["train"].tokens for task in planned]
        self._progress = Progress(shares, log, len(runs.slots))

    def run(self) -> None:
        """To the last trial. Raises Stopped for a signal, TrialsFailed."""
        rate = self._choose_rate() if self.grid.rate_tasks else None
        for tasks in glue_grid.rounds(self.grid):
            items = [self._item(task, rate, seed) for seed in self.grid.seeds for task in tasks]
            for item, trial in self._measure([item for item in items if item is not None]):
                self.trials[item.task.name].append(trial)

    def _choose_rate(self) -> float:
        """By one seed of each task. Raises TrialsFailed."""
        grid, rates = self.grid, self.grid.options.rates
        items = [
            self._make(task, lr, grid.seeds[0], grid.weights)
            for task in grid.rate_tasks.values()
            for lr in rates
        ]
        trials: dict[float, dict[str, GlueTrial]] = {lr: {} for lr in rates}
        for item, trial in self._measure(items):
            trials[item.lr][item.task.name] = trial
        metrics = {name: f"dev/{task.manifest.metrics[0]}" for name, task in grid.rate_tasks.items()}
        self.rates = [glue_scores.rate_score(lr, trials[lr], metrics) for lr in rates]
        self.lr = glue_scores.choose_rate(self.rates)
        if self.lr is None:
            raise TrialsFailed("a trial of every rate failed, so that none can be chosen")
        self._log(f"rate: {format_lr(self.lr)}, the highest mean score of {len(rates)}")
        return self.lr

    def _make(self, task: Task, lr: float | None, seed: int, weights: Path | None) -> Item:
        return Item(glue_grid.make_trial(self.grid, self._runs.out, task, lr, seed, weights), task)

    def _item(self, task: Task, rate: float | None, seed: int) -> Item | None:
        """None where the trial that it would start from has failed: it has failed too."""
        source = self.grid.options.init_task.get(task.name)
        if source is None:
            return self._make(task, rate, seed, self.grid.weights)
        before = next(trial for trial in self.trials[source] if trial.seed == seed)
        item = self._make(task, rate, seed, self._runs.out / "trials" / before.trial)
        if before.status == "ok":
            return item
        why = f"{before.trial}, from which it would start, has failed"
        self.trials[task.name].append(
            GlueTrial(trial=item.trial.name, lr=item.lr, seed=seed, status="failed", cause=why)
        )
        self._progress.had(item.share)
        return None

    def _measure(self, items: Sequence[Item]) -> Iterator[tuple[Item, GlueTrial]]:
        """Each with its result, as they end. Raises Stopped."""
        by_name = {item.trial.name: item for item in items}
        done = {item.trial.name for item in items if earlier_outcome(item.trial) is not None}
        if done:
            self._log(f"resuming: {len(done)} of {len(items)} trials already done")
        for trial, outcome in self._runs.run([item.trial for item in items]):
            item = by_name[trial.name]
            result = glue_scores.read_trial(trial, outcome, item.task, item.lr)
            if trial.name in done:
                self._progress.had(item.share)
            else:
                self._progress.ended(item.share, outcome.seconds, result_text(result))
            yield item, result


def result_text(trial: GlueTrial) -> str:
    """What is said of a trial."""
    if trial.status != "ok":
        return f"{trial.trial}: {trial.status}: {trial.cause}"
    return f"{trial.trial}: " + ", ".join(f"{name} {format_points(x)}" for name, x in trial.scores.items())
