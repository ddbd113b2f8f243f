"""A Figure as the JSON that plotly's script draws, and as a table of its numbers.

Colours are names that page.js looks up in its theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_dp.record import safe
from launcher.report.model import QUARTILES, Axis, Bars, Boxes, Cell, Column, Figure, Line, Mark, Row, Table
from launcher.report.numbers import FORMATS, Unit, format_plain

NUM_COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
FEW = 40  # points up to which each has a whisker
LABEL_CHARS, BOX_CHARS, TITLE_CHARS = (
    30,
    16,
    60,
)  # of a name on an axis or in a legend; a pointer shows the whole one
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
        return Table(
            [
                Row(f"{row}, {trace.label}", [Cell(format_plain(box.get(q))) for q in QUARTILES])
                for i, row in enumerate(figure.rows)
                for trace in boxes
                if (box := trace.boxes[i])
            ],
            [Column(q) for q in QUARTILES],
            corner=figure.x.label,
        )
    if bars:
        return Table(
            [
                Row(row, [Cell(format_plain(trace.parts[i])) for trace in bars])
                for i, row in enumerate(figure.rows)
            ],
            [Column(trace.label) for trace in bars],
            corner=figure.x.label,
        )
    lines = [trace for trace in figure.traces if isinstance(trace, Line)]
    labels = list(dict.fromkeys(line.label for line in lines))
    points: dict[float, dict[str, list[str]]] = {}
    for line in lines:
        for i, x in enumerate(line.x):
            points.setdefault(x, {}).setdefault(line.label, []).append(_value(line, i))
    rows = [
        Row(format_plain(x), [Cell("; ".join(points[x].get(label, ()))) for label in labels])
        for x in sorted(points)
    ]
    return Table(rows, [Column(label) for label in labels], corner=figure.x.label)


def _value(line: Line, i: int) -> str:
    ends = [end for end in (line.low[i], line.high[i]) if end is not None] if line.low else []
    return format_plain(line.y[i]) + (f" [{', '.join(map(format_plain, ends))}]" if len(ends) == 2 else "")


def text_of(text: str, limit: int = 0) -> str:
    """Foreign text for plotly, which reads some HTML; at most `limit` characters long, or whole."""
    text = " ".join(safe(text).split())
    if limit and len(text) > limit:
        text = f"{text[: limit - 1]}\u2026"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _trace(figure: Figure, trace: Line | Bars | Boxes) -> Iterable[dict[str, Any]]:
    if isinstance(trace, Line):
        return _line(figure, trace)
    index = figure.traces.index(trace)
    return [_bars(figure, trace, index) if isinstance(trace, Bars) else _boxes(figure, trace, index)]


def _named(figure: Figure, trace: Line | Bars | Boxes) -> dict[str, Any]:
    """A name stands in the legend once, and hides all that bear it."""
    first = next(t for t in figure.traces if t.label == trace.label)
    name = text_of(trace.label, LABEL_CHARS)
    return {"name": name, "legendgroup": name, "showlegend": first is trace, "hovertemplate": HOVER}


def _colour(index: int | None) -> str:
    return "soft" if index is None else f"c{index % NUM_COLOURS}"


def _line(figure: Figure, line: Line) -> list[dict[str, Any]]:
    colour, few = _colour(line.colour), len(line.x) <= FEW
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
    ends = list(zip(line.y, line.low, line.high, strict=True))
    if few:
        drawn["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [None if y is None or high is None else high - y for y, _, high in ends],
            "arrayminus": [None if y is None or low is None else y - low for y, low, _ in ends],
            "color": colour,
            "thickness": 1.2,
            "width": 4,
        }
    return [_band(figure, line, colour), drawn]


def _band(figure: Figure, line: Line, colour: str) -> dict[str, Any]:
    """The area between the ends of the intervals, apart where there is a gap."""
    x: list[float | None] = []
    y: list[float | None] = []
    for run in _runs(line):
        x += [*[p[0] for p in run], *[p[0] for p in reversed(run)], None]
        y += [*[p[2] for p in run], *[p[1] for p in reversed(run)], None]
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


def _runs(line: Line) -> list[list[tuple[float, float, float]]]:
    """Points beside each other that have an interval."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(line.x, line.low, line.high, strict=True):
        if low is None or high is None:
            runs.append([])
        else:
            runs[-1].append((x, low, high))
    return [run for run in runs if run]


def _point(figure: Figure, line: Line, i: int) -> str:
    y, x = FORMATS[figure.y.unit](line.y[i]), FORMATS[figure.x.unit](line.x[i])
    ends = ""
    if line.low and line.low[i] is not None and line.high[i] is not None:
        ends = f" [{FORMATS[figure.y.unit](line.low[i])}, {FORMATS[figure.y.unit](line.high[i])}]"
    return f"{line.label}: {y}{ends} at {x}"


def _bars(figure: Figure, bars: Bars, index: int) -> dict[str, Any]:
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
        "marker": {"color": _colour(index)},
        "textposition": "none",
    }


def _boxes(figure: Figure, boxes: Boxes, index: int) -> dict[str, Any]:
    whole = [(i, box) for i, box in enumerate(boxes.boxes) if box and all(q in box for q in QUARTILES)]
    names = dict(zip(QUARTILES, ("lowerfence", "q1", "median", "q3", "upperfence"), strict=True))
    return {
        **_named(figure, boxes),
        "type": "box",
        "orientation": "h",
        "y": [i for i, _ in whole],
        **{theirs: [box[ours] for _, box in whole] for ours, theirs in names.items()},
        "line": {"color": _colour(index), "width": 1.4},
        "fillcolor": f"{_colour(index)}/0.35",
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
