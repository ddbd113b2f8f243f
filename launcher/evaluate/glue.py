"""`bert-dp eval glue`: a pretrained run finetuned on GLUE's tasks with several seeds, and the table of it."""

from __future__ import annotations

import dataclasses
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
from launcher.evaluate.glue_grid import RATE_SHARE, Question, Task
from launcher.evaluate.glue_report import glue_report
from launcher.evaluate.glue_run import GlueRun, NoRate
from launcher.evaluate.submissions import write_submissions
from launcher.log import Log, logger
from launcher.machine import environment
from launcher.report.numbers import count_of, format_lr
from launcher.results import Glue, GlueOptions, GluePlanFile, GlueStart, GlueTask, MeasureStatus
from launcher.run import trials
from launcher.run.trials import Stopped

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
    base = finetune.configuration(
        start,
        overrides,
        manifest=None,
        path=None,
        init_from=None if options.init == "random" else start.checkpoint,
    )
    asked = job.Job(start.run.name, base, environment.probe(Path()))
    folder = asked.directory(out, "eval", "glue")
    if issues := [
        *glue_grid.setting_issues(overrides, options.rates),
        *asked.device_issues(options.ranks),
        *job.exposure_issues(base, folder, "--out"),
    ]:
        raise ConfigError(issues)
    options, left_out = glue_grid.choose_tasks(glue_grid.missing_files(data), options)
    plan = plan_of(asked, start, options)
    output = job.Output(folder, "evaluation", STATE, plan, FIXED, GROWS)
    if issues := output.issues():
        raise ConfigError(issues)
    on_gpu = asked.gpus > 0
    precision = trials.trial_precision(base, asked.machine, [base.parallel.engine], on_gpu=on_gpu)
    q = Question(start, tuple(overrides), options, base, precision)
    length = base.data.sequence_length
    tasks = {name: glue_grid.prepare(start, name, data, length) for name in options.tasks}
    tenths = {name: glue_grid.prepare(start, name, data, length, RATE_SHARE) for name in options.rate_tasks}
    if issues := trial_issues(q, [*tasks.values(), *tenths.values()]):
        raise ConfigError(issues)

    log = logger(console, as_json)
    describe(q, folder, tasks, left_out, log)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.claim():
        measured = run_locked(q, tasks, tenths, left_out, output, on_gpu=on_gpu, log=log)
        job.publish(measured.file, glue_report(measured.file), folder, as_json=as_json, console=console)
    return measured.exit_code


def plan_of(asked: job.Job, start: Pretrained, options: GlueOptions) -> GluePlanFile:
    """plan.json as an evaluation begins."""
    return GluePlanFile(
        config_hash=asked.config.hash(),
        config=asked.config.model_dump(mode="json"),
        settings=results.plain(options),
        start=results.plain(start_of(start)),
    )


def start_of(start: Pretrained) -> GlueStart:
    """The checkpoint by its hash."""
    files = (record.read_json(start.checkpoint / "manifest.json") or {}).get("files", {})
    sha256 = files.get("model.safetensors", {}).get("sha256")
    return GlueStart(run=str(start.run), checkpoint=str(start.checkpoint), step=start.step, sha256=sha256)


def trial_issues(q: Question, tasks: Sequence[Task]) -> list[str]:
    """Why these tasks cannot be trained with these settings; one line each."""
    issues: list[str] = []
    for task in tasks:
        config = glue_grid.configure(q, task, q.weights)
        issues += job.input_issues(config)
        try:
            batch_layout(config, q.options.ranks)
        except ConfigError as error:
            issues += error.issues
    if q.base.run.seed + q.options.seeds > 2**63:
        issues.append(f"run.seed: {q.base.run.seed} leaves no room for {q.options.seeds} seeds; use less")
    return [*dict.fromkeys(issues)]


def head_of(q: Question) -> str:
    """The head by name, a native one with the class that it is of."""
    head = q.base.finetune.head
    return f"native ({native_head(q.base.model)})" if head == "native" else head


def describe(
    q: Question, folder: Path, tasks: Mapping[str, Task], left_out: Mapping[str, str], log: Log
) -> None:
    """What is about to run."""
    options = q.options
    log(f"GLUE evaluation: {folder}")
    begun = "random weights" if q.weights is None else f"{q.weights}"
    log(f"from {begun}; head {head_of(q)}, pooling {q.base.finetune.pooling}")
    log(
        f"{', '.join(options.tasks)} x {count_of(options.seeds, 'seed')}, "
        f"{count_of(options.ranks, 'rank')} each"
    )
    for task, why in left_out.items():
        log(f"left out: {task}: {why}")
    subsets = [task.name for task in tasks.values() if not task.manifest.official]
    if subsets:
        log(f"subsets of GLUE's rows, no GLUE score: {', '.join(subsets)}")
    if options.rates:
        rates = ", ".join(map(format_lr, options.rates))
        log(f"the rate first: {rates} on {RATE_SHARE:g} of train of {', '.join(options.rate_tasks)}")
    for task, source in options.init_task.items():
        log(f"{task} starts from the finetuned run of {source} of the same seed")


@dataclasses.dataclass(frozen=True)
class Measured:
    file: Glue
    exit_code: int


def run_locked(
    q: Question,
    tasks: Mapping[str, Task],
    tenths: Mapping[str, Task],
    left_out: dict[str, str],
    output: job.Output[GluePlanFile],
    *,
    on_gpu: bool,
    log: Log,
) -> Measured:
    """All trials, and glue.json; also what there is of it when a signal came."""
    out = output.path
    hashes = {
        f"{t.name} {t.manifest.dev_share:g}": t.manifest.hash for t in (*tasks.values(), *tenths.values())
    }
    taken = output.begin_with(hash_json(hashes))
    majority = majorities(tasks)
    slots = trials.device_slots(
        q.options.ranks,
        gpus=len(taken.machine["gpus"]) if on_gpu else 0,
        cores=int(taken.machine["usable_cores"]),
        most=max(len(tasks) * q.options.seeds, len(tenths) * len(q.options.rates)),
    )
    kept = job.KeptPlan(out / STATE, taken.plan)
    status: MeasureStatus = "complete"
    stopped, why = 0, None
    with trials.runner(out, slots, launcher=q.options.launcher, on_gpu=on_gpu, log=log) as runs:
        doing = GlueRun(q, tasks, tenths, runs, log)
        try:
            doing.run()
        except Stopped as stop:
            status, stopped = "partial", stop.number
            log(f"stopped: {out} holds what was measured; the same command goes on")
        except NoRate as none:
            status, why = "failed", str(none)
    kept.save()
    found = [
        glue_scores.task_result(task, doing.trials[name], majority[name], q.options.init_task.get(name))
        for name, task in tasks.items()
    ]
    if status == "complete":
        found = [submitted(out, each, tasks[each.task]) for each in found]
        if not any(trial.status == "ok" for each in found for trial in each.trials):
            status, why = "failed", "every trial failed; their logs stand below trials"
    file = document(q, doing, found, left_out, status, why, kept.plan.seconds, taken.facts(), len(slots))
    results.write(out / FILE, file)
    return Measured(file, 128 + stopped if stopped else int(status == "failed"))


def majorities(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Task -> split -> metric -> the score of the most frequent answer of train."""
    folders = [str(task.path) for task in tasks.values()]
    code, found = children.capture_json("bert_dp.measure.majority", folders)
    if code == 2:
        raise ConfigError([])
    if found is None:
        raise ConfigError([f"the majority baselines failed with exit code {code}; see above"])
    return {task: found[str(tasks[task].path)] for task in tasks}


def submitted(out: Path, task: GlueTask, source: Task) -> GlueTask:
    """The same, with its files for GLUE's server written."""
    if task.median_trial is None:
        return task.model_copy(update={"no_submission": "no trial has scores"})
    files, why = write_submissions(out, out / "trials" / task.median_trial, source.manifest)
    return task.model_copy(update={"submissions": files, "no_submission": why})


def document(
    q: Question,
    doing: GlueRun,
    tasks: Sequence[GlueTask],
    left_out: dict[str, str],
    status: MeasureStatus,
    why: str | None,
    seconds: float,
    facts: Mapping[str, Any],
    at_a_time: int,
) -> Glue:
    """glue.json."""
    average, no_average = glue_scores.average(tasks)
    return Glue(
        status=status,
        why=why,
        date=time.strftime("%Y-%m-%d"),
        seconds=seconds,
        **facts,
        config=q.base.model_dump(mode="json"),
        settings=q.options,
        ranks=q.options.ranks,
        start=start_of(q.start),
        head=head_of(q),
        pooling=q.base.finetune.pooling,
        lr=doing.lr,
        at_a_time=at_a_time,
        rates=doing.rates,
        tasks=list(tasks),
        left_out=left_out,
        average=average if status == "complete" else None,
        averaged=[f"{task} {metric}" for task, metric in glue_scores.AVERAGED],
        no_average=no_average,
    )
