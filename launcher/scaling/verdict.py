"""What keeps a cell from scaling, in words, with the figures that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LOADER_BOUND = 0.05  # share of a step spent waiting for data
COMM_BOUND = 0.05  # share of the ceiling lost
CEILING_BOUND = 0.05  # share of N x single that the machine loses with nothing sent
LAUNCH_BOUND = 0.95  # host time to enqueue a step over the step
GOOD = 0.95  # efficiency from which nothing needs a remedy

Facts = Mapping[str, Any]


def verdicts(scaling: Facts) -> list[dict[str, str]]:
    """One per cell of two ranks or more that ran, and one per pair of engines at the same N."""
    cells = scaling["cells"]
    runs = [c for c in cells if c["kind"] == "run" and c["world_size"] > 1]
    out = [judge(cell, cells) for cell in runs if cell["status"] in ("ok", "oom", "failed")]
    return [*out, *_comparisons(runs)]


def judge(cell: Facts, cells: Sequence[Facts]) -> dict[str, str]:
    """The greatest loss of a cell, named; {cell, verdict, evidence, next}."""
    if cell["status"] != "ok":
        what = "out of memory" if cell["status"] == "oom" else "failed"
        return _told(
            cell,
            what,
            str(cell["cause"]),
            "lower batch.micro_size, or use zero1 or fsdp"
            if cell["status"] == "oom"
            else "see the logs of its run",
        )
    if cell["efficiency"] is None:
        return _told(cell, "no baseline", "the single-rank cell did not run", "see its cause")
    if cell["efficiency_ci95"] is None:
        evidence = f"efficiency {_percent(cell['efficiency'])}; how much runs differ is not known"
        return _told(cell, "no claim: one repeat", evidence, "--repeats 3 or more")
    low, high = cell["efficiency_ci95"]
    reached = f"efficiency {_percent(cell['efficiency'])} [{_percent(low)}, {_percent(high)}]"
    losses = _losses(cell, cells)
    if low > 1:
        return _told(
            cell,
            "above 100 %",
            f"{reached}: one rank alone was slower than each of these",
            "measure the baseline again, on the same machine in the same state",
        )
    if not losses and cell["efficiency"] >= GOOD:
        return _told(cell, "scales", f"{reached}; no loss above {_percent(COMM_BOUND)} found", "nothing")
    if not losses and low <= 1 <= high:
        return _told(
            cell, "no claim: intervals overlap", f"{reached} includes 100 %", "more --repeats or --steps"
        )
    if not losses:
        evidence = f"{reached}; no loss is beyond its bound and doubt: {_known(cell)}"
        return _told(
            cell, "no single cause", evidence, "more --repeats or --steps, and look at the split of the step"
        )
    _, name, evidence, remedy = max(losses)
    others = "".join(f"; also {other}: {text}" for _, other, text, _ in sorted(losses, reverse=True)[1:])
    return _told(cell, name, f"{reached}: {evidence}{others}", remedy)


def _losses(cell: Facts, cells: Sequence[Facts]) -> list[tuple[float, str, str, str]]:
    """(share of a step, name, evidence, remedy) of every loss above its bound."""
    out = []
    wait = cell["data_wait_fraction"]
    faster = _without_loader(cell, cells)
    if wait > LOADER_BOUND or faster > LOADER_BOUND:
        evidence = f"{_percent(wait)} of a step waits for data"
        if faster > 0:
            evidence += f", {_percent(faster)} faster without the loader"
        out.append((max(wait, faster), "loader-bound", evidence, "raise data.workers"))
    if cell["straggler_rank"] is not None:
        ratio, rank = cell["straggler_ratio"], cell["straggler_rank"]
        evidence = f"rank {rank} works {ratio:.2f} x as long as the others' median before any reduction"
        out.append(
            (
                1 - 1 / ratio,
                f"straggler rank {rank}",
                evidence,
                "look at that device: clocks, links, who else uses it (bert-dp doctor)",
            )
        )
    top, sent = cell["ceiling_efficiency"], cell["communication_efficiency"]
    if top is not None and 1 - top > CEILING_BOUND and _below(cell["ceiling_efficiency_ci95"]):
        evidence = f"{cell['world_size']} independent copies reach {_percent(top)} of as many single ranks"
        out.append(
            (
                1 - top,
                "hardware ceiling",
                evidence,
                "shared memory bandwidth, power or clocks, which no engine changes",
            )
        )
    if sent is not None and 1 - sent > COMM_BOUND and _below(cell["communication_efficiency_ci95"]):
        counters = cell["exposed_comm_ddp_fraction"]
        evidence = f"{_percent(1 - sent)} of the ceiling is lost once ranks exchange gradients"
        if counters is not None:
            evidence += f" (DDP's own counters: {_percent(counters)} of a step)"
        out.append(
            (
                1 - sent,
                "communication-bound",
                evidence,
                "more accumulation, 16-bit reduction, or a faster link",
            )
        )
    host = cell["launch_fraction"]
    if host is not None and host > LAUNCH_BOUND:
        evidence = f"the host needs {_percent(host)} of a step to enqueue it"
        out.append((host - LAUNCH_BOUND, "launch-bound", evidence, "compile: on, or a larger micro batch"))
    return out


def _known(cell: Facts) -> str:
    """The losses that were measured, in words."""
    top, sent = cell["ceiling_efficiency"], cell["communication_efficiency"]
    wait = f"{_percent(cell['data_wait_fraction'])} of a step waits for data"
    if top is None or sent is None:
        return f"{wait}; there is no ceiling to compare with"
    lost = f"{_percent(1 - sent)} of the ceiling is lost to communication"
    return f"{wait}, {lost}, the ceiling itself is {_percent(1 - top)} below as many single ranks"


def _below(interval: Sequence[float] | None) -> bool:
    """Whether a share is below 1 beyond doubt."""
    return interval is not None and interval[1] < 1


def _without_loader(cell: Facts, cells: Sequence[Facts]) -> float:
    """Share of a step that its synthetic twin saves; 0 without one, or when their intervals overlap."""
    twin = next((c for c in cells if c["of"] == cell["id"] and c["kind"] == "synthetic"), None)
    if twin is None or twin["status"] != "ok":
        return 0.0
    theirs, mine = twin["step_time_s"]["ci95"], cell["step_time_s"]["ci95"]
    if theirs is None or mine is None or theirs[1] >= mine[0]:
        return 0.0
    return 1 - float(twin["step_time_s"]["mean"] / cell["step_time_s"]["mean"])


def _comparisons(runs: Sequence[Facts]) -> list[dict[str, str]]:
    """Per mode and N: whether the fastest engine may be called faster than the next."""
    out = []
    groups = {(c["mode"], c["world_size"]): None for c in runs}
    for mode, count in groups:
        ran = [c for c in runs if (c["mode"], c["world_size"], c["status"]) == (mode, count, "ok")]
        ran.sort(key=lambda c: -c["tokens_per_s"])
        if len(ran) < 2:
            continue
        best, second = ran[:2]
        seconds = [
            [bound / c["global_batch"] for bound in c["step_time_s"]["ci95"] or (0.0, math.inf)]
            for c in (best, second)
        ]
        times = best["tokens_per_s"] / second["tokens_per_s"]
        evidence = f"{times:.3f} x the throughput of {second['id']}"
        if seconds[0][1] < seconds[1][0]:
            out.append(_told(best, f"fastest of {len(ran)} at N = {count}", evidence, "nothing"))
        else:
            out.append(
                _told(
                    best,
                    "no claim: intervals overlap",
                    f"{evidence}, whose interval overlaps",
                    "more --repeats or --steps",
                )
            )
    return out


def _told(cell: Facts, verdict: str, evidence: str, remedy: str) -> dict[str, str]:
    return {"cell": cell["id"], "verdict": verdict, "evidence": evidence, "next": remedy}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
