"""The figures of a scaling benchmark."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import get_args

from launcher.report.model import Axis, Bars, Boxes, Figure, Line, Mark, Rule
from launcher.report.numbers import format_count, format_lr, format_step_time, number
from launcher.report.quantities import Ratio, at
from launcher.results import Cell, FiveNumbers, Mode, RankTimes, Scaling
from launcher.scale import columns
from launcher.scale.columns import SPLIT

LOG_FROM = 16  # times the least N: above, N stands on a logarithmic axis
MAX_RANKS = 16  # boxes of one cell
BANDS = (
    "Bands and whiskers: 95 % intervals over the repeats; a point whose interval is wider than a factor of "
    "two is left out."
)


@dataclasses.dataclass(frozen=True)
class Group:
    """The cells that make one line of a figure, by world size. `index` is its colour in every figure."""

    label: str
    index: int
    cells: Sequence[Cell]


def runs_of(scaling: Scaling) -> list[Cell]:
    """The cells that are no controls."""
    return [cell for cell in scaling.cells if cell.kind == "run"]


def modes(scaling: Scaling) -> list[Mode]:
    """The modes of the run cells, weak first; weak of a grid without any."""
    present = {cell.mode for cell in runs_of(scaling)}
    return [mode for mode in get_args(Mode) if mode in present] or ["weak"]


def groups(scaling: Scaling, mode: Mode) -> list[Group]:
    """The lines of `mode`, the baseline among them; one engine, launcher, tensor and micro batch each."""
    runs = runs_of(scaling)
    labels = _labels(runs)
    order = list(dict.fromkeys(labels))
    members: dict[str, list[Cell]] = {}
    for cell, label in zip(runs, labels, strict=True):
        if cell.mode == mode:
            members.setdefault(label, []).append(cell)
    return [
        Group(label, order.index(label), sorted(cells, key=lambda cell: cell.world_size))
        for label, cells in members.items()
    ]


def _labels(runs: Sequence[Cell]) -> list[str]:
    """The engine of each cell, and what else tells it from the others."""
    parts = [(c.launcher, f"tensor {c.tensor}", f"micro batch {c.micro_batch}") for c in runs]
    differing = [len(set(values)) > 1 for values in zip(*parts, strict=True)]
    return [
        ", ".join([cell.engine, *map(str, itertools.compress(values, differing))])
        for cell, values in zip(runs, parts, strict=True)
    ]


def figures(scaling: Scaling) -> list[Figure]:
    """The line plots, by mode, and those of the whole grid."""
    by_mode = [
        figure(scaling, mode)
        for mode in modes(scaling)
        for figure in (speedup, efficiency, communication, memory)
    ]
    return [*by_mode, bandwidth(scaling), loss(scaling)]


def speedup(scaling: Scaling, mode: Mode) -> Figure:
    """Against N, with the ideal line, the ceiling and the interval of the efficiency times N."""
    members, x = groups(scaling, mode), _ranks_axis(scaling, mode)
    sizes = list(x.ticks)
    ceilings = _ceilings(members, times_n=True)
    lines = [_ratio_line(group, columns.SPEEDUP, times_n=True) for group in members]
    y = Axis(
        "speed-up, throughput / throughput of one rank", "ratio", x.log, not x.log, sizes if x.log else ()
    )
    note = BANDS
    note += " Ceiling: as many ranks with every collective off." if ceilings else ""
    ideal = Line("ideal", sizes, sizes, None, "dotted")
    return Figure(f"Speed-up, {mode} scaling", [ideal, *ceilings, *lines], x, y, note=note)


def efficiency(scaling: Scaling, mode: Mode) -> Figure:
    """Against N, with the interval, the ceiling and 100 %."""
    label = "efficiency, throughput / (N x throughput of one rank)"
    return _share(scaling, mode, columns.EFFICIENCY, label, BANDS, _ceilings(groups(scaling, mode)))


def communication(scaling: Scaling, mode: Mode) -> Figure:
    """What communication alone leaves: throughput over that of the ceiling."""
    note = "Efficiency = ceiling x communication efficiency."
    return _share(scaling, mode, columns.COMMUNICATION, "throughput / ceiling", note)


def _share(
    scaling: Scaling, mode: Mode, ratio: Ratio, label: str, note: str, ceilings: Sequence[Line] = ()
) -> Figure:
    """A share of a cell against N, with its interval, below 100 %."""
    lines = [_ratio_line(group, ratio) for group in groups(scaling, mode)]
    return Figure(
        f"{ratio.head.capitalize()}, {mode} scaling",
        [*ceilings, *lines],
        _ranks_axis(scaling, mode),
        Axis(label, "percent"),
        levels=[Rule("100 %", 1.0)],
        note=f"{note} The axis does not start at 0.",
    )


def memory(scaling: Scaling, mode: Mode) -> Figure:
    """The greatest rank as a line, every rank as a mark."""
    traces = []
    for group in groups(scaling, mode):
        marks = [(cell.world_size, gib) for cell in group.cells for gib in _memory(cell)]
        x, y = [float(n) for n, _ in marks], [gib for _, gib in marks]
        traces += [
            Line(group.label, _sizes(group), [c.peak_memory_gib for c in group.cells], group.index, "both"),
            Line(f"{group.label}, each rank", x, y, group.index, "marks"),
        ]
    axis = Axis("peak memory of a rank (GiB)", from_zero=True)
    note = "Line: the greatest rank. Marks: every rank, or the least and the greatest of more than 16."
    return Figure(f"Peak memory, {mode} scaling", traces, _ranks_axis(scaling, mode), axis, note=note)


def bandwidth(scaling: Scaling) -> Figure:
    """All-reduce bus bandwidth over message size; the sizes that DDP's buckets have are marked."""
    lines = []
    for index, link in enumerate(scaling.links):
        points = sorted(link.points, key=lambda point: point.bytes)
        x, y = [point.bytes for point in points], [point.busbw_gb_s for point in points]
        label = f"{format_count(link.world_size)} ranks, {link.backend or 'backend not recorded'}"
        lines.append(Line(label, x, y, index, "both"))
    buckets = {point.bytes for link in scaling.links for point in link.points if point.bucket}
    marks = [Mark("size of a gradient bucket", size) for size in sorted(buckets)]
    x_axis, y_axis = Axis("message (bytes)", log=True), Axis("bus bandwidth (GB/s, 1e9)", from_zero=True)
    note = "Bus bandwidth: bytes / time x 2 (N - 1) / N, what the slowest link carries."
    return Figure("All-reduce bus bandwidth", lines, x_axis, y_axis, marks=marks, note=note)


def loss(scaling: Scaling) -> Figure:
    """The training loss of the cells that train the same model, drawn on top of each other, thick to thin."""
    cells = compared(scaling)
    lines = []
    for i, cell in enumerate(cells):
        curve = cell.loss.curve if cell.loss else []
        width = max(1.0, 8.0 - 7.0 * i / max(1, len(cells) - 1))
        lines.append(Line(cell.id, [t for t, _ in curve], [nats for _, nats in curve], i, width=width))
    note = loss_note(scaling)
    x, y = Axis("tokens"), Axis("loss (nats per masked token)", "nats")
    return Figure("Training loss", lines, x, y, note=note, absent="" if "strong" in modes(scaling) else note)


def compared(scaling: Scaling) -> list[Cell]:
    """The run cells whose losses can be compared: strong scaling, and others with its global batch."""
    runs = [cell for cell in runs_of(scaling) if cell.loss and cell.loss.curve]
    batches = {cell.global_batch for cell in runs if cell.mode == "strong"}
    return [cell for cell in runs if cell.global_batch in batches]


def loss_note(scaling: Scaling) -> str:
    """Whether the cells train the same model, with the numbers; or why that is not asked."""
    runs = [cell for cell in runs_of(scaling) if cell.loss_agrees is not None]
    if not runs and "strong" in modes(scaling):
        return "No cell has a loss to compare."
    if not runs:
        return (
            "Losses are not compared: under weak scaling the global batch grows with N, and the cells train "
            "different models. Strong scaling compares them."
        )
    agree = [cell for cell in runs if cell.loss_agrees]
    deviations = [abs(cell.loss_deviation) for cell in runs if cell.loss_deviation is not None]
    greatest = f"; greatest relative deviation {format_lr(max(deviations))}" if deviations else ""
    text = f"The loss of {len(agree)} of {len(runs)} compared cells agrees with the baseline's{greatest}."
    others = [cell.id for cell in runs if not cell.loss_agrees]
    return (
        f"{text} Not of: {', '.join(others)}."
        if others
        else f"{text} All loss curves coincide: every cell trained the same model."
    )


def steps(scaling: Scaling, mode: Mode) -> Figure:
    """A step in its parts of each run cell of a mode."""
    cells = [cell for group in groups(scaling, mode) for cell in group.cells]
    note = "A timed step, mean over the ranks. "
    note += "Exposed communication is what the ceiling of the same cell does not have."
    return _step_bars(f"Where a step's time goes, {mode} scaling", cells, note)


def control_steps(scaling: Scaling, mode: Mode) -> Figure:
    """The same of its controls."""
    cells = [cell for cell in scaling.cells if cell.kind != "run" and cell.mode == mode]
    note = "ceiling: every collective off; synthetic: without the loader"
    return _step_bars(f"Where a step's time goes, {mode} scaling: controls", cells, note)


def _step_bars(title: str, cells: Sequence[Cell], note: str) -> Figure:
    timed = [cell for cell in cells if cell.split_s is not None]
    bars = [
        Bars(part.head, [number(at(cell, part.path)) for cell in timed])
        for part in SPLIT  # a part that is not known is not drawn
    ]
    totals = [sum(number(at(cell, part.path)) or 0.0 for part in SPLIT) for cell in timed]
    rows = [f"{cell.id}: {format_step_time(total)}" for cell, total in zip(timed, totals, strict=True)]
    return Figure(title, bars, Axis("time of a step", "seconds"), Axis(""), rows, note=note)


def rank_times(cell: Cell) -> Figure:
    """A box for every rank: of its steps, and of its own work before the reduction."""
    ranks = extremes(cell)
    left_out = f"{len(ranks)} of {len(cell.ranks)} ranks: the fastest and the slowest."
    traces = [Boxes("step", [_box(rank.step_time_s) for rank in ranks])]
    if any(rank.own_work_s for rank in ranks):
        traces.append(Boxes("own work, before the reduction", [_box(rank.own_work_s) for rank in ranks]))
    rows = [f"rank {rank.rank}" for rank in ranks]
    note = left_out if len(ranks) < len(cell.ranks) else ""
    return Figure(cell.id, traces, Axis("time of a step", "seconds"), Axis(""), rows, note=note)


def extremes(cell: Cell) -> list[RankTimes]:
    """All of a few ranks; of many the ones with the least and the greatest median of their own work."""
    if len(cell.ranks) <= MAX_RANKS:
        return cell.ranks
    ordered = sorted(cell.ranks, key=lambda rank: (rank.own_work_s or rank.step_time_s).median)
    return sorted([*ordered[: MAX_RANKS // 2], *ordered[-MAX_RANKS // 2 :]], key=lambda rank: rank.rank)


def _box(times: FiveNumbers | None) -> Mapping[str, float] | None:
    return times.model_dump() if times else None


def _memory(cell: Cell) -> list[float]:
    every = [rank.peak_memory_gib for rank in cell.ranks]
    return every if len(every) <= MAX_RANKS else [min(every), max(every)]


def _ranks_axis(scaling: Scaling, mode: Mode) -> Axis:
    sizes = sorted({float(cell.world_size) for group in groups(scaling, mode) for cell in group.cells})
    return Axis("N, ranks", "count", bool(sizes) and sizes[-1] > LOG_FROM * sizes[0], ticks=sizes)


def _ratio_line(group: Group, ratio: Ratio, *, times_n: bool = False) -> Line:
    """A line through a ratio with the band of its interval, `times_n` when the line is a speed-up."""
    values = _values(group, ratio)
    low, high = (
        _values(group, dataclasses.replace(ratio, path=f"{ratio.interval}.{end}"), times_n=times_n)
        for end in ("low", "high")
    )
    return Line(group.label, _sizes(group), values, group.index, "both", low, high)


def _ceilings(members: Sequence[Group], *, times_n: bool = False) -> list[Line]:
    """The ceiling of each group; one for all where they have the same."""
    lines = []
    heights: dict[float, set[float]] = {}
    for group in members:
        label, values = f"ceiling of {group.label}", _values(group, columns.CEILING, times_n=times_n)
        line = Line(label, _sizes(group), values, group.index, "dashed")
        if line.values:
            lines.append(line)
            for x, y in zip(line.x, line.y, strict=True):
                heights.setdefault(x, set()).update([] if y is None else [y])
    if lines and all(len(each) <= 1 for each in heights.values()):
        points = sorted((x, y) for x, each in heights.items() for y in each)
        return [Line("ceiling", [x for x, _ in points], [y for _, y in points], None, "dashed")]
    return lines


def _sizes(group: Group) -> list[float]:
    return [float(cell.world_size) for cell in group.cells]


def _values(group: Group, ratio: Ratio, *, times_n: bool = False) -> list[float | None]:
    values = [(ratio.number(cell), cell.world_size if times_n else 1) for cell in group.cells]
    return [None if value is None else value * times for value, times in values]
