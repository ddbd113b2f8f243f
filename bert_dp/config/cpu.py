"""What Linux says of this machine's CPU; for the launcher and for ranks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")
BF16_UNITS = ("amx_bf16", "avx512_bf16")  # CPU flags, as Linux names them


def cpu_field(name: str, root: Path = ROOT) -> str:
    """The first value of a field of /proc/cpuinfo ("flags", "vendor_id", "model name"); "" where there is
    none. `root`: the directory that holds proc/."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    field = re.search(rf"^{name}\s*:(.*)$", text, re.MULTILINE)
    return field[1].strip() if field else ""


def bf16_units(root: Path = ROOT) -> tuple[str, ...]:
    """Those of BF16_UNITS that this machine's CPU has; () also where no /proc/cpuinfo tells."""
    flags = cpu_field("flags", root).split()
    return tuple(unit for unit in BF16_UNITS if unit in flags)
