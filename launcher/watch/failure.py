"""Why a run failed: the first cause among what the ranks left behind."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_dp import record
from bert_dp.record import is_own_code
from bert_dp.record.models import Failure, kind_of_text
from launcher import results
from launcher.children import ending
from launcher.watch.heartbeats import Hang

TAIL_LINES = 20
TAIL_BYTES = 65_536  # of a log's end that is read
STACK_LINES = 15
MESSAGE_CHARS = 600
NO_CAUSE = "without recording an error"
CPP_PLACE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ")
RAISED = "Traceback (most recent call last):\n"
FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?', re.MULTILINE)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclasses.dataclass(frozen=True)
class RankExit:
    """A worker that has ended: its exit code, -N for signal N, None when its parent had already taken it."""

    rank: int
    code: int | None
    time_ns: int


def decide_cause(
    logs: Path, launcher_said: str, exits: Sequence[RankExit], unknown: Failure, *, hang: Hang | None
) -> Failure | None:
    """Find the cause of a run's end: the hang that it was ended for, else the earliest error of a rank.

    None if no rank recorded one. `unknown` has the log of a rank that ended before it opened its own."""
    if hang is not None:
        cause: Failure | None = Failure(
            kind="hang",
            rank=hang.rank,
            message=hang.message,
            log=str(hang.log) if hang.log else None,
            log_tail=list(hang.report),
            where=hang.where,
        )
    else:
        cause = first_cause(logs, launcher_said, exits)
    if cause is not None and (cause.log is None or not Path(cause.log).exists()):
        cause = cause.model_copy(update={"log": unknown.log, "log_tail": unknown.log_tail})
    return cause


def first_cause(logs: Path, launcher_said: str, exits: Sequence[RankExit] = ()) -> Failure | None:
    """Find the earliest error that a rank recorded.

    A rank that was killed by a signal recorded none: errors of other ranks are its consequences if they came
    later or only say that a peer has gone."""
    recorded = [results.find(path, Failure) for path in logs.glob("rank-*.error.json")]
    in_order = sorted((e for e in recorded if e), key=lambda e: (not e.issues, e.time_ns))
    errors = {e.rank: e for e in in_order if e.rank is not None}
    causes = [e for e in errors.values() if e.kind != "peer_gone"]
    silent = [d for d in exits if d.rank not in errors and d.code != 0]
    died_first = bool(silent) and all(silent[0].time_ns < e.time_ns for e in causes)
    end = _unrecorded_end(silent, launcher_said, set(errors))
    if end is not None and (not causes or died_first):
        return _of_a_silent_end(logs, *end, errors, silent)
    if not errors:
        return None
    return _of_an_error(logs, (causes or list(errors.values()))[0], errors, silent)


def of_a_disk(failure: Failure, run_dir: Path, error: OSError) -> Failure:
    """The failure of a run whose directory takes nothing more: the cause, unless another one is known."""
    why = os.strerror(error.errno or errno.EIO)
    refused = f"{why}: nothing can be written to {run_dir}"
    fix = "make room there; the same command then goes on from the newest checkpoint"
    if failure.kind == "disk":
        return failure.model_copy(update={"fix": [*failure.fix, fix]})
    if failure.kind != "no_cause":
        return failure.model_copy(update={"explanation": [*failure.explanation, refused]})
    reasons = [failure.headline(), *failure.explanation]
    facts = {"rank": None, "message": refused, "kind": "disk", "explanation": reasons, "fix": [fix]}
    return failure.model_copy(update=facts)


def _of_an_error(
    logs: Path, first: Failure, errors: Mapping[int, Failure], silent: Sequence[RankExit]
) -> Failure:
    same = {
        rank
        for rank, e in errors.items()
        if e is not first
        and (e.kind == "peer_gone") == (first.kind == "peer_gone")
        and (e.error_type, e.where) == (first.error_type, first.where)
    }
    path = logs / f"rank-{first.rank}.log"
    facts = {
        "rank": None if first.agreed else first.rank,
        "log": str(path),
        "log_tail": tail_of(read_end(path)),
        "same_error_ranks": sorted(same),
        "consequences": _consequences(errors, silent, {first.rank, *same}),
    }
    return first.model_copy(update=facts)


def _of_a_silent_end(
    logs: Path, rank: int, code: int | None, errors: Mapping[int, Failure], silent: Sequence[RankExit]
) -> Failure:
    """The failure of a rank that ended without a record."""
    path = logs / f"rank-{rank}.log"
    text = read_end(path)
    if code == 1 and (raised := raised_last(text)) is not None:  # error.json could not be written
        message, where, source = raised
        return Failure(
            kind=kind_of_text(message),
            rank=rank,
            message=message,
            where=where,
            source=source,
            log=str(path),
            log_tail=tail_of(text),
            consequences=_consequences(errors, silent, {rank}),
        )
    stack = crash_stack(text) if code is not None and -code in CRASHES else []
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', "\n".join(stack))
    frame = next((f for f in frames if is_own_code(f[0])), frames[0] if frames else None)
    return Failure(
        kind="killed" if code is not None and code < 0 else "no_cause",
        rank=rank,
        message=f"ended {NO_CAUSE}" if code is None else ending(code, NO_CAUSE),
        where=f"{frame[0]}:{frame[1]}" if frame else None,
        source=f"in {frame[2]}" if frame else None,
        killed_by=-code if code is not None and code < 0 else None,
        log=str(path),
        log_tail=stack or tail_of(text),
        consequences=_consequences(errors, silent, {rank}),
    )


def _consequences(
    errors: Mapping[int, Failure], silent: Sequence[RankExit], causes: set[int | None]
) -> list[str]:
    """Describe the ends of the other ranks. SIGTERM is how the launcher ends those that are left."""
    lines = {rank: f"rank {rank}: {first_line(e.message).partition('. ')[0]}" for rank, e in errors.items()}
    for rank_exit in silent:
        if rank_exit.code is not None and rank_exit.code not in (-signal.SIGTERM, 1):
            lines.setdefault(rank_exit.rank, f"rank {rank_exit.rank}: {ending(rank_exit.code, '')}")
    return [lines[rank] for rank in sorted(lines) if rank not in causes]


def _unrecorded_end(
    silent: Sequence[RankExit], launcher_said: str, recorded: set[int]
) -> tuple[int, int | None] | None:
    """Rank and exit code (None = not known) of the first that ended without a record: as we saw it, else from
    the launcher's report, in which deepspeed does not name the rank."""
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


def crash_stack(text: str) -> list[str]:
    """What faulthandler wrote last: the error and the stack of the thread that crashed."""
    _, error, rest = text.rpartition("Fatal Python error: ")
    if not error:
        return []
    head, *lines = rest.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
    stack = lines[starts[0] :] if starts else lines
    ends = [i for i, line in enumerate(stack) if i and not line.startswith("  ")]
    return [error + head, *stack[: ends[0] if ends else None][:STACK_LINES]]


def raised_last(text: str) -> tuple[str, str | None, str | None] | None:
    """The exception of the last traceback, its place in our code or the user's, and the code there."""
    _, raised, rest = text.rpartition(RAISED)
    message = next((line for line in rest.splitlines() if line.strip() and not line[0].isspace()), None)
    if not raised or message is None:
        return None
    frames = FRAME.findall(rest)
    frame = next((f for f in reversed(frames) if is_own_code(f[0])), frames[-1] if frames else None)
    if frame is None:
        return message, None, None
    path, line, function, code = frame
    return message, f"{path}:{line}", f"in {function}: {code}" if code else f"in {function}"


def read_end(path: Path) -> str:
    """The end of a log of any size, of its last start; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(f"{record.STARTED_AGAIN}\n")[2]


def tail_of(text: str) -> list[str]:
    return text.splitlines()[-TAIL_LINES:]


def first_line(message: str) -> str:
    """The first line that says something, cut to a readable length, without C++ source places."""
    lines = [line.strip() for line in CPP_PLACE.sub("", message).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]} ..."
