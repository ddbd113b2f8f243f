"""Names the bottleneck of each cell, and the fastest engine, with the figures that support it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from launcher.report.numbers import count_of, format_interval, format_percent
from launcher.report.page import Ratio
from launcher.scale.models import BottleneckDiagnosis, CellMeasurement, DiagnosisKind
from launcher.stats import is_measurable

LOADER_BOUND = 0.05  # share of a step spent waiting for data
COMM_BOUND = 0.05  # share of the ceiling lost
CEILING_BOUND = 0.05  # share of N x single that the machine loses without communication
LAUNCH_BOUND = 0.95  # host time of a step over the step
GOOD = 0.95  # efficiency, at the low end of its interval, at which a cell scales
MEASURE_MORE = "more --repeats or --steps"

EFFICIENCY = Ratio("efficiency", "efficiency", "percent", "efficiency_ci95")
CEILING = Ratio("ceiling_efficiency", "ceiling", "percent", "ceiling_efficiency_ci95")
COMMUNICATION = Ratio(
    "communication_efficiency", "communication efficiency", "percent", "communication_efficiency_ci95"
)
STRAGGLER = Ratio("straggler_ratio", "slowest", "ratio", "straggler_ratio_ci95")


def diagnose(cells: Sequence[CellMeasurement]) -> list[BottleneckDiagnosis]:
    """Return one diagnosis per cell of two ranks or more that ended, and one per mode and N of several
    engines."""
    runs = [c for c in cells if c.kind == "run" and c.world_size > 1]
    return [*(diagnose_cell(cell) for cell in runs if cell.status != "pending"), *_compare_engines(runs)]


def diagnose_cell(cell: CellMeasurement) -> BottleneckDiagnosis:
    """Name the greatest loss of a cell."""
    if cell.status == "oom":
        hint = "lower batch.micro_size, or use zero1 or fsdp"
        return _diagnosis(cell, "out_of_memory", str(cell.cause), hint)
    if cell.status != "ok":
        return _diagnosis(cell, "failed", str(cell.cause), "see the logs of its run")
    if cell.efficiency is None:
        return _diagnosis(cell, "no_baseline", "the single-rank cell did not run", "see its cause")
    if cell.efficiency_ci95 is None:
        evidence = f"efficiency {format_percent(cell.efficiency)} of one run, without an interval"
        return _diagnosis(cell, "one_repeat", evidence, "--repeats 3 or more")
    low, high = cell.efficiency_ci95
    reached = f"efficiency {EFFICIENCY.text(cell)}"
    if low > 1:
        evidence = f"{reached}: one rank alone was slower than each of these"
        hint = "measure the baseline again, on the same machine in the same state"
        return _diagnosis(cell, "above_baseline", evidence, hint)
    if losses := sorted(_losses(cell), reverse=True):
        first, *others = losses
        also = "".join(f"; also {_words(loss.kind, loss.detail)}: {loss.evidence}" for loss in others)
        return _diagnosis(cell, first.kind, f"{reached}: {first.evidence}{also}", first.hint, first.detail)
    if not is_measurable(cell.efficiency_ci95):
        return _diagnosis(cell, "not_measurable", reached)
    if low >= GOOD:
        return _diagnosis(cell, "scales", f"{reached}; no loss beyond its bound", "nothing")
    if cell.efficiency >= GOOD:
        evidence = f"{reached} includes less than {format_percent(GOOD)}, from which a cell scales"
        return _diagnosis(cell, "intervals_overlap", evidence)
    if high >= 1:
        return _diagnosis(cell, "intervals_overlap", f"{reached} includes 100 %")
    evidence = f"{reached}; no loss has its whole interval beyond its bound"
    return _diagnosis(cell, "no_single_cause", evidence, f"{MEASURE_MORE}, and look at the split of the step")


class _Loss(NamedTuple):
    """A loss by one cause, whose whole interval lies beyond its bound."""

    share: float
    """Share of a step."""
    kind: DiagnosisKind
    evidence: str
    hint: str
    detail: str = ""
    """Follows the words of the kind."""


def _losses(cell: CellMeasurement) -> list[_Loss]:
    losses = []
    wait, saved = cell.data_wait_fraction or 0.0, cell.loader_fraction or 0.0
    waits = _is_above(cell.data_wait_fraction_ci95, LOADER_BOUND)
    saves = _is_above(cell.loader_fraction_ci95, LOADER_BOUND)
    if waits or saves:
        evidence = f"{_share_text(wait, cell.data_wait_fraction_ci95)} of a step waits for data"
        if saves:
            evidence += f", {_share_text(saved, cell.loader_fraction_ci95)} is saved without the loader"
        share = max(waits * wait, saves * saved)
        losses.append(_Loss(share, "loader_bound", evidence, "raise data.workers"))
    rank, ratio = cell.straggler_rank, cell.straggler_ratio
    if ratio is not None and rank is not None:
        evidence = f"own work of rank {rank} over the others' median, before any reduction: "
        evidence += STRAGGLER.text(cell)
        hint = "look at that device: clocks, links, who else uses it (bert-dp doctor)"
        losses.append(_Loss(1 - 1 / ratio, "straggler", evidence, hint, f" rank {rank}"))
    ceiling, sent = cell.ceiling_efficiency, cell.communication_efficiency
    if ceiling is not None and _is_below(cell.ceiling_efficiency_ci95, 1 - CEILING_BOUND):
        evidence = f"throughput of {cell.world_size} independent copies over that of as many single ranks: "
        evidence += CEILING.text(cell)
        hint = "shared memory bandwidth, power or clocks, which no engine changes"
        losses.append(_Loss(1 - ceiling, "hardware_ceiling", evidence, hint))
    if sent is not None and _is_below(cell.communication_efficiency_ci95, 1 - COMM_BOUND):
        evidence = f"throughput over that of the ceiling: {COMMUNICATION.text(cell)}"
        if (counters := cell.exposed_comm_ddp_fraction) is not None:
            evidence += f" (lost by DDP's own counters: {format_percent(counters)} of a step)"
        hint = "more accumulation, 16-bit reduction, or a faster link"
        losses.append(_Loss(1 - sent, "communication_bound", evidence, hint))
    host = cell.launch_fraction
    if host is not None and _is_above(cell.launch_fraction_ci95, LAUNCH_BOUND):
        # the device then follows the host: what is not waiting for data is lost to launching
        evidence = f"the host needs {_share_text(host, cell.launch_fraction_ci95)} of a step to enqueue it"
        losses.append(_Loss(host - wait, "launch_bound", evidence, "compile: on, or a larger micro batch"))
    return losses


def _is_above(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[0] > bound


def _is_below(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[1] < bound


def _share_text(share: float, interval: Sequence[float] | None) -> str:
    return f"{format_percent(share)} [{format_interval(interval, format_percent)}]"


def _compare_engines(runs: Sequence[CellMeasurement]) -> list[BottleneckDiagnosis]:
    """Name the fastest engine of each mode and N, if its throughput over each other's has its whole interval
    above 1."""
    out = []
    for mode, count in dict.fromkeys((c.mode, c.world_size) for c in runs):
        ran = [c for c in runs if (c.mode, c.world_size, c.status) == (mode, count, "ok")]
        if len(ran) < 2:
            continue
        best, *others = sorted(ran, key=_tokens_per_s, reverse=True)
        near = next((c for c in others if _throughput_ratio(best, c)[0] <= 1), None)
        beside = near or others[0]
        low, high = _throughput_ratio(best, beside)
        text = f"{_tokens_per_s(best) / _tokens_per_s(beside):.3f} [{low:.3f} to {high:.3f}]"
        if not is_measurable([low, high]):
            text = f"not measurable with {count_of(min(len(c.repeats) for c in ran), 'repeat')}"
        evidence = f"throughput over that of {beside.id}: {text}"
        if near is None:
            detail = f" of {len(ran)} at N = {count}"
            out.append(_diagnosis(best, "fastest", evidence, "nothing", detail))
        else:
            out.append(_diagnosis(best, "intervals_overlap", evidence))
    return out


def _tokens_per_s(cell: CellMeasurement) -> float:
    return cell.tokens_per_s or math.nan


def _throughput_ratio(mine: CellMeasurement, other: CellMeasurement) -> tuple[float, float]:
    """Return the interval of a ratio of throughputs, from the ends of both intervals of a sequence's time."""
    (low, high), (other_low, other_high) = _sequence_s(mine), _sequence_s(other)
    return other_low / high, other_high / low if low else math.inf


def _sequence_s(cell: CellMeasurement) -> tuple[float, float]:
    """Return the interval of the seconds per sequence."""
    low, high = (cell.step_time_s and cell.step_time_s.ci95) or (0.0, math.inf)
    return low / cell.global_batch, high / cell.global_batch


def _words(kind: DiagnosisKind, detail: str) -> str:
    return kind.replace("_bound", "-bound").replace("_", " ") + detail


def _diagnosis(
    cell: CellMeasurement, kind: DiagnosisKind, evidence: str, hint: str = MEASURE_MORE, detail: str = ""
) -> BottleneckDiagnosis:
    verdict = _words(kind, detail)
    return BottleneckDiagnosis(cell=cell.id, kind=kind, verdict=verdict, evidence=evidence, next=hint)
