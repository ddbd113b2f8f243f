"""The failure card that the console shows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from bert_dp.record import safe
from bert_dp.record.models import Failure
from launcher.report.numbers import format_gib
from launcher.watch.failure import GROUP, first_line

CONSEQUENCES_SHOWN = 6
BARS = "▁▂▃▄▅▆▇█"
BARS_SHOWN = 30


def card(failure: Failure, run_dir: Path) -> list[str]:
    """Lay out a failure in lines: rank, error, place and log; then why and what to do, consequences, and the
    log's end."""
    lines = [f"failed: {first_line(failure.headline())}"]
    if failure.where:
        lines.append(f"  at {failure.where}" + (f" {failure.source}" if failure.source else ""))
    lines += [f"  log: {failure.log}"] if failure.log else []
    lines.append(f"  run: {run_dir}")
    if failure.same_error_ranks:
        lines.append(f"  same error: rank {', '.join(map(str, failure.same_error_ranks))}")
    lines += [f"  why: {line}" for line in failure.explanation]
    lines += [f"  fix: {line}" for line in failure.fix]
    lines += _memory_lines(failure)
    lines += [f"  consequence: {line}" for line in failure.consequences[:CONSEQUENCES_SHOWN]]
    if (more := len(failure.consequences) - CONSEQUENCES_SHOWN) > 0:
        lines.append(f"  consequence: {more} more ranks; all in summary.json")
    lines += [f"  | {line}" for line in failure.log_tail]
    return [safe(line) for line in lines]


def _memory_lines(failure: Failure) -> list[str]:
    """Draw the curves of the rank that failed, of the greatest other one, and of the control group."""
    if failure.memory is None:
        return []
    curves, mine = failure.memory.curves_gib, f"rank {failure.rank}"
    others = [name for name in curves if name not in (mine, GROUP)]
    others.sort(key=lambda name: max(curves[name]), reverse=True)
    return [
        f"  memory: {name} {sparkline(curves[name])} peak {format_gib(max(curves[name]))}"
        for name in (mine, *others[:1], GROUP)
        if curves.get(name)
    ]


def sparkline(values: Sequence[float]) -> str:
    """Draw at most `BARS_SHOWN` bars from 0 to the greatest value; a bar is the greatest of its values."""
    if not values or max(values) <= 0:
        return ""
    bars = min(BARS_SHOWN, len(values))
    cuts = [len(values) * i // bars for i in range(bars + 1)]
    shown = [max(values[a:b]) for a, b in itertools.pairwise(cuts)]
    return "".join(BARS[min(len(BARS) - 1, int(v / max(values) * len(BARS)))] for v in shown)
