"""Where and by which command a record was made."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_dp.record import without_folders
from launcher.machine.environment import PACKAGES

ROOT = Path(__file__).resolve().parent.parent


def environment(date: str | None, packages: Iterable[str] = PACKAGES, **facts: Any) -> dict[str, Any]:
    """The command without folders, the date (None: today's), the machine, the commit, the versions of those
    packages that are installed, and `facts`."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    script = Path(sys.argv[0]).name
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *map(without_folders, sys.argv[1:])]),
        "date": date or datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit.stdout.strip(),
        **facts,
    }
