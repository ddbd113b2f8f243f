"""bert-dp for Python: `train` is the verb in a process of its own, and a Run is what its directory holds.

So nothing of the caller's changes (signal handlers, umask, threads, standard streams), and it works in a
notebook and off the main thread as in a script.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bert_dp import record
from bert_dp.config import ConfigError, Issue
from bert_dp.record.models import FailureKind, Summary, kind_of_text
from launcher import job
from launcher.children import child_environment, ending, launcher_marks, module_command
from launcher.errors import ISSUES_FILE
from launcher.report.run_report import PAGE
from launcher.run.read_run import read_summary
from launcher.run.reaper import reaper

PathLike = str | os.PathLike[str]
ERROR, FAILED = "error: ", "failed: "  # before each line of bad input, and before the cause of a failure
LINES_KEPT = 1000  # of what a run says
NO_TERMINAL = {"FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}  # a kernel asks for colours; a bar needs a terminal


@dataclasses.dataclass(frozen=True)
class Run(os.PathLike[str]):
    """What a run directory held when it was read. It stands for its directory wherever a path is taken."""

    directory: Path
    summary: Summary | None = dataclasses.field(repr=False)
    """summary.json: how it ended. None while it goes on, and when it was killed."""
    checkpoint: Path | None
    """The newest."""
    report: Path | None
    """The page."""
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)
    """metrics.jsonl, a record for each logged step: `pandas.DataFrame(run.metrics)`."""
    evals: list[dict[str, Any]] = dataclasses.field(repr=False)
    """evals.jsonl, a record for each held-out evaluation."""

    def __fspath__(self) -> str:
        return str(self.directory)


class TrainingFailed(RuntimeError):
    """A run that was started and did not end well; the message is its cause, with what to do."""

    def __init__(self, cause: str, kind: FailureKind, run: Run):
        super().__init__(cause, kind, run)
        self.cause = cause
        self.kind = kind
        self.run = run
        """What it has left. Of a failure that a rank or the launcher could still write down,
        `run.summary` has all that is known."""

    def __str__(self) -> str:
        lines, summary = [self.cause], self.run.summary
        failure = summary.failure if summary is not None else None
        if failure is not None and failure.headline() == self.cause:
            lines += [*([f"at {failure.where}"] if failure.where else []), *failure.fix]
        return "\n".join([*lines, f"run: {self.run.directory}"])


def train(
    config: PathLike | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    settings: Mapping[str, Any] | None = None,
    run_dir: PathLike | None = None,
    resume: PathLike = "auto",
    launcher: Literal["torchrun", "accelerate", "deepspeed"] = "torchrun",
) -> Run:
    """`bert-dp train`: pretrain by the configuration at `config`, or of that name, and return the run.

    `settings` override the configuration: `{"schedule.steps": 20, "data.sources": ["a.txt"]}`, nested or
    dotted. The same `run_dir` goes on where its run stopped; the default is runs/NAME-DATE-TIME. The lines
    of the verb go to sys.stdout. A KeyboardInterrupt in this call is Ctrl-C there: the ranks finish their
    step and save, then it is raised; a second one ends them at once. Should this process be killed, the run
    is ended.

    Raises ConfigError, with every issue, for bad input, TrainingFailed and KeyboardInterrupt.
    """
    place = None if run_dir is None else Path(run_dir).expanduser()
    file = job.find_config(None if config is None else os.fspath(config), place)
    directory = job.output_directory(place, "runs", file.stem)
    options = {"nproc": nproc, "launcher": launcher, "run-dir": directory, "resume": os.fspath(resume)}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += [word for item in overrides(settings or {}) for word in ("--set", item)]
    before = _written(directory)
    ended = _follow(["train", *words, "--", *([] if config is None else [os.fspath(config)])])
    if ended.code == 2:
        lines = [line.removeprefix(ERROR) for line in ended.said if line.startswith(ERROR)]
        raise ConfigError(ended.issues or lines or ended.said)
    if ended.interrupted and ended.code != 1:
        raise KeyboardInterrupt(f"stopped; the same call with run_dir={str(directory)!r} goes on")
    run = _read(directory)
    if ended.code == 0:
        return run
    if run.summary is None or _written(directory) == before:  # it ended before, or could not be written
        cause = _cause_said(ended)
        raise TrainingFailed(cause, "killed" if ended.code < 0 else kind_of_text(cause), run)
    status = f"{signal.Signals(ended.code - 128).name}: stopped" if ended.code > 128 else "failed"
    failure = run.summary.failure
    if failure is None:
        raise TrainingFailed(status, "stopped", run)
    raise TrainingFailed(failure.headline(), failure.kind, run)


def read_run(directory: PathLike) -> Run:
    """What a run directory holds, also of a run that goes on. Raises ConfigError where there is none."""
    path = Path(directory).expanduser().resolve()
    if not (path / "config.yaml").is_file():
        raise ConfigError([f"{path}: not a run directory (no config.yaml)"])
    return _read(path)


def overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each setting as `a.b=value`, the value as JSON, which YAML reads; TypeError for what is none."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value, ensure_ascii=False, default=_plain)}"


def _plain(value: Any) -> Any:
    """A number of numpy or torch, or a path, as JSON has it."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _read(directory: Path) -> Run:
    newest = record.newest_checkpoint_facts(directory) if (directory / "checkpoints").is_dir() else None
    page = directory / PAGE
    return Run(
        directory=directory,
        summary=read_summary(directory),
        checkpoint=newest[0] if newest else None,
        report=page if page.is_file() else None,
        metrics=list(record.read_lines(directory / "metrics.jsonl")),
        evals=list(record.read_lines(directory / "evals.jsonl")),
    )


def _cause_said(ended: _Ended) -> str:
    """Why a verb ended that could write no file of it: the head of its failure card, else its last line."""
    if ended.code < 0:
        return ending(ended.code, "")
    heads = [line for line in ended.said if line.startswith(FAILED)]
    return (heads or ended.said or [f"exit code {ended.code}"])[-1].removeprefix(FAILED).removeprefix(ERROR)


def _written(directory: Path) -> tuple[int, int] | None:
    """Which summary.json is there: that of an earlier start says nothing of this one."""
    try:
        status = (directory / "summary.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class _Ended:
    code: int
    """-N = killed by signal N."""
    said: list[str]
    interrupted: bool
    issues: Sequence[Issue] = ()
    """Of bad input, but for a command line that typer refuses."""


def _follow(arguments: list[str]) -> _Ended:
    """A verb of ours to its end. It is a session of its own: a terminal's or a notebook's interrupt comes to
    us alone, and is passed on once."""
    said: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
    interrupted = False
    with tempfile.TemporaryDirectory() as scratch, reaper(Path(scratch), launcher_marks()):
        process = subprocess.Popen(
            [*module_command("launcher"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **NO_TERMINAL, **child_environment(), ISSUES_FILE: f"{scratch}/issues.json"},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            while process.returncode is None:
                try:
                    for line in process.stdout:
                        said.append(line.rstrip("\n"))
                        _say(line)
                    process.wait()
                except KeyboardInterrupt:
                    interrupted = True
                    _signal(process, signal.SIGINT)
        finally:
            if process.poll() is None:  # what shows the lines has failed
                _signal(process, signal.SIGTERM)
                process.wait()
            process.stdout.close()
        told = record.read_json(Path(scratch) / "issues.json") or {}
    return _Ended(process.returncode, list(said), interrupted, [Issue(**i) for i in told.get("issues", ())])


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To the verb and what it has started in its session, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _say(line: str) -> None:
    """On the caller's stdout, whatever stands there; what cannot be shown does not end the run."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(line)
            sys.stdout.flush()
