"""`bert-dp eval glue`: finetune a pretrained run on GLUE's tasks with several seeds; score the dev sets."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_dp.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ExamplesManifest,
    Issue,
    batch_layout,
    peak_lr,
    read_examples,
)
from bert_dp.config.manifest import hash_json
from launcher import children, job, results
from launcher.evaluate import FILE, finetune, glue_scores
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue_scores import Glue, GlueOptions, GlueTask, GlueTrial, RateScore, glue_report
from launcher.job import Output, SearchState, write_result
from launcher.log import Log, logger
from launcher.machine import environment
from launcher.report.numbers import count_of, format_lr, format_points
from launcher.results import TimedPlanFile
from launcher.run import trials
from launcher.run.trials import (
    Progress,
    Runner,
    SearchOutcome,
    Trial,
    TrialsFailed,
    earlier_outcome,
    heldout_losses,
    run_to_end,
)

if TYPE_CHECKING:
    from rich.console import Console

STATE = "plan.json"
FIXED = ("kind", "config_hash", "settings", "start")
GROWS = ("settings.seeds",)
RATE_TASKS = ("CoLA", "MRPC", "STS-B", "RTE")  # small ones choose the rate, or all if none is there
RATE_SHARE = 0.1  # of train, held out to choose a rate: the dev sets must have no say in it
NO_EFFECT = ("checkpoint", "log.to", "log.tensorboard")  # trials keep no checkpoint and send no records


class GluePlanFile(TimedPlanFile):
    """plan.json: the options that an evaluation was begun with."""

    kind: Literal["glue"] = "glue"
    settings: dict[str, Any]
    start: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PreparedTask:
    """A task whose examples are prepared in `path`."""

    path: Path
    manifest: ExamplesManifest

    @property
    def name(self) -> str:
        return self.manifest.task

    @property
    def share(self) -> float:
        """Tokens of an epoch, to which the time of a trial is proportional."""
        return self.manifest.splits["train"].tokens


@dataclasses.dataclass(frozen=True)
class GlueGrid:
    """The tasks, options and start of an evaluation."""

    start: Pretrained
    overrides: tuple[str, ...]
    options: GlueOptions
    weights: Path | None  # the checkpoint that trials start from; None = random weights
    base: Config  # of every trial, without the data of its task
    precision: str
    on_gpu: bool
    tasks: Mapping[str, PreparedTask]
    rate_tasks: Mapping[str, PreparedTask]  # they choose the rate; RATE_SHARE of train replaces their dev
    left_out: Mapping[str, str]  # task without files -> reason

    @property
    def seeds(self) -> range:
        return range(self.base.run.seed, self.base.run.seed + self.options.seeds)

    @property
    def every_task(self) -> list[PreparedTask]:
        """All prepared directories; a task that also chooses the rate has two."""
        return [*self.tasks.values(), *self.rate_tasks.values()]


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
    """Return the exit code. Raises ConfigError with every problem of the input before any trial starts."""
    start = finetune.find_pretrained(run)
    weights = None if options.init == "random" else start.checkpoint
    base = finetune.configuration(start, overrides, weights)
    this_job = job.Job(start.run.name, base, environment.probe(Path()))
    folder = this_job.directory(out, "eval", "glue")
    issues: list[Issue] = [
        *finetune.setting_issues(overrides),
        *setting_issues(overrides, options.rates),
        *this_job.device_issues(options.ranks, "--ranks-per-job"),
        *job.exposure_issues(base, folder, "--out"),
    ]
    if issues:
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
    output = Output(folder, "evaluation", STATE, plan, FIXED, GROWS)
    if issues := [*output.issues()]:
        raise ConfigError(issues)
    on_gpu = this_job.gpus > 0

    def prepare(name: str, dev_share: float) -> PreparedTask:
        source = finetune.glue_source(name, data)
        path = finetune.prepare(start, source, base.data.sequence_length, dev_share)
        return PreparedTask(path, read_examples(path))

    grid = GlueGrid(
        start,
        tuple(overrides),
        options,
        weights,
        base,
        trials.trial_precision(base, this_job.machine, [base.parallel.engine], on_gpu=on_gpu),
        on_gpu,
        {name: prepare(name, 0.0) for name in options.tasks},
        {name: prepare(name, RATE_SHARE) for name in options.rate_tasks},
        left_out,
    )
    if issues := trial_issues(grid):
        raise ConfigError(issues)
    log = logger(console, as_json)
    for line in this_job.device_warnings():
        log(f"warning: {line}")
    describe(grid, folder, log)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.lock():
        file, exit_code = run_trials(grid, output, log)
        write_result(file, glue_report(file), folder, as_json=as_json, console=console)
    return exit_code


def choose_tasks(
    missing: Mapping[str, Sequence[str]], options: GlueOptions
) -> tuple[GlueOptions, dict[str, str]]:
    """Return the options with every task named, and the reason for each task that has no files. `missing`:
    each task of GLUE, in GLUE's order, with the train and dev files that are not there. Raises ConfigError.
    """
    found = [task for task, files in missing.items() if not files]
    tasks = options.tasks or found
    issues = []
    for task in tasks:
        if task not in missing:
            text, hint = f"{task} is not a task of GLUE", f"choose from {', '.join(missing)}"
            issues.append(Issue("--tasks", "unknown", text, task, hint=hint))
        elif missing[task]:
            text, hint = f"{task} needs {', '.join(missing[task])}", "add the place that holds it"
            issues.append(Issue("--tasks", "not_found", text, task, "--data", hint))
    if not tasks:
        hint = "name a folder or archive with CoLA/train.tsv and so on"
        issues.append(Issue("--data", "not_found", "no task of GLUE is there", hint=hint))
    if issues:
        raise ConfigError(issues)
    left_out = {task: f"no {', '.join(files)} in --data" for task, files in missing.items() if files}
    ordered = [task for task in missing if task in tasks]
    small = [task for task in RATE_TASKS if task in found]
    rate_tasks = (small or ordered) if options.rates else []
    return options.model_copy(update={"tasks": ordered, "rate_tasks": rate_tasks}), left_out


def setting_issues(overrides: Sequence[str], rates: Sequence[float]) -> list[Issue]:
    """Return the given settings that an evaluation ignores or sets itself."""
    issues = []
    for name in finetune.setting_names(overrides):
        if f"{name}.".startswith(tuple(f"{setting}." for setting in NO_EFFECT)):
            text = "an evaluation keeps no checkpoints and sends no records"
            issues.append(Issue(name, "no_effect", text, hint="leave it out"))
        if rates and name in ("optim.lr", "optim.lr_scaling", "optim.lr_batch"):
            text = "--rates chooses the rate"
            issues.append(Issue(name, "conflict", text, other="--rates", hint="leave out one of them"))
    return issues


def trial_issues(grid: GlueGrid) -> list[Issue]:
    """Return the reasons that the tasks, which share their settings, cannot be trained."""
    config = configure(grid, grid.every_task[0])
    issues: list[Issue] = [*job.input_issues(config)]
    try:
        batch_layout(config, grid.options.ranks)
    except ConfigError as error:
        issues += error.issues
    return issues


def configure(grid: GlueGrid, task: PreparedTask) -> Config:
    """Return the finetuning configuration of a task. Raises ConfigError."""
    config = finetune.configuration(grid.start, grid.overrides, grid.weights, task.path, task.manifest)
    return finetune.sized_micro_batches(config, grid.options.ranks, grid.overrides, on_gpu=grid.on_gpu)


def make_trial(grid: GlueGrid, out: Path, task: PreparedTask, lr: float | None, seed: int) -> Trial:
    """Return one finetuning run. `lr`: None = the configuration's."""
    config = configure(grid, task)
    optim = config.optim
    if lr is not None:
        optim = optim.model_copy(update={"lr": lr, "lr_scaling": "none", "lr_batch": None})
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": seed}),
            "optim": optim,
            "checkpoint": CheckpointConfig(keep=0),
            "log": config.log.model_copy(update={"to": (), "tensorboard": False}),
            "precision": grid.precision,
        }
    )
    name = f"{'rate-' if task.manifest.dev_share else ''}{task.name}-lr-{peak_lr(config).value}-s{seed}"
    return Trial(out / "trials" / name, config, grid.options.ranks)


def describe(grid: GlueGrid, folder: Path, log: Log) -> None:
    """Print the plan of the evaluation."""
    options, finetuning = grid.options, grid.base.finetune
    log(f"GLUE evaluation: {folder}")
    log(f"from {grid.weights or 'random weights'}; head {finetuning.head}, pooling {finetuning.pooling}")
    sizes = f"{count_of(options.seeds, 'seed')}, {count_of(options.ranks, 'rank')} each"
    log(f"{', '.join(options.tasks)} x {sizes}")
    for task, reason in grid.left_out.items():
        log(f"left out: {task}: {reason}")
    if subsets := [name for name, task in grid.tasks.items() if not task.manifest.official]:
        log(f"subsets of GLUE's rows, no GLUE score: {', '.join(subsets)}")
    if options.rates:
        log(f"choose the rate first, on {RATE_SHARE:g} of train of {', '.join(options.rate_tasks)}")


def run_trials(grid: GlueGrid, output: Output[GluePlanFile], log: Log) -> tuple[Glue, int]:
    """Run all trials and write glue.json, after a signal with the results so far. Return it and the exit
    code."""
    out = output.path
    data = {f"{task.name} {task.manifest.dev_share:g}": task.manifest.hash for task in grid.every_task}
    session = output.begin_with(hash_json(data))
    slots = trials.device_slots(
        grid.options.ranks,
        gpus=len(session.machine["gpus"]) if grid.on_gpu else 0,
        cores=int(session.machine["usable_cores"]),
        most=max(len(grid.tasks) * grid.options.seeds, len(grid.rate_tasks) * len(grid.options.rates)),
    )
    kept = SearchState(out / STATE, session.plan)
    with trials.runner(out, slots, launcher=grid.options.launcher, on_gpu=grid.on_gpu, log=log) as runner:
        glue_run = GlueRun(grid, runner, log)
        outcome = run_to_end(glue_run.run, out, log)
    kept.save()
    tasks = [
        glue_scores.score_task(task.manifest, glue_run.trials[name]) for name, task in grid.tasks.items()
    ]
    if outcome.status == "complete" and all(task.median_trial is None for task in tasks):
        outcome = SearchOutcome("failed", "every trial failed; see the logs below trials", 1)
    file = result_file(glue_run, tasks, outcome, {**session.facts(), "seconds": kept.plan.seconds})
    results.write(out / FILE, file)
    return file, outcome.exit_code


class GlueRun:
    """Runs the trials: those that choose the rate, then each task with each seed. `lr`, `rates` and `trials`
    hold the results so far, also after a stop."""

    def __init__(self, grid: GlueGrid, runner: Runner, log: Log):
        self.grid, self._runner, self._log = grid, runner, log
        self.lr: float | None = None if grid.options.rates else peak_lr(grid.base).value
        self.rates: list[RateScore] = []
        self.trials: dict[str, list[GlueTrial]] = {name: [] for name in grid.tasks}
        planned = [*grid.tasks.values()] * len(grid.seeds)
        planned += [*grid.rate_tasks.values()] * len(grid.options.rates)
        self._progress = Progress([task.share for task in planned], log, len(runner.slots))

    def run(self) -> None:
        """Run every trial. Raises Stopped after a signal, TrialsFailed if no rate can be chosen."""
        grid = self.grid
        rate = self._choose_rate() if grid.rate_tasks else None
        # the longest first, so that the devices finish together
        tasks = sorted(grid.tasks.values(), key=lambda task: -task.manifest.num_samples)
        planned = [
            (make_trial(grid, self._runner.out, task, rate, seed), task)
            for seed in grid.seeds
            for task in tasks
        ]
        for task, result in self._measure(planned):
            self.trials[task.name].append(result)

    def _choose_rate(self) -> float:
        """Run each task with each rate and the first seed."""
        grid, rates = self.grid, self.grid.options.rates
        planned = [
            (make_trial(grid, self._runner.out, task, lr, grid.seeds[0]), task)
            for task in grid.rate_tasks.values()
            for lr in rates
        ]
        found: dict[float, dict[str, float | None]] = {lr: {} for lr in rates}
        for task, result in self._measure(planned):
            first = f"{glue_scores.dev_splits(task.manifest)[0]}/{task.manifest.metrics[0]}"
            found[result.lr][task.name] = result.scores.get(first)
        self.rates = [RateScore(lr=lr, scores=scores, mean=mean_of(scores)) for lr, scores in found.items()]
        scored = [(-rate.mean, rate.lr) for rate in self.rates if rate.mean is not None]
        if not scored:
            raise TrialsFailed("a trial of every rate failed, so no rate can be chosen")
        self.lr = min(scored)[1]  # the lower one of two equals
        self._log(f"rate: {format_lr(self.lr)}, the highest mean score of {len(rates)}")
        return self.lr

    def _measure(
        self, planned: Sequence[tuple[Trial, PreparedTask]]
    ) -> Iterator[tuple[PreparedTask, GlueTrial]]:
        """Yield each result as its trial ends. Raises Stopped."""
        tasks = {trial.name: (trial, task) for trial, task in planned}
        done = {name for name, (trial, _) in tasks.items() if earlier_outcome(trial) is not None}
        if done:
            self._log(f"resuming: {len(done)} of {len(tasks)} trials already done")
        for trial, outcome in self._runner.run([trial for trial, _ in tasks.values()]):
            task = tasks[trial.name][1]
            result = glue_scores.read_trial(trial, outcome, task.manifest)
            if trial.name in done:
                self._progress.had(task.share)
            else:
                scores = ", ".join(f"{name} {format_points(score)}" for name, score in result.scores.items())
                line = f"{trial.name}: {scores or f'{result.status}: {result.cause}'}"
                self._progress.ended(task.share, outcome.seconds, line)
            yield task, result


def mean_of(scores: Mapping[str, float | None]) -> float | None:
    """Return the mean; None if one is missing."""
    known = [score for score in scores.values() if score is not None]
    return statistics.fmean(known) if len(known) == len(scores) else None


def result_file(
    glue_run: GlueRun, tasks: Sequence[GlueTask], outcome: SearchOutcome, facts: Mapping[str, Any]
) -> Glue:
    """Return glue.json. `facts`: the machine, the data and the time."""
    grid = glue_run.grid
    evaluations = heldout_losses(grid.start.checkpoint.parent.parent)
    mean, lacking = glue_scores.average(tasks)
    return Glue(
        status=outcome.status,
        reason=outcome.reason,
        date=time.strftime("%Y-%m-%d"),
        **facts,
        config=grid.base.model_dump(mode="json"),
        settings=grid.options,
        ranks=grid.options.ranks,
        start=glue_scores.describe_start(grid.start),
        lr=glue_run.lr,
        heldout_loss=evaluations.get(grid.start.step) if grid.weights else None,
        rates=glue_run.rates,
        tasks=list(tasks),
        left_out=dict(grid.left_out),
        average=mean if outcome.status == "complete" else None,
        not_averaged=lacking,
    )
