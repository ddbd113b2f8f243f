"""Save checkpoints beside training, in one thread of rank 0.

The long parts of a save (safetensors from 0.8 on, SHA-256, fsync, the look for NaN) leave Python's lock to
others.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_dp import checkpoint
from bert_dp.config import CheckpointConfig
from bert_dp.lines import WriteErrors
from bert_dp.parallel import State
from bert_dp.record import list_checkpoints
from bert_dp.record.models import Failure, FailureKind, kind_of_error

FULL = (errno.ENOSPC, errno.EDQUOT)


class NotFiniteError(ValueError):
    """Raised for a state that must not become a checkpoint."""

    failure_kind: FailureKind = "not_finite"


class AsyncCheckpointer:
    """Writes checkpoints one at a time; every rank has one, only rank 0's is given states.

    A save that fails leaves those before it and is counted; `abort_reason` then tells whether the run ends.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        *,
        log_rank0: Callable[[str], None],
        saved_step: int | None,
        write_errors: WriteErrors,
    ):
        self._folder, self._settings, self._log = folder, settings, log_rank0
        self._write_errors = write_errors
        self.saved_step = saved_step
        """Step of the newest checkpoint that is safe in `folder`; None without one."""
        self.failed_saves = 0
        self.stall_s = 0.0
        """Seconds that training stood still for saving: gathering, and waiting for an earlier write."""
        self.abort_reason: Failure | None = None
        """The first failed save, where the policy is to stop the run."""
        self.problem: Failure | None = None
        """The last save, if it failed."""
        self._reason = ""  # of the last save that failed, since the last good one
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._trusted: set[Path] = set()

    @property
    def newest(self) -> Path | None:
        if self.saved_step is None or self._settings.keep == 0:
            return None
        return checkpoint.path_of(self._folder, self.saved_step)

    def save(self, step: int, gather: Callable[[], State | None], metadata: dict[str, Any]) -> None:
        """Gather the state and begin to write it. Collective, as `gather` is.

        An earlier write is waited for first, so the host never holds two states. With `keep` 0 nothing is
        gathered or written, and the step counts as safe.
        """
        if self._settings.keep == 0:
            self.saved_step = step
            return
        self.wait()
        start = time.perf_counter()
        state = gather()
        if state is not None:
            self._thread = threading.Thread(
                target=self._write, args=(step, state, metadata), name="checkpoint-writer"
            )
            self._thread.start()
        self.stall_s += time.perf_counter() - start

    def wait(self) -> int | None:
        """Wait for the write; return the newest step that is safe. Raises unexpected errors of the writer."""
        self.close()
        if self._error is not None:
            raise self._error
        return self.saved_step

    def close(self) -> None:
        """Wait for the write."""
        if self._thread is not None:
            start = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.stall_s += time.perf_counter() - start

    def _write(self, step: int, state: State, metadata: dict[str, Any]) -> None:
        try:
            name = checkpoint.first_not_finite(state)
            if name is not None:
                raise NotFiniteError(f"{name} holds a value that is not finite")
            self._folder.mkdir(exist_ok=True)
            path = self._write_or_make_room(step, state, metadata)
        except (OSError, NotFiniteError) as error:
            self._failed(step, error)
        except BaseException as error:
            self._error = error
        else:
            self._trusted.add(path)
            self.saved_step, self.problem, self._reason = step, None, ""

    def _failed(self, step: int, error: OSError | NotFiniteError) -> None:
        """Count a failed save; warn of saves in a row that fail for one reason once."""
        self.failed_saves += 1
        before, self._reason = self._reason, str(error)
        if isinstance(error, OSError):
            self._write_errors.note(error)
            self._reason = os.strerror(error.errno or errno.EIO)
        name = checkpoint.path_of(self._folder, step).name
        message = f"{name} could not be saved: {error}; {self._newest_good()}"
        self.problem = Failure(message=message, kind=kind_of_error(error))
        if self._settings.on_error == "stop":
            self.abort_reason = self.abort_reason or self.problem
        if self._reason != before:
            self._log(f"warning: {message}")

    def _write_or_make_room(self, step: int, state: State, metadata: dict[str, Any]) -> Path:
        keep = self._settings.keep
        try:
            return checkpoint.save(self._folder, step, state, metadata, keep, self._trusted)
        except OSError as error:
            if error.errno not in FULL:
                raise
            checkpoint.prune(self._folder, min(keep, 2), self._trusted)
            return checkpoint.save(self._folder, step, state, metadata, keep, self._trusted)

    def _newest_good(self) -> str:
        listed = list_checkpoints(self._folder)
        good = (p.name for p in listed if p in self._trusted or checkpoint.check(p) is None)
        newest = next(good, None)
        return f"the newest good checkpoint is {newest}" if newest else "no good checkpoint yet"
