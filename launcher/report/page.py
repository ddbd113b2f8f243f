"""Define the parts of a report, and print reports on the console. html.py renders reports as pages.

Most tables have a row for each part of a result, e.g. for each run, and a column for each quantity.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from bert_dp.files import safe
from launcher.log import PLAIN, runnable, show
from launcher.report.formats import FORMATS, NA, Unit, count_of, format_interval, number
from launcher.results import Measurement, to_json
from launcher.stats import is_measurable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

Level = Literal["ok", "warn", "fail", "info"]
Style = Literal["line", "dashed", "dotted", "marks", "both"]
"""Style of a line. `marks`: only markers; `both`: line and markers. A dotted line shows unmeasured values."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A finding and its evidence."""

    level: Level
    text: str
    notes: Sequence[str] = ()
    name: str = ""  # the run or task concerned, if the report covers several


@dataclasses.dataclass(frozen=True)
class TableCell:
    """One value in a table."""

    text: str
    note: str = ""  # denominator or scope of the value
    exact: float | None = None  # unrounded value


@dataclasses.dataclass(frozen=True)
class TableRow:
    label: str
    cells: Sequence[TableCell]
    topic: str = ""  # shown as a heading above the topic's first row
    console: bool = True  # False: shown only on the page


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of labelled rows. If `columns` is empty, a row consists of a label and one value."""

    rows: Sequence[TableRow]
    columns: Sequence[str] = ()  # column heads
    title: str = ""
    corner: str = ""  # head of the label column
    empty: str = "none"  # text shown if there are no rows


@dataclasses.dataclass(frozen=True)
class Axis:
    label: str  # the quantity and its unit, in words
    unit: Unit = "si"  # number format
    log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Tick positions, e.g. the measured rank counts. If empty, plotly chooses round numbers."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A named series of points. None in `y` is a gap. `low`, `high`: the ends of each point's interval."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int | None = 0  # index into the palette; None: grey
    style: Style = "line"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @property
    def values(self) -> list[float]:
        return [y for y in self.y if y is not None]


@dataclasses.dataclass(frozen=True)
class Bars:
    """A named series of bar segments. Each row of a figure is a stacked bar with one segment per series."""

    label: str
    parts: Sequence[float | None]
    texts: Sequence[str] = ()  # hover texts; default: the formatted values

    @property
    def values(self) -> list[float]:
        return [part for part in self.parts if part]


@dataclasses.dataclass(frozen=True)
class ReferenceLine:
    """A horizontal reference line, labelled in the plot, or a vertical one, labelled in the legend."""

    label: str
    value: float
    left: bool = False  # True: the label of a horizontal line is on the left


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line plot, or horizontal stacked bars in named rows."""

    title: str
    traces: Sequence[Line | Bars]
    x: Axis
    y: Axis
    rows: Sequence[str] = ()
    levels: Sequence[ReferenceLine] = ()  # horizontal lines
    marks: Sequence[ReferenceLine] = ()  # vertical lines
    note: str = ""
    switch: bool = False  # True: the page offers a logarithmic x axis

    @property
    def is_empty(self) -> bool:
        """Return True if the figure shows no measured values. Dotted lines contain only unmeasured values."""
        return not any(t.values for t in self.traces if not (isinstance(t, Line) and t.style == "dotted"))


@dataclasses.dataclass(frozen=True)
class ReportSection:
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    text: str = ""  # shown verbatim in a fixed-width font
    folded: bool = False  # True: collapsed until clicked
    console: bool = True  # False: shown only on the page


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on the result of a command: title, verdicts, tables and figures."""

    title: str
    subtitle: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()
    tiles: Sequence[TableRow] = ()  # rows with one value each, highlighted on the page
    sections: Sequence[ReportSection] = ()
    next: str = ""  # suggested next command


def cell(value: object, unit: Unit, note: str = "") -> TableCell:
    """Return a table cell that shows a value in the format of its unit."""
    exact = value if isinstance(value, float) and math.isfinite(value) else None
    return TableCell(FORMATS[unit](value), note, exact)


def value(label: str, number: object, unit: Unit, note: str = "", *, console: bool = True) -> TableRow:
    """Return a table row with a label and a number."""
    return TableRow(label, (cell(number, unit, note),), console=console)


def words(label: str, text: str | None, note: str = "", *, console: bool = True) -> TableRow:
    """Return a table row with a label and text."""
    return TableRow(label, (TableCell(text or NA, note),), console=console)


def series(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[float], list[float | None]]:
    """Split points into x and y. Omit points with a non-numeric x; replace a non-numeric y with None."""
    kept = [(place, number(y)) for x, y in pairs if (place := number(x)) is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def first_line(text: object) -> str:
    """Return the first non-empty line of a text, or "cause not recorded" if there is none."""
    return next((line for line in str(text or "").strip().splitlines() if line), "cause not recorded")


def record(title: str, content: Mapping[str, Any]) -> ReportSection:
    """Return a collapsed section that shows `content` as YAML. The section appears only on the page."""
    text = yaml.safe_dump(dict(content), sort_keys=False) if content else "not recorded"
    return ReportSection(title, text=text, folded=True, console=False)


def machine_line(environment: Mapping[str, Any], *front: str) -> str:
    """Join `front` and the recorded processor, torch version, commit and date, omitting what is unknown."""
    versions = environment.get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    commit = str(environment.get("git_commit") or "")[:10]
    dirty = " + uncommitted changes" if environment.get("git_dirty") else ""
    parts = [
        *front,
        str(environment.get("cpu_model") or ""),
        f"torch {torch}" if torch is not None else "",
        f"commit {commit}{dirty}" if commit else "",
        str(environment.get("date") or ""),
    ]
    return " \u00b7 ".join(filter(None, parts))


def subtitle(result: Measurement, method: Sequence[str]) -> list[str]:
    """Return two lines that describe the machine and the method."""
    trial = f"trials on {count_of(result.ranks, 'rank')}"
    return [machine_line(result.environment, trial), " \u00b7 ".join(method)]


def status_verdicts(result: Measurement) -> list[Verdict]:
    """Return one verdict if the measurement failed or is partial, otherwise an empty list."""
    if result.status == "failed":
        return [Verdict("fail", f"Failed: {result.reason or 'cause not recorded'}")]
    if result.status != "complete":
        return [Verdict("warn", "Partial: the measurement stopped early; the same command resumes it.")]
    return []


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity to show for each part of a result: a field, or a function of the part."""

    path: str | Callable[[Any], object]
    """Dotted path of the field, or a function that maps the part to a value in `unit` or to a TableCell."""
    head: str  # column head, without the unit
    unit: Unit = "si"

    def of(self, part: object) -> object:
        """Return the value of the quantity for `part`."""
        return at(part, self.path) if isinstance(self.path, str) else self.path(part)


@dataclasses.dataclass(frozen=True)
class Ratio(Quantity):
    """A ratio and the path of its interval. If the interval is too wide, `not measurable` is shown."""

    interval: str = ""

    def of(self, part: object) -> object:
        """Return the value for `part`, or a table cell that says that the ratio is not measurable."""
        value = super().of(part)
        if value is None or is_measurable(at(part, self.interval)):
            return value
        return TableCell(f"not measurable with {count_of(at(part, 'repeats'), 'repeat')}")

    def number(self, part: object) -> float | None:
        """Return the value, or None if the ratio is not measurable."""
        return number(self.of(part))

    def text(self, part: object) -> str:
        """Return the formatted value with its interval: `80.0 % [78.0 % to 82.0 %]`."""
        shown, interval = cell_of(part, self).text, at(part, self.interval)
        if self.number(part) is None or interval is None:
            return shown
        return f"{shown} [{format_interval(interval, FORMATS[self.unit])}]"


def at(part: object, path: str) -> Any:
    """Look up a dotted path of fields, keys and interval ends, e.g. `step_time_s.ci95.low`.

    Return None if a value on the path is None. If a list is at path `repeats` or `runs`, return its length.
    """
    for key in path.split("."):
        if part is None:
            return None
        if isinstance(part, Mapping):
            part = part.get(key)
        else:
            part = part[("low", "high").index(key)] if isinstance(part, list) else getattr(part, key)
    return len(part) if path in ("repeats", "runs") and isinstance(part, list) else part


def cell_of(part: object, quantity: Quantity) -> TableCell:
    """Return the cell that shows a quantity of `part`."""
    value = quantity.of(part)
    return value if isinstance(value, TableCell) else cell(value, quantity.unit)


def table(
    parts: Iterable[tuple[str, object]],
    quantities: Sequence[Quantity],
    *,
    title: str = "",
    corner: str = "",
    empty: str = "none",
) -> Table:
    """Return a table with a row per named part and a column per quantity."""
    named = [TableRow(name, [cell_of(part, q) for q in quantities]) for name, part in parts]
    return Table(named, [q.head for q in quantities], title, corner, empty)


# --- printing on the console

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "info": ""}


def show_report(console: Console, report: Report, page: Path | None = None, *, titled: bool = False) -> None:
    """Print a report, then the path of its page and the suggested next command, if any."""
    from rich.console import Group

    show(console, Group(*_parts(report, console, titled=titled)))
    show_end(console, report, page)


def show_result(
    console: Console, found: object, report: Callable[[], Report], *, as_json: bool, titled: bool = False
) -> None:
    """Print the result of a command as JSON or as a report."""
    if as_json:
        sys.stdout.write(to_json(found))
    else:
        show_report(console, report(), titled=titled)


def show_end(console: Console, report: Report, page: Path | None) -> None:
    """Print the path of the page and the suggested next command, if any."""
    for label, what in (("page", page), ("next", runnable(report.next))):
        if what:
            show(console, f"{label}: {what}", **PLAIN)


def _parts(report: Report, console: Console, *, titled: bool) -> Iterator[RenderableType]:
    """Yield the title (if `titled`), the tables and notes of the console's sections, and the verdicts."""
    from rich.text import Text

    if titled:
        yield Text(safe(report.title), style="bold")
    for section in report.sections:
        if not section.console:
            continue
        for table in section.tables:
            if table.rows:
                if table.title:
                    yield Text(safe(f"{table.title}:"), style="bold")
                yield from _tables(table, console)
        for note in section.notes:
            yield Text(safe(note if len(section.notes) == 1 else f"* {note}"), style="dim")
    for verdict in report.verdicts:
        level = f"{verdict.level:5}" if verdict.level != "info" else ""
        name = f"{verdict.name}: " if verdict.name else ""
        text = safe(f"{name}{verdict.text}")
        yield Text.assemble((level, f"bold {COLOURS[verdict.level]}".strip()), (text, "bold"))
        yield from (Text(safe(f"  {note}")) for note in verdict.notes)


def _tables(table: Table, console: Console) -> list[RichTable]:
    """Render a table. If it is too wide, split its columns across several tables that repeat the labels."""
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = [row for row in table.rows if row.console]

    def grid(columns: Sequence[int]) -> RichTable:
        made = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        made.add_column(Text(safe(table.corner)), overflow="fold")
        for i in columns:
            # numbers are right-aligned and not wrapped
            numeric = any(row.cells[i].text[:1] in set("+-0123456789") for row in rows)
            side: Literal["left", "right"] = "right" if numeric else "left"
            made.add_column(Text(safe(table.columns[i])), justify=side, overflow="fold", no_wrap=numeric)
        for row in rows:
            made.add_row(Text(safe(row.label)), *(Text(safe(row.cells[i].text)) for i in columns))
        return made

    if not table.columns:  # each row is a label and a value with its note
        pairs = RichTable(box=None, pad_edge=False, show_header=False)
        pairs.add_column(no_wrap=True)
        pairs.add_column(overflow="fold")
        for row in rows:
            value, note = row.cells[0].text, row.cells[0].note
            text = Text.assemble((safe(value), "bold"), safe(f", {note}" if note else ""))
            pairs.add_row(Text(safe(row.label)), text)
        return [pairs]
    parts: list[list[int]] = [[]]
    for i in range(len(table.columns)):
        options = console.options.update(max_width=1000)
        width = Measurement.get(console, options, grid([*parts[-1], i])).maximum
        if width > console.width and parts[-1]:
            parts.append([])
        parts[-1].append(i)
    return [grid(part) for part in parts]
