"""Inject a fault into a worker. Python runs this file at every start if its folder is on PYTHONPATH.

BERT_DP_TEST_FAULT is JSON with what, rank, place, step [, seconds, once, times]. Without this variable, and
in processes other than workers, nothing happens. The fault `what` occurs on `rank` at `place` in optimizer
step `step` (from 0; place compile = the dry run; place save = the save after that step, -1 = the first save)
and in the `times` - 1 steps after it. `once` is a file that the fault creates; it prevents further faults.

what:  raise | exit | segv | abort | bus | ill | kill | stop | sleep | gil | mismatch | nan | spike | slow |
       cuda_oom | full_disk | io_error | read_only
place: compile | data | step | eval | save
"""

import errno
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path

VARIABLE = "BERT_DP_TEST_FAULT"


def is_worker() -> bool:
    return ("-m", "bert_dp.worker") in itertools.pairwise(sys.orig_argv)


def break_now(fault: dict) -> None:
    import ctypes
    import signal
    import time

    what = fault["what"]
    if what == "raise":
        raise ValueError("injected by a test")
    if what == "cuda_oom":
        import torch

        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 10.00 GiB of "
            "which 1.00 GiB is free."
        )
    if what == "exit":
        os._exit(7)
    if what == "segv":
        ctypes.string_at(0)
    if what == "abort":
        os.abort()
    if what in ("kill", "bus", "ill"):
        os.kill(os.getpid(), getattr(signal, f"SIG{what.upper()}"))
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what in ("sleep", "slow"):
        time.sleep(fault.get("seconds", 3600))
    if what == "gil":  # a C call that keeps the GIL; a signal makes it return the remaining seconds
        left = int(fault.get("seconds", 3600))
        while left:
            left = ctypes.PyDLL(None).sleep(left)
    if what == "mismatch":  # a collective that the other ranks do not call
        import torch

        torch.distributed.broadcast(torch.zeros(3), 0)


class Counter:
    """Counter of the worker's optimizer steps: -1 = in the dry run, -2 = before the dry run."""

    def __init__(self, fault: dict):
        self.fault, self.step = fault, -2

    def due(self, place: str, step: int | None = None) -> bool:
        fault, step = self.fault, self.step if step is None else step
        if fault["place"] != place or str(fault["rank"]) != os.environ.get("RANK", "0"):
            return False
        every = fault["what"] == "slow" and step >= 0
        first = -1 if place == "compile" else fault["step"]
        if not every and not first <= step < first + fault.get("times", 1):
            return False
        once = fault.get("once")
        if once is not None:
            if Path(once).exists():
                return False
            Path(once).touch()
        return True


def patch_tasks(tasks: object) -> None:
    tasks.TASKS["mlm"] = "broken_task"


def patch_checkpoint(checkpoint: object, counter: Counter) -> None:
    plain_save_file = checkpoint.save_file

    errors = {"full_disk": errno.ENOSPC, "io_error": errno.EIO, "read_only": errno.EROFS}

    def save_file(tensors, path):
        saved = int(path.parent.name[5:13])  # training may be some steps ahead of the saved step
        if counter.due("save", saved - 1):
            if (number := errors.get(counter.fault["what"])) is not None:
                raise OSError(number, os.strerror(number), str(path))
            break_now(counter.fault)
        return plain_save_file(tensors, path)

    checkpoint.save_file = save_file


class Finder(importlib.abc.MetaPathFinder):
    """Import hook that patches a module right after its execution."""

    def __init__(self, patches: dict):
        self.patches = patches

    def find_spec(self, name, path, target=None):
        patch = self.patches.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if VARIABLE in os.environ and is_worker():
    COUNTER = Counter(json.loads(os.environ[VARIABLE]))
    sys.meta_path.insert(
        0,
        Finder(
            {
                "bert_dp.tasks": patch_tasks,
                "bert_dp.training.checkpoint": lambda module: patch_checkpoint(module, COUNTER),
            }
        ),
    )
