"""Define the layout of the heartbeat file that a rank writes and the launcher reads. Torch-free."""

import dataclasses
import struct
from pathlib import Path

PHASES = ("setup", "compile", "data", "step", "log", "evaluate", "save", "done")
IN_STEP = ("data", "step")
"""Phases of an optimizer step. In `data`, a rank waits for a micro batch, which it processes in `step`."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Contents of RUN/heartbeats/rank-N: one 64-bit integer in native byte order per field."""

    pid: int = 0
    step: int = 0
    phase: int = 0
    """Index into PHASES."""
    done: int = 0
    """Number of finished units of work: micro batches in this step, or evaluation batches in this phase. On a
    GPU, a unit counts as finished once it is queued."""
    progress: int = 0
    """Counter that increases at each new phase and after each unit of work."""
    progress_ns: int = 0
    """CLOCK_MONOTONIC, in nanoseconds, at the last increase of `progress`."""
    alive: int = 0
    """Counter that grows about once per second while the process runs and releases the interpreter lock."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Return the rank's progress as a tuple. The further behind a rank is, the smaller its tuple."""
        in_step = PHASES[self.phase] in IN_STEP
        return self.step, PHASES.index("step") if in_step else self.phase, self.done, self.phase

    @property
    def steps_done(self) -> int:
        """Return the number of completed optimizer steps."""
        return self.step - (PHASES[self.phase] in IN_STEP)


BEAT_SLOTS = {field.name: i for i, field in enumerate(dataclasses.fields(Heartbeat))}
BEAT_BYTES = 8 * len(BEAT_SLOTS)


def heartbeat_path(run_dir: Path, rank: int, folder: str | Path | None = None) -> Path:
    """Return the path of a rank's heartbeat file. `folder`: heartbeat directory; None = RUN/heartbeats."""
    return Path(folder or run_dir / "heartbeats") / f"rank-{rank}"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a rank's heartbeat; return None if the file is missing or incomplete."""
    try:
        return Heartbeat(*struct.unpack(f"@{len(BEAT_SLOTS)}q", path.read_bytes()))
    except (OSError, struct.error):
        return None
