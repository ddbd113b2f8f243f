"""Build commands for child processes, and kill the children if this process is killed. Torch-free."""

import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_dp.files.io import LAUNCHER_PID, LAUNCHER_START, start_ticks

ISSUES_FILE = "BERT_DP_ISSUES"  # path of the file to which commands write issues for the Python API
PATIENCE_S = 1.0  # seconds given to the ranks to exit by themselves after the launcher has ended
SEARCH_S = 5.0  # time limit in seconds for finding and killing processes, which may start others meanwhile
REAPER_IMPORTS = """
from __future__ import annotations
import contextlib, os, shutil, signal, sys, time
from pathlib import Path
"""


def module_command(module: str, *options: str) -> list[str]:
    """Return the first arguments of a command that runs a module. -P excludes the current directory, in which
    `python -m` would search for modules first. `options`: options for Python."""
    return [sys.executable, "-P", *options, "-m", module]


def child_environment() -> dict[str, str]:
    """Return environment variables for child processes. The variables identify this process, whose
    exit ends the children, and prevent imports from the current directory, even in torchrun's workers."""
    pid = os.getpid()
    return {LAUNCHER_PID: str(pid), LAUNCHER_START: start_ticks(pid), "PYTHONSAFEPATH": "1"}


def launcher_marks() -> list[str]:
    """Return NAME=value for the variables that identify the processes of this launcher."""
    environ = child_environment()
    return [f"{name}={environ[name]}" for name in (LAUNCHER_PID, LAUNCHER_START)]


def describe_exit_code(code: int, suffix: str) -> str:
    """Describe an exit code; -N = killed by signal N. `suffix`: words that follow a code >= 0."""
    if code >= 0:
        return f"exited with code {code} {suffix}".rstrip()
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name})"


@contextlib.contextmanager
def reaper(scratch: Path) -> Iterator[None]:
    """Kill child processes and remove `scratch` if this process is killed in the `with` block. The reaper is
    a small process that acts when its standard input closes. Even without it, ranks exit when this process
    ends, unless they are stopped (SIGSTOP) or hold the interpreter lock."""
    constants = f"PATIENCE_S, SEARCH_S = {PATIENCE_S}, {SEARCH_S}"
    functions = [inspect.getsource(function) for function in (marked, reap)]
    source = "\n".join([REAPER_IMPORTS, constants, *functions, "reap(*sys.argv[1:])"])
    marks = launcher_marks()
    names = {mark.partition("=")[0] for mark in marks}
    # -I and -S keep the process small; its environment lacks the marks, so that no reaper kills it
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", source, str(scratch), *marks],
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
    """Return the pids of other processes whose environment contains all of `marks` (NAME=value)."""
    wanted = {mark.encode() for mark in marks}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has exited or belongs to another user
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    pids.append(int(entry.name))
    return pids


def reap(scratch: str, *marks: str) -> None:
    """Wait for "done" on stdin. If it closes first, kill the processes with `marks` and remove `scratch`."""
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
