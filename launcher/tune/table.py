"""A batch search on the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bert_dp.record import safe
from launcher.report.numbers import NA, format_count, format_gib, format_percent, format_si

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

HEADS = ("micro batch", "accum.", "status", "sequences/s", "95 %", "of best", "predicted", "peak", "runs")


def batch_table(tune: Mapping[str, Any]) -> Group:
    """Sizes, memory, choice, noise scale, goodput."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_sizes(tune)] if tune.get("sizes") else []
    return Group(*parts, *(Text(safe(line)) for line in batch_lines(tune)))


def _sizes(tune: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for size in tune["sizes"]:
        between = size["samples_per_s_ci95"]
        table.add_row(
            format_count(size["micro_batch"]),
            format_count(size["accumulation"]),
            size["status"],
            format_si(size["samples_per_s"]),
            "-".join(format_si(end) for end in between) if between else NA,
            format_percent(size["relative"]),
            format_gib(size["predicted_gib"]),
            format_gib(size["measured_gib"]),
            str(len(size["runs"])),
        )
    return table


def batch_lines(tune: Mapping[str, Any]) -> Iterator[str]:
    """What was found, in words."""
    memory, choice, noise, gain = (tune.get(name) for name in ("memory", "choice", "noise", "goodput"))
    for size in tune.get("sizes") or ():
        if size["why"]:
            yield f"micro batch {size['micro_batch']}: {size['status']}: {size['why']}"
    if memory and memory.get("parts_gib") and choice:
        parts = ", ".join(f"{name} {size:.2f}" for name, size in memory["parts_gib"].items())
        yield f"memory at micro batch {choice['micro_batch']}: {parts} GiB ({memory['line']['source']})"
    drift = tune.get("drift")
    if drift and abs(drift["ratio"] - 1) > 0.03:
        yield (
            f"drift: micro batch {drift['micro_batch']} ran {format_percent(drift['ratio'])} as fast at "
            "the end of the first round as at its start: the machine changed meanwhile"
        )
    if choice:
        yield (
            f"choice: batch.micro_size {choice['micro_batch']} x accumulation {choice['accumulation']}: "
            f"{format_si(choice['samples_per_s'], 'sequences/s')}, "
            f"{format_percent(choice['share_of_best'])} of the best ({choice['best_micro_batch']}); "
            f"{choice['why']}"
        )
        if choice["not_settled"]:
            sizes = ", ".join(map(str, choice["not_settled"]))
            yield f"  not settled for {sizes}: within the spread of the runs; a longer --budget tells"
        if choice["limited_by"] != "global batch":
            why = {"memory": "do not fit the memory", "budget": "were not tried: the budget"}
            yield f"  larger sizes {why[choice['limited_by']]}"
    if noise:
        yield f"noise scale: {noise_line(noise)}"
    if gain:
        low, high = gain["recommended_interval"]
        more = f"{100 * gain['gain']:+.1f} %"
        yield (
            f"global batch: {gain['declared']} as declared stays; most goodput (sequences/s x what "
            f"each is worth) at {gain['recommended']} [{low}, {high}]: {more}"
        )
        if gain.get("at_edge"):
            yield "  that is the end of what was looked at, not known to be the top"


def noise_line(noise: Mapping[str, Any]) -> str:
    """The noise scale with its interval, or why there is none."""
    if noise["noise_scale"] is None:
        return f"inconclusive: {noise['why']}"
    low, high = noise["interval"]
    start = f"from {noise['init_from']}" if noise.get("init_from") else "from fresh weights"
    return (
        f"{format_si(noise['noise_scale'])} sequences [{format_si(low)}, {format_si(high)}] = "
        f"tr(Sigma) / |G|^2 over {noise['steps']} steps {start}; it grows in training"
    )
