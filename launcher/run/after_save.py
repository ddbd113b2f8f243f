"""Run the user's command with the path of each new checkpoint (`train --after-save`)."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bert_dp import files
from bert_dp.files.reaper import child_environment, describe_exit_code
from launcher.log import Log
from launcher.run.processes import POLL_S, stop_signals

LOG = "logs/after-save.log"


class AfterSave:
    """Context manager that runs a command on new checkpoints. `poll` looks for them and must be called often.
    If several checkpoints are saved while the command runs, it next runs on the newest of them only."""

    def __init__(self, command: Sequence[str], run_dir: Path, log: Log):
        """`command`: program and arguments; if empty, nothing is run. `log`: function that prints a line."""
        self._command, self._run_dir, self._log = command, run_dir, log
        self._passed = self._newest()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the command has run on the newest checkpoint. A stop signal kills the command."""
        with stop_signals() as received:
            self.poll()
            while self._process is not None and not received:
                time.sleep(POLL_S)
                self.poll()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._report(self._process.wait())

    def poll(self) -> None:
        """Report a failed command. If no command is running, start one for a new checkpoint, if any."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._report(code)
        if self._process is not None or not self._command:
            return
        if (newest := self._newest()) is not None and newest != self._passed:
            self._passed = newest
            try:
                with (self._run_dir / LOG).open("ab") as output:
                    self._process = subprocess.Popen(
                        [*self._command, str(newest[0])],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # Ctrl-C in the terminal must not stop the command
                        env={**os.environ, **child_environment()},
                    )
            except OSError as error:
                self._log(f"warning: the --after-save command cannot start: {error}")

    def _newest(self) -> tuple[Path, int] | None:
        """Return the newest checkpoint and its mtime (ns), or None. Saving a step again changes the mtime."""
        with contextlib.suppress(OSError):
            for path in files.list_checkpoints(self._run_dir / "checkpoints"):
                return path, path.stat().st_mtime_ns
        return None

    def _report(self, code: int) -> None:
        if code and self._passed is not None:
            problem = f"{self._passed[0].name}: {describe_exit_code(code, '')}"
            self._log(f"warning: the --after-save command failed for {problem}; see {self._run_dir / LOG}")
