"""The only formatter of numbers: the closing table, the progress line and the self-contained HTML page.

Every number is printed with its unit and what it is divided by; what is not known prints as n/a, never as 0.
"""

from __future__ import annotations

import dataclasses
import html as markup
import math
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_dp import record
from launcher import plots
from launcher.environment import redact

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from launcher.environment import Environment, Finding

NA = "n/a"
ETA_LINES = 20  # logged steps over which the remaining time is extrapolated
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # may not reach a terminal, XML or UTF-8
WALL_PARTS = ("setup", "compile", "train", "eval", "save")  # disjoint; the parts of train are below
TRAIN_PARTS = {"data_wait": "data wait", "forward_backward": "forward + backward", "optimizer": "optimizer"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds. `facts` is summary.json or, without one, what the last lines tell."""

    path: Path
    name: str
    finished: bool
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    missing: list[str]


@dataclasses.dataclass(frozen=True)
class Row:
    section: str
    label: str
    value: str
    note: str = ""
    """The denominator or scope of the value."""


def format_si(value: object, unit: str = "") -> str:
    """Three significant digits with k, M, G or T: 45,231 tokens/s -> `45.2 k tokens/s`."""
    number = _number(value)
    if number is None:
        return NA
    rounded = float(f"{number:.3g}")
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(rounded) >= scale:
            return f"{_three(rounded / scale)} {prefix}{' ' if unit else ''}{unit}"
    return f"{_three(rounded)} {unit}".rstrip()


def format_count(value: object) -> str:
    """A whole number with separators."""
    number = _number(value)
    return NA if number is None else f"{number:,.0f}"


def format_gib(value: object) -> str:
    """Memory given in GiB."""
    number = _number(value)
    return NA if number is None else f"{number:.2f} GiB"


def format_percent(fraction: object) -> str:
    """A fraction of 1 as per cent."""
    number = _number(fraction)
    return NA if number is None else f"{100 * number:.1f} %"


def format_nats(value: object) -> str:
    """A loss or an entropy, in nats per predicted token."""
    number = _number(value)
    return NA if number is None else f"{number:.4f} nats"


def format_energy(joules: object) -> str:
    """Joules with a prefix: `21 MJ`."""
    return re.sub(r"(?<=[TGMk]) J$", "J", format_si(joules, "J"))


def format_lr(value: object) -> str:
    """A learning rate."""
    number = _number(value)
    return NA if number is None else f"{number:.2e}"


def format_duration(seconds: object) -> str:
    """`120 ms`, `12.3 s`, `12 min 05 s`, `2 h 05 min`, `3 d 02 h`."""
    s = _number(seconds)
    if s is None:
        return NA
    if s < 0.9995:
        return f"{1000 * s:.0f} ms" if s else "0 s"
    if s < 119.95:
        return f"{s:.1f} s"
    if round(s) < 3600:
        return "{} min {:02d} s".format(*divmod(round(s), 60))
    if round(s / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(s / 60), 60))
    return "{} d {:02d} h".format(*divmod(round(s / 3600), 24))


def progress_line(metrics: Mapping[str, Any], *, eta: float | None = None) -> str:
    """One line of metrics.jsonl for the console; `eta` in seconds."""
    world = format_count(metrics.get("world_size"))
    return " | ".join(
        (
            f"step {format_count(metrics.get('step'))}",
            format_percent(metrics.get("progress")),
            f"loss {format_nats(metrics.get('loss'))}",
            f"lr {format_lr(metrics.get('lr'))}",
            f"{format_si(metrics.get('tokens_per_s'), 'tokens/s')} over {world} ranks",
            f"{format_si(metrics.get('global_steps_per_s'), 'global steps/s')}",
            f"left {format_duration(eta)}",
        )
    )


def eta_s(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds left at the pace of the last lines of metrics.jsonl; None until there are two."""
    recent = [(_number(line.get("elapsed_s")), _number(line.get("progress"))) for line in lines[-ETA_LINES:]]
    known = [(t, f) for t, f in recent if t is not None and f is not None]
    while len(known) > 1 and known[0] >= known[-1]:
        known.pop(0)  # before a resume the clock or the progress stood higher
    if len(known) < 2 or known[-1][1] <= known[0][1]:
        return None
    (start, done), (now, progress) = known[0], known[-1]
    return max(0.0, (1 - progress) * (now - start) / (progress - done))


def load(run_dir: Path) -> Run:
    """Read whatever is there; what is not is named in `missing`."""
    missing = [f"{n} is missing" for n in ("metrics.jsonl", "evals.jsonl", "config.yaml", "environment.json")
               if not (run_dir / n).exists()]  # fmt: skip
    metrics, evals = (_lines(run_dir / name, missing) for name in ("metrics.jsonl", "evals.jsonl"))
    summary = record.read_json(run_dir / "summary.json")
    facts = dict(summary or {})
    if summary is None:
        missing.insert(0, "summary.json is missing or torn: numbers come from the last lines of the logs")
        last = metrics[-1] if metrics else {}
        facts = {
            **last,
            "final_loss": last.get("loss"),
            "heldout_loss": evals[-1].get("loss") if evals else None,
        }
    return Run(
        path=run_dir,
        name=CONTROL.sub("?", run_dir.absolute().name),
        finished=summary is not None,
        facts=facts,
        metrics=metrics,
        evals=evals,
        config=redact(_yaml(run_dir / "config.yaml", missing)),
        environment=redact(record.read_json(run_dir / "environment.json") or {}),
        missing=missing,
    )


def verdict(run: Run) -> tuple[Literal["ok", "warn", "fail"], str]:
    """How the run ended, in one sentence."""
    facts, step = run.facts, f"step {format_count(run.facts.get('step'))}"
    if not run.finished:
        return "warn", f"No end recorded: still running, or killed. Last logged: {step}."
    if facts.get("status") == "failed":
        cause = (str(facts.get("cause") or "cause not recorded").strip().splitlines() or [""])[0]
        return "fail", f"Failed at {step} (exit code {facts.get('exit_code', NA)}): {cause}"
    if facts.get("status") == "stopped":
        return "warn", f"Stopped by {_signal(facts.get('signal'))} at {step}, after a checkpoint."
    loss, entropy = _number(facts.get("heldout_loss")), _number(facts.get("unigram_entropy_nats"))
    tail = "held-out loss not recorded."
    if loss is not None:
        tail = f"held-out loss {format_nats(loss)}"
        if entropy is not None:
            below = loss < entropy
            tail += (
                f", {format_nats(abs(entropy - loss))} {'below' if below else 'above'} the unigram entropy"
            )
            tail += "." if below else ": the model does not use context yet."
    level: Literal["ok", "warn"] = "ok" if facts.get("status") == "done" else "warn"
    return level, f"{str(facts.get('status')).capitalize()} after {step}: {tail}"


def closing_rows(run: Run) -> list[Row]:
    """Every number of the closing table with its denominator."""
    return [*_outcome_rows(run), *_work_rows(run.facts), *_speed_rows(run.facts), *_time_rows(run.facts),
            *_resource_rows(run)]  # fmt: skip


def closing_table(run_dir: Path) -> Group:
    """The closing table of a run as a rich renderable; works on a crashed run too."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run = load(run_dir)
    table = Table(box=None, pad_edge=False, show_header=False)
    for style in ("", "bold", "dim"):
        table.add_column(style=style, no_wrap=style == "", overflow="fold")
    section = ""
    for row in closing_rows(run):
        if row.section != section:
            section = row.section
            table.add_row(Text(section, style="bold"))
        table.add_row(Text(f"  {row.label}"), Text(_safe(row.value)), Text(_safe(row.note)))
    page = run.path / "report.html"
    notes = [Text(_safe(note)) for note in run.missing]
    where = Text(_safe(f"report: {page if page.exists() else NA}"), overflow="fold")
    return Group(Text(_safe(verdict(run)[1]), style="bold"), table, *notes, where)


def findings_table(environment: Environment, findings: Sequence[Finding]) -> Table:
    """What `doctor` found as a rich renderable: the machine, each finding, its consequence and fix."""
    from rich.table import Table
    from rich.text import Text

    gpus = ", ".join(f"{gpu.name} {format_gib(gpu.memory_gib)}" for gpu in environment.gpus) or "no GPU"
    machine = f"{environment.cpu_model}, {environment.usable_cores:g} usable cores, {gpus}"
    table = Table(
        title=Text(_safe(machine)), box=None, title_justify="left", pad_edge=False, show_header=False
    )
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        text = Text(_safe(finding.what))
        if finding.level != "ok":
            text.append(_safe(f"\n  causes: {finding.consequence}\n  fix: {finding.fix}"), style="dim")
        table.add_row(Text(finding.level, style=f"bold {colour}"), text)
    return table


def _outcome_rows(run: Run) -> list[Row]:
    facts, section = run.facts, "Outcome"
    loss, unigram, uniform = (_number(facts.get(k)) for k in
                              ("heldout_loss", "unigram_entropy_nats", "uniform_entropy_nats"))  # fmt: skip
    return [
        Row(section, "status", str(facts.get("status") or NA), f"exit code {facts.get('exit_code', NA)}"),
        Row(section, "cause", str(facts.get("cause") or "none recorded")),
        Row(section, "held-out loss", format_nats(loss), "mean over held-out masked tokens"),
        Row(
            section,
            "unigram entropy",
            format_nats(unigram),
            f"model without context; {_gap(loss, unigram)}",
        ),
        Row(section, "ln V", format_nats(uniform), f"a uniform guess; {_gap(loss, uniform)}"),
        Row(
            section,
            "training loss, last",
            format_nats(facts.get("final_loss")),
            "mean over masked tokens, all ranks",
        ),
    ]


def _work_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, step, skipped = "Work", _number(facts.get("step")), _number(facts.get("skipped_steps"))
    share = format_percent(skipped / step) if step and skipped is not None else NA
    return [
        Row(section, "optimizer steps", format_count(step), f"one step = {_batch_equation(facts)}"),
        Row(section, "samples", format_count(facts.get("samples")), "sequences over all ranks"),
        Row(section, "tokens", format_count(facts.get("tokens")), "over all ranks"),
        Row(
            section, "skipped steps", format_count(skipped), f"{share} of the steps; gradient norm not finite"
        ),
        Row(
            section,
            "parameters",
            format_si(facts.get("parameters")),
            f"precision {facts.get('precision', NA)}",
        ),
    ]


def _speed_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, ranks = "Throughput", _ranks(facts)
    micro = f"{_batch_equation(facts, short=True)} micro batches per optimizer step"
    mfu = _number(facts.get("mfu"))
    return [
        Row(section, "optimizer steps", format_si(facts.get("steps_per_s"), "steps/s"), "of the whole job"),
        Row(section, "global steps", format_si(facts.get("global_steps_per_s"), "global steps/s"), micro),
        Row(section, "samples", format_si(facts.get("samples_per_s"), "samples/s"), f"summed over {ranks}"),
        Row(section, "tokens", format_si(facts.get("tokens_per_s"), "tokens/s"), f"summed over {ranks}"),
        Row(section, "tokens per device", format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"),
            f"tokens/s divided by {ranks}"),
        Row(section, "MFU", format_percent(mfu), "model FLOPs / peak of the device" if mfu is not None
            else "peak of this device unknown"),
    ]  # fmt: skip


def _time_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, times = "Time (rank 0)", _times(facts)
    wall = sum(times[k] for k in WALL_PARTS if k in times) or None
    rows = [Row(section, "wall", format_duration(wall), " + ".join(WALL_PARTS))]
    names = ["setup", "compile", "train", *TRAIN_PARTS, "other", "eval", "save"]
    shares = {**times, **({"other": _other(times)} if "train" in times else {})}
    for name in names:
        seconds = shares.get(name)
        share = format_percent(seconds / wall) if wall and seconds is not None else NA
        inside = name == "other" or name in TRAIN_PARTS
        note = f"{share} of wall{', part of train' if inside else ''}"
        rows.append(Row(section, TRAIN_PARTS.get(name, name), format_duration(seconds), note))
    return rows


def _resource_rows(run: Run) -> list[Row]:
    facts, section = run.facts, "Resources and files"
    energy, tokens = _number(facts.get("energy_j")), _number(facts.get("tokens"))
    per_token = (
        f"{format_energy(energy / tokens * 1e6)} per million tokens" if energy is not None and tokens else NA
    )
    return [
        Row(section, "peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {_ranks(facts)}"),
        Row(section, "energy", format_energy(energy), f"{per_token}, {_ranks(facts)}"),
        Row(section, "checkpoint", str(facts.get("checkpoint") or NA), "in the run directory"),
    ]


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
    return _safe(page)


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
        end = (_number(facts.get("tokens")), _number(facts.get("heldout_loss")))
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
    loss, unigram = _number(facts.get("heldout_loss")), _number(facts.get("unigram_entropy_nats"))
    tiles = [
        ("Held-out loss", format_nats(loss), f"unigram entropy {format_nats(unigram)}"),
        ("Throughput", format_si(facts.get("tokens_per_s"), "tokens/s"), f"summed over {_ranks(facts)}"),
        (f"Per {_unit(facts)}", format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"), _ranks(facts)),
        ("Peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {_ranks(facts)}"),
    ]
    cards = (
        f'<div class="card"><span class="note">{_escape(name)}</span><b>{_escape(value)}</b>'
        f'<span class="note">{_escape(note)}</span></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def _html_table(runs: Sequence[Run]) -> str:
    lines, section, num_columns = [_table_head(runs)], "", len(runs) + 1 + (len(runs) == 1)
    for rows in zip(*(closing_rows(run) for run in runs), strict=True):
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


def _batch_equation(facts: Mapping[str, Any], short: bool = False) -> str:
    sizes = [_number(facts.get(key)) for key in ("global_batch", "micro_batch", "accumulation")]
    whole, micro, accumulation = sizes
    dp = whole / (micro * accumulation) if whole and micro and accumulation else None
    dp = dp if dp is not None and dp.is_integer() else None
    product = f"accumulation {format_count(accumulation)} x dp {format_count(dp)}"
    if short:
        return product
    return f"global batch {format_count(whole)} = micro {format_count(micro)} x {product}"


def _unit(facts: Mapping[str, Any]) -> str:
    return "CPU rank" if str(facts.get("device", "")).lower().startswith("cpu") else "GPU"


def _ranks(facts: Mapping[str, Any]) -> str:
    count = _number(facts.get("world_size"))
    return (
        f"{format_count(count)} {_unit(facts) if facts.get('device') else 'rank'}{'' if count == 1 else 's'}"
    )


def _times(facts: Mapping[str, Any]) -> dict[str, float]:
    times = facts.get("time_s")
    items = times.items() if isinstance(times, dict) else ()
    return {key: number for key, value in items if (number := _number(value)) is not None}


def _other(times: Mapping[str, float]) -> float:
    """Seconds of train outside its named parts; clocks of host and device may overlap by a little."""
    return max(0.0, times.get("train", 0.0) - sum(times.get(part, 0.0) for part in TRAIN_PARTS))


def _split(facts: Mapping[str, Any]) -> dict[str, float]:
    times = _times(facts)
    inner = {name: times.get(key, 0.0) for key, name in TRAIN_PARTS.items()}
    outer = [(part, times.get(part, 0.0)) for part in WALL_PARTS if part != "train"]
    return {**dict(outer[:2]), **inner, "other": _other(times), **dict(outer[2:])}


def _gap(loss: float | None, entropy: float | None) -> str:
    if loss is None or entropy is None:
        return "difference n/a"
    return f"held-out loss is {format_nats(abs(entropy - loss))} {'below' if loss < entropy else 'above'}"


def _signal(number: object) -> str:
    value = _number(number)
    known = {s.value: s.name for s in signal.Signals}
    return known.get(int(value), f"signal {int(value)}") if value is not None else "a signal"


def _levels(runs: Sequence[Run]) -> list[plots.Level]:
    levels = {}
    for key, name in (("unigram_entropy_nats", "unigram entropy"), ("uniform_entropy_nats", "ln V")):
        for run in runs:
            value = _number(run.facts.get(key))
            if value is not None:
                label = f"{name} {value:.2f}"
                levels[label] = plots.Level(label, value)
    return list(levels.values())


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    longest = max(
        (t for run in runs for line in run.metrics if (t := _number(line.get("elapsed_s")))), default=0
    )
    return ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 300 else ("s", 1.0)


def _points(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> list[plots.Point]:
    pairs = ((_number(line.get(x)), _number(line.get(y))) for line in lines)
    return [(a, math.nan if b is None else b) for a, b in pairs if a is not None]


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs whose directories have the same name get numbers."""
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.name} ({i + 1})") if names.count(run.name) > 1 else run
        for i, run in enumerate(runs)
    ]


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    lines = [line for line in record.read_lines(path) if isinstance(line, dict)]
    if path.exists():
        whole = path.read_bytes().count(b"\n")
        if not path.read_bytes().endswith(b"\n") or whole != len(lines):
            missing.append(f"{path.name} is torn or empty: {len(lines)} whole lines read")
    return lines


def _yaml(path: Path, missing: list[str]) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        data = None
    if not isinstance(data, dict):
        missing.append(f"{path.name} is not a YAML mapping")
        return {}
    return {str(key): value for key, value in data.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(_flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value})
    return flat


def _number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _three(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text


def _safe(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def _escape(text: str) -> str:
    return markup.escape(text)
