"""The heartbeat of a rank: a memory-mapped file that the launcher may read. Torch-free.

Writing it stores to memory, without a system call. Nothing depends on a reader.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bert_dp.record import BEAT_BYTES, BEAT_SLOTS, IN_STEP, PHASES

ALIVE_EVERY_S = 1.0
PID, STEP, PHASE, DONE, PROGRESS, PROGRESS_NS, ALIVE = BEAT_SLOTS.values()


class HeartbeatWriter:
    """Writes the heartbeat of one rank; `record.Heartbeat` defines the fields."""

    def __init__(self, path: Path):
        self._memory = _map(path)
        self._slots = memoryview(self._memory).cast("q")
        self._slots[PID] = os.getpid()
        self._silence: tuple[float, Callable[[int], None]] | None = None
        self._stopped = threading.Event()
        self.enter("setup")
        self._slots[ALIVE] += 1
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase (of record.PHASES) in optimizer step `step` (None = unchanged). The phases of IN_STEP
        take turns within a step and do not restart the count of pieces."""
        slots = self._slots
        if step is not None:
            slots[STEP] = step
        if step is not None or phase not in IN_STEP:
            slots[DONE] = 0
        slots[PHASE] = PHASES.index(phase)
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def progress(self) -> None:
        """Count a finished piece of the phase: a micro batch, an evaluation batch."""
        slots = self._slots
        slots[DONE] += 1
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def on_silence(self, after_s: float, report: Callable[[int], None]) -> None:
        """Let the heartbeat's thread call `report(progress)` after `after_s` seconds without progress, and
        again each time that the silence has doubled."""
        self._silence = after_s, report

    def close(self) -> None:
        """Stop the thread; the file stays."""
        self._stopped.set()

    def _live(self) -> None:
        slots, seen, due_s = self._slots, -1, 0.0
        while not self._stopped.wait(ALIVE_EVERY_S):
            slots[ALIVE] += 1
            if self._silence is None:
                continue
            after_s, report = self._silence
            progress, silent_s = slots[PROGRESS], (time.monotonic_ns() - slots[PROGRESS_NS]) / 1e9
            if progress != seen:
                seen, due_s = progress, after_s
            if silent_s >= due_s:
                due_s = 2 * silent_s
                with contextlib.suppress(Exception):  # a report that fails must not end the rank
                    report(progress)


def _map(path: Path) -> mmap.mmap:
    """Create and map a file of zeros; anonymous memory where there is no place for it.

    The zeros are written and not left a hole: a hole that a full disk cannot fill later would end the rank
    with SIGBUS. A file of an earlier run is replaced and not truncated: its owner may still write to it.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return mmap.mmap(-1, BEAT_BYTES)
    try:
        os.write(file, bytes(BEAT_BYTES))
        return mmap.mmap(file, BEAT_BYTES)
    except (OSError, ValueError):  # ValueError: the file is shorter than it should be
        return mmap.mmap(-1, BEAT_BYTES)
    finally:
        os.close(file)
