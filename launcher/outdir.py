"""The --out directory of a verb that goes on where it was ended: what it was begun with must not change."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError
from launcher import results
from launcher.results import PlanFile


def issues(where: Path, plan: str, what: str, now: PlanFile, fixed: Sequence[str]) -> list[str]:
    """Why `where` cannot take this `what`; one line each. Its file `plan` holds what it was begun with, of
    which the fields `fixed` must be as in `now`."""
    try:
        standing = next(p for p in (where, *where.parents) if p.exists())
        if not standing.is_dir():
            return [f"--out: {where} cannot be made, {standing} is a file"]
        if not os.access(standing, os.W_OK | os.X_OK):
            return [f"--out: {standing} cannot be written; choose another directory"]
        held = [p for p in where.iterdir() if not p.name.startswith(".")] if where.exists() else []
    except OSError as error:
        return [f"--out: {where} cannot be used ({error.strerror})"]
    if not held:
        return []
    before = results.find(where / plan, type(now))
    if before is None:
        return [f"--out: {where} is not empty and holds no {what}; choose another directory"]
    changed = [key for key in fixed if getattr(before, key) != getattr(now, key)]
    if changed:
        return [
            f"--out: {where} holds another {what} ({', '.join(changed)} differ); choose another "
            "directory, or go on with the options it was begun with"
        ]
    return []


def check_machine(where: Path, begun: PlanFile | None, here: Mapping[str, Any]) -> None:
    """Raises ConfigError when `where` was begun on another machine, with other versions or other data.
    `begun`: its plan, None of a new one."""
    before = here if begun is None or begun.machine is None else begun.machine
    if other := [key for key in here if before.get(key) != here[key]]:
        told = "; ".join(f"{key}: {before.get(key)} then, {here[key]} now" for key in other)
        raise ConfigError(
            [f"--out: {where} was begun elsewhere ({told}) and would not compare; choose another directory"]
        )
