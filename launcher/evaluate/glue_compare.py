"""Evaluations on GLUE side by side: medians, flipped predictions, pooled accuracy; what a claim that two
pretraining runs are equal needs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bert_dp import record
from bert_dp.config import ConfigError
from launcher import results
from launcher.evaluate import FILE
from launcher.evaluate.glue_predictions import read_predictions
from launcher.evaluate.glue_report import (
    every_seed,
    how_text,
    in_train,
    label,
    metric_label,
    remark,
    score_row,
    truncated,
)
from launcher.report.model import Axis, Cell, Column, Figure, Line, Report, Row, Section, Table, Verdict
from launcher.report.numbers import NA, count_of, format_count, format_percent, format_points
from launcher.report.parts import cell
from launcher.results import Glue, GlueScore, GlueTask

REGRESSIONS = {"pearson", "spearman"}
NOTE = (
    "Median over the seeds and standard deviation (sd) of a seed, out of 100. A flipped prediction is a dev "
    "example that gets another label with the same finetuning seed."
)
Answers = Mapping[tuple[str, int], tuple[float | None, float | None]]
"""(split, index) -> (answer, label) of the labelled examples."""
Seed = TypeVar("Seed", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A glue.json and the folder that holds its trials."""

    folder: Path
    glue: Glue

    @property
    def tasks(self) -> dict[str, GlueTask]:
        return {task.task: task for task in self.glue.tasks}

    def answers(self, task: str) -> dict[int, Answers]:
        """Of each seed whose trial has scores. Raises ConfigError for predictions that are not those which
        were scored."""
        by_seed: dict[int, Answers] = {}
        for trial in self.tasks[task].trials:
            if trial.status != "ok":
                continue
            folder = self.folder / "trials" / trial.trial
            path = folder / record.PREDICTIONS
            data = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(data).hexdigest() != trial.predictions_sha256:
                raise ConfigError([f"{path} is not what {FILE} was made from; evaluate again"])
            by_seed[trial.seed] = {
                (line.split, line.index): (line.answer, line.label)
                for line in read_predictions(folder)
                if line.label is not None and line.split.startswith("dev")
            }
        return by_seed


@dataclasses.dataclass(frozen=True)
class Flips:
    """Dev examples that get another answer, summed over the seeds that both have."""

    flipped: int
    of: int

    @property
    def share(self) -> float | None:
        return self.flipped / self.of if self.of else None


def flips(one: Mapping[Seed, Answers], other: Mapping[Seed, Answers]) -> Flips:
    """Of the same seeds and the same examples."""
    pairs = [
        (answer, other[seed][key][0])
        for seed, answers in one.items()
        if seed in other
        for key, (answer, _) in answers.items()
        if key in other[seed]
    ]
    return Flips(sum(a != b for a, b in pairs), len(pairs))


def pooled_accuracy(by_task: Sequence[Mapping[Seed, Answers]]) -> tuple[float | None, int]:
    """(share of right answers, examples) over the dev sets of all tasks, the mean over the seeds that every
    task has."""
    seeds = set.intersection(*(set(answers) for answers in by_task)) if by_task else set()
    shares = []
    count = 0
    for seed in seeds:
        pairs = [pair for answers in by_task for pair in answers[seed].values()]
        count = len(pairs)
        shares.append(sum(answer == true for answer, true in pairs) / count)
    return (statistics.fmean(shares) if shares else None), count


@dataclasses.dataclass(frozen=True)
class Paired:
    """A difference of pooled accuracies; shares of 1."""

    difference: float
    standard_error: float | None
    """None of a single example."""
    examples: int
    seeds: int


def paired_difference(
    one: Sequence[Mapping[Seed, Answers]], other: Sequence[Mapping[Seed, Answers]]
) -> Paired | None:
    """How much more accurate `other` is than `one` over the dev sets of all tasks; an entry of each for each
    task. None where no seed or no example is shared.

    Of the n examples that both have, over the k seeds that every task has in both, with right = 1 or 0,

        d_i = sum over the seeds of (right of `other` - right of `one`) / k
        difference = sum of d_i / n
        standard error = sqrt(sum of (d_i - difference)^2 / (n (n - 1)))

    which is that of a paired comparison over examples: what other dev examples would change for these very
    runs, not what other pretraining would.
    """
    sides = [set(answers) for answers in (*one, *other)]
    seeds = set.intersection(*sides) if sides else set()
    gains = [
        statistics.fmean(_is_right(b[seed][key]) - _is_right(a[seed][key]) for seed in seeds)
        for a, b in zip(one, other, strict=True)
        for key in (set.intersection(*(set(x[seed]) for x in (a, b) for seed in seeds)) if seeds else ())
    ]
    if not gains:
        return None
    spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return Paired(statistics.fmean(gains), spread, len(gains), len(seeds))


def _is_right(pair: tuple[float | None, float | None]) -> int:
    answer, label = pair
    return int(answer == label)


def compare_report(folders: Sequence[Path]) -> Report:
    """Each evaluation against the first. Raises ConfigError for those that do not compare."""
    evaluations = [Evaluation(folder, results.read(folder / FILE, Glue)) for folder in folders]
    first, *others = evaluations
    shared = [task.task for task in first.glue.tasks if all(task.task in other.tasks for other in others)]
    if not shared:
        raise ConfigError(["RUN_DIR: these evaluations have no task in common"])
    if issues := [
        f"RUN_DIR: {other.folder} has other data of {name} than {first.folder}, or another tokenizer"
        for other in others
        for name in shared
        if other.tasks[name].data_hash != first.tasks[name].data_hash
    ]:
        raise ConfigError(issues)
    labelled = [name for name in shared if not REGRESSIONS & {s.metric for s in first.tasks[name].scores}]
    names = names_of(folders)
    answers = [{name: each.answers(name) for name in labelled} for each in evaluations]
    return Report(
        "bert-dp: GLUE, compared",
        [f"{name}: {how_text(each.glue)}" for name, each in zip(names, evaluations, strict=True)],
        [_pooled(names, labelled, answers)],
        sections=[
            Section(
                "Dev scores",
                [score_against_loss(shared, evaluations)],
                [_scores(names, shared, evaluations), _seeds(names, shared, evaluations)],
                [NOTE],
            ),
            Section("Flipped predictions", tables=[_flips(names, labelled, answers)]),
        ],
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short ones, if they differ."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _pooled(
    names: Sequence[str], tasks: Sequence[str], answers: Sequence[Mapping[str, Mapping[int, Answers]]]
) -> Verdict:
    notes = []
    for name, each in zip(names, answers, strict=True):
        share, count = pooled_accuracy([each[task] for task in tasks])
        notes.append(f"{name}: {_exact(share)} of {count_of(count, 'example')}")
    first = [answers[0][task] for task in tasks]
    for name, each in zip(names[1:], answers[1:], strict=True):
        difference = paired_difference(first, [each[task] for task in tasks])
        notes.append(f"{name} - {names[0]}: {paired_text(difference)}")
    text = f"Pooled dev accuracy, mean over the seeds, of {', '.join(tasks) or 'no task'}."
    return Verdict("info", text, notes)


def paired_text(paired: Paired | None) -> str:
    """The difference with its standard error, in points."""
    if paired is None:
        return NA
    error = NA if paired.standard_error is None else f"{100 * paired.standard_error:.2f}"
    basis = f"{count_of(paired.examples, 'example')}, mean of {count_of(paired.seeds, 'seed')}"
    return f"{100 * paired.difference:+.2f}, paired standard error {error} ({basis})"


def _exact(share: float | None) -> str:
    """With two digits: a tenth of a point is what a claim may turn on."""
    return NA if share is None else f"{100 * share:.2f}"


def _scores(names: Sequence[str], tasks: Sequence[str], evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for name in tasks:
        task = evaluations[0].tasks[name]
        for score in task.scores:
            scores = [each.tasks[name].score(score.name) for each in evaluations]
            medians = [_median(each) for each in scores]
            differences = [_difference(each, score) for each in scores[1:]]
            rows.append(
                Row(metric_label(task, score), [cell(score.majority, "points"), *medians, *differences])
            )
    heads = ["majority", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    return Table(rows, [Column(head) for head in heads], corner="task")


def _seeds(names: Sequence[str], tasks: Sequence[str], evaluations: Sequence[Evaluation]) -> Table:
    """What the medians are of, and what a number must not be read without."""
    rows = []
    for name in tasks:
        of_each = [each.tasks[name] for each in evaluations]
        for score in of_each[0].scores:
            first = score_row(of_each[0], score)
            seeds = [_seeds_cell(task, task.score(score.name)) for task in of_each]
            rows.append(Row(metric_label(of_each[0], score), [truncated(first), in_train(first), *seeds]))
    heads = [Column("truncated"), Column("also in train"), *(Column(name, text=True) for name in names)]
    return Table(rows, heads, title="Every seed", corner="task")


def _seeds_cell(task: GlueTask, score: GlueScore | None) -> Cell:
    if score is None:
        return Cell(NA)
    row = score_row(task, score)
    start = f"from {task.init_task}" if task.init_task else ""
    return Cell(every_seed(row), ", ".join(filter(None, (start, remark(row)))))


def score_against_loss(tasks: Sequence[str], evaluations: Sequence[Evaluation]) -> Figure:
    """The first metric of each task over the held-out loss of the pretraining, for the evaluations that know
    it; empty where all began with the same loss."""
    known = sorted(
        ((each.glue.heldout_loss, each) for each in evaluations if each.glue.heldout_loss is not None),
        key=lambda pair: pair[0],
    )
    losses = [loss for loss, _ in known] if len({loss for loss, _ in known}) > 1 else []
    lines = []
    for colour, name in enumerate(tasks if losses else ()):
        first = evaluations[0].tasks[name].scores[0]
        scores = [each.tasks[name].score(first.name) for _, each in known]
        medians = [None if score is None else score.median for score in scores]
        lines.append(Line(label(evaluations[0].tasks[name], first), losses, medians, colour, "both"))
    x = Axis("held-out loss of the pretraining (nats per masked token)", "nats")
    return Figure("Dev score against held-out loss", lines, x, Axis("median over the seeds (1 is the best)"))


def _median(score: GlueScore | None) -> Cell:
    if score is None:
        return Cell(NA)
    text = format_points(score.median)
    return Cell(text if score.sd is None else f"{text} (sd {format_points(score.sd)})", exact=score.median)


def _difference(score: GlueScore | None, first: GlueScore) -> Cell:
    if score is None or score.median is None or first.median is None:
        return Cell(NA)
    return Cell(f"{100 * (score.median - first.median):+.1f}", exact=score.median - first.median)


def _flips(
    names: Sequence[str], tasks: Sequence[str], answers: Sequence[Mapping[str, Mapping[int, Answers]]]
) -> Table:
    """Against the first, seed by seed: of each task, and of all."""
    rows = []
    for name, group in {**{task: [task] for task in tasks}, "all of them": tasks}.items():
        first, *others = (
            {(task, seed): found for task in group for seed, found in each[task].items()} for each in answers
        )
        rows.append(Row(name, [_share(flips(first, other)) for other in others]))
    return Table(rows, [Column(f"{name} - {names[0]}") for name in names[1:]], corner="task")


def _share(flips: Flips) -> Cell:
    counts = f"{format_count(flips.flipped)} of {format_count(flips.of)}, over the seeds of both"
    return Cell(format_percent(flips.share), counts, flips.share)
