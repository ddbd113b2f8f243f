"""`bert-dp eval glue`: finetune a pretrained run on GLUE's tasks with several seeds; score the dev sets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_dp.config import ConfigError, Issue, batch_layout, peak_lr
from bert_dp.config.manifest import hash_json
from launcher import job, results
from launcher.evaluate import FILE, finetune, glue_grid, glue_scores
from launcher.evaluate.glue_grid import RATE_SHARE, GlueGrid, PreparedTask
from launcher.evaluate.glue_page import glue_report
from launcher.evaluate.glue_scores import Glue, GlueOptions, GlueTask, GlueTrial, RateScore
from launcher.log import Log, logger
from launcher.machine import environment
from launcher.output import KeptPlan, Output, publish
from launcher.report.numbers import count_of, format_lr, format_points
from launcher.results import TimedPlanFile
from launcher.run import trials
from launcher.run.trials import Ending, Progress, Runner, Trial, TrialsFailed, earlier_outcome, run_to_end

if TYPE_CHECKING:
    from rich.console import Console

STATE = "plan.json"
FIXED = ("kind", "config_hash", "settings", "start")
GROWS = ("settings.seeds",)
Planned = tuple[Trial, PreparedTask]


class GluePlanFile(TimedPlanFile):
    """plan.json: the options that an evaluation was begun with."""

    kind: Literal["glue"] = "glue"
    settings: dict[str, Any]
    start: dict[str, Any]


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
    base = finetune.configuration(start, overrides, None if options.init == "random" else start.checkpoint)
    this_job = job.Job(start.run.name, base, environment.probe(Path()))
    folder = this_job.directory(out, "eval", "glue")
    issues: list[Issue | str] = [
        *finetune.setting_issues(overrides),
        *glue_grid.setting_issues(overrides, options.rates),
        *this_job.device_issues(options.ranks, "--ranks-per-job"),
        *job.exposure_issues(base, folder, "--out"),
    ]
    if issues:
        raise ConfigError(issues)
    options, left_out = glue_grid.choose_tasks(glue_grid.missing_files(data), options)
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
    length = base.data.sequence_length
    grid = GlueGrid(
        start,
        tuple(overrides),
        options,
        base,
        trials.trial_precision(base, this_job.machine, [base.parallel.engine], on_gpu=on_gpu),
        on_gpu,
        {name: glue_grid.prepare(start, name, data, length) for name in options.tasks},
        {name: glue_grid.prepare(start, name, data, length, RATE_SHARE) for name in options.rate_tasks},
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
    with output.claim():
        file, exit_code = run_trials(grid, output, log)
        publish(file, glue_report(file), folder, as_json=as_json, console=console)
    return exit_code


def trial_issues(grid: GlueGrid) -> list[Issue | str]:
    """Return the reasons that the tasks cannot be trained with these settings."""
    issues: list[Issue | str] = []
    for task in grid.every_task:
        config = glue_grid.configure(grid, task, grid.weights)
        issues += job.input_issues(config)
        try:
            batch_layout(config, grid.options.ranks)
        except ConfigError as error:
            issues += error.issues
    return list({str(issue): issue for issue in issues}.values())  # tasks share most of their settings


def describe(grid: GlueGrid, folder: Path, log: Log) -> None:
    """Print what is about to run."""
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
        rates = ", ".join(map(format_lr, options.rates))
        log(f"choose the rate first: {rates} on {RATE_SHARE:g} of train of {', '.join(options.rate_tasks)}")
    for task, source in options.init_task.items():
        log(f"{task} starts from the finetuned run of {source} of the same seed")


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
    kept = KeptPlan(out / STATE, session.plan)
    with trials.runner(out, slots, launcher=grid.options.launcher, on_gpu=grid.on_gpu, log=log) as runner:
        glue_run = GlueRun(grid, runner, log)
        ending = run_to_end(glue_run.run, out, log)
    kept.save()
    tasks = []
    for name, task in grid.tasks.items():
        start = grid.options.init_task.get(name)
        result = glue_scores.score_task(task.manifest, glue_run.trials[name], start)
        if result.median_trial is not None and ending.status == "complete":
            files = glue_scores.write_submissions(out, result.median_trial, task.manifest)
            result = result.model_copy(update={"submissions": files})
        tasks.append(result)
    if ending.status == "complete" and all(task.median_trial is None for task in tasks):
        ending = Ending("failed", "every trial failed; see the logs below trials", 1)
    facts = {**session.facts(), "seconds": kept.plan.seconds}
    file = result_file(glue_run, tasks, ending, facts)
    results.write(out / FILE, file)
    return file, ending.exit_code


def result_file(
    glue_run: GlueRun, tasks: Sequence[GlueTask], ending: Ending, facts: Mapping[str, Any]
) -> Glue:
    """Return glue.json. `facts`: the machine, the data and the time."""
    grid = glue_run.grid
    mean, lacking = glue_scores.average(tasks)
    return Glue(
        status=ending.status,
        why=ending.why,
        date=time.strftime("%Y-%m-%d"),
        **facts,
        config=grid.base.model_dump(mode="json"),
        settings=grid.options,
        ranks=grid.options.ranks,
        start=glue_scores.describe_start(grid.start),
        head=grid.base.finetune.head,
        pooling=grid.base.finetune.pooling,
        lr=glue_run.lr,
        heldout_loss=grid.heldout_loss,
        rates=glue_run.rates,
        tasks=list(tasks),
        left_out=dict(grid.left_out),
        average=mean if ending.status == "complete" else None,
        not_averaged=lacking,
    )


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
        self._progress = Progress([task.train_tokens for task in planned], log, len(runner.slots))

    def run(self) -> None:
        """Run every trial. Raises Stopped after a signal, TrialsFailed if no rate can be chosen."""
        rate = self._choose_rate() if self.grid.rate_tasks else None
        for tasks in glue_grid.rounds(self.grid):
            planned = [self._plan(task, rate, seed) for seed in self.grid.seeds for task in tasks]
            for task, result in self._measure([each for each in planned if each is not None]):
                self.trials[task.name].append(result)

    def _choose_rate(self) -> float:
        """Run each task with each rate and the first seed."""
        grid, rates = self.grid, self.grid.options.rates
        seed, out = grid.seeds[0], self._runner.out
        planned = [
            (glue_grid.make_trial(grid, out, task, lr, seed, grid.weights), task)
            for task in grid.rate_tasks.values()
            for lr in rates
        ]
        by_rate: dict[float, dict[str, GlueTrial]] = {lr: {} for lr in rates}
        for task, result in self._measure(planned):
            by_rate[result.lr][task.name] = result
        metrics = {
            name: f"{glue_scores.dev_splits(task.manifest)[0]}/{task.manifest.metrics[0]}"
            for name, task in grid.rate_tasks.items()
        }
        self.rates = [glue_scores.score_rate(lr, by_rate[lr], metrics) for lr in rates]
        self.lr = glue_scores.choose_rate(self.rates)
        if self.lr is None:
            raise TrialsFailed("a trial of every rate failed, so no rate can be chosen")
        self._log(f"rate: {format_lr(self.lr)}, the highest mean score of {len(rates)}")
        return self.lr

    def _plan(self, task: PreparedTask, rate: float | None, seed: int) -> Planned | None:
        """Return the trial of a task and seed. If the trial that it would start from has failed, record it as
        failed too and return None."""
        grid, out = self.grid, self._runner.out
        source = grid.options.init_task.get(task.name)
        if source is None:
            return glue_grid.make_trial(grid, out, task, rate, seed, grid.weights), task
        before = next(result for result in self.trials[source] if result.seed == seed)
        trial = glue_grid.make_trial(grid, out, task, rate, seed, out / "trials" / before.trial)
        if before.status == "ok":
            return trial, task
        lr, reason = peak_lr(trial.config).value, f"{before.trial}, from which it would start, has failed"
        failed = GlueTrial(trial=trial.name, lr=lr, seed=seed, status="failed", cause=reason)
        self.trials[task.name].append(failed)
        self._progress.had(task.train_tokens)
        return None

    def _measure(self, planned: Sequence[Planned]) -> Iterator[tuple[PreparedTask, GlueTrial]]:
        """Yield each result as its trial ends. Raises Stopped."""
        tasks = {trial.name: task for trial, task in planned}
        done = {trial.name for trial, _ in planned if earlier_outcome(trial) is not None}
        if done:
            self._log(f"resuming: {len(done)} of {len(planned)} trials already done")
        for trial, outcome in self._runner.run([trial for trial, _ in planned]):
            task = tasks[trial.name]
            result = glue_scores.read_trial(trial, outcome, task.manifest)
            if trial.name in done:
                self._progress.had(task.train_tokens)
            else:
                self._progress.ended(task.train_tokens, outcome.seconds, describe_result(result))
            yield task, result


def describe_result(trial: GlueTrial) -> str:
    """Return the line that is printed when a trial ends."""
    scores = ", ".join(f"{name} {format_points(score)}" for name, score in trial.scores.items())
    return f"{trial.trial}: {scores or f'{trial.status}: {trial.cause}'}"
