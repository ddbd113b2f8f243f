"""Why a run failed: the first cause among what the ranks left behind."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from bert_dp import record
from bert_dp.record import is_own_code
from bert_dp.record.models import FailureKind, RankError, kind_of_text
from launcher import results
from launcher.children import ending
from launcher.watch.heartbeats import Hang
from launcher.watch.memory import MemoryFacts

TAIL_LINES = 20
TAIL_BYTES = 65_536  # of a log's end that is read
STACK_LINES = 15
MESSAGE_CHARS = 600
ENDED_TOGETHER = "RunFailed"  # all ranks have ended the run, one has recorded why
NO_CAUSE = "without recording an error"
CPP_PLACE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ")
RAISED = "Traceback (most recent call last):\n"
FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?', re.MULTILINE)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclasses.dataclass(frozen=True)
class Departure:
    """A worker that has ended: its exit code, -N for signal N, None when its parent had already taken it."""

    rank: int
    code: int | None
    time_ns: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first cause of a failed run, and what followed from it."""

    rank: int | None
    message: str
    """The exception or the end of the process; no more than is known."""
    log: Path | None = None
    tail: tuple[str, ...] = ()
    """Last lines of the log, or the stack that a crash left there."""
    where: str | None = None
    """file:line of our code or the user's."""
    source: str | None = None
    """The code of that line, with its function."""
    bad_input: tuple[str, ...] = ()
    killed_by: int | None = None
    """The signal that ended the process."""
    alike: tuple[int, ...] = ()
    """Other ranks that raised the same at the same line by themselves."""
    consequences: tuple[str, ...] = ()
    """One line per rank that failed because this one did."""
    explanation: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    memory: MemoryFacts | None = None
    """Where memory has to do with it."""
    agreed: bool = False
    """Whether the ranks ended the run together, by a rule; the same would end it again."""
    kind: FailureKind = "error"

    @property
    def killed(self) -> bool:
        """Whether a signal ended the rank."""
        return self.killed_by is not None

    def headline(self) -> str:
        """The cause in one piece."""
        who = "" if self.rank is None else f"rank {self.rank}: "
        return who + self.message


def decide_cause(
    logs: Path, launcher_said: str, departures: Sequence[Departure], unknown: Failure, *, hang: Hang | None
) -> Failure | None:
    """Find the cause of a run's end: the hang that it was ended for, else the earliest error of a rank.

    None if no rank recorded one. `unknown` has the log of a rank that ended before it opened its own."""
    if hang is not None:
        cause: Failure | None = Failure(
            hang.rank, hang.message, hang.log, hang.report, hang.where, kind="hang"
        )
    else:
        cause = first_cause(logs, launcher_said, departures)
    if cause is not None and (cause.log is None or not cause.log.exists()):
        cause = dataclasses.replace(cause, log=unknown.log, tail=unknown.tail)
    return cause


def first_cause(logs: Path, launcher_said: str, departures: Sequence[Departure] = ()) -> Failure | None:
    """The earliest error that a rank recorded. A rank that died by a signal left none: the errors of the
    others are its consequences when they came later or only say that a peer has gone."""
    recorded_errors = [results.find(path, RankError) for path in logs.glob("rank-*.error.json")]
    errors = sorted((e for e in recorded_errors if e), key=lambda e: (e.bad_input is None, e.time_ns))
    causes = [e for e in errors if e.failure_kind != "peer_gone"]
    recorded = {e.rank for e in errors}
    silent = [d for d in departures if d.rank not in recorded and d.code != 0]
    died_first = bool(silent) and all(silent[0].time_ns < e.time_ns for e in causes)
    end = _unrecorded_end(silent, launcher_said, recorded)
    if end is not None and (not causes or died_first):
        return _of_a_silent_end(logs, *end, errors, silent)
    if not errors:
        return None
    return _of_an_error(logs, (causes or errors)[0], errors, silent)


def of_a_disk(failure: Failure, run_dir: Path, error: OSError) -> Failure:
    """The failure of a run whose directory takes nothing more: the cause, unless another one is known."""
    why = os.strerror(error.errno or errno.EIO)
    refused = f"{why}: nothing can be written to {run_dir}"
    fix = "make room there; the same command then goes on from the newest checkpoint"
    if failure.kind == "disk":
        return dataclasses.replace(failure, fix=(*failure.fix, fix))
    if failure.kind != "no_cause":
        return dataclasses.replace(failure, explanation=(*failure.explanation, refused))
    return dataclasses.replace(
        failure,
        rank=None,
        message=refused,
        kind="disk",
        explanation=(failure.headline(), *failure.explanation),
        fix=(fix,),
    )


def _of_an_error(
    logs: Path, first: RankError, errors: Sequence[RankError], silent: Sequence[Departure]
) -> Failure:
    rank = first.rank
    alike = {
        e.rank
        for e in errors
        if (e.failure_kind == "peer_gone") == (first.failure_kind == "peer_gone")
        and (e.type, e.where) == (first.type, first.where)
    } - {rank}
    source = f"in {first.function}: {first.source}" if first.source else None
    path = logs / f"rank-{rank}.log"
    together = first.type == ENDED_TOGETHER
    return Failure(
        None if together else rank,
        first.message if together else _message(first),
        path,
        tail_of(read_end(path)),
        first.where,
        source,
        kind=first.failure_kind,
        bad_input=tuple(first.bad_input or ()),
        alike=tuple(sorted(alike)),
        consequences=_consequences(errors, silent, {rank, *alike}),
        agreed=together,
    )


def _of_a_silent_end(
    logs: Path, rank: int, code: int | None, errors: Sequence[RankError], silent: Sequence[Departure]
) -> Failure:
    """The failure of a rank that ended without a record."""
    path = logs / f"rank-{rank}.log"
    text = read_end(path)
    if code == 1 and (raised := raised_last(text)) is not None:  # error.json could not be written
        message, where, source = raised
        return Failure(
            rank,
            message,
            path,
            tail_of(text),
            where,
            source,
            kind=kind_of_text(message),
            consequences=_consequences(errors, silent, {rank}),
        )
    stack = crash_stack(text) if code is not None and -code in CRASHES else ()
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', "\n".join(stack))
    frame = next((f for f in frames if is_own_code(f[0])), frames[0] if frames else None)
    return Failure(
        rank,
        f"ended {NO_CAUSE}" if code is None else ending(code, NO_CAUSE),
        path,
        stack or tail_of(text),
        where=f"{frame[0]}:{frame[1]}" if frame else None,
        source=f"in {frame[2]}" if frame else None,
        killed_by=-code if code is not None and code < 0 else None,
        kind="killed" if code is not None and code < 0 else "no_cause",
        consequences=_consequences(errors, silent, {rank}),
    )


def _message(error: RankError) -> str:
    return f"{error.type}: {error.message}" if error.message else error.type


def _consequences(
    errors: Sequence[RankError], silent: Sequence[Departure], causes: set[int]
) -> tuple[str, ...]:
    """What the other ranks ended with. SIGTERM is only the launcher's way to end those that are left."""
    lines = {e.rank: f"rank {e.rank}: {first_line(_message(e)).partition('. ')[0]}" for e in errors}
    for departure in silent:
        if departure.code is not None and departure.code not in (-signal.SIGTERM, 1):
            lines.setdefault(departure.rank, f"rank {departure.rank}: {ending(departure.code, '')}")
    return tuple(lines[rank] for rank in sorted(lines) if rank not in causes)


def _unrecorded_end(
    silent: Sequence[Departure], launcher_said: str, recorded: set[int]
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


def crash_stack(text: str) -> tuple[str, ...]:
    """What faulthandler wrote last: the error and the stack of the thread that crashed."""
    _, error, rest = text.rpartition("Fatal Python error: ")
    if not error:
        return ()
    head, *lines = rest.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
    stack = lines[starts[0] :] if starts else lines
    ends = [i for i, line in enumerate(stack) if i and not line.startswith("  ")]
    return (error + head, *stack[: ends[0] if ends else None][:STACK_LINES])


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


def tail_of(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines()[-TAIL_LINES:])


def first_line(message: str) -> str:
    """The first line that says something, cut to a readable length, without C++ source places."""
    lines = [line.strip() for line in CPP_PLACE.sub("", message).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]} ..."
