"""Inline SVG for the HTML pages: line plots and stacked bars; `builder.STYLE` colours them.

Coordinates are in the viewBox, WIDTH wide; the page scales them. Colours are classes s0 ... s7 (Okabe-Ito).
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 30, 46
BARS_WIDTH, BAR, ROW = 1080, 26, 62
NUM_COLOURS = 8
MAX_POINTS = 2000
TICK_ROOM, ASKED_ROOM, TICK_HEIGHT = (
    46,
    30,
    16,
)  # between the middles of two ticks; of those asked for; upright
SHAPES = (  # drawn around 0, 0
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-4.6L4.6 3.6H-4.6Z",
)
DARK_FILLS = (0, 2, 3)  # colours that need white text

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """A named line; a value that is not finite is a gap.

    Styles: line; marked (dashed, circles); shaped (a shape of its own at each point, so that more series than
    colours stay apart, also in print); rule (dashed, no marks); dots (marks alone); soft (grey, dashed); fine
    (grey, dotted: what no run measured)."""

    label: str
    points: Sequence[Point]
    colour: int
    style: Literal["line", "marked", "shaped", "rule", "dots", "soft", "fine"] = "line"
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): an interval around each point."""
    width: float | None = None
    """Of the line; None: that of the style sheet."""


@dataclasses.dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    label: str
    value: float
    left: bool = False
    """Whether the label stands at the left and below, instead of at the right and above."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical reference line; the legend names it."""

    value: float
    label: str


@dataclasses.dataclass(frozen=True)
class Axis:
    """`label` carries the unit, `text` prints a tick; `from_zero` starts the axis at 0."""

    label: str
    text: Callable[[float], str]
    log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Where the ticks stand, e.g. at the numbers of ranks that were run; empty: round numbers."""
    pad: float = 0.0
    """Free space at both ends, as a share of the range."""


def line_plot(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    levels: Sequence[Level] = (),
    marks: Sequence[Mark] = (),
) -> str:
    """One SVG; a paragraph that says so when there is not a single finite measured point."""
    drawn = [dataclasses.replace(s, points=downsample(_drawable(s.points, x, y))) for s in series]
    finite = [p for s in drawn for p in s.points if math.isfinite(p[1])]
    if not any(math.isfinite(p[1]) for s in drawn for p in s.points if s.style != "fine"):
        return f'<p class="empty">{_text(title)}: no data recorded</p>'
    xs = _Scale(x, [p[0] for p in finite], LEFT, WIDTH - RIGHT)
    ends = [
        v for s in drawn for _, *pair in s.band for v in pair if math.isfinite(v) and (v > 0 or not y.log)
    ]
    ys = _Scale(y, [p[1] for p in finite] + [level.value for level in levels] + ends, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}">']
    parts += _grid(xs, ys)
    parts += [_level(level, ys) for level in levels]
    parts += [_mark(mark, xs) for mark in marks]
    parts += [_band(s, xs, ys) for s in drawn]
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
    """HTML: (label, colour, kind) with kind a style of `Series`, mark or bar."""
    items = []
    for label, colour, kind in entries:
        c = colour % NUM_COLOURS
        mark = {
            "line": f'<path class="l{c}" d="M1 6H21"/>',
            "rule": f'<path class="l{c} dash" d="M1 6H21"/>',
            "soft": '<path class="soft" d="M1 6H21"/>',
            "fine": '<path class="fine" d="M1 6H21"/>',
            "mark": '<path class="level" d="M11 0V12"/>',
            "dots": shape(colour, 11, 6),
            "shaped": f'<path class="l{c}" d="M1 6H21"/>{shape(colour, 11, 6)}',
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
        if axis.from_zero and not axis.log:
            low, high = min(0.0, low), max(0.0, high)
        if axis.log:
            self.low, self.high = math.log10(low), math.log10(high)
            if self.high - self.low < 1e-9:
                self.low, self.high = self.low - 0.5, self.high + 0.5
            self.ticks = _log_ticks(10**self.low, 10**self.high)
            if len(self.ticks) < 3:
                self.ticks = linear_ticks(10**self.low, 10**self.high)
        else:
            pad = 0.0 if high > low else abs(low) * 0.1 or 1.0
            self.low, self.high = low - (0.0 if axis.from_zero else pad), high + pad
            margin = 0.04 * (self.high - self.low) if end < start else 0.0  # vertical axes only
            self.high += margin
            self.low -= 0.0 if axis.from_zero else margin
            self.ticks = linear_ticks(self.low, self.high)
        room = axis.pad * (self.high - self.low)
        self.low, self.high = self.low - room, self.high + room
        asked = sorted(t for t in set(axis.ticks) if t > 0 or not axis.log)
        self.ticks = self._apart(asked, ASKED_ROOM) if asked else self._apart(self.ticks, TICK_ROOM)

    def __call__(self, value: float) -> float:
        position = math.log10(value) if self.axis.log else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.end - self.start)

    def _apart(self, ticks: Sequence[float], room: float) -> list[float]:
        """Without those whose text would run into the one before, or that lie outside."""
        room = room if self.start < self.end else TICK_HEIGHT
        kept: list[float] = []
        for tick in ticks:
            inside = min(self.start, self.end) <= self(tick) <= max(self.start, self.end)
            if inside and (not kept or abs(self(tick) - self(kept[-1])) >= room):
                kept.append(tick)
        return kept


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    raw = (high - low) / count
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
    if level.left:
        place = f'x="{LEFT + 4}" y="{min(at + 15, HEIGHT - BOTTOM - 3):.1f}"'
    rule = f'<path class="level" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
    return f'{rule}<text class="halo" {place}>{_text(level.label)}</text>'


def _mark(mark: Mark, xs: _Scale) -> str:
    if not min(xs.start, xs.end) <= xs(mark.value) <= max(xs.start, xs.end):
        return ""
    rule = f'<path class="level" d="M{xs(mark.value):.1f} {TOP}V{HEIGHT - BOTTOM}">'
    return f"{rule}<title>{_text(mark.label)}</title></path>"


def _band(series: Series, xs: _Scale, ys: _Scale) -> str:
    """The area between the ends of the intervals, and each interval as a whisker."""
    colour, parts, run = series.colour % NUM_COLOURS, [], []
    for x, low, high in [*series.band, (0.0, math.nan, math.nan)]:
        on_axis = not (ys.axis.log and low <= 0) and not (xs.axis.log and x <= 0)
        if on_axis and math.isfinite(x + low + high):
            at, bottom, top = xs(x), ys(low), ys(high)
            run.append((at, bottom, top))
            whisker = f"M{at:.1f} {bottom:.1f}V{top:.1f}M{at - 4:.1f} {bottom:.1f}h8M{at - 4:.1f} {top:.1f}h8"
            parts.append(f'<path class="l{colour} whisker" d="{whisker}"/>')
            continue
        edge = [f"{at:.1f} {top:.1f}" for at, _, top in run]
        edge += [f"{at:.1f} {bottom:.1f}" for at, bottom, _ in reversed(run)]
        if len(run) > 1:
            parts.insert(0, f'<path class="f{colour} band" d="M{"L".join(edge)}Z"/>')
        run = []
    return "".join(parts)


def shape(index: int, x: float, y: float, title: str = "") -> str:
    """The mark of series `index`: 32 of them differ in colour or shape."""
    outline = SHAPES[(index + index // NUM_COLOURS) % len(SHAPES)]
    place = f'class="f{index % NUM_COLOURS}" transform="translate({x:.1f} {y:.1f})" d="{outline}"'
    return f"<path {place}><title>{_text(title)}</title></path>" if title else f"<path {place}/>"


def _line(series: Series, xs: _Scale, ys: _Scale) -> str:
    colour, commands, pen_down = series.colour % NUM_COLOURS, [], False
    places = [(xs(x), ys(y)) if math.isfinite(y) else None for x, y in series.points]
    for place in places:
        if place is not None:
            commands.append(f"{'L' if pen_down else 'M'}{place[0]:.1f} {place[1]:.1f}")
        pen_down = place is not None
    dots = [p for p in places if p is not None]
    marks = ""
    if (len(dots) == 1 and series.style != "fine") or (series.style == "marked" and len(dots) <= 60):
        dot = 6 if series.style == "soft" else colour  # 6: grey
        marks = "".join(f'<circle class="f{dot}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots)
    if series.style in ("shaped", "dots"):
        known = [(p, place) for p, place in zip(series.points, places, strict=True) if place is not None]
        marks = "".join(
            shape(series.colour, *place, f"{series.label}: {xs.axis.text(x)}, {ys.axis.text(y)}")
            for (x, y), place in known
        )
    if series.style == "dots" or not dots:
        return marks
    name = str(series.style) if series.style in ("soft", "fine") else f"l{colour}"
    dash = " dash" if series.style in ("marked", "rule") else ""
    width = f' style="stroke-width:{series.width:g}"' if series.width else ""
    return f'<path class="{name}{dash}"{width} d="{"".join(commands)}"/>{marks}'


def _drawable(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    """Without points that have no place on the x axis; values that have none on the y axis become gaps."""
    on_axis = [p for p in points if math.isfinite(p[0]) and (p[0] > 0 or not x.log)]
    return [p if p[1] > 0 or not y.log else (p[0], math.nan) for p in on_axis]


def _text(value: str) -> str:
    return html.escape(value)
