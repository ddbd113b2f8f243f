"""Run child processes and wait for them: our own modules by `python -m`, and system commands.

A module of ours exits with this process and imports nothing from the current directory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bert_dp.config import ConfigError, Issue
from bert_dp.files import cache_issues, cache_root
from bert_dp.files.reaper import child_environment, describe_exit_code, module_command

NO_ANSWER = "no answer within"  # start of run_command's error after a timeout
KILLED_S = 1.0  # time for a command to exit after SIGKILL
CLEANING_S = 10.0  # time for a module to remove its files after a signal


def kernel_caches() -> dict[str, str]:
    """Create a directory for torch's compiled kernels in our cache; return its environment variable. A value
    set by the user is kept. {} if our cache is unusable: torch then uses a temporary directory."""
    # each trial of a search has a separate temporary directory and would recompile the same kernels
    name, folder = "TORCHINDUCTOR_CACHE_DIR", cache_root() / "kernels"
    if cache_issues():
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {name: os.environ.get(name, str(folder))}


def start_module(
    module: str,
    arguments: list[str],
    *,
    scratch: str | None = None,
    environ: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> subprocess.Popen[str]:
    """Start `python -m module`; it exits with this process. `environ` is added to our environment."""
    mine = {**kernel_caches(), **(environ or {}), **child_environment()}
    if scratch is not None:
        mine["TMPDIR"] = scratch
    command = [*module_command(module), *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **mine}, **kwargs)


def ask_module(module: str, arguments: list[str], task: str) -> str:
    """Run `python -m module` and return its output. `task`: description for the error message. Raises
    ConfigError for bad input and SystemExit for a failure.

    SIGINT is blocked until the module unblocks it: Ctrl-C during its imports leaves no traceback.
    """
    return ask_modules(module, [arguments], task)[0]


def ask_modules(module: str, arguments: Sequence[list[str]], task: str) -> list[str]:
    """Run `python -m module` for each list of arguments, concurrently; see ask_module."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    processes: list[subprocess.Popen[str]] = []
    try:
        for each in arguments:
            processes.append(start_module(module, each, stdout=subprocess.PIPE))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        answers = []
        for process in processes:
            output, _ = process.communicate()
            code = process.returncode
            if code == 2:
                raise ConfigError([Issue(**issue) for issue in json.loads(output)])
            if code:
                hint = "out of memory? (see `bert-dp doctor`)" if code == -signal.SIGKILL else "see above"
                sys.exit(f"error: {task} {describe_exit_code(code, '')}; {hint}")
            answers.append(output.strip())
        return answers
    except BaseException:
        for process in processes:
            process.terminate()  # it may have files to remove; Ctrl-C has already reached it
        for process in processes:
            try:
                process.wait(CLEANING_S)
            except BaseException:
                process.kill()
        raise


def run_command(
    argv: Sequence[str], timeout_s: float, pass_fds: Sequence[int] = ()
) -> tuple[str | None, str | None]:
    """Run a command; return its output, or None and the last lines of its errors. A timeout kills the whole
    process group. A module of ours exits with this process. `pass_fds`: file descriptors to inherit."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hung driver can keep the command alive
            lines = process.communicate(timeout=KILLED_S)[1].strip().splitlines()
        return None, " | ".join([f"{NO_ANSWER} {timeout_s:.0f} s", *lines[-3:]])
    if process.returncode:
        lines = (errors.strip() or output.strip()).splitlines()
        return None, " | ".join(lines[-3:]) or f"exit code {process.returncode}"
    return output.rstrip(), None
