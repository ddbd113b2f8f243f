"""The directory of a search."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record


def directory_issues(where: Path, state: str, now: Mapping[str, Any], what: str) -> list[str]:
    """Why OUT cannot take this `what`; one line each. OUT/`state` holds what it was begun with."""
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
    before = record.read_json(where / state)
    if before is None:
        return [f"--out: {where} is not empty and holds no {what}; choose another directory"]
    if changed := [key for key, value in now.items() if before.get(key) != value and key != "config"]:
        return [f"--out: {where} holds another {what} ({', '.join(changed)} differ); choose another "
                "directory, or go on with the options it was begun with"]  # fmt: skip
    return []
