"""Tests of the asynchronous checkpoint writer: one save at a time in a thread, and its errors."""

import errno
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config import CheckpointConfig
from bert_dp.parallel import State
from bert_dp.training import checkpoint
from bert_dp.training.checkpoint import AsyncCheckpointer
from tests.e2e.cli import wait_for
from tests.states import FACTS

SaveFile = Callable[[dict[str, torch.Tensor], Path], None]
PATIENCE_S = 60.0


def state(value: float) -> State:
    return {
        "model": {"w": torch.full((4,), value)},
        "optimizer": {"w/m": torch.full((4,), value)},
        "scaler": {},
    }


def weight(path: Path) -> float:
    return float(checkpoint.load(path)[0]["model"]["w"][0])


def names(folder: Path) -> list[str]:
    return [p.name for p in checkpoint.list_checkpoints(folder)]


class Held:
    """A save_file that sets `begun` and waits for `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        REAL(tensors, path)


REAL: SaveFile = checkpoint.save_file


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    hook = Held()
    monkeypatch.setattr(checkpoint, "save_file", hook)
    yield hook
    hook.go.set()


def make(
    folder: Path, logged: list[str] | None = None, saved: int | None = None, **settings: Any
) -> AsyncCheckpointer:
    log = [] if logged is None else logged
    return AsyncCheckpointer(folder, CheckpointConfig(**settings), log_rank0=log.append, saved_step=saved)


def save(saver: AsyncCheckpointer, *steps: int) -> tuple[int | None, str | None]:
    """Save states with the step as value. Return the newest saved step and the last save's problem."""
    for step in steps:
        saver.save(step, functools.partial(state, step), FACTS)
    return saver.wait(), saver.problem.message if saver.problem else None


def failing(number: int, first: int, last: int) -> SaveFile:
    """Return a save_file whose calls `first` to `last` (from 1) write half a file and raise OSError."""
    calls = itertools.count(1)

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if first <= next(calls) <= last:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number), str(path))
        REAL(tensors, path)

    return save_file


def test_a_save_returns_at_once_and_a_second_one_waits_to_gather(tmp_path: Path, held: Held) -> None:
    saver = make(tmp_path)
    saver.save(1, lambda: state(1.0), {**FACTS, "samples": 8})
    assert held.begun.wait(PATIENCE_S)
    assert names(tmp_path) == []
    assert (saver.saved_step, saver.newest) == (None, None)
    gathered: list[list[str]] = []

    def gather() -> State:
        gathered.append(names(tmp_path))
        return state(2.0)

    threading.Timer(0.3, held.go.set).start()
    saver.save(2, gather, FACTS)
    assert gathered == [["step-00000001"]]
    assert saver.stall_s >= 0.2, "the wait counts as save time"
    assert (saver.wait(), saver.problem, saver.newest) == (2, None, tmp_path / "step-00000002")
    assert [weight(p) for p in checkpoint.list_checkpoints(tmp_path)] == [2.0, 1.0]
    assert checkpoint.load(tmp_path / "step-00000001")[1].samples == 8


def test_other_ranks_and_runs_with_keep_0_write_nothing(tmp_path: Path) -> None:
    saver = make(tmp_path, saved=7)
    saver.save(9, lambda: None, FACTS)
    assert (saver.wait(), saver.problem) == (7, None)
    saver = make(tmp_path, keep=0)
    assert save(saver, 3) == (3, None)
    assert (saver.newest, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, "disk"), (errno.EACCES, "error")])
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_an_error_is_reported_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str, policy: str
) -> None:
    logged: list[str] = []
    saver = make(tmp_path, logged, keep=2, on_error=policy)
    save(saver, 1, 2)
    monkeypatch.setattr(checkpoint, "save_file", failing(number, 2, 2))
    assert save(saver, 3)[0] == 2
    assert (saver.failed_saves, saver.failed_writes) == (1, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    (line,) = logged
    first = saver.problem
    for text in (first.message, "step-00000003", os.strerror(number), "step-00000002"):
        assert text in line
    assert (saver.abort_reason, first.kind) == (first if policy == "stop" else None, kind)
    assert save(saver, 4) == (4, None)  # the next save tries again
    assert names(tmp_path) == ["step-00000004", "step-00000002"]
    monkeypatch.setattr(checkpoint, "save_file", failing(number, 1, 1))
    save(saver, 5)
    assert saver.abort_reason == (first if policy == "stop" else None), "the first problem is kept"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("keep", "left"), [(9, [4, 3, 2]), (2, [4, 3]), (1, [4])])
def test_old_checkpoints_are_deleted_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, keep: int, left: list[int]
) -> None:
    logged: list[str] = []
    saver = make(tmp_path, logged, keep=keep)
    save(saver, 1, 2, 3)
    monkeypatch.setattr(checkpoint, "save_file", failing(number, 1, 1))
    assert save(saver, 4) == (4, None)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]
    assert (logged, saver.failed_saves) == ([], 0)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_state_that_is_not_finite_is_never_written(tmp_path: Path, part: str) -> None:
    saver = make(tmp_path, keep=1)
    save(saver, 1)
    bad = state(2.0)
    next(iter(bad[part].values()))[2] = float("nan")
    saver.save(2, lambda: bad, FACTS)
    assert (saver.wait(), saver.failed_saves, saver.problem.kind) == (1, 1, "not_finite")
    assert names(tmp_path) == ["step-00000001"]


def test_an_unexpected_save_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("unexpected error")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    saver = make(tmp_path)
    saver.save(1, lambda: state(1.0), FACTS)
    saver.close()  # must not raise, because another error may be ending the process
    assert list(tmp_path.iterdir()) == [], "no partial file remains"
    for again in (saver.wait, lambda: saver.save(2, lambda: state(2.0), FACTS)):
        with pytest.raises(RuntimeError, match="unexpected error"):
            again()


def test_a_save_does_not_recreate_the_run_directory(tmp_path: Path) -> None:
    assert save(make(tmp_path / "run" / "checkpoints"), 1)[0] is None
    assert not (tmp_path / "run").exists()


def test_the_saves_of_this_process_are_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification at each save would hash gigabytes of kept checkpoints during training."""
    monkeypatch.setattr(checkpoint, "check", lambda path: pytest.fail(f"{path.name} is read"))
    assert save(make(tmp_path, keep=2), 1, 2, 3, 4) == (4, None)
    assert names(tmp_path) == ["step-00000004", "step-00000003"]


def test_no_thread_of_a_save_outlives_it(tmp_path: Path) -> None:
    """Idle OpenMP threads of a save would slow every later step."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    large, earlier_threads = torch.ones(2**20), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        large.add(1)  # start this thread's own OpenMP thread
        before = threads()
        saver = make(tmp_path)
        saver.save(1, lambda: {**state(1.0), "model": {"w": large}}, FACTS)
        assert saver.wait() == 1
        wait_for(lambda: threads() <= before, PATIENCE_S)
    finally:
        torch.set_num_threads(earlier_threads)


def test_repeated_save_errors_are_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(checkpoint, "save_file", failing(errno.EIO, 3, 5))  # each save writes two files
    saver = make(tmp_path, logged)
    assert "step-00000004" in str(save(saver, 1, 2, 3, 4)[1])
    (line,) = logged
    assert "step-00000002" in line
    assert save(saver, 5) == (5, None)
    assert saver.failed_saves == 3
