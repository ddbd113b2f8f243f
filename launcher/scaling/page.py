"""The HTML page of a scaling benchmark, from scaling.json: self-contained, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher import builder, figures, plots
from launcher.builder import card, escape
from launcher.report.numbers import (
    NA,
    format_count,
    format_percent,
    format_ratio,
    format_step_time,
    format_time_tick,
)
from launcher.scaling import figures as scaling_figures
from launcher.scaling import view
from launcher.scaling.tables import details, prediction, settings, tables
from launcher.scaling.view import Cell

SHOWN = 6  # cells of one verdict before the rest folds


def html(scaling: Mapping[str, Any]) -> str:
    """One self-contained page of scaling.json, partial or whole."""
    body = [
        builder.sub(_machine(scaling)),
        builder.sub(_method(scaling)),
        *_verdicts(scaling),
        builder.tiles(_tiles(scaling)),
        builder.plot_grid(_plots(scaling)),
        *[_steps(scaling, mode) for mode in view.modes(scaling)],
        _ranks(scaling),
        tables(scaling),
        prediction(scaling),
        settings(scaling),
        *details(scaling),
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
    asked = view.mapped(scaling.get("settings"))
    base = ", ".join(view.baselines(scaling))
    count = {key: format_count(asked.get(key)) for key in ("steps", "warm_up", "repeats")}
    return " \u00b7 ".join(
        [
            str(asked.get("model") or "model not recorded"),
            f"{' and '.join(view.modes(scaling))} scaling",
            f"{count['repeats']} repeats of {count['steps']} steps after {count['warm_up']} of warm-up",
            f"baseline: {scaling.get('baseline') or NA} on one rank{f' ({base})' if base else ''}",
        ]
    )


# --- what was found


def _verdicts(scaling: Mapping[str, Any]) -> list[str]:
    """How the grid ended, then each verdict once with the cells that it holds of."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in map(view.mapped, view.listed(scaling.get("verdicts"))):
        key = str(entry.get("verdict")), str(entry.get("next") or "")
        found.setdefault(key, []).append(f"{entry.get('cell')}: {entry.get('evidence') or NA}")
    cards = []
    for (name, advice), cells in found.items():
        told = name if advice in ("", "nothing") else f"{name}. Next: {advice}"
        cards.append((_level(name), told, cells))
    flags = [
        f"{view.name(cell)}: {view.format_word(cell['flags'])}"
        for cell in view.cells(scaling)
        if cell.get("flags")
    ]
    if flags:
        cards.append(("warn", "Flags: look at these numbers before using them", flags))
    order = ("fail", "warn", "ok", "")
    cards.sort(key=lambda card: order.index(card[0]))
    return [*_ends(scaling), *[_folded(*card) for card in cards]]


def _ends(scaling: Mapping[str, Any]) -> list[str]:
    cells = view.cells(scaling)
    by_status = {status: [c for c in cells if c.get("status") == status] for status in ("ok", "pending")}
    judged = {str(view.mapped(entry).get("cell")) for entry in view.listed(scaling.get("verdicts"))}
    ended = [c for c in cells if str(c.get("status")) not in by_status]
    lost = [c for c in ended if view.name(c) not in judged]
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
    """The colour of a verdict: what is lost is a warning, what is not claimed has none."""
    words = {
        "fail": ("out of memory", "failed"),
        "": ("no claim", "no single cause"),
        "ok": ("scales", "fastest"),
    }
    lowered = verdict.lower()
    return next((level for level, starts in words.items() if lowered.startswith(starts)), "warn")


def _first(cause: object) -> str:
    return (str(cause or "cause not recorded").strip().splitlines() or ["cause not recorded"])[0]


def _tiles(scaling: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    cell: Cell = view.headline(scaling) or {}
    place = f"{view.name(cell)}, N = {format_count(cell.get('world_size'))}" if cell else "no cell has run"
    device = view.mapped(scaling.get("settings")).get("device") or "this device"
    mfu, mamfu = view.value(cell, "mfu"), view.value(cell, "mamfu")
    known, measured = (view.at(scaling, f"peak.{kind}_flops") for kind in ("datasheet", "matmul"))
    peaks = "data-sheet peak" if known else f"data-sheet peak of {device} unknown"
    peaks += "; matmul peak measured here" if measured else "; no matmul peak measured"
    keys = ("efficiency_ci95", "communication_efficiency_ci95")
    interval = [view.format_interval(cell, key) for key in keys]
    return [
        ("Best speed-up", format_ratio(view.value(cell, "speedup")), place),
        ("Efficiency", format_percent(view.value(cell, "efficiency")), f"95 % interval {interval[0]}"),
        (
            "Communication efficiency",
            format_percent(view.value(cell, "communication_efficiency")),
            f"of the ceiling; 95 % interval {interval[1]}",
        ),
        ("MFU / MAMFU", f"{format_percent(mfu)} / {format_percent(mamfu)}", peaks),
    ]


# --- figures


def _plots(scaling: Mapping[str, Any]) -> list[str]:
    kinds = (
        scaling_figures.speedup,
        scaling_figures.efficiency,
        scaling_figures.communication,
        scaling_figures.memory,
    )
    drawn = [kind(scaling, mode) for mode in view.modes(scaling) for kind in kinds]
    return [
        plot(figure) for figure in [*drawn, scaling_figures.bandwidth(scaling), scaling_figures.loss(scaling)]
    ]


def plot(figure: scaling_figures.Figure) -> str:
    """A card with the figure, its legend and its note; or why there is none."""
    svg = plots.line_plot(figure.title, figure.series, figure.x, figure.y, figure.levels, figure.marks)
    if not svg.startswith("<svg"):
        return card(figure.title, f'<p class="empty">{escape(figure.absent)}</p>' if figure.absent else svg)
    keys = plots.legend(figure.legend)
    return card(figure.title, f"{svg}{keys}{builder.note(figure.note)}")


def _steps(scaling: Mapping[str, Any], mode: str) -> str:
    """The steps of a mode, and folded below those of its controls."""
    note = "A timed step, mean over the ranks. "
    note += "Exposed communication is what the ceiling of the same cell does not have."
    title = f"Where a step's time goes, {mode} scaling"
    runs, controls = scaling_figures.step_bars(scaling, mode)
    drawn = _bars(title, runs)
    if not any(sum(row.parts.values()) for row in [*runs, *controls]):
        return card(title, drawn)
    drawn += builder.note(note)
    if controls:
        folded = _bars(f"{title}: controls", controls)
        folded += builder.note("ceiling: every collective off; synthetic: without the loader")
        drawn += f"<details><summary>Controls of these cells</summary>{folded}</details>"
    return card(title, drawn)


def _bars(title: str, rows: Sequence[figures.Bar]) -> str:
    return figures.bars(title, "time of a step", rows, format_step_time, format_time_tick)


def _ranks(scaling: Mapping[str, Any]) -> str:
    title = "Step times of each rank"
    note = "Box: quartiles; line: least and greatest. Every cell has its own time axis. "
    note += "The ranks wait for each other, so a slow one shows in its own work."
    boxes = figures.boxes(
        title,
        scaling_figures.rank_panels(scaling),
        format_step_time,
        format_time_tick,
        "rank, time of a step",
    )
    return card(title, f"{boxes}{builder.note(note)}")
