"""Write a directory whole or not at all, one process at a time. Torch-free."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_dp import record
from bert_dp.config import ConfigError, Issue


def _to_stderr(stage: str, done: int, total: int | None) -> None:
    sys.stderr.write(record.printable(f"{stage}\n"))


@contextlib.contextmanager
def locked(out: Path, tell: Callable[[str, int, int | None], None] = _to_stderr) -> Iterator[None]:
    """Hold the lock file beside `out`; the kernel frees it when its holder ends. Raises ConfigError."""
    path = out.parent / f".{out.name}.lock"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = record.lock(path)
        if file is None:
            tell(f"wait for another process that writes {out}", 0, 0)
            file = record.lock(path, wait=True)
    except OSError as error:
        setting = "BERT_DP_CACHE" if out.is_relative_to(record.cache_root()) else "--out"
        message, hint = f"{out.parent} cannot be written ({error.strerror})", "name a directory elsewhere"
        raise ConfigError([Issue(setting, "not_found", message, value=str(out), hint=hint)]) from None
    with file:
        try:
            yield
        finally:
            if path.exists() and not path.stat().st_size:  # else it is someone's file of that name
                path.unlink()


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield a new directory beside `out` that takes its place at the end; on failure it is removed. The
    caller holds the lock of `out`."""
    prefix = f".{out.name}.building-"
    for stale in [p for p in out.parent.iterdir() if p.name.startswith(prefix)]:
        shutil.rmtree(stale)  # its process is gone: this one holds the lock
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    old = work.with_name(f"{work.name}-old")
    try:
        yield work
        umask = os.umask(0o077)
        os.umask(umask)
        work.chmod(0o777 & ~umask)  # mkdtemp makes it private, also where the user shares
        if out.exists():
            out.rename(old)
        work.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)  # stopped between the two
        for directory in (work, old):
            shutil.rmtree(directory, ignore_errors=True)
