"""Build the report on one run, or compare several. The note beside a value gives its denominator or scope."""

import collections
import contextlib
import dataclasses
import json
import math
import re
import shlex
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

from bert_dp import files
from bert_dp.config import ConfigError, flat, native_issues, resolve
from bert_dp.config.checks import Kind
from bert_dp.config.errors import sha256
from bert_dp.config.schema import CODE
from bert_dp.cost import GIB
from bert_dp.files.ledger import Spent
from bert_dp.files.models import HeldOut, SequenceLosses, Summary
from launcher import results, stats
from launcher.report import page
from launcher.report.formats import (
    FORMATS,
    NA,
    Unit,
    count_of,
    format_count,
    format_decimals,
    format_duration,
    format_interval,
    format_nats,
    format_percent,
    format_ratio,
    format_si,
    number,
    unit_of,
)
from launcher.report.page import Axis, Figure, Line, TableCell, TableRow, Verdict, cell, value, words
from launcher.report.run_files import TRAIN_PARTS, WALL_PARTS, RunFiles, load
from launcher.stats import NORMAL


def half_width(heldout: HeldOut, seeds: Sequence[float] = ()) -> float | None:
    """Return the half-width of the held-out loss's 95 % interval, in the loss's unit, or None if unknown.

    `seeds`: if the loss is a mean over runs, the losses of these runs on the same text. The error from the
    choice of text and the error from differences between runs are independent, so they add in quadrature.
    """
    se = number(heldout.loss_se)
    parts = [] if se is None else [NORMAL * se]
    parts += [stats.half_width(seeds)] if len(seeds) > 1 else []
    return math.hypot(*parts) if parts else None


def loss_text(loss: float | None, heldout: HeldOut, seeds: Sequence[float] = ()) -> str:
    """Format a loss with its interval, if known: `5.7123 nats ± 0.0312`."""
    width = half_width(heldout, seeds)
    return loss_in(heldout.loss_unit, loss) + ("" if loss is None or width is None else f" ± {width:.4f}")


def loss_in(unit: str, loss: float | None) -> str:
    """Format a loss that is given in `unit`."""
    return format_nats(loss) if unit == "nats" else f"{format_ratio(loss)} {unit}"


def basis_of(heldout: HeldOut) -> str:
    """Describe what the loss is averaged over: `4,096 masked tokens in 216 sequences, 15.0 % masked`."""
    if heldout.examples is not None:
        return count_of(heldout.examples, "example") if heldout.examples else "held-out examples"
    if heldout.masked_tokens is None:
        return "held-out masked tokens"
    sequences = f" in {count_of(heldout.sequences, 'sequence')}" if heldout.sequences else ""
    rate = f", {format_percent(heldout.mask_rate)} masked" if heldout.mask_rate else ""
    return f"{format_count(heldout.masked_tokens)} masked tokens{sequences}{rate}"


def scores_text(heldout: HeldOut) -> str | None:
    """Format the scores: `dev accuracy 0.7123, dev f1 0.8012`. Return None if the run has no scores."""
    if heldout.scores is None:
        return None
    names = {name: score_name(name, heldout).replace("/", " ") for name in heldout.scores}
    named = [f"{names[name]} {format_decimals(score)}" for name, score in heldout.scores.items()]
    return ", ".join(named) or "no score: a logit was not finite"


def score_name(name: str, heldout: HeldOut) -> str:
    """Return the name of a score (`split/metric`). For f1, append the averaging method: `dev/f1 (macro)`."""
    average = f" ({heldout.f1_average})" if name.endswith("/f1") and heldout.f1_average else ""
    return name + average


HEADLINES = re.compile(r"Outcome (dev.*/accuracy|held-out loss)|Throughput token rate.*|.* peak memory")
"""Pattern of the rows that a run's page highlights. It matches a row's topic and label, joined by a space."""
MAX_PASSES = 4  # up to this many passes, repeated text is worth almost as much as new text (arXiv 2305.16264)
SPLIT_PARTS = ("setup", "compile", *TRAIN_PARTS, "other", "eval", "save")
SPLIT = {part: TRAIN_PARTS.get(part, part) for part in SPLIT_PARTS}
"""Parts of the wall time, in display order, with their labels. Training is split into its own parts."""


def of_directories(run_dirs: Sequence[Path]) -> page.Report:
    """Report on one run directory or compare several. Directories of crashed runs are accepted."""
    runs = [load(run_dir) for run_dir in run_dirs]
    names = [run.name for run in runs]
    for i, run in enumerate(runs):
        if names.count(run.name) > 1:
            runs[i] = dataclasses.replace(run, name=f"{run.name} ({i + 1})")
    many, numbers = len(runs) > 1, _numbers(runs)
    named = [(run.name if many else "", run) for run in runs]  # with one run, only the title names the run
    return page.Report(
        f"bert-dp: {len(runs)} runs compared" if many else f"{runs[0].name}: bert-dp run",
        [page.machine_line(run.environment, name, _devices(run.summary)) for name, run in named],
        [Verdict(*_end(run), [*run.missing, *_repeats(run)], name) for name, run in named],
        [row for row in numbers.rows if not many and HEADLINES.fullmatch(f"{row.topic} {row.label}")],
        [
            *(_comparison(runs) if many else []),
            page.ReportSection("", _figures(runs), console=False),
            *([] if many else _classes(runs[0].path, flat(runs[0].config).get("finetune.labels") or ())),
            page.ReportSection("Numbers", tables=[numbers], console=not many),
            *[
                page.record(f"{title}: {name}" if name else title, content)
                for name, run in named
                for title, content in (("Configuration", run.config), ("Environment", run.environment))
            ],
        ],
        next="" if many else _next(runs[0]),
    )


def _next(run: RunFiles) -> str:
    """Suggest exporting a finished run, halving a diverged run's learning rate, or resuming any other run."""
    path, failure, settings = shlex.quote(str(run.path)), run.summary.failure, flat(run.config)
    if run.finished and run.summary.status == "done":
        if run.config.get("task"):  # an export would need the custom task's code, but only `train` runs it
            return ""
        kind: Kind = "mlm" if run.heldout.examples is None else "classifier"
        form = "onnx"
        with contextlib.suppress(ConfigError):
            form = "onnx" if native_issues(resolve([run.config]), kind) else "hf"
        return f"bert-dp export {form} {path} --out {shlex.quote(f'{run.path}-{form}')}"
    if failure is not None and failure.kind == "not_finite":  # the same settings would diverge again
        lr = number(settings.get("optim.lr"))
        config = shlex.quote(f"{run.path}/config.yaml")
        return "" if lr is None else f"bert-dp train {config} optim.lr={lr / 2:g}"
    named = [str(settings.get(setting)) for setting in ("task", "optim.name")]
    code = " --allow-code" if any(map(CODE.fullmatch, named)) else ""
    several = "nodes" in run.environment  # with several nodes, --nproc is the number of ranks per node
    ranks = "" if several or run.summary.world_size is None else f" --nproc {run.summary.world_size}"
    return f"bert-dp train --run-dir {path}{ranks}{code}" if run.summary.checkpoint else ""


def _end(run: RunFiles) -> tuple[page.Level, str]:
    summary, measured = run.summary, run.heldout
    step = f"step {format_count(summary.step)}"
    if not run.finished:
        return "warn", f"No end recorded: the run is still running or was killed. Last logged: {step}."
    if summary.status == "failed":
        cause = page.first_line(summary.failure.headline() if summary.failure else None)
        return "fail", f"Failed after {step} (exit code {summary.exit_code}): {cause}"
    if summary.status == "stopped":
        saved = ", after saving a checkpoint" if summary.checkpoint else ""
        names = {s.value: s.name for s in signal.Signals}
        by = names.get(summary.signal, f"signal {summary.signal}") if summary.signal else "a signal"
        return "warn", f"Stopped by {by} at {step}{saved}."
    if (scores := scores_text(measured)) is not None:
        result = f"{scores} on {basis_of(measured)}."
    elif (loss := summary.heldout_loss) is None:
        result = "held-out loss not recorded."
    else:
        result, entropy = f"held-out loss {loss_text(loss, measured)}", summary.unigram_entropy_nats
        if entropy is not None:
            result += f" (a context-free model: {format_nats(entropy)})"
        useless = entropy is not None and loss >= entropy
        result += ". The model predicts no better than word frequencies do; train longer." if useless else "."
    if measured.one_class:
        result += f" Every example in {', '.join(measured.one_class)} is assigned the same class."
    return "warn" if measured.one_class else "ok", f"Done after {step}: {result}"


def _repeats(run: RunFiles) -> list[str]:
    """Warn if a language model made at least MAX_PASSES passes over text other than the built-in corpus."""
    passes = number(run.metrics[-1].get("epoch")) if run.metrics else None
    exempt = run.heldout.examples is not None or flat(run.config).get("data.sources") == ["builtin"]
    if passes is None or passes < MAX_PASSES or exempt:
        return []
    tokens = format_si(run.summary.tokens, "tokens")
    return [
        f"{format_count(passes)} passes over the training data, {tokens} in total; beyond "
        f"{MAX_PASSES} passes, new text helps more than further passes."
    ]


# --- figures


NOT_COMPARABLE = (
    "Losses with different vocabularies, mask rates or tasks are not comparable; "
    "`bert-dp eval mlm RUN RUN... TEXT` measures bits per byte, which are comparable."
)
CURVES = (
    ("Throughput", "tokens_per_s", Axis("tokens/s, summed over all ranks", from_zero=True)),
    ("Learning rate", "lr", Axis("learning rate", "lr", from_zero=True)),
    ("Gradient norm", "grad_norm", Axis("L2 norm of the step's gradient, before clipping")),
    ("Global batch", "global_batch", Axis("sequences per optimizer step", from_zero=True)),
)
"""Figures other than the loss, with tokens on the x axis: (title, key in metrics.jsonl, y axis)."""


def _figures(runs: Sequence[RunFiles]) -> list[Figure]:
    curves = [
        Figure(title, [Line(r.name, *_points(r, key), i) for i, r in enumerate(runs)], Axis("tokens"), y)
        for title, key, y in CURVES
    ]
    groups, numbered = _comparable(runs), list(enumerate(runs))
    losses = [_loss([(i, run) for i, run in numbered if run in group], len(groups)) for group in groups]
    return [*losses, *curves, _time_split(runs)]


def _loss(runs: Sequence[tuple[int, RunFiles]], groups: int) -> Figure:
    """Plot the training and held-out losses, with the losses of context-free models as reference lines.
    `runs`: one group of comparable runs, each with its index among all runs. `groups`: number of groups."""
    many = len(runs) > 1 or groups > 1
    style: page.Style = "dashed" if many else "both"
    lines, levels = [], {}
    for i, run in runs:
        prefix, summary = (f"{run.name}: " if many else ""), run.summary
        evals = [(line.get("tokens"), line.get("loss")) for line in run.evals]
        evals = evals or [(summary.tokens, summary.heldout_loss)]
        lines += [
            Line(f"{prefix}training", *_points(run, "loss"), i),
            Line(f"{prefix}held-out", *page.series(evals), i if many else 1, style),
        ]
        for name, nats, _ in _entropies(summary):
            if nats is not None:
                label = f"{name} {format_ratio(nats)}"
                levels[label] = page.ReferenceLine(label, nats)
    first, training = runs[0][1].heldout, runs[0][1].training_unit
    per = "masked token" if first.examples is None else "example"
    apart = "" if training == first.loss_unit else f"; training: {training}"
    y = Axis(f"loss per {per} ({first.loss_unit}{apart})", _unit(first.loss_unit))
    title = "Loss" if groups == 1 else f"Loss of {', '.join(run.name for _, run in runs)}"
    note = "" if groups == 1 else NOT_COMPARABLE
    return Figure(title, lines, Axis("tokens"), y, levels=list(levels.values()), note=note, switch=True)


def _time_split(runs: Sequence[RunFiles]) -> Figure:
    splits = [_split(run.summary) for run in runs]
    walls = [sum(split.values()) for split in splits]
    rows = []
    for run, wall in zip(runs, walls, strict=True):
        name = "wall time of rank 0" if len(runs) == 1 else f"{run.name}, wall time"
        rows.append(f"{name}{_since(run.summary)}: {format_duration(wall) if wall else 'not recorded'}")
    bars = []
    for part, label in SPLIT.items():
        seconds = [split.get(part, 0.0) for split in splits]
        shares = [s / wall if wall else 0.0 for s, wall in zip(seconds, walls, strict=True)]
        durations = map(format_duration, seconds)
        texts = [f"{s}, {format_percent(share)}" for s, share in zip(durations, shares, strict=True)]
        bars.append(page.Bars(label, shares, texts))
    return Figure("Where the time went", bars, Axis("share of the wall time", "percent"), Axis(""), rows)


def _points(run: RunFiles, key: str) -> tuple[list[float], list[float | None]]:
    return page.series([(line.get("tokens"), line.get(key)) for line in run.metrics])


def _split(summary: Summary) -> dict[str, float]:
    """Return the seconds of each known part of the wall time, with training split into its parts."""
    seconds = dict(summary.time_s)
    if seconds:  # the parts may add up to more than `train`: host and device times overlap slightly
        named = sum(seconds.get(part, 0.0) for part in TRAIN_PARTS)
        seconds["other"] = max(0.0, seconds.get("train", 0.0) - named)
    return {part: seconds[part] for part in SPLIT if part in seconds}


# --- numbers: TOPICS maps each topic to the function that returns its rows


def _numbers(runs: Sequence[RunFiles]) -> page.Table:
    """Return a table with one column per run. Match rows by label, because failed runs have extra rows."""
    rows = []
    for topic, rows_of in TOPICS.items():
        columns = [{row.label: row for row in rows_of(run)} for run in runs]
        for label in dict.fromkeys(label for column in columns for label in column):
            members = [column.get(label) for column in columns]
            cells = [row.cells[0] if row else TableCell("") for row in members]
            rows.append(TableRow(label, cells, topic, any(row.console for row in members if row)))
    return page.Table(rows, [run.name for run in runs] if len(runs) > 1 else ())


def _outcome(run: RunFiles) -> list[TableRow]:
    summary, measured = run.summary, run.heldout
    loss, basis, failure = summary.heldout_loss, basis_of(measured), summary.failure
    status = (summary.status, f"exit code {summary.exit_code}") if run.finished else ("no end recorded", "")
    rows = [words("status", *status, console=False)]
    if summary.status == "failed" and failure is not None:
        texts = {
            "cause": failure.headline(),
            "at": " ".join(filter(None, [failure.where, failure.source])),
            "reason": "\n".join(failure.explanation),
            "fix": "\n".join(failure.fix),
            "consequence": "\n".join(failure.consequences),
            "log": failure.log,
        }
        rows += [words(label, text, console=False) for label, text in texts.items() if text]
    if summary.restarts:
        last = summary.restarts[-1]
        place = f"step {format_count(last.step)}" if last.step >= 0 else "the start"
        note = f"last restart from {place} on {count_of(last.ranks, 'rank')}: {page.first_line(last.cause)}"
        rows.append(value("restarts", len(summary.restarts), "count", note))
    scores = measured.scores or {}
    accuracies = [name for name in scores if name.startswith("dev") and name.endswith("/accuracy")]
    for name, score in scores.items():
        note, constant = f"split/metric; {basis} in total", measured.baseline.get(name)
        if [name] == accuracies and measured.examples and (share := number(score)) is not None:
            note += f"; 95 % interval {_share_interval(share, measured.examples)}"
        note += "" if constant is None else f"; a constant prediction scores {format_decimals(constant)}"
        rows.append(value(score_name(name, measured), score, "decimal", note))
    interval = "; ±: 95 % interval over sequences" if half_width(measured) is not None else ""
    note = f"{_measured_at(summary)}mean over {basis}{interval}"
    rows.append(TableRow("held-out loss", (TableCell(loss_text(loss, measured), note, loss),)))
    if measured.examples is None:  # baselines for the loss of a language model
        for name, entropy, knows in _entropies(summary):
            gap = None if loss is None or entropy is None else entropy - loss
            side = "below" if gap is not None and gap < 0 else "above"
            note = f"{knows}; {format_nats(gap and abs(gap))} {side} the loss"
            rows.append(value(name, entropy, "nats", note))
    unit = _unit(run.training_unit)
    return [*rows, value("last training loss", summary.final_loss, unit, "mean over all ranks")]


def _share_interval(share: float, n: int) -> str:
    """Format the 95 % interval of a share of `n` examples (Wilson 1927)."""
    z = NORMAL**2 / n
    middle, half = (share + z / 2) / (1 + z), math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return format_interval([middle - half, middle + half], format_percent)


def _measured_at(summary: Summary) -> str:
    """Format the step at which the held-out loss was measured; "" if it is the run's last step."""
    if summary.heldout_step is None or summary.heldout_step == summary.step:
        return ""
    return f"at step {format_count(summary.heldout_step)}, "


def _since(summary: Summary) -> str:
    """Format the step from which rates, times and memory are measured; "" if they cover the whole run."""
    return f", since step {format_count(summary.since_step)}" if summary.since_step else ""


def _entropies(summary: Summary) -> list[tuple[str, float | None, str]]:
    """Return baseline losses for a language model: (name, nats, description)."""
    return [
        ("unigram entropy", summary.unigram_entropy_nats, "no context"),
        ("ln V", summary.uniform_entropy_nats, "uniform guess"),
    ]


def _unit(loss_unit: str) -> Unit:
    return "nats" if loss_unit == "nats" else "ratio"


def _work(run: RunFiles) -> list[TableRow]:
    summary = run.summary
    whole, micro, accumulation = summary.global_batch, summary.micro_batch, summary.accumulation
    dp = whole // (micro * accumulation) if whole and micro and accumulation else None
    sizes = f"micro {format_count(micro)} x accumulation {format_count(accumulation)} x dp {format_count(dp)}"
    step = f"one step = global batch {format_count(whole)} = {sizes}"
    if whole and summary.samples and summary.samples != summary.step * whole:
        step += f", {summary.samples / max(1, summary.step):,.1f} sequences on average"
    lost = f"{_share(summary.skipped_steps, summary.step)} of the steps (gradient norm not finite)"
    compiled = None if summary.compiled is None else "compiled" if summary.compiled else "eager"
    precision = ", ".join(filter(None, [f"precision {summary.precision or NA}", compiled]))
    spikes = value("loss spikes", summary.loss_spikes, "count", "logged losses far above the preceding ones")
    return [
        value("optimizer steps", summary.step, "count", step),
        value("samples", summary.samples, "count", "sequences over all ranks", console=False),
        value("tokens", summary.tokens, "count", "over all ranks"),
        value("skipped steps", summary.skipped_steps, "count", lost, console=bool(summary.skipped_steps)),
        *([spikes] if summary.loss_spikes else []),
        value("parameters", summary.parameters, "si", precision),
        *(
            value(name.replace("_", " "), number, unit_of(name), "at the last logged step", console=False)
            for name, number in summary.metrics.items()
        ),
    ]


def _rates(run: RunFiles) -> list[TableRow]:
    summary = run.summary
    interval = "" if summary.time_s else "; in the last logged interval"  # else rates come from the log
    over = f"summed over {_ranks(summary)}{interval}"
    rate, micro_rate = summary.steps_per_s, summary.global_steps_per_s
    each = format_ratio(micro_rate / rate if rate and micro_rate is not None else None)
    micro = f"micro batches of all replicas, {each} per step"
    profiled = f"; {_steps(summary.profiled_steps)} under the profiler" if summary.profiled_steps else ""
    per_device = f"tokens/s divided by {_ranks(summary)}"
    rates = [
        ("optimizer step rate", rate, "steps/s", f"whole job{_since(summary)}{profiled}{interval}"),
        ("global step rate", micro_rate, "global steps/s", micro),
        ("sample rate", summary.samples_per_s, "samples/s", over),
        ("token rate", summary.tokens_per_s, "tokens/s", over),
        ("token rate per device", summary.tokens_per_s_per_gpu, "tokens/s", per_device),
    ]
    rows = [
        TableRow(label, (TableCell(format_si(rate, unit), note, rate),), console=label != "sample rate")
        for label, rate, unit, note in rates
    ]
    work = "compute time before any gradient reduction: slowest rank / median of the others"
    ratio = summary.straggler_ratio
    rows.append(value("straggler ratio", ratio, "ratio", f"{work}{_since(summary)}", console=False))
    if (slow := summary.straggler) is not None:
        lost = f"{format_duration(slow.seconds_per_step)} lost per step"
        note = f"compute time {format_ratio(slow.ratio)} x the others' median, {lost}"
        rows.append(words("straggler", f"rank {format_count(slow.rank)}", note))
    peak = " ".join(filter(None, [summary.precision, "peak of the device"]))
    known = "" if summary.mfu is not None else " (unknown)"
    return [*rows, value("MFU", summary.mfu, "percent", f"model FLOP/s divided by the {peak}{known}")]


def _times(run: RunFiles) -> list[TableRow]:
    summary, parts = run.summary, run.summary.time_s
    wall = sum(parts[part] for part in WALL_PARTS if part in parts) or None
    named = ", ".join(f"{part} {format_duration(parts.get(part))}" for part in WALL_PARTS)
    rows = [value("wall", wall, "duration", f"from set-up to the last save: {named}{_since(summary)}")]
    if wall and summary.command_s is not None and not summary.restarts:
        rest = max(0.0, summary.command_s - wall)
        note = (
            f"{format_duration(summary.command_s)} from the start of the command to the end of the last rank"
            ", minus the wall time; includes checks, preparing data, and starting and stopping processes"
        )
        rows.append(value("start-up", rest, "duration", note))
    if parts:
        split = _split(summary)
        for part in (*TRAIN_PARTS, "other"):
            note = f"{_share(split.get(part), wall)} of the wall time, part of train"
            rows.append(value(SPLIT[part], split.get(part), "duration", note))
    return rows


def _files(run: RunFiles) -> list[TableRow]:
    summary, since, spent = run.summary, _since(run.summary), run.summary.spent or Spent()
    # tokens since the run was last started or resumed, because the energy covers only this period
    tokens = (summary.tokens_per_s or 0.0) * summary.time_s.get("train", 0.0)
    each = format_si(summary.energy_j / tokens * 1e6 if summary.energy_j and tokens else None, "J")
    price = f"{format_si(spent.device_hours)} device hours at run.price_per_device_hour"
    amounts = [
        ("energy", summary.energy_j, "J", f"{each} per million tokens, {_ranks(summary)}{since}"),
        ("cost", spent.dollars, "$", price),
        ("total energy", spent.kwh, "kWh", f"source: {spent.energy_origin or 'none'}; multiplied by run.pue"),
        ("CO2", spent.co2_kg, "kg", "total energy in kWh x run.grams_co2_per_kwh / 1000"),
    ]
    memory = f"highest of {_ranks(summary)}{since}"
    rows = [
        value("peak memory", summary.peak_memory_gib, "gib", memory),
        *(words(label, format_si(n, unit), note, console=n is not None) for label, n, unit, note in amounts),
        words("checkpoint", summary.checkpoint),
    ]
    if summary.failed_saves:
        rows.append(value("failed saves", summary.failed_saves, "count", f"see the log{since}"))
    if summary.failed_writes:
        note = "logs, records, checkpoints and profiles"
        rows.append(value("failed writes", summary.failed_writes, "count", note))
    return rows


def _predicted(run: RunFiles) -> list[TableRow]:
    summary, times, spent = run.summary, run.summary.time_s, run.summary.spent or Spent()
    seconds = sum(times.get(part, 0.0) for part in ("train", "eval", "save")) if times else None
    measured: dict[str, tuple[float | None, Unit]] = {
        "tokens": (summary.tokens, "si"),
        "steps": (summary.step, "si"),
        "loss": (summary.heldout_loss, "nats"),
        "hours": (seconds and seconds / 3600, "si"),
        "dollars": (spent.dollars, "si"),
        "kwh": (spent.kwh, "si"),
    }
    rows = []
    for name, figure in run.prediction.items():
        number, unit = measured[name]
        ends = f" ({format_interval(figure.ci95, FORMATS[unit])})" if figure.ci95 else ""
        note = f"predicted {FORMATS[unit](figure.value)}{ends}, {figure.origin}"
        rows.append(value(f"plan: {name}", number, unit, "not predicted" if figure.value is None else note))
    return rows


TOPICS = {
    "Outcome": _outcome,
    "Work": _work,
    "Throughput": _rates,
    "Time (rank 0)": _times,
    "Resources and files": _files,
    "Measured and predicted": _predicted,
}


# --- classes of a finetuning run

MAX_CLASSES = 50  # a larger matrix would be unreadable


def _classes(run_dir: Path, labels: Sequence[str]) -> list[page.ReportSection]:
    """Return class scores and a confusion matrix of the dev predictions, or an empty list if unavailable."""
    path, count = run_dir / files.PREDICTIONS, len(labels)
    if not 2 <= count <= MAX_CLASSES or not path.is_file() or path.stat().st_size > GIB:
        return []
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    try:
        with path.open() as lines:
            for line in map(json.loads, lines):
                if line["split"].startswith("dev") and line["label"] is not None:
                    logits = line["logits"]
                    seen[int(line["label"]), max(range(count), key=logits.__getitem__)] += 1
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return []
    scores, matrix = [], []
    for i, name in enumerate(labels):
        hits, real = seen[i, i], sum(seen[i, j] for j in range(count))
        guessed = sum(seen[j, i] for j in range(count))
        ratios = [hits / n if n else None for n in (guessed, real)]
        f1 = 2 * hits / (guessed + real) if guessed + real else None
        scores.append(TableRow(name, [*(cell(x, "decimal") for x in (*ratios, f1)), cell(real, "count")]))
        matrix.append(TableRow(name, [cell(seen[i, j], "count") for j in range(count)]))
    tables = [
        page.Table(scores, ("precision", "recall", "f1", "examples"), "Dev examples by class", "class"),
        page.Table(matrix, labels, "Confusion matrix", "class (columns: predicted class)"),
    ]
    return [page.ReportSection("Classes", tables=tables, console=False)]


# --- several runs


def _comparison(runs: Sequence[RunFiles]) -> list[page.ReportSection]:
    """Return two sections: the settings that differ, and a ranking within each group of comparable runs."""
    groups = _comparable(runs)
    settings, rows = [flat(run.config) for run in runs], []
    for key in sorted({key for setting in settings for key in setting}):
        values = [str(setting.get(key, NA)) for setting in settings]
        if len(set(values)) > 1:
            rows.append(TableRow(key, [TableCell(text) for text in values]))
    differences = page.Table(rows, [run.name for run in runs])
    notes = [NOT_COMPARABLE] if len(groups) > 1 else []
    ranked = page.ReportSection("Held-out loss", tables=[_ranking(group) for group in groups], notes=notes)
    return [page.ReportSection("Settings that differ", tables=[differences]), ranked]


def _comparable(runs: Sequence[RunFiles]) -> list[list[RunFiles]]:
    """Group runs whose losses are comparable: same task, labels, vocabulary and mask rate."""
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        settings, tokenizer = flat(run.config), run.path / files.TOKENIZER
        names = ("task", "objective.name", "objective.mask_rate", "finetune.kind", "finetune.labels")
        vocabulary = sha256(tokenizer) if tokenizer.is_file() else settings.get("model.vocab_size")
        key = [*(settings.get(name) for name in names), vocabulary, run.heldout.mask_rate]
        groups.setdefault(str(key), []).append(run)
    return list(groups.values())


def _ranking(runs: Sequence[RunFiles]) -> page.Table:
    """Rank runs by held-out loss, lowest first, and show each run's difference from the first."""

    def loss_of(run: RunFiles) -> float:
        loss = number(run.summary.heldout_loss)
        return math.inf if loss is None else loss

    best, *_ = ranked = sorted(runs, key=loss_of)
    rows = []
    for run in ranked:
        loss, summary = loss_text(run.summary.heldout_loss, run.heldout), run.summary
        cells = [
            TableCell(loss, basis_of(run.heldout), number(summary.heldout_loss)),
            TableCell("") if run is best else _difference(best, run),
            *(TableCell(format_decimals(score)) for score in (run.heldout.scores or {}).values()),
            cell(summary.tokens, "si"),
            TableCell(format_si(summary.tokens_per_s, "tokens/s")),
        ]
        rows.append(TableRow(run.name, cells))
    scores = [score_name(name, best.heldout) for name in best.heldout.scores or {}]
    heads = ["held-out loss", "difference from the first", *scores, "tokens", "throughput"]
    return page.Table(rows, heads, corner="run")


def _difference(best: RunFiles, run: RunFiles) -> TableCell:
    """Return the loss of `run` minus that of `best`, with an interval if the sequences were the same."""
    a, b = best.summary.heldout_loss, run.summary.heldout_loss
    if a is None or b is None:
        return TableCell(NA)
    first, second = (results.find(each.path / files.SEQUENCE_LOSSES, SequenceLosses) for each in (best, run))
    if first and second and (first.text_sha256, first.mask_rate) == (second.text_sha256, second.mask_rate):
        apart = [y - x for x, y in zip(first.losses, second.losses, strict=True)]
        # this mean differs from b - a if a run's sequence losses and summary come from different evaluations
        if len(apart) > 1 and abs(statistics.fmean(apart) - (b - a)) < 1e-6:
            width = NORMAL * statistics.stdev(apart) / math.sqrt(len(apart))
            note = f"±: 95 % interval over {count_of(len(apart), 'sequence')}; same tokens, same masks"
            return TableCell(f"{b - a:+.4f} ± {width:.4f}", note)
    return TableCell(f"{b - a:+.4f}", "different sequences")


# --- short texts


def _steps(ends: Sequence[int]) -> str:
    first, last = (format_count(end) for end in ends)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _devices(summary: Summary) -> str:
    return f"{format_count(summary.world_size)} x {summary.device or 'device not recorded'}"


def _device(summary: Summary) -> str:
    return "CPU rank" if str(summary.device).lower().startswith("cpu") else "GPU"


def _ranks(summary: Summary) -> str:
    return count_of(summary.world_size, _device(summary) if summary.device else "rank")


def _share(part: float | None, whole: float | None) -> str:
    return format_percent(part / whole) if whole and part is not None else NA
