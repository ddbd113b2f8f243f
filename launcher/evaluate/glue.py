"""`bert-dp eval glue`: a pretrained run finetuned on GLUE's tasks with several seeds, and the table of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config import ConfigError, batch_layout, native_head
from bert_dp.config.manifest import hash_json
from launcher import children, job, results
from launcher.evaluate import FILE, finetune, glue_grid, glue_scores
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue_grid import RATE_SHARE, Grid, Task
from launcher.evaluate.glue_predictions import write_submissions
from launcher.evaluate.glue_report import by_reason, glue_report
from launcher.evaluate.glue_run import GlueRun
from launcher.log import Log, logger
from launcher.machine import environment
from launcher.output import KeptPlan, Output, publish
from launcher.report.numbers import count_of, format_lr
from launcher.results import Glue, GlueOptions, GluePlanFile, GlueStart, GlueTask
from launcher.run import trials
from launcher.run.trials import Ending, run_to_end

if TYPE_CHECKING:
    from rich.console import Console

STATE = "plan.json"
FIXED = ("kind", "config_hash", "settings", "start")
GROWS = ("settings.seeds",)


def evaluate(
    run: Path,
    overrides: Sequence[str],
    options: GlueOptions,
    data: Sequence[Path],
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError before any trial starts, with everything that is wrong."""
    start = finetune.find_pretrained(run)
    weights = None if options.init == "random" else start.checkpoint
    base = finetune.configuration(start, overrides, weights)
    trial_job = job.Job(start.run.name, base, environment.probe(Path()))
    folder = trial_job.directory(out, "eval", "glue")
    if issues := [
        *glue_grid.setting_issues(overrides, options.rates),
        *trial_job.device_issues(options.ranks, "--ranks-per-job"),
        *job.exposure_issues(base, folder, "--out"),
    ]:
        raise ConfigError(issues)
    options, left_out = glue_grid.choose_tasks(glue_grid.missing_files(data), options)
    plan = GluePlanFile(
        config_hash=base.hash(),
        config=base.model_dump(mode="json"),
        settings=results.plain(options),
        start=results.plain(start_of(start)),
    )
    output = Output(folder, "evaluation", STATE, plan, FIXED, GROWS)
    if issues := output.issues():
        raise ConfigError(issues)
    on_gpu = trial_job.gpus > 0
    length = base.data.sequence_length
    grid = Grid(
        start,
        tuple(overrides),
        options,
        base,
        trials.trial_precision(base, trial_job.machine, [base.parallel.engine], on_gpu=on_gpu),
        on_gpu,
        {name: glue_grid.prepare(start, name, data, length) for name in options.tasks},
        {name: glue_grid.prepare(start, name, data, length, RATE_SHARE) for name in options.rate_tasks},
        left_out,
    )
    if issues := trial_issues(grid):
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in trial_job.device_warnings():
        log(f"warning: {line}")
    describe(grid, folder, log)
    if grid.weights is not None and still_trains(grid.weights):
        keep = start.config.checkpoint.keep
        log(
            f"warning: the run still trains and keeps its {count_of(keep, 'newest checkpoint')}: copy "
            f"{grid.weights.name} to another place and name that, if the evaluation may take longer"
        )
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    majority = majorities(grid.tasks)
    with output.claim():
        file, exit_code = run_locked(grid, output, majority, log)
        publish(file, glue_report(file), folder, as_json=as_json, console=console)
    return exit_code


def start_of(start: Pretrained) -> GlueStart:
    """The checkpoint by its hash."""
    sha256 = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        sha256 = record.weights_hash(start.checkpoint)
    folder = start.checkpoint.parent  # the same run whether it was named or this checkpoint of it
    run = folder.parent if folder.name == "checkpoints" else start.run
    return GlueStart(run=str(run), checkpoint=str(start.checkpoint), step=start.step, sha256=sha256)


def still_trains(checkpoint: Path) -> bool:
    """Whether a rank holds the run that this is a checkpoint of, and may remove it."""
    lock = checkpoint.parent.parent / ".lock"
    if not lock.is_file():
        return False
    with contextlib.suppress(OSError):
        held = record.lock(lock)
        if held is None:
            return True
        held.close()
    return False


def trial_issues(grid: Grid) -> list[str]:
    """Why these tasks cannot be trained with these settings; one line each."""
    issues: list[str] = []
    for task in grid.every_task:
        config = glue_grid.configure(grid, task, grid.weights)
        issues += job.input_issues(config)
        try:
            batch_layout(config, grid.options.ranks)
        except ConfigError as error:
            issues += error.issues
    seed, seeds = grid.base.run.seed, grid.options.seeds
    if seed + seeds > 2**63:
        issues.append(f"run.seed: {seed} leaves no room for {seeds} seeds; use less")
    return [*dict.fromkeys(issues)]


def head_of(grid: Grid) -> str:
    """The head by name, a native one with the class that it is of."""
    head = grid.base.finetune.head
    return f"native ({native_head(grid.base.model)})" if head == "native" else head


def describe(grid: Grid, folder: Path, log: Log) -> None:
    """What is about to run."""
    options = grid.options
    log(f"GLUE evaluation: {folder}")
    log(
        f"from {grid.weights or 'random weights'}; head {head_of(grid)}, pooling {grid.base.finetune.pooling}"
    )
    log(
        f"{', '.join(options.tasks)} x {count_of(options.seeds, 'seed')}, "
        f"{count_of(options.ranks, 'rank')} each"
    )
    for why, tasks in by_reason(grid.left_out).items():
        log(f"left out: {', '.join(tasks)}: {why}")
    if subsets := [name for name, task in grid.tasks.items() if not task.manifest.official]:
        log(f"subsets of GLUE's rows, no GLUE score: {', '.join(subsets)}")
    if options.rates:
        rates = ", ".join(map(format_lr, options.rates))
        log(f"the rate first: {rates} on {RATE_SHARE:g} of train of {', '.join(options.rate_tasks)}")
    for task, source in options.init_task.items():
        log(f"{task} starts from the finetuned run of {source} of the same seed")


def run_locked(
    grid: Grid, output: Output[GluePlanFile], majority: Mapping[str, Any], log: Log
) -> tuple[Glue, int]:
    """All trials, and glue.json, also what there is of it when a signal came; and the exit code."""
    out = output.path
    session = output.begin_with(
        hash_json({f"{t.name} {t.manifest.dev_share:g}": t.manifest.hash for t in grid.every_task})
    )
    slots = trials.device_slots(
        grid.options.ranks,
        gpus=len(session.machine["gpus"]) if grid.on_gpu else 0,
        cores=int(session.machine["usable_cores"]),
        most=max(len(grid.tasks) * grid.options.seeds, len(grid.rate_tasks) * len(grid.options.rates)),
    )
    kept = KeptPlan(out / STATE, session.plan)
    with trials.runner(out, slots, launcher=grid.options.launcher, on_gpu=grid.on_gpu, log=log) as runs:
        measured = GlueRun(grid, runs, log)
        ending = run_to_end(measured.run, out, log)
    kept.save()
    tasks = [
        glue_scores.task_result(task, measured.trials[name], majority[name], grid.options.init_task.get(name))
        for name, task in grid.tasks.items()
    ]
    if ending.status == "complete":
        tasks = [submitted(out, task, grid.tasks[task.task]) for task in tasks]
        if not any(trial.status == "ok" for task in tasks for trial in task.trials):
            ending = Ending("failed", "every trial failed; their logs stand below trials", 1)
    facts = {**session.facts(), "seconds": kept.plan.seconds, "at_a_time": len(slots)}
    file = document(measured, tasks, ending, facts)
    results.write(out / FILE, file)
    return file, ending.exit_code


def majorities(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Task -> split -> metric -> the score of the most frequent answer of train."""
    folders = [str(task.path) for task in tasks.values()]
    scores = children.asked("bert_dp.measure.majority", folders, "the majority baselines")
    return {name: scores[str(task.path)] for name, task in tasks.items()}


def submitted(out: Path, task: GlueTask, source: Task) -> GlueTask:
    """The same, with its files for GLUE's server written."""
    if task.median_trial is None:
        return task.model_copy(update={"no_submission": "no trial has scores"})
    files, why = write_submissions(out, out / "trials" / task.median_trial, source.manifest)
    return task.model_copy(update={"submissions": files, "no_submission": why})


def document(measured: GlueRun, tasks: Sequence[GlueTask], ending: Ending, facts: Mapping[str, Any]) -> Glue:
    """glue.json; `facts`: the machine, the data, the time."""
    grid = measured.grid
    average, no_average = glue_scores.average(tasks)
    return Glue(
        status=ending.status,
        why=ending.why,
        date=time.strftime("%Y-%m-%d"),
        **facts,
        config=grid.base.model_dump(mode="json"),
        settings=grid.options,
        ranks=grid.options.ranks,
        start=start_of(grid.start),
        head=head_of(grid),
        pooling=grid.base.finetune.pooling,
        lr=measured.lr,
        heldout_loss=grid.heldout_loss,
        rates=measured.rates,
        tasks=list(tasks),
        left_out=dict(grid.left_out),
        average=average if ending.status == "complete" else None,
        averaged=[f"{task} {metric}" for task, metric in glue_scores.AVERAGED],
        no_average=no_average,
    )
