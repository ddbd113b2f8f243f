"""Implement `bert-dp train`: check all inputs, write the run directory, start the ranks and show progress."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bert_dp import files as record
from bert_dp.config import ConfigError, Issue, checks, dump_config, flat, hf_directory
from bert_dp.config.batch import BatchLayout, batch_at, batch_layout, peak_lr, progress_at, with_budget
from bert_dp.config.checks import ProfilePlan
from bert_dp.config.manifest import ExamplesManifest, Manifest, read_data
from bert_dp.config.own_code import changed_code
from bert_dp.config.schema import CLOCKED, METERED, Config
from bert_dp.cost import flops_per_token, num_parameters, rank_memory_gib
from bert_dp.files import PAGE
from bert_dp.files.ledger import EnergyCounter, Ledger, budget_issues, energy_counters
from bert_dp.files.models import Failure, Summary
from launcher import results
from launcher.job import Job, built_data, input_issues, lock_output_dir, place_issues, prepare_data
from launcher.log import PLAIN, Log, logger, show
from launcher.machine.environment import Environment, precision_of
from launcher.report.formats import count_of, format_duration, format_gib, format_percent, format_ratio
from launcher.report.html import write_or_warn
from launcher.report.page import show_end, show_report
from launcher.report.run_page import MAX_PASSES, of_directories
from launcher.run import peers, processes
from launcher.run.after_save import AfterSave
from launcher.run.loggers import Loggers
from launcher.run.nodes import Place
from launcher.run.restarts import Restarts, RunOptions
from launcher.run.starters import NodeStart, RankStart
from launcher.watch import failure, hangs
from launcher.watch.display import Display
from launcher.watch.failure import card, suggest_micro_batch

if TYPE_CHECKING:
    from rich.console import Console

COMPLETE = "this run is complete: its budget is spent; raise schedule.* to continue"
ALLOWED_FILES = (".*", "slurm-*.out", "lost+found")  # files that the directory of a new run may contain
MEMORY_STATE = ("weights", "gradients", "optimizer")  # parts of the memory estimate that are exact
MAX_ESTIMATE_RATIO = 1.25  # maximum ratio of estimated to available memory; it allows for an inexact estimate


def train(job: Job, options: RunOptions, console: Console) -> int:
    """Train and return the exit code. Raise ConfigError before any rank starts if an input is unusable."""
    place, resume, profile = options.place, options.resume, options.profile
    if place is not None and (refused := over_nodes_issues(job, options)):
        raise ConfigError(refused)
    run_dir, log = job.directory(options.run_dir, "runs"), logger(console, as_json=False)
    if place is not None and place.rank and not options.dry_run:
        return follow_node_0(job, place, options.nproc, run_dir, log)
    with contextlib.ExitStack() as stack:
        nodes = None
        if place is not None and not options.dry_run:
            nodes = stack.enter_context(peers.coordinating(place, run_dir, log, job.config.run.hang_after_s))
        here = job.choose_ranks(options.nproc)
        of_ranks = [f"node {k}" for k in range(place.nodes if place else 1) for _ in range(here)]
        if place is not None and nodes is not None:
            nodes.gather(peers.hello_of(job, place, here))
            of_ranks = [nodes.name(node) for node in nodes.nodes]
        ranks = len(of_ranks)
        layout = batch_layout(job.config, ranks)
        if spread := checks.spread_issues(of_ranks, checks.rank_sets(job.config, ranks)):
            raise ConfigError(spread)
        # energy counters measure only this node, so a run over several nodes uses none
        gpus = job.machine.gpus[:ranks] if job.gpus and place is None else ()
        counters = energy_counters([gpu.index for gpu in gpus])
        if issues := [*start_issues(job, run_dir, resume), *budget_issues(job.config, run_dir, counters)]:
            raise ConfigError(issues)
        is_own, path = job.config.task is not None, job.config.data.path
        data = built_data(job.config) if not is_own and (options.dry_run or path) else None
        manifest = None if data is None else read_data(job.config, data)
        if manifest is not None:
            job = dataclasses.replace(job, config=with_budget(job.config, manifest.num_samples))
        check_profile(profile, job.config, ranks, run_dir, resume)
        checkpoint = checkpoint_to_resume(run_dir, resume)
        kept = checkpoint[1].precision if checkpoint else None
        memory = check_memory(job.config, ranks, job.machine, on_gpu=job.gpus > 0, kept=kept, here=here)
        if narrow := checks.residual_issues(job.config, memory.precision):
            raise ConfigError(narrow)
        too_much = [] if options.force else memory.issues()
        tight = [] if too_much else memory.issues(above=1.0)
        warn(console, [*start_warnings(job, options, ranks, here, run_dir, manifest), *map(str, tight)])
        if options.dry_run:
            lines = describe(job.config, layout, manifest, memory)
            if checkpoint:
                is_done = is_complete(run_dir, job.config, resume)
                begins = f"from step {checkpoint[1].step:,} ({checkpoint[0].name})"
                lines.append(f"resume  {COMPLETE if is_done else begins}")
            for line in lines:
                show(console, line, **PLAIN)
        if too_much:
            forced = "or use --force to start anyway"
            raise ConfigError([dataclasses.replace(i, hint=f"{i.hint}; {forced}") for i in too_much])
        if options.dry_run:
            return 0
        with lock_output_dir(run_dir, record.RUN_LOCK, "--run-dir", "run"):
            code = run_locked(job, options, ranks, run_dir, counters, nodes, console)
        if nodes is not None:
            nodes.end(code)
        return code


def over_nodes_issues(job: Job, options: RunOptions) -> list[Issue]:
    """Return an issue for each option that is missing or unsupported in a run over several nodes."""
    issues, launcher = [], options.launcher
    if options.run_dir is None:
        message, hint = "is needed for several nodes", "choose a directory that all nodes share"
        issues.append(Issue("--run-dir", "missing", message, None, "--nnodes", hint))
    one_host = f"{launcher} is supported on one node only"
    together = "a run over several nodes always restarts with all ranks"
    unsupported = (
        ("--launcher", launcher if launcher != "torchrun" else "", one_host, "use torchrun"),
        ("--elastic", options.elastic, together, "omit --elastic"),
        ("--allow-code", job.allow_code, "your own code is supported on one node only", "omit --nnodes"),
    )
    for option, given, message, hint in unsupported:
        if given:
            issues.append(Issue(option, "unsupported", message, given, "--nnodes", hint))
    return issues


def follow_node_0(job: Job, place: Place, nproc: str, run_dir: Path, log: Log) -> int:
    """Start this node's ranks whenever node 0 requests it, and return the run's exit code. Raise ConfigError
    if the run cannot start."""
    count, issues = 0, tuple[Issue, ...]()
    try:
        count = job.choose_ranks(nproc)
    except ConfigError as error:
        issues = error.issues
    log(f"node {place.rank} of {place.nodes} joins {place.address}:{place.port} over {place.interface}")
    hello = peers.hello_of(job, place, count, issues)
    member = peers.join(place, run_dir, hello, job.config.run.hang_after_s)
    try:
        data_hash = read_data(job.config, prepare_data(job.config)).hash
        member.link.send("data", hash=data_hash, issues=[])
    except ConfigError as error:
        member.link.send("data", hash="", issues=[issue.to_json() for issue in error.issues])
    with processes.stop_signals() as pending:
        while (order := member.next(pending)) is not None and order["kind"] == "start":
            node = NodeStart(place, **order["node"])
            start = RankStart(count, order["worker"], on_gpu=job.gpus > 0, node=node)
            (run_dir / "logs").mkdir(exist_ok=True)
            for stale in failure.error_files(run_dir / "logs", start.ranks):
                stale.unlink(missing_ok=True)
            ended = processes.run_ranks(run_dir, start, pending, log, watch=member, peers=member)
            member.link.send(
                "ended", attempt=node.attempt, ended=results.plain(ended), now_ns=time.monotonic_ns()
            )
        if order is None:
            log(f"error: {member.lost() or 'stopped before the run started'}")
            return 128 + pending[0] if pending else 1
    member.link.close()
    if order["issues"]:
        raise ConfigError([Issue(**issue) for issue in order["issues"]])
    if order["line"]:
        log(f"node 0: {order['line']}")
    return int(order["code"])


def check_profile(plan: ProfilePlan | None, config: Config, ranks: int, run_dir: Path, resume: str) -> None:
    """Raise ConfigError if the run does not include every step and rank to be profiled."""
    checkpoint = checkpoint_to_resume(run_dir, resume)
    done = checkpoint[1].step if checkpoint else 0
    if plan and (issues := checks.profile_issues(plan, ranks, steps=expected_steps(config), done=done)):
        raise ConfigError(issues)


def start_warnings(
    job: Job,
    options: RunOptions,
    ranks: int,
    here: int,
    run_dir: Path,
    manifest: Manifest | ExamplesManifest | None,
) -> list[str]:
    """Return a warning for each problem that does not prevent the run. `here`: number of local ranks."""
    config, cores = job.config, len(os.sched_getaffinity(0))
    warnings = [
        *job.device_warnings(),
        *map(str, checks.no_effect(config, ranks)),
        *(data_warnings(config, manifest) if manifest else []),
    ]
    if here > cores and not job.gpus:
        warnings.append(f"{count_of(here, 'CPU rank')} share {count_of(cores, 'core')}")
    saves = config.checkpoint
    if options.max_restarts and not (saves.keep and (saves.every_steps or saves.every_minutes)):
        warnings.append("--max-restarts: no checkpoints are saved during the run, so it restarts at step 0")
    if config.model.lstm_size and config.compile == "on":
        warnings.append("compile: on has no effect on a BiLSTM")
    if not config.checkpoint.keep:
        warnings.append("checkpoint.keep is 0: nothing is saved, so an interrupted run starts over")
    if anyone_writes(run_dir):  # only a warning, because some file systems have no permission bits
        warnings.append(f"{run_dir} is writable by every user; run `chmod o-w` on it")
    if config.precision == "bf16" and not job.gpus and not job.machine.bf16_units:
        units = " or ".join(checks.BF16_UNITS)
        warnings.append(f"precision: bf16 is emulated on this CPU, which has no {units}; use auto or fp32")
    return warnings


def run_locked(
    job: Job,
    options: RunOptions,
    ranks: int,
    run_dir: Path,
    counters: Sequence[EnergyCounter],
    nodes: peers.Coordinator | None,
    console: Console,
) -> int:
    """Check the data, train in the locked `run_dir` and return the exit code. Raise ConfigError if the data
    is unusable or differs from that of the checkpoint or another node; the run's files are then unchanged."""
    log, launcher, resume = logger(console, as_json=False), options.launcher, options.resume
    log(f"run directory: {run_dir}")
    config = job.config
    if config.task is None:
        manifest = read_data(config, prepare_data(config))
        config = with_budget(config, manifest.num_samples)
        if isinstance(manifest, Manifest):
            config = manifest.with_build(config)
        if job.config.data.path is None:  # otherwise, `train` has already printed the warnings
            log(f"data: {describe_data(config, manifest)}")
            warn(console, data_warnings(config, manifest))
        if nodes is not None:
            nodes.check_data(manifest.hash)
        if issues := data_issues(run_dir, resume, manifest.hash):
            raise ConfigError(issues)
    if is_complete(run_dir, config, resume):
        log(COMPLETE)
        show_report(console, of_directories([run_dir]))
        return 0
    ledger = Ledger(run_dir, ranks, config.run, counters, began_s=time.monotonic() - age_s())
    machine = {**job.machine.to_json(), "launcher": launcher}  # holds_run looks for the key `launcher`
    if nodes is not None:
        machine["nodes"] = {nodes.name(node): count for node, count in enumerate(nodes.counts)}
    record.write_json(run_dir / "environment.json", machine)
    record.write_text(run_dir / "config.yaml", dump_config(config))
    log(f"launcher: {launcher}")
    loggers = Loggers(run_dir, config.log.to, log)
    saved = AfterSave(options.after_save, run_dir, log)

    def attempt(ranks: int, resume: str) -> processes.RunOutcome:
        ledger.use(ranks)
        profiled = options.profile.options(ranks) if options.profile else ()
        words = ["--resume", resume, *profiled, *["--allow-code"] * job.allow_code]
        start = RankStart(ranks, words, launcher, job.gpus > 0)
        watch = hangs.Watch(run_dir, log, config.run)
        with Display(run_dir, console, config) as display:

            def poll() -> None:
                display.poll()
                saved.poll()

            return processes.run(run_dir, start, poll, log=log, watch=watch, nodes=nodes)

    with ledger:
        with loggers, saved:
            restarts = Restarts(config, run_dir, ranks, options, log)
            while restarts.next:
                result = restarts.after(attempt(*restarts.next))
        close_run(run_dir, result.failure, console, command_s=age_s(), spent=ledger.update())
    return result.exit_code


def close_run(run_dir: Path, failure: Failure | None, console: Console, **facts: object) -> None:
    """Show the cause of a failure. Add `facts` to summary.json, write report.html and show the result."""
    if failure is not None and failure.issues:
        for fields in failure.issues:
            show(console, f"error: {Issue(**fields)}", style="red", **PLAIN)
    elif failure is not None:
        for number, line in enumerate(card(failure, run_dir)):
            show(console, line, style="bold red" if number == 0 else None, **PLAIN)
    processes.complete_summary(run_dir, **facts)
    report = of_directories([run_dir])
    page = run_dir / PAGE if write_or_warn(report, run_dir / PAGE) else None
    if failure is None:
        show_report(console, report, page)
    elif not failure.issues:
        show_end(console, report, page)


def age_s() -> float:
    """Return the seconds since this process started."""
    return time.time() - psutil.Process().create_time()


def warn(console: Console, warnings: list[str]) -> None:
    for line in warnings:
        show(console, f"warning: {line}", style="yellow", **PLAIN)


# --- the run directory


def start_issues(job: Job, run_dir: Path, resume: str) -> list[Issue]:
    """Return the issues that prevent this run from starting in `run_dir`. A run that resumes from a
    checkpoint does not need the files of `run.init_from`."""
    config = job.config
    if checkpoint_to_resume(run_dir, resume) is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"init_from": None})})
    return [*input_issues(config, allow_code=job.allow_code), *run_dir_issues(run_dir, job.config, resume)]


def run_dir_issues(run_dir: Path, config: Config, resume: str) -> Sequence[Issue]:
    """Return the issues that prevent this run from using `run_dir`."""
    if issues := place_issues(run_dir, "--run-dir"):
        return issues
    has_run = any((run_dir / "checkpoints").glob("step-*")) or (run_dir / "metrics.jsonl").exists()
    if not has_run and anyone_writes(run_dir):
        message = f"{run_dir} is writable by every user, so anyone could replace its checkpoints"
        hint = "run `chmod o-w` on it, or choose another directory"
        return [Issue("--run-dir", "unsupported", message, str(run_dir), hint=hint)]
    if (strange := foreign_files(run_dir)) and not holds_run(run_dir):
        names = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        message = f"{run_dir} contains {names} but no run, so a run would mix its files with yours"
        hint = f"choose a new directory, for example {run_dir / 'run'}"
        return [Issue("--run-dir", "exists", message, str(run_dir), hint=hint)]
    if linked := links(run_dir):
        message = "is a link, and a run would overwrite its target"
        return [Issue("--run-dir", "exists", f"{path} {message}", hint="remove the link") for path in linked]
    if resume not in ("auto", "never") and record.newest_checkpoint_facts(Path(resume)) is None:
        hint = "use auto, never, or the directory of a checkpoint"
        return [Issue("--resume", "not_found", f"{resume} contains no checkpoint", resume, hint=hint)]
    if has_run and resume == "never":
        message, hint = f"{run_dir} already contains a run", "choose another --run-dir"
        return [Issue("--resume never", "exists", message, str(run_dir), "--run-dir", hint)]
    checkpoint = checkpoint_to_resume(run_dir, resume)
    return change_issues(checkpoint[1], config, resume) if checkpoint else []


def holds_run(run_dir: Path) -> bool:
    """Return whether a run was started in this directory before. A lock file alone does not show this,
    because a command that locked the directory and was then refused may leave the file behind."""
    if (run_dir / "checkpoints").is_dir() and record.newest_checkpoint_facts(run_dir) is not None:
        return True
    return "launcher" in (record.read_json(run_dir / "environment.json") or {})


def foreign_files(run_dir: Path) -> list[str]:
    """List the names of files that prevent a new run from using `run_dir`. These do not: ALLOWED_FILES, an
    empty `checkpoints` directory (such as a mount point), and a `logs` directory without rank-* files."""

    def is_harmless(path: Path) -> bool:
        if path.name == "checkpoints":
            return path.is_dir() and {p.name for p in path.iterdir()} <= {"lost+found"}
        if path.name == "logs":
            return path.is_dir() and not any(path.glob("rank-*"))
        return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in ALLOWED_FILES)

    with contextlib.suppress(OSError):  # the directory is missing or unreadable
        return sorted(path.name for path in run_dir.iterdir() if not is_harmless(path))
    return []


def links(run_dir: Path) -> list[Path]:
    """List the symbolic links among a run's files, because a run would overwrite their targets. `checkpoints`
    and `logs` may be links, for example to a separate disk."""
    top = [path for path in run_dir.glob("*") if path.name not in ("checkpoints", "logs")]
    files = (*top, *run_dir.glob("logs/*"), *run_dir.glob("heartbeats/*"))
    return sorted(path for path in files if path.is_symlink())


def anyone_writes(directory: Path) -> bool:
    return directory.is_dir() and bool(directory.stat().st_mode & stat.S_IWOTH)


def checkpoint_to_resume(run_dir: Path, resume: str) -> tuple[Path, record.CheckpointFacts] | None:
    """Return the checkpoint to resume from, without verifying it, or None if there is none."""
    if resume == "never":
        return None
    return record.newest_checkpoint_facts(run_dir if resume == "auto" else Path(resume))


def data_issues(run_dir: Path, resume: str, data_hash: str) -> list[Issue]:
    """Return one issue if the checkpoint to resume from has another data hash, otherwise an empty list."""
    checkpoint = checkpoint_to_resume(run_dir, resume)
    if checkpoint is None or checkpoint[1].data_hash == data_hash:
        return []
    hashes = f"(hash {checkpoint[1].data_hash[:16]}, now {data_hash[:16]})"
    message = f"{checkpoint[0].name} was trained on different data {hashes}"
    return [Issue("data", "conflict", message, hint=undo_hint(resume))]


def undo_hint(resume: str) -> str:
    """Return the hint for a checkpoint that does not match the configuration."""
    return f"undo the change or choose another {'--run-dir' if resume == 'auto' else '--resume'}"


def change_issues(facts: record.CheckpointFacts, config: Config, resume: str) -> list[Issue]:
    """Return an issue for each setting that must equal the checkpoint's but differs in `config`."""
    before, now = facts.config.get("run", {}).get("init_from"), config.run.init_from
    was_moved = before is not None and not (hf_directory(before) or Path(before)).exists()
    issues = [*checks.changed_settings(facts.config, config), *changed_code(facts.code, config)]
    if config.data.path is not None:  # data.build.* describes the shards, whose hash is compared instead
        issues = [issue for issue in issues if not issue.setting.startswith("data.build.")]
    if before != now and not was_moved:
        message = "the run started from {}, not {}".format(*(s or "random weights" for s in (before, now)))
        issues.append(Issue("run.init_from", "conflict", message, now))
    return [dataclasses.replace(issue, hint=undo_hint(resume)) for issue in issues]


def is_complete(run_dir: Path, config: Config, resume: str) -> bool:
    """Return whether the run completed and its newest checkpoint reached the end of the budget."""
    summary = results.find(run_dir / "summary.json", Summary)
    newest = record.newest_checkpoint_facts(run_dir)
    if resume != "auto" or summary is None or newest is None or summary.status != "done":
        return False
    facts, unit = newest[1], config.schedule.unit
    if unit in METERED:  # a complete run may have spent less than its budget, so compare the budgets
        return bool(flat(facts.config).get(f"schedule.{unit}") == getattr(config.schedule, unit))
    return progress_at(config, facts.step, facts.samples, facts.elapsed_s) >= 1.0


@dataclasses.dataclass(frozen=True)
class MemoryCheck:
    """Estimated memory use of one rank, and the memory available to the rank."""

    config: Config
    precision: str
    world_size: int
    on_gpu: bool
    parts_gib: dict[str, float]  # part -> estimate, from cost.rank_memory_gib
    limit_gib: float | None  # None = unknown, so no issue is reported
    limit_of: str  # source of the limit

    @property
    def total_gib(self) -> float:
        return sum(self.parts_gib.values())

    def impossible(self) -> list[Issue]:
        """Return one issue if the model state alone exceeds the memory limit, otherwise an empty list."""
        state_gib = sum(self.parts_gib[name] for name in MEMORY_STATE)
        if self.limit_gib is None or state_gib <= self.limit_gib:
            return []
        message = (
            f"weights, gradients and optimizer state take {state_gib:.1f} GiB, but a rank has "
            f"{self.limit_gib:.1f} GiB"
        )
        hint = "use zero1 or fsdp, more ranks, or a smaller model"
        return [Issue("model", "out_of_range", message, hint=hint)]

    def issues(self, above: float = MAX_ESTIMATE_RATIO) -> list[Issue]:
        """Return one issue if the estimate is more than `above` times the limit, otherwise an empty list."""
        if self.limit_gib is None or self.total_gib <= above * self.limit_gib:
            return []
        if issues := self.impossible():
            return issues
        where = (self.config, self.precision, self.world_size, self.limit_gib)
        size = self.config.batch.micro_size
        message = (
            f"a micro-batch size of {size} takes about {format_gib(self.total_gib)} per rank (estimate), but "
            f"only {format_gib(self.limit_gib)} is available ({self.limit_of})"
        )
        hint = suggest_micro_batch(*where, on_gpu=self.on_gpu)[1]
        return [Issue("batch.micro_size", "out_of_range", message, size, hint=hint)]


def check_memory(
    config: Config,
    world_size: int,
    machine: Environment,
    *,
    on_gpu: bool,
    kept: str | None = None,
    here: int | None = None,
) -> MemoryCheck:
    """Estimate the memory that one of `world_size` ranks needs, and find how much is available to it. `kept`:
    precision of the checkpoint to resume from. `here`: number of ranks on this machine; None = all."""
    precision = precision_of(config, machine.bf16_units, on_gpu=on_gpu, kept=kept)
    parts = rank_memory_gib(config, precision, world_size, on_gpu=on_gpu)
    # the model size of a custom task is unknown
    limit, limit_of = (None, "") if config.task else machine.rank_memory(here or world_size, on_gpu)
    return MemoryCheck(config, precision, world_size, on_gpu, parts, limit, limit_of)


# --- description of a run


def expected_steps(config: Config) -> int | None:
    """Return the number of optimizer steps in the whole run, including its batch ramp. Return None for a
    budget in hours, dollars or kWh, or in epochs of data that is not built yet."""
    schedule = config.schedule
    if schedule.steps is not None:
        return schedule.steps
    if schedule.tokens is None:
        return None
    steps = tokens = 0
    while tokens < schedule.tokens:
        batch = batch_at(config.batch, tokens / schedule.tokens)
        size = batch * config.data.sequence_length  # tokens per step until the batch grows
        if batch == config.batch.global_size:
            return steps - (tokens - schedule.tokens) // size  # rounds the number of steps up
        end = int(batch / config.batch.global_size * config.batch.ramp_fraction * schedule.tokens)
        # skip to one step before `end`, because rounding decides at which step near `end` the batch grows
        count = max(1, (end - tokens) // size - 1)
        steps, tokens = steps + count, tokens + count * size
    return steps


def describe(
    config: Config, layout: BatchLayout, manifest: Manifest | ExamplesManifest | None, memory: MemoryCheck
) -> list[str]:
    """Return lines that describe a run before it starts: batch equation, data, model, memory and length.
    `manifest`: None before the data is built."""
    sequence = config.data.sequence_length
    parts = "not compiled: " + ", ".join(f"{name} {size:.2f}" for name, size in memory.parts_gib.items())
    flops = flops_per_token(config.model, sequence, config.predicted_share)
    tokens = layout.global_size * sequence
    packed = not config.has_examples  # unpacked examples differ in length
    step = f"{tokens:,} tokens" if packed else f"{layout.global_size:,} examples"
    ramp = f", ramped up in steps of {config.batch.ramp_quantum}" if config.batch.ramp_fraction else ""
    model = [
        f"data    {describe_data(config, manifest)}",
        f"model   {num_parameters(config.model, sequence):,} parameters, {flops / 1e6:.1f} MFLOP per token",
        f"memory  about {memory.total_gib:.2f} GiB per rank (estimate, {memory.precision}, {parts})",
    ]
    return [
        f"batch   {layout} = {step} a step{ramp}",
        *(
            model
            if config.task is None
            else [f"task    {config.task}: model, data and memory depend on the task"]
        ),
        f"length  {describe_length(config, tokens if packed else None)}; schedule {config.schedule.name}",
        f"rate    {peak_lr(config).equation}; {config.optim.name}",
        f"export  {checks.export_formats(config)}",
    ]


def describe_length(config: Config, step_tokens: int | None) -> str:
    """Format the length of a run: its budget and, if known, its number of tokens.
    `step_tokens`: number of tokens in a global batch; None if it varies from step to step."""
    schedule, steps = config.schedule, expected_steps(config)
    length = "" if steps is None else count_of(steps, "step")
    if schedule.hours is not None:
        hours = f"{schedule.hours:g} h"
        length = hours if schedule.hours >= 1 else f"{format_duration(schedule.hours * 3600)} ({hours})"
        length += " on rank 0's clock"
    if schedule.dollars is not None:
        length = f"${schedule.dollars:g} at ${config.run.price_per_device_hour:g} per device hour"
    if schedule.kwh is not None:
        length = f"{schedule.kwh:g} kWh"
    if schedule.epochs is not None:
        length = f"{schedule.epochs:g} epochs of the data, which is not built yet"
    tokens = schedule.tokens
    if tokens is None and steps is not None and step_tokens is not None and not config.batch.ramp_fraction:
        tokens = steps * step_tokens
    return length if tokens is None else f"{length} = {tokens:,} tokens"


def describe_data(config: Config, manifest: Manifest | ExamplesManifest | None) -> str:
    """Describe the data and the number of passes over it. `manifest`: None before the data is built."""
    if manifest is None:
        return "not built yet; built when the run starts"
    if isinstance(manifest, ExamplesManifest):
        rows = manifest.splits["train"]
        mean, cut = rows.tokens / rows.examples, format_percent(rows.truncated / rows.examples)
        line = f"{manifest.task}: {rows.examples:,} examples of {mean:.1f} tokens on average, {cut} of them"
        line += f" truncated to {manifest.sequence_length}"
    else:
        line = f"{manifest.train.sequences:,} sequences of {manifest.sequence_length} tokens"
    passes = passes_over(config, manifest)
    if passes is None:
        return line
    times = format_ratio(passes)
    how = f"reads {format_percent(passes)} of them" if passes < 1 else f"makes {times} passes over them"
    return f"{line}; the run {how}"


def passes_over(config: Config, manifest: Manifest | ExamplesManifest) -> float | None:
    """Return the number of passes over the training data; None if it is unknown. For a budget in hours,
    dollars or kWh, use the number of tokens that `plan` predicted."""
    steps, schedule, size = expected_steps(config), config.schedule, config.batch.global_size
    if isinstance(manifest, ExamplesManifest):
        return None if steps is None else steps * size / manifest.splits["train"].examples
    tokens: float | None = schedule.tokens
    if schedule.unit in CLOCKED:
        predicted = (config.prediction or {}).get("tokens")
        tokens = predicted.value if predicted else None
    elif schedule.steps is not None and not config.batch.ramp_fraction:
        tokens = schedule.steps * size * manifest.sequence_length
    return None if tokens is None else tokens / manifest.train.tokens


def data_warnings(config: Config, manifest: Manifest | ExamplesManifest) -> list[str]:
    """Return a warning for each property of the data that is probably unintended."""
    lines = manifest.warnings(config)
    if isinstance(manifest, Manifest) and not all(s.name.startswith("builtin:") for s in manifest.sources):
        passes = passes_over(config, manifest) or 0.0
        if passes > MAX_PASSES:
            lines.append(
                f"the run makes {format_ratio(passes)} passes over its {manifest.train.tokens:,} training "
                f"tokens; beyond {MAX_PASSES} passes, new text helps more than further passes"
            )
    return lines
