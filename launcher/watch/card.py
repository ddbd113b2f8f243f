"""A failure as it is told: the card on the console, and what summary.json keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bert_dp.record import safe
from launcher.report.numbers import format_gib
from launcher.watch.failure import Failure, first_line
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
    if failure.alike:
        lines.append(f"  alike: rank {', '.join(map(str, failure.alike))}")
    lines += [f"  why: {line}" for line in failure.explanation]
    lines += [f"  fix: {line}" for line in failure.fix]
    lines += _memory_lines(failure)
    lines += [f"  consequence: {line}" for line in failure.consequences[:CONSEQUENCES_SHOWN]]
    if (more := len(failure.consequences) - CONSEQUENCES_SHOWN) > 0:
        lines.append(f"  consequence: {more} more ranks; all in summary.json")
    lines += [f"  | {line}" for line in failure.tail]
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


def summary_facts(failure: Failure) -> dict[str, Any]:
    """What summary.json keeps of the card."""
    memory = failure.memory
    curves = memory.curves_gib.items() if memory else ()
    return {
        "cause": failure.headline(),
        "failure_kind": failure.kind,
        "rank": failure.rank,
        "where": failure.where,
        "source": failure.source,
        "killed_by": failure.killed_by,
        "explanation": list(failure.explanation),
        "fix": list(failure.fix),
        "alike": list(failure.alike),
        "consequences": list(failure.consequences),
        "log": str(failure.log) if failure.log else None,
        "log_tail": list(failure.tail),
        "memory_curve_gib": {name: list(values) for name, values in curves} or None,
        "memory_interval_s": memory.interval_s if memory else None,
        "oom_kills": memory.oom_kills if memory else None,
    }
