"""The failure card that the console shows."""

from __future__ import annotations

from pathlib import Path

from bert_dp.record import safe
from bert_dp.record.models import Failure
from launcher.report.numbers import format_gib
from launcher.watch.failure import first_line
from launcher.watch.memory import GROUP, sparkline

CONSEQUENCES_SHOWN = 6


def card(failure: Failure, run_dir: Path) -> list[str]:
    """What the console shows: within the first lines who, what, where and the log, then why and what to do,
    what followed, and the log's end."""
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
    """Curves of the rank that failed, of the greatest other one, and of the control group."""
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
