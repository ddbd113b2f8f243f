"""`bert-dp train`: check everything, write the run directory, start the ranks, show the run, close it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp import record
from bert_dp.config import (
    BatchLayout,
    Config,
    ConfigError,
    ExamplesManifest,
    Manifest,
    batch_at,
    batch_layout,
    changed_settings,
    dump_config,
    fit_warnings,
    no_effect,
    peak_lr,
    progress_at,
    read_data,
    with_budget,
)
from bert_dp.config.profile import ProfilePlan, profile_issues
from bert_dp.cost import flops_per_token, memory_estimate_gib, num_parameters
from bert_dp.record.models import Summary
from launcher import job, results
from launcher.log import PLAIN, show
from launcher.machine import environment
from launcher.machine.precision import emulated_warnings
from launcher.redact import WRITTEN, is_log, redact_argv
from launcher.report.console import show_end, show_report
from launcher.report.html import write_or_warn
from launcher.report.numbers import count_of, format_percent
from launcher.report.run_report import PAGE, of_directories
from launcher.run import processes, restarts
from launcher.run.loggers import Loggers
from launcher.run.memory_check import check_memory
from launcher.watch import failure, heartbeats
from launcher.watch.display import Display
from launcher.watch.failure import Failure, card

if TYPE_CHECKING:
    from rich.console import Console

LOCK = ".launcher.lock"
BESIDE_A_RUN = (".*", "slurm-*.out", "lost+found")  # what may stand where a run begins, and logs/
# beside its logs
FILES = ("config.yaml", "tokenizer.json", "metrics.jsonl", "evals.jsonl", ".lock", LOCK, *WRITTEN[""])


def run_dir_issues(run_dir: Path, config: Config, resume: str) -> list[str]:
    """Why this directory cannot take this run; one line each."""
    standing = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not standing.is_dir():
        return [f"--run-dir: {run_dir} cannot be made, {standing} is a file"]
    has_run = any((run_dir / "checkpoints").glob("step-*")) or (run_dir / "metrics.jsonl").exists()
    if not has_run and anyone_writes(run_dir):
        return [
            f"--run-dir: {run_dir} can be written by every user, who could exchange its checkpoints; "
            f"chmod o-w it, or choose another directory"
        ]
    if not os.access(standing, os.W_OK | os.X_OK):
        return [f"--run-dir: {standing} cannot be written; choose another directory"]
    if (strange := foreign_files(run_dir)) and not holds_run(run_dir):
        named = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        return [
            f"--run-dir: {run_dir} holds {named} but no run, and a run would write among what is yours; "
            f"choose a new directory, for example {run_dir / 'run'}"
        ]
    if odd := misplaced(run_dir):
        return [f"--run-dir: {path} is not {what}, as a run needs there; move it away" for path, what in odd]
    if resume not in ("auto", "never") and record.newest_checkpoint_facts(Path(resume)) is None:
        return [f"--resume: {resume} holds no checkpoint; use auto, never, or a checkpoint's directory"]
    if not has_run:
        return []
    if resume == "never":
        return [f"--resume never: {run_dir} already holds a run; choose another --run-dir"]
    found = record.newest_checkpoint_facts(run_dir)
    lines = changed_settings(found[1].config, config) if found else []
    return [f"{line}; undo it or choose another --run-dir" for line in lines]


def holds_run(run_dir: Path) -> bool:
    """Whether an earlier start has made this its run directory. A lock alone is none: a start that
    was refused late leaves one, and what came there since is the user's."""
    if (run_dir / "checkpoints").is_dir() and record.newest_checkpoint_facts(run_dir) is not None:
        return True
    facts = record.read_json(run_dir / "environment.json") or {}
    return "launcher" in facts and any((run_dir / name).exists() for name in (LOCK, "config.yaml"))


def foreign_files(run_dir: Path) -> list[str]:
    """Names in a directory that stand in the way of a new run: all but BESIDE_A_RUN and an empty place for
    checkpoints, such as a disk of their own. In logs/ only what bears the name of a log of ours does."""

    def is_known(path: Path) -> bool:
        if path.name == "checkpoints":
            return path.is_dir() and {p.name for p in path.iterdir()} <= {"lost+found"}
        if path.name == "logs":
            return path.is_dir() and not any(map(is_log, path.iterdir()))
        return any(fnmatch.fnmatchcase(path.name, known) for known in BESIDE_A_RUN)

    with contextlib.suppress(OSError):  # what may not be read is not written into either
        return sorted(path.name for path in run_dir.iterdir() if not is_known(path))
    return []


def misplaced(run_dir: Path) -> list[tuple[Path, str]]:
    """Paths a run writes to and what each should be but is not: a link would be followed out of the
    directory, a pipe would hang. `checkpoints` and `logs` may be links, to a disk of their own."""
    files = [run_dir / name for name in FILES]
    for folder, known in (("logs", is_log), ("heartbeats", lambda path: path.name.startswith("rank-"))):
        where = run_dir / folder
        files += sorted(filter(known, where.iterdir())) if where.is_dir() else ()
    folders = [run_dir / name for name in ("checkpoints", "logs", "heartbeats")]
    odd = [(path, "a regular file") for path in files if path.is_symlink() or not path.is_file()]
    odd += [(path, "a directory") for path in folders if not path.is_dir()]
    if (beats := run_dir / "heartbeats").is_symlink():
        odd.append((beats, "a directory"))
    return [(path, what) for path, what in odd if os.path.lexists(path)]


def anyone_writes(directory: Path) -> bool:
    return directory.is_dir() and bool(directory.stat().st_mode & stat.S_IWOTH)


def start_issues(asked: job.Job, where: Path, resume: str) -> list[str]:
    """Why a run cannot start there; one line each."""
    return [*asked.issues(where, "--run-dir"), *run_dir_issues(where, asked.config, resume)]


def expected_steps(config: Config) -> int | None:
    """Optimizer steps of the whole run with its batch ramp; None for a budget in hours, and in epochs of data
    that are not built."""
    schedule = config.schedule
    if schedule.steps is not None:
        return schedule.steps
    if schedule.tokens is None:
        return None
    steps = tokens = 0
    while tokens < schedule.tokens:
        batch = batch_at(config.batch, tokens / schedule.tokens)
        size = batch * config.data.sequence_length  # tokens of a step, until the ramp's next quantum
        if batch == config.batch.global_size:
            return steps - (tokens - schedule.tokens) // size  # rounded up
        end = int(batch / config.batch.global_size * config.batch.ramp_fraction * schedule.tokens)
        count = max(1, (end - tokens) // size - 1)  # short of the end by a step: progress is rounded
        steps, tokens = steps + count, tokens + count * size
    return steps


def describe_data(config: Config, manifest: Manifest | ExamplesManifest | None) -> str:
    """How much there is of it, and how often the run passes over it. `manifest`: None before it is built."""
    if manifest is None:
        return "not built yet; built when the run starts"
    if isinstance(manifest, ExamplesManifest):
        return describe_examples(config, manifest)
    train = manifest.train
    line = f"{train.sequences:,} sequences of {manifest.sequence_length} tokens"
    if config.schedule.hours is not None or (
        config.schedule.steps is not None and config.batch.ramp_fraction
    ):
        return line  # how much that is shows only as it runs
    tokens = config.schedule.tokens or (expected_steps(config) or 0) * config.batch.global_size * (
        manifest.sequence_length
    )
    passes = tokens / train.tokens
    how = f"reads {format_percent(passes)} of them" if passes < 1 else f"passes over them {passes:.3g} times"
    return f"{line}; the run {how}"


def describe_examples(config: Config, manifest: ExamplesManifest) -> str:
    """Task, rows and lengths; of GLUE whether the rows are all that there are."""
    train, steps = manifest.splits["train"], expected_steps(config)
    of_glue = {None: "", True: ", GLUE's own rows", False: ", a subset of GLUE's rows"}[manifest.official]
    cut = format_percent(train.truncated / train.examples)
    line = (
        f"{manifest.task}: {train.examples:,} examples of {train.tokens / train.examples:.1f} tokens on "
        f"average, {cut} of them truncated to {manifest.sequence_length}{of_glue}"
    )
    if steps is None:
        return line
    passes = steps * config.batch.global_size / train.examples
    return f"{line}; the run passes over them {passes:.3g} times"


def describe(
    config: Config, plan: BatchLayout, manifest: Manifest | ExamplesManifest | None, precision: str
) -> list[str]:
    """The dry run's report: batch equation, data, model, memory, length of the run."""
    sequence = config.data.sequence_length
    memory = memory_estimate_gib(config, precision, plan.world_size)
    parts = ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
    flops = flops_per_token(config.model, sequence, config.predicted_share)
    tokens = plan.global_size * sequence
    schedule = config.schedule
    packed = config.objective.name == "mlm"  # else examples differ in length
    steps = expected_steps(config)
    length = f"{schedule.hours} h on rank 0's clock" if steps is None else count_of(steps, "step")
    if schedule.epochs is not None:
        length = f"{schedule.epochs:g} epochs of the data, which are not built yet"
    if schedule.tokens is not None:
        length += f" = {schedule.tokens:,} tokens"
    elif steps is not None and config.batch.ramp_fraction == 0 and packed:
        length += f" = {steps * tokens:,} tokens"
    ramp = f", ramped in steps of {config.batch.ramp_quantum}" if config.batch.ramp_fraction else ""
    return [
        f"batch   {plan} = {f'{tokens:,} tokens' if packed else 'as many examples'} a step{ramp}",
        f"data    {describe_data(config, manifest)}",
        f"model   {num_parameters(config.model, sequence):,} parameters, {flops / 1e6:.1f} MFLOP a token",
        f"memory  about {sum(memory.values()):.2f} GiB a rank (estimate, {precision}, eager: {parts})",
        f"length  {length}; schedule {config.schedule.name}",
        f"rate    {peak_lr(config).equation}; {config.optim.name}",
    ]


def goes_on_from(run_dir: Path, resume: str) -> tuple[Path, record.CheckpointFacts] | None:
    """The checkpoint that this run would go on from; unverified."""
    if resume == "never":
        return None
    return record.newest_checkpoint_facts(run_dir if resume == "auto" else Path(resume))


def check_profile(
    plan: ProfilePlan | None, config: Config, ranks: int, resumed: tuple[Path, record.CheckpointFacts] | None
) -> None:
    """Raises ConfigError when the run has not the steps or ranks that are to be profiled."""
    done = resumed[1].step if resumed is not None else 0
    if plan is not None and (issues := profile_issues(plan, ranks, steps=expected_steps(config), done=done)):
        raise ConfigError(issues)


def resume_issues(run_dir: Path, config: Config, resume: str, data_hash: str) -> list[str]:
    """Why the checkpoint that this run would go on from does not fit; one line each."""
    found = goes_on_from(run_dir, resume)
    if found is None:
        return [] if resume in ("auto", "never") else [f"--resume: {resume} holds no checkpoint"]
    path, facts = found
    undo = "undo it or choose another --run-dir"
    issues = [f"{line}; {undo}" for line in changed_settings(facts.config, config)]
    if facts.data_hash != data_hash:
        hashes = f"({facts.data_hash[:16]}, these are {data_hash[:16]})"
        issues.append(f"data: {path.name} was trained on other shards {hashes}; {undo}")
    return issues


def is_complete(run_dir: Path, config: Config, resume: str) -> bool:
    """Whether the run has ended by itself and its newest checkpoint has spent the budget."""
    summary = results.find(run_dir / "summary.json", Summary)
    found = record.newest_checkpoint_facts(run_dir)
    if resume != "auto" or summary is None or found is None or summary.status != "done":
        return False
    facts = found[1]
    return progress_at(config, facts.step, facts.samples, facts.elapsed_s) >= 1.0


def train(
    asked: job.Job,
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
    config, gpus, machine = asked.config, asked.gpus, asked.machine
    where = asked.directory(run_dir, "runs")
    ranks = asked.choose_ranks(nproc)
    plan = batch_layout(config, ranks)
    if issues := start_issues(asked, where, resume):
        raise ConfigError(issues)
    manifest = None if config.data.path is None else read_data(config, Path(config.data.path))
    if manifest is not None:
        config = with_budget(config, manifest.num_samples)
    resumed = goes_on_from(where, resume)
    check_profile(profile, config, ranks, resumed)
    warnings = [*no_effect(config), *(fit_warnings(config, manifest) if manifest else [])]
    if ranks > (cores := len(os.sched_getaffinity(0))) and not gpus:
        warnings.append(f"{count_of(ranks, 'CPU rank')} share {count_of(cores, 'core')}")
    if policy.max_restarts and not (config.checkpoint.every_steps and config.checkpoint.keep):
        warnings.append(
            "--max-restarts: checkpoint.every_steps or checkpoint.keep is 0, so a restart begins at the start"
        )
    if not config.checkpoint.keep:
        warnings.append("checkpoint.keep is 0: nothing is saved, and a run that ends early starts over")
    if anyone_writes(where):  # a file system without modes must not lock a run out that stands there
        warnings.append(f"{where} can be written by every user; chmod o-w it")
    warnings += emulated_warnings(config, machine, on_gpu=gpus > 0)
    kept = resumed[1].precision if resumed else None
    memory = check_memory(config, ranks, machine, on_gpu=gpus > 0, kept=kept)
    has_checkpoint = record.newest_checkpoint_facts(where) is not None
    too_much = memory.issues(has_checkpoint)
    warnings += [*memory.warnings(has_checkpoint), *(too_much if force else [])]
    for line in warnings:
        show(console, f"warning: {line}", style="yellow", **PLAIN)
    if dry_run:
        for line in describe(config, plan, manifest, memory.precision):
            show(console, line, **PLAIN)
    if too_much and not force:
        raise ConfigError([f"{line}; or --force starts anyway" for line in too_much])
    if dry_run:
        return 0
    with job.claim(where, LOCK, "--run-dir", "run"), record.HeldDirectory(where) as held:
        return run_locked(
            config, ranks, held, resume, launcher, console, policy, machine, profile, on_gpu=gpus > 0
        )


def run_locked(
    config: Config,
    ranks: int,
    held: record.HeldDirectory,
    resume: str,
    launcher: str,
    console: Console,
    policy: restarts.Policy,
    machine: environment.Environment,
    profile: ProfilePlan | None,
    *,
    on_gpu: bool,
) -> int:
    """The run itself, once the directory is ours. Nothing in it changes before the last check has passed."""
    where = held.path
    show(console, f"run directory: {where}", **PLAIN)
    manifest = read_data(config, job.prepare_data(config))
    built, config = config.data.path is None, with_budget(config, manifest.num_samples)
    if built:  # else these were said before
        show(console, f"data: {describe_data(config, manifest)}", **PLAIN)
        for line in fit_warnings(config, manifest):
            show(console, f"warning: {line}", style="yellow", **PLAIN)
    if issues := resume_issues(where, config, resume, manifest.hash):
        raise ConfigError(issues)
    check_profile(profile, config, ranks, goes_on_from(where, resume))
    if is_complete(where, config, resume):
        show(console, "this run is complete: its budget is spent; raise schedule.* to go on", **PLAIN)
        show_report(console, of_directories([where]))
        return 0
    if (lost := failure.lost_directory(held)) is not None:  # a corpus may have taken long
        print_failure(lost, held.now() or where, console)
        return 1
    command = {"command": redact_argv(sys.argv), "launcher": launcher}
    record.write_json(where / "environment.json", {**machine.to_json(), **command})  # first: see holds_run
    record.write_text(where / "config.yaml", dump_config(config))
    show(console, f"launcher: {launcher}", **PLAIN)

    def log(line: str) -> None:
        show(console, line, **PLAIN)

    loggers = Loggers(where, config.log.loggers, log)

    def attempt(ranks: int, resume: str) -> processes.RunResult:
        watched = heartbeats.Watch(
            where, log, hang_after_s=config.run.hang_after_s, end_hung_after_s=config.run.end_hung_after_s
        )
        with Display(where, console, config, ranks) as display:

            def poll() -> None:
                display.poll()
                loggers.poll()

            return processes.run(
                held,
                ranks,
                resume,
                poll,
                log=log,
                launcher=launcher,
                on_gpu=on_gpu,
                watch=watched,
                options=profile.options() if profile is not None else (),
            )

    with loggers:
        result = restarts.supervise(attempt, config, where, ranks, resume, policy, log)
    home = held.now()
    if result.failure is not None:
        print_failure(result.failure, home or where, console)
    if home is None:
        return result.exit_code or 1
    report = of_directories([home])
    has_page = write_or_warn(report, home / PAGE)
    page = home / PAGE if has_page else None
    if result.failure is None:
        show_report(console, report, page)
    elif not result.failure.bad_input:
        show_end(console, report, page)
    return result.exit_code


def print_failure(cause: Failure, run_dir: Path, console: Console) -> None:
    """The failure card; of bad input only what is wrong."""
    if cause.bad_input:
        for issue in cause.bad_input:
            show(console, f"error: {issue}", style="red", **PLAIN)
        return
    for number, line in enumerate(card(cause, run_dir)):
        show(console, line, style="bold red" if number == 0 else None, **PLAIN)
