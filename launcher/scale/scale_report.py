"""A scaling benchmark as a Report, from scaling.json, partial or whole."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.report.model import Cell, Level, Report, Section, Table, Tile, Verdict
from launcher.report.numbers import NA, count_of, format_count, format_interval, format_step_time
from launcher.report.parts import environment_text, first_line, folded, machine_line, other_version, words
from launcher.report.quantities import Computed, Quantity, Ratio, cell_of, rows, table
from launcher.results import ComparedCell, Prediction, Scaling, VerdictKind
from launcher.scale import columns, scale_figures

FILE = "scaling.json"
LEVELS: dict[VerdictKind, Level] = {
    "out_of_memory": "fail",
    "failed": "fail",
    "scales": "ok",
    "fastest": "ok",
    "one_repeat": "info",
    "not_measurable": "info",
    "intervals_overlap": "info",
    "no_single_cause": "info",
}  # what is lost is a warning
RESULT_NOTE = (
    "Rates over all ranks; speed-up, efficiency +- the farther end of its 95 % interval: against single on "
    "one rank; comm.: throughput / ceiling; exposed, data: shares of a step that waits for gradients, for "
    "data; slowest: own work of the slowest rank / median; memory: peak of the greatest rank."
)
RANKS_NOTE = (
    "Box: quartiles; line: least and greatest. Every cell has its own time axis. The ranks wait for each "
    "other, so a slow one shows in its own work."
)
MANY_CELLS = 6  # from which the boxes of their ranks fold


def scale_report(scaling: Scaling, folder: Path | None = None) -> Report:
    """Findings worst first, figures, and every number of every cell."""
    modes = scale_figures.modes(scaling)
    return Report(
        "bert-dp: scaling benchmark",
        [_machine(scaling), _method(scaling)],
        [*_ends(scaling), *_verdicts(scaling)],
        _tiles(scaling),
        [
            Section("Result", tables=[_result(scaling)], notes=[RESULT_NOTE]),
            Section("", scale_figures.figures(scaling), console=False),
            *[section for mode in modes for section in _steps(scaling, mode)],
            _ranks(scaling),
            Section("All cells", tables=_cells(scaling), console=False),
            *([_prediction(scaling, scaling.prediction)] if scaling.prediction else []),
            Section("Settings", tables=[_settings(scaling)], console=False),
            *_details(scaling),
        ],
        next=f"bert-dp plan scaling --from {shlex.quote(str(folder / FILE))}"
        if folder and scaling.profile
        else "",
    )


def _machine(scaling: Scaling) -> str:
    sizes, device = [c.world_size for c in scaling.cells], scaling.settings.device or "device not recorded"
    count = f"up to {format_count(max(sizes))} x {device}" if sizes else device
    return machine_line(scaling.environment, count)


def _method(scaling: Scaling) -> str:
    settings, ids = scaling.settings, ", ".join(scaling.baselines.get("single", []))
    steps, warm_up = (format_count(n) for n in (settings.steps, settings.warm_up))
    return " \u00b7 ".join(
        [
            settings.model or "model not recorded",
            f"{' and '.join(scale_figures.modes(scaling))} scaling",
            f"{count_of(settings.repeats, 'repeat')} of {steps} steps after {warm_up} of warm-up",
            f"baseline: {scaling.baseline or NA} on one rank{f' ({ids})' if ids else ''}",
        ]
    )


def _ends(scaling: Scaling) -> list[Verdict]:
    """How the grid ended, and the cells without a result that no verdict is about."""
    ok, pending = ([c for c in scaling.cells if c.status == status] for status in ("ok", "pending"))
    judged = {verdict.cell for verdict in scaling.verdicts}
    lost = [c for c in scaling.cells if c.status in ("oom", "failed") and c.id not in judged]
    done = f"{len(ok)} of {len(scaling.cells)} cells have a result"
    verdicts = []
    if scaling.status != "complete" or pending:
        verdicts.append(Verdict("warn", f"Partial: {done}, {len(pending)} have not run yet."))
    if lost:
        causes = [f"{c.id}: {c.status}: {first_line(c.cause)}" for c in lost]
        verdicts.append(Verdict("fail", f"{done}; these ended without one.", causes))
    return [*verdicts, *other_version(FILE, scaling.schema_version)]


def _verdicts(scaling: Scaling) -> list[Verdict]:
    """Each verdict once with the cells that it holds of, and the flags of cells; worst first."""
    cells: dict[tuple[VerdictKind, str, str], list[str]] = {}
    for verdict in scaling.verdicts:
        note = f"{verdict.cell}: {verdict.evidence or NA}"
        cells.setdefault((verdict.kind, verdict.verdict, verdict.next), []).append(note)
    verdicts = []
    for (kind, text, remedy), notes in cells.items():
        advice = f" Next: {remedy}." if remedy not in ("", "nothing") else ""
        verdicts.append(Verdict(LEVELS.get(kind, "warn"), f"{text[:1].upper()}{text[1:]}.{advice}", notes))
    if flags := [f"{c.id}: {'; '.join(c.flags)}" for c in scaling.cells if c.flags]:
        verdicts.append(Verdict("warn", "Flags: look at these numbers before using them.", flags))
    order: Sequence[Level] = ("fail", "warn", "ok", "info")
    return sorted(verdicts, key=lambda verdict: order.index(verdict.level))


def _tiles(scaling: Scaling) -> list[Tile]:
    runs = [c for c in scale_figures.runs_of(scaling) if c.tokens_per_s is not None]
    best = max(runs, key=lambda c: (columns.SPEEDUP.number(c) or 0.0, c.world_size), default=None)
    place = f"{best.id}, N = {format_count(best.world_size)}" if best else "no cell has run"
    device = scaling.settings.device or "this device"
    peak, precision = scaling.peak, scaling.settings.precision
    peaks = f"{precision} data-sheet peak" if peak.datasheet_flops else f"data-sheet peak of {device} unknown"
    measured = " ".join(filter(None, [peak.matmul_precision, "matmul peak measured here"]))
    measured = measured if peak.matmul_flops else "no matmul peak measured"

    def tile(label: str, ratio: Ratio, scope: str = "") -> Tile:
        return Tile(label, cell_of(best, ratio).text, f"{scope}95 % interval {ratio.ends(best)}")

    both = " / ".join(cell_of(best, ratio).text for ratio in columns.PER_PEAK)
    return [
        Tile("Best speed-up", cell_of(best, columns.SPEEDUP).text, place),
        tile("Efficiency", columns.EFFICIENCY),
        tile("Communication efficiency", columns.COMMUNICATION, "of the ceiling; "),
        Tile("MFU / MAMFU", both, f"{peaks}; {measured}"),
    ]


def _result(scaling: Scaling) -> Table:
    """The run cells; a rate per peak that no cell has needs no column."""
    runs = scale_figures.runs_of(scaling)
    rates = [q for q in columns.PER_PEAK if any(q.of(run) for run in runs)]
    named = [(run.id, run) for run in runs]
    return table(named, [*columns.RESULT, *rates], corner="cell", empty="no cells recorded")


def _steps(scaling: Scaling, mode: scale_figures.Mode) -> list[Section]:
    controls = scale_figures.control_steps(scaling, mode)
    sections = [Section("", [scale_figures.steps(scaling, mode)], console=False)]
    if not controls.is_empty:
        title = f"Controls of these cells, {mode} scaling"
        sections.append(Section(title, [controls], folded=True, console=False))
    return sections


def _ranks(scaling: Scaling) -> Section:
    boxes = [
        figure for c in scale_figures.runs_of(scaling) if not (figure := scale_figures.rank_times(c)).is_empty
    ]
    notes = [RANKS_NOTE if boxes else "no data recorded"]
    title, many = "Step times of each rank", len(boxes) > MANY_CELLS
    return Section(title, boxes, notes=notes, folded=many, console=False)


def _cells(scaling: Scaling) -> list[Table]:
    """Every number of every cell, by topic, and why some have none."""
    named = [(c.id, c) for c in scaling.cells]
    topics = [
        table(named, quantities, title=topic, corner="cell", empty="no cells recorded")
        for topic, quantities in columns.TOPICS.items()
    ]
    causes = [words(c.id, f"{c.status}: {c.cause}") for c in scaling.cells if c.cause]
    return [*topics, *([Table(causes, title="Cells without a result")] if causes else [])]


def _prediction(scaling: Scaling, prediction: Prediction) -> Section:
    """What `bert-dp plan scaling` says: its prediction for each measured cell beside the measurement, its
    rows for other numbers of ranks, and what it assumes."""
    beside = (
        Quantity("predicted_step_s", "step, predicted", "seconds"),
        Quantity("measured_step_s", "step, measured", "seconds"),
        Computed(lambda row: Cell(format_interval(row.ci95, format_step_time)), "95 % interval"),
        Computed(_difference, "difference", "percent"),
        Quantity("predicted_efficiency", "efficiency, predicted", "percent"),
        columns.MEASURED_EFFICIENCY,
        Computed(lambda row: Cell(columns.MEASURED_EFFICIENCY.ends(row)), "95 % interval"),
    )
    tables = [
        table([(row.cell, row) for row in prediction.measured], beside, corner="cell"),
        table(
            [(f"N = {format_count(row.world_size)}", row) for row in prediction.rows],
            columns.PREDICTED,
            title="Predicted",
        ),
    ]
    shown = [each for each in tables if each.rows]
    return Section("Prediction and measurement", tables=shown, notes=prediction.assumptions, console=False)


def _difference(row: ComparedCell) -> float | None:
    return row.predicted_step_s / row.measured_step_s - 1 if row.measured_step_s else None


def _settings(scaling: Scaling) -> Table:
    """What was asked for, the peaks that rates are divided by, and one rank's profile where there is one."""
    profile = [*rows(scaling.profile, columns.PROFILE)] if scaling.profile else []
    return Table(
        [
            *rows(scaling.settings, columns.SETTINGS),
            *rows(scaling.peak, columns.PEAKS),
            *profile,
            *rows(scaling, columns.ORIGIN),
        ]
    )


def _details(scaling: Scaling) -> Iterable[Section]:
    """What opens on a click: each repeat, each rank, each all-reduce, the environment."""
    repeats = [(f"{c.id}: {repeat.run}", repeat) for c in scaling.cells for repeat in c.repeats]
    extremes = [(c, rank) for c in scaling.cells for rank in scale_figures.extremes(c)]
    ranks = [(f"{c.id}, rank {format_count(rank.rank)}", rank) for c, rank in extremes]
    points = [(link, point) for link in scaling.links for point in link.points]
    links = [(f"{format_count(link.world_size)} ranks, {link.backend}", point) for link, point in points]
    tables = {
        "Repeats": table(repeats, columns.REPEAT),
        "Ranks": table(ranks, columns.RANK),
        "All-reduce": table(links, columns.LINK),
    }
    for title, each in tables.items():
        if each.rows:
            yield folded(title, each)
    yield folded("Environment", environment_text(scaling.environment))
