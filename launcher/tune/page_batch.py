"""The part of the page of tune.json that a search of the micro batch has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher import builder, figures
from launcher.builder import card
from launcher.report.numbers import (
    NA,
    format_count,
    format_duration,
    format_gib,
    format_percent,
    format_ratio,
    format_si,
    format_step_time,
    number,
)
from launcher.scaling import page as scaling_page
from launcher.scaling import tables, view
from launcher.scaling.view import Column
from launcher.tune import figures_batch
from launcher.tune.figures_batch import positive

STEADY = (0.97, 1.03)  # of the first size's rate, when it runs again at the end
LIMITS = {
    "memory": "Larger sizes do not fit the memory of a rank.",
    "budget": "The budget left no time for larger sizes; --budget raises it.",
    "global batch": "Tried up to the largest size that the global batch allows.",
}
SIZES = (
    Column("accumulation", "accumulation", format_count),
    Column("status", "status", view.format_word),
    Column("samples_per_s", "sequences/s", format_si),
    Column("samples_per_s_ci95.low", "95 % from", format_si),
    Column("samples_per_s_ci95.high", "to", format_si),
    Column("relative", "share of the best", format_percent),
    Column("predicted_gib", "peak, predicted", format_gib),
    Column("measured_gib", "peak, measured", format_gib),
    Column("num_runs", "runs", format_count),
)
RUNS = (
    Column("steps", "timed steps", format_count),
    Column("rate", "sequences/s", format_si),
    Column("step_s", "step, mean", format_step_time),
    Column("forward_backward_s", "forward + backward, mean", format_step_time),
    Column("peak_gib", "peak, greatest rank", format_gib),
    Column("alloc_retries", "allocator retries", format_count),
)
TRIED = (
    Column("status", "status", view.format_word),
    Column("predicted_gib", "peak, predicted", format_gib),
    Column("measured_gib", "peak, measured", format_gib),
    Column("rank", "of rank", format_count),
)
GOODPUT = (
    Column("samples_per_s", "sequences/s", format_si),
    Column("efficiency", "efficiency", format_percent),
    Column("goodput", "goodput", format_si),
    Column("low", "95 % from", format_si),
    Column("high", "to", format_si),
)
SETTINGS = (
    Column("global_batch", "global batch, sequences", format_count),
    Column("sequence_length", "tokens per sequence", format_count),
    Column("ranks", "ranks", format_count),
    Column("dp", "replicas (dp)", format_count),
    Column("tensor", "tensor-parallel size", format_count),
    Column("engine", "engine", view.format_word),
    Column("launcher", "launcher", view.format_word),
    Column("device", "device", view.format_word),
    Column("trials", "trials", format_count),
    Column("seconds", "time", format_duration),
    Column("budget_s", "budget", format_duration),
    Column("trial_samples", "sequences in a trial's step", format_count),
    Column("order", "order of the trials, micro batches", view.format_word),
    Column("drift.ratio", "first size, last rate / first", format_ratio),
)


def method(tune: Mapping[str, Any]) -> str:
    """What was searched, in one line."""
    ranks, trials = format_count(tune.get("ranks")), format_count(tune.get("trials"))
    length = format_count(tune.get("sequence_length"))
    return " \u00b7 ".join(
        [
            f"global batch {format_count(tune.get('global_batch'))}, sequences of {length} tokens",
            f"{tune.get('engine') or 'engine not recorded'} on {ranks} ranks",
            f"{trials} trials in {format_duration(tune.get('seconds'))}",
        ]
    )


def body(tune: Mapping[str, Any]) -> list[str]:
    """Verdict, tiles, figures and tables, as HTML."""
    size = (figures_batch.throughput(tune), figures_batch.memory(tune))
    noise = (figures_batch.efficiency(tune), figures_batch.goodput(tune), figures_batch.norms(tune))
    plot = scaling_page.plot
    return [
        _verdict(tune),
        builder.tiles(_tiles(tune)),
        builder.plot_grid([*map(plot, size), _parts(tune), *map(plot, noise)]),
        _tables(tune),
    ]


def _verdict(tune: Mapping[str, Any]) -> str:
    choice = view.mapped(tune.get("choice"))
    micro, best = format_count(choice.get("micro_batch")), format_count(choice.get("best_micro_batch"))
    if micro == NA:
        return builder.verdict_card("warn", "No micro batch was chosen.")
    share = (
        "the best" if micro == best else f"{format_percent(choice.get('share_of_best'))} of the best ({best})"
    )
    rate = format_si(choice.get("samples_per_s"), "sequences/s")
    text = f"Micro batch {micro}, accumulation {format_count(choice.get('accumulation'))}: {rate}, {share}"
    doubts = _doubts(tune)
    flat = "The curve is flat: every size is within 3 % of the best." if choice.get("flat") is True else ""
    why = flat or _sentence(choice.get("why"))
    cached = (
        "From the cache: nothing was run anew; --fresh measures again." if tune.get("cached") is True else ""
    )
    limit = LIMITS.get(str(choice.get("limited_by")), "")
    use = "To use it: bert-dp train OUT/tuned.yaml (OUT: the directory of tune.json)."
    return builder.verdict_card(
        "warn" if doubts else "ok", text, filter(None, [why, limit, *doubts, cached, use])
    )


def _doubts(tune: Mapping[str, Any]) -> list[str]:
    """What makes the choice less than certain."""
    found = []
    unsure = [format_count(micro) for micro in view.listed(view.at(tune, "choice.not_settled"))]
    if unsure:
        found.append(
            f"Not settled: micro batch {', '.join(unsure)} may also reach 97 % of the best; raise --budget."
        )
    ratio = view.value(tune, "drift.ratio")
    if ratio is not None and not STEADY[0] <= ratio <= STEADY[1]:
        micro = format_count(view.at(tune, "drift.micro_batch"))
        rates = [format_si(view.at(tune, f"drift.{end}"), "sequences/s") for end in ("first", "last")]
        found.append(
            f"The machine drifted: micro batch {micro} ran at {rates[0]} first and at {rates[1]} last, "
            f"{format_ratio(ratio)} of it."
        )
    return found


def _tiles(tune: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    choice, memory = (view.mapped(tune.get(key)) for key in ("choice", "memory"))
    chosen = next(
        (
            size
            for size in figures_batch.micro_batches(tune)
            if size.get("micro_batch") == choice.get("micro_batch")
        ),
        {},
    )
    rate = choice.get("samples_per_s")
    per_s, length = number(rate), positive(tune, "sequence_length")
    tokens = format_si(None if per_s is None or length is None else per_s * length, "tokens/s")
    limit = format_gib(memory.get("limit_gib"))
    found = figures_batch.noise(tune)
    best = view.value(tune, "goodput.recommended")
    gain = f"goodput {format_percent(view.at(tune, 'goodput.gain'))} above that of "
    gain += f"the declared {format_count(tune.get('global_batch'))}"
    return [
        (
            "Micro batch",
            format_count(choice.get("micro_batch")),
            f"sequences per replica; accumulation {format_count(choice.get('accumulation'))}",
        ),
        (
            "Throughput",
            format_si(rate, "seq/s"),
            f"{tokens}, all ranks; 95 % interval "
            f"{' to '.join(format_si(view.value(chosen, f'samples_per_s_ci95.{end}')) for end in view.ENDS)}",
        ),
        (
            "Peak memory",
            format_gib(chosen.get("measured_gib")),
            f"greatest rank; it may use {limit} ({memory.get('limit_of') or NA})",
        ),
        (
            "Noise scale",
            format_si(found[0]) if found else "inconclusive",
            f"sequences; 95 % interval {format_si(found[1])} to {format_si(found[2])}"
            if found
            else str(view.at(tune, "noise.why") or "not measured"),
        ),
        ("Recommended global batch", format_count(best), gain if best is not None else "needs a noise scale"),
    ]


def _parts(tune: Mapping[str, Any]) -> str:
    title = "What the memory of a rank is made of"
    rows = figures_batch.parts(tune)
    bars = figures.bars(title, "peak memory at the chosen size", rows, format_gib, _gib_tick)
    source = view.at(tune, "memory.line.source") or "source not recorded"
    return card(title, f"{bars}{builder.note(f'Counted without running ({source}), at the peak of a step.')}")


def _gib_tick(gib: float) -> str:
    return format_si(gib, "GiB")


def _tables(tune: Mapping[str, Any]) -> str:
    sizes = [
        {**size, "num_runs": len(view.listed(size.get("runs")))} for size in figures_batch.micro_batches(tune)
    ]
    runs = [
        (str(run.get("name")), _run(tune, run))
        for size in sizes
        for run in map(view.mapped, view.listed(size.get("runs")))
    ]
    tried = [entry for entry in view.listed(view.at(tune, "memory.tried")) if isinstance(entry, Mapping)]
    points = [point for point in view.listed(view.at(tune, "goodput.points")) if isinstance(point, Mapping)]
    why = [
        builder.row(f"micro batch {_micro(size)}", [f"{size.get('status')}: {size['why']}"])
        for size in sizes
        if size.get("why")
    ]
    content = tables.grid(sizes, SIZES, [_micro(size) for size in sizes])
    content += f"<h3>Why not</h3>{builder.table(why, 'pairs')}" if why else ""
    content += f"<h3>Memory tried</h3>{tables.grid(tried, TRIED, [_micro(entry) for entry in tried])}"
    folded = [
        (title, tables.grid([cell for _, cell in rows], columns, [name for name, _ in rows]))
        for title, rows, columns in (
            ("Runs", runs, RUNS),
            ("Global batches", [(format_count(p.get("global_batch")), p) for p in points], GOODPUT),
        )
        if rows
    ]
    return card("Sizes (micro batch)", content) + "".join(builder.details(*pair) for pair in folded)


def _run(tune: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """What the table says of a run: means over its steps."""
    steps, passes = (
        [s for s in map(number, view.listed(run.get(key))) if s is not None]
        for key in ("step_s", "forward_backward_s")
    )
    peaks = [gib for gib in map(number, view.listed(run.get("peak_gib"))) if gib is not None]
    return {
        "steps": len(steps),
        "rate": figures_batch.run_rate(tune, run),
        "step_s": sum(steps) / len(steps) if steps else None,
        "forward_backward_s": sum(passes) / len(passes) if passes else None,
        "peak_gib": max(peaks, default=None),
        "alloc_retries": run.get("alloc_retries"),
    }


def _micro(entry: Mapping[str, Any]) -> str:
    return format_count(entry.get("micro_batch"))


def _sentence(text: object) -> str:
    told = str(text or "")
    return f"{told[:1].upper()}{told[1:]}." if told else ""
