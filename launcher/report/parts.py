"""Cells, rows and texts that several reports have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from launcher.report.model import ReportSection, TableCell, TableRow, Verdict
from launcher.report.numbers import FORMATS, NA, Unit, count_of, number
from launcher.results import Measurement


def cell(value: object, unit: Unit, note: str = "") -> TableCell:
    """Return a value in the format of its unit, with all its digits beside."""
    exact = value if isinstance(value, float) and math.isfinite(value) else None
    return TableCell(FORMATS[unit](value), note, exact)


def value(label: str, number: object, unit: Unit, note: str = "", *, console: bool = True) -> TableRow:
    """Return a row of one number."""
    return TableRow(label, (cell(number, unit, note),), console=console)


def words(label: str, text: str | None, note: str = "", *, console: bool = True) -> TableRow:
    """Return a row of one text."""
    return TableRow(label, (TableCell(text or NA, note),), console=console)


def series(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[float], list[float | None]]:
    """Return the x and the y of points; one without an x is left out, a y that is no number is a gap."""
    numbers = [(number(x), number(y)) for x, y in pairs]
    kept = [(x, y) for x, y in numbers if x is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def first_line(text: object, otherwise: str = "cause not recorded") -> str:
    """Return the first line of a text that may have many or none."""
    return next((line for line in str(text or "").strip().splitlines() if line), otherwise)


def folded(title: str, text: str) -> ReportSection:
    """Return a section of the page alone, which opens on a click."""
    return ReportSection(title, text=text, folded=True, console=False)


def record_text(content: Mapping[str, Any]) -> str:
    """Return a nested record as YAML."""
    return yaml.safe_dump(dict(content), sort_keys=False) if content else "not recorded"


def machine_line(environment: Mapping[str, Any], *front: str) -> str:
    """Return `front`, then processor, torch, commit and date as far as they are known."""
    versions = environment.get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    commit = str(environment.get("git_commit") or "")[:10]
    dirty = " + uncommitted changes" if environment.get("git_dirty") else ""
    parts = [
        *front,
        str(environment.get("cpu_model") or ""),
        f"torch {torch}" if torch is not None else "",
        f"commit {commit}{dirty}" if commit else "",
        str(environment.get("date") or ""),
    ]
    return " \u00b7 ".join(part for part in parts if part)


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
