"""Run child processes and wait for them: bert-dp modules (`python -m`) and system commands.

A bert-dp module exits when this process exits, and imports nothing from the current directory."""

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

NO_ANSWER = "no answer within"  # start of run_command's error message after a timeout
KILLED_S = 1.0  # maximum time for a command to exit after SIGKILL
CLEANUP_S = 10.0  # maximum time for a module to remove its files and exit after SIGTERM


def kernel_caches() -> dict[str, str]:
    """Create a cache directory for torch's compiled kernels; return the environment variable that selects it.
    A value set by the user takes precedence. Return {} if bert-dp's cache is unusable."""
    # without this, each trial of a search would recompile the same kernels in its own temporary directory
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
    """Start `python -m module`, which exits when this process exits. `scratch`: temporary directory for
    the module; `environ`: variables added to its environment."""
    added = {**kernel_caches(), **(environ or {}), **child_environment()}
    if scratch is not None:
        added["TMPDIR"] = scratch
    command = [*module_command(module), *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **added}, **kwargs)


def ask_module(module: str, arguments: list[str], task: str) -> str:
    """Run `python -m module` and return its output. `task`: what the module does, for the error message.
    Raise ConfigError if the module rejects its input, and SystemExit if it fails. The module starts with
    SIGINT blocked and unblocks it later, so that Ctrl-C during the imports prints no traceback."""
    return ask_modules(module, [arguments], task)[0]


def ask_modules(module: str, arguments: Sequence[list[str]], task: str) -> list[str]:
    """Run one `python -m module` per list of arguments, concurrently; return the outputs. See ask_module."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    processes: list[subprocess.Popen[str]] = []
    try:
        for words in arguments:
            processes.append(start_module(module, words, stdout=subprocess.PIPE))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        outputs = []
        for process in processes:
            output, _ = process.communicate()
            code = process.returncode
            if code == 2:
                raise ConfigError([Issue(**issue) for issue in json.loads(output)])
            if code:
                hint = "out of memory? (see `bert-dp doctor`)" if code == -signal.SIGKILL else "see above"
                sys.exit(f"error: {task} {describe_exit_code(code, '')}; {hint}")
            outputs.append(output.strip())
        return outputs
    except BaseException:
        for process in processes:
            process.terminate()  # lets the module remove its files; Ctrl-C reaches the module directly
        for process in processes:
            try:
                process.wait(CLEANUP_S)
            except BaseException:
                process.kill()
        raise


def run_command(
    argv: Sequence[str], timeout_s: float, pass_fds: Sequence[int] = ()
) -> tuple[str | None, str | None]:
    """Run a command. Return (output, None) if it succeeds, else (None, error) with the last lines of its
    output. After a timeout, kill the command's process group. The command inherits `pass_fds`."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hung driver may keep the process alive
            lines = process.communicate(timeout=KILLED_S)[1].strip().splitlines()
        return None, " | ".join([f"{NO_ANSWER} {timeout_s:.0f} s", *lines[-3:]])
    if process.returncode:
        lines = (errors.strip() or output.strip()).splitlines()
        return None, " | ".join(lines[-3:]) or f"exit code {process.returncode}"
    return output.rstrip(), None
