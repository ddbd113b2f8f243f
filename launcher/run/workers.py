"""The workers of a run as processes: who is there, how each ended, and the end of all of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil

from launcher.run.starters import WORKER
from launcher.watch.failure import RankExit

KILLED_S = 10.0  # that the end of a killed process may take


class Workers:
    """The workers as they come and go.

    A pidfd wakes us the moment one ends: only while it is a zombie can anyone but its parent read how.
    """

    def __init__(self, process: subprocess.Popen[bytes], size: int):
        self._process, self._size = process, size
        self._poller = select.poll()
        self._present: dict[int, tuple[psutil.Process, int]] = {}  # pidfd -> worker, rank
        self._ended: set[psutil.Process] = set()
        self.exits: list[RankExit] = []

    def present(self) -> list[psutil.Process]:
        return [worker for worker, _ in self._present.values()]

    def by_rank(self) -> dict[int, psutil.Process]:
        return {rank: worker for worker, rank in self._present.values()}

    def wait(self, seconds: float) -> None:
        """Up to `seconds`, less when a worker ends."""
        if len(self._present) < self._size:
            self._find()
        for descriptor, _ in self._poller.poll(seconds * 1000):
            worker, rank = self._present.pop(descriptor)
            self._ended.add(worker)
            self.exits.append(RankExit(rank, _exit_code(worker.pid), time.monotonic_ns()))
            self._poller.unregister(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._present:
            os.close(descriptor)

    def _find(self) -> None:
        seen = {*self.present(), *self._ended}
        for child in _tree(self._process):
            if child in seen or (rank := _rank(child)) is None:
                continue
            with contextlib.suppress(OSError):  # it has ended in this moment
                descriptor = os.pidfd_open(child.pid)
                self._present[descriptor] = child, rank
                self._poller.register(descriptor, select.POLLIN)


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All processes below the launcher's."""
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


def send(worker: psutil.Process, number: int) -> None:
    """Send a signal to a worker, which may have ended already."""
    with contextlib.suppress(psutil.Error):
        worker.send_signal(number)  # psutil checks that the pid is still the same process


def kill_tree(process: subprocess.Popen[bytes], workers: Workers) -> None:
    """Kill the launcher and every worker, and wait for their end; a killed launcher may have left workers."""
    tree = {*_tree(process), *workers.present()}
    with contextlib.suppress(psutil.NoSuchProcess):
        tree.add(psutil.Process(process.pid))
    for member in tree:
        send(member, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILLED_S
    while any(_runs(member) for member in tree) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers.close()


def _runs(process: psutil.Process) -> bool:
    """False of a zombie: an orphan's end is read by the system's first process, which may take seconds."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
