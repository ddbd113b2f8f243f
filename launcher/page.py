"""The HTML page of a run or a comparison of runs: self-contained, no script, no network."""

from __future__ import annotations

import dataclasses
import html as markup
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher import plots
from launcher.closing import detail_rows, ranks, unit, verdict
from launcher.report import NA, format_count, format_duration, format_gib, format_nats, format_si, safe
from launcher.runs import TRAIN_PARTS, WALL_PARTS, Run, load, number, other, times


def html(run_dirs: Sequence[Path]) -> str:
    """One self-contained page (no script, no network) of a run, or a comparison of several."""
    runs = _distinct([load(run_dir) for run_dir in run_dirs])
    title = f"{runs[0].name}: bert-dp run" if len(runs) == 1 else f"bert-dp: {len(runs)} runs compared"
    body = [
        f"<h1>{_escape(title)}</h1>",
        *[f'<p class="sub">{_escape(_machine(run, len(runs) > 1))}</p>' for run in runs],
        *[_verdict_card(run, len(runs) > 1) for run in runs],
        _tiles(runs[0].facts) if len(runs) == 1 else "",
        f'<div class="plots">{"".join(_cards(runs))}</div>',
        _time_card(runs),
        f'<section class="card"><h2>Numbers</h2><div class="scroll">{_html_table(runs)}</div></section>',
        _differences(runs) if len(runs) > 1 else "",
        *[_details(run, len(runs) > 1) for run in runs],
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)}</title><style>{plots.STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )
    return safe(page)


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
        _card("Loss", both, switch),
        _metric_card(runs, "Throughput", "tokens_per_s", "tokens/s, summed over all ranks",
                     "elapsed_s", f"elapsed ({unit})", divide),
        _metric_card(runs, "Learning rate", "lr", "learning rate", "progress", share),
        _metric_card(runs, "Global batch", "global_batch", "sequences per optimizer step", "progress", share),
    ]  # fmt: skip


def _metric_card(
    runs: Sequence[Run], title: str, y: str, y_label: str, x: str, x_label: str, divide: float = 1.0
) -> str:
    lines = [
        plots.Series(run.name, [(a / divide, b) for a, b in _points(run.metrics, x, y)], i)
        for i, run in enumerate(runs)
    ]
    axes = plots.Axis(x_label, format_si), plots.Axis(y_label, format_si, from_zero=True)
    keys = plots.legend([(s.label, s.colour, s.style) for s in lines if s.points]) if len(runs) > 1 else ""
    return _card(title, plots.line_plot(title, lines, *axes) + keys)


def _time_card(runs: Sequence[Run]) -> str:
    rows = [(f"{run.name}, wall" if len(runs) > 1 else "wall of rank 0", _split(run.facts)) for run in runs]
    return _card("Where the time went", plots.stacked_bars("Time split", rows, format_duration))


def _card(title: str, content: str, extra: str = "") -> str:
    return f'<section class="card">{extra}<h2>{_escape(title)}</h2>{content}</section>'


def _verdict_card(run: Run, named: bool) -> str:
    level, text = verdict(run)
    notes = "".join(f"<li>{_escape(note)}</li>" for note in run.missing)
    name = f"<strong>{_escape(run.name)}</strong> " if named else ""
    listed = f"<ul>{notes}</ul>" if notes else ""
    return f'<div class="verdict {level}">{name}{_escape(text)}{listed}</div>'


def _tiles(facts: Mapping[str, Any]) -> str:
    loss, unigram = number(facts.get("heldout_loss")), number(facts.get("unigram_entropy_nats"))
    tiles = [
        ("Held-out loss", format_nats(loss), f"unigram entropy {format_nats(unigram)}"),
        ("Throughput", format_si(facts.get("tokens_per_s"), "tokens/s"), f"summed over {ranks(facts)}"),
        (f"Per {unit(facts)}", format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"), ranks(facts)),
        ("Peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {ranks(facts)}"),
    ]
    cards = (
        f'<div class="card"><span class="note">{_escape(name)}</span><b>{_escape(value)}</b>'
        f'<span class="note">{_escape(note)}</span></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def _html_table(runs: Sequence[Run]) -> str:
    lines, section, num_columns = [_table_head(runs)], "", len(runs) + 1 + (len(runs) == 1)
    for rows in zip(*(detail_rows(run) for run in runs), strict=True):
        if rows[0].section != section:
            section = rows[0].section
            head = f'<th colspan="{num_columns}">{_escape(section.upper())}</th>'
            lines.append(f'<tr class="section">{head}</tr>')
        between = '</td><td class="note">' if len(runs) == 1 else '<span class="note">'
        end = "" if len(runs) == 1 else "</span>"
        cells = (f"<td>{_escape(r.value)}{between}{_escape(r.note)}{end}</td>" for r in rows)
        lines.append(f"<tr><th>{_escape(rows[0].label)}</th>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _table_head(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    return f"<tr><td></td>{''.join(f'<th>{_escape(run.name)}</th>' for run in runs)}</tr>"


def _differences(runs: Sequence[Run]) -> str:
    settings = [_flat(run.config) for run in runs]
    keys = sorted({key for setting in settings for key in setting})
    lines = [_table_head(runs)]
    for key in keys:
        values = [str(setting.get(key, NA)) for setting in settings]
        if len(set(values)) > 1:
            lines.append(
                f"<tr><th>{_escape(key)}</th>{''.join(f'<td>{_escape(v)}</td>' for v in values)}</tr>"
            )
    table = f'<div class="scroll"><table>{"".join(lines)}</table></div>'
    return _card("Settings that differ", table if len(lines) > 1 else '<p class="empty">none</p>')


def _details(run: Run, named: bool) -> str:
    import yaml

    suffix = f": {run.name}" if named else ""
    environment = dict(run.environment)
    topology = environment.pop("gpu_topology", None)
    blocks = {"Configuration": run.config, "Environment": environment}
    parts = [
        f"<details class=card><summary>{name}{_escape(suffix)}</summary><pre>"
        f"{_escape(yaml.safe_dump(content, sort_keys=False) if content else 'not recorded')}"
        f"{_escape(str(topology)) if topology and name == 'Environment' else ''}</pre></details>"
        for name, content in blocks.items()
    ]
    return "".join(parts)


def _machine(run: Run, named: bool) -> str:
    facts, env = run.facts, run.environment
    versions = env.get("versions") if isinstance(env.get("versions"), dict) else {}
    commit = str(env.get("git_commit") or "")[:10]
    dirty = " + uncommitted changes" if env.get("git_dirty") else ""
    parts = [
        run.name if named else "",
        f"{format_count(facts.get('world_size'))} x {facts.get('device') or 'device not recorded'}",
        str(env.get("cpu_model") or ""),
        f"torch {versions['torch']}" if versions and "torch" in versions else "",
        f"commit {commit}{dirty}" if commit else "",
        str(env.get("date") or ""),
    ]
    return " \u00b7 ".join(part for part in parts if part)


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


def _escape(text: str) -> str:
    return markup.escape(text)
