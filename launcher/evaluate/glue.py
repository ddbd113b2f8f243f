"""`bert-dp eval glue`: finetune a run on GLUE tasks with several seeds and compute dev scores."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_dp.config import CheckpointConfig, Config, ConfigError, Issue, batch_layout, peak_lr
from bert_dp.config.manifest import ExamplesManifest, hash_json, read_examples
from launcher import children, job, results
from launcher.evaluate import FILE, finetune, glue_scores
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue_scores import Glue, GlueOptions, GlueTask, GlueTrial, glue_report
from launcher.job import Output, VerbOptions
from launcher.log import Log
from launcher.machine import environment
from launcher.report.formats import count_of, format_points
from launcher.report.page import Report
from launcher.results import PlanFile
from launcher.run import trials
from launcher.run.trials import Runner, SearchOutcome, Trial

STATE = "plan.json"
RECIPE = "glue.yaml"
MUST_MATCH = ("kind", "config_hash", "settings", "start")
MAY_INCREASE = ("settings.seeds",)


class GluePlanFile(PlanFile):
    """Contents of plan.json: the options, configuration and pretrained run of an evaluation."""

    kind: Literal["glue"] = "glue"
    settings: dict[str, Any]
    start: dict[str, Any]


class PreparedTask(NamedTuple):
    """A task whose prepared examples are in `path`."""

    path: Path
    manifest: ExamplesManifest


class GlueGrid(NamedTuple):
    """Tasks, options and pretrained run of an evaluation."""

    start: Pretrained
    overrides: tuple[str, ...]
    options: GlueOptions
    weights: Path | None  # checkpoint from which trials start; None = random weights
    base: Config  # configuration common to all trials, without a task's data
    precision: str
    on_gpu: bool
    tasks: Mapping[str, PreparedTask]
    left_out: Mapping[str, str]  # task without files -> reason for its omission


def evaluate(
    run: Path, overrides: Sequence[str], options: GlueOptions, data: Sequence[Path], how: VerbOptions
) -> int:
    """Evaluate a run; return the exit code. Raise ConfigError before any trial if the input is unusable."""
    start = finetune.find_pretrained(run)
    weights = None if options.init == "random" else start.checkpoint
    base = finetune.configuration(start, overrides, weights, recipe=RECIPE)
    this_job = job.Job(start.run.name, base, environment.probe(Path()))
    folder = this_job.directory(how.out, "eval", "glue")
    issues = [*finetune.setting_issues(overrides), *setting_issues(overrides)]
    if issues := [*issues, *this_job.device_issues(options.ranks)]:
        raise ConfigError(issues)
    words = [word for place in data for word in ("--data", str(place))]
    missing = children.ask_module("bert_dp.examples.prepare", ["missing", *words], "looking for GLUE's files")
    options, left_out = choose_tasks(json.loads(missing), options)
    plan = GluePlanFile(
        config_hash=base.hash(),
        config=base.model_dump(mode="json"),
        settings=results.plain(options),
        start=results.plain(glue_scores.describe_start(start)),
    )
    output = Output(folder, "evaluation", STATE, plan, MUST_MATCH, MAY_INCREASE)
    if issues := output.issues():
        raise ConfigError(issues)
    on_gpu = this_job.gpus > 0
    length = base.data.sequence_length
    paths = {n: finetune.prepare(start, finetune.glue_source(n, data), length) for n in options.tasks}
    grid = GlueGrid(
        start,
        tuple(overrides),
        options,
        weights,
        base,
        trials.trial_precision(base, this_job.machine, [base.parallel.engine], on_gpu=on_gpu),
        on_gpu,
        {name: PreparedTask(path, read_examples(path)) for name, path in paths.items()},
        left_out,
    )
    if issues := trial_issues(grid):
        raise ConfigError(issues)
    log = how.log(this_job)
    describe(grid, folder, log)

    def measured() -> tuple[Glue, Report, int]:
        file, exit_code = run_trials(grid, output, log)
        return file, glue_report(file), exit_code

    return how.measure(output, measured)


def choose_tasks(
    missing: Mapping[str, Sequence[str]], options: GlueOptions
) -> tuple[GlueOptions, dict[str, str]]:
    """Return the options with their tasks filled in, and the reason why each task without files is omitted.
    `missing`: the train and dev files that each GLUE task lacks, in GLUE's order. Raise ConfigError if a
    requested task cannot run or no task is left."""
    tasks = options.tasks or [task for task, files in missing.items() if not files]
    issues = []
    for task in tasks:
        if task not in missing:
            text, hint = f"{task} is not a GLUE task", f"choose from {', '.join(missing)}"
            issues.append(Issue("--tasks", "unknown", text, task, hint=hint))
        elif missing[task]:
            text, hint = f"{task} needs {', '.join(missing[task])}", "add the task's folder or archive"
            issues.append(Issue("--tasks", "not_found", text, task, "--data", hint))
    if not tasks:
        hint = "pass a folder or archive with CoLA/train.tsv etc."
        issues.append(Issue("--data", "not_found", "no GLUE task was found", hint=hint))
    if issues:
        raise ConfigError(issues)
    left_out = {task: f"no {', '.join(files)} in --data" for task, files in missing.items() if files}
    ordered = [task for task in missing if task in tasks]
    return options.model_copy(update={"tasks": ordered}), left_out


def setting_issues(overrides: Sequence[str]) -> list[Issue]:
    """Return an issue for each override that has no effect in an evaluation."""
    text = "an evaluation saves no checkpoints and uses no external loggers"
    return [
        Issue(name, "no_effect", text, hint="omit this setting")
        for name in finetune.setting_names(overrides)
        if f"{name}.".startswith(("checkpoint.", "log.to."))
    ]


def trial_issues(grid: GlueGrid) -> list[Issue]:
    """Return the issues that prevent training. Check only one task, because all tasks share the settings."""
    config = configure(grid, next(iter(grid.tasks.values())))
    issues = job.input_issues(config)
    try:
        batch_layout(config, grid.options.ranks)
    except ConfigError as error:
        issues += error.issues
    return issues


def configure(grid: GlueGrid, task: PreparedTask) -> Config:
    """Return the finetuning configuration for a task. Raise ConfigError if it is invalid."""
    start = (grid.start, grid.overrides, grid.weights)
    config = finetune.configuration(*start, task.path, task.manifest, recipe=RECIPE)
    return finetune.sized_micro_batches(config, grid.options.ranks, grid.overrides, on_gpu=grid.on_gpu)


def make_trial(grid: GlueGrid, out: Path, task: PreparedTask, seed: int) -> Trial:
    """Return the trial for one task and seed."""
    config = configure(grid, task)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": seed}),
            "checkpoint": CheckpointConfig(keep=0),
            "log": config.log.model_copy(update={"to": ()}),
            "precision": grid.precision,
        }
    )
    name = f"{task.manifest.task}-lr-{peak_lr(config).value}-s{seed}"
    return Trial(out / "trials" / name, config, grid.options.ranks)


def describe(grid: GlueGrid, folder: Path, log: Log) -> None:
    """Log the plan of the evaluation."""
    options, finetuning = grid.options, grid.base.finetune
    log(f"GLUE evaluation: {folder}")
    log(f"weights {grid.weights or 'random'}; head {finetuning.head}; pooling {finetuning.pooling}")
    sizes = f"{count_of(options.seeds, 'seed')}, {count_of(options.ranks, 'rank')} per trial"
    log(f"{', '.join(options.tasks)} x {sizes}")
    for task, reason in grid.left_out.items():
        log(f"omitted: {task}: {reason}")
    if subsets := [name for name, task in grid.tasks.items() if not task.manifest.official]:
        log(f"scores of {', '.join(subsets)} are not GLUE scores: the files contain a subset of GLUE's rows")


def run_trials(grid: GlueGrid, output: Output[GluePlanFile], log: Log) -> tuple[Glue, int]:
    """Run all trials and write glue.json, which is partial after a stop signal. Return its contents and the
    exit code."""
    out = output.path
    data = {name: task.manifest.hash for name, task in grid.tasks.items()}
    facts = output.begin_with(hash_json(data))
    slots = trials.device_slots(
        grid.options.ranks,
        gpus=len(facts["environment"]["gpus"]) if grid.on_gpu else 0,
        cores=int(facts["environment"]["usable_cores"]),
        most=len(grid.tasks) * grid.options.seeds,
    )
    with trials.runner(out, slots, launcher=grid.options.launcher, on_gpu=grid.on_gpu, log=log) as runner:
        ended: dict[str, list[GlueTrial]] = {name: [] for name in grid.tasks}
        outcome = trials.run_to_end(lambda: finetune_all(grid, runner, log, ended), out, log)
    tasks = [glue_scores.score_task(task.manifest, ended[name]) for name, task in grid.tasks.items()]
    if outcome.status == "complete" and all(task.median_trial is None for task in tasks):
        outcome = SearchOutcome("failed", "every trial failed; see the logs in the folder `trials`", 1)
    file = result_file(grid, tasks, outcome, facts)
    results.write(out / FILE, file)
    return file, outcome.exit_code


def finetune_all(grid: GlueGrid, runner: Runner, log: Log, ended: Mapping[str, list[GlueTrial]]) -> None:
    """Finetune on each task with each seed; add the results to `ended`. Raise Stopped after a stop signal."""
    # for each seed, start tasks with more examples first, so that all devices finish at about the same time
    tasks = sorted(grid.tasks.values(), key=lambda task: -task.manifest.num_samples)
    seeds = range(grid.base.run.seed, grid.base.run.seed + grid.options.seeds)
    planned = [(make_trial(grid, runner.out, task, seed), task) for seed in seeds for task in tasks]
    manifests = {trial.name: task.manifest for trial, task in planned}
    # the duration of a trial is proportional to its tokens per epoch
    tokens = {name: manifest.splits["train"].tokens for name, manifest in manifests.items()}
    progress = trials.Progress([*tokens.values()], log, len(runner.slots))
    done = {trial.name for trial, _ in planned if trials.earlier_outcome(trial) is not None}
    if done:
        log(f"resuming: {len(done)} of {len(planned)} trials already done")
    for trial, outcome in runner.run([trial for trial, _ in planned]):
        manifest, share = manifests[trial.name], tokens[trial.name]
        result = glue_scores.read_trial(trial, outcome, manifest)
        ended[manifest.task].append(result)
        if trial.name in done:
            progress.skip(share)
        else:
            scores = ", ".join(f"{name} {format_points(score)}" for name, score in result.scores.items())
            line = f"{trial.name}: {scores or f'{result.status}: {result.cause}'}"
            progress.ended(share, outcome.seconds, line)


def result_file(
    grid: GlueGrid, tasks: Sequence[GlueTask], outcome: SearchOutcome, facts: Mapping[str, Any]
) -> Glue:
    """Return the contents of glue.json. `facts`: the machine, the data and the command."""
    evaluations = trials.heldout_losses(grid.start.checkpoint.parent.parent)
    mean, lacking = glue_scores.average(tasks)
    return Glue(
        status=outcome.status,
        reason=outcome.reason,
        date=time.strftime("%Y-%m-%d"),
        **facts,
        seconds=sum(trial.seconds for task in tasks for trial in task.trials),
        config=grid.base.model_dump(mode="json"),
        settings=grid.options,
        ranks=grid.options.ranks,
        start=glue_scores.describe_start(grid.start),
        lr=peak_lr(grid.base).value,
        heldout_loss=evaluations.get(grid.start.step) if grid.weights else None,
        tasks=list(tasks),
        left_out=dict(grid.left_out),
        average=mean if outcome.status == "complete" else None,
        not_averaged=lacking,
    )
