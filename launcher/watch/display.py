"""Console output while the ranks run: lines of rank 0, and one live line of progress."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config import Config
from bert_dp.record.models import HeldOut, Summary
from launcher import results
from launcher.log import PLAIN, show
from launcher.report import heldout
from launcher.report.numbers import (
    count_of,
    format_count,
    format_eta,
    format_lr,
    format_percent,
    format_si,
    number,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

STAY_S = 10.0  # between lines that stay above the bar of a terminal; elsewhere each is shown
READ_BYTES = 2**20  # of a file at once
LINE_CHARS = 1000
LINES_PER_S, MAX_BURST = 20, 200  # of rank 0 on the console; more stay in its log
ETA_LINES = 20  # logged steps over which the remaining time is extrapolated


class Tail:
    """Read the whole lines added to a file since the last call. A replaced file is read from its start.

    A call reads READ_BYTES. With `newest` a reader that is further behind skips to the last READ_BYTES, and a
    line longer than that is dropped.
    """

    def __init__(self, path: Path, *, skip_present: bool = False, newest: bool = False):
        self._path, self._newest = path, newest
        self._inode = self._offset = 0
        if skip_present and path.exists():
            status = path.stat()
            self._inode, self._offset = status.st_ino, status.st_size

    def lines(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether the file is another one than before. A file that cannot be read
        now, as on a file server that does not answer, has no new lines."""
        try:
            return self._read()
        except OSError:
            return [], False

    def _read(self) -> tuple[list[str], bool]:
        """Raises OSError."""
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.read(1)  # an error must come before anything is noted
            replaced = self._inode != 0 and (status.st_ino != self._inode or status.st_size < self._offset)
            if replaced or not self._inode:
                self._inode, self._offset = status.st_ino, 0
            if self._newest and status.st_size - self._offset > READ_BYTES:
                file.seek(status.st_size - READ_BYTES)
                self._offset = file.tell() + len(file.readline(READ_BYTES))
            file.seek(self._offset)
            whole, newline, _ = file.read(READ_BYTES).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return (whole.decode("utf-8", "replace").split("\n") if newline else []), replaced


class Display:
    """A context; call `poll` several times a second.

    It shows the lines of rank 0. Lines of the others are in their logs, and on a failure in its card. Once a
    rank has failed, no more lines are shown: the cause comes next.
    """

    def __init__(self, run_dir: Path, console: Console, config: Config):
        self._console, self._config, self._run_dir = console, config, run_dir
        self._log = Tail(run_dir / "logs" / "rank-0.log", skip_present=True, newest=True)
        self._allowed, self._polled, self._flooded = float(MAX_BURST), time.monotonic(), False
        self._metrics = Tail(run_dir / "metrics.jsonl", skip_present=True)
        self._evals = Tail(run_dir / "evals.jsonl")
        self._evaluated = set(self._evals.lines()[0])  # the file is replaced with every line that it gets
        self._lines: list[dict[str, Any]] = []
        self._stayed = -STAY_S
        self._bar: Progress | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            from rich import progress

            columns = (progress.BarColumn(20), progress.TextColumn("{task.description}", markup=False))
            self._bar = progress.Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        summary = results.find(self._run_dir / "summary.json", Summary)
        if summary is not None and summary.status != "failed":
            self._show_log()
        if self._bar is not None:
            with contextlib.suppress(OSError, SystemExit):
                self._bar.stop()

    def poll(self) -> None:
        """Show what rank 0 has written since the last call."""
        fresh, replaced = self._metrics.lines()
        evaluated = [line for line in self._evals.lines()[0] if line not in self._evaluated]
        self._show_log()  # lines before a step stand before it
        if replaced:
            self._lines = []
        for line in fresh:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._lines = [*self._lines[-50:], json.loads(line)]
                if not replaced:  # else they are the lines from before a resume
                    self._show_progress()
        self._evaluated.update(evaluated)
        for line in evaluated:
            with contextlib.suppress(ValueError, TypeError):
                self._note(heldout_line(json.loads(line)))

    def _show_progress(self) -> None:
        """The newest line on the bar, and as a line that stays: on a terminal one in STAY_S."""
        line, now = self._lines[-1], time.monotonic()
        left = eta_s(self._lines, self._config.schedule.hours)
        if self._bar is not None:
            (bar,) = self._bar.task_ids
            text = bar_text(line, eta=left, unit=self._config.loss_unit)
            self._bar.update(bar, completed=line["progress"], description=text)
            if now - self._stayed < STAY_S:
                return
        self._stayed = now
        self._note(progress_line(line, eta=left, unit=self._config.loss_unit))

    def _note(self, text: str) -> None:
        show(self._console, text, **PLAIN)

    def _show_log(self) -> None:
        """Show the newest lines of rank 0, LINES_PER_S of them after a burst."""
        lines = [text for line in self._log.lines()[0] if (text := readable(line))]
        with contextlib.suppress(OSError):  # a file server that does not answer
            if any((self._run_dir / "logs").glob("rank-*.error.json")):  # written before its traceback
                return
        now = time.monotonic()
        self._allowed = min(MAX_BURST, self._allowed + LINES_PER_S * (now - self._polled))
        self._polled = now
        shown = lines[-max(1, int(self._allowed)) :]
        self._allowed = max(0.0, self._allowed - len(shown))
        if len(shown) < len(lines) and not self._flooded:
            self._note("lines are left out, see logs/rank-0.log")
        self._flooded = len(shown) < len(lines)
        for line in shown:
            self._note(line)


def progress_line(metrics: Mapping[str, Any], *, eta: float | None = None, unit: str = "nats") -> str:
    """One line of metrics.jsonl for the console; `eta` in seconds, `unit` of the loss."""
    ranks = count_of(metrics.get("world_size"), "rank")
    return " | ".join(
        (
            f"step {format_count(metrics.get('step'))}",
            format_percent(metrics.get("progress")),
            f"loss {heldout.loss_in(unit, metrics.get('loss'))}",
            f"lr {format_lr(metrics.get('lr'))}",
            f"{format_si(metrics.get('tokens_per_s'), 'tokens/s')} over {ranks}",
            format_si(metrics.get("global_steps_per_s"), "global steps/s"),
            *([] if eta is None else [f"left {format_eta(eta)}"]),
        )
    )


def bar_text(metrics: Mapping[str, Any], *, eta: float | None = None, unit: str = "nats") -> str:
    """The same beside a bar, within 60 characters."""
    return " | ".join(
        (
            format_percent(metrics.get("progress")),
            f"loss {heldout.loss_in(unit, metrics.get('loss'))}",
            format_si(metrics.get("tokens_per_s"), "tokens/s"),
            *([] if eta is None else [f"left {format_eta(eta)}"]),
        )
    )


def heldout_line(line: Mapping[str, Any]) -> str:
    """One line of evals.jsonl for the console. Raises ValueError."""
    measured = HeldOut.model_validate(line)
    parts = (
        f"step {format_count(line.get('step'))}",
        f"held-out loss {heldout.loss_text(measured.loss, measured)}",
        heldout.basis(measured),
        heldout.scores_text(measured),
    )
    return " | ".join(filter(None, parts))


def eta_s(lines: Sequence[Mapping[str, Any]], hours: float | None = None) -> float | None:
    """Seconds left: what remains of a budget in hours, else at the pace of the last lines of metrics.jsonl.

    None until the lines tell.
    """
    if hours is not None and lines:
        done = number(lines[-1].get("progress"))
        return None if done is None else (1 - done) * hours * 3600
    recent = [(number(line.get("elapsed_s")), number(line.get("progress"))) for line in lines[-ETA_LINES:]]
    points = [(t, f) for t, f in recent if t is not None and f is not None]
    while len(points) > 1 and points[0] >= points[-1]:
        points.pop(0)  # before a resume the clock or the progress stood higher
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    (start, done), (now, progress) = points[0], points[-1]
    return max(0.0, (1 - progress) * (now - start) / (progress - done))


def readable(line: str) -> str:
    """Make a line of a log printable and bounded; of a progress bar the last state remains."""
    states = [part for part in line.split("\r") if part]
    line = record.printable(states[-1]) if states else ""
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} ..."
