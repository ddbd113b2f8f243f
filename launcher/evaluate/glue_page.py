"""Pages of glue.json: one evaluation, or several side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import ConfigError, Issue
from launcher import results
from launcher.evaluate import FILE, glue_scores
from launcher.evaluate.glue_scores import AVERAGED, Glue, GlueScore, GlueTask
from launcher.report.numbers import (
    NA,
    count_of,
    format_count,
    format_lr,
    format_nats,
    format_percent,
    format_points,
)
from launcher.report.page import (
    Column,
    Quantity,
    Report,
    ReportSection,
    Table,
    TableCell,
    TableRow,
    Verdict,
    cell,
    status_verdicts,
    subtitle,
    table,
    words,
)
from launcher.stats import half_width

METRICS = {"mcc": "Matthews", "f1": "F1", "auc": "AUC", "pearson": "Pearson", "spearman": "Spearman"}
HEADS = (
    "median",
    "deviation",
    "majority",
    "dev examples",
    "remark",
    "truncated",
    "also in train",
    "every seed",
)
SAME_DATA = "compare evaluations with the same files, tokenizer and length"
DIFFERENCE = (
    "Out of 100: median over the seeds and standard deviation of a seed. A difference is the mean over the "
    "seeds that both have, with its 95 % interval by Student's t, for these two pretraining runs alone."
)


def glue_report(glue: Glue) -> Report:
    """Build the page of one evaluation."""
    seeds = count_of(glue.settings.seeds, "seed")
    left_out = [words(task, reason) for task, reason in glue.left_out.items()]
    files = [words(task.task, ", ".join(task.submissions) or "none") for task in glue.tasks]
    return Report(
        "bert-dp: GLUE",
        subtitle(glue, [describe_method(glue), f"rate {format_lr(glue.lr)}", seeds]),
        [*status_verdicts(glue), *_verdicts(glue)],
        sections=[
            ReportSection("Dev scores", tables=[_scores(glue)], notes=["Out of 100; median over the seeds."]),
            *([ReportSection("Rates", tables=[_rates(glue)])] if glue.rates else []),
            ReportSection("Left out", tables=[Table(left_out)], console=bool(left_out)),
            ReportSection("Submission files", tables=[Table(files)], console=False),
        ],
    )


def describe_method(glue: Glue) -> str:
    """Return the head, the pooling and the start of the trials."""
    loss = "" if glue.heldout_loss is None else f" (held-out loss {format_nats(glue.heldout_loss)})"
    is_random = glue.settings.init == "random"
    start = "random weights" if is_random else f"step {format_count(glue.start.step)}{loss}"
    finetuning = glue.config["finetune"]
    return f"{finetuning['head']} head, {finetuning['pooling']} pooling, from {start}"


def name_score(task: GlueTask, score: GlueScore) -> str:
    """Return `RTE accuracy`, `MNLI matched accuracy`."""
    split = score.split.removeprefix("dev").removeprefix("_")
    return " ".join(filter(None, (task.task, split, METRICS.get(score.metric, score.metric))))


def _scores(glue: Glue) -> Table:
    """Build the table with a row for each metric of a dev set."""
    rows = []
    for task, score in [(each, score) for each in glue.tasks for score in each.scores]:
        cells = [
            *(cell(value, "points") for value in (score.median, score.sd, score.majority)),
            cell(score.examples, "count"),
            TableCell(_remark(task, score)),
            TableCell(format_percent(score.truncated / score.examples)),
            cell(score.in_train, "count"),
            TableCell(", ".join(map(format_points, score.seeds))),
        ]
        rows.append(TableRow(name_score(task, score), cells))
    heads = [Column(head, text=head in ("remark", "every seed")) for head in HEADS]
    return Table(rows, heads, describe_method(glue), "task", "no task was evaluated")


def _remark(task: GlueTask, score: GlueScore) -> str:
    """Return what limits the meaning of a score."""
    failed = sum(seed is None for seed in score.seeds)
    constant = sum(score.split in trial.one_class for trial in task.trials)
    parts = [
        "" if task.official else "subset",
        f"from {task.init_task}" if task.init_task else "",
        f"{failed} of {len(task.trials)} failed" if failed else "",
        f"one answer in {constant} of {len(task.trials)}" if constant else "",
    ]
    return ", ".join(filter(None, parts))


def _verdicts(glue: Glue) -> list[Verdict]:
    """Return the average and the failed trials."""
    verdicts = []
    if glue.average is not None:
        text = f"GLUE average {format_points(glue.average)} on the dev sets: the mean of nine medians."
        verdicts.append(Verdict("ok", text, [f"of {', '.join(AVERAGED)}; MNLI counts twice"]))
    elif glue.not_averaged:
        text = f"No GLUE average without official, complete scores of {', '.join(glue.not_averaged)}."
        verdicts.append(Verdict("info", text))
    trials = [trial for task in glue.tasks for trial in task.trials]
    if failed := [f"{t.trial}: {t.status}: {t.cause}" for t in trials if t.status != "ok"]:
        text = f"{len(failed)} of {count_of(len(trials), 'trial')} failed; medians are of the others."
        verdicts.append(Verdict("fail", text, failed))
    return verdicts


def _rates(glue: Glue) -> Table:
    names = list(dict.fromkeys(name for rate in glue.rates for name in rate.scores))
    columns = [Quantity(f"scores.{name}", name, "points") for name in names]
    rows = [(format_lr(rate.lr), rate) for rate in glue.rates]
    title = "First metric on a tenth of train, one seed"
    return table(rows, [*columns, Quantity("mean", "mean", "points")], title=title, corner="learning rate")


def compare_report(folders: Sequence[Path]) -> Report:
    """Build the page that compares evaluations with the first one. Raises ConfigError if they share no task
    or have other data."""
    evaluations = [results.read(folder / FILE, Glue) for folder in folders]
    by_name = [{task.task: task for task in glue.tasks} for glue in evaluations]
    shared = [name for name in by_name[0] if all(name in tasks for tasks in by_name)]
    first = str(folders[0])
    issues = [
        Issue(str(folder), "conflict", f"has other data of {name} than {first}", name, first, SAME_DATA)
        for folder, tasks in zip(folders, by_name, strict=True)
        for name in shared
        if tasks[name].data_hash != by_name[0][name].data_hash
    ]
    if not shared:
        issues = [Issue(str(folders[1]), "conflict", f"shares no task with {first}", other=first)]
    if issues:
        raise ConfigError(issues)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    rows = []
    for task in shared:
        one, *others = (tasks[task] for tasks in by_name)
        for score in one.scores:
            medians = [_median(each, score.name) for each in (one, *others)]
            pairs = [glue_scores.paired_differences(one, other, score.name) for other in others]
            cells = [cell(score.majority, "points"), *medians, *map(_difference, pairs)]
            rows.append(TableRow(name_score(one, score), cells))
    heads = ["majority", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    scores = Table(rows, list(map(Column, heads)), "", "task")
    return Report(
        "bert-dp: GLUE, compared",
        [f"{name}: {describe_method(glue)}" for name, glue in zip(names, evaluations, strict=True)],
        sections=[ReportSection("Dev scores", tables=[scores], notes=[DIFFERENCE])],
    )


def _median(task: GlueTask, name: str) -> TableCell:
    score = next((score for score in task.scores if score.name == name), None)
    if score is None:
        return TableCell(NA)
    sd = "" if score.sd is None else f" (sd {format_points(score.sd)})"
    return TableCell(f"{format_points(score.median)}{sd}", _remark(task, score), score.median)


def _difference(pairs: Sequence[float]) -> TableCell:
    if not pairs:
        return TableCell(NA)
    mean = statistics.fmean(pairs)
    interval = f" \u00b1 {100 * half_width(pairs):.1f}" if len(pairs) > 1 else ""
    return TableCell(f"{100 * mean:+.1f}{interval}", count_of(len(pairs), "seed"), mean)
