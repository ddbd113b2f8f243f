"""The heartbeat of a rank as a reader sees it: a file of 64-bit integers. Torch-free."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path

PHASES = ("setup", "compile", "data", "step", "log", "evaluate", "save", "done")
IN_STEP = ("data", "step")
"""Phases that take turns, once for each micro batch of an optimizer step."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """RUN/heartbeats/rank-N: one 64-bit integer per field, in this order and the machine's byte order, so
    that each is stored and read whole. Clocks are CLOCK_MONOTONIC, the same for all processes of a machine.
    """

    pid: int
    step: int
    phase: int
    """Index into PHASES."""
    done: int
    """Pieces of work: micro batches since the step began, evaluation batches since the phase did. On a GPU
    those that it was given, which it may not have done yet."""
    progress: int
    """Rises with every phase and every piece of work."""
    progress_ns: int
    """When it last rose."""
    alive: int
    """Rises about once a second while the process is scheduled and its interpreter lock is given up."""
    alive_ns: int
    asked: int
    """The one field a reader writes: the number of a request for the rank's recent collectives."""
    answered: int
    """The request that was answered last, in logs/rank-N.collectives.json."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """How far the rank is, to be compared with that of other ranks."""
        in_step = PHASES[self.phase] in IN_STEP
        return self.step, PHASES.index("step") if in_step else self.phase, self.done, self.phase


BEAT_SLOTS = {field.name: i for i, field in enumerate(dataclasses.fields(Beat))}
BEAT_BYTES = 8 * len(BEAT_SLOTS)


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeats" / f"rank-{rank}"


def read_beat(path: Path) -> Beat | None:
    """What a rank last said of itself; None before it has begun."""
    try:
        return Beat(*struct.unpack(f"@{len(BEAT_SLOTS)}q", path.read_bytes()))
    except (OSError, struct.error):
        return None


def ask_for_collectives(path: Path, number: int) -> None:
    """Let the rank of this heartbeat answer request `number`. Raises OSError."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(file, struct.pack("@q", number), 8 * BEAT_SLOTS["asked"])
    finally:
        os.close(file)
