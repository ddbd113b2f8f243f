"""Differences of two JSON values."""

from __future__ import annotations

import math
from typing import Any

RELATIVE = 1e-5  # of a float; everything else is equal


def differences(expected: Any, got: Any, path: str = "") -> list[str]:
    """`path: expected ..., got ...` of every recorded value that is another now. Keys may be added."""
    got_leaves = leaves(got, path)
    found = []
    for name, value in leaves(expected, path).items():
        now = got_leaves.get(name, "nothing")
        if not same(value, now):
            found.append(f"{name}: expected {value!r}, got {now!r}")
    return found


def leaves(value: Any, path: str) -> dict[str, Any]:
    """Path -> value of all that is neither a list nor a mapping. A list is told by its length too."""
    if isinstance(value, dict):
        below = {key: leaves(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
    elif isinstance(value, list):
        below = {place: leaves(item, f"{path}/{place}") for place, item in enumerate(value)}
        below["length"] = {f"{path}/length": len(value)}
    else:
        return {path: value}
    return {name: leaf for part in below.values() for name, leaf in part.items()}


def same(expected: Any, got: Any) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (expected, got))
    if numbers and isinstance(expected, float):
        return math.isclose(expected, got, rel_tol=RELATIVE, abs_tol=1e-9)
    return type(expected) is type(got) and bool(expected == got)
