"""A Figure as the JSON that plotly's script draws, and as a table of its numbers.

Colours are names that page.js looks up in its theme.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bert_dp.record import safe
from launcher.report.model import QUARTILES, Axis, Bars, Boxes, Cell, Column, Figure, Line, Mark, Row, Table
from launcher.report.numbers import FORMATS, Unit, format_plain

NUM_COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
FEW = 40  # points up to which each has a whisker
# of a name in a legend, beside a box, on an axis; a pointer shows the whole one
LABEL_CHARS, BOX_CHARS, TITLE_CHARS = 30, 16, 60
# pixels: of the area of lines, of a bar's row, of a box, of a line of the legend; above and below the area
HEIGHT, ROW_HEIGHT, BOX_HEIGHT, LEGEND_HEIGHT, TOP, BOTTOM = 250, 50, 24, 20, 30, 48
PIXELS_PER_CHAR, SMALL_WIDTH = 7, 330
DASHES = {"dashed": "dash", "dotted": "dot"}
TICKS: Mapping[Unit, Mapping[str, Any]] = {
    "count": {"tickformat": ",d"},
    "percent": {"tickformat": "~%"},
    "lr": {"exponentformat": "e", "minexponent": 2},
    "seconds": {"exponentformat": "SI", "minexponent": 1, "ticksuffix": "s"},
}
OTHER_TICKS = {"exponentformat": "SI", "separatethousands": True}
HOVER = "%{text}<extra></extra>"


def drawing(figure: Figure) -> dict[str, Any]:
    """`data` and `layout` for Plotly.newPlot; every text in it is escaped."""
    data = [trace for t in figure.traces for trace in _trace(figure, t)]
    labels = [entry["name"] for entry in data if entry.get("showlegend")] + [m.label for m in figure.marks]
    area = HEIGHT
    if figure.rows:
        boxes = sum(isinstance(t, Boxes) for t in figure.traces)
        area = len(figure.rows) * (BOX_HEIGHT * boxes if boxes else ROW_HEIGHT)
    has_legend = len(set(labels)) > 1 or bool(figure.marks) or bool(figure.rows)
    legend = sum(len(label) * PIXELS_PER_CHAR + 45 for label in dict.fromkeys(labels))
    below = BOTTOM + LEGEND_HEIGHT * (1 + legend // SMALL_WIDTH) * has_legend
    layout = {
        "height": TOP + area + below,
        "margin": {"t": TOP, "b": below, "l": 8, "r": 14},
        "title": {"text": "" if figure.rows else text_of(figure.y.label, TITLE_CHARS)},
        "xaxis": _axis(figure.x),
        "yaxis": _rows_axis(figure) if figure.rows else _axis(figure.y, titled=False),
        "shapes": [*_levels(figure), *_marks(figure.marks)],
        "showlegend": has_legend,
        "annotations": _row_names(figure),
        "barmode": "stack",
        "boxmode": "group",
    }
    return {"data": data, "layout": layout}


def numbers_of(figure: Figure) -> Table:
    """Every number that a figure draws."""
    boxes = [trace for trace in figure.traces if isinstance(trace, Boxes)]
    bars = [trace for trace in figure.traces if isinstance(trace, Bars)]
    if boxes:
        heads: Sequence[str] = QUARTILES
        rows = [
            Row(f"{row}, {trace.label}", [Cell(format_plain(box.get(q))) for q in QUARTILES])
            for i, row in enumerate(figure.rows)
            for trace in boxes
            if (box := trace.boxes[i])
        ]
    elif bars:
        heads = [trace.label for trace in bars]
        rows = [
            Row(row, [Cell(format_plain(trace.parts[i])) for trace in bars])
            for i, row in enumerate(figure.rows)
        ]
    else:
        lines = [trace for trace in figure.traces if isinstance(trace, Line)]
        heads = list(dict.fromkeys(line.label for line in lines))
        points: dict[float, dict[str, list[str]]] = {}
        for line in lines:
            for i, x in enumerate(line.x):
                points.setdefault(x, {}).setdefault(line.label, []).append(_value(line, i, format_plain))
        rows = [
            Row(format_plain(x), [Cell("; ".join(points[x].get(label, ()))) for label in heads])
            for x in sorted(points)
        ]
    return Table(rows, [Column(head) for head in heads], corner=figure.x.label)


def _value(line: Line, i: int, text: Callable[[object], str]) -> str:
    """The y of a point, with its interval where it has one: `1.5 [1.25, 1.75]`."""
    ends = [end for end in (line.low[i], line.high[i]) if end is not None] if line.low else []
    return text(line.y[i]) + (f" [{', '.join(map(text, ends))}]" if len(ends) == 2 else "")


def text_of(text: str, limit: int = 0) -> str:
    """Foreign text for plotly, which reads some HTML; at most `limit` characters long, or whole."""
    text = " ".join(safe(text).split())
    if limit and len(text) > limit:
        text = f"{text[: limit - 1]}\u2026"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _trace(figure: Figure, trace: Line | Bars | Boxes) -> list[dict[str, Any]]:
    if isinstance(trace, Line):
        return _line(figure, trace)
    colour = _colour(figure.traces.index(trace))
    return [_bars(figure, trace, colour) if isinstance(trace, Bars) else _boxes(figure, trace, colour)]


def _named(figure: Figure, trace: Line | Bars | Boxes) -> dict[str, Any]:
    """A name stands in the legend once, and hides all that bear it."""
    first = next(t for t in figure.traces if t.label == trace.label)
    name = text_of(trace.label, LABEL_CHARS)
    return {"name": name, "legendgroup": name, "showlegend": first is trace, "hovertemplate": HOVER}


def _colour(index: int | None) -> str:
    return "soft" if index is None else f"c{index % NUM_COLOURS}"


def _line(figure: Figure, line: Line) -> list[dict[str, Any]]:
    colour = _colour(line.colour)
    marks = line.style in ("marks", "both") or (line.style != "dotted" and len(line.values) == 1)
    index = line.colour or 0
    drawn = {
        **_named(figure, line),
        "type": "scatter",
        "mode": "markers" if line.style == "marks" else "lines+markers" if marks else "lines",
        "x": list(line.x),
        "y": list(line.y),
        "text": [text_of(_point(figure, line, i)) for i in range(len(line.x))],
        "line": {"color": colour, "width": line.width, "dash": DASHES.get(line.style, "solid")},
        "marker": {
            "color": colour,
            "size": 7,
            "symbol": SYMBOLS[(index + index // NUM_COLOURS) % len(SYMBOLS)],
        },
    }
    if not line.low:
        return [drawn]
    if len(line.x) <= FEW:
        drawn["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [_difference(high, y) for y, high in zip(line.y, line.high, strict=True)],
            "arrayminus": [_difference(y, low) for y, low in zip(line.y, line.low, strict=True)],
            "color": colour,
            "thickness": 1.2,
            "width": 4,
        }
    return [_band(line, colour), drawn]


def _difference(greater: float | None, less: float | None) -> float | None:
    return None if greater is None or less is None else greater - less


def _band(line: Line, colour: str) -> dict[str, Any]:
    """The area between the ends of the intervals, apart where there is a gap."""
    points = zip(line.x, line.low, line.high, strict=True)
    x: list[float | None] = []
    y: list[float | None] = []
    for has_interval, group in itertools.groupby(points, key=lambda point: None not in point):
        if has_interval:
            xs, lows, highs = zip(*group, strict=True)
            x += [*xs, *reversed(xs), None]
            y += [*highs, *reversed(lows), None]
    return {
        "type": "scatter",
        "mode": "none",
        "x": x[:-1],
        "y": y[:-1],
        "fill": "toself",
        "fillcolor": f"{colour}/0.2",
        "hoverinfo": "skip",
        "name": text_of(line.label, LABEL_CHARS),
        "legendgroup": text_of(line.label, LABEL_CHARS),
        "showlegend": False,
    }


def _point(figure: Figure, line: Line, i: int) -> str:
    y = _value(line, i, FORMATS[figure.y.unit])
    return f"{line.label}: {y} at {FORMATS[figure.x.unit](line.x[i])}"


def _bars(figure: Figure, bars: Bars, colour: str) -> dict[str, Any]:
    texts = bars.texts or [FORMATS[figure.x.unit](part) for part in bars.parts]
    names = zip(figure.rows, texts, strict=True)
    return {
        **_named(figure, bars),
        "type": "bar",
        "orientation": "h",
        "x": [max(0.0, part or 0.0) for part in bars.parts],
        "y": list(range(len(figure.rows))),
        "width": 0.42,
        "text": [text_of(f"{row}, {bars.label}: {text}") for row, text in names],
        "marker": {"color": colour},
        "textposition": "none",
    }


def _boxes(figure: Figure, boxes: Boxes, colour: str) -> dict[str, Any]:
    whole = [(i, box) for i, box in enumerate(boxes.boxes) if box and all(q in box for q in QUARTILES)]
    names = dict(zip(QUARTILES, ("lowerfence", "q1", "median", "q3", "upperfence"), strict=True))
    return {
        **_named(figure, boxes),
        "type": "box",
        "orientation": "h",
        "y": [i for i, _ in whole],
        **{theirs: [box[ours] for _, box in whole] for ours, theirs in names.items()},
        "line": {"color": colour, "width": 1.4},
        "fillcolor": f"{colour}/0.35",
        "hovertemplate": "",
    }


def _axis(axis: Axis, *, titled: bool = True) -> dict[str, Any]:
    ticks: Mapping[str, Any] = TICKS.get(axis.unit, OTHER_TICKS)
    if axis.ticks:
        shown = [text_of(FORMATS[axis.unit](tick)) for tick in axis.ticks]
        ticks = {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": shown}
    return {
        "type": "log" if axis.log else "linear",
        "title": {"text": text_of(axis.label, TITLE_CHARS) if titled else ""},
        "nticks": 6,
        "rangemode": "tozero" if axis.from_zero else "normal",
        **ticks,
    }


def _rows_axis(figure: Figure) -> dict[str, Any]:
    """Rows from the top down; the name of a box stands beside it."""
    bars, count = _has_bars(figure), len(figure.rows)
    return {
        "range": [count - 0.6, -0.7] if bars else [count - 0.5, -0.5],
        "tickmode": "array",
        "tickvals": list(range(count)),
        "ticktext": [text_of(row, BOX_CHARS) for row in figure.rows],
        "showticklabels": not bars,
        "showgrid": False,
        "fixedrange": True,
    }


def _row_names(figure: Figure) -> list[dict[str, Any]]:
    """The name of a bar stands above it."""
    names = figure.rows if _has_bars(figure) else ()
    return [
        {
            "text": text_of(name, LABEL_CHARS),
            "xref": "paper",
            "x": 0,
            "xanchor": "left",
            "y": i - 0.24,
            "yanchor": "bottom",
            "showarrow": False,
        }
        for i, name in enumerate(names)
    ]


def _has_bars(figure: Figure) -> bool:
    return any(isinstance(trace, Bars) for trace in figure.traces)


def _levels(figure: Figure) -> list[dict[str, Any]]:
    """The label of one above all that is drawn, intervals included, stands below it, where there is room."""
    drawn = [value for trace in figure.traces for value in trace.values]
    drawn += [high for trace in figure.traces if isinstance(trace, Line) for high in trace.high if high]
    highest = max(drawn, default=0.0)
    return [
        {
            **_across("y", level.value, "soft", 1.2),
            "label": {
                "text": text_of(level.label, LABEL_CHARS),
                "textposition": "start" if level.left else "end",
                "yanchor": "top" if level.value >= highest else "bottom",
            },
        }
        for level in figure.levels
    ]


def _marks(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    names = [text_of(mark.label, LABEL_CHARS) for mark in marks]
    different = list(dict.fromkeys(names))
    colours = {name: _colour(i + 1) for i, name in enumerate(different)} if len(different) > 1 else {}
    return [
        {
            **_across("x", mark.value, colours.get(name, "soft"), 1.4),
            "name": name,
            "legendgroup": name,
            "showlegend": names.index(name) == i,
        }
        for i, (mark, name) in enumerate(zip(marks, names, strict=True))
    ]


def _across(axis: str, value: float, colour: str, width: float) -> dict[str, Any]:
    """A dotted line through the whole area at `value` of this axis."""
    other = {"x": "y", "y": "x"}[axis]
    return {
        "type": "line",
        f"{other}ref": "paper",
        **{f"{other}0": 0, f"{other}1": 1, f"{axis}0": value, f"{axis}1": value},
        "line": {"color": colour, "width": width, "dash": "dot"},
    }
