"""Lock a file, remove secrets and control characters from text, list the stop signals, set the umask and find
the cache of built data. Define the environment variables that the launcher sets for workers. Torch-free."""

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
    """Lock the file at `path`. Closing the returned file releases the lock. If another process holds the
    lock, return None or, with `wait`, wait for the lock. Raises OSError if the file cannot be written."""
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
        file.close()  # the previous owner removed this file; another process may have locked a new one


STALE_S = 45.0  # seconds to wait for a file from another node, because NFS may cache directories for 30 s


def appears(path: Path, is_current: Callable[[Path], bool]) -> bool:
    """Wait up to STALE_S for a file from another node. Return whether `is_current(path)` became true."""
    end = time.monotonic() + STALE_S
    while True:
        with contextlib.suppress(OSError):  # the file may still become readable
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
# password in https://user:password@host (even if one slash is missing), or token in https://TOKEN@host
URL_PASSWORD = re.compile(
    r"(?<=[:/]/)[^\s/?#\"'<>:@]{,256}:[^\s/\"'<>]{1,256}(?=@)|(?<=://)[^\s/?#\"'<>:@]{16,256}(?=@)"
)
# text that is unsafe in a terminal or invalid in XML or UTF-8: escape sequences, control characters, and
# characters that reverse the text direction
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{,1000}(?:\x07|\x1b\\)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str) -> bool:
    """Return True if the name of a variable or option suggests that its value is secret."""
    return SECRET_NAME.fullmatch(name) is not None


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names suggest a secret, except short values and plain words."""
    values = [value.strip() for name, value in environ.items() if is_secret(name)]
    # short values and plain words also occur in ordinary text, which redaction would garble
    return [value for value in values if len(value) >= 6 and not WORD.fullmatch(value)]


def secret_in(text: str, environ: Mapping[str, str]) -> str | None:
    """Return the name of a variable whose secret value occurs in `text`, or None."""
    found = (name for name, v in environ.items() if any(s in text for s in secret_values({name: v})))
    return next(found, None)


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace each of `secrets`, and every password or token in a URL, with REDACTED."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return URL_PASSWORD.sub(REDACTED, text) if "@" in text else text


def safe(text: str) -> str:
    """Remove escape sequences and replace control characters, so that the text cannot control a terminal."""
    return CONTROL.sub("\ufffd", ESCAPE.sub("", text))


def printable(text: str) -> str:
    """Make text safe for a terminal, and mask the values of secret environment variables."""
    return safe(hide(text, secret_values(os.environ)))


def without_folders(word: str) -> str:
    """Shorten each absolute path in a command-line argument to its last component."""
    return re.sub(r"(?<![\w.~/-])/(?:[^/\s,]+/)+(?=[^/\s,])", "", word)


# environment variables that the launcher sets for its workers; workers that a user starts do not need them
INIT_FILE = "BERT_DP_INIT_FILE"  # rendezvous file; if unset, ranks use env:// (MASTER_ADDR, MASTER_PORT)
HEARTBEATS = "BERT_DP_HEARTBEATS"  # heartbeat directory on a local disk; default: RUN/heartbeats
LOG_DIR = "BERT_DP_LOG_DIR"  # directory for rank-N.log and rank-N.error.json
STARTED_AGAIN = "-- started again --"  # line in a log before the output of a restart
LAUNCHER_PID = "BERT_DP_LAUNCHER_PID"
LAUNCHER_START = "BERT_DP_LAUNCHER_START"  # start time of the launcher; see start_ticks

RUN_LOCK = ".launcher.lock"  # locked by the launcher, or by rank 0 if there is no launcher
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals after which a run saves a checkpoint and stops."""


def honoured(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals in `numbers` that this process does not ignore. Under nohup, it ignores SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def start_ticks(pid: int) -> str:
    """Return a process's start time in clock ticks, to recognise a reused pid. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_own_code(filename: str) -> bool:
    """Return True if a source file is part of bert-dp or of the user's code, not of an installed package."""
    if filename.startswith(str(Path(__file__).parents[1]) + os.sep):
        return True  # even if bert_dp is installed in site-packages
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    within = any(filename.startswith(library + os.sep) for library in libraries)
    foreign = within or "site-packages" in filename or "dist-packages" in filename
    return not foreign and not filename.startswith("<")


def cache_root() -> Path:
    """Return the cache directory for built data: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def cache_issues() -> list[Issue]:
    """Return one issue if the cache belongs to another user (not root) or is world-writable, otherwise []."""
    root = cache_root()
    if not root.exists():
        return []
    status = root.stat()
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & stat.S_IWOTH:
        return []
    message = f"other users can change {root} (owner {status.st_uid}, mode {status.st_mode:o})"
    hint = "set BERT_DP_CACHE to a directory that only you can write to"
    return [Issue("BERT_DP_CACHE", "unsupported", message, str(root), hint=hint)]


def set_private_umask() -> None:
    """Set the umask so that only the user can access the files that this process and its children create."""
    os.umask(0o077)
