"""The difference of two JSON values, and the changes that are meant."""

from __future__ import annotations

import math
from typing import Any

RELATIVE = 1e-5  # of a float; everything else is equal

# Path of a value that was recorded (`section/key/...`) -> its new path; None where it was cut. A path stands
# for all below it.
CHANGED: dict[str, str | None] = {
    # a search of the rate alone, and two constants of hardware.yaml
    "options/tune lr/--optimizers": None,
    "options/tune lr/--weight-decays": None,
    "options/tune lr/--trials": None,
    "options/plan scaling/--overlap": None,
    "options/plan scaling/--straggler": None,
    "dry_runs/lr/settings/optimizers": None,
    "dry_runs/lr/settings/weight_decays": None,
    "dry_runs/lr/settings/trials": None,
    "rate/other_range_tests": None,  # of optimizers that no search compares any more
    "rate/settings/left_out": None,
    "rate/settings/trials": None,
    "reports/lr/asked: trials": None,
    "reports/lr-stopped/asked: trials": None,
    "options/report/--png": None,  # a page saves its figures itself
    # version 2 of the shards, with another normaliser in the tokenizer
    "built/version": None,
    "built/hash": None,
    "built/tokenizer/sha256": None,
    "shards/manifest/version": None,
    "shards/manifest/hash": None,
    # exact quantiles of Student's t; ratios whose interval is wider than a factor of two have no digits
    **{
        f"scale/cells/{k}/{name}": None
        for k in range(10)
        for name in (
            "step_time_s/ci95",
            "efficiency_ci95",
            "ceiling_efficiency_ci95",
            "communication_efficiency_ci95",
            "straggler_ratio",
            "straggler_rank",
        )
    },
    **{f"batch/sizes/{k}/samples_per_s_ci95": None for k in range(3)},
    "scale/csv": None,
    "scale/prediction": None,
    "scale/verdicts": None,
    "reports/scale": None,
    # the page of a scaling benchmark is its result, figures and verdicts
    "reports/scale-stopped": None,
    "told/scaling": None,
    "told/partial scaling": None,
    "scale/baseline": None,
    "scale/baselines": None,
    "scale/peak/matmul_precision": None,
    "plan/measured": None,
    # memory and gradients have all of BERT's 512 positions
    "plan/network": None,
    "plan/tensor": None,
    "plan/buckets": None,
    "told/rate/verdicts/0": None,  # the interval of a mean over seeds
    "plan/fsdp/rows/0": None,  # its 16-bit weights are gathered in fp32: twice the bytes
}


def differences(expected: Any, got: Any, path: str = "") -> list[str]:
    """`path: expected ..., got ...` of every recorded value that is another now. Keys may be added."""
    got_leaves = leaves(got, path)
    found = []
    for old_path, value in leaves(expected, path).items():
        new_path = moved(old_path)
        if new_path is None:
            continue
        now = got_leaves.get(new_path, "nothing")
        if not same(value, now):
            found.append(f"{new_path}: expected {value!r}, got {now!r}")
    return found


def moved(path: str) -> str | None:
    """Where this value stands today, by the longest entry of CHANGED that it is below; None if it was cut."""
    above = [old for old in CHANGED if f"{path}/".startswith(f"{old}/")]
    if not above:
        return path
    old = max(above, key=len)
    new = CHANGED[old]
    return None if new is None else new + path[len(old) :]


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
