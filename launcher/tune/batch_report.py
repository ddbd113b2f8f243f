"""A search of the micro batch as a Report, from tune.json, partial or whole."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bert_dp.cost import GIB
from launcher.report.measured import settings_sections, status_verdicts, subtitle
from launcher.report.model import Axis, Bars, Figure, Line, Mark, Report, Rule, Section, Table, Tile, Verdict
from launcher.report.numbers import (
    NA,
    count_of,
    format_count,
    format_duration,
    format_gib,
    format_interval,
    format_percent,
    format_ratio,
    format_si,
)
from launcher.report.parts import folded
from launcher.report.quantities import Computed, Quantity, at, table
from launcher.results import BatchChoice, BatchMemory, SizeResult, SizeStatus, TimedRun, TriedSize, TuneBatch
from launcher.tune import FILE, curve
from launcher.tune.search import train_command

FAR = 3.0  # times what was measured: a limit or an end of an interval above is said, not drawn
STEADY = (0.97, 1.03)  # of the first size's rate, when it runs again at the end
LIMITS = {
    "memory": "Larger sizes do not fit the memory of a rank.",
    "budget": "The budget left no time for larger sizes; --budget raises it.",
    "global batch": "Tried up to the largest size that the global batch allows.",
}
LOST: dict[SizeStatus, str] = {
    "oom": "out of memory",
    "over": "above the limit",
    "thrash": "allocator retried",
    "failed": "failed",
}
SIZES = (
    Quantity("accumulation", "accumulation", "count"),
    Quantity("status", "status", "word"),
    Quantity("samples_per_s", "sequences/s"),
    Quantity("samples_per_s_ci95.low", "95 % from"),
    Quantity("samples_per_s_ci95.high", "to"),
    Quantity("relative", "share of the best", "percent"),
    Quantity("predicted_gib", "peak, predicted", "gib"),
    Quantity("measured_gib", "peak, measured", "gib"),
    Quantity("runs", "runs", "count"),
)
TRIED = (
    Quantity("status", "status", "word"),
    Quantity("predicted_gib", "peak, predicted", "gib"),
    Quantity("measured_gib", "peak, measured", "gib"),
    Quantity("rank", "of rank", "count"),
)
GOODPUT = (
    Quantity("samples_per_s", "sequences/s"),
    Quantity("efficiency", "efficiency", "percent"),
    Quantity("goodput", "goodput"),
    Quantity("low", "95 % from"),
    Quantity("high", "to"),
)
SETTINGS = (
    Quantity("global_batch", "global batch, sequences", "count"),
    Quantity("sequence_length", "tokens per sequence", "count"),
    Quantity("ranks", "ranks", "count"),
    Quantity("dp", "replicas (dp)", "count"),
    Quantity("tensor", "tensor-parallel size", "count"),
    Quantity("engine", "engine", "word"),
    Quantity("launcher", "launcher", "word"),
    Quantity("device", "device", "word"),
    Quantity("trials", "trials", "count"),
    Quantity("seconds", "time", "duration"),
    Quantity("budget_s", "budget", "duration"),
    Quantity("trial_samples", "sequences in a trial's step", "count"),
    Quantity("order", "order of the trials, micro batches", "word"),
    Quantity("drift.ratio", "first size, last rate / first", "ratio"),
)


def batch_report(tune: TuneBatch, folder: Path) -> Report:
    """The choice and reasons to doubt it, figures, and every size. `folder` holds tune.json."""
    length, engine = format_count(tune.sequence_length), tune.engine or "engine not recorded"
    method = [
        f"global batch {format_count(tune.global_batch)}, sequences of {length} tokens",
        f"{engine} on {count_of(tune.ranks, 'rank')}",
        f"{count_of(tune.trials, 'trial')} in {format_duration(tune.seconds)}",
    ]
    return Report(
        "bert-dp: tuned micro batch",
        subtitle(tune, method, tune.device),
        [*status_verdicts(tune, FILE), *_lost(tune), _choice(tune), _noise(tune), *_goodput_verdict(tune)],
        _tiles(tune),
        [
            Section("Sizes", tables=[_sizes(tune)]),
            Section(
                "",
                [throughput_figure(tune), memory_figure(tune), parts_figure(tune), goodput_figure(tune)],
                console=False,
            ),
            *_details(tune),
            *settings_sections(tune, SETTINGS),
        ],
        next=train_command(folder) if tune.choice else "",
    )


def _sizes_of(tune: TuneBatch) -> list[SizeResult]:
    return tune.sizes or []


# --- findings


def _lost(tune: TuneBatch) -> list[Verdict]:
    """The sizes that have no throughput, and why."""
    why = [
        f"micro batch {format_count(s.micro_batch)}: {s.status}: {s.why}" for s in _sizes_of(tune) if s.why
    ]
    return [Verdict("info", "Sizes without a throughput:", why)] if why else []


def _choice(tune: TuneBatch) -> Verdict:
    choice = tune.choice
    if choice is None:
        return Verdict("warn", "No micro batch was chosen.")
    micro, best = format_count(choice.micro_batch), format_count(choice.best_micro_batch)
    share = "the best" if micro == best else f"{format_percent(choice.share_of_best)} of the best ({best})"
    rate = format_si(choice.samples_per_s, "sequences/s")
    text = f"Micro batch {micro}, accumulation {format_count(choice.accumulation)}: {rate}, {share}."
    doubts = _doubts(tune, choice)
    parts_gib = (tune.memory and tune.memory.parts_gib) or {}
    parts = ", ".join(f"{name} {format_gib(gib)}" for name, gib in parts_gib.items())
    notes = [
        f"{choice.why[:1].upper()}{choice.why[1:]}." if choice.why else "",
        LIMITS.get(choice.limited_by or "", ""),
        f"Memory of a rank at this size: {parts}." if parts else "",
        *doubts,
        "From the cache: nothing was run anew; --fresh measures again." if tune.cached else "",
    ]
    return Verdict("warn" if doubts else "ok", text, [*filter(None, notes)])


def _doubts(tune: TuneBatch, choice: BatchChoice) -> list[str]:
    """Reasons to doubt the choice."""
    doubts = []
    if choice.not_settled:
        unsure = ", ".join(map(format_count, choice.not_settled))
        doubts.append(f"Not settled: micro batch {unsure} may also reach 97 % of the best; raise --budget.")
    if (drift := tune.drift) is not None and not STEADY[0] <= drift.ratio <= STEADY[1]:
        doubts.append(
            f"The machine drifted: micro batch {format_count(drift.micro_batch)} ran at "
            f"{format_si(drift.first, 'sequences/s')} first and at {format_si(drift.last, 'sequences/s')} "
            f"last, {format_ratio(drift.ratio)} of it."
        )
    return doubts


def _noise(tune: TuneBatch) -> Verdict:
    """The noise scale with its equation and its steps; or why there is none."""
    noise = tune.noise
    if noise is None:
        return Verdict("info", "Noise scale: not measured.")
    if noise.noise_scale is None or noise.interval is None:
        return Verdict("info", f"Noise scale: inconclusive: {noise.why or NA}.")
    equal = f" = {noise.trace:.3g} / {noise.grad_sq:.3g}" if noise.trace and noise.grad_sq else ""
    interval = format_interval(noise.interval, format_si)
    text = f"Noise scale: {format_si(noise.noise_scale)} sequences, 95 % interval {interval}."
    start = f"from {noise.init_from}" if noise.init_from else "from random weights"
    notes = [
        f"B_simple = tr(Sigma) / |G|^2{equal}, {format_count(noise.steps)} of {format_count(noise.of_steps)} "
        f"steps {start}; it grows in training."
    ]
    if tune.global_batch is not None:
        worth = format_percent(1 / (1 + tune.global_batch / noise.noise_scale))
        notes.append(
            f"In the declared batch of {format_count(tune.global_batch)} a sequence is worth {worth} of one "
            "in a small batch."
        )
    return Verdict("info", text, notes)


def _goodput_verdict(tune: TuneBatch) -> list[Verdict]:
    """What the recommended global batch gains, and what it asks for."""
    if (gain := tune.goodput) is None:
        return []
    text = f"Goodput (throughput x what a sequence is worth) is greatest at {format_count(gain.recommended)} "
    text += f"sequences, {format_percent(gain.gain)} above the declared {format_count(gain.declared)}."
    interval = " and ".join(map(format_count, gain.recommended_interval))
    notes = [f"At the ends of the noise scale's interval: {interval}."]
    if gain.at_edge:
        notes.append("It is the end of what was looked at, not known to be the top.")
    if gain.recommended != gain.declared:
        notes.append("The global batch never changes by itself, and another one wants another learning rate.")
    return [Verdict("info", text, notes)]


def _tiles(tune: TuneBatch) -> list[Tile]:
    choice, noise, gain = tune.choice, tune.noise, tune.goodput
    limit = tune.memory or BatchMemory()
    chosen = next((s for s in _sizes_of(tune) if choice and s.micro_batch == choice.micro_batch), None)
    rate = choice.samples_per_s if choice else None
    tokens = format_si(rate * tune.sequence_length if rate and tune.sequence_length else None, "tokens/s")
    interval = format_interval(at(chosen, "samples_per_s_ci95"), format_si)
    scale = format_interval(noise.interval, format_si) if noise and noise.interval else ""
    return [
        Tile(
            "Micro batch",
            format_count(choice and choice.micro_batch),
            f"sequences per replica; accumulation {format_count(choice and choice.accumulation)}",
        ),
        Tile("Throughput", format_si(rate, "seq/s"), f"{tokens}, all ranks; 95 % interval {interval}"),
        Tile(
            "Peak memory",
            format_gib(chosen and chosen.measured_gib),
            f"greatest rank; it may use {format_gib(limit.limit_gib)} ({limit.limit_of or NA})",
        ),
        Tile(
            "Noise scale",
            format_si(noise.noise_scale) if noise and scale else "inconclusive",
            f"sequences; 95 % interval {scale}" if scale else (noise and noise.why) or "not measured",
        ),
        Tile(
            "Recommended global batch",
            format_count(gain and gain.recommended),
            f"goodput {format_percent(gain.gain)} above that of the declared {format_count(gain.declared)}"
            if gain
            else "needs a noise scale",
        ),
    ]


# --- figures


def throughput_figure(tune: TuneBatch) -> Figure:
    """Against the micro batch, with its interval, every run, and what a smaller size must reach."""
    sizes = _sizes_of(tune)
    runs = [(float(s.micro_batch), run_rate(tune, run)) for s in sizes for run in s.runs]
    rates = [rate for rate in (*(s.samples_per_s for s in sizes), *(rate for _, rate in runs)) if rate]
    top = FAR * max(rates, default=0.0)
    intervals = [s.samples_per_s_ci95 or (None, None) for s in sizes]
    line = Line(
        "median, 95 % within its runs",
        [float(s.micro_batch) for s in sizes],
        [s.samples_per_s for s in sizes],
        0,
        "both",
        [low for low, _ in intervals],
        [None if high is None else min(high, top) for _, high in intervals],
    )
    best = tune.choice.best_samples_per_s if tune.choice else None
    share = f"{format_percent(curve.WITHIN)} of the best"
    lost = [
        f"{format_count(s.micro_batch)} ({LOST.get(s.status, 'not run')})"
        for s in sizes
        if s.samples_per_s is None
    ]
    note = "At the declared global batch; accumulation follows the micro batch."
    note += f" Without a throughput: {', '.join(lost)}." if lost else ""
    if any(high is not None and high > top for _, high in intervals):
        note += f" Ends of intervals above {format_si(top)} are drawn there."
    return Figure(
        "Throughput against micro batch",
        [line, _marks("each run", runs, 1)],
        Axis("micro batch (sequences)", "count", log=True, ticks=line.x),
        Axis("sequences/s, all ranks", from_zero=True),
        levels=[Rule(share, curve.WITHIN * best, left=True)] if best else [],
        marks=_chosen(tune),
        note=note,
    )


def run_rate(tune: TuneBatch, run: TimedRun) -> float | None:
    """Sequences/s of one run at the declared global batch, as `curve.rate` has it for a size."""
    if not tune.trial_samples:
        return None
    declared = tune.global_batch or tune.trial_samples
    return declared / statistics.fmean(curve.step_times(run, declared / tune.trial_samples))


def memory_figure(tune: TuneBatch) -> Figure:
    """The predicted line, what runs measured, what did not fit, and what a rank may use."""
    memory = tune.memory or BatchMemory()
    sizes: Sequence[TriedSize | SizeResult] = [*memory.tried, *_sizes_of(tune)]
    measured = {(s.micro_batch, s.measured_gib) for s in sizes if s.status == "ok" and s.measured_gib}
    traces = [_marks("measured, greatest rank", sorted(measured), 1)]
    for colour, (status, label) in enumerate(LOST.items(), 3):
        lost = [s for s in memory.tried if s.status == status]
        if lost:
            points = [(s.micro_batch, s.measured_gib or s.predicted_gib) for s in lost]
            traces.append(_marks(label, points, colour))
    note = "No line was made."
    if memory.line is not None and memory.constant_gib is not None:
        most = max((size.micro_batch for size in sizes), default=0)
        if memory.predicted_limit and memory.predicted_limit <= FAR * most:
            most = max(most, memory.predicted_limit)
        across = [0.0, float(most)]
        traces.insert(0, Line("predicted", across, [memory.predicted_gib(x) for x in across], 0, "dashed"))
        note = (
            f"Predicted: {format_gib(memory.predicted_gib(0))} + "
            f"{1024 * memory.line.bytes_per_sequence / GIB:.3g} MiB a sequence "
            f"({memory.line.source or 'source not recorded'}; the program's own "
            f"{format_gib(memory.constant_gib)} measured in one real step). Largest micro batch within the "
            f"limit: {format_count(memory.predicted_limit)}."
        )
    levels, far = _limits(memory, max([value for trace in traces for value in trace.values], default=0.0))
    return Figure(
        "Peak memory against micro batch",
        traces,
        Axis("micro batch (sequences)", "count", from_zero=True),
        Axis("peak memory of a rank (GiB)", from_zero=True),
        levels=levels,
        marks=_chosen(tune),
        note=note + far,
    )


def parts_figure(tune: TuneBatch) -> Figure:
    """The peak of the chosen size in its parts, GiB."""
    parts = (tune.memory and tune.memory.parts_gib) or {}
    source = tune.memory and tune.memory.line and tune.memory.line.source
    micro = tune.choice.micro_batch if tune.choice else None
    rows = [f"micro batch {format_count(micro)}: {format_gib(sum(parts.values()))}"]
    bars = [Bars(name, [gib]) for name, gib in parts.items()]
    note = f"Counted without running ({source or 'source not recorded'}), at the peak of a step."
    x = Axis("peak memory at the chosen size", "gib")
    return Figure("What the memory of a rank is made of", bars, x, Axis(""), rows, note=note)


def goodput_figure(tune: TuneBatch) -> Figure:
    """Throughput x efficiency against the global batch, with the declared and the recommended one."""
    gain = tune.goodput
    points = gain.points if gain else []
    x = [float(point.global_batch) for point in points]
    low, high = [point.low for point in points], [point.high for point in points]
    return Figure(
        "Goodput against global batch",
        [
            Line("goodput, 95 % interval", x, [point.goodput for point in points], 0, "both", low, high),
            Line("throughput", x, [point.samples_per_s for point in points], None, "dashed"),
        ],
        Axis("global batch (sequences)", "si", log=True, ticks=x),
        Axis("sequences/s, worth as in the declared batch", from_zero=True),
        marks=[Mark("declared global batch", gain.declared), Mark("recommended", gain.recommended)]
        if gain
        else [],
        absent="No noise scale, so no goodput.",
    )


def _marks(label: str, points: Sequence[tuple[float, float | None]], colour: int) -> Line:
    return Line(label, [float(x) for x, _ in points], [y for _, y in points], colour, "marks")


def _limits(memory: BatchMemory, highest: float) -> tuple[list[Rule], str]:
    """What a rank may use, as lines; or in words, where that is far above all that was measured."""
    limit = memory.limit_gib
    if limit is None:
        return [], " No limit is known."
    if highest and limit > FAR * highest:
        return [], f" The limit, {format_gib(limit)}, is far above."
    levels = [Rule(f"limit {format_gib(limit)}", limit)]
    if memory.spare:
        left = limit * (1 - memory.spare)
        levels.append(Rule(f"less {format_percent(memory.spare)} spare: {format_gib(left)}", left, left=True))
    return levels, ""


def _chosen(tune: TuneBatch) -> list[Mark]:
    micro = tune.choice.micro_batch if tune.choice else None
    return [Mark(f"chosen: micro batch {format_count(micro)}", micro)] if micro else []


# --- tables


def _sizes(tune: TuneBatch) -> Table:
    sizes = [(format_count(size.micro_batch), size) for size in _sizes_of(tune)]
    return table(sizes, SIZES, corner="micro batch", empty="no size was measured")


def _details(tune: TuneBatch) -> list[Section]:
    """What memory was tried, every run, every global batch."""
    tried = [(format_count(size.micro_batch), size) for size in (tune.memory.tried if tune.memory else ())]
    runs = [(run.name, run) for size in _sizes_of(tune) for run in size.runs]
    points = [(format_count(p.global_batch), p) for p in (tune.goodput.points if tune.goodput else ())]
    tables = {
        "Memory tried": table(tried, TRIED, corner="micro batch"),
        "Runs": table(runs, _run_columns(tune)),
        "Global batches": table(points, GOODPUT, corner="global batch"),
    }
    return [folded(title, each) for title, each in tables.items() if each.rows]


def _run_columns(tune: TuneBatch) -> list[Quantity | Computed]:
    """Of a run: means over its steps."""
    return [
        Computed(lambda run: len(run.step_s), "timed steps", "count"),
        Computed(lambda run: run_rate(tune, run), "sequences/s"),
        Computed(lambda run: statistics.fmean(run.step_s), "step, mean", "seconds"),
        Computed(lambda run: statistics.fmean(run.forward_backward_s), "forward + backward, mean", "seconds"),
        Computed(lambda run: max(run.peak_gib), "peak, greatest rank", "gib"),
        Quantity("alloc_retries", "allocator retries", "count"),
    ]
