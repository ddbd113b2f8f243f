"""Convert a Figure to the JSON input of plotly's script.

Colours are given by name. page.js replaces each name with the theme's colour.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_dp.files import safe
from launcher.report.formats import FORMATS, Unit
from launcher.report.page import Axis, Bars, Figure, Line, ReferenceLine

NUM_COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
LABEL_CHARS, TITLE_CHARS = 30, 60  # maximum lengths of labels and axis titles
# in pixels: heights of a line plot, a row of bars and a legend line; margins above and below the plot
HEIGHT, ROW_HEIGHT, LEGEND_HEIGHT, TOP, BOTTOM = 250, 50, 20, 30, 48
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
    """Return a figure's plotly data and layout, its title, and the label of its log-scale switch."""
    data = [_line(figure, t) if isinstance(t, Line) else _bars(figure, t) for t in figure.traces]
    labels = [trace["name"] for trace in data if trace["showlegend"]] + [m.label for m in figure.marks]
    area = len(figure.rows) * ROW_HEIGHT if figure.rows else HEIGHT
    has_legend = len(set(labels)) > 1 or bool(figure.marks) or bool(figure.rows)
    legend = sum(len(label) * PIXELS_PER_CHAR + 45 for label in dict.fromkeys(labels))
    below = BOTTOM + LEGEND_HEIGHT * (1 + legend // SMALL_WIDTH) * has_legend
    # the first row is at the top; the row names are annotations above the bars
    rows_axis: dict[str, Any] = {"range": [len(figure.rows) - 0.6, -0.7], "showticklabels": False}
    rows_axis |= {"showgrid": False, "fixedrange": True}
    row_name = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    layout = {
        "height": TOP + area + below,
        "margin": {"t": TOP, "b": below, "l": 8, "r": 14},
        "title": {"text": "" if figure.rows else text_of(figure.y.label, TITLE_CHARS)},
        "xaxis": _axis(figure.x, figure.x.label),
        "yaxis": rows_axis if figure.rows else _axis(figure.y, ""),
        "shapes": [*_levels(figure), *_marks(figure.marks)],
        "showlegend": has_legend,
        "annotations": [
            {"text": text_of(name, LABEL_CHARS), "y": i - 0.24, **row_name}
            for i, name in enumerate(figure.rows)
        ],
        "barmode": "stack",
    }
    switch = safe(figure.x.label) if figure.switch else ""
    return {"data": data, "layout": layout, "name": safe(figure.title), "switch": switch}


def text_of(text: str, limit: int = 0) -> str:
    """Truncate a text to `limit` characters (0: no limit) and escape the HTML that plotly would interpret."""
    text = " ".join(safe(text).split())
    if limit and len(text) > limit:
        text = f"{text[: limit - 1]}\u2026"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _named(figure: Figure, trace: Line | Bars) -> dict[str, Any]:
    """Return a trace's legend settings. One legend entry shows or hides all traces of the same name."""
    first = next(t for t in figure.traces if t.label == trace.label)
    name = text_of(trace.label, LABEL_CHARS)
    return {"name": name, "legendgroup": name, "showlegend": first is trace, "hovertemplate": HOVER}


def _colour(index: int | None) -> str:
    return "soft" if index is None else f"c{index % NUM_COLOURS}"


def _line(figure: Figure, line: Line) -> dict[str, Any]:
    colour, index = _colour(line.colour), line.colour or 0
    marks = line.style in ("marks", "both") or (line.style != "dotted" and len(line.values) == 1)
    drawn = {
        **_named(figure, line),
        "type": "scatter",
        "mode": "markers" if line.style == "marks" else "lines+markers" if marks else "lines",
        "x": list(line.x),
        "y": list(line.y),
        "text": [text_of(_point(figure, line, i)) for i in range(len(line.x))],
        "line": {"color": colour, "width": 2.0, "dash": DASHES.get(line.style, "solid")},
        "marker": {
            "color": colour,
            "size": 7,
            "symbol": SYMBOLS[(index + index // NUM_COLOURS) % len(SYMBOLS)],
        },
    }
    if line.low:
        drawn["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [_difference(high, y) for y, high in zip(line.y, line.high, strict=True)],
            "arrayminus": [_difference(y, low) for y, low in zip(line.y, line.low, strict=True)],
            "color": colour,
            "thickness": 1.2,
            "width": 4,
        }
    return drawn


def _difference(greater: float | None, less: float | None) -> float | None:
    return None if greater is None or less is None else greater - less


def _point(figure: Figure, line: Line, i: int) -> str:
    """Return the hover text of a point: `ddp: 50.0 % [40.0 %, 60.0 %] at 2`."""
    y, x = FORMATS[figure.y.unit], FORMATS[figure.x.unit]
    ends = [end for end in (line.low[i], line.high[i]) if end is not None] if line.low else []
    interval = f" [{', '.join(map(y, ends))}]" if len(ends) == 2 else ""
    return f"{line.label}: {y(line.y[i])}{interval} at {x(line.x[i])}"


def _bars(figure: Figure, bars: Bars) -> dict[str, Any]:
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
        "marker": {"color": _colour(figure.traces.index(bars))},
        "textposition": "none",
    }


def _axis(axis: Axis, title: str) -> dict[str, Any]:
    ticks: Mapping[str, Any] = TICKS.get(axis.unit, OTHER_TICKS)
    if axis.ticks:
        shown = [text_of(FORMATS[axis.unit](tick)) for tick in axis.ticks]
        ticks = {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": shown}
    return {
        "type": "log" if axis.log else "linear",
        "title": {"text": text_of(title, TITLE_CHARS)},
        "nticks": 6,
        "rangemode": "tozero" if axis.from_zero else "normal",
        **ticks,
    }


def _levels(figure: Figure) -> list[dict[str, Any]]:
    """Return the horizontal lines. A label goes below its line if no data exceed the line, else above it."""
    drawn = [value for trace in figure.traces for value in trace.values]
    drawn += [high for trace in figure.traces if isinstance(trace, Line) for high in trace.high if high]
    highest = max(drawn, default=0.0)
    return [
        {
            **_across("y", level.value),
            "label": {
                "text": text_of(level.label, LABEL_CHARS),
                "textposition": "start" if level.left else "end",
                "yanchor": "top" if level.value >= highest else "bottom",
            },
        }
        for level in figure.levels
    ]


def _marks(marks: Sequence[ReferenceLine]) -> list[dict[str, Any]]:
    names = [text_of(mark.label, LABEL_CHARS) for mark in marks]
    return [
        {**_across("x", mark.value), "name": name, "legendgroup": name, "showlegend": names.index(name) == i}
        for i, (mark, name) in enumerate(zip(marks, names, strict=True))
    ]


def _across(axis: str, value: float) -> dict[str, Any]:
    other = {"x": "y", "y": "x"}[axis]
    return {
        "type": "line",
        f"{other}ref": "paper",
        **{f"{other}0": 0, f"{other}1": 1, f"{axis}0": value, f"{axis}1": value},
        "line": {"color": "soft", "width": 1.3, "dash": "dot"},
    }
