"""Inline SVG for the HTML pages: line plots and stacked bars; `builder.STYLE` colours them.

Coordinates are in the viewBox, WIDTH wide; the page scales them. Colours are classes s0 ... s7 (Okabe-Ito).
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 30, 46
BARS_WIDTH, BAR, ROW = 1080, 26, 62
NUM_COLOURS = 8
MAX_POINTS = 2000
DARK_FILLS = (0, 2, 3)  # colours that need white text

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """A named line; a value that is not finite is a gap."""

    label: str
    points: Sequence[Point]
    colour: int
    style: Literal["line", "marked"] = "line"


@dataclasses.dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    label: str
    value: float


@dataclasses.dataclass(frozen=True)
class Axis:
    """`label` carries the unit, `text` prints a tick; `from_zero` starts the axis at 0."""

    label: str
    text: Callable[[float], str]
    log: bool = False
    from_zero: bool = False


def line_plot(title: str, series: Sequence[Series], x: Axis, y: Axis, levels: Sequence[Level] = ()) -> str:
    """One SVG; a paragraph that says so when there is not a single finite point."""
    drawn = [dataclasses.replace(s, points=downsample(_drawable(s.points, x, y))) for s in series]
    finite = [p for s in drawn for p in s.points if math.isfinite(p[1])]
    if not finite:
        return f'<p class="empty">{_text(title)}: no data recorded</p>'
    xs = _Scale(x, [p[0] for p in finite], LEFT, WIDTH - RIGHT)
    ys = _Scale(y, [p[1] for p in finite] + [level.value for level in levels], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}">']
    parts += _grid(xs, ys)
    parts += [_level(level, ys) for level in levels]
    parts += [_line(s, xs, ys) for s in drawn]
    return "".join([*parts, "</svg>"])


def stacked_bars(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], text: Callable[[float], str]
) -> str:
    """One bar of 100 % per row; `text` prints an amount. A row without any amount says so."""
    height = ROW * len(rows) + 6
    parts = [f'<svg viewBox="0 0 {BARS_WIDTH} {height}" role="img" aria-label="{_text(title)}">']
    names = list(dict.fromkeys(name for _, amounts in rows for name in amounts))
    for index, (label, amounts) in enumerate(rows):
        top, total = index * ROW, sum(amounts.values())
        shown = f"{label}: {text(total) if total > 0 else 'not recorded'}"
        parts.append(f'<text class="name" x="0" y="{top + 16}">{_text(shown)}</text>')
        left = 0.0
        for name, amount in amounts.items():
            if total <= 0 or amount <= 0:
                continue
            width, share = amount / total * BARS_WIDTH, f"{amount / total:.1%}".replace("%", " %")
            colour = names.index(name) % NUM_COLOURS
            parts.append(
                f'<rect class="f{colour}" x="{left:.1f}" y="{top + 24}" width="{width:.1f}" height="{BAR}">'
                f"<title>{_text(name)}: {_text(text(amount))} ({share})</title></rect>"
            )
            if width > 52:
                ink = "white" if colour in DARK_FILLS else "black"
                place = f'x="{left + width / 2:.1f}" y="{top + 24 + BAR / 2 + 4:.1f}"'
                parts.append(f'<text class="{ink}" text-anchor="middle" {place}>{share}</text>')
            left += width
    return "".join([*parts, "</svg>", legend([(name, i, "bar") for i, name in enumerate(names)])])


def legend(entries: Sequence[tuple[str, int, str]]) -> str:
    """HTML: (label, colour, kind) with kind line, marked or bar."""
    items = []
    for label, colour, kind in entries:
        c = colour % NUM_COLOURS
        mark = {
            "line": f'<path class="l{c}" d="M1 6H21"/>',
            "marked": f'<path class="l{c} dash" d="M1 6H21"/><circle class="f{c}" cx="11" cy="6" r="3.5"/>',
            "bar": f'<rect class="f{c}" x="4" y="0" width="13" height="12"/>',
        }[kind]
        items.append(
            f'<span><svg class="key" viewBox="0 0 22 12" aria-hidden="true">{mark}</svg>{_text(label)}</span>'
        )
    return f'<div class="legend">{"".join(items)}</div>'


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the least and the greatest of each stretch, so that a spike stays visible."""
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = []
    num_stretches = (limit - 2) // 2
    for i in range(num_stretches):
        stretch = range(i * len(points) // num_stretches, (i + 1) * len(points) // num_stretches)
        finite = [k for k in stretch if math.isfinite(points[k][1])]
        ends = (
            {min(finite, key=lambda k: points[k][1]), max(finite, key=lambda k: points[k][1])}
            if finite
            else ()
        )
        kept += [points[k] for k in sorted(ends)] or [points[stretch[0]]]
    return [points[0], *kept[1:-1], points[-1]] if len(kept) > 2 else [points[0], points[-1]]


class _Scale:
    """Data to viewBox along one axis, with its ticks."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float):
        self.axis, self.start, self.end = axis, start, end
        low, high = min(values), max(values)
        if axis.from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if axis.log:
            self.low, self.high = math.log10(low), math.log10(high)
            if self.high - self.low < 1e-9:
                self.low, self.high = self.low - 0.5, self.high + 0.5
            self.ticks = _log_ticks(10**self.low, 10**self.high)
            if len(self.ticks) < 3:
                self.ticks = _linear_ticks(10**self.low, 10**self.high)
        else:
            pad = 0.0 if high > low else abs(low) * 0.1 or 1.0
            self.low, self.high = low - (0.0 if axis.from_zero else pad), high + pad
            margin = 0.04 * (self.high - self.low) if end < start else 0.0  # vertical axes only
            self.high += margin
            self.low -= 0.0 if axis.from_zero else margin
            self.ticks = _linear_ticks(self.low, self.high)

    def __call__(self, value: float) -> float:
        position = math.log10(value) if self.axis.log else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.end - self.start)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    multiples = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [m * 10.0**d for d in decades for m in multiples if low * 0.999 <= m * 10.0**d <= high * 1.001]


def _grid(xs: _Scale, ys: _Scale) -> list[str]:
    floor, edge, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for tick in ys.ticks:
        at, shown = ys(tick), _text(ys.axis.text(tick))
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{edge}"/>')
        parts.append(f'<text text-anchor="end" x="{LEFT - 8}" y="{at + 4:.1f}">{shown}</text>')
    for tick in xs.ticks:
        at, shown = xs(tick), _text(xs.axis.text(tick))
        parts.append(f'<path class="axis" d="M{at:.1f} {floor}v5"/>')
        parts.append(f'<text text-anchor="middle" x="{at:.1f}" y="{floor + 19}">{shown}</text>')
    middle = f'text-anchor="middle" x="{(LEFT + edge) / 2:.0f}" y="{HEIGHT - 8}"'
    parts.append(f'<path class="axis" d="M{LEFT} {floor}H{edge}"/>')
    parts.append(f'<text class="label" {middle}>{_text(xs.axis.label)}</text>')
    parts.append(f'<text class="label" x="4" y="14">{_text(ys.axis.label)}</text>')
    return parts


def _level(level: Level, ys: _Scale) -> str:
    at = ys(level.value)
    place = f'text-anchor="end" x="{WIDTH - RIGHT - 4}" y="{at - 5:.1f}"'
    rule = f'<path class="level" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
    return f'{rule}<text class="halo" {place}>{_text(level.label)}</text>'


def _line(series: Series, xs: _Scale, ys: _Scale) -> str:
    colour, commands, pen_down = series.colour % NUM_COLOURS, [], False
    places = [(xs(x), ys(y)) if math.isfinite(y) else None for x, y in series.points]
    for place in places:
        if place is not None:
            commands.append(f"{'L' if pen_down else 'M'}{place[0]:.1f} {place[1]:.1f}")
        pen_down = place is not None
    dots = [p for p in places if p is not None]
    marks = ""
    if len(dots) == 1 or (series.style == "marked" and len(dots) <= 60):
        marks = "".join(f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots)
    dash = " dash" if series.style == "marked" else ""
    return f'<path class="l{colour}{dash}" d="{"".join(commands)}"/>{marks}' if dots else ""


def _drawable(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    """Without points that have no place on the x axis; values that have none on the y axis become gaps."""
    on_axis = [p for p in points if math.isfinite(p[0]) and (p[0] > 0 or not x.log)]
    return [p if p[1] > 0 or not y.log else (p[0], math.nan) for p in on_axis]


def _text(value: str) -> str:
    return html.escape(value)
