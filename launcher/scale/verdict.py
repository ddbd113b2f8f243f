"""What keeps a cell from scaling, in words, with the figures that say so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from launcher.report.numbers import count_of, format_interval, format_percent
from launcher.results import VERDICTS, Cell, Verdict, VerdictKind
from launcher.scale.columns import CEILING, COMMUNICATION, EFFICIENCY, STRAGGLER
from launcher.stats import is_measurable

LOADER_BOUND = 0.05  # share of a step spent waiting for data
COMM_BOUND = 0.05  # share of the ceiling lost
CEILING_BOUND = 0.05  # share of N x single that the machine loses with nothing sent
LAUNCH_BOUND = 0.95  # host time of a step over the step
MEASURE_MORE = "more --repeats or --steps"
GOOD = 0.95  # efficiency from which nothing needs a remedy, at the low end of its interval


class Bottleneck(NamedTuple):
    """What a cell loses by one cause. `share`: of a step."""

    share: float
    kind: VerdictKind
    evidence: str
    remedy: str
    detail: str = ""
    """What follows the words of its kind."""

    @property
    def words(self) -> str:
        return f"{VERDICTS[self.kind]}{self.detail}"


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """One per cell of two ranks or more that ran, and one per pair of engines at the same N."""
    runs = [c for c in cells if c.kind == "run" and c.world_size > 1]
    out = [judge(cell) for cell in runs if cell.status != "pending"]
    return [*out, *_comparisons(runs)]


def judge(cell: Cell) -> Verdict:
    """The greatest loss of a cell, named."""
    if cell.status == "oom":
        remedy = "lower batch.micro_size, or use zero1 or fsdp"
        return _verdict(cell, "out_of_memory", str(cell.cause), remedy)
    if cell.status != "ok":
        return _verdict(cell, "failed", str(cell.cause), "see the logs of its run")
    if cell.efficiency is None:
        return _verdict(cell, "no_baseline", "the single-rank cell did not run", "see its cause")
    if cell.efficiency_ci95 is None:
        evidence = f"efficiency {format_percent(cell.efficiency)}; how much runs differ is not known"
        return _verdict(cell, "one_repeat", evidence, "--repeats 3 or more")
    low, high = cell.efficiency_ci95
    reached = f"efficiency {EFFICIENCY.text(cell)}"
    losses = sorted(_bottlenecks(cell), reverse=True)
    if low > 1:
        return _verdict(
            cell,
            "above_baseline",
            f"{reached}: one rank alone was slower than each of these",
            "measure the baseline again, on the same machine in the same state",
        )
    if losses:
        others = "".join(f"; also {loss.words}: {loss.evidence}" for loss in losses[1:])
        greatest = losses[0]
        evidence = f"{reached}: {greatest.evidence}{others}"
        return _verdict(cell, greatest.kind, evidence, greatest.remedy, greatest.detail)
    if not is_measurable(cell.efficiency_ci95):
        return _verdict(cell, "not_measurable", reached, MEASURE_MORE)
    if low >= GOOD:
        return _verdict(cell, "scales", f"{reached}; no loss beyond its bound", "nothing")
    if cell.efficiency >= GOOD:
        return _overlap(
            cell, f"{reached} includes less than {format_percent(GOOD)}, from which a cell scales"
        )
    if high >= 1:
        return _overlap(cell, f"{reached} includes 100 %")
    return _verdict(
        cell,
        "no_single_cause",
        f"{reached}; no loss has its whole interval beyond its bound",
        f"{MEASURE_MORE}, and look at the split of the step",
    )


def _bottlenecks(cell: Cell) -> list[Bottleneck]:
    """Every loss whose whole interval lies beyond its bound."""
    out = []
    wait, saved = cell.data_wait_fraction or 0.0, cell.loader_fraction or 0.0
    waits, saves = (
        _is_above(ends, LOADER_BOUND) for ends in (cell.data_wait_fraction_ci95, cell.loader_fraction_ci95)
    )
    if waits or saves:
        evidence = f"{_with_interval(wait, cell.data_wait_fraction_ci95)} of a step waits for data"
        if saves:
            evidence += f", {_with_interval(saved, cell.loader_fraction_ci95)} is saved without the loader"
        share = max(waits * wait, saves * saved)
        out.append(Bottleneck(share, "loader_bound", evidence, "raise data.workers"))
    rank = cell.straggler_rank
    if cell.straggler_ratio is not None and rank is not None:
        out.append(
            Bottleneck(
                1 - 1 / cell.straggler_ratio,
                "straggler",
                f"own work of rank {rank} over the others' median, before any reduction: "
                f"{STRAGGLER.text(cell)}",
                "look at that device: clocks, links, who else uses it (bert-dp doctor)",
                f" rank {rank}",
            )
        )
    top, sent = cell.ceiling_efficiency, cell.communication_efficiency
    if top is not None and _is_below(cell.ceiling_efficiency_ci95, 1 - CEILING_BOUND):
        out.append(
            Bottleneck(
                1 - top,
                "hardware_ceiling",
                f"throughput of {cell.world_size} independent copies over that of as many single ranks: "
                f"{CEILING.text(cell)}",
                "shared memory bandwidth, power or clocks, which no engine changes",
            )
        )
    if sent is not None and _is_below(cell.communication_efficiency_ci95, 1 - COMM_BOUND):
        counters = cell.exposed_comm_ddp_fraction
        evidence = f"throughput over that of the ceiling: {COMMUNICATION.text(cell)}"
        if counters is not None:
            evidence += f" (lost by DDP's own counters: {format_percent(counters)} of a step)"
        remedy = "more accumulation, 16-bit reduction, or a faster link"
        out.append(Bottleneck(1 - sent, "communication_bound", evidence, remedy))
    host = cell.launch_fraction
    if host is not None and _is_above(cell.launch_fraction_ci95, LAUNCH_BOUND):
        # the device then follows the host: what is not waiting for data is lost to launching
        times = _with_interval(host, cell.launch_fraction_ci95)
        evidence = f"the host needs {times} of a step to enqueue it"
        remedy = "compile: on, or a larger micro batch"
        out.append(Bottleneck(host - wait, "launch_bound", evidence, remedy))
    return out


def _is_above(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[0] > bound


def _is_below(interval: Sequence[float] | None, bound: float) -> bool:
    return interval is not None and interval[1] < bound


def _with_interval(share: float, interval: Sequence[float] | None) -> str:
    return f"{format_percent(share)} [{format_interval(interval, format_percent)}]"


def _comparisons(runs: Sequence[Cell]) -> list[Verdict]:
    """Return one verdict per mode and N of several engines: the fastest one, where its throughput over each
    other's has its whole interval above 1."""
    out = []
    for mode, count in dict.fromkeys((c.mode, c.world_size) for c in runs):
        ran = [c for c in runs if (c.mode, c.world_size, c.status) == (mode, count, "ok")]
        ran.sort(key=_tokens_per_s, reverse=True)
        if len(ran) < 2:
            continue
        best, *others = ran
        near = next((c for c in others if _throughput_over(best, c)[0] <= 1), None)
        beside = near or others[0]
        low, high = _throughput_over(best, beside)
        text = f"{_tokens_per_s(best) / _tokens_per_s(beside):.3f} [{low:.3f} to {high:.3f}]"
        if not is_measurable([low, high]):
            text = f"not measurable with {count_of(min(len(c.repeats) for c in ran), 'repeat')}"
        evidence = f"throughput over that of {beside.id}: {text}"
        if near is None:
            out.append(_verdict(best, "fastest", evidence, "nothing", f" of {len(ran)} at N = {count}"))
        else:
            out.append(_overlap(best, evidence))
    return out


def _tokens_per_s(cell: Cell) -> float:
    return cell.tokens_per_s or math.nan


def _throughput_over(mine: Cell, other: Cell) -> tuple[float, float]:
    """Interval of the ratio of throughputs, from the ends of both intervals of a sequence's time."""
    (low, high), (other_low, other_high) = _sequence_s(mine), _sequence_s(other)
    return other_low / high, other_high / low if low else math.inf


def _sequence_s(cell: Cell) -> tuple[float, float]:
    """Interval of the seconds that a sequence takes."""
    low, high = (cell.step_time_s and cell.step_time_s.ci95) or (0.0, math.inf)
    return low / cell.global_batch, high / cell.global_batch


def _overlap(cell: Cell, evidence: str) -> Verdict:
    return _verdict(cell, "intervals_overlap", evidence, MEASURE_MORE)


def _verdict(cell: Cell, kind: VerdictKind, evidence: str, remedy: str, detail: str = "") -> Verdict:
    return Verdict(cell=cell.id, kind=kind, verdict=VERDICTS[kind] + detail, evidence=evidence, next=remedy)
