"""The Python API: `train` runs the verb as a child process, and a Run holds the files of its directory.

The caller's signal handlers, umask, threads and standard streams stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.files.models import Failure, Summary, kind_of_text
from launcher import job
from launcher.children import child_environment, describe_exit_code, module_command, reaper
from launcher.report.run_page import PAGE
from launcher.run.trials import read_summary

PathLike = str | os.PathLike[str]
ERROR, FAILED = "error: ", "failed: "  # begin a line of bad input, and the cause of a failure
NO_TERMINAL = {"FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}  # a notebook asks for colors; a bar needs a terminal


@dataclasses.dataclass(frozen=True)
class Run(os.PathLike[str]):
    """The files of a run directory as they were read. A Run is accepted wherever a path is."""

    directory: Path
    summary: Summary | None = dataclasses.field(repr=False)
    """summary.json; None while the run goes on, and after it was killed."""
    checkpoint: Path | None
    """The newest checkpoint."""
    report: Path | None
    """report.html"""
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)
    """metrics.jsonl, a record per logged step: `pandas.DataFrame(run.metrics)`."""
    evals: list[dict[str, Any]] = dataclasses.field(repr=False)
    """evals.jsonl, a record per held-out evaluation."""

    def __fspath__(self) -> str:
        return str(self.directory)


class TrainingFailed(RuntimeError):
    """A run that started and failed; the message is the cause, with its fixes."""

    def __init__(self, failure: Failure, run: Run):
        super().__init__(failure, run)
        self.failure = failure
        self.cause = failure.headline()
        self.kind = failure.kind
        self.run = run

    def __str__(self) -> str:
        place = [f"at {self.failure.where}"] if self.failure.where else []
        return "\n".join([self.cause, *place, *self.failure.fix, f"run: {self.run.directory}"])


def train(
    config: PathLike | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    settings: Mapping[str, Any] | None = None,
    run_dir: PathLike | None = None,
    resume: PathLike = "auto",
    launcher: Literal["torchrun", "accelerate", "deepspeed"] = "torchrun",
) -> Run:
    """Pretrain with the configuration at `config`, or of that name, as `bert-dp train` does.

    `settings` override the configuration: `{"schedule.steps": 20, "data.sources": ["a.txt"]}`, nested or
    dotted. The same `run_dir` continues its run; the default is runs/NAME-DATE-TIME. The verb's lines go to
    sys.stdout. On KeyboardInterrupt the ranks finish their step and save, then it is raised; a second one
    ends them at once. If this process is killed, the run ends.

    Raises ConfigError, with every issue, for bad input, TrainingFailed and KeyboardInterrupt.
    """
    place = None if run_dir is None else Path(run_dir).expanduser()
    file = job.find_config(None if config is None else os.fspath(config), place)
    directory = job.output_directory(place, "runs", file.stem)
    options = {"nproc": nproc, "launcher": launcher, "run-dir": directory, "resume": os.fspath(resume)}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += [word for item in overrides(settings or {}) for word in ("--set", item)]
    before = read_summary(directory)
    ended = _follow(["train", *words, "--", *([] if config is None else [os.fspath(config)])])
    if ended.code == 2:
        lines = [line.removeprefix(ERROR) for line in ended.lines if line.startswith(ERROR)]
        told = [Issue("", "unsupported", line) for line in lines or ended.lines]
        raise ConfigError(ended.issues or told)
    if ended.interrupted and ended.code != 1:
        raise KeyboardInterrupt(f"stopped; the same call with run_dir={str(directory)!r} goes on")
    run = _read(directory)
    if ended.code == 0:
        return run
    summary = None if run.summary == before else run.summary  # of this start
    failure = summary.failure if summary is not None else None
    raise TrainingFailed(failure or _printed_failure(ended), run)


def read_run(directory: PathLike) -> Run:
    """Read a run directory, also while its run goes on. Raises ConfigError if it is none."""
    path = Path(directory).expanduser().resolve()
    if not (path / "config.yaml").is_file():
        raise ConfigError([Issue(str(path), "not_found", "not a run directory (no config.yaml)")])
    return _read(path)


def overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each setting as `a.b=value` with a JSON value, which YAML reads. Raises TypeError."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value, ensure_ascii=False, default=_plain)}"


def _plain(value: Any) -> Any:
    """Convert a number of numpy or torch, or a path, for JSON."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _read(directory: Path) -> Run:
    newest = files.newest_checkpoint_facts(directory) if (directory / "checkpoints").is_dir() else None
    page = directory / PAGE
    return Run(
        directory=directory,
        summary=read_summary(directory),
        checkpoint=newest[0] if newest else None,
        report=page if page.is_file() else None,
        metrics=list(files.read_lines(directory / "metrics.jsonl")),
        evals=list(files.read_lines(directory / "evals.jsonl")),
    )


def _printed_failure(ended: _Ended) -> Failure:
    """Describe the end of a verb by its exit code and by what it printed last."""
    if ended.code < 0:
        return Failure(message=describe_exit_code(ended.code, ""), kind="killed")
    if ended.code > 128:
        return Failure(message=f"{signal.Signals(ended.code - 128).name}: stopped", kind="stopped")
    heads = [line for line in ended.lines if line.startswith((FAILED, ERROR))]
    cause = (heads or [f"exit code {ended.code}"])[-1].removeprefix(FAILED).removeprefix(ERROR)
    return Failure(message=cause, kind=kind_of_text(cause))


@dataclasses.dataclass(frozen=True)
class _Ended:
    code: int
    """-N = killed by signal N."""
    lines: list[str]
    interrupted: bool = False
    issues: list[Issue] = dataclasses.field(default_factory=list)


def _follow(arguments: list[str]) -> _Ended:
    """Run a verb of ours and print its lines.

    It has a session of its own: an interrupt of the terminal or notebook reaches only us, and is passed on.
    """
    lines: list[str] = []
    interrupted = False
    with tempfile.TemporaryDirectory() as scratch, reaper(Path(scratch)):
        issues = Path(scratch) / "issues.json"
        process = subprocess.Popen(
            [*module_command("launcher"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **NO_TERMINAL, **child_environment(), job.ISSUES_FILE: str(issues)},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            while process.returncode is None:
                try:
                    for line in process.stdout:
                        lines.append(line.rstrip("\n"))
                        sys.stdout.write(line)
                        sys.stdout.flush()
                    process.wait()
                except KeyboardInterrupt:
                    interrupted = True
                    _signal(process, signal.SIGINT)
        finally:
            if process.poll() is None:  # printing failed
                _signal(process, signal.SIGTERM)
                process.wait()
            process.stdout.close()
        found = json.loads(issues.read_text())["issues"] if issues.exists() else []
    return _Ended(process.returncode, lines, interrupted, [Issue(**issue) for issue in found])


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """Signal the verb and the processes in its session, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
