"""What each figure of a search of the micro batch shows, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bert_dp.cost import GIB
from launcher import plots
from launcher.figures import Bar
from launcher.report.numbers import format_count, format_gib, format_percent, format_si, number
from launcher.scaling import view
from launcher.scaling.figures import Figure
from launcher.tune.curve import WITHIN

FAR = 3.0  # times what was measured: a limit or an end of an interval above is told, not drawn
OCTAVES = 12  # at most, on each side of the declared global batch
MICRO = "micro batch (sequences)"
GLOBAL = "global batch (sequences), log scale"
LOST = {"oom": "out of memory", "over": "above the limit", "thrash": "allocator retried", "failed": "failed"}


def micro_batches(tune: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sizes of the curve, as far as each has a micro batch."""
    found = [size for size in view.listed(tune.get("sizes")) if positive(size, "micro_batch") is not None]
    return sorted(found, key=lambda size: positive(size, "micro_batch") or 0.0)


def positive(tree: object, path: str) -> float | None:
    """The number at `path` where it is above 0."""
    found = view.value(view.mapped(tree), path)
    return found if found is not None and found > 0 else None


def run_rate(tune: Mapping[str, Any], run: Mapping[str, Any]) -> float | None:
    """Sequences/s of one run at the declared global batch, as `curve.rate` has it for a size.

    A trial's step may take fewer sequences than the declared one: then forward and backward count as often as
    they would, reduction and update once.
    """
    step, passes = (
        [number(s) for s in view.listed(run.get(key))] for key in ("step_s", "forward_backward_s")
    )
    samples = positive(tune, "trial_samples")
    whole = positive(tune, "global_batch") or samples
    if samples is None or whole is None or not step or None in step:
        return None
    more = whole / samples - 1
    if more and (len(passes) != len(step) or None in passes):
        return None
    exposed = number(run.get("exposed_s")) or 0.0
    whole_s = sum(s for s in step if s is not None)
    total = whole_s + more * sum(max(0.0, s - exposed) for s in passes if s is not None)
    return number(whole * len(step) / total) if total > 0 else None


def throughput(tune: Mapping[str, Any]) -> Figure:
    """Against the micro batch, with its interval, every run, and what a smaller size must reach."""
    line: list[plots.Point] = []
    dots: list[plots.Point] = []
    band = []
    for size in micro_batches(tune):
        micro = positive(size, "micro_batch") or 0.0
        line.append((micro, _or_gap(view.value(size, "samples_per_s"))))
        low, high = (_or_gap(view.value(size, f"samples_per_s_ci95.{end}")) for end in view.ENDS)
        band.append((micro, low, high))
        runs = [run_rate(tune, view.mapped(run)) for run in view.listed(size.get("runs"))]
        dots += [(micro, rate) for rate in runs if rate is not None]
    top = FAR * max([rate for _, rate in [*line, *dots] if math.isfinite(rate)], default=math.inf)
    cut = any(high > top for _, _, high in band)
    drawn = [(micro, low, min(high, top) if math.isfinite(high) else high) for micro, low, high in band]
    series = [
        plots.Series("median, 95 % within its runs", line, 0, "shaped", drawn),
        plots.Series("each run", dots, 1, "dots"),
    ]
    ticks = [x for x, _ in line]
    x = plots.Axis(f"{MICRO}, log scale", format_count, log=True, ticks=ticks, pad=0.05)
    y = plots.Axis("sequences/s, all ranks", format_si, from_zero=True)
    best = positive(tune, "choice.best_samples_per_s")
    levels = (
        [plots.Level(f"{WITHIN:.0%} of the best".replace("%", " %"), WITHIN * best, left=True)]
        if best
        else []
    )
    lost = [
        f"{format_count(size.get('micro_batch'))} ({_ended(size)})"
        for size in micro_batches(tune)
        if view.value(size, "samples_per_s") is None
    ]
    note = "At the declared global batch; accumulation follows the micro batch."
    note += f" Without a throughput: {', '.join(lost)}." if lost else ""
    note += f" Ends of intervals above {format_si(top)} are drawn there." if cut else ""
    return Figure("Throughput against micro batch", series, x, y, levels, _chosen(tune), note)


def memory(tune: Mapping[str, Any]) -> Figure:
    """The predicted line, what runs measured, what did not fit, and what a rank may use."""
    found = view.mapped(tune.get("memory"))
    intercept, slope = predicted(found)
    tried = [entry for entry in view.listed(found.get("tried")) if positive(entry, "micro_batch") is not None]
    measured = {
        (positive(e, "micro_batch") or 0.0, gib)
        for e in [*tried, *micro_batches(tune)]
        if (gib := positive(e, "measured_gib")) is not None and e.get("status") in ("ok", None)
    }
    lost: dict[str, list[plots.Point]] = {}
    for entry in tried:
        micro = positive(entry, "micro_batch") or 0.0
        gib = positive(entry, "measured_gib") or positive(entry, "predicted_gib") or intercept + slope * micro
        if entry.get("status") not in ("ok", None):
            lost.setdefault(_ended(entry), []).append((micro, gib))
    sizes = {positive(e, "micro_batch") or 0.0 for e in [*tried, *micro_batches(tune)]}
    most, limit = max(sizes, default=0.0), positive(found, "predicted_limit") or 0.0
    most = limit if most < limit <= FAR * most or not most else most
    line = [(0.0, intercept), (most, number(intercept + slope * most) or math.nan)] if most else []
    series = [
        plots.Series("predicted", line, 0, "rule"),
        plots.Series("measured, greatest rank", sorted(measured), 1, "dots"),
        *[plots.Series(status, points, 3 + i, "dots") for i, (status, points) in enumerate(lost.items())],
    ]
    highest = max([gib for s in series for _, gib in s.points if math.isfinite(gib)], default=0.0)
    levels, far = _limits(found, highest)
    x = plots.Axis(MICRO, format_count, from_zero=True, ticks=sorted(sizes))
    y = plots.Axis("peak memory of a rank (GiB)", format_si, from_zero=True)
    return Figure(
        "Peak memory against micro batch", series, x, y, levels, _chosen(tune), _line_note(found) + far
    )


def predicted(memory: Mapping[str, Any]) -> tuple[float, float]:
    """(GiB at no sequence, GiB a sequence) of the line; NaN where it is not known."""
    constant, intercept, slope = (
        view.value(memory, path)
        for path in ("constant_gib", "line.intercept_bytes", "line.bytes_per_sequence")
    )
    known = None if constant is None or intercept is None else number(constant + intercept / GIB)
    return _or_gap(known), math.nan if slope is None else slope / GIB


def parts(tune: Mapping[str, Any]) -> list[Bar]:
    """The peak of the chosen size in its parts, GiB."""
    found = view.mapped(view.at(tune, "memory.parts_gib"))
    amounts = {str(name): max(0.0, number(gib) or 0.0) for name, gib in found.items()}
    return [Bar(f"micro batch {format_count(view.at(tune, 'choice.micro_batch'))}", amounts)]


def efficiency(tune: Mapping[str, Any]) -> Figure:
    """What a sequence of a batch is worth, by the noise scale and its interval; with the declared batch."""
    title = "Noise scale and what a sequence is worth"
    x = plots.Axis(GLOBAL, format_si, log=True)
    y = plots.Axis("efficiency, 1 / (1 + batch / noise scale)", format_percent, from_zero=True)
    found, declared = noise(tune), declared_batch(tune)
    if found is None:
        return Figure(title, [], x, y, absent=noise_text(tune))
    scale, low, high = found
    middle = declared or scale
    octaves = [math.log2(end / middle) for end in (low, high)]
    first, last = max(-OCTAVES, min(-4, math.floor(octaves[0]))), min(OCTAVES, max(4, math.ceil(octaves[1])))
    batches = [middle * 2.0**k for k in range(first, last + 1)]
    low, high, scale = (min(max(end, batches[0]), batches[-1]) for end in (low, high, found[0]))
    series = [
        plots.Series(
            "efficiency, 95 % interval",
            [(b, 1 / (1 + b / found[0])) for b in batches],
            0,
            "line",
            [(b, 1 / (1 + b / found[1]), 1 / (1 + b / found[2])) for b in batches],
        ),
        plots.Series(
            "noise scale, 95 % interval",
            [(scale, 0.0), (scale, 1.0)],
            3,
            "rule",
            [(low, 0.0, 1.0), (high, 0.0, 1.0)],
        ),
        *upright("declared global batch", declared, 1, 1.0),
    ]
    return Figure(title, series, x, y, note=noise_text(tune))


def goodput(tune: Mapping[str, Any]) -> Figure:
    """Throughput x efficiency against the global batch, with the declared and the recommended one."""
    found = view.mapped(tune.get("goodput"))
    points = sorted(
        (b, point)
        for point in map(view.mapped, view.listed(found.get("points")))
        if (b := positive(point, "global_batch")) is not None
    )
    columns = {
        key: [_or_gap(view.value(point, key)) for _, point in points]
        for key in ("goodput", "low", "high", "samples_per_s")
    }
    batches = [b for b, _ in points]
    top = max((v for column in columns.values() for v in column if math.isfinite(v)), default=0.0)
    series = [
        plots.Series(
            "goodput, 95 % interval",
            list(zip(batches, columns["goodput"], strict=True)),
            0,
            "shaped",
            list(zip(batches, columns["low"], columns["high"], strict=True)),
        ),
        plots.Series("throughput", list(zip(batches, columns["samples_per_s"], strict=True)), 6, "soft"),
    ]
    if top > 0:
        series += upright("declared global batch", declared_batch(tune), 1, top)
        series += upright("recommended", positive(found, "recommended"), 2, top)
    x = plots.Axis(GLOBAL, format_si, log=True, ticks=batches, pad=0.03)
    y = plots.Axis("sequences/s, worth as in the declared batch", format_si, from_zero=True)
    told = "" if any(points) else "No noise scale, so no goodput."
    return Figure("Goodput against global batch", series, x, y, note=goodput_text(tune), absent=told)


def norms(tune: Mapping[str, Any]) -> Figure:
    """The squared gradient norms of every step that the noise scale is made of."""
    found: dict[str, list[plots.Point]] = {}
    for line in map(view.mapped, view.listed(view.at(tune, "noise.pairs"))):
        last = view.value(line, "step")
        for key in ("small", "big"):
            values = view.listed(line.get(f"{key}_sq"))
            label = f"batch {format_count(line.get(f'{key}_batch'))}"
            points = (
                [(last - len(values) + i, _or_gap(number(v))) for i, v in enumerate(values, 1)]
                if last
                else []
            )
            found.setdefault(label, []).extend(points)
    series = [plots.Series(label, points, i) for i, (label, points) in enumerate(found.items())]
    x, y = (
        plots.Axis("step", format_count),
        plots.Axis("squared gradient norm, log scale", format_si, log=True),
    )
    note = "Before clipping. The smaller batch: mean over the replicas, or a lone one's first micro batch."
    told = "" if series else "No step was measured."
    return Figure("Squared gradient norms", series, x, y, note=note, absent=told)


def upright(label: str, at: float | None, colour: int, top: float) -> list[plots.Series]:
    """A named vertical line from 0 to `top`, in a colour of its own."""
    return [] if at is None else [plots.Series(label, [(at, 0.0), (at, top)], colour, "rule")]


def declared_batch(tune: Mapping[str, Any]) -> float | None:
    return positive(tune, "goodput.declared") or positive(tune, "global_batch")


def noise(tune: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """(noise scale, low, high) in sequences, where it was found."""
    scale, low, high = (
        positive(tune, f"noise.{path}") for path in ("noise_scale", "interval.low", "interval.high")
    )
    if view.at(tune, "noise.verdict") != "ok" or scale is None or low is None or high is None:
        return None
    return scale, low, high


def noise_text(tune: Mapping[str, Any]) -> str:
    """The noise scale with its equation and its steps; or why there is none."""
    told, found = view.mapped(tune.get("noise")), noise(tune)
    if found is None:
        why = told.get("why")
        return f"Inconclusive: {why}." if why else "Not measured."
    scale, low, high = map(format_si, found)
    parts = [
        f"{view.value(told, key):.3g}" for key in ("trace", "grad_sq") if view.value(told, key) is not None
    ]
    made = f" = {' / '.join(parts)}" if len(parts) == 2 else ""
    start = f"from {told['init_from']}" if told.get("init_from") else "from random weights"
    steps = f"{format_count(told.get('steps'))} of {format_count(told.get('of_steps'))} steps"
    text = f"B_simple = tr(Sigma) / |G|^2{made} = {scale} sequences, 95 % interval {low} to {high}; "
    text += f"{steps}, {start}."
    if (declared := declared_batch(tune)) is None:
        return text
    need = format_percent(1 / (1 + declared / found[0]))
    text += (
        f" In the declared batch of {format_count(declared)} a sequence is worth {need} of one in a small "
    )
    return f"{text}batch."


def goodput_text(tune: Mapping[str, Any]) -> str:
    """What the recommendation gains, and what it asks for."""
    found = view.mapped(tune.get("goodput"))
    best, declared = view.value(found, "recommended"), declared_batch(tune)
    if best is None:
        return ""
    ends = [format_count(view.value(found, f"recommended_interval.{end}")) for end in view.ENDS]
    text = f"Goodput = throughput x efficiency. Its top: {format_count(best)} sequences "
    text += f"(at the ends of the noise scale's interval {' and '.join(ends)}), "
    text += f"{format_percent(found.get('gain'))} above the declared {format_count(declared)}."
    if found.get("at_edge") is True:
        text += " It is the end of what was looked at, not known to be the top."
    if best != declared:
        text += " The global batch never changes by itself, and another one wants another learning rate."
    return text


def _limits(memory: Mapping[str, Any], highest: float) -> tuple[list[plots.Level], str]:
    """What a rank may use, as lines; or in words, where that is far above all that was measured."""
    limit, spare = positive(memory, "limit_gib"), view.value(memory, "spare")
    if limit is None:
        return [], " No limit is known."
    if highest and limit > FAR * highest:
        return [], f" The limit, {format_gib(limit)}, is far above."
    levels = [plots.Level(f"limit {format_gib(limit)}", limit)]
    if spare is not None and 0 < spare < 1:
        left = limit * (1 - spare)
        levels.append(plots.Level(f"less {format_percent(spare)} spare: {format_gib(left)}", left, left=True))
    return levels, ""


def _line_note(memory: Mapping[str, Any]) -> str:
    intercept, slope = predicted(memory)
    if math.isnan(intercept) or math.isnan(slope):
        return "No line was made."
    source = view.mapped(memory.get("line")).get("source") or "source not recorded"
    return (
        f"Predicted: {format_gib(intercept)} + {1024 * slope:.3g} MiB a sequence ({source}; "
        f"the program's own {format_gib(memory.get('constant_gib'))} measured in one real step). "
        f"Largest micro batch within the limit: {format_count(memory.get('predicted_limit'))}."
    )


def _chosen(tune: Mapping[str, Any]) -> list[plots.Mark]:
    micro = positive(tune, "choice.micro_batch")
    return [] if micro is None else [plots.Mark(micro, f"chosen: micro batch {format_count(micro)}")]


def _ended(entry: Mapping[str, Any]) -> str:
    status = str(entry.get("status") or "not run")
    return LOST.get(status, status)


def _or_gap(value: float | None) -> float:
    return math.nan if value is None else value
