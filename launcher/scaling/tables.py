"""The tables of the page of a scaling benchmark: cells, prediction, settings, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher import builder, figures
from launcher.builder import card, escape
from launcher.redact import redact
from launcher.report.numbers import (
    NA,
    format_count,
    format_gib,
    format_percent,
    format_ratio,
    format_si,
    format_step_time,
    number,
)
from launcher.scaling import figures as scaling_figures
from launcher.scaling import view
from launcher.scaling.view import Column

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
REPEAT = (
    Column("steps", "steps", format_count),
    Column("steps_per_s", "steps/s", format_si),
    Column("tokens_per_s", "tokens/s", format_si),
    Column("step_time_s.median", "step, median", format_step_time),
    Column("step_time_s.p95", "p95", format_step_time),
)
RANK = (
    *(Column(f"step_time_s.{q}", f"step, {q}", format_step_time) for q in figures.QUARTILES),
    *(Column(f"own_work_s.{q}", f"own work, {q}", format_step_time) for q in figures.QUARTILES),
    Column("peak_memory_gib", "peak memory", format_gib),
)
PREDICTED = (
    Column("tensor", "tensor", format_count),
    Column("accumulation", "accumulation", format_count),
    Column("global_batch", "global batch", format_count),
    Column("step_time_s", "step", format_step_time),
    Column("exposed_comm_fraction", "exposed communication", format_percent),
    Column("tokens_per_s", "tokens/s", format_si),
    Column("speedup", "speed-up", format_ratio),
    Column("efficiency", "efficiency", format_percent),
)
LINK = (
    Column("bytes", "bytes", format_count),
    Column("seconds", "time", format_step_time),
    Column("busbw_gb_s", "bus bandwidth, GB/s", format_si),
    Column("algbw_gb_s", "bytes / time, GB/s", format_si),
    Column("bucket", "a bucket's size", view.format_word),
)


def tables(scaling: Mapping[str, Any]) -> str:
    """Every number of every cell, by topic."""
    parts = []
    for topic, columns in view.TOPICS.items():
        parts.append(f"<h3>{escape(topic)}</h3>{grid(view.cells(scaling), columns)}")
    causes = [c for c in view.cells(scaling) if c.get("cause")]
    lines = [builder.row(view.name(c), [f"{c.get('status')}: {c['cause']}"]) for c in causes]
    ends = f"<h3>Cells without a result</h3>{builder.table(lines, 'pairs')}" if lines else ""
    return card("All cells", "".join(parts) + ends)


def grid(cells: Sequence[Mapping[str, Any]], columns: Sequence[Column], names: Sequence[str] = ()) -> str:
    """A row per cell, named by its id or by `names`. The exact value is the title of its place."""
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


def prediction(scaling: Mapping[str, Any]) -> str:
    """What `bert-dp plan scaling` says: its prediction for each measured cell beside the measurement, its
    rows for other numbers of ranks, and what it assumes; whatever else it holds as it was recorded."""
    told = view.mapped(scaling.get("prediction"))
    if not told:
        return ""
    measured = {view.name(cell): cell for cell in view.cells(scaling)}
    beside = [row for row in map(view.mapped, view.listed(told.get("measured"))) if row]
    lines = [_beside(row, measured.get(str(row.get("cell")), {})) for row in beside]
    names = [
        "step, predicted",
        "step, measured",
        "95 % interval",
        "difference",
        "efficiency, predicted",
        "efficiency, measured",
        "95 % interval",
    ]
    parts = [builder.table([builder.head(names), *lines], "numbers")] if lines else []
    if rows := [row for row in map(view.mapped, view.listed(told.get("rows"))) if row]:
        labels = [f"N = {format_count(row.get('world_size'))}" for row in rows]
        parts.append(f"<h3>Predicted</h3>{grid(rows, PREDICTED, labels)}")
    assumed = "".join(f"<li>{escape(str(line))}</li>" for line in view.listed(told.get("assumptions")))
    parts.append(f"<ul>{assumed}</ul>" if assumed else "")
    rest = {key: value for key, value in told.items() if key not in ("measured", "rows", "assumptions")}
    return card("Prediction and measurement", "".join(parts) + (builder.record_text(rest) if rest else ""))


def _beside(row: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    expected, found = number(row.get("predicted_step_s")), number(row.get("measured_step_s"))
    off = format_percent(expected / found - 1) if expected is not None and found else NA
    ends = [format_step_time(view.value(row, f"ci95.{end}")) for end in view.ENDS]
    efficiencies = [format_percent(row.get(f"{kind}_efficiency")) for kind in ("predicted", "measured")]
    return builder.row(
        str(row.get("cell")),
        [
            format_step_time(expected),
            format_step_time(found),
            " to ".join(ends),
            off,
            *efficiencies,
            view.format_interval(cell, "efficiency_ci95"),
        ],
    )


def settings(scaling: Mapping[str, Any]) -> str:
    """What was asked for, and the peaks that rates are divided by."""
    asked, command = view.mapped(scaling.get("settings")), scaling.get("command")
    known = {column.path for column in SETTINGS}
    rows = [(column.head, column.text(asked.get(column.path))) for column in SETTINGS]
    rows += [(str(key), view.format_word(value)) for key, value in asked.items() if key not in known]
    rows += [
        ("peak from the data sheet", format_si(view.at(scaling, "peak.datasheet_flops"), "FLOP/s")),
        ("matmul peak measured here", format_si(view.at(scaling, "peak.matmul_flops"), "FLOP/s")),
        *_profile(view.mapped(scaling.get("profile"))),
        ("configuration hash", str(scaling.get("config_hash") or NA)),
        ("data hash", str(scaling.get("data_hash") or NA)),
        ("command", " ".join(map(str, view.listed(command))) or str(command or NA)),
    ]
    return card("Settings", builder.table([builder.row(name, [text]) for name, text in rows], "pairs"))


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


def details(scaling: Mapping[str, Any]) -> list[str]:
    """What opens on a click: each repeat, each rank, each all-reduce, the environment."""
    repeats = [
        (f"{view.name(c)}: {r.get('run')}", r)
        for c in view.cells(scaling)
        for r in map(view.mapped, view.listed(c.get("repeats")))
    ]
    ranks = [
        (f"{view.name(c)}, rank {format_count(r.get('rank'))}", r)
        for c in view.cells(scaling)
        for r in scaling_figures.extremes(c)
    ]
    links = [
        (f"{format_count(link.get('world_size'))} ranks, {link.get('backend')}", p)
        for link in map(view.mapped, view.listed(scaling.get("links")))
        for p in map(view.mapped, view.listed(link.get("points")))
    ]
    tables = {"Repeats": (repeats, REPEAT), "Ranks": (ranks, RANK), "All-reduce": (links, LINK)}
    folded = [
        builder.details(title, grid([row for _, row in rows], columns, [label for label, _ in rows]))
        for title, (rows, columns) in tables.items()
        if rows
    ]
    environment = redact(view.mapped(scaling.get("environment")))
    return [*folded, builder.details("Environment", builder.environment_text(environment))]
