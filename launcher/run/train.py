"""`bert-dp train`: check everything, write the run directory, start the ranks, show the run, close it."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bert_dp import record
from bert_dp.config import (
    Config,
    ConfigError,
    ExamplesManifest,
    Issue,
    Manifest,
    batch_layout,
    dump_config,
    no_effect,
    read_data,
    residual_issues,
    with_budget,
)
from bert_dp.config.checks import ProfilePlan, profile_issues
from bert_dp.record.models import Failure
from launcher.job import Job, built_data, prepare_data
from launcher.log import PLAIN, logger, masked_command, show
from launcher.machine.environment import emulated_warnings
from launcher.output import claim
from launcher.report.console import show_end, show_report
from launcher.report.html import write_or_warn
from launcher.report.numbers import count_of
from launcher.report.run_report import PAGE, of_directories
from launcher.run import processes, restarts
from launcher.run.describe import COMPLETE, describe, describe_data, describe_start, expected_steps
from launcher.run.loggers import Loggers
from launcher.run.memory_check import check_memory
from launcher.run.run_directory import (
    LOCK,
    anyone_writes,
    checkpoint_to_resume,
    is_complete,
    resume_issues,
    start_issues,
)
from launcher.watch import heartbeats
from launcher.watch.card import card
from launcher.watch.display import Display

if TYPE_CHECKING:
    from rich.console import Console


def train(
    job: Job,
    *,
    nproc: str,
    run_dir: Path | None,
    resume: str,
    dry_run: bool,
    console: Console,
    launcher: str = "torchrun",
    policy: restarts.Policy = restarts.ONCE,
    force: bool = False,
    profile: ProfilePlan | None = None,
) -> int:
    """Returns the exit code. Raises ConfigError, before any rank starts, with everything that is wrong.

    `force`: also where the memory must be expected not to suffice. `profile`: steps to profile.
    """
    run_dir = job.directory(run_dir, "runs")
    ranks = job.choose_ranks(nproc)
    layout = batch_layout(job.config, ranks)
    if issues := start_issues(job, run_dir, resume):
        raise ConfigError(issues)
    data = built_data(job.config) if dry_run or job.config.data.path else None
    manifest = None if data is None else read_data(job.config, data)
    if manifest is not None:
        job = dataclasses.replace(job, config=with_budget(job.config, manifest.num_samples))
    check_profile(profile, job.config, ranks, run_dir, resume)
    checkpoint = checkpoint_to_resume(run_dir, resume)
    on_gpu, precision = job.gpus > 0, checkpoint[1].precision if checkpoint else None
    memory = check_memory(job.config, ranks, job.machine, on_gpu=on_gpu, kept=precision)
    if narrow := residual_issues(job.config, memory.precision):
        raise ConfigError(narrow)
    too_much = memory.issues()
    warnings = start_warnings(job, ranks, run_dir, policy, manifest)
    warn(console, [*warnings, *memory.warnings(), *(too_much if force else [])])
    if dry_run:
        goes_on = describe_start(checkpoint, is_done=is_complete(run_dir, job.config, resume))
        for line in [*describe(job.config, layout, manifest, memory), *goes_on]:
            show(console, line, **PLAIN)
    if too_much and not force:
        raise ConfigError([f"{line}; or --force starts anyway" for line in too_much])
    if dry_run:
        return 0
    with claim(run_dir, LOCK, "--run-dir", "run"):
        return run_locked(
            job, ranks, run_dir, resume, launcher=launcher, console=console, policy=policy, profile=profile
        )


def check_profile(plan: ProfilePlan | None, config: Config, ranks: int, run_dir: Path, resume: str) -> None:
    """Raises ConfigError when the run has not the steps or ranks that are to be profiled."""
    if plan is None:
        return
    checkpoint = checkpoint_to_resume(run_dir, resume)
    done = checkpoint[1].step if checkpoint else 0
    if issues := profile_issues(plan, ranks, steps=expected_steps(config), done=done):
        raise ConfigError(issues)


def start_warnings(
    job: Job, ranks: int, run_dir: Path, policy: restarts.Policy, manifest: Manifest | ExamplesManifest | None
) -> list[str]:
    """What is allowed but hardly meant; one line each."""
    config, cores = job.config, len(os.sched_getaffinity(0))
    warnings = [
        *job.device_warnings(),
        *map(str, no_effect(config, ranks)),
        *(manifest.warnings(config) if manifest else []),
    ]
    if ranks > cores and not job.gpus:
        warnings.append(f"{count_of(ranks, 'CPU rank')} share {count_of(cores, 'core')}")
    if policy.max_restarts and not (config.checkpoint.every_steps and config.checkpoint.keep):
        warnings.append(
            "--max-restarts: checkpoint.every_steps or checkpoint.keep is 0, so a restart begins at the start"
        )
    if not config.checkpoint.keep:
        warnings.append("checkpoint.keep is 0: nothing is saved, and a run that ends early starts over")
    if anyone_writes(run_dir):  # a file system without modes must not lock out the run that is there
        warnings.append(f"{run_dir} can be written by every user; chmod o-w it")
    return [*warnings, *emulated_warnings(config, job.machine, on_gpu=job.gpus > 0)]


def run_locked(
    job: Job,
    ranks: int,
    run_dir: Path,
    resume: str,
    *,
    launcher: str,
    console: Console,
    policy: restarts.Policy,
    profile: ProfilePlan | None,
) -> int:
    """The run itself, once the directory is ours. Nothing in it changes before the last check has passed."""
    log = logger(console, as_json=False)
    log(f"run directory: {run_dir}")
    manifest = read_data(job.config, prepare_data(job.config))
    config = with_budget(job.config, manifest.num_samples)
    if job.config.data.path is None:  # else these were said before
        log(f"data: {describe_data(config, manifest)}")
        warn(console, manifest.warnings(config))
    if issues := resume_issues(run_dir, config, resume, manifest.hash):
        raise ConfigError(issues)
    check_profile(profile, config, ranks, run_dir, resume)
    if is_complete(run_dir, config, resume):
        log(COMPLETE)
        show_report(console, of_directories([run_dir]))
        return 0
    command = {"command": masked_command(sys.argv), "launcher": launcher}
    record.write_json(run_dir / "environment.json", {**job.machine.to_json(), **command})  # see holds_run
    record.write_text(run_dir / "config.yaml", dump_config(config))
    log(f"launcher: {launcher}")
    loggers = Loggers(run_dir, config.log.loggers, log)

    def attempt(ranks: int, resume: str) -> processes.RunResult:
        watch = heartbeats.Watch(
            run_dir, log, hang_after_s=config.run.hang_after_s, end_hung_after_s=config.run.end_hung_after_s
        )
        with Display(run_dir, console, config) as display:
            return processes.run(
                run_dir,
                ranks,
                resume,
                display.poll,
                log=log,
                launcher=launcher,
                on_gpu=job.gpus > 0,
                watch=watch,
                options=profile.options(ranks) if profile is not None else (),
            )

    with loggers:
        result = restarts.supervise(attempt, config, run_dir, ranks, resume, policy, log)
    if result.failure is not None:
        print_failure(result.failure, run_dir, console)
    restarts.note(run_dir, {"command_s": time.time() - psutil.Process().create_time()})
    report = of_directories([run_dir])
    page = run_dir / PAGE if write_or_warn(report, run_dir / PAGE) else None
    if result.failure is None:
        show_report(console, report, page)
    elif not result.failure.issues:
        show_end(console, report, page)
    return result.exit_code


def warn(console: Console, warnings: list[str]) -> None:
    for line in warnings:
        show(console, f"warning: {line}", style="yellow", **PLAIN)


def print_failure(cause: Failure, run_dir: Path, console: Console) -> None:
    """Print the failure card, or the issues of bad input."""
    if cause.issues:
        for fields in cause.issues:
            show(console, f"error: {Issue(**fields)}", style="red", **PLAIN)
        return
    for number, line in enumerate(card(cause, run_dir)):
        show(console, line, style="bold red" if number == 0 else None, **PLAIN)
