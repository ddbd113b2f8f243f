"""Define the schema of glue.json, compute its medians and average, and build the reports of `eval glue`."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import contextlib
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from bert_dp import files
from bert_dp.config import ConfigError, ExamplesManifest, Issue, peak_lr
from bert_dp.files.models import HeldOut, StoredModel
from launcher import results
from launcher.evaluate import FILE
from launcher.evaluate.finetune import Pretrained
from launcher.report import page
from launcher.report.formats import NA, count_of, format_count, format_lr, format_nats, format_points
from launcher.results import Measurement
from launcher.run.trials import Trial, TrialOutcome, TrialStatus, cause, read_summary
from launcher.stats import half_width

AVERAGED = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")  # no WNLI, as in arXiv 2212.14034
AVERAGED_METRICS = {"CoLA": "mcc", "MRPC": "f1", "STS-B": "pearson", "QQP": "f1"}  # accuracy for all others


class GlueOptions(StoredModel):
    """Options of `eval glue`."""

    tasks: list[str] = []  # in GLUE's order; empty: all tasks with files
    seeds: int = 5
    init: Literal["checkpoint", "random"] = "checkpoint"
    ranks: int = 1  # per trial
    launcher: str = "torchrun"


class GlueStart(StoredModel):
    """Pretrained checkpoint from which the trials start."""

    checkpoint: str
    step: int
    sha256: str | None  # hash of model.safetensors; null: not in the checkpoint's manifest


class GlueTrial(StoredModel):
    """One finetuning run."""

    trial: str
    lr: float
    seed: int
    status: TrialStatus
    seconds: float = 0.0
    cause: str | None = None
    scores: dict[str, float] = {}  # "split/metric" -> score, at most 1; empty if the trial failed
    one_class: list[str] = []  # dev sets for which all predictions are the same class


class GlueScore(StoredModel):
    """Scores of one metric on a dev set, over all seeds."""

    split: str
    metric: str
    seeds: list[float | None]  # score for each seed, in the order of the trials; null: the trial failed
    median: float | None
    sd: float | None  # standard deviation over the seeds; null if fewer than two trials have a score
    majority: float | None  # score of always predicting the training labels' mode or mean; null: undefined
    examples: int  # number of examples in the dev set
    truncated: int  # number of examples longer than the sequence length
    in_train: int | None  # number of examples whose texts also occur in the train split

    @property
    def name(self) -> str:
        return f"{self.split}/{self.metric}"


class GlueTask(StoredModel):
    """A task with its trials and scores."""

    task: str
    official: bool  # false: a subset of GLUE's rows, so the scores are not GLUE scores
    data_hash: str
    trials: list[GlueTrial]
    scores: list[GlueScore]
    median_trial: str | None  # trial with the (lower) median of the first score; null: all failed


class Glue(Measurement):
    """Contents of glue.json."""

    hint: ClassVar[str] = "rerun the same `bert-dp eval glue` command with the same --out to rewrite the file"
    schema_version: Literal[1] = 1
    kind: Literal["glue"] = "glue"
    settings: GlueOptions
    start: GlueStart
    lr: float
    heldout_loss: float | None  # `start`'s loss in nats; null: random weights or a step without evaluation
    tasks: list[GlueTask]
    left_out: dict[str, str]  # task without files -> reason for its omission
    average: float | None  # mean of the medians of the tasks in AVERAGED
    not_averaged: list[str]  # tasks in AVERAGED that were not run, are not official, or lack a seed's score


def describe_start(start: Pretrained) -> GlueStart:
    """Return the path, step and hash of the pretrained checkpoint."""
    sha256 = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        sha256 = files.weights_hash(start.checkpoint)
    return GlueStart(checkpoint=str(start.checkpoint), step=start.step, sha256=sha256)


def dev_splits(manifest: ExamplesManifest) -> list[str]:
    """Return the splits to score: the dev sets, but never the test set, even if it has labels."""
    return [name for name in manifest.splits if name.startswith("dev")]


def read_trial(trial: Trial, outcome: TrialOutcome, manifest: ExamplesManifest) -> GlueTrial:
    """Read the scores of a finished trial. A trial that lacks a score for a dev set counts as failed."""
    lr, seed, seconds = peak_lr(trial.config).value, trial.config.run.seed, round(outcome.seconds, 3)
    result = GlueTrial(trial=trial.name, lr=lr, seed=seed, status=outcome.status, seconds=seconds)
    if outcome.status != "ok":
        return result.model_copy(update={"cause": cause(trial.directory)})
    summary = read_summary(trial.directory)
    heldout = (summary and summary.heldout) or HeldOut()
    splits, known = dev_splits(manifest), heldout.scores or {}
    names = [f"{split}/{metric}" for split in splits for metric in manifest.metrics]
    scores = {name: score for name in names if (score := known.get(name)) is not None}
    if missing := ", ".join(name for name in names if name not in scores):
        # the summary holds null for an undefined metric, and no entry if a logit is not finite
        undefined = all(name in known for name in names)
        reason = "undefined, as all predictions are equal" if undefined else "a logit is not finite"
        return result.model_copy(update={"status": "failed", "cause": f"no {missing}: {reason}"})
    one_class = [split for split in heldout.one_class if split in splits]
    return result.model_copy(update={"scores": scores, "one_class": one_class})


def score_task(manifest: ExamplesManifest, trials: Sequence[GlueTrial]) -> GlueTask:
    """Compute the median and standard deviation of a task's scores over the seeds."""
    trials, scores = sorted(trials, key=lambda trial: trial.seed), []
    for split, metric in itertools.product(dev_splits(manifest), manifest.metrics):
        seeds = [trial.scores.get(f"{split}/{metric}") for trial in trials]
        known = [score for score in seeds if score is not None]
        dev = manifest.splits[split]
        score = GlueScore(
            split=split,
            metric=metric,
            seeds=seeds,
            median=statistics.median(known) if known else None,
            sd=statistics.stdev(known) if len(known) > 1 else None,
            majority=(dev.baseline or {}).get(metric),
            examples=dev.examples,
            truncated=dev.truncated,
            in_train=dev.in_train,
        )
        scores.append(score)
    first = scores[0].name
    ranked = sorted((t.scores[first], t.seed, t.trial) for t in trials if first in t.scores)
    return GlueTask(
        task=manifest.task,
        official=bool(manifest.official),
        data_hash=manifest.hash,
        trials=trials,
        scores=scores,
        median_trial=ranked[(len(ranked) - 1) // 2][2] if ranked else None,
    )


def average(tasks: Sequence[GlueTask]) -> tuple[float | None, list[str]]:
    """Return the GLUE average and the tasks that lack scores. The average is None if any task lacks them."""
    medians: list[float] = []  # nine medians, because MNLI has two dev sets
    lacking = []
    for name in AVERAGED:
        metric = AVERAGED_METRICS.get(name, "accuracy")
        scores = [s for t in tasks if t.task == name and t.official for s in t.scores if s.metric == metric]
        medians += [score.median for score in scores if score.median is not None]
        if not scores or any(None in score.seeds for score in scores):
            lacking.append(name)
    return (None if lacking else statistics.fmean(medians)), lacking


# --- pages

METRICS = {"mcc": "Matthews", "f1": "F1", "auc": "AUC", "pearson": "Pearson", "spearman": "Spearman"}
SCORES = (
    page.Quantity("median", "median", "points"),
    page.Quantity("sd", "deviation", "points"),
    page.Quantity("majority", "majority", "points"),
    page.Quantity("examples", "dev examples", "count"),
    page.Quantity("truncated", "truncated", "count"),
    page.Quantity("in_train", "also in train", "count"),
    page.Quantity(lambda score: ", ".join(map(format_points, score["seeds"])), "all seeds", "word"),
    page.Quantity("remark", "remark", "word"),
)
SAME_DATA = "compare evaluations with the same files, tokenizer and sequence length"
DIFFERENCE = (
    "Scores are medians over the seeds, out of 100, with standard deviations (sd). Differences are means "
    "over the common seeds, with 95 % intervals (Student's t). The intervals do not account for the "
    "variation between pretraining runs."
)


def glue_report(glue: Glue) -> page.Report:
    """Build the report of one evaluation."""
    seeds, method = count_of(glue.settings.seeds, "seed"), describe_method(glue)
    left_out = [page.words(task, reason) for task, reason in glue.left_out.items()]
    rows = [
        (name_score(task, score), {**dict(score), "remark": _remark(task, score)})
        for task in glue.tasks
        for score in task.scores
    ]
    scores = page.table(rows, SCORES, title=method, corner="task", empty="no task was evaluated")
    return page.Report(
        "bert-dp: GLUE",
        page.subtitle(glue, [method, f"rate {format_lr(glue.lr)}", seeds]),
        [*page.status_verdicts(glue), *_verdicts(glue)],
        sections=[
            page.ReportSection("Dev scores", tables=[scores], notes=["Scores are out of 100."]),
            page.ReportSection("Omitted", tables=[page.Table(left_out)], console=bool(left_out)),
        ],
    )


def describe_method(glue: Glue) -> str:
    """Describe the head, pooling and initial weights of the trials."""
    loss = "" if glue.heldout_loss is None else f" (held-out loss {format_nats(glue.heldout_loss)})"
    is_random = glue.settings.init == "random"
    start = "random weights" if is_random else f"step {format_count(glue.start.step)}{loss}"
    finetuning = glue.config["finetune"]
    return f"{finetuning['head']} head, {finetuning['pooling']} pooling, from {start}"


def name_score(task: GlueTask, score: GlueScore) -> str:
    """Return the name of a score, such as `RTE accuracy` or `MNLI matched accuracy`."""
    split = score.split.removeprefix("dev").removeprefix("_")
    return " ".join(filter(None, (task.task, split, METRICS.get(score.metric, score.metric))))


def _remark(task: GlueTask, score: GlueScore) -> str:
    """Return remarks on the limitations of a score."""
    failed = sum(seed is None for seed in score.seeds)
    constant = sum(score.split in trial.one_class for trial in task.trials)
    parts = [
        "" if task.official else "subset",
        f"{failed} of {len(task.trials)} trials failed" if failed else "",
        f"constant predictions in {constant} of {len(task.trials)} trials" if constant else "",
    ]
    return ", ".join(filter(None, parts))


def _verdicts(glue: Glue) -> list[page.Verdict]:
    verdicts = []
    if glue.average is not None:
        text = f"GLUE average on dev: {format_points(glue.average)}, the mean of nine medians over seeds."
        verdicts.append(page.Verdict("ok", text, [f"Tasks: {', '.join(AVERAGED)}; MNLI counts twice."]))
    elif glue.not_averaged:
        text = f"No GLUE average: official, complete scores are missing for {', '.join(glue.not_averaged)}."
        verdicts.append(page.Verdict("info", text))
    trials = [trial for task in glue.tasks for trial in task.trials]
    if failed := [f"{t.trial}: {t.status}: {t.cause}" for t in trials if t.status != "ok"]:
        text = f"{len(failed)} of {count_of(len(trials), 'trial')} failed; the medians exclude them."
        verdicts.append(page.Verdict("fail", text, failed))
    return verdicts


def compare_report(folders: Sequence[Path]) -> page.Report:
    """Build the report that compares each evaluation with the first one. Raise ConfigError if they have no
    task in common or if their data differ."""
    evaluations = [results.read(folder / FILE, Glue) for folder in folders]
    by_name = [{task.task: task for task in glue.tasks} for glue in evaluations]
    shared = [name for name in by_name[0] if all(name in tasks for tasks in by_name)]
    first = str(folders[0])
    issues = [
        Issue(str(folder), "conflict", f"{name} data differ from those of {first}", name, first, SAME_DATA)
        for folder, tasks in zip(folders, by_name, strict=True)
        for name in shared
        if tasks[name].data_hash != by_name[0][name].data_hash
    ]
    if not shared:
        issues = [Issue(str(folders[1]), "conflict", "no task was run in all evaluations", other=first)]
    if issues:
        raise ConfigError(issues)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    rows = []
    for one, *others in ([tasks[name] for tasks in by_name] for name in shared):
        for score in one.scores:
            medians = [_median(each, score.name) for each in (one, *others)]
            differences = [_difference(one, other, score.name) for other in others]
            cells = [page.cell(score.majority, "points"), *medians, *differences]
            rows.append(page.TableRow(name_score(one, score), cells))
    heads = ["majority", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    scores = page.Table(rows, heads, corner="task")
    return page.Report(
        "bert-dp: comparison of GLUE evaluations",
        [f"{name}: {describe_method(glue)}" for name, glue in zip(names, evaluations, strict=True)],
        sections=[page.ReportSection("Dev scores", tables=[scores], notes=[DIFFERENCE])],
    )


def _median(task: GlueTask, name: str) -> page.TableCell:
    score = next((score for score in task.scores if score.name == name), None)
    if score is None:
        return page.TableCell(NA)
    sd = "" if score.sd is None else f" (sd {format_points(score.sd)})"
    return page.TableCell(f"{format_points(score.median)}{sd}", _remark(task, score), score.median)


def _difference(one: GlueTask, other: GlueTask, name: str) -> page.TableCell:
    """Return the mean difference of the scores, `other` - `one`, over their common seeds."""
    before, after = (
        {t.seed: t.scores[name] for t in task.trials if name in t.scores} for task in (one, other)
    )
    pairs = [after[seed] - before[seed] for seed in after.keys() & before.keys()]
    if not pairs:
        return page.TableCell(NA)
    mean = statistics.fmean(pairs)
    interval = f" \u00b1 {100 * half_width(pairs):.1f}" if len(pairs) > 1 else ""
    return page.TableCell(f"{100 * mean:+.1f}{interval}", count_of(len(pairs), "seed"), mean)
