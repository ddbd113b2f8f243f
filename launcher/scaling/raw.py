"""The records of one run of the grid, read and checked."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher.scaling.grid import Cell, Grid

OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
)
PARTS = ("data_wait_s", "forward_backward_s", "own_work_s", "optimizer_s", "step_s", "host_s")


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The timed steps of one run: per rank, per step, in seconds."""

    name: str
    parts: dict[str, list[list[float]]]
    """Name of PARTS -> [rank][step]."""
    memory_gib: list[float]
    exposed_s: list[float]
    """DDP's own samples: seconds of reductions that no backward pass covered, of rank 0; [] without DDP."""
    lines: list[dict[str, Any]]
    """metrics.jsonl."""
    summary: dict[str, Any]


def run_dir(out: Path, cell: Cell, repeat: int) -> Path:
    """Where this repeat of a cell runs."""
    return out / "runs" / f"{cell.id}-r{repeat}"


def ended(directory: Path) -> str | None:
    """How a run says it has ended: ok, oom or failed; None when it has not, or a signal ended it."""
    summary = record.read_json(directory / "summary.json")
    if summary is None or summary.get("signal"):
        return None
    if summary.get("status") == "done":
        return "ok"
    told = " ".join([str(summary.get("cause")), *map(str, summary.get("explanation") or ())]).lower()
    return "oom" if any(words in told for words in OUT_OF_MEMORY) else "failed"


def result(grid: Grid, cell: Cell, directory: Path) -> tuple[str | None, Repeat | None]:
    """(ok | oom | failed | None, the records of one that is ok). None: it must be run (again), also because
    its records are not whole."""
    how = ended(directory)
    if how != "ok":
        return how, None
    try:
        return how, read_repeat(directory, cell.world_size, grid.settings.warm_up, grid.settings.steps)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None


def read_repeat(directory: Path, ranks: int, warm_up: int, steps: int) -> Repeat:
    """Raises ValueError, KeyError or TypeError when the records do not hold every step of every rank."""
    parts: dict[str, list[list[float]]] = {name: [] for name in PARTS}
    memory, exposed = [], []
    for rank in range(ranks):
        path = directory / "steps" / f"rank-{rank}.jsonl"
        found = list(record.read_lines(path))
        for name in PARTS:
            seconds = [float(s) for s in itertools.chain.from_iterable(line[name] for line in found)]
            if len(seconds) != warm_up + steps:
                raise ValueError(f"{path}: {len(seconds)} steps, {warm_up + steps} were to be taken")
            parts[name].append(seconds[warm_up:])
        memory.append(max(float(line["peak_memory_gib"]) for line in found))
        if rank == 0:
            samples = [line.get("ddp_exposed_s") for line in found if line["step"] > warm_up]
            exposed = [float(s) for s in samples if s is not None]
    if min(min(each) for each in parts["step_s"]) <= 0:
        raise ValueError(f"{directory}: a step of no time")
    lines = list(record.read_lines(directory / "metrics.jsonl"))
    summary = record.read_json(directory / "summary.json") or {}
    return Repeat(directory.name, parts, memory, exposed, lines, summary)
