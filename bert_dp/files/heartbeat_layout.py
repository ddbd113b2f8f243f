"""The heartbeat file of a rank: 64-bit integers that the launcher reads. Torch-free."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

PHASES = ("setup", "compile", "data", "step", "log", "evaluate", "save", "done")
IN_STEP = ("data", "step")
"""Phases that take turns, once for each micro batch of an optimizer step."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Hold RUN/heartbeats/rank-N: one 64-bit integer per field, in the machine's byte order, read whole."""

    pid: int = 0
    step: int = 0
    phase: int = 0
    """Index into PHASES."""
    done: int = 0
    """Pieces of work: micro batches since the step began, evaluation batches since the phase did. On a GPU
    those that were queued, which may not be computed yet."""
    progress: int = 0
    """Rises with every phase and every piece of work."""
    progress_ns: int = 0
    """CLOCK_MONOTONIC when `progress` last rose."""
    alive: int = 0
    """Rises about once a second while the process is scheduled and its interpreter lock is given up."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Progress of the rank, for comparison with other ranks."""
        in_step = PHASES[self.phase] in IN_STEP
        return self.step, PHASES.index("step") if in_step else self.phase, self.done, self.phase


BEAT_SLOTS = {field.name: i for i, field in enumerate(dataclasses.fields(Heartbeat))}
BEAT_BYTES = 8 * len(BEAT_SLOTS)


def heartbeat_path(run_dir: Path, rank: int, folder: str | Path | None = None) -> Path:
    """Return the file of a rank; `folder`: where the heartbeats of a run over several nodes are."""
    return Path(folder or run_dir / "heartbeats") / f"rank-{rank}"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a rank's heartbeat. None before the rank has begun."""
    try:
        return Heartbeat(*struct.unpack(f"@{len(BEAT_SLOTS)}q", path.read_bytes()))
    except (OSError, struct.error):
        return None
