"""Trials of GLUE -> scores: of a trial, of a task over its seeds, and their average."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_dp import record
from bert_dp.record.models import FailureKind, Summary
from launcher.evaluate.glue_grid import Task
from launcher.evaluate.glue_predictions import answers
from launcher.results import GlueScore, GlueSplit, GlueTask, GlueTrial, RateScore
from launcher.run.read_run import cause, failure_kind, read_summary
from launcher.run.trials import Outcome, Trial

AVERAGED = (
    ("CoLA", "dev/mcc"),
    ("SST-2", "dev/accuracy"),
    ("MRPC", "dev/f1"),
    ("STS-B", "dev/pearson"),
    ("QQP", "dev/f1"),
    ("MNLI", "dev_matched/accuracy"),
    ("MNLI", "dev_mismatched/accuracy"),
    ("QNLI", "dev/accuracy"),
    ("RTE", "dev/accuracy"),
)
"""The nine numbers of the recipe's average: eight tasks, MNLI twice, WNLI never."""


def read_trial(trial: Trial, outcome: Outcome, task: Task, lr: float) -> GlueTrial:
    """What a trial has come to. One without every score of its dev sets has failed."""
    directory = trial.directory
    summary = read_summary(directory) or Summary(status="failed")
    facts: dict[str, Any] = {
        **dict(summary),  # a field of GlueTrial that a summary has too is that of the run
        "trial": trial.name,
        "lr": lr,
        "seed": trial.config.run.seed,
        "seconds": outcome.seconds,
        "status": outcome.status,
    }
    if outcome.status != "ok":
        return GlueTrial(**facts | {"cause": cause(directory), "failure_kind": failure_kind(directory)})
    known = (summary.heldout and summary.heldout.scores) or {}
    wanted = [f"{split}/{metric}" for split in task.dev for metric in task.manifest.metrics]
    scores = {name: score for name in wanted if (score := known.get(name)) is not None}
    predicted = answers(directory)
    short = [s for s in task.dev if len(predicted.get(s, ())) != task.manifest.splits[s].examples]
    if short:
        cut = f"{record.PREDICTIONS} does not hold every example of {', '.join(short)}"
        return GlueTrial(**facts | {"status": "failed", "cause": cut, "failure_kind": "error"})
    if missing := [name for name in wanted if name not in scores]:
        undefined = all(name in known for name in missing)
        kind: FailureKind = "error" if undefined else "not_finite"
        why = "not defined, as where every answer is the same" if undefined else "a logit is not finite"
        told = f"no {', '.join(missing)}: {why}"
        return GlueTrial(**facts | {"status": "failed", "cause": told, "failure_kind": kind})
    measured = {
        "scores": scores,
        "one_class": [split for split in task.dev if len(set(predicted[split])) == 1],
        "predictions_sha256": hashlib.sha256((directory / record.PREDICTIONS).read_bytes()).hexdigest(),
    }
    return GlueTrial(**facts | measured)


def task_result(
    task: Task,
    trials: Sequence[GlueTrial],
    majority: Mapping[str, Mapping[str, float | None]],
    init_task: str | None,
) -> GlueTask:
    """The scores of a task over its seeds. `majority`: split -> metric -> the score of a constant answer."""
    manifest = task.manifest
    trials = sorted(trials, key=lambda trial: trial.seed)
    scores = [
        _over_seeds(split, metric, trials, majority.get(split, {}).get(metric))
        for split in task.dev
        for metric in manifest.metrics
    ]
    return GlueTask(
        task=task.name,
        official=bool(manifest.official),
        train_examples=manifest.num_samples,
        data_hash=manifest.hash,
        init_task=init_task,
        splits=[GlueSplit(name=split, **dict(manifest.splits[split])) for split in task.dev],
        trials=trials,
        scores=scores,
        median_trial=median_trial(trials, scores[0].name),
    )


def _over_seeds(split: str, metric: str, trials: Sequence[GlueTrial], majority: float | None) -> GlueScore:
    seeds = [trial.scores.get(f"{split}/{metric}") for trial in trials]
    known = [score for score in seeds if score is not None]
    return GlueScore(
        split=split,
        metric=metric,
        seeds=seeds,
        median=statistics.median(known) if known else None,
        sd=statistics.stdev(known) if len(known) > 1 else None,
        majority=majority,
    )


def median_trial(trials: Iterable[GlueTrial], name: str) -> str | None:
    """The one whose score of this name is the median; of an even number the lower one."""
    scored = sorted((trial.scores[name], trial.seed, trial.trial) for trial in trials if name in trial.scores)
    return scored[(len(scored) - 1) // 2][2] if scored else None


def average(tasks: Sequence[GlueTask]) -> tuple[float | None, list[str]]:
    """Mean of the nine medians, or why there is none: a line for each task that is not whole."""
    by_name = {task.task: task for task in tasks}
    lines: dict[str, str] = {}
    medians = []
    for name, metric in AVERAGED:
        task = by_name.get(name)
        score = task.score(metric) if task else None
        if task is None:
            lines[name] = f"{name} is not evaluated"
        elif not task.official:
            lines[name] = f"{name} is a subset of GLUE's rows"
        elif score is None or score.median is None or not score.is_whole:
            lines[name] = f"{name} lacks the score of a seed"
        else:
            medians.append(score.median)
    return (None if lines else statistics.fmean(medians)), list(lines.values())


def rate_score(lr: float, trials: Mapping[str, GlueTrial], metrics: Mapping[str, str]) -> RateScore:
    """A rate by its trials. `metrics`: task -> "split/metric" that counts."""
    scores = {task: trials[task].scores.get(metrics[task]) for task in trials}
    known = [score for score in scores.values() if score is not None]
    mean = statistics.fmean(known) if known and len(known) == len(scores) else None
    return RateScore(lr=lr, scores=scores, mean=mean, trials=list(trials.values()))


def choose_rate(rates: Sequence[RateScore]) -> float | None:
    """The rate with the highest mean, the lower one of two equals; None where none can be chosen."""
    scored = [(-rate.mean, rate.lr) for rate in rates if rate.mean is not None]
    return min(scored)[1] if scored else None
