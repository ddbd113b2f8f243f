"""Trials of the learning rate search: their devices, their configurations, what their records say."""

from __future__ import annotations

import bisect
import math
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import (
    BatchConfig,
    BuildConfig,
    CheckpointConfig,
    Config,
    LogConfig,
    ScheduleConfig,
    batch_at,
)
from bert_dp.record.models import Summary
from launcher.results import LrTrial, TrialStatus
from launcher.run.describe import expected_steps
from launcher.run.read_run import cause, failure_kind, read_summary
from launcher.run.trials import Outcome, Trial
from launcher.tune.search import with_settings

RANGE_TOP = 1.0  # rate at the end of a range test; it begins at 1e-4 of this
RANGE_STEPS = 100
RANGE_SHARE = 16  # a range test takes no more than this part of the whole budget, but
RANGE_LEAST = 25  # as many steps as four decades need to be told apart
RANGE_SHORT_H = 0.5  # below it a run of unknown speed may have few steps
CURVE_POINTS = 4


def step_tokens(config: Config) -> int:
    return config.batch.global_size * config.data.sequence_length


def whole(config: Config, tokens: float) -> int:
    """`tokens` as whole steps of the full global batch."""
    size = step_tokens(config)
    return max(1, round(tokens / size)) * size


def full_tokens(config: Config) -> int | None:
    """Tokens of the configured run, its batch ramp included; None for a budget in hours."""
    schedule = config.schedule
    if schedule.tokens is not None:
        return schedule.tokens
    if schedule.steps is None:
        return None
    return _samples(config.batch, schedule.steps) * config.data.sequence_length


def _samples(batch: BatchConfig, steps: int) -> int:
    """Sequences of so many steps, counted by the sizes of the ramp, which never falls: steps may be many."""

    def size_of(step: int) -> int:
        return batch_at(batch, step / steps)

    samples = step = 0
    while step < steps:
        size = size_of(step)
        beyond = bisect.bisect_right(range(steps), size, lo=step, key=size_of)
        samples, step = samples + size * (beyond - step), beyond
    return samples


def range_steps(config: Config, tokens: int | None) -> int:
    """Steps of the range test, for a whole budget of `tokens`, if that is known before anything has run."""
    if tokens is None:
        short = (config.schedule.hours or math.inf) < RANGE_SHORT_H
        return RANGE_LEAST if short else RANGE_STEPS
    return min(RANGE_STEPS, max(RANGE_LEAST, tokens // RANGE_SHARE // step_tokens(config)))


def trial_name(config: Config, lr: float, tokens: int, seed: int) -> str:
    """Of the trial's directory."""
    optim = config.optim
    return f"{optim.name}-lr-{lr:g}-wd-{optim.weight_decay:g}-t{tokens}-s{seed}"


def trial_config(config: Config, shards: Path, lr: float, tokens: int, seed: int, *, last: bool) -> Config:
    """One complete run of `tokens` tokens: its own schedule to its end, and the held-out loss there; in the
    last rung also on the way, CURVE_POINTS times in all. An evaluation takes as long as many steps."""
    budget: dict[str, int | None] = {"tokens": tokens, "steps": None}
    if config.schedule.steps and config.batch.ramp_fraction:
        # progress in steps ramps otherwise than in tokens
        share = tokens / (full_tokens(config) or tokens)
        budget = {"tokens": None, "steps": max(1, round(share * config.schedule.steps))}
    trial = with_settings(_bare(config, shards, lr, seed), schedule={**budget, "hours": None})
    every = max(1, -(-(expected_steps(trial) or 1) // CURVE_POINTS))
    trial = with_settings(trial, eval={"every_steps": every if last else 0})
    return trial.model_copy(update={"log": LogConfig(every_steps=min(config.log.every_steps, every))})


def range_config(config: Config, shards: Path, steps: int) -> Config:
    """A run whose rate rises over four decades, at the full batch from the start."""
    trial = with_settings(
        _bare(config, shards, RANGE_TOP, config.run.seed),
        batch={"ramp_fraction": 0.0, "ramp_quantum": None},
        eval={"every_steps": 0},
    )
    schedule = ScheduleConfig(name="exponential", steps=steps)
    return trial.model_copy(update={"schedule": schedule, "log": LogConfig(every_steps=1)})


def _bare(config: Config, shards: Path, lr: float, seed: int) -> Config:
    """The data by its directory, so that every seed has the same held-out documents; nothing is saved."""
    trial = with_settings(
        config,
        run={"seed": seed},
        data={"path": str(shards), "sources": None, "tokenizer": None, "build": BuildConfig()},
        optim=as_it_stands(lr),
    )
    return trial.model_copy(update={"checkpoint": CheckpointConfig(keep=0)})


def as_it_stands(lr: float) -> dict[str, Any]:
    """Settings of `optim` for a rate that no rule scales."""
    return {"lr": lr, "lr_scaling": "none", "lr_batch": None}


def tuned_config(config: Config, lr: float) -> Config:
    """The user's run with what was found. A rule for other batches stays, and starts from this one."""
    update = as_it_stands(lr)
    if config.optim.lr_scaling != "none":
        update |= {"lr_scaling": config.optim.lr_scaling, "lr_batch": config.batch.global_size}
    return with_settings(config, optim=update)


def read_trial(trial: Trial, outcome: Outcome) -> LrTrial:
    """What a trial has come to."""
    directory, config = trial.directory, trial.config
    summary = read_summary(directory) or Summary(status="failed")
    status: TrialStatus = outcome.status
    why, kind = (None, None) if status == "ok" else (cause(directory), failure_kind(directory))
    if status == "ok" and summary.heldout_loss is None:
        status, why = "diverged", "the held-out loss is not finite"
    elif status == "failed" and kind == "not_finite":
        status = "diverged"
    evals = record.read_lines(directory / "evals.jsonl")
    return LrTrial(
        trial=trial.name,
        lr=float(config.optim.lr),
        weight_decay=config.optim.weight_decay,
        optimizer=config.optim.name,
        seed=config.run.seed,
        status=status,
        failure_kind=kind,
        cause=why,
        heldout_loss=summary.heldout_loss,
        heldout=summary.heldout,
        tokens=summary.tokens or step_tokens(config) * summary.step,
        seconds=outcome.seconds,
        curve=[(line["tokens"], line["loss"]) for line in evals if line["loss"] is not None],
    )


def range_points(directory: Path) -> list[tuple[float, float | None, int]]:
    """(rate, loss, steps skipped so far) of each step of a range test."""
    lines = record.read_lines(directory / "metrics.jsonl")
    return [(line["lr"], line["loss"], line["skipped_steps"]) for line in lines]
