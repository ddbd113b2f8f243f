"""The lines of N ranks as one stream: what all ranks say is said once, and no rank can flood it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

WAIT_S = 0.5  # that a line waits for its copies
WINDOW_S = 10.0
WINDOW_LINES = 200  # of a rank within WINDOW_S; the rest is counted


@dataclasses.dataclass
class _Held:
    number: int
    text: str
    since_s: float
    ranks: set[int]
    is_note: bool = False
    """Ours, not a rank's: shown as it is."""


@dataclasses.dataclass
class _Window:
    start_s: float
    shown: int = 0
    left_out: int = 0


class Collapser:
    """`add` lines as they are read, `release` what may be shown. Times in seconds on any one clock.

    A line joins an equal one of other ranks that still waits, unless that would turn around the order of its
    own rank's lines. Holds at most WINDOW_LINES lines of a rank.
    """

    def __init__(self, ranks: int):
        self._size = ranks
        self._held: collections.deque[_Held] = collections.deque()
        self._by_text: dict[str, list[_Held]] = {}
        self._number = 0
        self._newest: dict[int, int] = {}  # rank -> number of the last line that it said
        self._windows: dict[int, _Window] = {}

    def add(self, rank: int, line: str, now_s: float) -> None:
        """A line of a rank, in the order that it said them."""
        if not line.strip():
            return
        window = self._window(rank, now_s)
        if window.shown >= WINDOW_LINES:
            window.left_out += 1
            return
        window.shown += 1
        after = self._newest.get(rank, 0)
        for held in self._by_text.get(line, ()):
            if held.number > after and rank not in held.ranks:
                held.ranks.add(rank)
                self._newest[rank] = held.number
                return
        self._newest[rank] = self._hold(line, now_s, {rank}).number

    def count(self, rank: int, lines: int, now_s: float) -> None:
        """Lines that were not read: they are only counted."""
        self._window(rank, now_s).left_out += lines

    def note(self, text: str, now_s: float) -> None:
        """A line of ours, shown in its place among the ranks' lines."""
        self._hold(text, now_s, set(), is_note=True)

    def release(self, now_s: float, *, everything: bool = False) -> list[str]:
        """The lines that every rank has said or that have waited, in order; `everything`: the others too."""
        for rank in list(self._windows):
            if everything or now_s - self._windows[rank].start_s >= WINDOW_S:
                self._close(rank, now_s)
        out = []
        while self._held:
            held = self._held[0]
            complete = held.is_note or len(held.ranks) == self._size
            if not (everything or complete or now_s - held.since_s >= WAIT_S):
                break
            self._held.popleft()
            self._forget(held)
            out.append(held.text if held.is_note else self._say(held))
        return out

    def drop(self) -> None:
        """Forget all that waits."""
        self._held.clear()
        self._by_text.clear()
        self._windows.clear()

    def _window(self, rank: int, now_s: float) -> _Window:
        if rank in self._windows and now_s - self._windows[rank].start_s >= WINDOW_S:
            self._close(rank, now_s)
        return self._windows.setdefault(rank, _Window(now_s))

    def _close(self, rank: int, now_s: float) -> None:
        if left_out := self._windows.pop(rank).left_out:
            plural = "s" if left_out > 1 else ""
            text = f"rank {rank}: {left_out:,} more line{plural}, see logs/rank-{rank}.log"
            self.note(text, now_s)

    def _hold(self, text: str, now_s: float, ranks: set[int], *, is_note: bool = False) -> _Held:
        self._number += 1
        held = _Held(self._number, text, now_s, ranks, is_note)
        self._held.append(held)
        if not is_note:
            self._by_text.setdefault(text, []).append(held)
        return held

    def _forget(self, held: _Held) -> None:
        if same := self._by_text.get(held.text):
            same.remove(held)
            if not same:
                del self._by_text[held.text]

    def _say(self, held: _Held) -> str:
        if held.ranks == {0}:
            return held.text
        if len(held.ranks) == self._size:
            return f"{held.text} (x{self._size})"
        return f"[{name_ranks(held.ranks)}] {held.text}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 1-3`, `ranks 0,2-3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if runs and (len(runs) > 1 or runs[0][0] != runs[0][1]) else ''} {text}"
