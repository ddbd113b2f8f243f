"""A scaling benchmark on the console and as CSV, and the reading of scaling.json."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config import ConfigError
from bert_dp.record import safe
from launcher.report.numbers import (
    NA,
    format_count,
    format_gib,
    format_percent,
    format_ratio,
    format_si,
)
from launcher.scaling import view
from launcher.scaling.view import Cell

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

FILE = "scaling.json"
# (head, path, its text, where a narrow console puts it: beside the cell in the first or the second table)
COLUMNS = (
    ("N", "world_size", format_count, 0),
    ("status", "status", view.format_word, 0),
    ("steps/s", "steps_per_s", format_si, 1),
    ("tokens/s", "tokens_per_s", format_si, 1),
    ("per rank", "tokens_per_s_per_gpu", format_si, 1),
    ("speed-up", "speedup", format_ratio, 1),
    ("efficiency", "efficiency", format_percent, 1),
    ("comm.", "communication_efficiency", format_percent, 2),
    ("exposed", "exposed_comm_fraction", format_percent, 2),
    ("data", "data_wait_fraction", format_percent, 2),
    ("slowest", "straggler_ratio", format_ratio, 2),
    ("GiB", "peak_memory_gib", lambda gib: format_gib(gib).removesuffix(" GiB"), 2),
    ("MFU", "mfu", format_percent, 2),
    ("MAMFU", "mamfu", format_percent, 2),
)

LEGEND = (
    "rates over all ranks; speed-up, efficiency +- the farther end of its 95 % interval: against single on "
    "one rank; "
    "comm.: throughput / ceiling; exposed, data: shares of a step that waits for gradients, for data; "
    "slowest: own work of the slowest rank / median; GiB: peak of the greatest rank"
)


def read(folder: Path) -> dict[str, Any]:
    """scaling.json of `folder`. Raises ConfigError when it is not whole."""
    scaling = record.read_json(folder / FILE)
    if scaling is None:
        raise ConfigError([f"{folder / FILE}: not a JSON object; run `bert-dp scale` again to write it anew"])
    return scaling


class Summary:
    """The run cells and the verdicts as a rich renderable; as two tables where the console is narrow."""

    def __init__(self, scaling: Mapping[str, Any]):
        self.scaling = scaling
        self.cells = view.cells(scaling, "run")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement
        from rich.text import Text

        whole = self._table((0, 1, 2))
        if Measurement.get(console, options.update(max_width=1000), whole).maximum <= options.max_width:
            yield whole
        else:
            yield self._table((0, 1))
            yield Text("")
            yield self._table((2,))
        yield Text(LEGEND, style="dim")
        for line, style in verdict_lines(self.scaling):
            yield Text(safe(line), style=style)

    def _table(self, parts: Sequence[int]) -> Table:
        from rich.table import Table
        from rich.text import Text

        columns = [column for column in COLUMNS if column[3] in parts and self._known(column[1])]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("cell", overflow="fold")
        for head, *_ in columns:
            table.add_column(head, justify="right", no_wrap=True)
        for cell in self.cells:
            values = [_plus_minus(cell, path, text(view.at(cell, path))) for _, path, text, _ in columns]
            table.add_row(Text(safe(view.name(cell))), *[Text(safe(value)) for value in values])
        return table

    def _known(self, path: str) -> bool:
        """A rate per peak that no cell has needs no column; the other columns say n/a."""
        return not path.endswith("mfu") or any(view.value(cell, path) is not None for cell in self.cells)


def verdict_lines(scaling: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(line, rich style): failures and flags of the cells, then the verdicts."""
    judged = {str(view.mapped(entry).get("cell")) for entry in view.listed(scaling.get("verdicts"))}
    for cell in view.cells(scaling):
        if view.name(cell) not in judged and cell.get("status") not in ("ok", "pending"):
            cause = (str(cell.get("cause") or "cause not recorded").splitlines() or [""])[0]
            yield f"{view.name(cell)}: {cell.get('status')}: {cause}", "red"
        if cell.get("flags"):
            yield f"{view.name(cell)}: {view.format_word(cell['flags'])}", "yellow"
    for found in map(view.mapped, view.listed(scaling.get("verdicts"))):
        advice = f" Next: {found['next']}" if found.get("next") not in (None, "", "nothing") else ""
        evidence = re.sub(r"(?<![.!?])$", ".", str(found.get("evidence") or NA))
        yield f"{found.get('cell')}: {found.get('verdict')}. {evidence}{advice}", ""


def _plus_minus(cell: Cell, path: str, text: str) -> str:
    """The efficiency with the farther end of its interval."""
    middle, low, high = (view.value(cell, p) for p in (path, f"{path}_ci95.low", f"{path}_ci95.high"))
    if path != "efficiency" or middle is None or low is None or high is None:
        return text
    return f"{text} +-{100 * max(high - middle, middle - low):.1f}"


def csv_rows(scaling: Mapping[str, Any]) -> list[list[str]]:
    """A header and a row per cell. A name is the path into scaling.json, with its unit; unknown is empty."""
    columns = ["id", *dict.fromkeys(c.path for columns in view.TOPICS.values() for c in columns), "cause"]
    return [
        columns,
        *(
            [_plain(view.name(cell) if path == "id" else _entry(cell, path)) for path in columns]
            for cell in view.cells(scaling)
        ),
    ]


def write_csv(scaling: Mapping[str, Any], out: Path) -> None:
    """Write `csv_rows(scaling)` to `out`, atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(scaling))
    record.write_text(out, safe(text.getvalue()))


def _entry(cell: Cell, path: str) -> object:
    found = view.at(cell, path)
    return len(view.listed(found)) if path == "repeats" else found


def _plain(value: object) -> str:
    """A number with all its digits."""
    if value is None or isinstance(value, Mapping):
        return ""
    return "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
