"""`python -m tests.faults.killed_saver`: processes that save checkpoints and are killed with SIGKILL.

Reads one JSON line per process on stdin: folder, saves, and what ends it:
    after_s   killed from outside after that many seconds
    event     killed by itself before its event number `event` (from 0) of those that change the disk
fsync_s makes every fsync take that much longer, as on a slow disk. Answers with one JSON line: `begun`, the
step of the last save that was begun, `done`, that of the last one that had returned, `killed`. torch is
imported once: each process is a fork of this one.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bert_dp.config import CheckpointConfig
from bert_dp.parallel import State
from bert_dp.training import checkpoint
from bert_dp.training.checkpoint import AsyncCheckpointer
from tests.states import FACTS


def state_of(step: int) -> State:
    """1.5 MB that only this step's checkpoint holds."""
    g = torch.Generator().manual_seed(step)
    return {
        "model": {f"w{i}": torch.randn(64, 1024, generator=g) for i in range(2)},
        "optimizer": {f"w{i}/m": torch.randn(64, 1024, generator=g) for i in range(4)},
        "scaler": {},
    }


def die_at(event: int) -> None:
    """SIGKILL before the event of that number: an fsync, a rename, a removal, or the write of a file."""
    count = 0

    def watched(plain: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return plain(*arguments, **options)

        return call

    for module, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (shutil, "rmtree"),
        (checkpoint, "save_file"),
        (Path, "write_text"),
    ):
        setattr(module, name, watched(getattr(module, name)))


def save_until_killed(order: dict[str, Any], report: int) -> None:
    torch.set_num_threads(1)
    folder = Path(order["folder"])
    listed = checkpoint.list_checkpoints(folder)
    first = int(listed[0].name[5:13]) + 1 if listed else 1
    if "fsync_s" in order:
        plain = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(order["fsync_s"])
            plain(descriptor)

        os.fsync = slow
    if "event" in order:
        die_at(order["event"])
    saver = AsyncCheckpointer(folder, CheckpointConfig(keep=2), log_rank0=lambda line: None, saved_step=None)
    for step in range(first, first + order["saves"]):
        os.write(report, f"begun {step}\n".encode())
        saver.save(step, lambda step=step: state_of(step), {**FACTS, "samples": step})
        assert saver.wait() == step
        os.write(report, f"done {step}\n".encode())


def one(order: dict[str, Any]) -> dict[str, Any]:
    """Run one process to its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_until_killed(order, writer)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    if "after_s" in order:
        time.sleep(order["after_s"])
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as file:
        words = [line.split() for line in file.read().splitlines()]
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the saver raised"
    last = {what: max([int(n) for w, n in words if w == what], default=0) for what in ("begun", "done")}
    return {**last, "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL}


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(one(json.loads(line))) + "\n")
        sys.stdout.flush()
