"""What the models of stored JSON files share: types, and the wording of what is wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def problem_lines(error: ValidationError, most: int = 8) -> list[str]:
    """One line per problem of a file that was read: where, what is wrong, and the value when it is short."""
    lines = []
    for problem in error.errors()[:most]:
        where = ascii(".".join(map(str, problem["loc"])))[1:-1][:80]
        plain = isinstance(problem["input"], (str, int, float, type(None)))
        got = f", got {ascii(problem['input'])[:80]}" if plain else ""
        line = problem["msg"].removeprefix("Value error, ") + got
        lines.append(f"{where}: {line}" if where else line)
    return lines


def sha256(path: Path) -> str:
    """Hex digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
