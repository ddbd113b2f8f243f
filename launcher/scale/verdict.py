"""What keeps a cell from scaling, in words, with the figures that say so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from launcher.report.numbers import format_percent
from launcher.results import VERDICTS, Cell, Verdict, VerdictKind

LOADER_BOUND = 0.05  # share of a step spent waiting for data
COMM_BOUND = 0.05  # share of the ceiling lost
CEILING_BOUND = 0.05  # share of N x single that the machine loses with nothing sent
LAUNCH_BOUND = 0.95  # host time of a step over the step
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
    out = [judge(cell, cells) for cell in runs if cell.status != "pending"]
    return [*out, *_comparisons(runs)]


def judge(cell: Cell, cells: Sequence[Cell]) -> Verdict:
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
    reached = f"efficiency {format_percent(cell.efficiency)} [{format_percent(low)}, {format_percent(high)}]"
    losses = sorted(_bottlenecks(cell, cells), reverse=True)
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
    if low >= GOOD:
        evidence = f"{reached}; no loss above {format_percent(COMM_BOUND)} found"
        return _verdict(cell, "scales", evidence, "nothing")
    if cell.efficiency >= GOOD:
        return _overlap(
            cell, f"{reached} includes less than {format_percent(GOOD)}, from which a cell scales"
        )
    if high >= 1:
        return _overlap(cell, f"{reached} includes 100 %")
    return _verdict(
        cell,
        "no_single_cause",
        f"{reached}; no single bottleneck stands out beyond the measurement's doubt: {_measured(cell)}",
        "more --repeats or --steps, and look at the split of the step",
    )


def _bottlenecks(cell: Cell, cells: Sequence[Cell]) -> list[Bottleneck]:
    """Every loss above its bound."""
    out = []
    wait = cell.data_wait_fraction or 0.0
    faster = _without_loader(cell, cells)
    if wait > LOADER_BOUND or faster > LOADER_BOUND:
        evidence = f"{format_percent(wait)} of a step waits for data"
        if faster > 0:
            evidence += f", {format_percent(faster)} faster without the loader"
        out.append(Bottleneck(max(wait, faster), "loader_bound", evidence, "raise data.workers"))
    ratio, rank = cell.straggler_ratio, cell.straggler_rank
    if ratio is not None and rank is not None:
        out.append(
            Bottleneck(
                1 - 1 / ratio,
                "straggler",
                f"rank {rank} works {ratio:.2f} x as long as the others' median before any reduction",
                "look at that device: clocks, links, who else uses it (bert-dp doctor)",
                f" rank {rank}",
            )
        )
    top, sent = cell.ceiling_efficiency, cell.communication_efficiency
    if top is not None and 1 - top > CEILING_BOUND and _below(cell.ceiling_efficiency_ci95):
        out.append(
            Bottleneck(
                1 - top,
                "hardware_ceiling",
                f"{cell.world_size} independent copies reach {format_percent(top)} of as many single ranks",
                "shared memory bandwidth, power or clocks, which no engine changes",
            )
        )
    if sent is not None and 1 - sent > COMM_BOUND and _below(cell.communication_efficiency_ci95):
        counters = cell.exposed_comm_ddp_fraction
        evidence = f"{format_percent(1 - sent)} of the ceiling is lost once ranks exchange gradients"
        if counters is not None:
            evidence += f" (DDP's own counters: {format_percent(counters)} of a step)"
        remedy = "more accumulation, 16-bit reduction, or a faster link"
        out.append(Bottleneck(1 - sent, "communication_bound", evidence, remedy))
    host = cell.launch_fraction
    if host is not None and host > LAUNCH_BOUND:
        # the device then follows the host: what is not waiting for data is lost to launching
        evidence = f"the host needs {format_percent(host)} of a step to enqueue it"
        remedy = "compile: on, or a larger micro batch"
        out.append(Bottleneck(host - wait, "launch_bound", evidence, remedy))
    return out


def _measured(cell: Cell) -> str:
    """The losses that were measured, in words."""
    top, sent = cell.ceiling_efficiency, cell.communication_efficiency
    wait = f"{format_percent(cell.data_wait_fraction or 0.0)} of a step waits for data"
    if top is None or sent is None:
        return f"{wait}; there is no ceiling to compare with"
    lost = f"{format_percent(1 - sent)} of the ceiling is lost to communication"
    return f"{wait}, {lost}, the ceiling itself is {format_percent(1 - top)} below as many single ranks"


def _below(interval: Sequence[float] | None) -> bool:
    """Whether a share is below 1 beyond doubt."""
    return interval is not None and interval[1] < 1


def _without_loader(cell: Cell, cells: Sequence[Cell]) -> float:
    """Share of a step that its synthetic twin saves; 0 without one, or when their intervals overlap."""
    twin = next((c for c in cells if c.of == cell.id and c.kind == "synthetic"), None)
    if twin is None or twin.status != "ok" or twin.step_time_s is None or cell.step_time_s is None:
        return 0.0
    theirs, mine = twin.step_time_s, cell.step_time_s
    if theirs.ci95 is None or mine.ci95 is None or theirs.ci95[1] >= mine.ci95[0]:
        return 0.0
    return 1 - (theirs.typical or 0.0) / (mine.typical or math.inf)


def _comparisons(runs: Sequence[Cell]) -> list[Verdict]:
    """Per mode and N: whether the fastest engine may be called faster than every other."""
    out = []
    for mode, count in dict.fromkeys((c.mode, c.world_size) for c in runs):
        ran = [c for c in runs if (c.mode, c.world_size, c.status) == (mode, count, "ok")]
        ran.sort(key=_tokens_per_s, reverse=True)
        if len(ran) < 2:
            continue
        best, *others = ran
        near = next((c for c in others if _sequence_s(c)[0] <= _sequence_s(best)[1]), None)
        beside = near or others[0]
        times = _tokens_per_s(best) / _tokens_per_s(beside)
        evidence = f"{times:.3f} x the throughput of {beside.id}"
        if near is None:
            out.append(_verdict(best, "fastest", evidence, "nothing", f" of {len(ran)} at N = {count}"))
        else:
            out.append(_overlap(best, f"{evidence}, whose interval overlaps"))
    return out


def _tokens_per_s(cell: Cell) -> float:
    return cell.tokens_per_s or math.nan


def _sequence_s(cell: Cell) -> tuple[float, float]:
    """Interval of the seconds that a sequence takes."""
    low, high = (cell.step_time_s and cell.step_time_s.ci95) or (0.0, math.inf)
    return low / cell.global_batch, high / cell.global_batch


def _overlap(cell: Cell, evidence: str) -> Verdict:
    return _verdict(cell, "intervals_overlap", evidence, "more --repeats or --steps")


def _verdict(cell: Cell, kind: VerdictKind, evidence: str, remedy: str, detail: str = "") -> Verdict:
    return Verdict(cell=cell.id, kind=kind, verdict=VERDICTS[kind] + detail, evidence=evidence, next=remedy)
