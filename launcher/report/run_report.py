"""A run, or several beside each other, as a Report: how each ended, and every number with its denominator."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import flat
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
    format_gib,
    format_nats,
    format_percent,
    format_ratio,
    format_si,
    number,
    unit_of,
)
from launcher.report.parts import (
    environment_text,
    first_line,
    folded,
    machine_line,
    record_text,
    series,
    value,
    words,
)
from launcher.report.quantities import Computed, Quantity, table
from launcher.report.run_files import TRAIN_PARTS, WALL_PARTS, Run, load, other

PAGE = "report.html"
NAMED_OPERATORS = 3
SPLIT = {
    name: text
    for part in WALL_PARTS
    for name, text in ({**TRAIN_PARTS, "other": "other"} if part == "train" else {part: part}).items()
}
"""Parts of the wall time in their order, with those of training in its place."""


def of_directories(run_dirs: Sequence[Path]) -> Report:
    """The report of what one run directory holds, or several. Raises no error on a crashed or torn one."""
    runs = _distinct([load(run_dir) for run_dir in run_dirs])
    many = len(runs) > 1
    names = [run.name if many else "" for run in runs]  # a page of one run does not repeat it
    named = list(zip(names, runs, strict=True))
    return Report(
        f"bert-dp: {len(runs)} runs compared" if many else f"{runs[0].name}: bert-dp run",
        [_machine(name, run) for name, run in named],
        [*(Verdict(*_end(run), run.missing, name) for name, run in named), *_too_near(runs)],
        [] if many else _tiles(runs[0]),
        [
            Section("", [figure(runs) for figure in FIGURES], console=False),
            Section("Numbers", tables=[_numbers(runs)]),
            *([Section("Settings that differ", tables=[_differences(runs)])] if many else []),
            *[section for name, run in named for section in _profiles(name, run)],
            *[section for name, run in named for section in _records(name, run)],
        ],
        next="" if many else _next(runs[0]),
    )


def _next(run: Run) -> str:
    """What can be done with the run: use the model that it has trained, or go on with it."""
    path = str(run.path)
    if run.finished and run.facts.status == "done":
        load = f"import bert_dp; model, tokenizer = bert_dp.load({json.dumps(path)})"
        return f"python -ic {shlex.quote(load)}"
    failure = run.facts.failure
    if (
        failure is not None and failure.kind == "not_finite"
    ):  # going on with the same settings would diverge again
        lr = number(flat(run.config).get("optim.lr"))
        config = shlex.quote(f"{path}/config.yaml")
        return "" if lr is None else f"bert-dp train {config} --set optim.lr={lr / 2:g}"
    return f"bert-dp train --run-dir {shlex.quote(path)}" if run.facts.checkpoint else ""


def _machine(name: str, run: Run) -> str:
    count = format_count(run.facts.world_size)
    return machine_line(run.environment, name, f"{count} x {run.facts.device or 'device not recorded'}")


def _end(run: Run) -> tuple[Level, str]:
    """How the run ended, in one sentence."""
    facts, step = run.facts, f"step {format_count(run.facts.step)}"
    if not run.finished:
        return "warn", f"No end recorded: still running, or killed. Last logged: {step}."
    if facts.status == "failed":
        cause = first_line(facts.failure.headline() if facts.failure else None)
        return "fail", f"Failed at {step} (exit code {facts.exit_code}): {cause}"
    if facts.status == "stopped":
        saved = " after a checkpoint" if facts.checkpoint else ""
        return "warn", f"Stopped by {_signal(facts.signal)}{saved} at {step}."
    loss, entropy = facts.heldout_loss, facts.unigram_entropy_nats
    result = "held-out loss not recorded."
    if loss is not None:
        result = f"held-out loss {heldout.loss_text(loss, run.heldout)}"
        result += f" (a context-free model: {format_nats(entropy)})" if entropy is not None else ""
        useless = entropy is not None and loss >= entropy
        result += ": no better than word frequencies; train longer." if useless else "."
        if (scores := heldout.scores_text(run.heldout)) is not None:
            result = f"{scores} on {heldout.basis(run.heldout)}."
        if constant := run.heldout.one_class:
            result += f" Every example of {', '.join(constant)} gets the same class."
    return "warn" if run.heldout.one_class else "ok", f"Done after {step}: {result}"


def _too_near(runs: Sequence[Run]) -> list[Verdict]:
    """A warning where the held-out losses of runs are nearer to each other than either is known."""
    measured = [(loss, run.heldout) for run in runs if (loss := run.facts.heldout_loss) is not None]
    neighbours = itertools.pairwise(sorted(measured, key=lambda pair: pair[0]))
    small = [heldout.too_small(a, y - x) for (x, a), (y, _) in neighbours]
    return [Verdict("warn", text) for text in small[:1] if text]


def _tiles(run: Run) -> list[Tile]:
    facts = run.facts
    entropy = format_nats(facts.unigram_entropy_nats)
    return [
        Tile(
            "Held-out loss",
            heldout.loss_text(facts.heldout_loss, run.heldout),
            f"{_measured_at(facts)}{heldout.basis(run.heldout)}; unigram entropy {entropy}",
        ),
        Tile(
            "Throughput",
            format_si(facts.tokens_per_s, "tokens/s"),
            f"summed over {_ranks(facts)}{_since(facts)}",
        ),
        Tile(f"Per {_device(facts)}", format_si(facts.tokens_per_s_per_gpu, "tokens/s"), _ranks(facts)),
        Tile("Peak memory", format_gib(facts.peak_memory_gib), f"greatest of {_ranks(facts)}{_since(facts)}"),
    ]


# --- figures: one function of the runs each, in FIGURES


def loss(runs: Sequence[Run]) -> Figure:
    """The training and the held-out loss, with what a model without context reaches."""
    many = len(runs) > 1
    style: Style = "dashed" if many else "both"
    lines, levels = [], {}
    for i, run in enumerate(runs):
        prefix, facts = (f"{run.name}: " if many else ""), run.facts
        evals = [(line.get("tokens"), line.get("loss")) for line in run.evals]
        evals = evals or [(facts.tokens, facts.heldout_loss)]
        lines += [
            Line(f"{prefix}training", *_points(run, "loss"), i),
            Line(f"{prefix}held-out", *series(evals), i if many else 1, style),
        ]
        for name, nats in (
            ("unigram entropy", facts.unigram_entropy_nats),
            ("ln V", facts.uniform_entropy_nats),
        ):
            if nats is not None:
                label = f"{name} {format_ratio(nats)}"
                levels[label] = Rule(label, nats)
    first = runs[0].heldout
    per = "masked token" if first.examples is None else "example"
    y = Axis(f"loss ({first.loss_unit} per {per})", _unit(first))
    return Figure("Loss", lines, Axis("tokens"), y, levels=list(levels.values()), switch=True)


def throughput(runs: Sequence[Run]) -> Figure:
    """Tokens per second over the time of the run."""
    lines = [Line(run.name, *_points(run, "tokens_per_s", "elapsed_s"), i) for i, run in enumerate(runs)]
    longest = max((x for line in lines for x in line.x), default=0.0)
    unit, seconds = ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 300 else ("s", 1.0)
    lines = [dataclasses.replace(line, x=[x / seconds for x in line.x]) for line in lines]
    y = Axis("tokens/s, summed over all ranks", from_zero=True)
    return Figure("Throughput", lines, Axis(f"elapsed ({unit})"), y)


def learning_rate(runs: Sequence[Run]) -> Figure:
    """The learning rate over the tokens."""
    return _over_tokens("Learning rate", runs, "lr", Axis("learning rate", "lr", from_zero=True))


def global_batch(runs: Sequence[Run]) -> Figure:
    """The global batch with its ramp, over the tokens."""
    y = Axis("sequences per optimizer step", from_zero=True)
    return _over_tokens("Global batch", runs, "global_batch", y)


def time_split(runs: Sequence[Run]) -> Figure:
    """The parts of the wall time, a row of 100 % for each run."""
    splits = [_split(run.facts) for run in runs]
    walls = [sum(split.values()) for split in splits]
    names = ["wall of rank 0"] if len(runs) == 1 else [f"{run.name}, wall" for run in runs]
    names = [f"{name}{_since(run.facts)}" for name, run in zip(names, runs, strict=True)]
    times = [format_duration(wall) if wall else "not recorded" for wall in walls]
    rows = [f"{name}: {text}" for name, text in zip(names, times, strict=True)]
    bars = []
    for part in [part for part in SPLIT.values() if any(part in split for split in splits)]:
        seconds = [split.get(part, 0.0) for split in splits]
        shares = [s / wall if wall else 0.0 for s, wall in zip(seconds, walls, strict=True)]
        texts = [
            f"{format_duration(s)}, {format_percent(share)}" for s, share in zip(seconds, shares, strict=True)
        ]
        bars.append(Bars(part, shares, texts))
    return Figure("Where the time went", bars, Axis("share of the wall time", "percent"), Axis(""), rows)


FIGURES = (loss, throughput, learning_rate, global_batch, time_split)


def _over_tokens(title: str, runs: Sequence[Run], key: str, y: Axis) -> Figure:
    """What the runs logged as `key`, against the tokens they had seen."""
    lines = [Line(run.name, *_points(run, key), i) for i, run in enumerate(runs)]
    return Figure(title, lines, Axis("tokens"), y)


def _points(run: Run, y: str, x: str = "tokens") -> tuple[list[float], list[float | None]]:
    return series([(line.get(x), line.get(y)) for line in run.metrics])


def _split(facts: Summary) -> dict[str, float]:
    """Seconds of each part of the wall time that is known, in its order; training is split into its own
    parts."""
    seconds = {**facts.time_s, "other": other(facts.time_s)}
    return {name: seconds[key] for key, name in SPLIT.items() if key in seconds}


# --- numbers: the rows of each topic, in TOPICS


def _numbers(runs: Sequence[Run]) -> Table:
    """A column for each run. Rows are joined by their labels: a failed run has some that others lack."""
    rows = []
    for topic, rows_of in TOPICS.items():
        columns = [{row.label: row for row in rows_of(run)} for run in runs]
        longest_first = sorted(columns, key=len, reverse=True)
        for label in dict.fromkeys(label for column in longest_first for label in column):
            members = [column.get(label) for column in columns]
            cells = [row.cells[0] if row else Cell("") for row in members]
            rows.append(Row(label, cells, topic, any(row.console for row in members if row)))
    return Table(rows, [Column(run.name) for run in runs] if len(runs) > 1 else ())


def _outcome(run: Run) -> list[Row]:
    facts, measured = run.facts, run.heldout
    loss, basis, failed = facts.heldout_loss, heldout.basis(measured), facts.status == "failed"
    interval = "; ± 95 % over sequences" if heldout.half_width(measured) is not None else ""
    loss_note = f"{_measured_at(facts)}mean over {basis}{interval}"
    ended = (facts.status, f"exit code {facts.exit_code}") if run.finished else ("no end recorded", "")
    cause = facts.failure.headline() if failed and facts.failure else "none recorded"
    rows = [
        words("status", *ended, console=False),
        words("cause", cause, console=False),
        *(_failure(facts) if failed else []),
        *_restarts(facts),
        Row("held-out loss", (Cell(heldout.loss_text(loss, measured), loss_note, loss),)),
    ]
    if (accuracy := measured.masked_accuracy) is not None:
        note = "of the same masked tokens, the greatest logit is right"
        rows.append(value("masked accuracy", accuracy, "percent", note, console=False))
    note = f"split and metric; {basis} in all"
    rows += [value(name, score, "decimals", note) for name, score in (measured.scores or {}).items()]
    if measured.examples is None:  # the losses of a language model compare with these
        rows += [
            value(name, entropy, "nats", f"{what}; held-out loss is {_gap(loss, entropy)}")
            for name, entropy, what in _entropies(facts)
        ]
    return [*rows, value("training loss, last", facts.final_loss, _unit(measured), "mean over all ranks")]


def _measured_at(facts: Summary) -> str:
    """Where the held-out loss is not of the run's last step."""
    if facts.heldout_step is None or facts.heldout_step == facts.step:
        return ""
    return f"at step {format_count(facts.heldout_step)}, "


def _since(facts: Summary) -> str:
    """Of which steps rates, times and memory are, where an earlier start has taken others."""
    return f", since step {format_count(facts.since_step)}" if facts.since_step else ""


def _restarts(facts: Summary) -> list[Row]:
    """How often the run was started again, and the last time why."""
    if not facts.restarts:
        return []
    last = facts.restarts[-1]
    place = f"step {format_count(last.step)}" if last.step >= 0 else "the start"
    why = f"the last from {place} on {count_of(last.ranks, 'rank')}: {first_line(last.cause)}"
    return [value("restarts", len(facts.restarts), "count", why)]


def _entropies(facts: Summary) -> list[tuple[str, float | None, str]]:
    """What the loss of a language model compares with: name, nats, and what the model knows."""
    return [
        ("unigram entropy", facts.unigram_entropy_nats, "no context"),
        ("ln V", facts.uniform_entropy_nats, "uniform guess"),
    ]


def _unit(measured: HeldOut) -> Unit:
    """In which losses are formatted."""
    return "nats" if measured.loss_unit == "nats" else "ratio"


def _failure(facts: Summary) -> list[Row]:
    """Rows of a failed run: where, why, what to do, and what followed."""
    failure = facts.failure
    if failure is None:
        return []
    lists: dict[str, Sequence[str | None]] = {
        "at": [" ".join(filter(None, [failure.where, failure.source]))],
        "why": failure.explanation,
        "fix": failure.fix,
        "consequence": failure.consequences,
        "log": [failure.log],
    }
    texts = {label: "\n".join(filter(None, lines)) for label, lines in lists.items()}
    return [words(label, text, console=False) for label, text in texts.items() if text]


def _work(run: Run) -> list[Row]:
    facts = run.facts
    lost = f"{_share(facts.skipped_steps, facts.step)} of the steps; gradient norm not finite"
    compiled = None if facts.compiled is None else "compiled" if facts.compiled else "eager"
    narrow = run.config.get("model", {}).get("residual_dtype") == "bf16"
    residual = "residual stream in bf16" if narrow else None
    precision = ", ".join(filter(None, [f"precision {facts.precision or NA}", residual, compiled]))
    spikes = value("loss spikes", facts.loss_spikes, "count", "logged losses far above the ones before")
    return [
        value("optimizer steps", facts.step, "count", _step_note(facts)),
        value("samples", facts.samples, "count", "sequences over all ranks", console=False),
        value("tokens", facts.tokens, "count", "over all ranks"),
        value("skipped steps", facts.skipped_steps, "count", lost, console=bool(facts.skipped_steps)),
        *([spikes] if facts.loss_spikes else []),
        value("parameters", facts.parameters, "si", precision),
        *(
            value(name.replace("_", " "), number, unit_of(name), "at the last logged step", console=False)
            for name, number in facts.metrics.items()
        ),
    ]


def _rates(run: Run) -> list[Row]:
    facts = run.facts
    over = f"summed over {_ranks(facts)}"
    micro = f"{_product(facts)} micro batches per optimizer step"
    if _is_ramped(facts) and facts.steps_per_s and facts.global_steps_per_s is not None:
        mean = format_ratio(facts.global_steps_per_s / facts.steps_per_s)
        micro = f"{mean} micro batches per optimizer step in the mean"
    of = " ".join(filter(None, [facts.precision, "peak of the device"]))
    peak = of if facts.mfu is not None else f"{of} unknown"
    profiled = f"; {_steps(facts.profiled_steps)} under the profiler" if facts.profiled_steps else ""
    rates = [
        ("optimizer steps", facts.steps_per_s, "steps/s", f"of the whole job{_since(facts)}{profiled}"),
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
        *map(_profiled, run.profiles),
    ]


def _straggler(facts: Summary) -> list[Row]:
    """The ratio, and the rank that the others wait for where there is one."""
    what = "own work of the slowest rank / median of the others, before any gradient reduction"
    rows = [value("straggler ratio", facts.straggler_ratio, "ratio", f"{what}{_since(facts)}", console=False)]
    if (slow := facts.straggler) is not None:
        lost = f"{format_duration(slow.seconds_per_step)} lost per step"
        note = f"own work {format_ratio(slow.ratio)} x the others' median, {lost}"
        rows.append(words("straggler", f"rank {format_count(slow.rank)}", note))
    return rows


def _times(run: Run) -> list[Row]:
    """The wall time, the rest of the command's, and each part of it: those of training on the console too."""
    facts, parts = run.facts, run.facts.time_s
    wall = sum(parts[part] for part in WALL_PARTS if part in parts) or None
    named = ", ".join(f"{part} {format_duration(parts.get(part))}" for part in WALL_PARTS)
    outer = {part: parts.get(part) for part in WALL_PARTS}
    inner = {name: parts.get(key) for key, name in TRAIN_PARTS.items()} | {"other": other(parts)}
    rows = [value("wall", wall, "duration", f"from set-up to the last save: {named}{_since(facts)}")]
    if wall and facts.command_s is not None and not facts.restarts:
        rest = max(0.0, facts.command_s - wall)
        whole = f"the rest of {format_duration(facts.command_s)} from the command to the end of the last rank"
        rows.append(
            value("start-up", rest, "duration", f"{whole}: checks, data, starting and ending processes")
        )
    for name, seconds in outer.items():
        rows.append(value(name, seconds, "duration", f"{_share(seconds, wall)} of wall", console=False))
    for name, seconds in inner.items() if parts else ():
        rows.append(value(name, seconds, "duration", f"{_share(seconds, wall)} of wall, part of train"))
    return rows


def _files(run: Run) -> list[Row]:
    facts = run.facts
    tokens = (facts.tokens_per_s or 0.0) * facts.time_s.get("train", 0.0)  # of this start, as the energy is
    each = format_si(facts.energy_j / tokens * 1e6 if facts.energy_j and tokens else None, "J")
    energy = f"{each} per million tokens, {_ranks(facts)}{_since(facts)}"
    writes = [value("failed writes", facts.failed_writes, "count", "of logs and records: lines are missing")]
    saves = [value("failed saves", facts.failed_saves, "count", f"see the log{_since(facts)}")]
    return [
        value("peak memory", facts.peak_memory_gib, "gib", f"greatest of {_ranks(facts)}{_since(facts)}"),
        value("energy", facts.energy_j, "energy", energy, console=facts.energy_j is not None),
        words("checkpoint", facts.checkpoint),
        *(saves if facts.failed_saves else []),
        *(writes if facts.failed_writes else []),
    ]


TOPICS = {
    "Outcome": _outcome,
    "Work": _work,
    "Throughput": _rates,
    "Time (rank 0)": _times,
    "Resources and files": _files,
}


def _differences(runs: Sequence[Run]) -> Table:
    """The settings by their paths, as far as the runs differ in them."""
    settings = [flat(run.config) for run in runs]
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


def _profiles(name: str, run: Run) -> list[Section]:
    """The operators of each profiled rank."""
    sections = []
    for profile in run.profiles:
        title = f"Profile of rank {format_count(profile.rank)}, {_steps(profile.steps)}"
        trace = run.path / "profile" / profile.trace
        note = f"{trace} opens in ui.perfetto.dev or chrome://tracing"
        sections.append(
            Section(_titled(title, name), tables=[_operators(profile)], notes=[note], console=False)
        )
    return sections


def _operators(profile: ProfileFile) -> Table:
    wall = profile.wall_s
    columns = (
        Quantity("calls", "calls", "count"),
        Quantity("self_s", "own time", "duration"),
        Computed(lambda operator: operator.self_s / wall, f"of {format_duration(wall)}", "percent"),
    )
    return table([(each.name, each) for each in profile.operators], columns, corner="operator")


def _records(name: str, run: Run) -> list[Section]:
    texts = {"Configuration": record_text(run.config), "Environment": environment_text(run.environment)}
    return [folded(_titled(title, name), text) for title, text in texts.items()]


# --- words


def _titled(title: str, name: str) -> str:
    """The title with the name of the run, where the page has several."""
    return f"{title}: {name}" if name else title


def _steps(ends: Sequence[int]) -> str:
    first, last = (format_count(end) for end in ends)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _is_ramped(facts: Summary) -> bool:
    """Whether its steps did not all have the global batch."""
    whole = facts.global_batch
    return bool(facts.samples and whole and facts.samples != facts.step * whole)


def _step_note(facts: Summary) -> str:
    """What a step is, in sequences."""
    if not _is_ramped(facts) or not facts.samples or not facts.step:
        return f"one step = {_batch_equation(facts)}"
    return f"{facts.samples / facts.step:,.1f} sequences in the mean, at most {_batch_equation(facts)}"


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
