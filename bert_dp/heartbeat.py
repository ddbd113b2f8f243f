"""What a rank says of itself while it runs: a memory-mapped file that a launcher may read. Torch-free.

A beat is a store to memory, no system call. Nothing depends on a reader.
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
PID, STEP, PHASE, DONE, PROGRESS, PROGRESS_NS, ALIVE, ALIVE_NS, ASKED, ANSWERED = BEAT_SLOTS.values()


class Heartbeat:
    """The heartbeat of one rank; see `record.Beat` for what its fields mean."""

    def __init__(self, path: Path):
        self._memory = _map(path)
        self._slots = memoryview(self._memory).cast("q")
        self._slots[PID] = os.getpid()
        self._answer: Callable[[], None] | None = None
        self._stopped = threading.Event()
        self.enter("setup")
        self._show_alive()
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """A phase (of record.PHASES) begins, in optimizer step `step` (None = the same as before). Data and
        step take turns within one, and count on."""
        slots = self._slots
        if step is not None:
            slots[STEP] = step
        if step is not None or phase not in IN_STEP:
            slots[DONE] = 0
        slots[PHASE] = PHASES.index(phase)
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def progress(self) -> None:
        """A piece of work of the phase is done: a micro batch, an evaluation batch."""
        slots = self._slots
        slots[DONE] += 1
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def answer_with(self, answer: Callable[[], None]) -> None:
        """What a reader's request calls, on the thread that shows that the process is alive."""
        self._answer = answer

    def close(self) -> None:
        """Stop the thread; the file stays."""
        self._stopped.set()

    def _live(self) -> None:
        while not self._stopped.wait(ALIVE_EVERY_S):
            self._show_alive()
            request = self._slots[ASKED]
            if request != self._slots[ANSWERED] and self._answer is not None:
                with contextlib.suppress(Exception):  # a report that cannot be made must not end the rank
                    self._answer()
                self._slots[ANSWERED] = request

    def _show_alive(self) -> None:
        self._slots[ALIVE] += 1
        self._slots[ALIVE_NS] = time.monotonic_ns()


def _map(path: Path) -> mmap.mmap:
    """A new file of zeros, mapped; memory of our own where there is no place for it.

    The zeros are written and not left a hole: a hole that a full disk cannot fill later would end us with
    SIGBUS. A file of an earlier run is replaced and not truncated: its owner may still write to it.
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
