"""Find the first failure of a run in the ranks' records, explain it, and format the failure card.
Functions that read kernel files accept `root`, the parent directory of proc/ and sys/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bert_dp import files
from bert_dp.config import Config, ConfigError, batch_layout, divisors, load_config
from bert_dp.config.errors import StoredModel
from bert_dp.cost import GIB, rank_memory_gib
from bert_dp.files import is_own_code, safe
from bert_dp.files.models import OUT_OF_MEMORY, Failure, RecordedEnvironment, RunMemory
from bert_dp.files.reaper import describe_exit_code
from launcher import results
from launcher.machine.environment import ROOT, control_groups, precision_of
from launcher.report.formats import count_of, format_count, format_gib

TAIL_LINES = 20
TAIL_BYTES = 65_536  # bytes read from the end of a log
STACK_LINES = 15
MESSAGE_CHARS = 600
NO_CAUSE = "without recording an error"
CPP_PLACE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ")
CRASH = "Fatal Python error: "  # start of faulthandler's output
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
SAMPLE_S = 1.0
CONSEQUENCES_SHOWN = 6
MEANING: dict[int, tuple[str, str]] = {  # signal -> meaning and fix
    signal.SIGSEGV: (
        "native code accessed invalid memory",
        "see the stack; a common cause is a package built for another version of torch, CUDA or the driver "
        "(environment.json lists the installed versions)",
    ),
    signal.SIGABRT: (
        "native code aborted: a failed assertion or an uncaught C++ exception",
        "see the error message in the log, above the stack",
    ),
    signal.SIGBUS: (
        "a page of mapped memory could not be allocated or read: /dev/shm is full, or a file was truncated",
        "free or enlarge /dev/shm (a container gets 64 MiB unless started with --shm-size), and check the "
        "shards with `bert-dp data inspect`",
    ),
    signal.SIGILL: (
        "the code uses an instruction that this CPU does not support",
        "install builds of torch and its extensions that support this CPU",
    ),
}
SPARE = 0.1  # share of memory that must stay free for what the estimate omits, such as buffers of collectives


@dataclasses.dataclass(frozen=True)
class RankExit:
    """Exit of a worker. `code`: its exit code (-N after signal N), or None if another process reaped it."""

    rank: int
    code: int | None
    time_ns: int


class RanksEnded(StoredModel):
    """Exits and errors of the ranks of one node. Times are in ns of CLOCK_MONOTONIC."""

    code: int  # exit code of the starter (torchrun, accelerate or deepspeed)
    failed_ns: int | None  # time when the starter failed; None if it did not fail, or if bert-dp killed it
    said: str  # end of the starter's output, at most TAIL_BYTES; secrets are masked
    log: str  # path of the starter's log
    errors: list[Failure]  # errors recorded by the ranks
    exits: list[RankExit]
    memory: RunMemory

    def by_clock(self, ahead_ns: int) -> RanksEnded:
        """Convert the times to the local clock. They come from a clock that is `ahead_ns` ahead of it."""
        errors = [error.model_copy(update={"time_ns": error.time_ns - ahead_ns}) for error in self.errors]
        exits = [dataclasses.replace(each, time_ns=each.time_ns - ahead_ns) for each in self.exits]
        failed_ns = None if self.failed_ns is None else self.failed_ns - ahead_ns
        return self.model_copy(update={"errors": errors, "exits": exits, "failed_ns": failed_ns})


def error_files(logs: Path, ranks: Sequence[int] | None = None) -> list[Path]:
    """List the error files of all ranks, or only of those in `ranks`."""
    if ranks is None:
        return list(logs.glob("rank-*.error.json"))
    return [path for rank in ranks if (path := logs / f"rank-{rank}.error.json").exists()]


def recorded_errors(logs: Path, ranks: Sequence[int] | None = None) -> list[Failure]:
    """Read the errors recorded by all ranks, or only by those in `ranks`."""
    found = (results.find(path, Failure) for path in error_files(logs, ranks))
    return [error for error in found if error is not None]


def first_cause(
    logs: Path, starter_output: str, exits: Sequence[RankExit], recorded: Sequence[Failure]
) -> Failure | None:
    """Return the first failure, complete with its log, its consequences and the ranks with the same error.
    Return None if no rank failed. An error with `issues` (bad input) takes precedence over other errors."""
    # a rank killed by a signal records no error; errors of other ranks are consequences of its exit if they
    # come later or only report a lost peer
    in_order = sorted(recorded, key=lambda e: (not e.issues, e.time_ns))
    errors = {e.rank: e for e in in_order if e.rank is not None}
    causes = [e for e in errors.values() if e.kind != "peer_gone"]
    silent = [d for d in exits if d.rank not in errors and d.code != 0]
    died_first = bool(silent) and all(silent[0].time_ns < e.time_ns for e in causes)
    end = _unrecorded_exit(silent, starter_output, set(errors))
    same: set[int] = set()
    if end is not None and (not causes or died_first):
        first = _unrecorded_failure(logs, *end)
    elif errors:
        first = (causes or list(errors.values()))[0]
        alike = [
            e for e in causes or errors.values() if (e.error_type, e.where) == (first.error_type, first.where)
        ]
        same = {e.rank for e in alike if e is not first and e.rank is not None}
    else:
        return None
    log = logs / f"rank-{first.rank}.log"
    facts = {
        "rank": None if first.agreed else first.rank,
        "log": str(log),
        "log_tail": first.log_tail or read_end(log).splitlines()[-TAIL_LINES:],
        "same_error_ranks": sorted(same),
        "consequences": _consequences(errors, silent, {first.rank, *same}),
    }
    return first.model_copy(update=facts)


def _unrecorded_exit(
    silent: Sequence[RankExit], starter_output: str, recorded: set[int]
) -> tuple[int, int | None] | None:
    """Return (rank, exit code) of the first failed rank that recorded no error, or None if there is none.
    `silent`: exits of such ranks, sorted by time. If the list is empty or its first exit code is None, use
    the report in `starter_output`. The returned code is None if it is not reported there either."""
    if silent and silent[0].code is not None:
        return silent[0].rank, silent[0].code
    report = r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+)"
    for rank, number in re.findall(report, starter_output):
        if int(rank) not in recorded:
            return int(rank), -int(number)
    if not silent:
        return None
    # deepspeed's report, which does not name the rank
    reported = re.search(r"exits with return code = -(\d+)", starter_output)
    return silent[0].rank, -int(reported[1]) if reported else None


def _unrecorded_failure(logs: Path, rank: int, code: int | None) -> Failure:
    """Build a Failure for a rank that recorded no error; after a crash, add the stack from its log."""
    signalled = -code if code is not None and code < 0 else None
    stack = crash_stack(read_end(logs / f"rank-{rank}.log")) if signalled in CRASHES else []
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', "\n".join(stack))
    frame = next((f for f in frames if is_own_code(f[0])), frames[0] if frames else None)
    return Failure(
        kind="killed" if signalled else "no_cause",
        rank=rank,
        message=f"ended {NO_CAUSE}" if code is None else describe_exit_code(code, NO_CAUSE),
        where=f"{frame[0]}:{frame[1]}" if frame else None,
        source=f"in {frame[2]}" if frame else None,
        killed_by=signalled,
        log_tail=stack,
    )


def _consequences(
    errors: Mapping[int, Failure], silent: Sequence[RankExit], causes: set[int | None]
) -> list[str]:
    """Describe the failures of ranks that are not in `causes`. In `silent`, ignore exits with code 1
    or None, and exits caused by SIGTERM, which torchrun sends to the remaining ranks."""
    lines = {rank: f"rank {rank}: {first_line(e.message).partition('. ')[0]}" for rank, e in errors.items()}
    for each in silent:
        if each.code is not None and each.code not in (-signal.SIGTERM, 1):
            lines.setdefault(each.rank, f"rank {each.rank}: {describe_exit_code(each.code, '')}")
    return [lines[rank] for rank in sorted(lines) if rank not in causes]


def add_disk_error(failure: Failure, run_dir: Path, error: OSError) -> Failure:
    """Add `error`, raised by a write to RUN, to a failure. Make it the cause if no other cause is known."""
    refused = f"{os.strerror(error.errno or errno.EIO)}: cannot write to {run_dir}"
    fix = "make space on that disk; the same command then resumes from the newest checkpoint"
    if failure.kind == "disk":
        return failure.model_copy(update={"fix": [*failure.fix, fix]})
    if failure.kind != "no_cause":
        return failure.model_copy(update={"explanation": [*failure.explanation, refused]})
    reasons = [failure.headline(), *failure.explanation]
    facts = {"rank": None, "message": refused, "kind": "disk", "explanation": reasons, "fix": [fix]}
    return failure.model_copy(update=facts)


def crash_stack(text: str) -> list[str]:
    """Extract the last output of faulthandler from a log: the error and the stack of the crashed thread."""
    _, error, rest = text.rpartition(CRASH)
    if not error:
        return []
    head, *lines = rest.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
    stack = lines[starts[0] :] if starts else lines
    ends = [i for i, line in enumerate(stack) if i and not line.startswith("  ")]
    return [error + head, *stack[: ends[0] if ends else None][:STACK_LINES]]


def read_end(path: Path) -> str:
    """Read the last TAIL_BYTES of a log, but nothing before the last restart. Return "" if reading fails."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(f"{files.STARTED_AGAIN}\n")[2]


def first_line(message: str) -> str:
    """Return a message's first non-empty line, cut to MESSAGE_CHARS and without C++ source locations."""
    lines = [line.strip() for line in CPP_PLACE.sub("", message).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]} ..."


# --- explanations and fixes


def explain(
    failure: Failure, run_dir: Path, world_size: int, memory: RunMemory, here: int | None = None
) -> Failure:
    """Explain a failure and suggest fixes, using RUN/config.yaml and RUN/environment.json. `here`: number of
    ranks that share the memory of the failed rank's node; None: all ranks."""
    here = here or world_size
    facts: dict[str, Any] = {}
    if failure.killed_by in MEANING:
        meaning, fix = MEANING[failure.killed_by]
        facts = {"explanation": [meaning], "fix": [fix]}
    elif failure.killed_by == signal.SIGKILL:
        facts = {**_explain_kill(failure, run_dir, world_size, memory, here), "memory": memory}
    elif failure.kind in OUT_OF_MEMORY:
        on_host = failure.kind == "host_memory"
        reasons, fixes = explain_memory(run_dir, world_size, failure.message, on_host=on_host, here=here)
        facts = {"explanation": reasons, "fix": fixes, "memory": memory if on_host else None}
    return failure.model_copy(update=facts)


def _explain_kill(
    failure: Failure, run_dir: Path, world_size: int, memory: RunMemory, here: int
) -> dict[str, Any]:
    peaked = "the rank exited before its memory was sampled"
    if peak := memory.peaks_gib.get(f"rank {failure.rank}"):
        peaked = f"the rank's memory peaked at {format_gib(peak)}"
    if memory.oom_kills:
        killed = f"the kernel killed the rank because host memory ran out (oom_kill in {memory.counter})"
        reasons, fixes = explain_memory(run_dir, world_size, "", on_host=True, here=here)
        facts = {"message": f"{failure.message}: host out of memory", "kind": "host_memory"}
        return {**facts, "explanation": [f"{killed}; {peaked}", *reasons], "fix": fixes}
    reason = "killed from outside the run (the kernel counted no out-of-memory kill)"
    if memory.oom_kills is None:
        reason = "killed from outside the run or by the kernel for lack of memory (no oom_kill counter found)"
    fix = "find out who sent the signal: the batch system, the container or an administrator; see `dmesg`"
    return {"explanation": [f"{reason}; {peaked}"], "fix": [fix]}


def explain_memory(
    run_dir: Path, world_size: int, message: str, *, on_host: bool, here: int
) -> tuple[list[str], list[str]]:
    """Explain why host or device memory ran out, and suggest fixes. `here`: number of ranks on the host."""
    try:
        config = load_config(run_dir / "config.yaml")
    except (ConfigError, OSError):
        return [], []
    machine = results.find(run_dir / "environment.json", RecordedEnvironment) or RecordedEnvironment()
    if on_host and config.run.device != "cpu" and machine.gpus:
        return [], ["use fewer ranks or more host memory, which holds the data and the state being saved"]
    reasons: list[str] = []
    if on_host:
        total = machine.memory_limit_gib or machine.memory_gib
        capacity = total / here if total else None
        if total:
            shared = f"{format_gib(total)} / {count_of(here, 'rank')} = {format_gib(capacity)} per rank"
            reasons = [f"{'control group limit' if machine.memory_limit_gib else 'machine memory'} {shared}"]
    elif match := re.search(r"total capacity of ([\d.]+) (GiB|MiB)", message):  # torch's wording
        capacity = float(match[1]) / {"GiB": 1, "MiB": 1024}[match[2]]
    else:
        capacity = min((gpu.memory_gib for gpu in machine.gpus if gpu.memory_gib), default=None)
    newest = files.newest_checkpoint_facts(run_dir)
    kept = newest[1].precision if newest else None
    precision = precision_of(config, machine.bf16_units, on_gpu=not on_host, kept=kept)
    estimate, fix = suggest_micro_batch(config, precision, world_size, capacity, on_gpu=not on_host)
    return [*reasons, estimate], [fix]


def suggest_micro_batch(
    config: Config, precision: str, world_size: int, capacity_gib: float | None, *, on_gpu: bool
) -> tuple[str, str]:
    """Return two texts: the memory estimate per rank, and a fix, usually a smaller micro batch that fits.

    A micro batch fits if its estimate is at least 10 % (SPARE) below both `capacity_gib` and the estimate of
    the current micro batch, because a run may fail although its estimate is below the capacity.
    """

    def needs(of: Config) -> float:
        return sum(rank_memory_gib(of, precision, world_size, on_gpu=on_gpu).values())

    needed, batch = needs(config), config.batch
    limit = (1 - SPARE) * (needed if capacity_gib is None else min(needed, capacity_gib))
    words = f"estimate per rank: {format_gib(needed)} at micro batch {batch.micro_size}"
    if capacity_gib is not None:
        words += f"; available: {format_gib(capacity_gib)}"
        if needed <= capacity_gib:
            words += ", so the run used more than the estimate"
    before = batch_layout(config, world_size)
    for micro in (n for n in reversed(divisors(batch.global_size)) if n < batch.micro_size):
        smaller = config.model_copy(update={"batch": batch.model_copy(update={"micro_size": micro})})
        with contextlib.suppress(ConfigError):  # micro batch x replicas does not divide the global batch
            after, size = batch_layout(smaller, world_size), needs(smaller)
            if size <= limit:
                steps = f"accumulation {before.grad_accum_steps} -> {after.grad_accum_steps}"
                kept = f"global batch {format_count(batch.global_size)} unchanged"
                return words, f"batch.micro_size={micro} ({steps}, {kept}): about {format_gib(size)}"
    return words, (
        "no smaller micro batch fits, according to the estimate; try parallel.activation_checkpointing=true, "
        "parallel.engine=zero1 or fsdp, more ranks, or a smaller model"
    )


def card(failure: Failure, run_dir: Path) -> list[str]:
    """Format a failure as lines: rank, error, source line, log, reasons, fixes, consequences and log tail."""
    lines = [f"failed: {first_line(failure.headline())}"]
    if failure.where:
        lines.append(f"  at {failure.where} {failure.source or ''}".rstrip())
    lines += [f"  log: {failure.log}"] if failure.log else []
    lines.append(f"  run: {run_dir}")
    if failure.same_error_ranks:
        lines.append(f"  same error on ranks: {', '.join(map(str, failure.same_error_ranks))}")
    lines += [f"  why: {line}" for line in failure.explanation]
    lines += [f"  fix: {line}" for line in failure.fix]
    if failure.memory and (peak := failure.memory.peaks_gib.get(f"rank {failure.rank}")):
        lines.append(f"  memory: rank {failure.rank} peaked at {format_gib(peak)}")
    lines += [f"  consequence: {line}" for line in failure.consequences[:CONSEQUENCES_SHOWN]]
    if (more := len(failure.consequences) - CONSEQUENCES_SHOWN) > 0:
        lines.append(f"  consequence: {count_of(more, 'more rank')} failed; summary.json lists them all")
    lines += [f"  | {line}" for line in failure.log_tail]
    return [safe(line) for line in lines]


class MemoryWatch:
    """Recorder of each rank's peak resident memory, sampled once a second, and of out-of-memory kills."""

    def __init__(self, root: Path = ROOT):
        self._root, self._next_s = root, 0.0
        self._kills_before = oom_kills(root)
        self._peaks_gib: dict[str, float] = {}

    def sample(self, workers: Mapping[int, psutil.Process]) -> None:
        """Sample the resident memory of the workers (rank -> process) at most once a second."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + SAMPLE_S
        for rank, worker in workers.items():
            with contextlib.suppress(psutil.Error):
                used = worker.memory_info().rss / GIB
                self._peaks_gib[f"rank {rank}"] = max(self._peaks_gib.get(f"rank {rank}", 0.0), used)

    def facts(self) -> RunMemory:
        """Return the memory peaks and the number of out-of-memory kills since this object was created."""
        before, after = self._kills_before, oom_kills(self._root)
        return RunMemory(
            peaks_gib={name: round(peak, 3) for name, peak in self._peaks_gib.items()},
            oom_kills=after[0] - before[0] if before and after and before[1] == after[1] else None,
            counter=after[1] if after else None,
        )


def oom_kills(root: Path = ROOT) -> tuple[int, str] | None:
    """Return the number of out-of-memory kills so far and the path of the counter, or None if there is none.
    The control group's counter (v2 or v1) is preferred to the machine's. The former counts all kills of the
    group's processes, whether a memory limit was reached or the whole machine ran out of memory."""
    counters = [
        group / name
        for group in reversed(control_groups(root, "memory"))
        for name in ("memory.events", "memory.oom_control")
    ]
    for path in (*counters, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1]), str(path)
    return None
