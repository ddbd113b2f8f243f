"""`python -m tests.faults.killed_saver`: run processes that save checkpoints, and kill them with SIGKILL.

Each line of stdin describes a process in JSON: folder, saves, and one of two ways to end it:
    after_s   the parent kills the process after this number of seconds
    event     the process kills itself before its event number `event` (from 0) that changes the disk
fsync_s is the number of seconds by which every fsync takes longer, as on a slow disk. The answer is a JSON
line with `begun` (step of the last save that began), `done` (step of the last save that returned) and
`killed`. Each process is a fork of this one, so that torch is imported only once.
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
    """Return a state of 1.5 MB that differs for every step."""
    g = torch.Generator().manual_seed(step)
    return {
        "model": {f"w{i}": torch.randn(64, 1024, generator=g) for i in range(2)},
        "optimizer": {f"w{i}/m": torch.randn(64, 1024, generator=g) for i in range(4)},
        "scaler": {},
    }


def die_at(event: int) -> None:
    """Kill this process before event number `event`: an fsync, a rename, a removal or a write."""
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
    """Run one process to its end and return its answer."""
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
