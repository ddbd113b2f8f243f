"""Lock files, and clean text that is shown of secrets and control characters. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Literal, overload


@overload
def lock(path: Path, *, wait: Literal[True]) -> IO[str]: ...
@overload
def lock(path: Path, *, wait: bool = ...) -> IO[str] | None: ...
def lock(path: Path, *, wait: bool = False) -> IO[str] | None:
    """Hold the lock file at `path` until the returned file is closed; None when another process holds it,
    unless it is to `wait` for that one's end.

    Raises OSError when the file cannot be written.
    """
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


REDACTED = "<redacted>"
# shorter values and plain words stand in ordinary text by chance, so hiding them would spoil it
MIN_SECRET = 6  # characters
WORD = re.compile(r"[A-Z]?[a-z]{,12}|[A-Z]{,12}")
# one word of the name of a variable or setting: PAT but not PATH, KEY but not KEYBOARD
SECRET_PART = re.compile(
    r"\w*(token|secret|passw(or)?d|passphrase|credential|apikey)s?|\w*(pwd|auth|dsn)|(api|ssh)?(key|pass)s?"
    r"|authorization|bearer|webhook|pats?|creds?|connections?"
)
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
NO_SECRETS = ("PWD", "OLDPWD")  # the shell's own: the current folder and the one before
# https://user:password@host, also where a path has lost a slash, and https://TOKEN@host
URL_PASSWORD = re.compile(
    r"(?<=[:/]/)[^\s/?#\"'<>:@]{,256}:[^\s/\"'<>]{1,256}(?=@)|(?<=://)[^\s/?#\"'<>:@]{16,256}(?=@)"
)
# what may not reach a terminal, XML or UTF-8: sequences for a terminal, the characters that begin one, and
# those that turn the order of a line around
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{,1000}(?:\x07|\x1b\\)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str, value: object) -> bool:
    """Return whether a value of this name is a secret, which must not be written to a file."""
    parts = [part.lower() for part in NAME_PART.findall(name)]
    if name in NO_SECRETS or value is None or not any(map(SECRET_PART.fullmatch, parts)):
        return False
    counted = "tokens" in parts or "connections" in parts
    return not (counted and re.fullmatch(r"[\d.e+_]+|null", str(value)))


def secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Return value -> name of the variables that hold a secret by their name.

    Short values and plain words are left out, and so is the path of a file, which says where a secret is.
    """
    return {
        value.strip(): name
        for name, value in environ.items()
        if is_secret(name, value)
        and len(value.strip()) >= MIN_SECRET
        and not WORD.fullmatch(value.strip())
        and not os.path.exists(os.path.expanduser(value))
    }


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
