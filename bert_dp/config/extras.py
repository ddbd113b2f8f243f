"""Optional packages: imported, or how to install them, from this package's own metadata."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from bert_dp.config.error import ConfigError, Issue


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional package. `what`: setting, or `setting: use`, that needs it. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        setting, _, use = what.partition(": ")
        message = f"{use} needs {package}".strip()
        issue = Issue(setting, "needs_package", message, value=package, hint=install_command(extra))
        raise ConfigError([issue]) from None


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
