"""A Report on the console, by rich: its tables and notes, then its findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bert_dp.files import safe
from launcher.log import PLAIN, show
from launcher.report.page import Report, Table, TableRow, Verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable
    from rich.text import Text

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "info": ""}


def show_report(console: Console, report: Report, page: Path | None = None, *, titled: bool = False) -> None:
    """Print the report, its page and the command to run next, as far as there are any."""
    from rich.console import Group

    show(console, Group(*_parts(report, console, titled=titled)))
    show_end(console, report, page)


def show_end(console: Console, report: Report, page: Path | None) -> None:
    """Print the page and the command to run next."""
    for label, what in (("page", page), ("next", report.next)):
        if what:
            show(console, f"{label}: {what}", **PLAIN)


def _parts(report: Report, console: Console, *, titled: bool) -> Iterator[RenderableType]:
    """Yield its tables and notes, then its findings."""
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
        yield from _verdict(verdict)


def _verdict(verdict: Verdict) -> list[Text]:
    """Return the finding behind its level, and below it its evidence."""
    from rich.text import Text

    level = f"{verdict.level:5}" if verdict.level != "info" else ""
    name = f"{verdict.name}: " if verdict.name else ""
    first = Text.assemble(
        (level, f"bold {COLOURS[verdict.level]}".strip()), (safe(f"{name}{verdict.text}"), "bold")
    )
    return [first, *(Text(safe(f"  {note}")) for note in verdict.notes)]


def _tables(table: Table, console: Console) -> list[RichTable]:
    """Return the table, or where it is too wide parts that each fit; every part names its rows."""
    from rich.measure import Measurement

    rows = [row for row in table.rows if row.console]
    if not table.columns:
        return [_pairs(rows)]
    parts: list[list[int]] = [[]]
    for i in range(len(table.columns)):
        wider = _grid(table, rows, [*parts[-1], i])
        width = Measurement.get(console, console.options.update(max_width=1000), wider).maximum
        if width > console.width and parts[-1]:
            parts.append([])
        parts[-1].append(i)
    return [_grid(table, rows, part) for part in parts]


def _grid(table: Table, rows: Sequence[TableRow], columns: Sequence[int]) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    heads = [table.columns[i] for i in columns]
    grid.add_column(Text(safe(table.corner)), overflow="fold")
    for head in heads:
        side: Literal["left", "right"] = "left" if head.text else "right"
        grid.add_column(Text(safe(head.head)), justify=side, overflow="fold", no_wrap=not head.text)
    for row in rows:
        cells = [row.cells[i] for i in columns]
        grid.add_row(Text(safe(row.label)), *(Text(safe(cell.text)) for cell in cells))
    return grid


def _pairs(rows: Sequence[TableRow]) -> RichTable:
    """Return a list of labels and values, with the denominator of each."""
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        cell = row.cells[0]
        note = safe(f", {cell.note}" if cell.note else "")
        grid.add_row(Text(safe(row.label)), Text.assemble((safe(cell.text), "bold"), note))
    return grid
