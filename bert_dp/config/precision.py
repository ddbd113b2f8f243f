"""What `precision: auto` is: one rule for the launcher, which estimates and warns, and for ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")
BF16_UNITS = ("amx_bf16", "avx512_bf16")  # CPU flags, as Linux names them

REFUSED = {"deepspeed": ("fp64", "fp16")}
"""Engine -> precisions that it does not train in."""


def bf16_units(root: Path = ROOT) -> tuple[str, ...]:
    """Those of BF16_UNITS that this machine's CPU has; () also where no /proc/cpuinfo tells. `root`: the
    directory that holds proc/."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    flags = found[1].split() if found else []
    return tuple(unit for unit in BF16_UNITS if unit in flags)


def decide_precision(
    setting: str, engines: Iterable[str], *, on_gpu: bool, has_bf16: bool, kept: str | None = None
) -> str:
    """`setting`; where it is auto: `kept`, which a checkpoint was trained in, else bf16 where every rank's
    device multiplies it (`has_bf16`) and every engine takes it, else fp16 on a GPU and fp32 on a CPU."""
    if setting != "auto":
        return setting
    if kept is not None:
        return kept
    if has_bf16 and not any("bf16" in REFUSED.get(engine, ()) for engine in engines):
        return "bf16"
    return "fp16" if on_gpu else "fp32"
