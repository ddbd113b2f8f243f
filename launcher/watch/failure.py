"""Find why a run failed: the first cause among what the ranks left behind, and the memory of the ranks.

Every function that reads kernel files takes `root`, the directory that holds proc/ and sys/.
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

import psutil

from bert_dp import files
from bert_dp.cost import GIB
from bert_dp.files import is_own_code, safe
from bert_dp.files.models import Failure, RunMemory
from launcher import results
from launcher.children import describe_exit_code
from launcher.machine.environment import ROOT, control_groups
from launcher.report.numbers import format_gib

TAIL_LINES = 20
TAIL_BYTES = 65_536  # of a log's end that is read
STACK_LINES = 15
MESSAGE_CHARS = 600
NO_CAUSE = "without recording an error"
CPP_PLACE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ")
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
SAMPLE_S = 1.0
GROUP = "control group"
CONSEQUENCES_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class RankExit:
    """A worker that has ended: its exit code, -N for signal N, None when its parent had already taken it."""

    rank: int
    code: int | None
    time_ns: int


def decide_cause(
    logs: Path, launcher_said: str, exits: Sequence[RankExit], unknown: Failure, *, hang: Failure | None
) -> Failure | None:
    """Find the cause of a run's end: the hang that it was ended for, else the earliest error of a rank.

    None if no rank recorded one. `unknown` has the log of a rank that ended before it opened its own.
    """
    cause = hang or first_cause(logs, launcher_said, exits)
    if cause is not None and (cause.log is None or not Path(cause.log).exists()):
        cause = cause.model_copy(update={"log": unknown.log, "log_tail": unknown.log_tail})
    return cause


def first_cause(logs: Path, launcher_said: str, exits: Sequence[RankExit] = ()) -> Failure | None:
    """Find the earliest error that a rank recorded, and complete it with log, consequences and like errors.

    A rank that was killed by a signal recorded none: errors of other ranks are its consequences if they came
    later or only say that a peer has gone.
    """
    recorded = [results.find(path, Failure) for path in logs.glob("rank-*.error.json")]
    in_order = sorted((e for e in recorded if e), key=lambda e: (not e.issues, e.time_ns))
    errors = {e.rank: e for e in in_order if e.rank is not None}
    causes = [e for e in errors.values() if e.kind != "peer_gone"]
    silent = [d for d in exits if d.rank not in errors and d.code != 0]
    died_first = bool(silent) and all(silent[0].time_ns < e.time_ns for e in causes)
    end = _unrecorded_end(silent, launcher_said, set(errors))
    same: set[int] = set()
    if end is not None and (not causes or died_first):
        first = _of_a_silent_end(logs, *end)
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
        "log_tail": first.log_tail or tail_of(read_end(log)),
        "same_error_ranks": sorted(same),
        "consequences": _consequences(errors, silent, {first.rank, *same}),
    }
    return first.model_copy(update=facts)


def _unrecorded_end(
    silent: Sequence[RankExit], launcher_said: str, recorded: set[int]
) -> tuple[int, int | None] | None:
    """Find rank and exit code (None = not known) of the first that ended without a record: as we saw it, else
    in the launcher's report, in which deepspeed does not name the rank."""
    if silent and silent[0].code is not None:
        return silent[0].rank, silent[0].code
    report = r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+)"
    for rank, number in re.findall(report, launcher_said):
        if int(rank) not in recorded:
            return int(rank), -int(number)
    if not silent:
        return None
    reported = re.search(r"exits with return code = -(\d+)", launcher_said)
    return silent[0].rank, -int(reported[1]) if reported else None


def _of_a_silent_end(logs: Path, rank: int, code: int | None) -> Failure:
    """Describe the end of a rank that recorded no error, with the stack that a crash left in its log."""
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
    """Describe the ends of the other ranks. SIGTERM is how the launcher ends those that are left."""
    lines = {rank: f"rank {rank}: {first_line(e.message).partition('. ')[0]}" for rank, e in errors.items()}
    for rank_exit in silent:
        if rank_exit.code is not None and rank_exit.code not in (-signal.SIGTERM, 1):
            lines.setdefault(
                rank_exit.rank, f"rank {rank_exit.rank}: {describe_exit_code(rank_exit.code, '')}"
            )
    return [lines[rank] for rank in sorted(lines) if rank not in causes]


def of_a_disk(failure: Failure, run_dir: Path, error: OSError) -> Failure:
    """Add that the run directory takes nothing more; make it the cause unless another one is known."""
    refused = f"{os.strerror(error.errno or errno.EIO)}: nothing can be written to {run_dir}"
    fix = "make room there; the same command then goes on from the newest checkpoint"
    if failure.kind == "disk":
        return failure.model_copy(update={"fix": [*failure.fix, fix]})
    if failure.kind != "no_cause":
        return failure.model_copy(update={"explanation": [*failure.explanation, refused]})
    reasons = [failure.headline(), *failure.explanation]
    facts = {"rank": None, "message": refused, "kind": "disk", "explanation": reasons, "fix": [fix]}
    return failure.model_copy(update=facts)


def crash_stack(text: str) -> list[str]:
    """Cut faulthandler's last output from a log: the error and the stack of the thread that crashed."""
    _, error, rest = text.rpartition("Fatal Python error: ")
    if not error:
        return []
    head, *lines = rest.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
    stack = lines[starts[0] :] if starts else lines
    ends = [i for i, line in enumerate(stack) if i and not line.startswith("  ")]
    return [error + head, *stack[: ends[0] if ends else None][:STACK_LINES]]


def read_end(path: Path) -> str:
    """Read the end of a log of any size, of its last start; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(f"{files.STARTED_AGAIN}\n")[2]


def tail_of(text: str) -> list[str]:
    return text.splitlines()[-TAIL_LINES:]


def first_line(message: str) -> str:
    """Return the first line with text, cut to a readable length, without C++ source places."""
    lines = [line.strip() for line in CPP_PLACE.sub("", message).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]} ..."


def card(failure: Failure, run_dir: Path) -> list[str]:
    """Lay out a failure in lines: rank, error, place and log; then why and what to do, consequences, and the
    log's end."""
    lines = [f"failed: {first_line(failure.headline())}"]
    if failure.where:
        lines.append(f"  at {failure.where}" + (f" {failure.source}" if failure.source else ""))
    lines += [f"  log: {failure.log}"] if failure.log else []
    lines.append(f"  run: {run_dir}")
    if failure.same_error_ranks:
        lines.append(f"  same error: rank {', '.join(map(str, failure.same_error_ranks))}")
    lines += [f"  why: {line}" for line in failure.explanation]
    lines += [f"  fix: {line}" for line in failure.fix]
    lines += _memory_lines(failure)
    lines += [f"  consequence: {line}" for line in failure.consequences[:CONSEQUENCES_SHOWN]]
    if (more := len(failure.consequences) - CONSEQUENCES_SHOWN) > 0:
        lines.append(f"  consequence: {more} more ranks; all in summary.json")
    lines += [f"  | {line}" for line in failure.log_tail]
    return [safe(line) for line in lines]


def _memory_lines(failure: Failure) -> list[str]:
    """Name the peaks of the rank that failed, of the greatest other one, and of the control group."""
    peaks = failure.memory.peaks_gib if failure.memory else {}
    mine = f"rank {failure.rank}"
    others = sorted(peaks.keys() - {mine, GROUP}, key=lambda name: peaks[name], reverse=True)
    shown = [name for name in (mine, *others[:1], GROUP) if name in peaks]
    return [f"  memory: {name} peaked at {format_gib(peaks[name])}" for name in shown]


class MemoryWatch:
    """Notes the peak memory of each rank and of our control group, sampled once a second."""

    def __init__(self, root: Path = ROOT):
        self._root, self._next_s = root, 0.0
        self._kills_before = oom_kills(root)
        self._peaks_gib: dict[str, float] = {}

    def sample(self, workers: Mapping[int, psutil.Process]) -> None:
        """Note the resident memory of the workers (rank -> process) when the last note is a second old."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + SAMPLE_S
        used = {GROUP: group_bytes(self._root) or 0}
        for rank, worker in workers.items():
            with contextlib.suppress(psutil.Error):
                used[f"rank {rank}"] = worker.memory_info().rss
        for name, size in used.items():
            self._peaks_gib[name] = max(self._peaks_gib.get(name, 0.0), size / GIB)

    def facts(self) -> RunMemory:
        """Return the peaks so far, and the out-of-memory kills since the watch began."""
        before, after = self._kills_before, oom_kills(self._root)
        return RunMemory(
            peaks_gib={name: round(peak, 3) for name, peak in self._peaks_gib.items() if peak},
            oom_kills=after[0] - before[0] if before and after and before[1] == after[1] else None,
            counter=after[1] if after else None,
        )


def oom_kills(root: Path = ROOT) -> tuple[int, str] | None:
    """Read the number of processes killed for want of memory so far, and the counter's path: that of our
    control group (cgroup v2 memory.events, v1 memory.oom_control), else of the machine. None without any.

    A group counts its own processes whichever limit was hit, the machine's included (kernel documentation,
    admin-guide/cgroup-v2, memory.events).
    """
    places = [
        group / name
        for group in reversed(control_groups(root, "memory"))
        for name in ("memory.events", "memory.oom_control")
    ]
    for path in (*places, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1]), str(path)
    return None


def group_bytes(root: Path = ROOT) -> int | None:
    """Read the memory that our control group uses, file cache included; None where there is no such group."""
    for group in reversed(control_groups(root, "memory")):
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                return int((group / name).read_text())
    return None
