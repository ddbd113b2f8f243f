"""The records of one run of the grid, read and checked."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Literal

from bert_dp import record
from bert_dp.record_models import Summary
from launcher import results
from launcher.scaling.grid import Cell, Grid

Ended = Literal["ok", "oom", "failed"]
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
    curve: list[tuple[int, float]]
    """(tokens, loss) of each logged step whose loss is finite."""
    summary: Summary


def run_dir(out: Path, cell: Cell, repeat: int) -> Path:
    """Where this repeat of a cell runs."""
    return out / "runs" / f"{cell.id}-r{repeat}"


def read_summary(directory: Path) -> Summary | None:
    """summary.json of a run; None when there is none, or a damaged one."""
    return results.find(directory / "summary.json", Summary)


def ended(directory: Path) -> Ended | None:
    """How a run says it has ended; None when it has not, or a signal ended it."""
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return None
    if summary.status == "done":
        return "ok"
    return "oom" if summary.out_of_memory else "failed"


def result(grid: Grid, cell: Cell, directory: Path) -> tuple[Ended | None, Repeat | None]:
    """(how it ended, the records of one that is ok). None: it must be run (again), also because its records
    are not whole."""
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
    lines = record.read_lines(directory / "metrics.jsonl")
    curve = [(int(line["tokens"]), float(line["loss"])) for line in lines if line["loss"] is not None]
    summary = read_summary(directory) or Summary(status="done")
    return Repeat(directory.name, parts, memory, exposed, curve, summary)
