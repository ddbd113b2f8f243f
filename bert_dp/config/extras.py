"""How to install what an optional part needs, from this package's own metadata."""

from __future__ import annotations

import importlib.metadata
import re


def install_command(extra: str) -> str:
    """`pip install` with the requirements of one extra of pyproject.toml, as in `pip install 'rensa>=0.5'`;
    with its bare name where the package runs without having been installed."""
    try:
        lines = importlib.metadata.requires("bert-dp") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    needed = [line.partition(";") for line in lines]
    of_extra = [
        what.strip() for what, _, marker in needed if re.search(rf"""extra == ["']{extra}["']""", marker)
    ]
    return "pip install " + " ".join(f"'{name}'" for name in of_extra or [extra])
