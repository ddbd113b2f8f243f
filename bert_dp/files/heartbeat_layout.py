"""Define the heartbeat file of a rank: 64-bit integers, read by the launcher. Torch-free."""

import dataclasses
import struct
from pathlib import Path

PHASES = ("setup", "compile", "data", "step", "log", "evaluate", "save", "done")
IN_STEP = ("data", "step")
"""Phases that alternate, once per micro batch of an optimizer step."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Contents of RUN/heartbeats/rank-N: a 64-bit integer per field in native byte order, read whole."""

    pid: int = 0
    step: int = 0
    phase: int = 0
    """Index into PHASES."""
    done: int = 0
    """Units of work done: micro batches in this step, or evaluation batches in this phase. On a GPU, units
    that were queued but may not be computed yet also count."""
    progress: int = 0
    """Incremented with every phase and every unit of work."""
    progress_ns: int = 0
    """CLOCK_MONOTONIC when `progress` was last incremented."""
    alive: int = 0
    """Incremented about once a second while the process is scheduled and releases its interpreter lock."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Return the rank's progress as a tuple that can be compared between ranks."""
        in_step = PHASES[self.phase] in IN_STEP
        return self.step, PHASES.index("step") if in_step else self.phase, self.done, self.phase

    @property
    def steps_done(self) -> int:
        """Return the number of completed optimizer steps."""
        return self.step - (PHASES[self.phase] in IN_STEP)


BEAT_SLOTS = {field.name: i for i, field in enumerate(dataclasses.fields(Heartbeat))}
BEAT_BYTES = 8 * len(BEAT_SLOTS)


def heartbeat_path(run_dir: Path, rank: int, folder: str | Path | None = None) -> Path:
    """Return the heartbeat file of a rank. `folder`: directory of the heartbeats in a multi-node run."""
    return Path(folder or run_dir / "heartbeats") / f"rank-{rank}"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a rank's heartbeat; None if the rank has not started."""
    try:
        return Heartbeat(*struct.unpack(f"@{len(BEAT_SLOTS)}q", path.read_bytes()))
    except (OSError, struct.error):
        return None
