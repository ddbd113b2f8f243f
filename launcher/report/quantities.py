"""Tables whose columns are quantities of a part of a result file, each with its unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from launcher.report.model import Column, Row, Table
from launcher.report.numbers import Unit
from launcher.report.parts import cell

ENDS = {"low": 0, "high": 1}  # of an interval


@dataclasses.dataclass(frozen=True)
class Quantity:
    """`path` into a part of a result file, with dots; `head` carries what its unit does not say."""

    path: str
    head: str
    unit: Unit = "si"


def at(part: object, path: str) -> object:
    """What `path` leads to, e.g. `step_time_s.ci95.low`; None behind what is null. Of `repeats` and
    `runs`, which are lists, their number."""
    for key in path.split("."):
        if part is None:
            return None
        part = part[ENDS[key]] if isinstance(part, list) else getattr(part, key)
    return len(part) if path in ("repeats", "runs") and isinstance(part, list) else part


def rows(part: object, quantities: Sequence[Quantity]) -> list[Row]:
    """A row for each quantity of one part of a result file."""
    return [Row(q.head, (cell(at(part, q.path), q.unit),)) for q in quantities]


def table(
    parts: Iterable[tuple[str, object]],
    quantities: Sequence[Quantity],
    *,
    title: str = "",
    corner: str = "",
    empty: str = "none",
) -> Table:
    """A row for each named part of a result file."""
    named = [Row(name, [cell(at(part, q.path), q.unit) for q in quantities]) for name, part in parts]
    heads = [Column(q.head, text=q.unit == "word") for q in quantities]
    return Table(named, heads, title, corner, empty)
