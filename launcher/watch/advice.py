"""Explain a failure and find settings to change: signals, and lack of memory."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Config, ConfigError, batch_layout, divisors, load_config
from bert_dp.cost import GIB, rank_memory_gib
from bert_dp.files.models import OUT_OF_MEMORY, Failure, RecordedEnvironment, RunMemory
from launcher import results
from launcher.machine.environment import ROOT, precision_of
from launcher.report.numbers import format_count, format_gib

SPARE = 0.1  # of the memory, for what the estimate does not count, such as buffers of collectives
Estimate = Callable[[Config], float]
"""GiB of a rank."""
MEANING: dict[int, tuple[str, str]] = {
    signal.SIGSEGV: (
        "native code used memory that is not its own",
        "see the stack; often packages built for another torch, CUDA or driver than these (`bert-dp doctor` "
        "lists the versions), else faulty memory",
    ),
    signal.SIGABRT: (
        "native code gave up: a failed assertion or a C++ exception that nobody caught",
        "its message stands in the log, above the stack",
    ),
    signal.SIGBUS: (
        "a page of mapped memory could not be allocated or read: /dev/shm is full, or a mapped data file was "
        "cut, or its disk failed",
        "free or enlarge /dev/shm (a container's default is 64 MiB: --shm-size), and check the shards with "
        "`bert-dp data inspect`",
    ),
    signal.SIGILL: (
        "an instruction that this CPU does not have",
        "install a build of torch and of the extensions that is meant for this CPU",
    ),
    signal.SIGFPE: ("native code divided a whole number by zero", "see the stack"),
    signal.SIGXCPU: ("the CPU time limit of this session is spent", "raise `ulimit -t`"),
    signal.SIGXFSZ: ("a file reached the size limit of this session", "raise `ulimit -f`"),
}
CHANGES: tuple[dict[str, Any], ...] = (  # beside a smaller micro batch, the cheapest in time first
    {"activation_checkpointing": True},
    {"engine": "zero1"},
    {"engine": "zero1", "activation_checkpointing": True},
    {"engine": "fsdp"},
    {"engine": "fsdp", "activation_checkpointing": True},
)


def explain(failure: Failure, run_dir: Path, world_size: int, memory: RunMemory) -> Failure:
    """Add to a failure what it means and what to do, as far as that is known.

    Reads RUN/config.yaml and RUN/environment.json; without them it says less.
    """
    facts: dict[str, Any] = {}
    if failure.killed_by == signal.SIGKILL:
        facts = _explain_kill(failure, run_dir, world_size, memory)
    elif failure.killed_by in MEANING:
        meaning, fix = MEANING[failure.killed_by]
        if failure.killed_by == signal.SIGBUS:
            with contextlib.suppress(OSError):
                meaning += f"; /dev/shm has {format_gib(shutil.disk_usage(ROOT / 'dev/shm').free / GIB)} free"
        facts = {"explanation": [meaning], "fix": [fix]}
    elif failure.kind in OUT_OF_MEMORY:
        on_host = failure.kind == "host_memory"
        reasons, fixes = _what_to_lower(run_dir, world_size, failure.message, on_host=on_host)
        facts = {"explanation": reasons, "fix": fixes, "memory": memory if on_host else None}
    return failure.model_copy(update=facts)


def _explain_kill(failure: Failure, run_dir: Path, world_size: int, memory: RunMemory) -> dict[str, Any]:
    peak = memory.peaks_gib.get(f"rank {failure.rank}")
    peaked = f"its memory peaked at {format_gib(peak)}" if peak else "it ended before its memory was seen"
    if memory.oom_kills:
        killed = f"{memory.oom_kills} process{'es' * (memory.oom_kills > 1)}"
        first = f"the kernel killed {killed} for want of host memory (oom_kill in {memory.counter}); {peaked}"
        reasons, fixes = _what_to_lower(run_dir, world_size, "", on_host=True)
        facts = {"message": f"{failure.message}: host out of memory", "kind": "host_memory"}
        return {**facts, "explanation": [first, *reasons], "fix": fixes, "memory": memory}
    reason = f"from outside: no out-of-memory kill was counted; {peaked}"
    if memory.oom_kills is None:
        reason = (
            f"by a process or the kernel, perhaps out of memory: no oom_kill counter can be read; {peaked}"
        )
    fix = "see who ended it: a limit of the batch system or container, an administrator; `dmesg` if readable"
    return {"explanation": [reason], "fix": [fix], "memory": memory}


def _what_to_lower(
    run_dir: Path, world_size: int, message: str, *, on_host: bool
) -> tuple[list[str], list[str]]:
    """Explain a lack of memory, of the host or the device, and find settings that need less."""
    try:
        config = load_config(run_dir / "config.yaml")
    except (ConfigError, OSError):
        return [], []
    machine = results.find(run_dir / "environment.json", RecordedEnvironment) or RecordedEnvironment()
    if on_host and config.run.device != "cpu" and machine.gpus:
        return [], [
            "on GPUs the host holds the data, the checkpoint's copy and the program: fewer ranks on "
            "this host, fewer other processes, or more memory"
        ]
    capacity, reasons = _host_capacity(machine, world_size) if on_host else _device_capacity(message, machine)
    newest = files.newest_checkpoint_facts(run_dir)
    kept = newest[1].precision if newest else None
    precision = precision_of(config, machine.bf16_units, on_gpu=not on_host, kept=kept)
    equation, fixes = what_fits(config, precision, world_size, capacity, on_gpu=not on_host)
    return [*reasons, equation], fixes


def _device_capacity(message: str, machine: RecordedEnvironment) -> tuple[float | None, list[str]]:
    """Find the GiB that this process can have of the device: in torch's message, else in environment.json."""

    def said(before: str) -> float | None:
        match = re.search(rf"{before} ([\d.]+) (GiB|MiB)", message)
        return float(match[1]) / {"GiB": 1, "MiB": 1024}[match[2]] if match else None

    total, free, mine = map(said, ("total capacity of", "of which", "this process has"))
    if total is None:
        sizes = [gpu.memory_gib for gpu in machine.gpus if gpu.memory_gib]
        return min(sizes, default=None), []
    others = total - free - mine if free is not None and mine is not None else 0.0
    if others > SPARE * total:
        return total - others, [
            f"other processes hold {format_gib(others)} of its {format_gib(total)} (`nvidia-smi` names them)"
        ]
    return total, []


def _host_capacity(machine: RecordedEnvironment, world_size: int) -> tuple[float | None, list[str]]:
    total = machine.memory_limit_gib or machine.memory_gib
    if not total:
        return None, []
    share = total / world_size
    of = "control group's limit" if machine.memory_limit_gib else "machine"
    return share, [f"{of} {format_gib(total)} / {world_size} ranks = {format_gib(share)} a rank"]


def what_fits(
    config: Config, precision: str, world_size: int, capacity_gib: float | None, *, on_gpu: bool
) -> tuple[str, list[str]]:
    """Return the memory equation of a rank, and settings that bring it below `capacity_gib` with 10 % spare.

    The estimate is linear in the micro batch. A run that failed though its estimate fits needs more than it:
    then a tenth less than the estimate is sought. The global batch always stays.
    """

    def estimate(of: Config) -> float:
        return sum(rank_memory_gib(of, precision, world_size, on_gpu=on_gpu).values())

    micro = config.batch.micro_size
    one, two = (estimate(_with_micro(config, n)) for n in (1, 2))
    needed = estimate(config)
    limit = (1 - SPARE) * (needed if capacity_gib is None else min(needed, capacity_gib))
    equation = (
        f"estimate of a rank: {format_gib(2 * one - two)} + {two - one:.4f} GiB a sequence x micro batch "
        f"{micro} = {format_gib(needed)}"
    )
    if capacity_gib is not None:
        equation += f"; there are {format_gib(capacity_gib)}"
        if needed <= capacity_gib:
            equation += ", so more was taken than the estimate counts"
    for change in ({}, *CHANGES):
        parallel = config.parallel.model_copy(update=change)
        changed = config.model_copy(update={"parallel": parallel})
        unchanged = parallel == config.parallel
        if unchanged and change:
            continue
        largest = _largest(changed, estimate, world_size, limit, micro - unchanged)
        if largest is not None:
            return equation, [_options(config, changed, largest, estimate, world_size)]
    return equation, [
        "nothing fits by the estimate: a smaller model, more ranks with parallel.engine=fsdp, or more memory"
    ]


def _largest(config: Config, estimate: Estimate, world_size: int, limit_gib: float, most: int) -> int | None:
    """Find the largest micro batch up to `most` that divides, is allowed and stays below the limit."""
    for micro in (n for n in reversed(divisors(config.batch.global_size)) if n <= most):
        candidate = _with_micro(config, micro)
        if estimate(candidate) > limit_gib:
            continue
        with contextlib.suppress(ConfigError):
            batch_layout(candidate, world_size)
            return micro
    return None


def _options(old: Config, new: Config, micro: int, estimate: Estimate, world_size: int) -> str:
    """Format the `--set` options from `old` to `new` at this micro batch, with their effects."""
    new = _with_micro(new, micro)
    settings = {
        f"parallel.{name}": value
        for name, value in new.parallel.model_dump(mode="json").items()
        if getattr(old.parallel, name) != value
    }
    if micro != old.batch.micro_size:
        settings["batch.micro_size"] = micro
    options = " ".join(f"--set {name}={str(value).lower()}" for name, value in settings.items())
    size = format_gib(estimate(new))
    plan = batch_layout(new, world_size)
    before = old.batch.global_size // (old.batch.micro_size * plan.dp)
    return (
        f"{options} (accumulation {before} -> {plan.grad_accum_steps}, the global batch of "
        f"{format_count(plan.global_size)} stays): about {size}"
    )


def _with_micro(config: Config, micro: int) -> Config:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": micro})})
