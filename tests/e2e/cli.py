"""Run `bert-dp` as a user does, in a separate process or, with `here`, in this process."""

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil

from bert_dp.config import dump_config, load_config
from launcher.cli import app
from launcher.job import find_config
from tests.helpers import read_json

T = TypeVar("T")
TINY = (
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=32",
    "data.sequence_length=16",
    "batch.global_size=8",
    "batch.micro_size=2",
    "batch.ramp_fraction=0",
    "batch.ramp_quantum=null",
    "schedule.steps=2",
    "log.every_steps=1",
    "checkpoint.every_steps=0",
    "eval.every_steps=0",
    "eval.max_sequences=8",
    "precision=fp32",
)


def tiny(shards: Path, *more: str) -> list[str]:
    """Return `--set` options that shrink any shipped configuration to a second of work on `shards`."""
    items = (*TINY, f"data.path={shards}", *more)
    return [part for item in items for part in ("--set", item)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "launcher", *arguments]


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the umask of this process and of the processes that it starts inside the block."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Return `folder` and the paths in it whose mode gives other users access."""
    return [str(p) for p in (folder, *folder.rglob("*")) if p.lstat().st_mode & 0o077]


Done = subprocess.CompletedProcess[str]


def ended(done: Done, code: int | None) -> Done:
    """Return a finished command after checking its exit code (None: any)."""
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def bert_dp(
    *arguments: str, code: int | None = 0, cwd: Path | None = None, timeout: float = 400, **environ: str
) -> Done:
    environ = {**os.environ, "COLUMNS": "160", **environ}
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
        env=environ,
    )
    return ended(done, code)


def here(*arguments: str, cwd: Path | None = None, **environ: str) -> Done:
    """Run a command without ranks in this process, ten times as fast as `bert_dp`. Accept any exit code."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["bert-dp", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": "160", **environ}),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            app.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def accepted(*arguments: str, cwd: Path | None = None, **environ: str) -> str:
    """Run a command in this process, check that it exits with 0, and return its standard output."""
    return ended(here(*arguments, cwd=cwd, **environ), 0).stdout


def refused(*arguments: str, cwd: Path | None = None, **environ: str) -> str:
    """Run a command in this process, check that it exits with 2 and no traceback, and return its errors."""
    done = ended(here(*arguments, cwd=cwd, **environ), 2)
    assert "Traceback" not in done.stderr
    return done.stderr


def start(
    *arguments: str, cwd: Path | None = None, stdout: Any = subprocess.PIPE, **environ: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "160", **environ},
    )


def train_command(shards: Path, run_dir: Path, *settings: str, nproc: int = 2) -> list[str]:
    """Return the command that trains the shrunk quickstart. Each string may list several settings."""
    items = " ".join(settings).split()
    return ["train", "quickstart", *tiny(shards, *items), "--nproc", str(nproc), "--run-dir", str(run_dir)]


def train(
    shards: Path,
    run_dir: Path,
    *settings: str,
    nproc: int = 2,
    options: tuple[str, ...] = (),
    code: int | None = 0,
    timeout: float = 180,
    **environ: str,
) -> Done:
    """Run `bert-dp train` to its end and check the exit code (None: any)."""
    command_line = (*train_command(shards, run_dir, *settings, nproc=nproc), *options)
    return bert_dp(*command_line, code=code, timeout=timeout, **environ)


def begin(
    shards: Path, run_dir: Path, *settings: str, nproc: int = 2, options: tuple[str, ...] = (), **environ: str
) -> subprocess.Popen[str]:
    """Start `bert-dp train` and return its process."""
    return start(*train_command(shards, run_dir, *settings, nproc=nproc), *options, **environ)


def resume_run(
    run_dir: Path, *settings: str, nproc: int = 1, options: tuple[str, ...] = (), code: int | None = 0
) -> Done:
    """Resume the run of this directory without naming its configuration."""
    items = [part for item in " ".join(settings).split() for part in ("--set", item)]
    return bert_dp("train", "--run-dir", str(run_dir), "--nproc", str(nproc), *items, *options, code=code)


def write_config(run_dir: Path, shards: Path, *settings: str) -> Path:
    """Write the config.yaml of the shrunk quickstart, for ranks that no launcher starts."""
    run_dir.mkdir()
    config = load_config(
        find_config("quickstart"), [*TINY, f"data.path={shards}", *" ".join(settings).split()]
    )
    (run_dir / "config.yaml").write_text(dump_config(config))
    return run_dir / "config.yaml"


def processes_of(place: Path) -> list[psutil.Process]:
    """Return every process with this path in its command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(place) in " ".join(p.info["cmdline"] or ())]


def is_alive(process: psutil.Process) -> bool:
    """Return True if the process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def members(run_dir: Path) -> list[psutil.Process]:
    """Return the processes of a run except its launcher."""
    return processes_of(run_dir / "config.yaml")


def assert_none_left(place: Path, seconds: float = 15.0) -> None:
    """Check that every process with this path in its command line ends within `seconds`."""
    _, alive = psutil.wait_procs(processes_of(place), timeout=seconds)
    assert alive == []


def interrupted(
    arguments: list[str],
    place: Path,
    number: int,
    condition: Callable[[], object],
    *,
    patience_s: float = 15.0,
    **environ: str,
) -> Done:
    """Run a command, send it this signal once `condition` is true, and wait for its end. Check that every
    process with `place` in its command line then ends within `patience_s`."""
    process = start(*arguments, **environ)
    wait_for(lambda: condition() or process.poll() is not None, seconds=240)
    assert process.poll() is None, process.communicate()
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert_none_left(place, patience_s)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def wait_for(condition: Callable[[], T], seconds: float = 120.0) -> T:
    """Return the first true result of `condition`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return result


def trials_done(out: Path) -> dict[str, float]:
    """Return the name of each completed trial of a search and the time at which its summary was written."""
    summaries = [path.with_name("summary.json") for path in out.glob("trials/*/trial.json")]
    return {
        path.parent.name: path.stat().st_mtime
        for path in summaries
        if path.exists() and read_json(path)["status"] == "done"
    }


def step_reached(run_dir: Path, step: int) -> Callable[[], bool]:
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= step
