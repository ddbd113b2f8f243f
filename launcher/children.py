"""Processes that are started and waited for: `python -m` of our own modules, which end with us and import
nothing from the current folder, and commands of the system."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bert_dp.config import ConfigError
from bert_dp.record import LAUNCHER_PID, LAUNCHER_START, cache_issues, cache_root, start_ticks

DEVNULL = subprocess.DEVNULL
NO_ANSWER = "no answer within"  # and how long, says run_command of a time-out
KILLED_S = 1.0  # that a command has to be gone after SIGKILL
CLEANING_S = 10.0  # that a module has to remove its files after a signal


def module_command(module: str, *options: str) -> list[str]:
    """The beginning of a command line that runs a module, whatever lies in the current folder: `python -m`
    alone would look there first. `options` are Python's own."""
    return [sys.executable, "-P", *options, "-m", module]


def child_environment() -> dict[str, str]:
    """What every process of ours gets on top of our environment: our life to follow, and no module from the
    current folder, which launchers hand on to the processes that they start."""
    pid = os.getpid()
    return {LAUNCHER_PID: str(pid), LAUNCHER_START: start_ticks(pid), "PYTHONSAFEPATH": "1"}


def kernel_caches() -> dict[str, str]:
    """Environment variables that name the directories of torch's compiled kernels, below our cache. One that
    the user has set stays. {} where our cache cannot be used; torch then takes a temporary directory."""
    # the trials of a search have a temporary directory of their own: each would compile the same kernels anew
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": cache_root() / "kernels" / "inductor",
        "TRITON_CACHE_DIR": cache_root() / "kernels" / "triton",
    }
    if cache_issues():
        return {}
    try:
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {name: os.environ.get(name, str(folder)) for name, folder in folders.items()}


def launcher_marks() -> list[str]:
    """NAME=value of what every process of ours has in its environment, and none of another launcher's."""
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
    """`python -m module`, which ends with us, for what needs torch or a process of its own. `environ` comes
    on top of ours."""
    mine = {**kernel_caches(), **(environ or {}), **child_environment()}
    if scratch is not None:
        mine["TMPDIR"] = scratch
    command = [*module_command(module), *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **mine}, **kwargs)


def run_module(module: str, arguments: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """`python -m module` to its end. Ctrl-C waits until the module lets it come, and leaves no traceback of
    its imports. Of one that a signal killed the return code is 128 + signal, and stderr says so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = start_module(module, arguments, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with process:
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()  # it may have files to remove; Ctrl-C has reached it already
            try:
                process.wait(CLEANING_S)
            except BaseException:
                process.kill()
            raise
    code = process.returncode
    if code < 0:
        hint = "; memory may have been full (bert-dp doctor)" if -code == signal.SIGKILL else ""
        sys.stderr.write(f"error: {module}: {ending(code, '')}{hint}\n")
        code = 128 - code
    return subprocess.CompletedProcess(process.args, code, output, errors)


def capture_json(module: str, arguments: list[str]) -> tuple[int, Any]:
    """Exit code and the JSON a module printed; its stderr (progress, errors) goes straight to ours."""
    done = run_module(module, arguments, stdout=subprocess.PIPE)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, None


def ending(code: int, without: str) -> str:
    """An exit code in words; -N = killed by signal N."""
    if code >= 0:
        return f"ended with exit code {code} {without}".rstrip()
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name})"


def check(code: int, what: str) -> None:
    """Of a module that has told on stderr what is wrong. Raises ConfigError for bad input, without lines of
    its own, and SystemExit with code 1 where it failed."""
    if code == 2:
        raise ConfigError([])
    if code:
        sys.exit(f"error: {what} failed with exit code {code}; see above")


def asked(module: str, arguments: list[str], what: str) -> Any:
    """The JSON that a module printed. Raises as `check` does."""
    code, answer = capture_json(module, arguments)
    check(code or int(answer is None), what)
    return answer


def run_command(argv: Sequence[str], timeout_s: float) -> tuple[str | None, str | None]:
    """Output, or None and the last lines of the error. The whole process group ends with a timeout, and a
    module of ours ends with us, however we go."""
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
