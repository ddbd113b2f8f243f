"""What a verb has to say, as a value: console.py and html.py show it, a test reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from launcher.report.numbers import Unit

Level = Literal["ok", "warn", "fail", "info"]
Style = Literal["line", "dashed", "dotted", "marks", "both"]
"""Of a line: drawn through, dashed, dotted (what no run measured), marks alone, line and marks."""
QUARTILES = ("min", "q1", "median", "q3", "max")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One finding and what supports it."""

    level: Level
    text: str
    notes: Sequence[str] = ()
    name: str = ""
    """Of what it holds, where a report is about several."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number that stands out, with its denominator or scope."""

    label: str
    text: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """`note`: the denominator or scope of the value; `exact`: the value with all its digits."""

    text: str
    note: str = ""
    exact: float | None = None


@dataclasses.dataclass(frozen=True)
class Column:
    """`text`: of words, which may be long and stand at the left."""

    head: str
    text: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    label: str
    cells: Sequence[Cell]
    topic: str = ""
    """A heading above the first of the rows that share it."""
    console: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows named by their labels; without columns it is a list of labels and values."""

    rows: Sequence[Row]
    columns: Sequence[Column] = ()
    title: str = ""
    corner: str = ""
    """The head above the labels."""
    empty: str = "none"
    """What stands in place of a table without rows."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """`label` names the unit in words; `unit` is how a number on it is printed."""

    label: str
    unit: Unit = "si"
    log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Where the ticks stand, e.g. at the numbers of ranks that were run; empty: round numbers."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A named series; a y of None is a gap. `low` and `high`: an interval around each point."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int | None = 0
    """Of the palette; None: grey."""
    style: Style = "line"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    width: float = 2.0

    @property
    def values(self) -> list[float]:
        return [y for y in self.y if y is not None]


@dataclasses.dataclass(frozen=True)
class Bars:
    """One part of every row of a figure; the parts of a row are stacked. `texts`: what a part prints."""

    label: str
    parts: Sequence[float | None]
    texts: Sequence[str] = ()

    @property
    def values(self) -> list[float]:
        return [part for part in self.parts if part]


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A box for every row of a figure, by the names of QUARTILES."""

    label: str
    boxes: Sequence[Mapping[str, float] | None]

    @property
    def values(self) -> list[float]:
        return [value for box in self.boxes if box for value in box.values()]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A horizontal reference line."""

    label: str
    value: float
    left: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical reference line; the legend names it."""

    label: str
    value: float


@dataclasses.dataclass(frozen=True)
class Figure:
    """Lines over x and y, or bars or boxes of named rows along x."""

    title: str
    traces: Sequence[Line | Bars | Boxes]
    x: Axis
    y: Axis
    rows: Sequence[str] = ()
    levels: Sequence[Rule] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    absent: str = ""
    """Why there is nothing to draw, where that is no lack of data."""
    switch: bool = False
    """Whether the page offers a logarithmic x axis."""

    @property
    def is_empty(self) -> bool:
        """Without anything that a run measured."""
        return not any(t.values for t in self.traces if not (isinstance(t, Line) and t.style == "dotted"))


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page. What is not for the console, or is folded on the page, says so."""

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    text: str = ""
    """Shown as it is, in fixed width."""
    folded: bool = False
    console: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    title: str
    subtitle: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    next: str = ""
    """One command that leads on."""
