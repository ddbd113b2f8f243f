"""A directory that appears whole or not at all, written by one process at a time. Torch-free."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_dp import record
from bert_dp.config import ConfigError
from bert_dp.corpus.command import STOPS


def _to_stderr(stage: str, done: int, total: int | None) -> None:
    sys.stderr.write(record.printable(f"{stage}\n"))


@contextlib.contextmanager
def locked(out: Path, tell: Callable[[str, int, int | None], None] = _to_stderr) -> Iterator[None]:
    """One process at a time writes `out`, by a lock file beside it that the kernel frees when its holder
    dies."""
    path = out.parent / f".{out.name}.lock"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = record.lock(path)
        if file is None:
            tell(f"wait for another process that writes {out}", 0, 0)
            file = record.lock(path, wait=True)
    except OSError as error:
        setting = "BERT_DP_CACHE" if out.is_relative_to(record.cache_root()) else "--out"
        raise ConfigError(
            [f"{setting}: {out.parent} cannot be written ({error.strerror}); name a directory elsewhere"]
        ) from None
    with file:
        try:
            yield
        finally:
            if path.exists() and not path.stat().st_size:  # else it is someone's file of that name
                path.unlink()


def refuse_mount_point(out: Path) -> None:
    """Raises ConfigError for a volume's own directory, whose place no finished directory can take."""
    if os.path.ismount(out):
        raise ConfigError([f"--out {out}: a mount point cannot be replaced; name a directory in it"])


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that takes its place at the end; by the holder of its lock. What stands
    there goes, and nothing stays of a directory that was not finished.

    Raises ConfigError for a mount point.
    """
    refuse_mount_point(out)
    prefix = f".{out.name}.building-"
    for stale in [p for p in out.parent.iterdir() if p.name.startswith(prefix)]:
        shutil.rmtree(stale)  # its process is gone: this one holds the lock
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        yield work
        _install(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _install(work: Path, out: Path) -> None:
    """Move the finished directory to `out`; a build that stands there goes first. Signals wait meanwhile."""
    umask = os.umask(0o077)
    os.umask(umask)
    work.chmod(0o777 & ~umask)  # mkdtemp makes it private, also where the user shares
    with _signals_wait():
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
            out.rename(old)
            work.rename(out)
            shutil.rmtree(old)
        else:
            work.rename(out)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """What would stop this process does so afterwards. A mask would not do: a signal then takes any other
    thread, and Python's handler runs in this one all the same."""
    waiting: list[int] = []
    before = {number: signal.signal(number, lambda n, _: waiting.append(n)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])
