"""The columns that describe a cell of scaling.json: of the page's tables and of scaling.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_dp import record
from launcher.report.quantities import Quantity, at
from launcher.results import Scaling

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
    Quantity("mfu", "MFU", "percent"),
    Quantity("mamfu", "MAMFU", "percent"),
    Quantity("energy_j", "energy", "energy"),
    Quantity("energy_j_per_mtoken", "energy per million tokens", "energy"),
)
SCALING = (
    Quantity("speedup", "speed-up", "ratio"),
    Quantity("efficiency", "efficiency", "percent"),
    Quantity("efficiency_ci95.low", "95 % from", "percent"),
    Quantity("efficiency_ci95.high", "to", "percent"),
    Quantity("efficiency_ddp1", "against ddp on one rank", "percent"),
    Quantity("ceiling_tokens_per_s", "ceiling, tokens/s"),
    Quantity("ceiling_efficiency", "ceiling", "percent"),
    Quantity("communication_efficiency", "communication efficiency", "percent"),
    Quantity("communication_efficiency_ci95.low", "95 % from", "percent"),
    Quantity("communication_efficiency_ci95.high", "to", "percent"),
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
    Quantity("exposed_comm_fraction", "exposed communication, from the ceiling", "percent"),
    Quantity("exposed_comm_ddp_fraction", "the same, DDP's counters", "percent"),
    Quantity("launch_fraction", "host time to launch it", "percent"),
    Quantity("straggler_ratio", "straggler ratio", "ratio"),
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


def csv_rows(scaling: Scaling) -> list[list[str]]:
    """A header and a row per cell. A name is the path into scaling.json, with its unit; unknown is empty."""
    paths = ["id", *(q.path for quantities in TOPICS.values() for q in quantities), "cause"]
    return [paths, *([_plain(at(cell, path)) for path in paths] for cell in scaling.cells)]


def write_csv(scaling: Scaling, out: Path) -> None:
    """Write `csv_rows(scaling)` to `out`, atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(scaling))
    record.write_text(out, record.safe(text.getvalue()))


def _plain(value: object) -> str:
    """A number with all its digits."""
    if value is None:
        return ""
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
