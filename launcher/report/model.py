"""The result of a verb as a value: console.py and html.py show it, a test reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from launcher.report.numbers import Unit

Level = Literal["ok", "warn", "fail", "info"]
Style = Literal["line", "dashed", "dotted", "marks", "both"]
"""Style of a line: solid, dashed, dotted (not measured by any run), marks alone, line and marks."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One finding and its evidence."""

    level: Level
    text: str
    notes: Sequence[str] = ()
    name: str = ""  # run or task that it is about, where a report has several


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number that stands out, with its denominator or scope."""

    label: str
    text: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TableCell:
    """One value of a table."""

    text: str
    note: str = ""  # its denominator or scope
    exact: float | None = None  # its value with all digits


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str
    text: bool = False  # holds words, which may be long and are aligned left


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A row of a table."""

    label: str
    cells: Sequence[TableCell]
    topic: str = ""  # heading above the first of the rows that share it
    console: bool = True  # False: on the page alone


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows named by their labels; without columns it is a list of labels and values."""

    rows: Sequence[TableRow]
    columns: Sequence[Column] = ()
    title: str = ""
    corner: str = ""  # head above the labels
    empty: str = "none"  # text in place of a table without rows


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a figure."""

    label: str  # names the unit in words
    unit: Unit = "si"  # format of its numbers
    log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Places of the ticks, e.g. the numbers of ranks that were run; empty: round numbers."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A named series; a y of None is a gap. `low` and `high`: an interval around each point."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int | None = 0  # of the palette; None: grey
    style: Style = "line"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    width: float = 2.0

    @property
    def values(self) -> list[float]:
        """Values that were measured."""
        return [y for y in self.y if y is not None]


@dataclasses.dataclass(frozen=True)
class Bars:
    """One part of every row of a figure; the parts of a row are stacked."""

    label: str
    parts: Sequence[float | None]
    texts: Sequence[str] = ()  # printed at the pointer; by default the part in the unit of the x axis

    @property
    def values(self) -> list[float]:
        """Values that were measured."""
        return [part for part in self.parts if part]


@dataclasses.dataclass(frozen=True)
class ReferenceLine:
    """A horizontal reference line."""

    label: str
    value: float
    left: bool = False  # puts its label at the left


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical reference line; the legend names it."""

    label: str
    value: float


@dataclasses.dataclass(frozen=True)
class Figure:
    """Lines over x and y, or bars of named rows along x."""

    title: str
    traces: Sequence[Line | Bars]
    x: Axis
    y: Axis
    rows: Sequence[str] = ()
    levels: Sequence[ReferenceLine] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    switch: bool = False  # offers a logarithmic x axis

    @property
    def is_empty(self) -> bool:
        """True if no run measured anything of it."""
        return not any(t.values for t in self.traces if not (isinstance(t, Line) and t.style == "dotted"))


@dataclasses.dataclass(frozen=True)
class ReportSection:
    """A part of the report."""

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    text: str = ""  # shown unchanged, in fixed width
    folded: bool = False  # opens on a click
    console: bool = True  # False: on the page alone


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a verb."""

    title: str
    subtitle: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()
    tiles: Sequence[Tile] = ()
    sections: Sequence[ReportSection] = ()
    next: str = ""  # a command to run next
