"""The failure card that the console shows."""

from __future__ import annotations

from pathlib import Path

from bert_dp.files import safe
from bert_dp.files.models import Failure
from launcher.report.numbers import format_gib
from launcher.watch.failure import GROUP, first_line

CONSEQUENCES_SHOWN = 6


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
    """Name the peaks of the rank that failed, of the greatest other one, and of the control group."""
    peaks = failure.memory.peaks_gib if failure.memory else {}
    mine = f"rank {failure.rank}"
    others = sorted(peaks.keys() - {mine, GROUP}, key=lambda name: peaks[name], reverse=True)
    shown = [name for name in (mine, *others[:1], GROUP) if name in peaks]
    return [f"  memory: {name} peaked at {format_gib(peaks[name])}" for name in shown]
