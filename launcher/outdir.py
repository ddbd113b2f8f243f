"""The --out directory of a verb that goes on where it was ended: what it was begun with must not change."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import ConfigError


def issues(
    where: Path,
    plan: str,
    what: str,
    now: Mapping[str, Any],
    fixed: Sequence[str],
    grows: Sequence[str] = (),
) -> list[str]:
    """Why `where` cannot take this `what`; one line each. Its file `plan` holds what it was begun with, of
    which the keys `fixed` must be as in `now`. `grows`: names of numbers (`key` or `key.name`) that may be
    greater now."""
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
    before = record.read_json(where / plan)
    if before is None:
        return [f"--out: {where} is not empty and holds no {what}; choose another directory"]
    then, asked = _flat(before, fixed), _flat(now, fixed)
    if gone := sorted(name for name in then.keys() - asked.keys() if then[name]):
        return [
            f"--out: {where} was begun with settings that this version does not have ({', '.join(gone)}); "
            "choose another directory"
        ]
    changed = [name for name, value in asked.items() if then.get(name) != value]
    changed = [name for name in changed if name not in grows or not _grown(then.get(name), asked[name])]
    if changed:
        return [
            f"--out: {where} holds another {what} ({', '.join(changed)} differ); choose another "
            "directory, or go on with the options it was begun with"
        ]
    return []


def _flat(facts: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The values of `keys`, those of a mapping by `key.name`."""
    found: dict[str, Any] = {}
    for key in keys:
        value = facts.get(key)
        found |= {f"{key}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def _grown(then: object, now: object) -> bool:
    return isinstance(then, int | float) and isinstance(now, int | float) and then < now


def check_machine(where: Path, plan: str, here: Mapping[str, Any]) -> None:
    """Raises ConfigError when `where` was begun on another machine, with other versions or other data."""
    before = (record.read_json(where / plan) or {}).get("machine", here)
    before = before if isinstance(before, dict) else {}
    if other := [key for key in here if before.get(key) != here[key]]:
        told = "; ".join(f"{key}: {before.get(key)} then, {here[key]} now" for key in other)
        raise ConfigError(
            [f"--out: {where} was begun elsewhere ({told}) and would not compare; choose another directory"]
        )
