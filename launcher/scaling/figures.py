"""What each figure of a scaling benchmark shows, as data: the page and the PNG files draw the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import plots
from launcher.figures import QUARTILES, Bar, Box
from launcher.report.numbers import format_count, format_percent, format_ratio, format_si, number
from launcher.scaling import view
from launcher.scaling.view import Cell, Group

LOG_FROM = 16  # times the least N: above, N stands on a logarithmic axis
MAX_RANKS = 16  # boxes of one cell
SPEEDUP = "speed-up, throughput / throughput of one rank"
RANKS = "N, ranks"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line plot; `note` says below it what a reader must know."""

    title: str
    series: Sequence[plots.Series]
    x: plots.Axis
    y: plots.Axis
    levels: Sequence[plots.Level] = ()
    marks: Sequence[plots.Mark] = ()
    note: str = ""
    absent: str = ""
    """Why there is nothing to draw, where that is no lack of data."""

    @property
    def legend(self) -> list[tuple[str, int, str]]:
        """(label, colour, kind) of what has points, each label once."""
        drawn = [(s.label, s.colour, str(s.style)) for s in self.series if _finite(s.points)]
        marks = [(mark.label, 0, "mark") for mark in self.marks]
        return list({key[0]: key for key in reversed([*drawn, *marks])}.values())[::-1]


def speedup(scaling: Mapping[str, Any], mode: str) -> Figure:
    """Against N, with the ideal line, the ceiling and the interval of the efficiency times N."""
    groups, n = view.groups(scaling, mode), _ranks_axis(scaling, mode)
    lines = [_line(group, "speedup", "efficiency_ci95", times_n=True) for group in groups]
    sizes = view.sizes(groups)
    ideal = [plots.Series("ideal", [(size, size) for size in sizes], 0, "fine")]
    y = plots.Axis(SPEEDUP, format_ratio, log=n.log, from_zero=True, ticks=n.ticks if n.log else ())
    note = "Bands and whiskers: 95 % intervals over the repeats."
    if ceilings := _ceilings(groups, times_n=True):
        note += " Ceiling: as many ranks with every collective off."
    return Figure(f"Speed-up, {mode} scaling", [*ideal, *ceilings, *lines], n, y, note=note)


def efficiency(scaling: Mapping[str, Any], mode: str) -> Figure:
    """Against N, with the interval, the ceiling and 100 %."""
    groups = view.groups(scaling, mode)
    lines = [_line(group, "efficiency", "efficiency_ci95") for group in groups]
    y = plots.Axis("efficiency, throughput / (N x throughput of one rank)", format_percent)
    note = "Bands and whiskers: 95 % intervals over the repeats. The axis does not start at 0."
    series = [*_ceilings(groups), *lines]
    return Figure(
        f"Efficiency, {mode} scaling",
        series,
        _ranks_axis(scaling, mode),
        y,
        [plots.Level("100 %", 1.0)],
        note=note,
    )


def communication(scaling: Mapping[str, Any], mode: str) -> Figure:
    """What communication alone leaves: throughput over that of the ceiling."""
    path = "communication_efficiency"
    lines = [_line(group, path, f"{path}_ci95") for group in view.groups(scaling, mode)]
    y = plots.Axis("throughput / ceiling", format_percent)
    note = "Efficiency = ceiling x communication efficiency. The axis does not start at 0."
    return Figure(
        f"Communication efficiency, {mode} scaling",
        lines,
        _ranks_axis(scaling, mode),
        y,
        [plots.Level("100 %", 1.0)],
        note=note,
    )


def memory(scaling: Mapping[str, Any], mode: str) -> Figure:
    """The greatest rank as a line, every rank as a mark."""
    series = []
    for group in view.groups(scaling, mode):
        line = _points(group, "peak_memory_gib")
        dots = [
            (n, gib) for cell in group.cells if (n := view.value(cell, "world_size")) for gib in _memory(cell)
        ]
        series += [
            plots.Series(group.label, line, group.index, "shaped"),
            plots.Series(group.label, dots, group.index, "dots"),
        ]
    y = plots.Axis("peak memory of a rank (GiB)", format_si, from_zero=True)
    note = "Line: the greatest rank. Marks: every rank, or the least and the greatest of more than 16."
    return Figure(f"Peak memory, {mode} scaling", series, _ranks_axis(scaling, mode), y, note=note)


def bandwidth(scaling: Mapping[str, Any]) -> Figure:
    """All-reduce bus bandwidth over message size; the sizes that DDP's buckets have are marked."""
    series, buckets = [], set()
    for index, link in enumerate(view.listed(scaling.get("links"))):
        link, points = view.mapped(link), []
        for point in map(view.mapped, view.listed(view.mapped(link).get("points"))):
            size, rate = number(point.get("bytes")), number(point.get("busbw_gb_s"))
            if size is None:
                continue
            points.append((size, math.nan if rate is None else rate))
            if point.get("bucket") is True:
                buckets.add(size)
        label = f"{format_count(link.get('world_size'))} ranks, {view.format_word(link.get('backend'))}"
        series.append(plots.Series(label, sorted(points), index, "shaped"))
    x = plots.Axis("message (bytes), log scale", format_si, log=True)
    y = plots.Axis("bus bandwidth (GB/s, 1e9)", format_si, from_zero=True)
    marks = [plots.Mark(size, "size of a gradient bucket") for size in sorted(buckets)]
    note = "Bus bandwidth: bytes / time x 2 (N - 1) / N, what the slowest link carries."
    return Figure("All-reduce bus bandwidth", series, x, y, marks=marks, note=note)


def loss(scaling: Mapping[str, Any]) -> Figure:
    """The training loss of the cells that train the same model, drawn on top of each other, thick to thin."""
    chosen = compared(scaling)
    curves = [
        [(a, b) for a, b in map(_pair, view.listed(view.at(cell, "loss.curve"))) if a is not None]
        for cell in chosen
    ]
    series = [
        plots.Series(
            view.name(cell),
            [(a, math.nan if b is None else b) for a, b in curve],
            i,
            width=max(1.0, 8.0 - 7.0 * i / max(1, len(chosen) - 1)),
        )
        for i, (cell, curve) in enumerate(zip(chosen, curves, strict=True))
    ]
    x, y = plots.Axis("tokens", format_si), plots.Axis("loss (nats per masked token)", format_si)
    told = loss_note(scaling)
    if not chosen and "strong" not in view.modes(scaling):
        return Figure("Training loss", [], x, y, absent=told)
    return Figure("Training loss", series, x, y, note=told)


def compared(scaling: Mapping[str, Any]) -> list[Cell]:
    """The run cells whose losses can be compared: strong scaling, and others with its global batch."""
    runs = [cell for cell in view.cells(scaling, "run") if view.listed(view.at(cell, "loss.curve"))]
    strong = [cell for cell in runs if cell.get("mode") == "strong"]
    batches = {view.value(cell, "global_batch") for cell in strong}
    return [cell for cell in runs if cell in strong or view.value(cell, "global_batch") in batches]


def loss_note(scaling: Mapping[str, Any]) -> str:
    """Whether the cells train the same model, with the numbers; or why that is not asked."""
    runs = [cell for cell in view.cells(scaling, "run") if cell.get("loss_agrees") is not None]
    if not runs:
        weak = (
            "Losses are not compared: under weak scaling the global batch grows with N, and the cells train "
        )
        weak += "different models. Strong scaling compares them."
        return weak if "strong" not in view.modes(scaling) else "No cell has a loss to compare."
    agree = [cell for cell in runs if cell.get("loss_agrees") is True]
    found = [abs(d) for cell in runs if (d := view.value(cell, "loss_deviation")) is not None]
    text = f"The loss of {len(agree)} of {len(runs)} compared cells agrees with the baseline's"
    text += f"; greatest relative deviation {max(found):.1e}." if found else "."
    others = [view.name(cell) for cell in runs if cell not in agree]
    return f"{text} Not of: {', '.join(others)}." if others else f"{text} One line means one model."


def step_bars(scaling: Mapping[str, Any], mode: str) -> tuple[list[Bar], list[Bar]]:
    """A step in its parts, in seconds, of each run cell of a mode and of each control."""
    runs = [cell for group in view.groups(scaling, mode) for cell in group.cells]
    controls = [
        cell
        for cell in view.cells(scaling)
        if cell.get("kind", "run") != "run" and str(cell.get("mode")) == mode
    ]
    return _bars(runs), _bars(controls)


def _bars(cells: Sequence[Cell]) -> list[Bar]:
    rows = []
    for cell in cells:
        parts = {head: max(0.0, view.value(cell, path) or 0.0) for path, head in view.SPLIT.items()}
        rows.append(Bar(view.name(cell), parts))  # a part that is not known is not drawn
    return rows


def rank_panels(scaling: Mapping[str, Any]) -> list[tuple[str, list[Box], str]]:
    """(cell, a box per rank, what was left out) of every run cell."""
    panels = []
    for cell in view.cells(scaling, "run"):
        kept, count = extremes(cell), len(view.listed(cell.get("ranks")))
        left = f"{len(kept)} of {count} ranks: the fastest and the slowest" if len(kept) < count else ""
        rows = [Box(format_count(rank.get("rank")), _quartiles(rank)) for rank in kept]
        panels.append((view.name(cell), rows, left))
    return panels


def _quartiles(rank: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = {"step": "step_time_s", "own work, before the reduction": "own_work_s"}
    found = {
        name: {q: s for q in QUARTILES if (s := view.value(rank, f"{key}.{q}")) is not None}
        for name, key in names.items()
    }
    return {name: box for name, box in found.items() if box}


def extremes(cell: Cell) -> list[Mapping[str, Any]]:
    """All of a few ranks; of many the ones with the least and the greatest median of their own work."""
    ranks = [rank for rank in view.listed(cell.get("ranks")) if isinstance(rank, Mapping)]
    if len(ranks) <= MAX_RANKS:
        return ranks

    def pace(rank: Mapping[str, Any]) -> float:
        return view.value(rank, "own_work_s.median") or view.value(rank, "step_time_s.median") or 0.0

    ordered = sorted(range(len(ranks)), key=lambda i: pace(ranks[i]))
    return [ranks[i] for i in sorted([*ordered[: MAX_RANKS // 2], *ordered[-MAX_RANKS // 2 :]])]


def _memory(cell: Cell) -> list[float]:
    found = [
        gib
        for rank in view.listed(cell.get("ranks"))
        if (gib := number(view.mapped(rank).get("peak_memory_gib"))) is not None
    ]
    return found if len(found) <= MAX_RANKS else [min(found), max(found)]


def _ranks_axis(scaling: Mapping[str, Any], mode: str) -> plots.Axis:
    sizes = view.sizes(view.groups(scaling, mode))
    log = bool(sizes) and sizes[-1] > LOG_FROM * sizes[0]
    return plots.Axis(f"{RANKS}, log scale" if log else RANKS, format_count, log=log, ticks=sizes, pad=0.05)


def _line(group: Group, path: str, interval: str, times_n: bool = False) -> plots.Series:
    """A line through `path`, and the band of `interval`, `times_n` when the line is a speed-up."""
    low, high = (
        [(n, y * n if times_n else y) for n, y in _points(group, f"{interval}.{end}")] for end in view.ENDS
    )
    band = [(n, a, b) for (n, a), (_, b) in zip(low, high, strict=True)]
    return plots.Series(group.label, _points(group, path), group.index, "shaped", band)


def _ceilings(groups: Sequence[Group], times_n: bool = False) -> list[plots.Series]:
    """The ceiling of each group; one for all where they have the same."""
    found: list[plots.Series] = []
    at: dict[float, set[float]] = {}
    for group in groups:
        points = [(n, c * n if times_n else c) for n, c in _points(group, "ceiling_efficiency")]
        if _finite(points):
            found.append(plots.Series(f"ceiling of {group.label}", points, group.index, "rule"))
            for n, height in points:
                at.setdefault(n, set()).update({height} if math.isfinite(height) else ())
    if all(len(heights) <= 1 for heights in at.values()):
        points = sorted((n, height) for n, heights in at.items() for height in heights)
        return [plots.Series("ceiling", points, 0, "soft")] if points else []
    return found


def _points(group: Group, path: str) -> list[plots.Point]:
    pairs = [(view.value(cell, "world_size"), view.value(cell, path)) for cell in group.cells]
    return [(n, math.nan if y is None else y) for n, y in pairs if n is not None]


def _pair(point: object) -> tuple[float | None, float | None]:
    pair = view.listed(point)
    return (number(pair[0]), number(pair[1])) if len(pair) == 2 else (None, None)


def _finite(points: Sequence[plots.Point]) -> bool:
    return any(math.isfinite(y) for _, y in points)
