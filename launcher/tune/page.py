"""The HTML page of a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(tune: Mapping[str, Any], out: Path) -> None:
    """Placeholder until the page is merged."""
