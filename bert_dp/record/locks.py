"""Locks that the kernel frees. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
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
