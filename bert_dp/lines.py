"""What a rank writes line by line beside training, and the disk that takes no more of it. Torch-free.

A line that cannot be written is lost and counted; it never ends the run.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.record import Metrics

Line = Metrics | Mapping[str, Any]


class LostWrites:
    """The writes of this process that a disk refused, for the heartbeat to tell."""

    def __init__(self) -> None:
        self.count = 0
        self.errno = 0
        """Of the last one."""

    def note(self, error: OSError) -> None:
        self.count += 1
        self.errno = error.errno or errno.EIO


class LossyFile(io.RawIOBase):
    """A file that is open for writing, without errors: what does not fit is lost. The next write that fits
    says how many were."""

    def __init__(self, descriptor: int, lost_writes: LostWrites):
        self._descriptor, self._lost_writes = descriptor, lost_writes
        self._lost, self._why, self._is_torn = 0, "", False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        """All of `data` counts as written. A line that was cut is ended before what comes next."""
        rest = bytes(data)
        if self._lost:
            rest = b"\n" * self._is_torn + f"({self._lost} writes lost here: {self._why})\n".encode() + rest
        is_begun = False
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                is_begun = True
        except OSError as error:
            self._lost += 1
            self._why = os.strerror(error.errno or errno.EIO)
            self._is_torn = is_begun or self._is_torn
            self._lost_writes.note(error)
        else:
            self._lost, self._is_torn = 0, False
        return len(data)


def lossy(descriptor: int, lost_writes: LostWrites) -> io.TextIOWrapper:
    """A text stream over a LossyFile, written at the end of each line."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(descriptor, lost_writes)),
        "utf-8",
        "backslashreplace",
        line_buffering=True,
    )


class Records:
    """Appends lines to a run's records. What goes wrong is said at the first line that is missing, and once
    more, in all, when lines fit again or at the end."""

    def __init__(
        self,
        run_dir: Path,
        log_rank0: Callable[[str], None],
        lost_writes: LostWrites,
        directory: record.HeldDirectory | None = None,
    ):
        """`directory`: `run_dir`, held; lines then go there wherever it is moved."""
        self._run_dir, self._log, self._lost_writes = run_dir, log_rank0, lost_writes
        self._opener = directory.opener if directory is not None else None
        self._missing: dict[str, tuple[int, int, int]] = {}  # name -> lines, first step, last step

    def append(self, name: str, line: Line) -> None:
        """Add `line`, which has a `step`, to the record `name`."""
        step = int(line["step"] if isinstance(line, Mapping) else line.step)
        count, first, _ = self._missing.get(name, (0, step, step))
        try:
            record.append_line(self._run_dir / name, line, self._opener)
        except OSError as error:
            self._lost_writes.note(error)
            self._missing[name] = count + 1, first, step
            if not count:
                self._log(f"warning: step {step} is missing in {name}: {error}")
        else:
            self._tell(name)

    def close(self) -> None:
        """Say what is missing until now."""
        for name in list(self._missing):
            self._tell(name)

    def _tell(self, name: str) -> None:
        count, first, last = self._missing.pop(name, (0, 0, 0))
        if count > 1:
            self._log(f"warning: {count} lines are missing in {name}: of steps {first} to {last}")
