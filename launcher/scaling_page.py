"""The HTML page of a scaling benchmark, from scaling.json: self-contained, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher import builder, figures, plots, scaling_figures
from launcher import scaling_view as view
from launcher.builder import card, escape
from launcher.redact import redact
from launcher.report import (
    NA,
    format_count,
    format_gib,
    format_percent,
    format_ratio,
    format_si,
    format_step_time,
)
from launcher.runs import number
from launcher.scaling_view import Cell, Column

SHOWN = 6  # cells of one verdict before the rest folds
SETTINGS = (
    Column("model", "model", view.format_word),
    Column("parameters", "parameters", format_si),
    Column("flops_per_token", "FLOPs per token, forward and backward", format_si),
    Column("sequence_length", "tokens per sequence", format_count),
    Column("micro_batch", "micro batch, sequences", format_count),
    Column("accumulation", "accumulation, micro batches per step", format_count),
    Column("global_batch", "global batch of strong scaling, sequences", format_count),
    Column("steps", "timed steps per repeat", format_count),
    Column("warm_up", "warm-up steps before them", format_count),
    Column("repeats", "repeats of a cell", format_count),
    Column("precision", "precision", view.format_word),
    Column("compiled", "compiled", view.format_word),
    Column("device", "device", view.format_word),
)


def html(scaling: Mapping[str, Any]) -> str:
    """One self-contained page of scaling.json, partial or whole."""
    body = [
        builder.sub(_machine(scaling)),
        builder.sub(_method(scaling)),
        *_verdicts(scaling),
        builder.tiles(_tiles(scaling)),
        builder.plot_grid(_plots(scaling)),
        _steps(scaling),
        _ranks(scaling),
        *_tables(scaling),
        _prediction(scaling),
        card("Settings", builder.table(builder.row(*pair) for pair in _settings(scaling))),
        *_details(scaling),
    ]
    return builder.document("bert-dp: scaling benchmark", body)


def write(scaling: Mapping[str, Any], out: Path) -> None:
    """Write `html(scaling)` to `out`, atomically. Raises OSError when `out` cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(out, html(scaling))


def _machine(scaling: Mapping[str, Any]) -> str:
    sizes = [n for cell in view.cells(scaling) if (n := view.value(cell, "world_size")) is not None]
    device = view.mapped(scaling.get("settings")).get("device") or "device not recorded"
    count = f"up to {format_count(max(sizes))} x {device}" if sizes else str(device)
    return builder.machine_line(view.mapped(scaling.get("environment")), count)


def _method(scaling: Mapping[str, Any]) -> str:
    settings = view.mapped(scaling.get("settings"))
    base = view.mapped(scaling.get("baselines")).get("single")
    count = {key: format_count(settings.get(key)) for key in ("steps", "warm_up", "repeats")}
    return " \u00b7 ".join([
        str(settings.get("model") or "model not recorded"),
        f"{scaling.get('mode') or NA} scaling",
        f"{count['repeats']} repeats of {count['steps']} steps after {count['warm_up']} of warm-up",
        f"baseline: {scaling.get('baseline') or NA} on one rank{f' ({base})' if base else ''}",
    ])  # fmt: skip


# --- what was found


def _verdicts(scaling: Mapping[str, Any]) -> list[str]:
    """How the grid ended, then each verdict once with the cells that it holds of."""
    found: dict[str, list[str]] = {}
    for entry in map(view.mapped, view.listed(scaling.get("verdicts"))):
        text = f"{entry.get('cell')}: {entry.get('evidence') or 'no evidence recorded'}"
        text += f" Next: {entry['next']}" if entry.get("next") else ""
        found.setdefault(str(entry.get("verdict")), []).append(text)
    cards = [_folded(_level(name), name, notes) for name, notes in found.items()]
    flags = [f"{view.name(cell)}: {view.format_word(cell['flags'])}" for cell in view.cells(scaling)
             if cell.get("flags")]  # fmt: skip
    flagged = [_folded("warn", "Flags: look at these numbers before using them", flags)] if flags else []
    return [*_ends(scaling), *cards, *flagged]


def _ends(scaling: Mapping[str, Any]) -> list[str]:
    cells = view.cells(scaling)
    by_status = {status: [c for c in cells if c.get("status") == status] for status in ("ok", "pending")}
    lost = [c for c in cells if c.get("status") not in by_status]
    done = f"{len(by_status['ok'])} of {len(cells)} cells have a result"
    cards = []
    if scaling.get("status") != "complete" or by_status["pending"]:
        waiting = f"{len(by_status['pending'])} have not run yet"
        cards.append(builder.verdict_card("warn", f"Partial: {done}, {waiting}."))
    if lost:
        causes = [f"{view.name(c)}: {c.get('status')}: {_first(c.get('cause'))}" for c in lost]
        cards.append(_folded("fail", f"{done}; these ended without one", causes))
    if scaling.get("schema_version") != 1:
        text = (
            f"scaling.json has schema version {scaling.get('schema_version', NA)}; this page reads version 1."
        )
        cards.append(builder.verdict_card("warn", text))
    return cards


def _folded(level: str, text: str, notes: Sequence[str]) -> str:
    """A card with its first notes; the others open on a click."""
    rest = "".join(f"<li>{escape(note)}</li>" for note in notes[SHOWN:])
    more = f"<details><summary>{len(notes) - SHOWN} more</summary><ul>{rest}</ul></details>" if rest else ""
    return builder.verdict_card(level, f"{text[:1].upper()}{text[1:]}", notes[:SHOWN], after=more)


def _level(verdict: str) -> str:
    lowered = verdict.lower()
    if "no claim" in lowered:
        return ""
    lossy = ("bound", "straggler", "ceiling", "100 %", "above", "flag", "disagree")
    return "warn" if any(word in lowered for word in lossy) else "ok"


def _first(cause: object) -> str:
    return (str(cause or "cause not recorded").strip().splitlines() or ["cause not recorded"])[0]


def _tiles(scaling: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    cell: Cell = view.headline(scaling) or {}
    place = (
        f"{view.name(cell)}, N = {format_count(cell.get('world_size'))}" if cell else "no cell has a result"
    )
    device = view.mapped(scaling.get("settings")).get("device") or "this device"
    mfu, mamfu = view.value(cell, "mfu"), view.value(cell, "mamfu")
    peak = (
        "data-sheet peak"
        if view.at(scaling, "peak.datasheet_flops")
        else f"data-sheet peak of {device} unknown"
    )
    measured = (
        "matmul peak measured here" if view.at(scaling, "peak.matmul_flops") else "no matmul peak measured"
    )
    return [
        ("Best speed-up", format_ratio(view.value(cell, "speedup")), place),
        ("Efficiency", format_percent(view.value(cell, "efficiency")), _interval(cell, "efficiency_ci95")),
        ("Communication efficiency", format_percent(view.value(cell, "communication_efficiency")),
         f"of the ceiling; {_interval(cell, 'communication_efficiency_ci95')}"),
        ("MFU / MAMFU", f"{format_percent(mfu)} / {format_percent(mamfu)}", f"{peak}; {measured}"),
    ]  # fmt: skip


def _interval(cell: Cell, key: str) -> str:
    low, high = (view.value(cell, f"{key}.{end}") for end in view.ENDS)
    known = low is not None and high is not None
    return f"95 % interval {format_percent(low)} to {format_percent(high)}" if known else "95 % interval n/a"


# --- figures


def _plots(scaling: Mapping[str, Any]) -> list[str]:
    kinds = (
        scaling_figures.speedup, scaling_figures.efficiency, scaling_figures.communication,
        scaling_figures.memory,
    )  # fmt: skip
    drawn = [kind(scaling, mode) for mode in view.modes(scaling) for kind in kinds]
    return [
        _plot(figure)
        for figure in [*drawn, scaling_figures.bandwidth(scaling), scaling_figures.loss(scaling)]
    ]


def _plot(figure: scaling_figures.Figure) -> str:
    svg = plots.line_plot(figure.title, figure.series, figure.x, figure.y, figure.levels, figure.marks)
    keys = plots.legend(figure.legend) if svg.startswith("<svg") else ""
    return card(figure.title, f'<div class="plot">{svg}</div>{keys}<p class="note">{escape(figure.note)}</p>')


def _steps(scaling: Mapping[str, Any]) -> str:
    note = "Median step, mean over the ranks. "
    note += "Exposed communication is what the ceiling of the same cell does not have."
    title = "Where a step's time goes"
    bars = figures.bars(title, "seconds of a step", scaling_figures.step_bars(scaling), format_step_time)
    return card(title, f'{bars}<p class="note">{escape(note)}</p>')


def _ranks(scaling: Mapping[str, Any]) -> str:
    title = "Step times of each rank"
    note = "Box: quartiles; line: least and greatest. Every cell has its own time axis. "
    note += "The ranks wait for each other, so a slow one shows in its own work."
    boxes = figures.boxes(
        title, scaling_figures.rank_panels(scaling), format_step_time, "rank, time of a step"
    )
    return card(title, f'{boxes}<p class="note">{escape(note)}</p>')


# --- numbers


def _tables(scaling: Mapping[str, Any]) -> list[str]:
    """Every number of every cell, by topic; of a control what it can have. The exact value is the title."""
    parts = []
    for topic, columns in view.TOPICS.items():
        runs_only = topic.startswith("Scaling")
        cells = view.cells(scaling, "run" if runs_only else None)
        parts.append(f"<h3>{escape(topic)}</h3>{_grid(cells, columns)}")
    causes = [c for c in view.cells(scaling) if c.get("cause")]
    lines = [builder.row(view.name(c), [str(c.get("status")), str(c["cause"])]) for c in causes]
    ends = f"<h3>Cells without a result</h3>{builder.table(lines)}" if lines else ""
    return [card("All cells", "".join(parts) + ends)]


def _grid(cells: Sequence[Mapping[str, Any]], columns: Sequence[Column], names: Sequence[str] = ()) -> str:
    lines = [builder.head([column.head for column in columns])]
    for index, cell in enumerate(cells):
        values = []
        for column in columns:
            entry = view.entry(cell, column)
            exact = f' title="{escape(repr(entry))}"' if isinstance(entry, float) else ""
            values.append(f"<td{exact}>{escape(column.text(entry))}</td>")
        label = names[index] if names else view.name(cell)
        lines.append(f"<tr><th>{escape(label)}</th>{''.join(values)}</tr>")
    return builder.table(lines, "numbers") if cells else '<p class="empty">no cells recorded</p>'


def _prediction(scaling: Mapping[str, Any]) -> str:
    """Prediction beside measurement, for each cell that the prediction names; the rest as it was recorded."""
    prediction = scaling.get("prediction")
    if not isinstance(prediction, Mapping) or not prediction:
        return ""
    measured = {view.name(cell): cell for cell in view.cells(scaling)}
    names = [
        "step, predicted",
        "step, measured",
        "difference",
        "efficiency, predicted",
        "measured",
        "95 % interval",
    ]
    lines = [builder.head(names)]
    for row in map(view.mapped, view.listed(prediction.get("cells"))):
        cell = measured.get(str(row.get("cell")), {})
        told, found = number(row.get("step_time_s")), view.value(cell, "step_time_s.median")
        off = format_percent(told / found - 1) if told is not None and found else NA
        interval = _interval(cell, "efficiency_ci95").removeprefix("95 % interval ")
        efficiencies = [format_percent(it.get("efficiency")) for it in (row, cell)]
        times = [format_step_time(told), format_step_time(found), off]
        lines.append(builder.row(str(row.get("cell")), [*times, *efficiencies, interval]))
    rest = {key: value for key, value in prediction.items() if key != "cells"}
    table = builder.table(lines, "numbers") if len(lines) > 1 else ""
    return card("Prediction and measurement", table + (builder.record_text(rest) if rest else ""))


def _settings(scaling: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    settings = view.mapped(scaling.get("settings"))
    known = {column.path for column in SETTINGS}
    rows = [(column.head, column.text(settings.get(column.path))) for column in SETTINGS]
    rows += [(str(key), str(value)) for key, value in settings.items() if key not in known]
    rows += [
        ("peak from the data sheet", format_si(view.at(scaling, "peak.datasheet_flops"), "FLOP/s")),
        ("matmul peak measured here", format_si(view.at(scaling, "peak.matmul_flops"), "FLOP/s")),
        *_profile(view.mapped(scaling.get("profile"))),
        ("configuration hash", str(scaling.get("config_hash") or NA)),
        ("command", str(scaling.get("command") or NA)),
    ]
    return [(name, [text]) for name, text in rows]


def _profile(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not profile:
        return []
    parts = [
        f"{key} {format_step_time(profile.get(f'{key}_s'))}" for key in ("forward", "backward", "optimizer")
    ]
    sizes = [
        size for g in view.listed(profile.get("gradients")) if (size := number(view.mapped(g).get("bytes")))
    ]
    return [
        ("one rank, one micro batch", ", ".join(parts)),
        ("gradients", f"{format_count(len(sizes))} tensors, {format_si(sum(sizes) if sizes else None, 'B')}"),
    ]


def _details(scaling: Mapping[str, Any]) -> list[str]:
    repeats = [(f"{view.name(c)}: {r.get('run')}", r) for c in view.cells(scaling)
               for r in map(view.mapped, view.listed(c.get("repeats")))]  # fmt: skip
    ranks = [(f"{view.name(c)}, rank {format_count(r.get('rank'))}", r) for c in view.cells(scaling)
             for r in map(view.mapped, view.listed(c.get("ranks")))]  # fmt: skip
    links = [(f"{format_count(link.get('world_size'))} ranks, {link.get('backend')}", p)
             for link in map(view.mapped, view.listed(scaling.get("links")))
             for p in map(view.mapped, view.listed(link.get("points")))]  # fmt: skip
    tables = {"Repeats": (repeats, REPEAT), "Ranks": (ranks, RANK), "All-reduce": (links, LINK)}
    folded = [
        builder.details(title, _grid([row for _, row in rows], columns, [label for label, _ in rows]))
        for title, (rows, columns) in tables.items() if rows
    ]  # fmt: skip
    environment = redact(view.mapped(scaling.get("environment")))
    return [*folded, builder.details("Environment", builder.environment_text(environment))]


REPEAT = (
    Column("steps", "steps", format_count), Column("steps_per_s", "steps/s", format_si),
    Column("tokens_per_s", "tokens/s", format_si),
    Column("step_time_s.median", "step, median", format_step_time),
    Column("step_time_s.p95", "p95", format_step_time),
)  # fmt: skip
RANK = (
    *(Column(f"step_time_s.{q}", f"step, {q}", format_step_time) for q in figures.QUARTILES),
    *(Column(f"own_work_s.{q}", f"own work, {q}", format_step_time) for q in figures.QUARTILES),
    Column("peak_memory_gib", "peak memory", format_gib),
)
LINK = (
    Column("bytes", "bytes", format_count), Column("seconds", "time", format_step_time),
    Column("busbw_gb_s", "bus bandwidth, GB/s", format_si),
    Column("algbw_gb_s", "bytes / time, GB/s", format_si),
    Column("bucket", "a bucket's size", view.format_word),
)  # fmt: skip
