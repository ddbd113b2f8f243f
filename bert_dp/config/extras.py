"""Optional packages: imported, or how to install them, from this package's own metadata."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from bert_dp.config.error import ConfigError


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional package. Raises ConfigError naming the extra when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError([f"{what} needs {package}; {install_command(extra)}"]) from None


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
