"""Locks that the kernel frees, and a directory that must stay where it is. Torch-free."""

from __future__ import annotations

import contextlib
import errno
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


class HeldDirectory:
    """A directory that stays open: whether its path still leads to it, and where it is if not. A context.

    Raises OSError when there is none.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def now(self) -> Path | None:
        """Where the directory is; None when it was deleted, or moved where this process cannot see it."""
        if self._is_at(self.path):
            return self.path
        path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        return path if self._is_at(path) else None

    def lost(self) -> str | None:
        """What became of the directory when its path leads there no more; else None."""
        now = self.now()
        if now == self.path:
            return None
        what = f"moved to {now}" if now else "deleted" if self._is_deleted() else "moved away or deleted"
        return f"the run directory {self.path} was {what} during the run"

    def make(self, name: str) -> None:
        """Make the directory `name` in it, wherever it is now; one that is there will do. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._descriptor)

    def opener(self, path: str, flags: int) -> int:
        """For open(): the file below it that `path` was, wherever the directory is now. Raises OSError."""
        return os.open(os.path.relpath(path, self.path), flags, 0o666, dir_fd=self._descriptor)

    def _is_at(self, path: Path) -> bool:
        """Also when that cannot be known now: a file server that does not answer has lost nothing."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def _is_deleted(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE
