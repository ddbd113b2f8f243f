"""Show the progress of a run on the console: the output of rank 0 and, on a terminal, a progress bar."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import files
from bert_dp.config import Config
from bert_dp.files.models import HeldOut, Summary
from launcher import results
from launcher.log import PLAIN, show
from launcher.report import formats, run_page
from launcher.report.formats import format_count, format_si, number
from launcher.watch.failure import CRASH

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

STEP_LINE_S = 10.0  # minimum time between two step lines on a terminal; elsewhere, every step line is shown
LINE_CHARS = 1000
MAX_LINES = 50  # maximum number of lines of rank 0's log shown per poll
ETA_LINES = 20  # number of logged steps used to extrapolate the remaining time
QUIET_S = 30.0  # if there is no progress bar, rank 0's activity is printed after this time without output
ACTIVITIES = {
    "setup": "setting up",
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "saving",
    "done": "finishing",
}
"""Heartbeat phase -> description on the console. Every other phase is shown as a training step."""


class Display:
    """Context manager that shows the output of rank 0; call `poll` several times a second.

    The output of every other rank is only in its log. Once a rank has recorded an error, rank 0's log is
    no longer shown, because the failure card follows and quotes the failed rank's log.
    """

    def __init__(self, run_dir: Path, console: Console, config: Config):
        self._console, self._config, self._run_dir = console, config, run_dir
        self._log = files.Tail(run_dir / "logs" / "rank-0.log", skip_present=True)
        self._metrics = files.Tail(run_dir / "metrics.jsonl", skip_present=True)
        self._evals = files.Tail(run_dir / "evals.jsonl")
        self._evaluated = set(self._evals.lines()[0])  # lines already read; a rewritten file may repeat them
        self._lines: list[dict[str, Any]] = []
        self._step_shown_s = -STEP_LINE_S
        self._left_s: float | None = None  # remaining time, estimated at _line_s
        self._line_s = self._noted_s = self._activity_s = time.monotonic()
        self._activity = ""  # activity of rank 0 since _activity_s
        self._flooded = self._crashed = False
        self._bar: Progress | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            from rich import progress

            columns = (progress.BarColumn(12), progress.TextColumn("{task.description}", markup=False))
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
        """Show rank 0's new output and activity. On a terminal, limit step lines to one per STEP_LINE_S."""
        fresh, replaced = self._metrics.lines()
        evaluated = [line for line in self._evals.lines()[0] if line not in self._evaluated]
        self._show_log()  # first, because rank 0 printed these lines before it logged the steps
        if replaced:
            self._lines = []
        for line in fresh:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._lines = [*self._lines[-50:], json.loads(line)]
                if replaced:
                    continue  # this step was logged before the resume
                now, hours = time.monotonic(), self._config.schedule.hours
                self._left_s, self._line_s = eta_s(self._lines, hours), now
                if self._bar is None or now - self._step_shown_s >= STEP_LINE_S:
                    self._step_shown_s, unit = now, self._config.training_loss_unit
                    self._note(progress_line(self._lines[-1], eta=self._left_s, unit=unit))
        self._evaluated.update(evaluated)
        for line in evaluated:
            with contextlib.suppress(ValueError, TypeError):
                self._note(heldout_line(json.loads(line)))
        self._show_activity()

    def _show_activity(self) -> None:
        """Update the progress bar; if there is none, print rank 0's activity after QUIET_S without output."""
        beat, now = files.read_heartbeat(files.heartbeat_path(self._run_dir, 0)), time.monotonic()
        if self._bar is None and (beat is None or now - self._noted_s < QUIET_S):
            return
        activity = self._describe(beat, now)
        if self._bar is None:
            self._note(activity)
            return
        line = self._lines[-1] if self._lines else {}
        done, left = number(line.get("progress")), self._left_s
        if left and done is not None:  # extrapolate progress and time left from the newest line
            now_left = max(0.0, left - (now - self._line_s))
            done, left = 1 - (1 - done) * now_left / left, now_left
        if not activity.startswith("training"):
            left = None  # the estimate covers only training
        parts = [activity]
        if line:
            loss = run_page.loss_in(self._config.training_loss_unit, line.get("loss"))
            parts += [formats.format_percent(done), left_text(left), f"loss {loss}"]
        text = " | ".join(filter(None, parts))
        self._bar.update(self._bar.task_ids[0], completed=done, description=text)

    def _describe(self, beat: files.Heartbeat | None, now: float) -> str:
        """Describe rank 0's activity; once it has lasted 1 s, add its progress or duration."""
        phase, pieces = (files.PHASES[beat.phase], beat.done) if beat else ("", 0)
        activity = ACTIVITIES.get(phase, f"training step {format_count(beat.step)}" if beat else "starting")
        if beat is None and self._lines:  # rank 0 runs on another node
            activity = "training"
        if phase == "compile":
            facts = files.read_json(self._run_dir / "environment.json") or {}
            activity = activity if facts.get("worker", {}).get("compiled") else "running a trial step"
        if activity != self._activity:
            self._activity, self._activity_s = activity, now
        if now - self._activity_s < 1.0:
            return activity
        if pieces and (phase == "evaluate" or phase not in ACTIVITIES):
            return f"{activity}, {'batch' if phase == 'evaluate' else 'micro batch'} {pieces}"
        return f"{activity} for {now - self._activity_s:.0f} s"

    def _note(self, text: str) -> None:
        self._noted_s = time.monotonic()
        show(self._console, text, **PLAIN)

    def _show_log(self) -> None:
        """Show up to MAX_LINES new lines of rank 0's log. Omit a crash report; the failure card shows it."""
        lines = [text for line in self._log.lines()[0] if (text := readable(line))]
        with contextlib.suppress(OSError):  # for example, a file server does not respond
            if any((self._run_dir / "logs").glob("rank-*.error.json")):  # the failure card follows
                return
        for i, line in enumerate(lines):
            self._crashed = self._crashed or line.startswith(CRASH)
            if self._crashed:
                lines = lines[:i]
                break
        flooded = len(lines) > MAX_LINES
        if flooded and not self._flooded:
            self._note("some lines are omitted; see logs/rank-0.log")
        self._flooded = flooded
        for line in lines[-MAX_LINES:]:
            self._note(line)


def progress_line(metrics: Mapping[str, Any], *, eta: float | None = None, unit: str = "nats") -> str:
    """Format a line of metrics.jsonl for the console. `eta`: seconds left; `unit`: unit of the loss."""
    get = metrics.get
    parts = (
        f"step {format_count(get('step'))}",
        formats.format_percent(get("progress")),
        f"loss {run_page.loss_in(unit, get('loss'))}",
        f"lr {formats.format_lr(get('lr'))}",
        f"{format_si(get('tokens_per_s'), 'tokens/s')} over {formats.count_of(get('world_size'), 'rank')}",
        format_si(get("global_steps_per_s"), "global steps/s"),
        left_text(eta),
    )
    return " | ".join(filter(None, parts))


def left_text(seconds: float | None) -> str:
    """Format the time left. If it is unknown or under 1 s, return "": the run may still evaluate and save."""
    return "" if seconds is None or seconds < 1 else f"left {formats.format_duration(seconds)}"


def heldout_line(line: Mapping[str, Any]) -> str:
    """Format a line of evals.jsonl for the console. Raise ValueError if the line is damaged."""
    measured = HeldOut.model_validate(line)
    parts = (
        f"step {format_count(line.get('step'))}",
        f"held-out loss {run_page.loss_text(measured.loss, measured)}",
        run_page.basis_of(measured),
        run_page.scores_text(measured),
    )
    return " | ".join(filter(None, parts))


def eta_s(lines: Sequence[Mapping[str, Any]], hours: float | None = None) -> float | None:
    """Estimate how many seconds of training are left. The estimate is based on the time budget `hours` if it
    is given, else on recent progress. `lines`: lines of metrics.jsonl. Return None if they do not suffice."""
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
    """Make a log line printable and limit its length; keep only the last state of a progress bar."""
    states = [part for part in line.split("\r") if part]
    line = files.printable(states[-1]) if states else ""
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} ..."
