"""Tables as data: each column is a quantity, with its unit, of the parts of a result that the rows show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launcher.report.model import Column, Table, TableCell, TableRow
from launcher.report.numbers import FORMATS, NA, Unit, count_of, format_interval, number
from launcher.report.parts import cell
from launcher.stats import is_measurable

ENDS = {"low": 0, "high": 1}  # of an interval


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A field of a part of a result."""

    path: str  # keys that lead to it, with dots
    head: str  # head of its column, with what the unit does not say
    unit: Unit = "si"

    def of(self, part: object) -> object:
        """Return its value in `part`."""
        return at(part, self.path)


@dataclasses.dataclass(frozen=True)
class Ratio(Quantity):
    """A ratio with the path of its interval. One that is not measurable is shown as such, without digits."""

    interval: str = ""

    def of(self, part: object) -> object:
        """Return its value in `part`, or a cell that says that it is not measurable."""
        value = at(part, self.path)
        if value is None or is_measurable(at(part, self.interval)):
            return value
        return TableCell(f"not measurable with {count_of(at(part, 'repeats'), 'repeat')}")

    def number(self, part: object) -> float | None:
        """Return the value; None where it is not measurable."""
        return number(self.of(part))

    def ends(self, part: object) -> str:
        """Return the ends of its interval: `78.0 % to 82.0 %`."""
        shown = self.number(part) is not None
        return format_interval(at(part, self.interval) if shown else None, FORMATS[self.unit])

    def text(self, part: object) -> str:
        """Return the value with its interval: `80.0 % [78.0 % to 82.0 %]`."""
        shown, ends = cell_of(part, self).text, self.ends(part)
        return shown if ends == NA else f"{shown} [{ends}]"


@dataclasses.dataclass(frozen=True)
class Computed:
    """A function of a part, for what no field holds."""

    of: Callable[[Any], object]  # returns a value in `unit`, or a TableCell, e.g. one with a note
    head: str
    unit: Unit = "si"


def at(part: object, path: str) -> Any:
    """Follow `path` through fields, keys and the ends of intervals, e.g. `step_time_s.ci95.low`.

    Returns None behind null, and of `repeats` and `runs`, which are lists, their number.
    """
    for key in path.split("."):
        if part is None:
            return None
        if isinstance(part, Mapping):
            part = part.get(key)
        else:
            part = part[ENDS[key]] if isinstance(part, list) else getattr(part, key)
    return len(part) if path in ("repeats", "runs") and isinstance(part, list) else part


def cell_of(part: object, quantity: Quantity | Computed) -> TableCell:
    """Return the cell of a quantity of `part`."""
    value = quantity.of(part)
    return value if isinstance(value, TableCell) else cell(value, quantity.unit)


def table(
    parts: Iterable[tuple[str, object]],
    quantities: Sequence[Quantity | Computed],
    *,
    title: str = "",
    corner: str = "",
    empty: str = "none",
) -> Table:
    """Return a row for each named part, a column for each quantity; those of words are aligned left."""
    named = [TableRow(name, [cell_of(part, q) for q in quantities]) for name, part in parts]
    heads = [Column(q.head, text=q.unit == "word") for q in quantities]
    return Table(named, heads, title, corner, empty)
