"""Processes that are started and waited for: `python -m` of our own modules, which end with us and import
nothing from the current folder; commands of the system; and the reaper, which outlives us by a moment."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError, Issue
from bert_dp.files import LAUNCHER_PID, LAUNCHER_START, cache_issues, cache_root, start_ticks

NO_ANSWER = "no answer within"  # and how long, says run_command of a time-out
KILLED_S = 1.0  # that a command has to be gone after SIGKILL
CLEANING_S = 10.0  # that a module has to remove its files after a signal
PATIENCE_S = 1.0  # that ranks have to end by themselves after the launcher
SEARCH_S = (
    5.0  # a process may be starting others while it is killed: the reaper looks again while any is found
)
REAPER_IMPORTS = """
from __future__ import annotations
import contextlib, os, shutil, signal, sys, time
from pathlib import Path
"""


def module_command(module: str, *options: str) -> list[str]:
    """Return the beginning of a command line that runs a module, whatever lies in the current folder: `python
    -m` alone would look there first. `options` are Python's own."""
    return [sys.executable, "-P", *options, "-m", module]


def child_environment() -> dict[str, str]:
    """Return what every process of ours gets on top of our environment: our life to follow, and no module
    from the current folder, which launchers hand on to the processes that they start."""
    pid = os.getpid()
    return {LAUNCHER_PID: str(pid), LAUNCHER_START: start_ticks(pid), "PYTHONSAFEPATH": "1"}


def kernel_caches() -> dict[str, str]:
    """Make a directory for torch's compiled kernels below our cache; return the variable that names it. One
    that the user has set stays. {} if our cache cannot be used: torch then takes a temporary directory."""
    # the trials of a search have a temporary directory of their own: each would compile the same kernels anew
    name, folder = "TORCHINDUCTOR_CACHE_DIR", cache_root() / "kernels"
    if cache_issues():
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {name: os.environ.get(name, str(folder))}


def launcher_marks() -> list[str]:
    """Return NAME=value of the variables that every process of ours has, and none of another launcher's."""
    environ = child_environment()
    return [f"{name}={environ[name]}" for name in (LAUNCHER_PID, LAUNCHER_START)]


def start_module(
    module: str,
    arguments: list[str],
    *,
    scratch: str | None = None,
    environ: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> subprocess.Popen[str]:
    """Start `python -m module`, which ends with us. `environ` comes on top of ours."""
    mine = {**kernel_caches(), **(environ or {}), **child_environment()}
    if scratch is not None:
        mine["TMPDIR"] = scratch
    command = [*module_command(module), *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **mine}, **kwargs)


def ask_module(module: str, arguments: list[str], task: str) -> str:
    """Run `python -m module` to its end and return its answer. `task` is named if it fails. Raises
    ConfigError for bad input and SystemExit for a failure.

    Ctrl-C waits until the module lets it come, and leaves no traceback of its imports.
    """
    return ask_modules(module, [arguments], task)[0]


def ask_modules(module: str, arguments: Sequence[list[str]], task: str) -> list[str]:
    """Run `python -m module` once for each list of arguments, side by side; see ask_module."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    processes: list[subprocess.Popen[str]] = []
    try:
        for each in arguments:
            processes.append(start_module(module, each, stdout=subprocess.PIPE))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        return [_answer_of(process, task) for process in processes]
    except BaseException:
        for process in processes:
            process.terminate()  # it may have files to remove; Ctrl-C has reached it already
        for process in processes:
            try:
                process.wait(CLEANING_S)
            except BaseException:
                process.kill()
        raise


def _answer_of(process: subprocess.Popen[str], task: str) -> str:
    output, _ = process.communicate()
    code = process.returncode
    if code == 2:
        raise ConfigError([Issue(**issue) for issue in json.loads(output)])
    if code:
        hint = "memory may have been full (bert-dp doctor)" if code == -signal.SIGKILL else "see above"
        sys.exit(f"error: {task} {describe_exit_code(code, '')}; {hint}")
    return output.strip()


def describe_exit_code(code: int, without: str) -> str:
    """Describe an exit code; -N = killed by signal N."""
    if code >= 0:
        return f"ended with exit code {code} {without}".rstrip()
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name})"


def run_command(
    argv: Sequence[str], timeout_s: float, pass_fds: Sequence[int] = ()
) -> tuple[str | None, str | None]:
    """Run a command; return its output, or None and the last lines of the error. The whole process group ends
    with a timeout, and a module of ours ends with us, however we go. `pass_fds`: open files that it gets."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **child_environment()},
            pass_fds=pass_fds,
        )
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        lines: list[str] = []
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps its caller alive
            lines = process.communicate(timeout=KILLED_S)[1].strip().splitlines()
        return None, " | ".join([f"{NO_ANSWER} {timeout_s:.0f} s", *lines[-3:]])
    if process.returncode:
        lines = (errors.strip() or output.strip()).splitlines()
        return None, " | ".join(lines[-3:]) or f"exit code {process.returncode}"
    return output.rstrip(), None


# --- the reaper


@contextlib.contextmanager
def reaper(scratch: Path) -> Iterator[None]:
    """Kill what we have started, and remove `scratch`, should this process be killed in the block.

    Ranks end by themselves then, unless they are stopped (SIGSTOP) or hold the interpreter lock. The reaper
    is a small process that waits until its standard input closes. It does not have our marks itself: another
    launcher's reaper must not end it first.
    """
    constants = f"PATIENCE_S, SEARCH_S = {PATIENCE_S}, {SEARCH_S}"
    functions = [inspect.getsource(function) for function in (marked, reap)]
    source = "\n".join([REAPER_IMPORTS, constants, *functions, "reap(*sys.argv[1:])"])
    marks = launcher_marks()
    names = {mark.partition("=")[0] for mark in marks}
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            source,
            str(scratch),
            *marks,
        ],  # a bare interpreter: fast and small
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in names},
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"done")
            process.stdin.close()
        process.wait()


def marked(marks: Sequence[str]) -> list[int]:
    """List processes that have all of `marks` (NAME=value) in their environment, without this one."""
    wanted = {mark.encode() for mark in marks}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    pids.append(int(entry.name))
    return pids


def reap(scratch: str, *marks: str) -> None:
    """Wait for the launcher's end; then, unless it said "done", kill and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 16) == b"done":
        return
    time.sleep(PATIENCE_S)
    end = time.monotonic() + SEARCH_S
    while (pids := marked(marks)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(scratch, ignore_errors=True)
