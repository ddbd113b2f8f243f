"""Parts of the pages of verbs that measure by several runs in one directory."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.model import Verdict
from launcher.report.numbers import count_of
from launcher.report.parts import machine_line
from launcher.results import Measurement


def subtitle(result: Measurement, method: Sequence[str]) -> list[str]:
    """Name the machine and the method."""
    trial = f"trials on {count_of(result.ranks, 'rank')}"
    return [machine_line(result.environment, trial), " \u00b7 ".join(method)]


def status_verdicts(result: Measurement) -> list[Verdict]:
    """Say that the measurement failed or is partial."""
    if result.status == "failed":
        return [Verdict("fail", f"Failed: {result.why or 'cause not recorded'}")]
    if result.status != "complete":
        return [Verdict("warn", "Partial: stopped before its end; the same command goes on.")]
    return []
