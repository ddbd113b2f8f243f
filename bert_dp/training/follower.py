"""Start the process that displays and summarises a run that bert-dp's launcher did not start. Torch-free."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from bert_dp import files
from bert_dp.config import Config, dump_config
from bert_dp.training.process import World

MODULE = "launcher.run.follow"  # runs as a separate process, so that its errors cannot affect the rank
READY_S, CLOSE_S = 60.0, 60.0


class Follower:
    """Context manager for rank 0. `start` creates a process that shows the log lines. When rank 0 leaves the
    context or is killed, the process completes summary.json, writes report.html and shows the result."""

    def __init__(self, run_dir: Path, world: World):
        self._arguments = [str(run_dir), str(world.size), str(world.local_size)]
        self._run_dir = run_dir
        self._socket, self._child_socket = socket.socketpair()
        self._cores = os.sched_getaffinity(0)  # read before this rank is bound to a subset of them
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def start(self, config: Config) -> None:
        """Write config.yaml and remove the error files and summary left by an earlier start. Then start
        the process and wait until it is ready. The process inherits the current stdout. Raises OSError."""
        logs = self._run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for stale in (*logs.glob("rank-*.error.json"), self._run_dir / "summary.json"):
            stale.unlink(missing_ok=True)
        files.write_text(self._run_dir / "config.yaml", dump_config(config))
        # block the signals that a batch system sends to all processes of a job; the child inherits the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, files.STOP_SIGNALS)
        cores = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self._cores)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *self._arguments],
                stdin=self._child_socket.fileno(),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, cores)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._child_socket.close()
        self._socket.settimeout(READY_S)
        with contextlib.suppress(OSError):
            self._socket.recv(1)

    def __exit__(self, *_: object) -> None:
        self._child_socket.close()
        self._socket.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
