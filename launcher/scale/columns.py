"""The columns of every table of a scaling benchmark, and scaling.csv."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_dp import record
from launcher.report.model import QUARTILES
from launcher.report.model import Cell as TableCell
from launcher.report.numbers import format_count, format_si, format_step_time
from launcher.report.quantities import Computed, Quantity, Ratio, cell_of
from launcher.results import Cell, Peak, Profile, Scaling

EFFICIENCY = Ratio("efficiency", "efficiency", "percent", "efficiency_ci95")
SPEEDUP = Ratio("speedup", "speed-up", "ratio", "efficiency_ci95")
CEILING = Ratio("ceiling_efficiency", "ceiling", "percent", "ceiling_efficiency_ci95")
COMMUNICATION = Ratio(
    "communication_efficiency", "communication efficiency", "percent", "communication_efficiency_ci95"
)
EXPOSED = Ratio("exposed_comm_fraction", "exposed", "percent", "communication_efficiency_ci95")
STRAGGLER = Ratio("straggler_ratio", "slowest", "ratio", "straggler_ratio_ci95")
MEASURED_EFFICIENCY = Ratio(
    "measured_efficiency", "efficiency, measured", "percent", "measured_efficiency_ci95"
)
PER_PEAK = (
    Ratio("mfu", "MFU", "percent", "step_time_s.ci95"),
    Ratio("mamfu", "MAMFU", "percent", "step_time_s.ci95"),
)


def _ends(ratio: Ratio) -> tuple[Ratio, Ratio]:
    """The ends of its interval, which are shown where the ratio is."""
    heads = {"low": "95 % from", "high": "to"}
    low, high = (
        Ratio(f"{ratio.interval}.{end}", head, ratio.unit, ratio.interval) for end, head in heads.items()
    )
    return low, high


IDENTITY = (
    *(Quantity(name, name, "word") for name in ("mode", "engine", "launcher", "kind")),
    Quantity("world_size", "N", "count"),
    Quantity("tensor", "tensor", "count"),
    Quantity("micro_batch", "micro batch", "count"),
    Quantity("accumulation", "accumulation", "count"),
    Quantity("global_batch", "global batch", "count"),
    Quantity("repeats", "repeats", "count"),
    Quantity("status", "status", "word"),
    Quantity("of", "control of", "word"),
)
THROUGHPUT = (
    Quantity("steps_per_s", "steps/s"),
    Quantity("global_steps_per_s", "global steps/s"),
    Quantity("samples_per_s", "samples/s"),
    Quantity("tokens_per_s", "tokens/s"),
    Quantity("tokens_per_s_per_gpu", "tokens/s per rank"),
    *PER_PEAK,
    Quantity("energy_j", "energy", "energy"),
    Quantity("energy_j_per_mtoken", "energy per million tokens", "energy"),
)
SCALING = (
    SPEEDUP,
    EFFICIENCY,
    *_ends(EFFICIENCY),
    Ratio("efficiency_ddp1", "against ddp on one rank", "percent", "efficiency_ddp1_ci95"),
    Quantity("ceiling_tokens_per_s", "ceiling, tokens/s"),
    CEILING,
    COMMUNICATION,
    *_ends(COMMUNICATION),
)
TIME = (
    Quantity("step_time_s.median", "step, median", "seconds"),
    Quantity("step_time_s.p95", "p95", "seconds"),
    Quantity("step_time_s.mean", "mean", "seconds"),
    Quantity("step_time_s.ci95.low", "95 % from", "seconds"),
    Quantity("step_time_s.ci95.high", "to", "seconds"),
    Quantity("split_s.data", "data wait", "seconds"),
    Quantity("split_s.forward_backward", "forward + backward", "seconds"),
    Quantity("split_s.exposed_comm", "exposed communication", "seconds"),
    Quantity("split_s.optimizer", "optimizer", "seconds"),
    Quantity("split_s.other", "other", "seconds"),
)
LOST = (
    Quantity("data_wait_fraction", "data wait, of a step", "percent"),
    dataclasses.replace(EXPOSED, head="exposed communication, from the ceiling"),
    Quantity("exposed_comm_ddp_fraction", "the same, DDP's counters", "percent"),
    Quantity("launch_fraction", "host time to launch it", "percent"),
    dataclasses.replace(STRAGGLER, head="straggler ratio"),
    Quantity("straggler_rank", "straggler rank", "count"),
    Quantity("peak_memory_gib", "peak memory, greatest rank", "gib"),
    Quantity("loss.final", "final loss", "nats"),
    Quantity("loss_agrees", "loss agrees", "word"),
    Quantity("loss_deviation", "greatest deviation, relative", "lr"),
    Quantity("flags", "flags", "word"),
)
TOPICS: Mapping[str, Sequence[Quantity]] = {
    "What ran": IDENTITY,
    "Throughput, summed over all ranks": THROUGHPUT,
    "Scaling, against single on one rank": SCALING,
    "Time of a step": TIME,
    "Lost time, memory and loss": LOST,
}
SPLIT = [quantity for quantity in TIME if quantity.path.startswith("split_s.")]


def _efficiency(run: Cell) -> TableCell:
    """With the farther end of its interval beside it."""
    value = cell_of(run, EFFICIENCY)
    if run.efficiency is None or run.efficiency_ci95 is None or value.exact is None:
        return value
    low, high = run.efficiency_ci95
    spread = 100 * max(high - run.efficiency, run.efficiency - low)
    return TableCell(f"{value.text} +-{spread:.1f}", exact=value.exact)


RESULT = (
    Quantity("world_size", "N", "count"),
    Quantity("status", "status", "word"),
    Quantity("steps_per_s", "steps/s"),
    Quantity("tokens_per_s", "tokens/s"),
    Quantity("tokens_per_s_per_gpu", "per rank"),
    SPEEDUP,
    Computed(_efficiency, "efficiency", "percent"),
    dataclasses.replace(COMMUNICATION, head="comm."),
    EXPOSED,
    Quantity("data_wait_fraction", "data", "percent"),
    STRAGGLER,
    Quantity("peak_memory_gib", "memory", "gib"),
)
SETTINGS = (
    Quantity("model", "model", "word"),
    Quantity("parameters", "parameters"),
    Quantity("flops_per_token", "FLOPs per token, forward and backward"),
    Quantity("sequence_length", "tokens per sequence", "count"),
    Quantity("micro_batch", "micro batch, sequences", "count"),
    Quantity("accumulation", "accumulation, micro batches per step", "count"),
    Quantity("global_batch", "global batch of strong scaling, sequences", "count"),
    Quantity("steps", "timed steps per repeat", "count"),
    Quantity("warm_up", "warm-up steps before them", "count"),
    Quantity("repeats", "repeats of a cell", "count"),
    *(
        Quantity(name, name, "word")
        for name in ("gpus", "engines", "launcher", "optimizer", "precision", "compiled", "device")
    ),
)


def _datasheet(peak: Peak) -> TableCell:
    return TableCell(format_si(peak.datasheet_flops, "FLOP/s"))


def _matmul(peak: Peak) -> TableCell:
    return TableCell(format_si(peak.matmul_flops, "FLOP/s"), peak.matmul_precision or "")


def _parts(profile: Profile) -> str:
    names = ("forward", "backward", "optimizer")
    return ", ".join(f"{name} {format_step_time(getattr(profile, f'{name}_s'))}" for name in names)


def _gradients(profile: Profile) -> str:
    return f"{format_count(len(profile.gradients))} tensors, {format_si(profile.size, 'B')}"


PEAKS = (Computed(_datasheet, "peak from the data sheet"), Computed(_matmul, "matmul peak measured here"))
PROFILE = (Computed(_parts, "one rank, one micro batch", "word"), Computed(_gradients, "gradients", "word"))
ORIGIN = (
    Quantity("config_hash", "configuration hash", "word"),
    Quantity("data_hash", "data hash", "word"),
    Computed(lambda scaling: " ".join(scaling.command) or None, "command", "word"),
)
REPEAT = (
    Quantity("steps", "steps", "count"),
    Quantity("steps_per_s", "steps/s"),
    Quantity("tokens_per_s", "tokens/s"),
    Quantity("step_time_s.median", "step, median", "seconds"),
    Quantity("step_time_s.p95", "p95", "seconds"),
)
RANK = (
    *(Quantity(f"step_time_s.{q}", f"step, {q}", "seconds") for q in QUARTILES),
    *(Quantity(f"own_work_s.{q}", f"own work, {q}", "seconds") for q in QUARTILES),
    Quantity("peak_memory_gib", "peak memory", "gib"),
)
LINK = (
    Quantity("bytes", "bytes", "count"),
    Quantity("seconds", "time", "seconds"),
    Quantity("busbw_gb_s", "bus bandwidth, GB/s"),
    Quantity("algbw_gb_s", "bytes / time, GB/s"),
    Quantity("bucket", "a bucket's size", "word"),
)
PREDICTED = (
    Quantity("tensor", "tensor", "count"),
    Quantity("accumulation", "accumulation", "count"),
    Quantity("global_batch", "global batch", "count"),
    Quantity("step_time_s", "step", "seconds"),
    Quantity("exposed_comm_fraction", "exposed communication", "percent"),
    Quantity("tokens_per_s", "tokens/s"),
    Quantity("speedup", "speed-up", "ratio"),
    Quantity("efficiency", "efficiency", "percent"),
)


def csv_rows(scaling: Scaling) -> list[list[str]]:
    """A header and a row per cell. A name is the path into scaling.json, with its unit; unknown is empty."""
    named = [*(q for quantities in TOPICS.values() for q in quantities), Quantity("cause", "cause", "word")]
    rows = [[cell.id, *(_plain(quantity.of(cell)) for quantity in named)] for cell in scaling.cells]
    return [["id", *(quantity.path for quantity in named)], *rows]


def write_csv(scaling: Scaling, out: Path) -> None:
    """Write `csv_rows(scaling)` to `out`, atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(scaling))
    record.write_text(out, record.safe(text.getvalue()))


def _plain(value: object) -> str:
    """A number with all its digits."""
    if value is None:
        return ""
    if isinstance(value, TableCell):
        return value.text
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
