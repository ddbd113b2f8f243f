"""What the console shows while the ranks run: rank 0's lines, and one live line of progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import report

if TYPE_CHECKING:
    from rich.console import Console

PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}
PLAIN_PROGRESS_S = 10.0  # between progress lines when the console is not a terminal


def show(console: Console, what: Any, **options: Any) -> None:
    """Print; a reader that has gone away must not end the run."""
    try:
        console.print(what, **options)
        console.file.flush()
    except (OSError, ValueError, SystemExit):  # rich answers a broken pipe with SystemExit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Tail:
    """The whole lines added to a file since the last call; a replaced file is read from its start."""

    def __init__(self, path: Path, *, skip_present: bool = False):
        self._path = path
        self._inode = self._offset = 0
        if skip_present and path.exists():
            status = path.stat()
            self._inode, self._offset = status.st_ino, status.st_size

    def lines(self) -> tuple[list[str], bool]:
        """The new lines, and whether the file is another one than before."""
        try:
            file = self._path.open("rb")
        except OSError:
            return [], False
        with file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            if replaced:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return (whole.decode("utf-8", "replace").splitlines() if newline else []), replaced


class Display:
    """A context; call `poll` several times a second."""

    def __init__(self, run_dir: Path, console: Console, hours: float | None):
        self._console, self._hours = console, hours
        self._log = Tail(run_dir / "logs" / "rank-0.log", skip_present=True)
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._lines: list[dict[str, Any]] = []
        self._last_plain = 0.0
        self._live: Any = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live("starting", console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, SystemExit):
                self._live.stop()

    def poll(self) -> None:
        """Show what the ranks have written since the last call."""
        for line in self._log.lines()[0]:
            show(self._console, line, **PLAIN)
        fresh, replaced = self._metrics.lines()
        if replaced:
            self._lines = []
        for line in fresh:
            try:
                self._lines = [*self._lines[-50:], json.loads(line)]
            except ValueError:
                continue
        if not fresh or not self._lines:
            return
        left = report.eta_s(self._lines, self._hours)
        text = report.progress_line(self._lines[-1], eta=left)
        if self._live is not None:
            self._live.update(text)
        elif time.monotonic() - self._last_plain >= PLAIN_PROGRESS_S:
            self._last_plain = time.monotonic()
            show(self._console, text, **PLAIN)
