"""Start one worker per rank; follow them, pass signals on, find the first cause."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bert_dp import record
from bert_dp.record import LAUNCHER_PID, LAUNCHER_START, start_ticks
from launcher.redact import scrub, secrets
from launcher.starters import WORKER, start_command, start_environment

DEVNULL = subprocess.DEVNULL
POLL_S = 0.2
KILL_AFTER_FAILURE_S = 5.0
TAIL_LINES = 20
PEER_GONE = ("closed by peer", "reset by peer", "ncclRemoteError")  # a rank only saw another one go
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first cause of a failed run."""

    rank: int | None
    message: str
    where: str | None
    log: Path | None
    tail: tuple[str, ...]
    bad_input: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """Whether a signal ended the rank."""
        return self.message.startswith("killed by signal")

    def headline(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        return who + self.message


@dataclasses.dataclass(frozen=True)
class RunResult:
    exit_code: int
    failure: Failure | None


@dataclasses.dataclass(frozen=True)
class Departure:
    """A worker that has ended: its exit code, -N for signal N, None when its parent had already taken it."""

    rank: int
    code: int | None
    time_ns: int


class Roll:
    """The workers as they come and go.

    A pidfd wakes us the moment one ends: only while it is a zombie can anyone but its parent read how.
    """

    def __init__(self, process: subprocess.Popen[bytes], size: int):
        self._process, self._size = process, size
        self._poller = select.poll()
        self._present: dict[int, tuple[psutil.Process, int]] = {}  # pidfd -> worker, rank
        self._ended: set[psutil.Process] = set()
        self.departures: list[Departure] = []

    def present(self) -> list[psutil.Process]:
        return [worker for worker, _ in self._present.values()]

    def wait(self, seconds: float) -> None:
        """Up to `seconds`, less when a worker ends."""
        if len(self._present) < self._size:
            self._find()
        for descriptor, _ in self._poller.poll(seconds * 1000):
            worker, rank = self._present.pop(descriptor)
            self._ended.add(worker)
            self.departures.append(Departure(rank, _exit_code(worker.pid), time.monotonic_ns()))
            self._poller.unregister(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._present:
            os.close(descriptor)

    def _find(self) -> None:
        known = {*self.present(), *self._ended}
        for child in _tree(self._process):
            if child in known or (rank := _rank(child)) is None:
                continue
            with contextlib.suppress(OSError):  # it has ended in this moment
                descriptor = os.pidfd_open(child.pid)
                self._present[descriptor] = child, rank
                self._poller.register(descriptor, select.POLLIN)


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What the launcher has started, and what that has."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _rank(child: psutil.Process) -> int | None:
    """The rank of a worker; None for a process in between, which has the worker's command in its own."""
    try:
        command = child.cmdline()
        module = command[command.index("-m") + 1] if "-m" in command[:-1] else None
        return int(child.environ().get("RANK", "0")) if module == WORKER else None
    except (psutil.Error, ValueError):
        return None


def _exit_code(pid: int) -> int | None:
    """How a zombie ended, as proc_pid_stat(5) has it in its last field."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    status = int(fields[49])
    return -(status & 127) if status & 127 else status >> 8


def run(
    run_dir: Path, nproc: int, resume: str, on_poll: Callable[[], None], *, launcher: str = "torchrun",
    on_gpu: bool = False, grace_s: float = 300.0,
) -> RunResult:  # fmt: skip
    """Train RUN/config.yaml on `nproc` ranks of this node, started by `launcher`, and return how it ended.

    `on_poll` is called several times a second. The first stop signal is passed to every worker, which
    checkpoints at its next step and ends; the second, or `grace_s` seconds, kills. Whatever happens, no
    process of the run is left. Writes summary.json when the workers could not.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (*logs.glob("rank-*.error.json"), run_dir / "summary.json"):
        stale.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bert-dp-"))
    worker = [str(run_dir / "config.yaml"), "--resume", resume]
    launcher_log = logs / f"{launcher}.log"
    offset = launcher_log.stat().st_size if launcher_log.exists() else 0
    pending: list[int] = []
    previous = {number: signal.signal(number, lambda n, _: pending.append(n)) for number in STOP_SIGNALS}
    try:
        with launcher_log.open("ab") as log:
            process = subprocess.Popen(
                start_command(launcher, nproc, scratch, worker),
                env=start_environment(launcher, run_dir, scratch, nproc, on_gpu=on_gpu, grace_s=grace_s),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
            )  # fmt: skip
        roll = Roll(process, nproc)
        try:
            _follow(process, roll, run_dir, pending, on_poll, grace_s)
        finally:
            _kill_tree(process, roll)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        shutil.rmtree(scratch, ignore_errors=True)
        for problem in scrub(run_dir, secrets(sys.argv)):  # before anything is read from there and shown
            sys.stderr.write(f"warning: {problem}\n")
    said = launcher_log.read_bytes()[offset:].decode("utf-8", "replace")
    how = _ended(process.returncode, "and no summary")
    unknown = Failure(None, f"{launcher}: {how}", None, launcher_log, _tail(said), ())
    return _result(run_dir, first_cause(logs, said, roll.departures), unknown, pending)


def _follow(
    process: subprocess.Popen[bytes],
    roll: Roll,
    run_dir: Path,
    pending: list[int],
    on_poll: Callable[[], None],
    grace_s: float,
) -> None:
    """Until the launcher ends, a second signal comes, or the time to stop is over.

    A batch system may signal every process of a job, and deepspeed's runner dies of it at once: its workers
    then still have their time to save.
    """
    signalled: set[psutil.Process] = set()
    deadline: float | None = None
    while (ended := process.poll()) is None or (roll.present() and -ended in STOP_SIGNALS):
        if ended is not None and not pending:
            pending.append(-ended)
        if len(pending) >= 2:
            return
        if pending:
            deadline = deadline or time.monotonic() + grace_s
            for worker in roll.present():
                if worker not in signalled:  # it may have started after the signal came
                    signalled.add(worker)
                    _signal(worker, pending[0])
        if deadline is None and _has_failed(run_dir, roll):
            deadline = time.monotonic() + KILL_AFTER_FAILURE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        on_poll()
        roll.wait(POLL_S)
    on_poll()


def _has_failed(run_dir: Path, roll: Roll) -> bool:
    """A rank has recorded an error, or has ended before the summary was written."""
    if any((run_dir / "logs").glob("rank-*.error.json")):
        return True
    return bool(roll.departures) and not (run_dir / "summary.json").exists()


def _signal(worker: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        worker.send_signal(number)  # psutil checks that the pid is still the same process


def _kill_tree(process: subprocess.Popen[bytes], roll: Roll) -> None:
    """Also the workers that a launcher which was killed has left behind."""
    tree = {*_tree(process), *roll.present()}
    with contextlib.suppress(psutil.NoSuchProcess):
        tree.add(psutil.Process(process.pid))
    for member in tree:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(tree, timeout=10)
    process.wait()
    roll.close()


def _result(run_dir: Path, failure: Failure | None, unknown: Failure, pending: list[int]) -> RunResult:
    """`unknown`: what is told when no rank's end explains the run's."""
    summary = record.read_json(run_dir / "summary.json")
    if summary is not None and summary.get("status") in ("done", "stopped"):  # written after all was saved
        return RunResult(int(summary["exit_code"]), None)
    if failure is not None and failure.bad_input:
        return RunResult(2, failure)
    code = 128 + pending[0] if pending else 1
    if pending:
        name = signal.Signals(pending[0]).name
        what = f"{name}: stopped before this run's next checkpoint"
        failure = dataclasses.replace(unknown, message=what, tail=())
    elif failure is None:
        failure = unknown
    elif failure.log is None or not failure.log.exists():  # the rank ended before it had a log of its own
        failure = dataclasses.replace(failure, log=unknown.log, tail=unknown.tail)
    lines = list(record.read_lines(run_dir / "metrics.jsonl"))
    facts = {"status": "failed", "exit_code": code, "cause": failure.headline(), "where": failure.where,
             "signal": pending[0] if pending else None, "step": lines[-1]["step"] if lines else 0,
             "schema_version": record.SCHEMA_VERSION}  # fmt: skip
    with contextlib.suppress(OSError):  # a full disk must not hide the cause
        record.write_json(run_dir / "summary.json", facts)
    return RunResult(code, failure)


def first_cause(logs: Path, launcher_said: str, departures: Sequence[Departure] = ()) -> Failure | None:
    """The earliest error that a rank recorded. A rank that died by a signal left none: the errors of the
    others are its consequences when they came later or only say that a peer has gone."""
    found = [record.read_json(path) for path in logs.glob("rank-*.error.json")]
    errors = sorted((e for e in found if e), key=lambda e: (e["bad_input"] is None, e["time_ns"]))
    causes = [e for e in errors if not any(text in e["message"] for text in PEER_GONE)]
    recorded = {e["rank"] for e in errors}
    silent = [d for d in departures if d.rank not in recorded and d.code != 0]
    died_first = bool(silent) and all(silent[0].time_ns < e["time_ns"] for e in causes)
    if not causes or died_first:
        how = _silent_end(silent) or _reported_end(launcher_said, recorded, silent)
        if how is not None:
            return Failure(*how, None, *_log_tail(logs, how[0]), ())
    if not errors:
        return None
    first = (causes or errors)[0]
    rank = int(first["rank"])
    return Failure(
        rank, f"{first['type']}: {first['message']}", first["where"], *_log_tail(logs, rank),
        tuple(first["bad_input"] or ()),
    )  # fmt: skip


def _log_tail(logs: Path, rank: int) -> tuple[Path, tuple[str, ...]]:
    path = logs / f"rank-{rank}.log"
    if not path.exists():
        return path, ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        return path, _tail(file.read().decode("utf-8", "replace"))


def _silent_end(silent: Sequence[Departure]) -> tuple[int, str] | None:
    """(rank, how) of the first rank that ended without a record, if we saw how."""
    if not silent or silent[0].code is None:
        return None
    return silent[0].rank, _ended(silent[0].code, "and left no cause")


def _reported_end(text: str, recorded: set[int], silent: Sequence[Departure]) -> tuple[int, str] | None:
    """The same from the launcher's report; deepspeed's does not name the rank."""
    for rank, number in re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+)", text):
        if int(rank) not in recorded:
            return int(rank), _ended(-int(number), "")
    if not silent:
        return None
    number = re.search(r"exits with return code = -(\d+)", text)
    return silent[0].rank, _ended(-int(number[1]), "") if number else "ended and left no cause"


def _ended(code: int, without: str) -> str:
    """In words: an exit code, or -N for signal N."""
    if code >= 0:
        return f"ended with exit code {code} {without}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name})"


def _tail(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines()[-TAIL_LINES:])


def run_module(module: str, arguments: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """`python -m module` to its end; for the verbs that need torch or the data room outside a run."""
    mine = {LAUNCHER_PID: str(os.getpid()), LAUNCHER_START: start_ticks(os.getpid())}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, text=True, check=False, env={**os.environ, **mine}, **kwargs)


def capture_json(module: str, arguments: list[str]) -> tuple[int, Any]:
    """Exit code and the JSON a module printed; its stderr (progress, errors) goes straight to ours."""
    done = run_module(module, arguments, stdout=subprocess.PIPE)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, None
