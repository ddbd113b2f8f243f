"""The figures of a scaling benchmark as PNG files, through matplotlib (the extra `plots`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp.config import ConfigError
from bert_dp.record import safe
from launcher import builder, plots
from launcher.figures import QUARTILES, Bar
from launcher.report.numbers import format_time_tick
from launcher.scaling import figures as scaling_figures
from launcher.scaling import view
from launcher.scaling.figures import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI = 6.4, 4.2, 150  # inches of one plot; dots per inch
ROW = 0.28  # inches of a bar
PANELS = 9  # cells of the plot of ranks, those with the most
MARKERS = ("o", "s", "D", "^")  # as plots.SHAPES
SOFT = "#5b6675"
NAMES = ("speedup", "efficiency", "step_time", "memory", "busbw", "ranks", "loss")


def write(scaling: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write NAMES as PNG into `folder`, each mode side by side. Raises ConfigError without matplotlib.

    No pyplot and no rcParams: nothing global is touched, no window system is asked for.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        raise ConfigError(["plots: matplotlib is not installed; pip install 'bert-dp[plots]'"]) from None
    folder.mkdir(parents=True, exist_ok=True)
    by_mode = {
        "speedup": scaling_figures.speedup,
        "efficiency": scaling_figures.efficiency,
        "memory": scaling_figures.memory,
    }
    modes = view.modes(scaling)
    for name, kind in by_mode.items():
        _save(folder / f"{name}.png", [_drawer(kind(scaling, mode)) for mode in modes])
    _save(folder / "busbw.png", [_drawer(scaling_figures.bandwidth(scaling))])
    _save(folder / "loss.png", [_drawer(scaling_figures.loss(scaling))])
    bars = [(mode, scaling_figures.step_bars(scaling, mode)[0]) for mode in modes]
    most = max(len(rows) for _, rows in bars)
    _save(
        folder / "step_time.png",
        [_bar_drawer(mode, rows) for mode, rows in bars],
        height=max(HEIGHT, 1.4 + ROW * most),
    )
    panels = [panel for panel in scaling_figures.rank_panels(scaling) if any(box.series for box in panel[1])]
    panels.sort(key=lambda panel: -len(panel[1]))
    _save(folder / "ranks.png", [_box_drawer(*panel) for panel in panels[:PANELS]] or [_empty("Step times")])
    return [folder / f"{name}.png" for name in NAMES]


Draw = Callable[["Axes"], None]


def _save(out: Path, drawers: Sequence[Draw], height: float = HEIGHT) -> None:
    """One picture with a plot for each of `drawers`, three in a row at most; atomic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.text import Text

    columns = min(3, len(drawers))
    rows = math.ceil(len(drawers) / columns)
    figure = Canvas(
        figsize=(WIDTH * columns, height * rows), dpi=DPI, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for draw, place in zip(drawers, axes, strict=False):
        draw(place)
    for place in list(axes)[len(drawers) :]:
        place.set_axis_off()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name is text, whatever it holds
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _drawer(figure: Figure) -> Draw:
    """Draws what `plots.line_plot` draws of it."""

    def draw(axes: Axes) -> None:
        drawn = [s for s in figure.series if s.style != "fine" and any(math.isfinite(y) for _, y in s.points)]
        if not drawn:
            return _say_empty(axes, figure.title, figure.absent)
        axes.set_xscale("log" if figure.x.log else "linear")
        axes.set_yscale("log" if figure.y.log else "linear")
        labelled: set[str] = set()
        for series in figure.series:
            _line(axes, series, "" if series.label in labelled else safe(series.label))
            labelled.add(series.label)
        for level in figure.levels:
            axes.axhline(level.value, color=SOFT, linestyle=":", linewidth=1, zorder=0)
        for mark in figure.marks:
            axes.axvline(
                mark.value, color=SOFT, linestyle=":", linewidth=1, zorder=0, label=_once(mark, figure)
            )
        if figure.x.ticks:
            axes.set_xticks(figure.x.ticks, [figure.x.text(tick) for tick in figure.x.ticks])
            axes.minorticks_off()
        if figure.y.from_zero and not figure.y.log:
            axes.set_ylim(bottom=0)
        _dress(axes, figure.title, figure.x.label, figure.y.label)
        axes.yaxis.set_major_formatter(lambda value, _: figure.y.text(value))
        if not figure.x.ticks:
            axes.xaxis.set_major_formatter(lambda value, _: figure.x.text(value))

    return draw


def _line(axes: Axes, series: plots.Series, label: str) -> None:
    grey = series.style in ("soft", "fine")
    colour = SOFT if grey else _colour(series.colour)
    styles = {"rule": "--", "soft": "--", "fine": ":", "dots": "none", "marked": "--"}
    shape = MARKERS[(series.colour + series.colour // plots.NUM_COLOURS) % len(MARKERS)]
    axes.plot(
        [x for x, _ in series.points],
        [y for _, y in series.points],
        color=colour,
        label=label or None,
        linestyle=styles.get(series.style, "-"),
        linewidth=series.width or 1.5,
        marker=shape if series.style in ("shaped", "dots") else None,
        markersize=4,
    )
    band = [ends for ends in series.band if all(map(math.isfinite, ends))]
    if band:
        x, low, high = zip(*band, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.vlines(x, low, high, color=colour, linewidth=1)


def _bar_drawer(mode: str, rows: Sequence[Bar]) -> Draw:
    def draw(axes: Axes) -> None:
        title, drawn = f"Time of a step, {mode} scaling", [row for row in rows if sum(row.parts.values()) > 0]
        if not drawn:
            return _say_empty(axes, title)
        names = list(dict.fromkeys(name for row in drawn for name in row.parts))
        left = [0.0] * len(drawn)
        for index, name in enumerate(names):
            amounts = [row.parts.get(name, 0.0) for row in drawn]
            axes.barh(range(len(drawn)), amounts, left=left, color=_colour(index), label=name, height=0.7)
            left = [start + amount for start, amount in zip(left, amounts, strict=True)]
        axes.set_yticks(range(len(drawn)), [_short(row.label) for row in drawn])
        axes.invert_yaxis()
        _dress(axes, title, "seconds of a step", "", outside=True)

    return draw


def _box_drawer(cell: str, rows: Sequence[Any], note: str) -> Draw:
    def draw(axes: Axes) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row.series))
        for index, name in enumerate(names):
            boxes = [
                (at + 0.4 * index, row.series[name]) for at, row in enumerate(rows) if name in row.series
            ]
            _boxes(
                axes, [(at, box) for at, box in boxes if box.keys() >= set(QUARTILES)], _colour(index), name
            )
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(max(len(rows), 3), -0.5)
        axes.xaxis.set_major_formatter(lambda value, _: format_time_tick(value))
        told = f"time of a step{f'; {note}' if note else ''}"
        _dress(axes, f"{_short(cell)}: step times", told, "rank", outside=True)

    return draw


def _boxes(axes: Axes, boxes: Sequence[tuple[float, Mapping[str, float]]], colour: str, label: str) -> None:
    """Quartiles, median, least and greatest (`Axes.bxp` would settle the global backend)."""
    if not boxes:
        return
    at = [place for place, _ in boxes]
    low, left, middle, right, high = ([box[key] for _, box in boxes] for key in QUARTILES)
    axes.hlines(at, low, high, color=colour, linewidth=1.2)
    widths = [b - a for a, b in zip(left, right, strict=True)]
    axes.barh(at, widths, left=left, height=0.3, color=colour, label=label)
    for place, value in zip(at, middle, strict=True):
        axes.vlines(value, place - 0.2, place + 0.2, color="black", linewidth=1.4)


def _empty(title: str) -> Draw:
    return lambda axes: _say_empty(axes, title)


def _say_empty(axes: Axes, title: str, why: str = "") -> None:
    axes.set_axis_off()
    axes.set_title(safe(title))
    axes.text(0.5, 0.5, why or "no data recorded", ha="center", va="center", wrap=True, color=SOFT)


def _dress(axes: Axes, title: str, x: str, y: str, outside: bool = False) -> None:
    """Titles, grid and legend; `outside`: the legend stands below the plot."""
    axes.set_title(safe(title))
    axes.set_xlabel(safe(x))
    axes.set_ylabel(safe(y))
    axes.grid(True, color="#dde2e8", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if 0 < len(axes.get_legend_handles_labels()[1]) <= 16:
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
        axes.legend(fontsize=8, frameon=False, **(place if outside else {}))


def _once(mark: plots.Mark, figure: Figure) -> str | None:
    return mark.label if mark is figure.marks[0] else None


def _colour(index: int) -> str:
    return builder.LIGHT[index % plots.NUM_COLOURS]


def _short(name: str) -> str:
    text = safe(name)
    return text if len(text) <= 32 else f"{text[:29]}..."
