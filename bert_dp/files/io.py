"""Lock files, text without secrets and control characters, environment variables from launcher to worker,
signals, the cache and the set-up of a process. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Literal, overload

from bert_dp.config.errors import Issue


@overload
def lock(path: Path, *, wait: Literal[True]) -> IO[str]: ...
@overload
def lock(path: Path, *, wait: bool = ...) -> IO[str] | None: ...
def lock(path: Path, *, wait: bool = False) -> IO[str] | None:
    """Hold the lock file at `path` until the returned file is closed. Return None if another process holds
    it, or `wait` for that process to release it. Raises OSError when the file cannot be written."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its holder has just removed it: by now another file may be the lock


STALE_S = 45.0  # for a change by another node to be seen: views of a shared directory may be 30 s old


def appears(path: Path, is_current: Callable[[Path], bool]) -> bool:
    """Wait up to STALE_S for a file of another node; return False if it does not appear. An OSError of
    `is_current` counts as False."""
    end = time.monotonic() + STALE_S
    while True:
        with contextlib.suppress(OSError):
            if is_current(path):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.5)


REDACTED = "<redacted>"
WORD = re.compile(r"[A-Z]?[a-z]{,12}|[A-Z]{,12}")
SECRET_NAME = re.compile(
    r"(?i).*(token|secret|passw(or)?d|passphrase|credentials?|api_?key)|.*[_.-](key|pwd|pass|auth|pat|dsn)"
    r"|authorization|.*webhook(_url)?"
)
# https://user:password@host, also where a path has lost a slash, and https://TOKEN@host
URL_PASSWORD = re.compile(
    r"(?<=[:/]/)[^\s/?#\"'<>:@]{,256}:[^\s/\"'<>]{1,256}(?=@)|(?<=://)[^\s/?#\"'<>:@]{16,256}(?=@)"
)
# what may not reach a terminal, XML or UTF-8: sequences for a terminal, the characters that begin one, and
# those that turn the order of a line around
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{,1000}(?:\x07|\x1b\\)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str) -> bool:
    """Return True if the value of a variable or option of this name must not be written to a file."""
    return SECRET_NAME.fullmatch(name) is not None


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the values of the variables that are secret by their name."""
    values = [value.strip() for name, value in environ.items() if is_secret(name)]
    # short values and plain words also stand in ordinary text by chance, which hiding them would spoil
    return [value for value in values if len(value) >= 6 and not WORD.fullmatch(value)]


def secret_in(text: str, environ: Mapping[str, str]) -> str | None:
    """Return the name of a variable whose secret value stands in a text; None where there is none."""
    held = (name for name, v in environ.items() if any(s in text for s in secret_values({name: v})))
    return next(held, None)


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace each of `secrets`, and every password in a URL, by REDACTED."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return URL_PASSWORD.sub(REDACTED, text) if "@" in text else text


def safe(text: str) -> str:
    """Remove terminal sequences and replace control characters: nothing left moves a cursor."""
    return CONTROL.sub("\ufffd", ESCAPE.sub("", text))


def printable(text: str) -> str:
    """Make text safe for a terminal, without the secrets of this process's environment."""
    return safe(hide(text, secret_values(os.environ)))


def without_folders(word: str) -> str:
    """Cut the absolute paths in a word of a command to their names."""
    return re.sub(r"(?<![\w.~/-])/(?:[^/\s,]+/)+(?=[^/\s,])", "", word)


# environment variables by which the launcher tells its workers what a user-started worker does without
INIT_FILE = "BERT_DP_INIT_FILE"  # a file to meet in; without it env:// (MASTER_ADDR, MASTER_PORT)
HEARTBEATS = "BERT_DP_HEARTBEATS"  # folder of the heartbeats, on a disk of this node; default: in the run
LOG_DIR = "BERT_DP_LOG_DIR"  # where rank-N.log and rank-N.error.json go
STARTED_AGAIN = "-- started again --"  # a line of rank-N.log
LAUNCHER_PID = "BERT_DP_LAUNCHER_PID"
LAUNCHER_START = "BERT_DP_LAUNCHER_START"  # see start_ticks

RUN_LOCK = ".launcher.lock"  # of whoever supervises the run: our launcher, or rank 0 without one
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What ends a run after a checkpoint."""


def honoured(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore (as SIGHUP under nohup)."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def start_ticks(pid: int) -> str:
    """Return a process's start in clock ticks since boot, which with the pid is unique. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_own_code(filename: str) -> bool:
    """Return True if a stack frame of this file is ours or the user's: not of Python, torch or a package."""
    if filename.startswith(str(Path(__file__).parents[1]) + os.sep):
        return True  # also when bert_dp itself is installed among the packages
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    within = any(filename.startswith(library + os.sep) for library in libraries)
    foreign = within or "site-packages" in filename or "dist-packages" in filename
    return not foreign and not filename.startswith("<")


def cache_root() -> Path:
    """Return the directory of built corpora: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def cache_issues() -> list[Issue]:
    """Find why the cache cannot be trusted; a cache that does not exist yet has no issue."""
    root = cache_root()
    if not root.exists():
        return []
    status = root.stat()
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & stat.S_IWOTH:
        return []
    message = f"{root} has owner {status.st_uid} and mode {status.st_mode:o}: others can change its files"
    hint = "set it to a directory of your own"
    return [Issue("BERT_DP_CACHE", "unsupported", message, str(root), hint=hint)]


def set_private_umask() -> None:
    """Make all files that this process and its children create private to the user."""
    os.umask(0o077)
