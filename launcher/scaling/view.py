"""scaling.json as tables and figures read it: its cells, their columns, their series. Whatever type a torn or
foreign file has in place of a number counts as not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.report.numbers import (
    NA,
    format_count,
    format_energy,
    format_gib,
    format_nats,
    format_percent,
    format_ratio,
    format_si,
    format_step_time,
    number,
)

Cell = Mapping[str, Any]
ENDS = {"low": 0, "high": 1}  # of an interval


@dataclasses.dataclass(frozen=True)
class Column:
    """`path` into a cell, with dots; `head` carries the unit; `text` prints the value."""

    path: str
    head: str
    text: Callable[[object], str]


@dataclasses.dataclass(frozen=True)
class Group:
    """The cells that make one line of a figure, by world size. `index` is its colour in every figure."""

    label: str
    index: int
    cells: Sequence[Cell]


def format_word(value: object) -> str:
    """A name, a yes or no, a list of names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(str(item) for item in value) or "none"
    return NA if value is None else str(value)


def format_deviation(value: object) -> str:
    """A relative difference of losses."""
    n = number(value)
    return NA if n is None else f"{n:.1e}"


def format_interval(cell: Cell, path: str) -> str:
    """The two ends of an interval of fractions."""
    low, high = (value(cell, f"{path}.{end}") for end in ENDS)
    return NA if low is None or high is None else f"{format_percent(low)} to {format_percent(high)}"


IDENTITY = (
    Column("mode", "mode", format_word),
    Column("engine", "engine", format_word),
    Column("launcher", "launcher", format_word),
    Column("kind", "kind", format_word),
    Column("world_size", "N", format_count),
    Column("tensor", "tensor", format_count),
    Column("micro_batch", "micro batch", format_count),
    Column("accumulation", "accumulation", format_count),
    Column("global_batch", "global batch", format_count),
    Column("repeats", "repeats", format_count),
    Column("status", "status", format_word),
    Column("of", "control of", format_word),
)
THROUGHPUT = (
    Column("steps_per_s", "steps/s", format_si),
    Column("global_steps_per_s", "global steps/s", format_si),
    Column("samples_per_s", "samples/s", format_si),
    Column("tokens_per_s", "tokens/s", format_si),
    Column("tokens_per_s_per_gpu", "tokens/s per rank", format_si),
    Column("mfu", "MFU", format_percent),
    Column("mamfu", "MAMFU", format_percent),
    Column("energy_j", "energy", format_energy),
    Column("energy_j_per_mtoken", "energy per million tokens", format_energy),
)
SCALING = (
    Column("speedup", "speed-up", format_ratio),
    Column("efficiency", "efficiency", format_percent),
    Column("efficiency_ci95.low", "95 % from", format_percent),
    Column("efficiency_ci95.high", "to", format_percent),
    Column("efficiency_ddp1", "against ddp on one rank", format_percent),
    Column("ceiling_tokens_per_s", "ceiling, tokens/s", format_si),
    Column("ceiling_efficiency", "ceiling", format_percent),
    Column("communication_efficiency", "communication efficiency", format_percent),
    Column("communication_efficiency_ci95.low", "95 % from", format_percent),
    Column("communication_efficiency_ci95.high", "to", format_percent),
)
TIME = (
    Column("step_time_s.median", "step, median", format_step_time),
    Column("step_time_s.p95", "p95", format_step_time),
    Column("step_time_s.mean", "mean", format_step_time),
    Column("step_time_s.ci95.low", "95 % from", format_step_time),
    Column("step_time_s.ci95.high", "to", format_step_time),
    Column("split_s.data", "data wait", format_step_time),
    Column("split_s.forward_backward", "forward + backward", format_step_time),
    Column("split_s.exposed_comm", "exposed communication", format_step_time),
    Column("split_s.optimizer", "optimizer", format_step_time),
    Column("split_s.other", "other", format_step_time),
)
LOST = (
    Column("data_wait_fraction", "data wait, of a step", format_percent),
    Column("exposed_comm_fraction", "exposed communication, from the ceiling", format_percent),
    Column("exposed_comm_ddp_fraction", "the same, DDP's counters", format_percent),
    Column("launch_fraction", "host time to launch it", format_percent),
    Column("straggler_ratio", "straggler ratio", format_ratio),
    Column("straggler_rank", "straggler rank", format_count),
    Column("peak_memory_gib", "peak memory, greatest rank", format_gib),
    Column("loss.final", "final loss", format_nats),
    Column("loss_agrees", "loss agrees", format_word),
    Column("loss_deviation", "greatest deviation, relative", format_deviation),
    Column("flags", "flags", format_word),
)
TOPICS: Mapping[str, tuple[Column, ...]] = {
    "What ran": IDENTITY,
    "Throughput, summed over all ranks": THROUGHPUT,
    "Scaling, against single on one rank": SCALING,
    "Time of a step": TIME,
    "Lost time, memory and loss": LOST,
}
SPLIT = {column.path: column.head for column in TIME if column.path.startswith("split_s.")}


def cells(scaling: Mapping[str, Any], kind: str | None = None) -> list[Cell]:
    """All cells, or those of one kind, in their order."""
    found = [cell for cell in listed(scaling.get("cells")) if isinstance(cell, Mapping)]
    return [cell for cell in found if kind is None or cell.get("kind", "run") == kind]


def listed(value: object) -> list[Any]:
    """A list, or nothing."""
    return list(value) if isinstance(value, (list, tuple)) else []


def mapped(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def at(tree: object, path: str) -> object:
    """What `path` leads to, e.g. `step_time_s.ci95.low`; None where it leads nowhere."""
    for key in path.split("."):
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and len(tree) == len(ENDS) and key in ENDS:
            tree = tree[ENDS[key]]
        else:
            return None
    return tree


def value(cell: Cell, path: str) -> float | None:
    """The finite number at `path`."""
    return number(at(cell, path))


def entry(cell: Cell, column: Column) -> object:
    """What a table prints in `column`: of the repeats their number."""
    found = at(cell, column.path)
    return len(listed(found)) if column.path == "repeats" else found


def name(cell: Cell) -> str:
    """Its id, or what stands for one."""
    return str(cell.get("id") or f"{cell.get('mode')}-{cell.get('engine')}-n{cell.get('world_size')}")


def modes(scaling: Mapping[str, Any]) -> list[str]:
    """The modes of the run cells, weak first; a baseline that they share makes none alone."""
    runs, shared = cells(scaling, "run"), _shared(scaling)
    found = {str(cell.get("mode")) for cell in runs if name(cell) != shared}
    found = found or {str(cell.get("mode")) for cell in runs}
    return sorted(found, key=lambda mode: (mode != "weak", mode)) or ["weak"]


def groups(scaling: Mapping[str, Any], mode: str) -> list[Group]:
    """The lines of `mode`, the baseline among them; one engine, launcher, tensor and micro batch each."""
    runs, shared = cells(scaling, "run"), _shared(scaling)
    labels = _labels(runs)
    order = list(dict.fromkeys(labels))
    members: dict[str, list[Cell]] = {}
    for cell, label in zip(runs, labels, strict=True):
        if str(cell.get("mode")) == mode or name(cell) == shared:
            members.setdefault(label, []).append(cell)
    return [
        Group(label, order.index(label), sorted(found, key=lambda c: value(c, "world_size") or 0.0))
        for label, found in members.items()
    ]


def sizes(groups: Sequence[Group]) -> list[float]:
    """Every N of the groups, failed cells too."""
    found = (value(cell, "world_size") for group in groups for cell in group.cells)
    return sorted({n for n in found if n is not None and n > 0})


def headline(scaling: Mapping[str, Any]) -> Cell | None:
    """The run cell with the greatest speed-up; more ranks first where there is none."""
    runs = [cell for cell in cells(scaling, "run") if value(cell, "tokens_per_s") is not None]
    return max(
        runs,
        key=lambda c: (value(c, "speedup") or 0.0, value(c, "world_size") or 0.0),
        default=None,
    )


def baselines(scaling: Mapping[str, Any], engine: str = "single") -> list[str]:
    """The ids of the cells that the others are compared with: one for all modes, or one of each."""
    found = mapped(scaling.get("baselines")).get(engine)
    return [str(name) for name in (listed(found) or [found]) if name is not None]


def _shared(scaling: Mapping[str, Any]) -> str | None:
    """The id of the baseline that all modes have in common."""
    found = baselines(scaling)
    return found[0] if len(found) == 1 else None


def _labels(runs: Sequence[Cell]) -> list[str]:
    """The engine of each cell, and what else tells it from the others."""

    def differs(key: str) -> bool:
        return len({str(cell.get(key)) for cell in runs}) > 1

    more = {"launcher": "{}", "tensor": "tensor {}", "micro_batch": "micro batch {}"}
    told = {key: text for key, text in more.items() if differs(key)}
    return [
        ", ".join([str(cell.get("engine")), *(text.format(cell.get(key)) for key, text in told.items())])
        for cell in runs
    ]
