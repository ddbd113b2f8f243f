"""Show a run on the console while it runs: lines of rank 0, and one live line of progress."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import files
from bert_dp.config import Config
from bert_dp.files.models import HeldOut, Summary
from launcher import results
from launcher.log import PLAIN, show
from launcher.report import run_page
from launcher.report.formats import (
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

STAY_S = 10.0  # between lines above the bar of a terminal; elsewhere each is shown
READ_BYTES = 2**20  # of a file at once
LINE_CHARS = 1000
MAX_LINES = 50  # of rank 0 on the console at a poll; more stay in its log
ETA_LINES = 20  # logged steps over which the remaining time is extrapolated


class Tail:
    """Reads the lines added to a file since the last call, READ_BYTES at most; a longer line comes in pieces.

    A replaced file is read from its start. With `skip_present` what the file holds already is left out.
    """

    def __init__(self, path: Path, *, skip_present: bool = False):
        self._path = path
        self._inode = self._offset = 0
        if skip_present and path.exists():
            status = path.stat()
            self._inode, self._offset = status.st_ino, status.st_size

    def lines(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether the file has been replaced. A file that cannot be read now, as on
        a file server that does not answer, has no new lines."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                replaced = self._inode not in (0, status.st_ino) or status.st_size < self._offset
                offset = 0 if replaced else self._offset
                file.seek(offset)
                data = file.read(READ_BYTES)
        except OSError:
            return [], False
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == READ_BYTES else 0)
        self._inode, self._offset = status.st_ino, offset + end
        text = data[:end].decode("utf-8", "replace").removesuffix("\n")
        return (text.split("\n") if end else []), replaced


class Display:
    """A context; call `poll` several times a second.

    It shows the lines of rank 0. Lines of the others are in their logs, and on a failure in its card. Once a
    rank has failed, no more lines are shown: the cause comes next.
    """

    def __init__(self, run_dir: Path, console: Console, config: Config):
        self._console, self._config, self._run_dir = console, config, run_dir
        self._log = Tail(run_dir / "logs" / "rank-0.log", skip_present=True)
        self._metrics = Tail(run_dir / "metrics.jsonl", skip_present=True)
        self._evals = Tail(run_dir / "evals.jsonl")
        self._evaluated = set(self._evals.lines()[0])  # the file is replaced with every line that it gets
        self._lines: list[dict[str, Any]] = []
        self._stayed = -STAY_S
        self._flooded = False
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
        """Show the newest line on the bar, and as a line that stays: on a terminal one in STAY_S."""
        line, now = self._lines[-1], time.monotonic()
        left, unit = eta_s(self._lines, self._config.schedule.hours), self._config.training_loss_unit
        if self._bar is not None:
            (bar,) = self._bar.task_ids
            text = progress_line(line, eta=left, unit=unit, short=True)
            self._bar.update(bar, completed=line["progress"], description=text)
            if now - self._stayed < STAY_S:
                return
        self._stayed = now
        self._note(progress_line(line, eta=left, unit=unit))

    def _note(self, text: str) -> None:
        show(self._console, text, **PLAIN)

    def _show_log(self) -> None:
        """Show the newest lines of rank 0, at most MAX_LINES."""
        lines = [text for line in self._log.lines()[0] if (text := readable(line))]
        with contextlib.suppress(OSError):  # a file server that does not answer
            if any((self._run_dir / "logs").glob("rank-*.error.json")):  # written before its traceback
                return
        flooded = len(lines) > MAX_LINES
        if flooded and not self._flooded:
            self._note("lines are left out, see logs/rank-0.log")
        self._flooded = flooded
        for line in lines[-MAX_LINES:]:
            self._note(line)


def progress_line(
    metrics: Mapping[str, Any], *, eta: float | None = None, unit: str = "nats", short: bool = False
) -> str:
    """Format a line of metrics.jsonl for the console; `eta` in seconds, `unit` of the loss. `short`: within
    60 characters, for beside the bar."""
    get = metrics.get
    progress, loss = format_percent(get("progress")), f"loss {run_page.loss_in(unit, get('loss'))}"
    tokens = format_si(get("tokens_per_s"), "tokens/s")
    parts = [progress, loss, tokens]
    if not short:
        tokens += f" over {count_of(get('world_size'), 'rank')}"
        steps = format_si(get("global_steps_per_s"), "global steps/s")
        step, lr = f"step {format_count(get('step'))}", f"lr {format_lr(get('lr'))}"
        parts = [step, progress, loss, lr, tokens, steps]
    return " | ".join([*parts, *([] if eta is None else [f"left {format_eta(eta)}"])])


def heldout_line(line: Mapping[str, Any]) -> str:
    """Format a line of evals.jsonl for the console. Raises ValueError."""
    measured = HeldOut.model_validate(line)
    parts = (
        f"step {format_count(line.get('step'))}",
        f"held-out loss {run_page.loss_text(measured.loss, measured)}",
        run_page.basis_of(measured),
        run_page.scores_text(measured),
    )
    return " | ".join(filter(None, parts))


def eta_s(lines: Sequence[Mapping[str, Any]], hours: float | None = None) -> float | None:
    """Estimate the seconds left: the rest of a budget in hours, else by the pace of the last lines of
    metrics.jsonl. None while that is not known."""
    if hours is not None and lines:
        done = number(lines[-1].get("progress"))
        return None if done is None else (1 - done) * hours * 3600
    recent = [(number(line.get("elapsed_s")), number(line.get("progress"))) for line in lines[-ETA_LINES:]]
    points = [(t, f) for t, f in recent if t is not None and f is not None]
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    (start, done), (now, progress) = points[0], points[-1]
    return max(0.0, (1 - progress) * (now - start) / (progress - done))


def readable(line: str) -> str:
    """Make a line of a log printable and bounded; of a progress bar the last state remains."""
    states = [part for part in line.split("\r") if part]
    line = files.printable(states[-1]) if states else ""
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} ..."
