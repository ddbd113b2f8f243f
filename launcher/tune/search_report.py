"""What the reports of both searches share."""

from __future__ import annotations

import shlex
from pathlib import Path


def use(choice: object, folder: Path) -> str:
    """The command of a run that takes the choice, if there is one."""
    return f"bert-dp train {shlex.quote(str(folder / 'tuned.yaml'))}" if choice is not None else ""
