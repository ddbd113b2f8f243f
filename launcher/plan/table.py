"""The answer of `plan scaling` for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bert_dp.record import safe
from launcher.report.numbers import format_count, format_duration, format_percent, format_si

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def scaling_table(answer: Mapping[str, Any]) -> Group:
    """The rows, the levers at the greatest number of GPUs, measured cells, and what was assumed."""
    from rich.console import Group
    from rich.text import Text

    rows = answer["rows"]
    parts: list[Any] = [_rows(rows)]
    last = max(rows, key=lambda row: row["world_size"])
    if last["levers"]:
        parts.append(Text(f"\nWhat one change would do on {format_count(last['world_size'])} GPUs:"))
        for lever in last["levers"]:
            bound = " (what is lost there; no setting)" if lever["bound"] else ""
            parts.append(Text(f"  {_gain(lever):>8}  {lever['lever']}{bound}"))
    if answer["measured"]:
        parts += [Text("\nPredicted beside measured:"), _measured(answer["measured"])]
    parts += [Text(""), *(Text(safe(f"* {line}"), style="dim") for line in answer["assumptions"])]
    return Group(*parts)


def _rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = {"tensor": any(row["tensor"] > 1 for row in rows), "MFU": any(row["mfu"] for row in rows)}
    every = ("GPUs", "tensor", "accum.", "step", "exposed", "efficiency", "MFU", "tokens/s", "best change")
    heads = [head for head in every if shown.get(head, True)]
    for head in heads:
        table.add_column(
            head, justify="left" if head == "best change" else "right", no_wrap=head != "best change"
        )
    for row in rows:
        levers = row["levers"]
        best = next((lever for lever in levers if not lever["bound"]), None)
        cells = {
            "GPUs": format_count(row["world_size"]),
            "tensor": format_count(row["tensor"]),
            "accum.": format_count(row["accumulation"]),
            "step": _step(row["step_time_s"]),
            "exposed": format_percent(row["exposed_comm_fraction"]),
            "efficiency": format_percent(row["efficiency"]),
            "MFU": format_percent(row["mfu"]),
            "tokens/s": format_si(row["tokens_per_s"]),
            "best change": f"{_gain(best)} {best['lever']}" if best else "",
        }
        table.add_row(*(cells[head] for head in heads))
    return table


def _measured(cells: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for head in (
        "cell",
        "step predicted",
        "measured",
        "efficiency predicted",
        "measured",
        "within the interval",
    ):
        table.add_column(head, justify="left" if head == "cell" else "right")
    for cell in cells:
        within = {True: "yes", False: "no", None: "n/a"}[cell["within"]]
        table.add_row(
            Text(safe(cell["cell"])),
            _step(cell["predicted_step_s"]),
            _step(cell["measured_step_s"]),
            format_percent(cell["predicted_efficiency"]),
            format_percent(cell["measured_efficiency"]),
            within,
        )
    return table


def _gain(lever: Mapping[str, Any]) -> str:
    return f"{100 * lever['gain']:+.1f} %"


def _step(seconds: float | None) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds is not None and seconds < 1 else format_duration(seconds)
