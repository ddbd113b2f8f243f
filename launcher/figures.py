"""Figures whose rows are words: bars in absolute units and boxes of quartiles, drawn beside HTML text.

Places are per cent of the width, so that text keeps its size and wraps on a narrow page or on paper, and a
long figure breaks between rows. Each figure is one element with role="img".
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence

from launcher.plots import DARK_FILLS, NUM_COLOURS, legend, linear_ticks

LABELLED = 15.0  # per cent of the width: a narrower part has its amount in its title alone
AXIS_EVERY = 12  # rows between two axes
QUARTILES = ("min", "q1", "median", "q3", "max")

Text = Callable[[float], str]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A row of parts that add up; `note` stands beside its name."""

    label: str
    parts: Mapping[str, float]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Box:
    """A row of a panel: quartiles by series name; what of QUARTILES is missing is not drawn."""

    label: str
    series: Mapping[str, Mapping[str, float]]


def bars(title: str, axis: str, rows: Sequence[Bar], text: Text, tick: Text) -> str:
    """A bar per row, as long as its parts together; `text` prints an amount, `tick` a place on the axis."""
    drawn = [row for row in rows if sum(row.parts.values()) > 0]
    if not drawn:
        return empty(title)
    names = list(dict.fromkeys(name for row in drawn for name in row.parts))
    high = max(sum(row.parts.values()) for row in drawn)
    ticks = [place for place in linear_ticks(0.0, high) if place <= high]
    lines = [_axis(ticks, 0.0, high, tick)]
    for index, row in enumerate(drawn, 1):
        lines.append(_bar(row, names, ticks, high, text))
        if index % AXIS_EVERY == 0 or index == len(drawn):
            lines.append(_axis(ticks, 0.0, high, tick))
    head = f'<div class="label">{_escape(axis)}</div>'
    return _figure(title, head + "".join(lines)) + legend([(n, i, "bar") for i, n in enumerate(names)])


def boxes(
    title: str, panels: Sequence[tuple[str, Sequence[Box], str]], text: Text, tick: Text, unit: str
) -> str:
    """A panel per (name, rows, note), each with its own axis of `unit`."""
    drawn = [(name, rows, note) for name, rows, note in panels if _values(rows)]
    if not drawn:
        return empty(title)
    names = list(dict.fromkeys(name for _, rows, _ in drawn for row in rows for name in row.series))
    parts = [_panel(name, rows, note, names, text, tick, unit) for name, rows, note in drawn]
    keys = legend([(name, i, "bar") for i, name in enumerate(names)])
    return _figure(title, f'<div class="panels">{"".join(parts)}</div>') + keys


def empty(title: str) -> str:
    """What stands in place of a figure without a single number."""
    return f'<p class="empty">{_escape(title)}: no data recorded</p>'


def _figure(title: str, content: str) -> str:
    return f'<div class="figure" role="img" aria-label="{_escape(title)}">{content}</div>'


def _bar(row: Bar, names: Sequence[str], ticks: Sequence[float], high: float, text: Text) -> str:
    total, left, parts = sum(row.parts.values()), 0.0, [_rules(ticks, 0.0, high, 20)]
    for name, amount in row.parts.items():
        if amount <= 0:
            continue
        colour, width = names.index(name) % NUM_COLOURS, 100 * amount / high
        share = f"{100 * amount / total:.1f} %"
        place = f'x="{left:.2f}%" y="2" width="{width:.2f}%" height="16"'
        parts.append(
            f'<rect class="f{colour}" {place}>'
            f"<title>{_escape(name)}: {_escape(text(amount))} ({share})</title></rect>"
        )
        if width >= LABELLED:
            ink = "white" if colour in DARK_FILLS else "black"
            place = f'text-anchor="middle" x="{left + width / 2:.2f}%" y="14.5"'
            parts.append(f'<text class="{ink}" {place}>{_escape(text(amount))}</text>')
        left += width
    note = f' <span class="note">{_escape(row.note)}</span>' if row.note else ""
    name = f'<div class="name">{_escape(row.label)} <b>{_escape(text(total))}</b>{note}</div>'
    return f'<div class="row">{name}{_flow(20, "".join(parts))}</div>'


def _panel(
    name: str, rows: Sequence[Box], note: str, names: Sequence[str], text: Text, tick: Text, unit: str
) -> str:
    values = _values(rows)
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room, high + room
    ticks = linear_ticks(low, high, 3)
    height = 14 * max(len(row.series) for row in rows)
    lines = []
    for row in rows:
        parts = [_rules(ticks, low, high, height)]
        for index, (key, box) in enumerate(row.series.items()):
            parts.append(_box(key, box, names.index(key) % NUM_COLOURS, 7 + 14 * index, low, high, text))
        lines.append(
            f'<div class="rank"><span>{_escape(row.label)}</span>{_flow(height, "".join(parts))}</div>'
        )
    axis = f'<div class="rank"><span></span>{_axis(ticks, low, high, tick)}</div>'
    below = f'<div class="note">{_escape(note)}</div>' if note else ""
    head = f'<div class="name">{_escape(name)} <span class="note">{_escape(unit)}</span></div>'
    return f'<div class="panel">{head}{"".join(lines)}{axis}{below}</div>'


def _box(
    name: str, box: Mapping[str, float], colour: int, y: int, low: float, high: float, text: Text
) -> str:
    at = {key: 100 * (box[key] - low) / (high - low) for key in QUARTILES if key in box}
    told = ", ".join(f"{key} {text(box[key])}" for key in at)
    parts = []
    if {"min", "max"} <= at.keys():
        parts.append(
            f'<line class="l{colour}" x1="{at["min"]:.2f}%" x2="{at["max"]:.2f}%" y1="{y}" y2="{y}"/>'
        )
    for key in ("min", "max"):
        if key in at:
            place = f'x1="{at[key]:.2f}%" x2="{at[key]:.2f}%" y1="{y - 3}" y2="{y + 3}"'
            parts.append(f'<line class="l{colour}" {place}/>')
    if {"q1", "q3"} <= at.keys():
        place = f'x="{at["q1"]:.2f}%" width="{at["q3"] - at["q1"]:.2f}%" y="{y - 4}" height="8"'
        parts.append(f'<rect class="f{colour}" {place}/>')
    if "median" in at:
        place = f'x1="{at["median"]:.2f}%" x2="{at["median"]:.2f}%" y1="{y - 5}" y2="{y + 5}"'
        parts.append(f'<line class="median" {place}/>')
    return f"<g><title>{_escape(name)}: {_escape(told)}</title>{''.join(parts)}</g>"


def _values(rows: Sequence[Box]) -> list[float]:
    return [box[key] for row in rows for box in row.series.values() for key in QUARTILES if key in box]


def _axis(ticks: Sequence[float], low: float, high: float, text: Text) -> str:
    parts = []
    for tick in ticks:
        at = 100 * (tick - low) / (high - low)
        anchor = "start" if at < 6 else "end" if at > 92 else "middle"
        parts.append(f'<text text-anchor="{anchor}" x="{at:.2f}%" y="13">{_escape(text(tick))}</text>')
    return _flow(18, "".join(parts))


def _rules(ticks: Sequence[float], low: float, high: float, height: int) -> str:
    places = (100 * (tick - low) / (high - low) for tick in ticks)
    return "".join(
        f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{height}"/>' for at in places
    )


def _flow(height: int, content: str) -> str:
    """An SVG as wide as its place and `height` pixels high."""
    return f'<svg class="flow" style="height:{height}px">{content}</svg>'


def _escape(value: str) -> str:
    return html.escape(value)
