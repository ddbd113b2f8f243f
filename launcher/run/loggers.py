"""The child that sends a run's records to services: started, listened to, and ended soon after the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bert_dp.record import start_ticks
from launcher import results
from launcher.children import ending, module_command
from launcher.log import Log
from launcher.loggers import INCOMPLETE, STATE
from launcher.results import LoggerRun
from launcher.run.processes import stop_signals
from launcher.run.reaper import marked

GRACE_S = 9.0
"""After the end of the run, for what is not sent yet."""
OWN_GRACE_S = 8.0
"""The child's, which then still says who was late."""
HELPERS_S = 1.0
"""For what a service has started for itself, when the child has ended."""
POLL_S = 0.02
MARK = "BERT_DP_LOGGERS"  # in the environment of the child and of whatever a service starts


class Loggers:
    """A context around a run: sends its records to services from a process of its own, outside the
    terminal's process group. Nothing that happens to it reaches the run."""

    def __init__(self, run_dir: Path, names: Sequence[str], log: Log, *, wait: bool = False):
        """`log` takes its warnings. `wait`: at the end until all is sent, however long."""
        self._run_dir, self._names, self._log, self._wait = run_dir, names, log, wait
        self._mark = f"{MARK}={os.getpid()}-{start_ticks(os.getpid())}-{time.monotonic_ns()}"
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.exit_code = 0
        """After the end: 0 = all was sent; 1 = not all; 128 + the signal that stopped the wait."""

    def __enter__(self) -> Loggers:
        if self._names:
            name, _, value = self._mark.partition("=")
            command = [*module_command("launcher.loggers"), str(self._run_dir)]
            try:
                self._child = subprocess.Popen(
                    [*command, "inf" if self._wait else str(OWN_GRACE_S), *self._names],
                    env={**os.environ, name: value, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # a terminal's Ctrl-C ends the run, not this
                )
            except OSError as error:
                self._log(f"warning: nothing is sent to {', '.join(self._names)} ({error.strerror})")
                self.exit_code = 1
            else:
                os.set_blocking(self._out(self._child), False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._end(self._child)

    def poll(self) -> None:
        """Pass its warnings on; several times a second."""
        if self._child is None:
            return
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._out(self._child), 2**16):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._log(f"warning: {line.decode('utf-8', 'replace')}")

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """Close its input, wait, and leave nothing behind. A stop signal cuts the wait short."""
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        deadline = float("inf") if self._wait else time.monotonic() + GRACE_S
        with stop_signals() as came:
            while child.poll() is None and not came and time.monotonic() < deadline:
                self.poll()
                time.sleep(POLL_S)
        if child.poll() is None:
            child.kill()
        code = child.wait()
        self.poll()
        child.stdout.close()
        self._end_helpers()
        if code not in (0, INCOMPLETE):
            services = ", ".join(self._names)
            how = ending(code, "without a word")
            self._log(f"warning: not all was sent to {services}: their process ended ({how})")
        self.exit_code = 128 + came[0] if came else min(1, abs(code))

    def _end_helpers(self) -> None:
        """Kill what a service has started for itself, after a moment to tidy up."""
        deadline = time.monotonic() + HELPERS_S
        while (left := marked([self._mark])) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _out(child: subprocess.Popen[bytes]) -> int:
        assert child.stdout is not None
        return child.stdout.fileno()


def send_run(run_dir: Path, names: Sequence[str], log: Log) -> int:
    """What a run has left, to services that it was not sent to, or not whole. Returns an exit code: 0 when
    all was sent, 1 when not, 128 + signal."""
    home = run_dir.resolve()
    with Loggers(home, names, log, wait=True) as loggers:
        pass
    for name in names:
        state = results.find(home / name / STATE, LoggerRun)
        if state is not None:
            log(f"{name}: {state.where}")
    return loggers.exit_code
