"""Environment variables from launcher to worker, signals, the cache, a process's set-up. Torch-free."""

from __future__ import annotations

import os
import signal
import stat
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from bert_dp.config.errors import Issue

# environment variables by which the launcher tells its workers what a user-started worker does without
INIT_FILE = "BERT_DP_INIT_FILE"  # a file to meet in; without it env:// (MASTER_ADDR, MASTER_PORT)
LOG_DIR = "BERT_DP_LOG_DIR"  # where rank-N.log and rank-N.error.json go
STARTED_AGAIN = "-- started again --"  # a line of rank-N.log
LAUNCHER_PID = "BERT_DP_LAUNCHER_PID"
LAUNCHER_START = "BERT_DP_LAUNCHER_START"  # see start_ticks

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What ends a run after a checkpoint."""


def honoured(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process was not told to ignore, as nohup does with SIGHUP and a script's
    shell with SIGINT in the background."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, which with the pid is unique.

    Raises OSError when there is none.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_own_code(filename: str) -> bool:
    """Return True if a stack frame of this file is ours or the user's: not of Python, torch or a package."""
    if filename.startswith(str(Path(__file__).parents[1]) + os.sep):
        return True  # also when bert_dp itself is installed among the packages
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    within = any(filename.startswith(library + os.sep) for library in libraries)
    foreign = within or "site-packages" in filename or "dist-packages" in filename
    return not foreign and not filename.startswith("<")


def reopen_std_streams() -> None:
    """Reopen stdin, stdout and stderr as /dev/null where they are closed: the next file that is opened would
    take their place."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def cache_root() -> Path:
    """Return the directory of built corpora: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def cache_issues() -> list[Issue]:
    """Find why the cache cannot be trusted; a cache that does not exist yet has no issue."""
    root = cache_root()
    try:
        status = root.stat()
    except OSError:
        return []
    who = "" if status.st_uid in (os.geteuid(), 0) else f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        who = "can be written by every user"
    if not who:
        return []
    message, hint = f"{root} {who}, so its files cannot be trusted", "set it to a directory of your own"
    return [Issue("BERT_DP_CACHE", "unsupported", message, str(root), hint=hint)]


def set_private_umask() -> None:
    """Make all files that this process and its children create private to the user."""
    os.umask(0o077)
