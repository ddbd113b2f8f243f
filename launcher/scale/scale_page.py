"""Build the report of a scaling benchmark: result, figures and verdicts."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.report import page
from launcher.report.formats import NA, count_of, format_count, format_lr, format_step_time, number
from launcher.scale import models
from launcher.scale.analyze import CEILING, COMMUNICATION, EFFICIENCY, STRAGGLER
from launcher.scale.models import CellMeasurement, DiagnosisKind, Mode, Scaling

FILE = "scaling.json"
LOG_AXIS_RATIO = 16  # the N axis is logarithmic if largest N / smallest N exceeds this
LEVELS: dict[page.Level, Sequence[DiagnosisKind]] = {
    "fail": ("out_of_memory", "failed"),
    "ok": ("scales", "fastest"),
    "info": ("one_repeat", "not_measurable", "intervals_overlap", "no_single_cause"),
}  # all other kinds are shown as warnings
SPLIT = {
    "data": "data wait",
    "forward_backward": "forward + backward",
    "exposed_comm": "exposed communication",
    "optimizer": "optimizer",
    "other": "other",
}
RESULT_NOTE = (
    "Speed-up and efficiency are relative to `single` on one rank; [low to high]: 95 % interval. comm.: "
    "throughput / throughput of the ceiling; exposed: time lost to communication, 1 - comm.; data: "
    "share of a step spent waiting for data; slowest: compute time of the slowest rank / median of the "
    "others; memory: highest peak of any rank; MFU: share of the data-sheet peak; MAMFU: share of the "
    "measured matmul rate. scaling.json contains the figures of every cell and repeat."
)
WHISKERS = (
    "Whiskers: 95 % intervals over repeats. Points with intervals wider than a factor of two are omitted."
)


def scale_page(scaling: Scaling, folder: Path | None = None) -> page.Report:
    """Return the report on a scaling benchmark, complete or partial. `folder` contains scaling.json."""
    by_mode: dict[Mode, list[CellMeasurement]] = {"weak": [], "strong": []}
    for cell in _runs(scaling):
        by_mode[cell.mode].append(cell)
    modes = [mode for mode, runs in by_mode.items() if runs]
    figures = [figure for mode in modes for figure in _mode_figures(by_mode[mode], mode)]
    result = page.ReportSection(
        "Result", tables=[_result(scaling)], notes=[RESULT_NOTE, *_agreement(scaling)]
    )
    sections = [result, page.ReportSection("", [*figures, _bandwidth(scaling)], console=False)]
    if (found := scaling.prediction) is not None:
        title, tables = "Prediction and measurement", [models.compared(found)]
        sections.append(page.ReportSection(title, tables=tables, notes=found.assumptions, console=False))
    size = format_count(max((cell.world_size for cell in scaling.cells), default=None))
    device = scaling.settings.device or "device not recorded"
    can_plan = folder is not None and scaling.profile is not None
    return page.Report(
        "bert-dp: scaling benchmark",
        [page.machine_line(scaling.environment, f"up to {size} x {device}"), _method(scaling, modes)],
        [*_status(scaling), *_verdicts(scaling)],
        sections=sections,
        next=f"bert-dp plan scaling --from {shlex.quote(f'{folder}/{FILE}')}" if can_plan else "",
    )


def _runs(scaling: Scaling) -> list[CellMeasurement]:
    return [cell for cell in scaling.cells if cell.kind == "run"]


def _method(scaling: Scaling, modes: Sequence[Mode]) -> str:
    settings = scaling.settings
    steps, warm_up = format_count(settings.steps), format_count(settings.warm_up)
    return " \u00b7 ".join(
        [
            settings.model or "model not recorded",
            f"{' and '.join(modes)} scaling",
            f"micro batch {format_count(settings.micro_batch)}, {settings.precision or NA}",
            f"{count_of(settings.repeats, 'repeat')} of {steps} steps after {warm_up} warm-up steps",
            "baseline: single on one rank",
        ]
    )


def _status(scaling: Scaling) -> list[page.Verdict]:
    """Return a verdict on unfinished cells, and one on failed cells without a diagnosis, if there are any."""
    ok, pending = (sum(c.status == status for c in scaling.cells) for status in ("ok", "pending"))
    judged = {verdict.cell for verdict in scaling.verdicts}
    lost = [c for c in scaling.cells if c.status in ("oom", "failed") and c.id not in judged]
    done = f"{ok} of {len(scaling.cells)} cells have a result"
    verdicts = []
    if scaling.status != "complete" or pending:
        verdicts.append(page.Verdict("warn", f"Partial: {done}; cells pending: {pending}."))
    if lost:
        causes = [f"{c.id}: {c.status}: {page.first_line(c.cause)}" for c in lost]
        verdicts.append(page.Verdict("fail", f"{done}; these cells failed:", causes))
    return verdicts


def _verdicts(scaling: Scaling) -> list[page.Verdict]:
    """Return one verdict per distinct diagnosis, listing its cells, and one on all flags; worst first."""
    cells: dict[tuple[DiagnosisKind, str, str], list[str]] = {}
    for found in scaling.verdicts:
        note = f"{found.cell}: {found.evidence}"
        cells.setdefault((found.kind, found.verdict, found.next), []).append(note)
    verdicts = []
    for (kind, text, hint), notes in cells.items():
        advice = f" Next: {hint}." if hint not in ("", "nothing") else ""
        level: page.Level = next((level for level, kinds in LEVELS.items() if kind in kinds), "warn")
        verdicts.append(page.Verdict(level, f"{text[:1].upper()}{text[1:]}.{advice}", notes))
    if flags := [f"{c.id}: {'; '.join(c.flags)}" for c in scaling.cells if c.flags]:
        verdicts.append(page.Verdict("warn", "Check these figures before you use them.", flags))
    order: Sequence[page.Level] = ("fail", "warn", "ok", "info")
    return sorted(verdicts, key=lambda verdict: order.index(verdict.level))


# --- tables


def _with_interval(ratio: page.Ratio) -> page.Quantity:
    return page.Quantity(lambda run: page.TableCell(ratio.text(run), exact=ratio.number(run)), ratio.head)


def _result(scaling: Scaling) -> page.Table:
    """Return the table of all cells except ceilings. Omit an MFU or MAMFU column without values."""
    runs = _runs(scaling)
    per_peak = [page.Ratio(path, path.upper(), "percent", "step_time_s.ci95") for path in ("mfu", "mamfu")]
    columns = [
        page.Quantity("world_size", "N", "count"),
        page.Quantity("tokens_per_s", "tokens/s"),
        page.Quantity("tokens_per_s_per_gpu", "per rank"),
        page.Ratio("speedup", "speed-up", "ratio", "efficiency_ci95"),
        _with_interval(EFFICIENCY),
        _with_interval(COMMUNICATION),
        page.Ratio("exposed_comm_fraction", "exposed", "percent", "communication_efficiency_ci95"),
        page.Quantity("data_wait_fraction", "data", "percent"),
        STRAGGLER,
        page.Quantity("peak_memory_gib", "memory", "gib"),
        *[ratio for ratio in per_peak if any(ratio.of(run) for run in runs)],
    ]
    return page.table([(run.id, run) for run in runs], columns, corner="cell", empty="no cells recorded")


def _agreement(scaling: Scaling) -> list[str]:
    """Describe how well the losses agree. In weak mode, batches differ, so losses are not compared."""
    compared = [cell for cell in _runs(scaling) if cell.loss_agrees is not None]
    if not compared:
        return []
    agree = sum(cell.loss_agrees is True for cell in compared)
    deviation = max(cell.loss_deviation or 0 for cell in compared)
    losses = f"Losses of {agree} of {len(compared)} compared cells agree with those of the single-rank run"
    return [f"{losses}; the largest relative deviation is {format_lr(deviation)}."]


# --- figures


def _mode_figures(runs: Sequence[CellMeasurement], mode: Mode) -> list[page.Figure]:
    """Plot the speed-up, the efficiency and the parts of a step for all cells of a mode except ceilings."""
    groups: dict[str, list[CellMeasurement]] = {}  # one line for each engine and tensor-parallel size
    for cell in sorted(runs, key=lambda cell: cell.world_size):
        label = f"{cell.engine}, tensor {cell.tensor}" if cell.tensor > 1 else cell.engine
        groups.setdefault(label, []).append(cell)
    sizes = sorted({float(cell.world_size) for cell in runs})
    x = page.Axis("N, ranks", "count", sizes[-1] > LOG_AXIS_RATIO * sizes[0], ticks=sizes)
    label = "speed-up: throughput / throughput of one rank"
    return [
        page.Figure(
            f"Speed-up, {mode} scaling",
            [page.Line("ideal", sizes, sizes, None, "dotted"), *_curves(groups, times_n=True)],
            x,
            page.Axis(label, "ratio", x.log, not x.log, sizes if x.log else ()),
            note=f"{WHISKERS} Ceiling: N independent copies of the training.",
        ),
        page.Figure(
            f"Efficiency, {mode} scaling",
            _curves(groups),
            x,
            page.Axis("efficiency: throughput / (N x throughput of one rank)", "percent"),
            levels=[page.ReferenceLine("100 %", 1.0)],
            note=f"{WHISKERS} Efficiency = ceiling x communication efficiency. The axis does not start at 0.",
        ),
        _step_split([cell for cells in groups.values() for cell in cells if cell.split_s], mode),
    ]


def _curves(groups: Mapping[str, Sequence[CellMeasurement]], *, times_n: bool = False) -> list[page.Line]:
    """Return the efficiency curves of the ceiling and, with intervals, of each group. With `times_n`, return
    speed-ups instead, which are efficiencies multiplied by N."""

    def height(cell: CellMeasurement, path: str) -> float | None:
        value = page.at(cell, path) if EFFICIENCY.number(cell) is not None else None
        return value and value * (cell.world_size if times_n else 1)

    cells = [cell for group in groups.values() for cell in group]
    heights = {c.world_size: value for c in cells if (value := CEILING.number(c)) is not None}
    points = [(float(n), value * (n if times_n else 1)) for n, value in sorted(heights.items())]
    lines = [page.Line("ceiling", *page.series(points), None, "dashed")] if points else []
    for colour, (label, group) in enumerate(groups.items()):
        paths = ("efficiency", "efficiency_ci95.low", "efficiency_ci95.high")
        y, low, high = ([height(cell, path) for cell in group] for path in paths)
        lines.append(page.Line(label, [float(c.world_size) for c in group], y, colour, "both", low, high))
    return lines


def _step_split(cells: Sequence[CellMeasurement], mode: Mode) -> page.Figure:
    """Plot the known parts of each cell's mean step."""
    parts = {name: [number(page.at(cell, f"split_s.{name}")) for cell in cells] for name in SPLIT}
    totals = [sum(filter(None, each)) for each in zip(*parts.values(), strict=True)]
    return page.Figure(
        f"Parts of a step, {mode} scaling",
        [page.Bars(head, parts[name]) for name, head in SPLIT.items()],
        page.Axis("time of a step", "seconds"),
        page.Axis(""),
        [f"{cell.id}: {format_step_time(total)}" for cell, total in zip(cells, totals, strict=True)],
        note="Means over ranks and timed steps. Exposed communication: extra time compared with the ceiling.",
    )


def _bandwidth(scaling: Scaling) -> page.Figure:
    lines = []
    for index, link in enumerate(scaling.links):
        points = sorted(link.points, key=lambda point: point.bytes)
        label = f"{format_count(link.world_size)} ranks, {link.backend or 'backend not recorded'}"
        lines.append(
            page.Line(label, [p.bytes for p in points], [p.busbw_gb_s for p in points], index, "both")
        )
    x_axis = page.Axis("message (bytes)", log=True)
    y_axis = page.Axis("bus bandwidth (GB/s, 1 GB = 1e9 bytes)", from_zero=True)
    note = "Bus bandwidth: (bytes / time) x 2 (N - 1) / N. It shows the rate of the slowest link."
    return page.Figure("All-reduce bus bandwidth", lines, x_axis, y_axis, note=note)
