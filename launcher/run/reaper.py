"""Kill what a launcher that was killed has left, from a small process that outlives it by a moment.

Ranks end by themselves when the launcher is gone, unless they are stopped (SIGSTOP) or hold the interpreter
lock. The reaper waits for the other end of its standard input to close, and then kills every process that has
the launcher's number and start in its environment. It runs as a file, by a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE_S = 1.0
"""Ranks that can end by themselves first have this long."""
SEARCH_S = 5.0
"""A process may be starting others while it is killed: look again for as long as any is found."""


@contextlib.contextmanager
def reaper(scratch: Path, marks: Sequence[str]) -> Iterator[None]:
    """Kill processes with all of `marks` (NAME=value) in their environment, and remove `scratch`, should this
    process be killed in the block.

    The reaper itself has no such names: where another launcher started this process, that one's reaper must
    not end ours first.
    """
    command = [sys.executable, "-I", "-S", __file__, str(scratch), *marks]
    names = {mark.partition("=")[0] for mark in marks}
    environ = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environ)
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"done")
            process.stdin.close()
        process.wait()


def marked(marks: Sequence[str]) -> list[int]:
    """List processes that have all of `marks` in their environment, without this one."""
    wanted = {mark.encode() for mark in marks}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    pids.append(int(entry.name))
    return pids


def main(scratch: str, *marks: str) -> None:
    """Wait for the launcher's end; then, unless it said "done", kill and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 16) == b"done":
        return
    time.sleep(PATIENCE_S)
    end = time.monotonic() + SEARCH_S
    while (pids := marked(marks)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
