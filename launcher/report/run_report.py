"""A run, or several beside each other, as a Report: how each ended, and every number with its denominator."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.record.models import HeldOut, ProfileFile, Summary
from launcher.report import heldout
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
    Unit,
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
    folded,
    machine_line,
    record_text,
    series,
    value,
    words,
)
from launcher.report.run_files import TRAIN_PARTS, WALL_PARTS, Run, load, other

PAGE = "report.html"
NAMED_OPERATORS = 3
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
        [*(_verdict(run, many) for run in runs), *_apart(runs)],
        [] if many else _tiles(runs[0].facts),
        [
            Section("", [_loss(runs), *_over_time(runs)], console=False),
            Section("", [_time_split(runs)], console=False),
            Section("Numbers", tables=[_numbers(runs)]),
            *([Section("Settings that differ", tables=[_differences(runs)])] if many else []),
            *[section for run in runs for section in _profiles(run, many)],
            *[section for run in runs for section in _records(run, many)],
        ],
        next="" if many else _next(runs[0]),
    )


def _next(run: Run) -> str:
    """What can be done with the run: use the model that it has trained, or go on with it."""
    path = str(run.path)
    if run.finished and run.facts.status == "done":
        load = f"import bert_dp; model, tokenizer = bert_dp.load({json.dumps(path)})"
        return f"python -ic {shlex.quote(load)}"
    return f"bert-dp train --run-dir {shlex.quote(path)}" if run.facts.checkpoint else ""


def _machine(run: Run, many: bool) -> str:
    count = format_count(run.facts.world_size)
    devices = f"{count} x {run.facts.device or 'device not recorded'}"
    return machine_line(run.environment, *([run.name] if many else []), devices)


def _verdict(run: Run, many: bool) -> Verdict:
    level, text = _end(run)
    return Verdict(level, text, run.missing, run.name if many else "")


def _end(run: Run) -> tuple[Level, str]:
    """How the run ended, in one sentence."""
    facts, step = run.facts, f"step {format_count(run.facts.step)}"
    if not run.finished:
        return "warn", f"No end recorded: still running, or killed. Last logged: {step}."
    if facts.status == "failed":
        cause = first_line(facts.cause)
        return "fail", f"Failed at {step} (exit code {facts.exit_code}): {cause}"
    if facts.status == "stopped":
        saved = " after a checkpoint" if facts.checkpoint else ""
        return "warn", f"Stopped by {_signal(facts.signal)}{saved} at {step}."
    loss, entropy = facts.heldout_loss, facts.unigram_entropy_nats
    result = "held-out loss not recorded."
    if loss is not None:
        result = f"held-out loss {heldout.loss_text(loss, facts.heldout)}"
        result += f" (a context-free model: {format_nats(entropy)})" if entropy is not None else ""
        useless = entropy is not None and loss >= entropy
        result += ": no better than word frequencies; train longer." if useless else "."
        if (scores := heldout.scores_text(facts.heldout)) is not None:
            result = f"{scores} on {heldout.basis(facts.heldout)}."
    level: Level = "ok" if facts.status == "done" else "warn"
    return level, f"{facts.status.capitalize()} after {step}: {result}"


def _apart(runs: Sequence[Run]) -> list[Verdict]:
    """A warning where the held-out losses of runs are nearer to each other than either is known."""
    measured = sorted(
        ((run.facts.heldout_loss, run.facts.heldout) for run in runs if run.facts.heldout_loss is not None),
        key=lambda pair: pair[0],
    )
    small = [heldout.too_small(a, y - x) for (x, a), (y, _) in itertools.pairwise(measured)]
    return [Verdict("warn", text) for text in small[:1] if text]


def _tiles(facts: Summary) -> list[Tile]:
    entropy = format_nats(facts.unigram_entropy_nats)
    return [
        Tile(
            "Held-out loss",
            heldout.loss_text(facts.heldout_loss, facts.heldout),
            f"{heldout.basis(facts.heldout)}; unigram entropy {entropy}",
        ),
        Tile("Throughput", format_si(facts.tokens_per_s, "tokens/s"), f"summed over {_ranks(facts)}"),
        Tile(f"Per {_device(facts)}", format_si(facts.tokens_per_s_per_gpu, "tokens/s"), _ranks(facts)),
        Tile("Peak memory", format_gib(facts.peak_memory_gib), f"greatest of {_ranks(facts)}"),
    ]


# --- figures


def _loss(runs: Sequence[Run]) -> Figure:
    lines = []
    for i, run in enumerate(runs):
        prefix, facts = (f"{run.name}: " if len(runs) > 1 else ""), run.facts
        evals = [(line.get("tokens"), line.get("loss")) for line in run.evals]
        evals = evals or [(facts.tokens, facts.heldout_loss)]
        training = [(line.get("tokens"), line.get("loss")) for line in run.metrics]
        lines.append(Line(f"{prefix}training", *series(training), i))
        style: Style = "both" if len(runs) == 1 else "dashed"
        lines.append(Line(f"{prefix}held-out", *series(evals), i if len(runs) > 1 else 1, style))
    rules = {}
    for run in runs:
        entropies = {
            "unigram entropy": run.facts.unigram_entropy_nats,
            "ln V": run.facts.uniform_entropy_nats,
        }
        for name, nats in entropies.items():
            if nats is not None:
                label = f"{name} {format_ratio(nats)}"
                rules[label] = Rule(label, nats)
    what, unit = ("example", _unit(runs[0].facts.heldout)) if _scored(runs) else ("masked token", "nats")
    label = f"loss ({'nats' if unit == 'nats' else 'squared error'} per {what})"
    x, y = Axis("tokens"), Axis(label, unit)
    return Figure("Loss", lines, x, y, levels=list(rules.values()), switch=True)


def _scored(runs: Sequence[Run]) -> bool:
    """Whether these are finetuning runs."""
    first = runs[0].facts.heldout
    return first is not None and first.examples is not None


def _over_time(runs: Sequence[Run]) -> list[Figure]:
    elapsed = [s for run in runs for line in run.metrics if (s := number(line.get("elapsed_s"))) is not None]
    longest = max(elapsed, default=0.0)
    unit, seconds = ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 300 else ("s", 1.0)
    kinds = [
        ("Throughput", "tokens_per_s", "tokens/s, summed over all ranks", "elapsed_s", f"elapsed ({unit})"),
        ("Learning rate", "lr", "learning rate", "tokens", "tokens"),
        ("Global batch", "global_batch", "sequences per optimizer step", "tokens", "tokens"),
    ]
    figures = []
    for title, y, y_label, x, x_label in kinds:
        lines = []
        for i, run in enumerate(runs):
            xs, ys = series([(line.get(x), line.get(y)) for line in run.metrics])
            divide = seconds if x == "elapsed_s" else 1.0
            lines.append(Line(run.name, [at / divide for at in xs], ys, i))
        y_axis = Axis(y_label, "lr" if y == "lr" else "si", from_zero=True)
        figures.append(Figure(title, lines, Axis(x_label), y_axis))
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


def _split(facts: Summary) -> dict[str, float]:
    parts = facts.time_s
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
    topics = {
        OUTCOME: _outcome(run.facts),
        WORK: _work(run.facts),
        RATES: [*_rates(run.facts), *map(_profiled, run.profiles)],
        TIME: _times(run.facts),
        FILES: _files(run.facts),
    }
    return [dataclasses.replace(row, topic=topic) for topic, rows in topics.items() for row in rows]


def _outcome(facts: Summary) -> list[Row]:
    loss = facts.heldout_loss
    failed = facts.status == "failed"
    measured = facts.heldout
    interval = "; ± 95 % over sequences" if heldout.half_width(measured) is not None else ""
    note = f"mean over {heldout.basis(measured)}{interval}"
    return [
        words("status", facts.status, f"exit code {facts.exit_code}", console=False),
        words("cause", (facts.cause if failed else "") or "none recorded", console=False),
        *(_failure(facts) if failed else []),
        Row("held-out loss", (Cell(heldout.loss_text(loss, measured), note, loss),)),
        *_accuracy(measured),
        *_scores(measured),
        *_references(facts),
        value("training loss, last", facts.final_loss, _unit(measured), "mean over all ranks"),
    ]


def _references(facts: Summary) -> list[Row]:
    """What the loss of a language model is compared with; a finetuned one has none."""
    if facts.heldout is not None and facts.heldout.examples is not None:
        return []
    loss, unigram, uniform = facts.heldout_loss, facts.unigram_entropy_nats, facts.uniform_entropy_nats
    return [
        value("unigram entropy", unigram, "nats", f"no context; held-out loss is {_gap(loss, unigram)}"),
        value("ln V", uniform, "nats", f"uniform guess; held-out loss is {_gap(loss, uniform)}"),
    ]


def _unit(measured: HeldOut | None) -> Unit:
    """In which losses are formatted."""
    return "nats" if measured is None or measured.loss_unit == "nats" else "ratio"


def _scores(measured: HeldOut | None) -> list[Row]:
    if measured is None:
        return []
    note = f"split and metric; {heldout.basis(measured)} in all"
    return [value(name, score, "decimals", note) for name, score in (measured.scores or {}).items()]


def _accuracy(measured: HeldOut | None) -> list[Row]:
    if measured is None or measured.masked_accuracy is None:
        return []
    note = "of the same masked tokens, the greatest logit is right"
    return [value("masked accuracy", measured.masked_accuracy, "percent", note, console=False)]


def _failure(facts: Summary) -> list[Row]:
    """Of a failed run: where, why and what to do, and what followed."""
    lists: dict[str, Sequence[str | None]] = {
        "at": [" ".join(filter(None, [facts.where, facts.source]))],
        "why": facts.explanation,
        "fix": facts.fix,
        "consequence": facts.consequences,
        "log": [facts.log],
    }
    texts = {label: "\n".join(filter(None, lines)) for label, lines in lists.items()}
    return [words(label, text, console=False) for label, text in texts.items() if text]


def _work(facts: Summary) -> list[Row]:
    lost = f"{_share(facts.skipped_steps, facts.step)} of the steps; gradient norm not finite"
    compiled = None if facts.compiled is None else "compiled" if facts.compiled else "eager"
    precision = ", ".join(filter(None, [f"precision {facts.precision or NA}", compiled]))
    rows = [
        value("optimizer steps", facts.step, "count", f"one step = {_batch_equation(facts)}"),
        value("samples", facts.samples, "count", "sequences over all ranks", console=False),
        value("tokens", facts.tokens, "count", "over all ranks"),
        value("skipped steps", facts.skipped_steps, "count", lost, console=bool(facts.skipped_steps)),
    ]
    if facts.loss_spikes:
        far = "logged losses far above the ones before"
        rows.append(value("loss spikes", facts.loss_spikes, "count", far))
    return [*rows, value("parameters", facts.parameters, "si", precision)]


def _rates(facts: Summary) -> list[Row]:
    over = f"summed over {_ranks(facts)}"
    micro = f"{_product(facts)} micro batches per optimizer step"
    of = " ".join(filter(None, [facts.precision, "peak of the device"]))
    peak = of if facts.mfu is not None else f"{of} unknown"
    profiled = f"; {_steps(facts.profiled_steps)} under the profiler" if facts.profiled_steps else ""
    rates = [
        ("optimizer steps", facts.steps_per_s, "steps/s", f"of the whole job{profiled}"),
        ("global steps", facts.global_steps_per_s, "global steps/s", micro),
        ("samples", facts.samples_per_s, "samples/s", over),
        ("tokens", facts.tokens_per_s, "tokens/s", over),
        ("tokens per device", facts.tokens_per_s_per_gpu, "tokens/s", f"tokens/s divided by {_ranks(facts)}"),
    ]
    return [
        *[
            Row(label, (Cell(format_si(rate, unit), note, rate),), console=label != "samples")
            for label, rate, unit, note in rates
        ],
        *_straggler(facts),
        value("MFU", facts.mfu, "percent", f"model FLOPs / {peak}"),
    ]


def _straggler(facts: Summary) -> list[Row]:
    """The ratio, and the rank that the others wait for where there is one."""
    what = "own work of the slowest rank / median of the others, before any gradient reduction"
    rows = [value("straggler ratio", facts.straggler_ratio, "ratio", what, console=False)]
    if (slow := facts.straggler) is not None:
        lost = f"{format_duration(slow.seconds_per_step)} lost per step"
        note = f"own work {format_ratio(slow.ratio)} x the others' median, {lost}"
        rows.append(words("straggler", f"rank {format_count(slow.rank)}", note))
    return rows


def _times(facts: Summary) -> list[Row]:
    """The wall time, and each of its parts: those of training on the console too."""
    parts = facts.time_s
    wall = sum(parts[part] for part in WALL_PARTS if part in parts) or None
    named = ", ".join(f"{part} {format_duration(parts.get(part))}" for part in WALL_PARTS)
    rows = [value("wall", wall, "duration", named)]
    inner = {name: parts.get(key) for key, name in TRAIN_PARTS.items()} | {"other": other(parts)}
    outer = {part: parts.get(part) for part in WALL_PARTS}
    for name, seconds in [*outer.items(), *(inner.items() if parts else ())]:
        inside = name in inner
        note = f"{_share(seconds, wall)} of wall{', part of train' if inside else ''}"
        rows.append(value(name, seconds, "duration", note, console=inside))
    return rows


def _files(facts: Summary) -> list[Row]:
    each = format_energy(facts.energy_j / facts.tokens * 1e6 if facts.energy_j and facts.tokens else None)
    energy = f"{each} per million tokens, {_ranks(facts)}"
    saves = [value("failed saves", facts.failed_saves, "count", "see the log")]
    return [
        value("peak memory", facts.peak_memory_gib, "gib", f"greatest of {_ranks(facts)}"),
        value("energy", facts.energy_j, "energy", energy, console=facts.energy_j is not None),
        words("checkpoint", facts.checkpoint),
        *(saves if facts.failed_saves else []),
    ]


def _differences(runs: Sequence[Run]) -> Table:
    """The settings by their paths, as far as the runs differ in them."""
    settings = [_flat(run.config) for run in runs]
    rows = []
    for key in sorted({key for setting in settings for key in setting}):
        values = [str(setting.get(key, NA)) for setting in settings]
        if len(set(values)) > 1:
            rows.append(Row(key, [Cell(text) for text in values]))
    return Table(rows, [Column(run.name, text=True) for run in runs])


def _profiled(profile: ProfileFile) -> Row:
    """What torch.profiler recorded of a rank, in a line."""
    what = "the GPU ran nothing" if profile.device == "cuda" else "it was in no operator or collective"
    most = ", ".join(
        f"{format_percent(each.self_s / profile.wall_s)} in {each.name}"
        for each in profile.operators[:NAMED_OPERATORS]
    )
    return words(
        f"profile of rank {format_count(profile.rank)}",
        f"{_steps(profile.steps)}, idle {format_percent(profile.idle_share)}",
        f"share of {format_duration(profile.wall_s)} in which {what}; {most}",
    )


def _profiles(run: Run, many: bool) -> list[Section]:
    """The operators of each profiled rank."""
    suffix = f": {run.name}" if many else ""
    sections = []
    for profile in run.profiles:
        title = f"Profile of rank {format_count(profile.rank)}, {_steps(profile.steps)}{suffix}"
        trace = run.path / "profile" / profile.trace
        note = f"{trace} opens in ui.perfetto.dev or chrome://tracing"
        sections.append(Section(title, tables=[_operators(profile)], notes=[note], console=False))
    return sections


def _operators(profile: ProfileFile) -> Table:
    shown = [
        Row(
            each.name,
            [
                cell(each.calls, "count"),
                cell(each.self_s, "duration"),
                cell(each.self_s / profile.wall_s, "percent"),
            ],
        )
        for each in profile.operators
    ]
    heads = ("calls", "own time", f"of {format_duration(profile.wall_s)}")
    return Table(shown, [Column(head) for head in heads], corner="operator")


def _records(run: Run, many: bool) -> list[Section]:
    suffix = f": {run.name}" if many else ""
    texts = {"Configuration": record_text(run.config), "Environment": environment_text(run.environment)}
    return [folded(f"{title}{suffix}", text) for title, text in texts.items()]


# --- words


def _steps(ends: Sequence[int]) -> str:
    first, last = (format_count(end) for end in ends)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _batch_equation(facts: Summary) -> str:
    sizes = f"global batch {format_count(facts.global_batch)} = micro {format_count(facts.micro_batch)}"
    return f"{sizes} x {_product(facts)}"


def _product(facts: Summary) -> str:
    """Micro batches of a step."""
    whole, micro, accumulation = facts.global_batch, facts.micro_batch, facts.accumulation
    dp = whole / (micro * accumulation) if whole and micro and accumulation else None
    whole_dp = dp if dp is not None and dp.is_integer() else None
    return f"accumulation {format_count(accumulation)} x dp {format_count(whole_dp)}"


def _device(facts: Summary) -> str:
    return "CPU rank" if str(facts.device).lower().startswith("cpu") else "GPU"


def _ranks(facts: Summary) -> str:
    return count_of(facts.world_size, _device(facts) if facts.device else "rank")


def _gap(loss: float | None, entropy: float | None) -> str:
    """From a loss to an entropy."""
    if loss is None or entropy is None:
        return NA
    return f"{format_nats(abs(entropy - loss))} {'below' if loss < entropy else 'above'}"


def _share(part: float | None, whole: float | None) -> str:
    return format_percent(part / whole) if whole and part is not None else NA


def _signal(number: int | None) -> str:
    names = {s.value: s.name for s in signal.Signals}
    return "a signal" if number is None else names.get(number, f"signal {number}")


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs whose directories have the same name get numbers."""
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.name} ({i + 1})") if names.count(run.name) > 1 else run
        for i, run in enumerate(runs)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, child in tree.items():
        path = f"{prefix}{key}"
        flat.update(_flat(child, f"{path}.") if isinstance(child, Mapping) else {path: child})
    return flat
