"""An evaluation on GLUE as a Report, from glue.json, partial or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.evaluate import FILE
from launcher.report.measured import settings_sections, status_verdicts, subtitle
from launcher.report.model import Cell, Report, Section, Table, Tile, Verdict
from launcher.report.numbers import (
    count_of,
    format_count,
    format_duration,
    format_lr,
    format_percent,
    format_points,
)
from launcher.report.parts import cell, words
from launcher.report.quantities import Computed, Quantity, table
from launcher.results import Glue, GlueScore, GlueSplit, GlueTask, GlueTrial

METRICS = {
    "mcc": "Matthews",
    "accuracy": "accuracy",
    "f1": "F1",
    "auc": "AUC",
    "pearson": "Pearson",
    "spearman": "Spearman",
}
TRIAL = (
    Quantity("lr", "learning rate", "lr"),
    Quantity("seed", "seed", "count"),
    Quantity("status", "status", "word"),
    Quantity("seconds", "time", "duration"),
)
SETTINGS = (
    Quantity("ranks", "ranks of a trial", "count"),
    Quantity("at_a_time", "trials at a time", "count"),
    Quantity("settings.seeds", "seeds", "count"),
    Quantity("seconds", "time", "duration"),
    Quantity("start.checkpoint", "checkpoint", "word"),
    Quantity("start.step", "its step", "count"),
    Quantity("heldout_loss", "its held-out loss", "nats"),
    Quantity("start.sha256", "its weights (SHA-256)", "word"),
)


class ScoreRow(NamedTuple):
    """A row of the table of scores: a metric of a dev set of a task."""

    task: GlueTask
    split: GlueSplit
    score: GlueScore


def score_row(task: GlueTask, score: GlueScore) -> ScoreRow:
    """A score of the task, with its split."""
    return ScoreRow(task, next(split for split in task.splits if split.name == score.split), score)


def remark(row: ScoreRow) -> str:
    """What a number must not be read without."""
    trials = row.task.trials
    failed = sum(score is None for score in row.score.seeds)
    constant = sum(row.score.split in trial.one_class for trial in trials)
    parts = [
        "" if row.task.official else "subset",
        f"{failed} of {len(trials)} failed" if failed else "",
        f"one answer in {constant} of {len(trials)}" if constant else "",
    ]
    return ", ".join(filter(None, parts))


def truncated(row: ScoreRow) -> Cell:
    """The share of the split's examples that lost tokens."""
    count, examples = row.split.truncated, row.split.examples
    return Cell(format_percent(count / examples), f"{format_count(count)} of {format_count(examples)}")


def in_train(row: ScoreRow) -> Cell:
    """How many of the split's examples stand in train too."""
    return cell(row.split.in_train, "count", f"of {format_count(row.split.examples)}")


def every_seed(row: ScoreRow) -> str:
    """The score of each seed, out of 100."""
    return ", ".join(map(format_points, row.score.seeds)) or "none"


SCORES = (
    Quantity("score.median", "median", "points"),
    Quantity("score.sd", "deviation", "points"),
    Quantity("score.majority", "majority", "points"),
    Quantity("split.examples", "dev examples", "count"),
    Computed(truncated, "truncated"),
    Computed(in_train, "also in train"),
    Computed(remark, "remark", "word"),
    Computed(every_seed, "every seed", "word"),
)


def glue_report(glue: Glue) -> Report:
    """The table of the dev scores, what limits it, and every trial."""
    scores = scores_table(glue.tasks, title=how_text(glue))
    method = [how_text(glue), f"rate {format_lr(glue.lr)}", count_of(glue.settings.seeds, "seed")]
    return Report(
        "bert-dp: GLUE",
        subtitle(glue, method),
        [*status_verdicts(glue, FILE), _average(glue), *_warnings(glue)],
        _tiles(glue),
        [
            Section("Dev scores", tables=[scores], notes=["Out of 100; median over the seeds."]),
            *([Section("Rates", tables=[_rates(glue)])] if glue.rates else []),
            *_outside(glue),
            Section("All trials", tables=[_trials_table(glue)], console=False),
            *settings_sections(glue, SETTINGS),
        ],
    )


def how_text(glue: Glue) -> str:
    """The head, the pooling and what the trials began with."""
    start = "random weights" if glue.settings.init == "random" else f"step {format_count(glue.start.step)}"
    return f"{glue.head} head, {glue.pooling} pooling, from {start}"


def metric_label(task: GlueTask, score: GlueScore) -> str:
    """`RTE accuracy`, `MNLI matched accuracy`."""
    part = score.split.removeprefix("dev").removeprefix("_")
    return " ".join(filter(None, (task.task, part, METRICS.get(score.metric, score.metric))))


def label(task: GlueTask, score: GlueScore) -> str:
    """The same, and where it starts from another task, that too."""
    start = f" (from {task.init_task})" if task.init_task else ""
    return f"{metric_label(task, score)}{start}"


# --- findings


def _average(glue: Glue) -> Verdict:
    if glue.average is None:
        return Verdict(
            "info", "No GLUE average: the nine numbers of its eight tasks are not whole.", glue.no_average
        )
    starts = [f"{task.task} starts from {task.init_task}" for task in glue.tasks if task.init_task]
    text = (
        f"GLUE average {format_points(glue.average)} on the dev sets: mean of nine numbers, each the "
        f"median of {count_of(glue.settings.seeds, 'seed')}."
    )
    return Verdict("ok", text, [", ".join(glue.averaged), *starts])


def _warnings(glue: Glue) -> list[Verdict]:
    """Trials that say nothing of the model, and scores that are not what GLUE's are."""
    trials = _trials(glue)
    failed = [f"{t.trial}: {t.status}: {t.cause}" for t in trials if t.status != "ok"]
    constant = [f"{t.trial}: {', '.join(t.one_class)}" for t in trials if t.one_class]
    subsets = [task.task for task in glue.tasks if not task.official]
    starts = [f"{task.task} from {task.init_task}" for task in glue.tasks if task.init_task]
    failures = f"{format_count(len(failed))} of {count_of(len(trials), 'trial')} failed and have no score"
    constants = f"{format_count(len(constant))} of {count_of(len(trials), 'trial')} gave every example"
    others = f"Subsets of GLUE's rows, whose scores are none of GLUE's: {', '.join(subsets)}."
    started = f"Started from the finetuned run of another task: {', '.join(starts)}."
    return [
        *([Verdict("fail", f"{failures}; medians are of the others.", failed)] if failed else []),
        *([Verdict("warn", f"{constants} of a dev set the same answer.", constant)] if constant else []),
        *([Verdict("info", others)] if subsets else []),
        *([Verdict("info", started)] if starts else []),
    ]


def _tiles(glue: Glue) -> list[Tile]:
    trials = _trials(glue)
    scored = sum(trial.status == "ok" for trial in trials)
    rates = f"chosen among {len(glue.rates)} on a tenth of train" if glue.rates else "the configuration's"
    return [
        Tile("GLUE average", format_points(glue.average), "dev; nine numbers of eight tasks, out of 100"),
        Tile("Tasks", format_count(len(glue.tasks)), f"{format_count(len(glue.left_out))} left out"),
        Tile("Trials with scores", format_count(scored), f"of {format_count(len(trials))}"),
        Tile("Learning rate", format_lr(glue.lr), f"{rates}; the same for every task"),
        Tile("Time", format_duration(glue.seconds), f"{count_of(glue.at_a_time, 'trial')} at a time"),
    ]


# --- tables


def scores_table(
    tasks: Sequence[GlueTask], quantities: Sequence[Quantity | Computed] = SCORES, title: str = ""
) -> Table:
    """A row for each metric of a dev set."""
    rows = [(label(task, score), score_row(task, score)) for task in tasks for score in task.scores]
    return table(rows, quantities, title=title, corner="task", empty="no task was evaluated")


def _rates(glue: Glue) -> Table:
    """Scores on a tenth of train, one seed."""
    names = list(dict.fromkeys(name for rate in glue.rates for name in rate.scores))
    columns = [
        *(Quantity(f"scores.{name}", name, "points") for name in names),
        Quantity("mean", "mean", "points"),
    ]
    named = [(format_lr(rate.lr), rate) for rate in glue.rates]
    return table(named, columns, title="First metric on a tenth of train, one seed", corner="learning rate")


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """The tasks that were left out for each reason."""
    tasks: dict[str, list[str]] = {}
    for task, why in left_out.items():
        tasks.setdefault(why, []).append(task)
    return tasks


def _outside(glue: Glue) -> list[Section]:
    """Tasks that were left out, and files for GLUE's server."""
    files = [words(task.task, ", ".join(task.submissions) or task.no_submission) for task in glue.tasks]
    left = [words(", ".join(tasks), why) for why, tasks in by_reason(glue.left_out).items()]
    return [
        Section("Left out", tables=[Table(left)], console=bool(left)),
        Section("Submission files", tables=[Table(files)], console=False),
    ]


def _trials(glue: Glue) -> list[GlueTrial]:
    """Every seed of every task; trials that chose the rate are in `rates`."""
    return [trial for task in glue.tasks for trial in task.trials]


def _trials_table(glue: Glue) -> Table:
    every = [*(trial for rate in glue.rates for trial in rate.trials), *_trials(glue)]
    return table([(t.trial, t) for t in every], TRIAL, corner="trial", empty="no trial recorded")
