"""A run, or several beside each other, as a Report: how each ended, and every number with its denominator."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.report.model import (
    Axis,
    Bars,
    Cell,
    Column,
    Figure,
    Level,
    Line,
    Report,
    Row,
    Rule,
    Section,
    Style,
    Table,
    Tile,
    Verdict,
)
from launcher.report.numbers import (
    NA,
    count_of,
    format_count,
    format_duration,
    format_energy,
    format_gib,
    format_nats,
    format_percent,
    format_ratio,
    format_si,
    number,
)
from launcher.report.parts import (
    cell,
    environment_text,
    first_line,
    machine_line,
    record_text,
    series,
    words,
)
from launcher.runs import TRAIN_PARTS, WALL_PARTS, Run, load, other, times

PAGE = "report.html"
PROGRESS = "progress (share of the budget)"
OUTCOME, WORK, RATES, TIME, FILES = "Outcome", "Work", "Throughput", "Time (rank 0)", "Resources and files"


def of_directories(run_dirs: Sequence[Path]) -> Report:
    """The report of what one run directory holds, or several. Raises no error on a crashed or torn one."""
    return run_report(_distinct([load(run_dir) for run_dir in run_dirs]))


def run_report(runs: Sequence[Run]) -> Report:
    """Of one run, or a comparison of several."""
    many = len(runs) > 1
    title = f"bert-dp: {len(runs)} runs compared" if many else f"{runs[0].name}: bert-dp run"
    return Report(
        title,
        [_machine(run, many) for run in runs],
        [_verdict(run, many) for run in runs],
        [] if many else _tiles(runs[0].facts),
        [
            Section("", [_loss(runs), *_over_time(runs)], console=False),
            Section("", [_time_split(runs)], console=False),
            Section("Numbers", tables=[_numbers(runs)]),
            *([Section("Settings that differ", tables=[_differences(runs)])] if many else []),
            *[section for run in runs for section in _records(run, many)],
        ],
    )


def _machine(run: Run, many: bool) -> str:
    count = format_count(run.facts.get("world_size"))
    devices = f"{count} x {run.facts.get('device') or 'device not recorded'}"
    return machine_line(run.environment, *([run.name] if many else []), devices)


def _verdict(run: Run, many: bool) -> Verdict:
    level, text = _end(run)
    return Verdict(level, text, run.missing, run.name if many else "")


def _end(run: Run) -> tuple[Level, str]:
    """How the run ended, in one sentence."""
    facts, step = run.facts, f"step {format_count(run.facts.get('step'))}"
    if not run.finished:
        return "warn", f"No end recorded: still running, or killed. Last logged: {step}."
    if facts.get("status") == "failed":
        cause = first_line(facts.get("cause"))
        return "fail", f"Failed at {step} (exit code {facts.get('exit_code', NA)}): {cause}"
    if facts.get("status") == "stopped":
        saved = " after a checkpoint" if facts.get("checkpoint") else ""
        return "warn", f"Stopped by {_signal(facts.get('signal'))}{saved} at {step}."
    loss, entropy = number(facts.get("heldout_loss")), number(facts.get("unigram_entropy_nats"))
    result = "held-out loss not recorded."
    if loss is not None and entropy is not None:
        result = f"held-out loss {format_nats(loss)}, {_gap(loss, entropy)} the unigram entropy"
        result += "." if loss < entropy else ": the model does not use context yet."
    elif loss is not None:
        result = f"held-out loss {format_nats(loss)}."
    level: Level = "ok" if facts.get("status") == "done" else "warn"
    return level, f"{str(facts.get('status')).capitalize()} after {step}: {result}"


def _tiles(facts: Mapping[str, Any]) -> list[Tile]:
    entropy = format_nats(facts.get("unigram_entropy_nats"))
    return [
        Tile("Held-out loss", format_nats(facts.get("heldout_loss")), f"unigram entropy {entropy}"),
        Tile("Throughput", format_si(facts.get("tokens_per_s"), "tokens/s"), f"summed over {_ranks(facts)}"),
        Tile(
            f"Per {_device(facts)}", format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"), _ranks(facts)
        ),
        Tile("Peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {_ranks(facts)}"),
    ]


# --- figures


def _loss(runs: Sequence[Run]) -> Figure:
    lines = []
    for i, run in enumerate(runs):
        prefix, facts = (f"{run.name}: " if len(runs) > 1 else ""), run.facts
        heldout = [(line.get("tokens"), line.get("loss")) for line in run.evals]
        heldout = heldout or [(facts.get("tokens"), facts.get("heldout_loss"))]
        training = [(line.get("tokens"), line.get("loss")) for line in run.metrics]
        lines.append(Line(f"{prefix}training", *series(training), i))
        style: Style = "both" if len(runs) == 1 else "dashed"
        lines.append(Line(f"{prefix}held-out", *series(heldout), i if len(runs) > 1 else 1, style))
    rules = {}
    for key, name in (("unigram_entropy_nats", "unigram entropy"), ("uniform_entropy_nats", "ln V")):
        for run in runs:
            if (value := number(run.facts.get(key))) is not None:
                label = f"{name} {format_ratio(value)}"
                rules[label] = Rule(label, value)
    x, y = Axis("tokens"), Axis("loss (nats per masked token)", "nats")
    return Figure("Loss", lines, x, y, levels=list(rules.values()), switch=True)


def _over_time(runs: Sequence[Run]) -> list[Figure]:
    elapsed = [s for run in runs for line in run.metrics if (s := number(line.get("elapsed_s"))) is not None]
    longest = max(elapsed, default=0.0)
    unit, seconds = ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 300 else ("s", 1.0)
    kinds = [
        ("Throughput", "tokens_per_s", "tokens/s, summed over all ranks", "elapsed_s", f"elapsed ({unit})"),
        ("Learning rate", "lr", "learning rate", "progress", PROGRESS),
        ("Global batch", "global_batch", "sequences per optimizer step", "progress", PROGRESS),
    ]
    figures = []
    for title, y, y_label, x, x_label in kinds:
        lines = []
        for i, run in enumerate(runs):
            xs, ys = series([(line.get(x), line.get(y)) for line in run.metrics])
            divide = seconds if x == "elapsed_s" else 1.0
            lines.append(Line(run.name, [value / divide for value in xs], ys, i))
        x_axis = Axis(x_label, "percent" if x == "progress" else "si")
        y_axis = Axis(y_label, "lr" if y == "lr" else "si", from_zero=True)
        figures.append(Figure(title, lines, x_axis, y_axis))
    return figures


def _time_split(runs: Sequence[Run]) -> Figure:
    """A row of 100 % for each run."""
    splits = [_split(run.facts) for run in runs]
    walls = [sum(split.values()) for split in splits]
    names = ("wall of rank 0",) if len(runs) == 1 else [f"{run.name}, wall" for run in runs]
    rows = [
        f"{name}: {format_duration(wall) if wall else 'not recorded'}"
        for name, wall in zip(names, walls, strict=True)
    ]
    bars = []
    for part in dict.fromkeys(part for split in splits for part in split):
        seconds = [split.get(part, 0.0) for split in splits]
        shares = [s / wall if wall else 0.0 for s, wall in zip(seconds, walls, strict=True)]
        texts = [
            f"{format_duration(s)}, {format_percent(share)}" for s, share in zip(seconds, shares, strict=True)
        ]
        bars.append(Bars(part, shares, texts))
    return Figure("Where the time went", bars, Axis("share of the wall time", "percent"), Axis(""), rows)


def _split(facts: Mapping[str, Any]) -> dict[str, float]:
    parts = times(facts)
    inner = {name: parts.get(key, 0.0) for key, name in TRAIN_PARTS.items()}
    outer = [(part, parts.get(part, 0.0)) for part in WALL_PARTS if part != "train"]
    return {**dict(outer[:2]), **inner, "other": other(parts), **dict(outer[2:])}


# --- numbers


def _numbers(runs: Sequence[Run]) -> Table:
    """A column for each run. Rows are joined by their labels: a failed run has some that others lack."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    rows_of = [_rows(run) for run in runs]
    for i in sorted(range(len(runs)), key=lambda i: -len(rows_of[i])):
        for row in rows_of[i]:
            found.setdefault((row.topic, row.label), {})[i] = row
    order = {topic: i for i, topic in enumerate((OUTCOME, WORK, RATES, TIME, FILES))}
    rows = []
    for (topic, label), members in sorted(found.items(), key=lambda item: order[item[0][0]]):
        cells = [members[i].cells[0] if i in members else Cell("") for i in range(len(runs))]
        rows.append(Row(label, cells, topic, any(row.console for row in members.values())))
    return Table(rows, [Column(run.name) for run in runs] if len(runs) > 1 else ())


def _rows(run: Run) -> list[Row]:
    facts = run.facts
    return [
        *_outcome(facts),
        *_work(facts),
        *_rates(facts),
        *_times(facts),
        *_files(run),
    ]


def _outcome(facts: Mapping[str, Any]) -> list[Row]:
    loss, unigram, uniform = (
        number(facts.get(key)) for key in ("heldout_loss", "unigram_entropy_nats", "uniform_entropy_nats")
    )
    failed = facts.get("status") == "failed"
    code = f"exit code {facts.get('exit_code', NA)}"
    rows = [
        words("status", facts.get("status"), code, console=False),
        words("cause", (facts.get("cause") if failed else "") or "none recorded", console=False),
        *(_failure(facts) if failed else []),
        Row("held-out loss", (cell(loss, "nats", "mean over held-out masked tokens"),)),
        Row(
            "unigram entropy",
            (cell(unigram, "nats", f"no context; held-out loss is {_gap(loss, unigram)}"),),
        ),
        Row("ln V", (cell(uniform, "nats", f"uniform guess; held-out loss is {_gap(loss, uniform)}"),)),
        Row("training loss, last", (cell(facts.get("final_loss"), "nats", "mean over all ranks"),)),
    ]
    return [dataclasses.replace(row, topic=OUTCOME) for row in rows]


def _failure(facts: Mapping[str, Any]) -> list[Row]:
    """Of a failed run: where, why and what to do, and what followed."""
    place = " ".join(str(facts[key]) for key in ("where", "source") if facts.get(key))
    lists = {
        "at": [place],
        "why": facts.get("explanation"),
        "fix": facts.get("fix"),
        "consequence": facts.get("consequences"),
        "log": [facts.get("log")],
    }
    rows = []
    for label, lines in lists.items():
        text = "\n".join(str(line) for line in lines if line) if isinstance(lines, list) else ""
        rows += [words(label, text, console=False)] if text else []
    return rows


def _work(facts: Mapping[str, Any]) -> list[Row]:
    step, skipped, spikes = (number(facts.get(key)) for key in ("step", "skipped_steps", "loss_spikes"))
    compiled = {"True": "compiled", "False": "eager"}.get(str(facts.get("compiled")))
    lost = f"{_share(skipped, step)} of the steps; gradient norm not finite"
    far = "logged losses far above the ones before"
    precision = ", ".join(filter(None, [f"precision {facts.get('precision') or NA}", compiled]))
    rows = [
        Row("optimizer steps", (cell(step, "count", f"one step = {_batch_equation(facts)}"),)),
        Row("samples", (cell(facts.get("samples"), "count", "sequences over all ranks"),), console=False),
        Row("tokens", (cell(facts.get("tokens"), "count", "over all ranks"),)),
        Row("skipped steps", (cell(skipped, "count", lost),), console=bool(skipped)),
        *([Row("loss spikes", (cell(spikes, "count", far),))] if spikes else []),
        words("parameters", format_si(facts.get("parameters")), precision),
    ]
    return [dataclasses.replace(row, topic=WORK) for row in rows]


def _rates(facts: Mapping[str, Any]) -> list[Row]:
    over, mfu = f"summed over {_ranks(facts)}", number(facts.get("mfu"))
    micro = f"{_batch_equation(facts, short=True)} micro batches per optimizer step"

    def rate(label: str, key: str, unit: str, note: str, *, console: bool = True) -> Row:
        value = number(facts.get(key))
        return Row(label, (Cell(format_si(value, unit), note, value),), console=console)

    rows = [
        rate("optimizer steps", "steps_per_s", "steps/s", "of the whole job"),
        rate("global steps", "global_steps_per_s", "global steps/s", micro),
        rate("samples", "samples_per_s", "samples/s", over, console=False),
        rate("tokens", "tokens_per_s", "tokens/s", over),
        rate("tokens per device", "tokens_per_s_per_gpu", "tokens/s", f"tokens/s divided by {_ranks(facts)}"),
        *_straggler(facts),
        Row(
            "MFU",
            (cell(mfu, "percent", f"model FLOPs / peak of the device{' unknown' if mfu is None else ''}"),),
        ),
    ]
    return [dataclasses.replace(row, topic=RATES) for row in rows]


def _straggler(facts: Mapping[str, Any]) -> list[Row]:
    """The ratio, and the rank that the others wait for where there is one."""
    ratio = cell(
        number(facts.get("straggler_ratio")),
        "ratio",
        "own work of the slowest rank / median of the others, before any gradient reduction",
    )
    rows = [Row("straggler ratio", (ratio,), console=False)]
    named = facts.get("straggler")
    if isinstance(named, Mapping):
        rank, times_, lost = (number(named.get(key)) for key in ("rank", "ratio", "seconds_per_step"))
        if rank is not None and times_ is not None:
            note = (
                f"own work {format_ratio(times_)} x the others' median, {format_duration(lost)} lost per step"
            )
            rows.append(words("straggler", f"rank {format_count(rank)}", note))
    return rows


def _times(facts: Mapping[str, Any]) -> list[Row]:
    """The wall time, and each of its parts: those of training on the console too."""
    parts = times(facts)
    wall = sum(parts[part] for part in WALL_PARTS if part in parts) or None
    named = ", ".join(f"{part} {format_duration(parts.get(part))}" for part in WALL_PARTS)
    rows = [Row("wall", (Cell(format_duration(wall), named, wall),), TIME)]
    inner = {**{name: parts.get(key) for key, name in TRAIN_PARTS.items()}, "other": other(parts)}
    outer = {part: parts.get(part) for part in WALL_PARTS}
    for name, seconds in [*outer.items(), *(inner.items() if parts else ())]:
        inside = name in inner
        note = f"{_share(seconds, wall)} of wall{', part of train' if inside else ''}"
        rows.append(Row(name, (Cell(format_duration(seconds), note, seconds),), TIME, inside))
    return rows


def _files(run: Run) -> list[Row]:
    facts, page = run.facts, run.path / PAGE
    energy, tokens = number(facts.get("energy_j")), number(facts.get("tokens"))
    each = format_energy(energy / tokens * 1e6) if energy is not None and tokens else NA
    saves = number(facts.get("failed_saves"))
    rows = [
        Row("peak memory", (cell(facts.get("peak_memory_gib"), "gib", f"greatest of {_ranks(facts)}"),)),
        Row(
            "energy",
            (cell(energy, "energy", f"{each} per million tokens, {_ranks(facts)}"),),
            console=energy is not None,
        ),
        words("checkpoint", facts.get("checkpoint")),
        *([Row("failed saves", (cell(saves, "count", "see the log"),))] if saves else []),
        *([words("report", _shortest(page))] if page.exists() else []),
    ]
    return [dataclasses.replace(row, topic=FILES) for row in rows]


def _differences(runs: Sequence[Run]) -> Table:
    """The settings by their paths, as far as the runs differ in them."""
    settings = [_flat(run.config) for run in runs]
    rows = []
    for key in sorted({key for setting in settings for key in setting}):
        values = [str(setting.get(key, NA)) for setting in settings]
        if len(set(values)) > 1:
            rows.append(Row(key, [Cell(value) for value in values]))
    return Table(rows, [Column(run.name, text=True) for run in runs])


def _records(run: Run, many: bool) -> list[Section]:
    suffix = f": {run.name}" if many else ""
    texts = {"Configuration": record_text(run.config), "Environment": environment_text(run.environment)}
    return [
        Section(f"{title}{suffix}", text=text, folded=True, console=False) for title, text in texts.items()
    ]


# --- words


def _batch_equation(facts: Mapping[str, Any], *, short: bool = False) -> str:
    sizes = [number(facts.get(key)) for key in ("global_batch", "micro_batch", "accumulation")]
    whole, micro, accumulation = sizes
    dp = whole / (micro * accumulation) if whole and micro and accumulation else None
    dp = dp if dp is not None and dp.is_integer() else None
    product = f"accumulation {format_count(accumulation)} x dp {format_count(dp)}"
    return (
        product if short else f"global batch {format_count(whole)} = micro {format_count(micro)} x {product}"
    )


def _device(facts: Mapping[str, Any]) -> str:
    return "CPU rank" if str(facts.get("device", "")).lower().startswith("cpu") else "GPU"


def _ranks(facts: Mapping[str, Any]) -> str:
    return count_of(facts.get("world_size"), _device(facts) if facts.get("device") else "rank")


def _gap(loss: float | None, entropy: float | None) -> str:
    """From a loss to an entropy."""
    if loss is None or entropy is None:
        return NA
    return f"{format_nats(abs(entropy - loss))} {'below' if loss < entropy else 'above'}"


def _share(part: float | None, whole: float | None) -> str:
    return format_percent(part / whole) if whole and part is not None else NA


def _signal(recorded: object) -> str:
    value = number(recorded)
    names = {s.value: s.name for s in signal.Signals}
    return names.get(int(value), f"signal {format_count(value)}") if value is not None else "a signal"


def _shortest(path: Path) -> str:
    """`path` from here, when it lies below."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative


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
