"""The HTML page of a run or a comparison of runs: self-contained, no script, no network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher import builder, plots
from launcher.builder import card, escape
from launcher.closing import detail_rows, ranks, unit, verdict
from launcher.report import NA, format_count, format_duration, format_gib, format_nats, format_si
from launcher.runs import TRAIN_PARTS, WALL_PARTS, Run, load, number, other, times


def html(run_dirs: Sequence[Path]) -> str:
    """One self-contained page (no script, no network) of a run, or a comparison of several."""
    runs = _distinct([load(run_dir) for run_dir in run_dirs])
    title = f"{runs[0].name}: bert-dp run" if len(runs) == 1 else f"bert-dp: {len(runs)} runs compared"
    body = [
        *[builder.sub(_machine(run, len(runs) > 1)) for run in runs],
        *[_verdict_card(run, len(runs) > 1) for run in runs],
        _tiles(runs[0].facts) if len(runs) == 1 else "",
        builder.plot_grid(_cards(runs)),
        _time_card(runs),
        card("Numbers", _html_table(runs)),
        _differences(runs) if len(runs) > 1 else "",
        *[_details(run, len(runs) > 1) for run in runs],
    ]
    return builder.document(title, body)


def write(run_dirs: Sequence[Path], out: Path) -> None:
    """Write `html(run_dirs)` to `out`, atomically. Raises OSError when `out` cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(out, html(run_dirs))


def _cards(runs: Sequence[Run]) -> list[str]:
    many = len(runs) > 1
    losses = []
    for i, run in enumerate(runs):
        prefix, facts = (f"{run.name}: " if many else ""), run.facts
        heldout = _points(run.evals, "tokens", "loss")
        end = (number(facts.get("tokens")), number(facts.get("heldout_loss")))
        if not heldout and end[0] is not None and end[1] is not None:
            heldout = [(end[0], end[1])]
        losses.append(plots.Series(f"{prefix}training", _points(run.metrics, "tokens", "loss"), i))
        losses.append(plots.Series(f"{prefix}held-out", heldout, i if many else 1, "marked"))
    tokens, nats = plots.Axis("tokens", format_si), plots.Axis("loss (nats per masked token)", format_si)
    log_tokens = dataclasses.replace(tokens, label="tokens, log scale", log=True)
    linear, log = (
        plots.line_plot("Loss over tokens", losses, x, nats, _levels(runs)) for x in (tokens, log_tokens)
    )
    choice = '<label><input type="radio" name="scale" class="to-{0}" {1}>{0}</label>'
    switch = (
        f'<span class="scales">tokens:{choice.format("linear", "checked")}{choice.format("log", "")}</span>'
    )
    keys = plots.legend([(s.label, s.colour, s.style) for s in losses if s.points])
    both = f'<div class="linear">{linear}</div><div class="log">{log}</div>{keys}'
    (unit, divide), share = _time_unit(runs), "progress (share of the budget)"
    return [
        card("Loss", both, switch),
        _metric_card(
            runs,
            "Throughput",
            "tokens_per_s",
            "tokens/s, summed over all ranks",
            "elapsed_s",
            f"elapsed ({unit})",
            divide,
        ),
        _metric_card(runs, "Learning rate", "lr", "learning rate", "progress", share),
        _metric_card(runs, "Global batch", "global_batch", "sequences per optimizer step", "progress", share),
    ]


def _metric_card(
    runs: Sequence[Run], title: str, y: str, y_label: str, x: str, x_label: str, divide: float = 1.0
) -> str:
    lines = [
        plots.Series(run.name, [(a / divide, b) for a, b in _points(run.metrics, x, y)], i)
        for i, run in enumerate(runs)
    ]
    axes = plots.Axis(x_label, format_si), plots.Axis(y_label, format_si, from_zero=True)
    keys = plots.legend([(s.label, s.colour, s.style) for s in lines if s.points]) if len(runs) > 1 else ""
    return card(title, plots.line_plot(title, lines, *axes) + keys)


def _time_card(runs: Sequence[Run]) -> str:
    rows = [(f"{run.name}, wall" if len(runs) > 1 else "wall of rank 0", _split(run.facts)) for run in runs]
    return card("Where the time went", plots.stacked_bars("Time split", rows, format_duration))


def _verdict_card(run: Run, named: bool) -> str:
    level, text = verdict(run)
    return builder.verdict_card(level, text, run.missing, run.name if named else "")


def _tiles(facts: Mapping[str, Any]) -> str:
    loss, unigram = number(facts.get("heldout_loss")), number(facts.get("unigram_entropy_nats"))
    items = [
        ("Held-out loss", format_nats(loss), f"unigram entropy {format_nats(unigram)}"),
        ("Throughput", format_si(facts.get("tokens_per_s"), "tokens/s"), f"summed over {ranks(facts)}"),
        (f"Per {unit(facts)}", format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"), ranks(facts)),
        ("Peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {ranks(facts)}"),
    ]
    return builder.tiles(items)


def _html_table(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs] if len(runs) > 1 else []
    lines, section, num_columns = [builder.head(names)] if names else [], "", len(runs) + 1 + (len(runs) == 1)
    for rows in zip(*(detail_rows(run) for run in runs), strict=True):
        if rows[0].section != section:
            section = rows[0].section
            head = f'<th colspan="{num_columns}">{escape(section.upper())}</th>'
            lines.append(f'<tr class="section">{head}</tr>')
        between = '</td><td class="note">' if len(runs) == 1 else '<span class="note">'
        end = "" if len(runs) == 1 else "</span>"
        cells = (f"<td>{escape(r.value)}{between}{escape(r.note)}{end}</td>" for r in rows)
        lines.append(f"<tr><th>{escape(rows[0].label)}</th>{''.join(cells)}</tr>")
    return builder.table(lines)


def _differences(runs: Sequence[Run]) -> str:
    settings = [_flat(run.config) for run in runs]
    keys = sorted({key for setting in settings for key in setting})
    lines = [builder.head([run.name for run in runs])]
    for key in keys:
        values = [str(setting.get(key, NA)) for setting in settings]
        if len(set(values)) > 1:
            lines.append(builder.row(key, values))
    return card(
        "Settings that differ", builder.table(lines) if len(lines) > 1 else '<p class="empty">none</p>'
    )


def _details(run: Run, named: bool) -> str:
    suffix = f": {run.name}" if named else ""
    return builder.details(f"Configuration{suffix}", builder.record_text(run.config)) + builder.details(
        f"Environment{suffix}", builder.environment_text(run.environment)
    )


def _machine(run: Run, named: bool) -> str:
    count = format_count(run.facts.get("world_size"))
    devices = f"{count} x {run.facts.get('device') or 'device not recorded'}"
    return builder.machine_line(run.environment, run.name if named else "", devices)


def _split(facts: Mapping[str, Any]) -> dict[str, float]:
    parts = times(facts)
    inner = {name: parts.get(key, 0.0) for key, name in TRAIN_PARTS.items()}
    outer = [(part, parts.get(part, 0.0)) for part in WALL_PARTS if part != "train"]
    return {**dict(outer[:2]), **inner, "other": other(parts), **dict(outer[2:])}


def _levels(runs: Sequence[Run]) -> list[plots.Level]:
    levels = {}
    for key, name in (("unigram_entropy_nats", "unigram entropy"), ("uniform_entropy_nats", "ln V")):
        for run in runs:
            value = number(run.facts.get(key))
            if value is not None:
                label = f"{name} {value:.2f}"
                levels[label] = plots.Level(label, value)
    return list(levels.values())


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    longest = max(
        (t for run in runs for line in run.metrics if (t := number(line.get("elapsed_s")))), default=0
    )
    return ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 300 else ("s", 1.0)


def _points(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> list[plots.Point]:
    pairs = ((number(line.get(x)), number(line.get(y))) for line in lines)
    return [(a, math.nan if b is None else b) for a, b in pairs if a is not None]


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs whose directories have the same name get numbers."""
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.name} ({i + 1})") if names.count(run.name) > 1 else run
        for i, run in enumerate(runs)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(_flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value})
    return flat
