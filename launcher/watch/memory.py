"""Memory of the ranks over a run as seen from outside, and whether the kernel killed for want of it.

Every function that reads kernel files takes `root`, the directory that holds proc/ and sys/.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from bert_dp.cost import GIB
from bert_dp.record.models import RunMemory
from launcher.machine.environment import ROOT, control_groups

SAMPLE_S = 1.0
POINTS = 120  # of a curve; when there are as many, neighbours become one and the interval doubles
GROUP = "control group"
BARS = "▁▂▃▄▅▆▇█"
BARS_SHOWN = 30


class MemoryWatch:
    """Samples once a second at most; keeps no more than `POINTS` values a curve however long the run."""

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic):
        self._root, self._clock = root, clock
        self._kills_before = oom_kills(root)
        self._rows: list[dict[str, float]] = []
        self._stride, self._in_last, self._next = 1, 0, 0.0

    def sample(self, workers: Mapping[int, psutil.Process]) -> None:
        """Note the resident memory of the workers (rank -> process) when the last note is a second old."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        row = {}
        for rank, worker in workers.items():
            with contextlib.suppress(psutil.Error):
                if resident := worker.memory_info().rss:  # a process that has just ended has none
                    row[f"rank {rank}"] = resident / GIB
        if (group := group_bytes(self._root)) is not None:
            row[GROUP] = group / GIB
        self._note(row)

    def _note(self, row: dict[str, float]) -> None:
        if self._in_last % self._stride:
            self._rows[-1] = _greater(self._rows[-1], row)
        else:
            if len(self._rows) == POINTS:
                self._rows = [_greater(a, b) for a, b in zip(*[iter(self._rows)] * 2, strict=True)]
                self._stride *= 2
            self._rows.append(row)
            self._in_last = 0
        self._in_last += 1

    def facts(self) -> RunMemory:
        """The curves so far, and the out-of-memory kills since the watch began."""
        names = sorted({name for row in self._rows for name in row}, key=_natural)
        curves = {n: [round(row[n], 3) for row in self._rows if n in row] for n in names}
        before, after = self._kills_before, oom_kills(self._root)
        kills = after[0] - before[0] if before and after and before[1] == after[1] else None
        return RunMemory(
            curves_gib=curves,
            interval_s=SAMPLE_S * self._stride,
            oom_kills=kills,
            counter=after[1] if after else None,
        )


def oom_kills(root: Path = ROOT) -> tuple[int, str] | None:
    """Processes killed for want of memory so far, and the counter read: that of our control group (cgroup v2
    memory.events, v1 memory.oom_control), else the whole machine's. None when there is none.

    A group counts its own processes whichever limit was hit, the machine's included (kernel documentation,
    admin-guide/cgroup-v2, memory.events).
    """
    places = [
        group / name
        for group in reversed(control_groups(root, "memory"))
        for name in ("memory.events", "memory.oom_control")
    ]
    for path in (*places, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1]), str(path)
    return None


def group_bytes(root: Path = ROOT) -> int | None:
    """Memory that our control group uses, file cache included; None where there is no such group."""
    for group in reversed(control_groups(root, "memory")):
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                return int((group / name).read_text())
    return None


def sparkline(values: Sequence[float]) -> str:
    """At most `BARS_SHOWN` bars from 0 to the greatest value; a bar is the greatest of what it stands for."""
    if not values or max(values) <= 0:
        return ""
    bars = min(BARS_SHOWN, len(values))
    cuts = [len(values) * i // bars for i in range(bars + 1)]
    shown = [max(values[a:b]) for a, b in itertools.pairwise(cuts)]
    return "".join(BARS[min(len(BARS) - 1, int(v / max(values) * len(BARS)))] for v in shown)


def _greater(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in a.keys() | b.keys()}


def _natural(name: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", name)
    return (int(digits) if digits else 2**31), name
