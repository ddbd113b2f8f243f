"""The first cause among what ranks and torchrun left behind."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.processes import first_cause

TORCHRUN = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 22935)  (SIGKILL)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 22934)
"""


def error(logs: Path, rank: int, message: str, time_ns: int, bad_input: list[str] | None = None) -> None:
    facts = {"rank": rank, "time_ns": time_ns, "type": "RuntimeError", "message": message, "where": "a.py:1"}
    (logs / f"rank-{rank}.error.json").write_text(json.dumps({**facts, "bad_input": bad_input}))


def test_a_kill_comes_before_what_the_others_saw(tmp_path: Path) -> None:
    error(tmp_path, 0, "Connection reset by peer", 5)
    failure = first_cause(tmp_path, TORCHRUN)
    assert failure is not None
    assert (failure.rank, failure.message) == (1, "killed by signal 9 (SIGKILL)")


def test_an_exception_comes_before_the_kills_that_follow_it(tmp_path: Path) -> None:
    error(tmp_path, 0, "out of memory", 9)
    error(tmp_path, 2, "Connection closed by peer", 5)
    failure = first_cause(tmp_path, TORCHRUN)
    assert failure is not None
    assert (failure.rank, failure.message) == (0, "RuntimeError: out of memory")


def test_the_earliest_exception_wins_and_bad_input_before_it(tmp_path: Path) -> None:
    error(tmp_path, 0, "late", 9)
    error(tmp_path, 1, "early", 3)
    assert first_cause(tmp_path, "").rank == 1  # type: ignore[union-attr]
    error(tmp_path, 2, "optim.lr: wrong", 20, bad_input=["optim.lr: wrong"])
    failure = first_cause(tmp_path, "")
    assert failure is not None
    assert failure.bad_input == ("optim.lr: wrong",)


def test_nothing_recorded_is_no_cause(tmp_path: Path) -> None:
    assert first_cause(tmp_path, "") is None


def test_the_log_tail_comes_along(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("\n".join(f"line {i}" for i in range(100)))
    failure = first_cause(tmp_path, TORCHRUN)
    assert failure is not None
    assert failure.tail[-1] == "line 99"
    assert len(failure.tail) == 20
