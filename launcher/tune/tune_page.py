"""Build the reports of `tune batch` and `tune lr` from tune.json."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from bert_dp.files.models import HeldOut
from launcher import results
from launcher.report import formats, page, run_page
from launcher.report.formats import count_of, format_count, format_gib, format_lr, format_si
from launcher.report.page import Figure, Line, Quantity, ReferenceLine, Report, ReportSection, Table, Verdict
from launcher.tune import TUNED
from launcher.tune.lr_search import LrTrial, Rung, TuneLr
from launcher.tune.throughput import MEMORY_SHARE, MIN_SHARE_OF_BEST, BatchTrial, TuneBatch, run_rate

MAX_LIMIT_RATIO = 3.0  # a memory limit above this multiple of the largest peak is not drawn
LIMITS = {
    "memory": "Larger sizes do not fit in the memory of a rank.",
    "budget": "The budget left no time for larger sizes; raise --budget.",
    "global batch": "The largest size that the global batch allows was tried.",
}
SIZE_COLUMNS = (
    Quantity("status", "status", "word"),
    Quantity("samples_per_s", "sequences/s"),
    Quantity("samples_per_s_ci95.low", "95 % interval from"),
    Quantity("samples_per_s_ci95.high", "to"),
    Quantity("peak_gib", "peak", "gib"),
    Quantity("runs", "runs", "count"),
)


def tune_page(path: Path) -> Report:
    """Build the report of either search from its tune.json. Raise ConfigError if the file is damaged."""
    data = results.load(path, TuneBatch.hint)
    if isinstance(data, dict) and data.get("kind") == "lr":
        return lr_page(results.parse(data, TuneLr, str(path)), path.parent)
    return batch_page(results.parse(data, TuneBatch, str(path)), path.parent)


def train_command(folder: Path) -> str:
    """Return the command that trains with the tuned configuration."""
    return f"bert-dp train {shlex.quote(str(folder / TUNED))}"


def _lost(trials: Sequence[BatchTrial | LrTrial]) -> list[Verdict]:
    lines = [f"{trial.name}: {trial.status}: {trial.reason}" for trial in trials if trial.reason]
    return [Verdict("info", f"{count_of(len(lines), 'trial')} without a result:", lines)] if lines else []


def _marks(label: str, points: Sequence[tuple[float, float | None]], colour: int) -> Line:
    return Line(label, [float(x) for x, _ in points], [y for _, y in points], colour, "marks")


# --- the micro batch


def batch_page(tune: TuneBatch, folder: Path) -> Report:
    """Build the report of a micro-batch search. `folder` contains tune.json."""
    method = [
        f"global batch {format_count(tune.global_batch)}",
        f"{count_of(len(tune.trials), 'run')} in {formats.format_duration(tune.seconds or 0.0)}",
    ]
    sizes = [(format_count(size.micro_batch), size) for size in tune.sizes]
    result = page.table(sizes, SIZE_COLUMNS, corner="micro batch", empty="no size was measured")
    return Report(
        "bert-dp: tuned micro batch",
        page.subtitle(tune, method),
        [*page.status_verdicts(tune), *_lost(tune.trials), _batch_choice(tune), _noise(tune)],
        sections=[
            ReportSection("Sizes", tables=[result]),
            ReportSection("", [throughput_figure(tune), memory_figure(tune)], console=False),
        ],
        next=train_command(folder) if tune.choice else "",
    )


def _batch_choice(tune: TuneBatch) -> Verdict:
    choice = tune.choice
    if choice is None:
        return Verdict("warn", "No micro batch was chosen.")
    share = "the fastest" if len(tune.sizes) > 1 else "the only timed size"
    if choice.micro_batch != choice.fastest_micro_batch:
        fastest = format_count(choice.fastest_micro_batch)
        share = f"{formats.format_percent(choice.share_of_best)} of the rate of the fastest size ({fastest})"
    notes = [LIMITS[choice.limited_by]]
    if choice.not_settled:
        sizes = ", ".join(map(format_count, choice.not_settled))
        notes.append(f"Sizes that may be a better choice: {sizes}. A larger --budget can settle the choice.")
    chosen = f"Micro batch {format_count(choice.micro_batch)}, accumulation {choice.accumulation}"
    text = f"{chosen}: {format_si(choice.samples_per_s, 'sequences/s')}, {share}."
    return Verdict("warn" if choice.not_settled else "ok", text, notes)


def _noise(tune: TuneBatch) -> Verdict:
    noise = tune.noise
    if noise is None:
        return Verdict("info", "Noise scale: not measured.")
    if noise.noise_scale is None or noise.interval is None:
        return Verdict("info", f"Noise scale: inconclusive: {noise.reason or formats.NA}.")
    weights = tune.config.get("run", {}).get("init_from") or "random weights"
    efficiency = formats.format_percent(1 / (1 + tune.global_batch / noise.noise_scale))
    notes = [
        f"Measured over {format_count(noise.steps)} steps, starting from {weights}. "
        "The noise scale grows during training.",
        f"In the global batch of {format_count(tune.global_batch)}, a sequence contributes {efficiency} "
        "of what it would contribute in a very small batch.",
    ]
    interval = formats.format_interval(noise.interval, format_si)
    text = f"Noise scale: {format_si(noise.noise_scale)} sequences, 95 % interval {interval}."
    return Verdict("info", text, notes)


def throughput_figure(tune: TuneBatch) -> Figure:
    """Plot throughput against micro batch: means with intervals, each run, and 97 % of the best mean."""
    ran = {size.micro_batch: size for size in tune.sizes if size.samples_per_s is not None}
    x, means = list(map(float, ran)), [size.samples_per_s for size in ran.values()]
    rates = [(t.micro_batch, run_rate(t, tune.global_batch)) for t in tune.trials if t.micro_batch in ran]
    intervals = [size.samples_per_s_ci95 or (None, None) for size in ran.values()]
    lows, highs = [low for low, _ in intervals], [high for _, high in intervals]
    best = max((mean or 0.0 for mean in means), default=None)
    return Figure(
        "Throughput against micro batch",
        [Line("mean, 95 % interval", x, means, 0, "both", lows, highs), _marks("each run", rates, 1)],
        page.Axis("micro batch (sequences)", "count", log=True, ticks=x),
        page.Axis("sequences/s, all ranks", from_zero=True),
        levels=[ReferenceLine("97 % of the fastest", MIN_SHARE_OF_BEST * best, left=True)] if best else [],
        marks=_chosen(tune),
        note="At the configured global batch; accumulation depends on the micro batch.",
    )


def memory_figure(tune: TuneBatch) -> Figure:
    """Plot the memory peaks, the line through the two largest sizes, and the memory that a size may use."""
    line, limit, trials = tune.memory_line, tune.memory_limit_gib, [*tune.memory_trials, *tune.trials]
    peaks = {(trial.micro_batch, trial.peak_gib) for trial in trials if trial.peak_gib is not None}
    traces = [_marks("measured, highest of all ranks", sorted(peaks), 1)]
    if line is not None:
        across = [0.0, float(max(micro for micro, _ in peaks))]
        label = "line through the two largest sizes"
        traces.insert(0, Line(label, across, [line.gib(x) for x in across], 0, "dashed"))
    highest = max([value for trace in traces for value in trace.values], default=0.0)
    levels, share = [], formats.format_percent(MEMORY_SHARE)
    if limit is not None and limit <= MAX_LIMIT_RATIO * highest:
        levels = [ReferenceLine(f"{share} of the memory of a rank", MEMORY_SHARE * limit)]
    return Figure(
        "Peak memory against micro batch",
        traces,
        page.Axis("micro batch (sequences)", "count", from_zero=True),
        page.Axis("peak memory of a rank (GiB)", from_zero=True),
        levels=levels,
        marks=_chosen(tune),
        note="" if limit is None else f"A rank has {format_gib(limit)}, of which a size may use {share}.",
    )


def _chosen(tune: TuneBatch) -> list[ReferenceLine]:
    micro = tune.choice.micro_batch if tune.choice else None
    return [ReferenceLine(f"chosen: micro batch {format_count(micro)}", micro)] if micro else []


# --- the learning rate


def lr_page(tune: TuneLr, folder: Path) -> Report:
    """Build the report of a learning-rate search. `folder` contains tune.json."""
    method = [
        f"whole runs of {format_si(tune.tokens, 'tokens')}",
        f"{count_of(len(tune.trials), 'trial')}, {formats.format_duration(tune.seconds or 0.0)} in total",
    ]
    return Report(
        "bert-dp: tuned learning rate",
        page.subtitle(tune, method),
        [*page.status_verdicts(tune), _lr_choice(tune, folder), *_lost(tune.trials)],
        sections=[
            ReportSection("", [loss_figure(tune), range_figure(tune)], console=False),
            ReportSection("Last rung", tables=[_last_rung(tune)]),
        ],
        next=train_command(folder) if tune.choice else "",
    )


def _lr_choice(tune: TuneLr, folder: Path) -> Verdict:
    choice = tune.choice
    if choice is None:
        return Verdict("warn", f"No learning rate was chosen; the logs are in {folder / 'trials'}.")
    trials, notes = _last(tune).trials, []
    heldout = next((t.heldout for t in trials if t.lr == choice.lr and t.heldout), HeldOut())
    if choice.lead is not None:
        notes.append(f"The loss is {formats.format_nats(choice.lead)} lower than at the next best rate.")
    if choice.tied:
        notes.append(f"Rates that are not significantly worse: {', '.join(map(format_lr, choice.tied))}.")
    if choice.edge_side:
        side = {"low": "lower", "high": "higher"}[choice.edge_side]
        notes.append(f"No {side} rate was measured, so the best rate may be {side}.")
    loss = run_page.loss_text(choice.heldout_loss, heldout, finite_losses(_last(tune), choice.lr))
    seeds = count_of(choice.seeds, "seed")
    text = f"Learning rate {format_lr(choice.lr)}: held-out loss {loss}, mean of {seeds}."
    return Verdict("warn" if choice.edge_side else "ok", text, notes)


def finite_losses(rung: Rung, lr: float) -> list[float]:
    """Return the held-out losses of a rate, without those of failed or diverged trials."""
    return [score for score in rung.scores(lr) if score < math.inf]


def loss_figure(tune: TuneLr) -> Figure:
    """Plot held-out loss against rate: a line for each rung, and a mark for each seed of the last rung."""
    lines: list[Line] = []
    for colour, rung in enumerate(tune.rungs):
        name = f"{format_si(rung.tokens, 'tokens')}, {count_of(len(rung.seeds), 'seed')}"
        lines.append(
            Line(name, rung.rates, [formats.number(rung.mean(lr)) for lr in rung.rates], colour, "both")
        )
    if len(tune.rungs) > 1:
        seeds = [(lr, loss) for lr in _last(tune).rates for loss in finite_losses(_last(tune), lr)]
        lines.append(_marks("one seed of the last rung", seeds, 1))
    return Figure(
        "Held-out loss against learning rate",
        lines,
        page.Axis("learning rate", "lr", log=True, ticks=sorted({trial.lr for trial in tune.trials})),
        page.Axis("held-out loss (nats per masked token)", "nats"),
        marks=[ReferenceLine(f"chosen: {format_lr(tune.choice.lr)}", tune.choice.lr)] if tune.choice else [],
        note="Lines: mean over seeds. The loss axis does not start at 0.",
    )


def range_figure(tune: TuneLr) -> Figure:
    """Plot the training loss of the range test against its rising rate, with the divergence edge."""
    test = tune.range_test
    points = test.points if test else []
    edge = test.edge if test else None
    return Figure(
        "Range test",
        [Line("training loss", [lr for lr, _ in points], [loss for _, loss in points])],
        page.Axis("learning rate", "lr", log=True),
        page.Axis("training loss (nats per masked token)", "nats", log=True),
        marks=[ReferenceLine(f"divergence edge: {format_lr(edge)}", edge)] if edge is not None else [],
        note=test.reason if test else "",
    )


def _last(tune: TuneLr) -> Rung:
    return tune.rungs[-1] if tune.rungs else Rung(tokens=0, seeds=[])


def _last_rung(tune: TuneLr) -> Table:
    last = _last(tune)
    columns = [
        Quantity(last.mean, "mean", "nats"),
        Quantity(lambda lr: len(finite_losses(last, lr)), "seeds", "count"),
    ]
    rates = [(format_lr(lr), lr) for lr in sorted(last.rates, key=last.mean)]
    return page.table(rates, columns, corner="held-out loss", empty="no trial recorded")
