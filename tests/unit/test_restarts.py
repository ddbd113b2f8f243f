"""Tests of the restart policy, with attempts played from a list."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import Config
from bert_dp.files.models import Failure
from launcher.machine import environment
from launcher.run import processes, restarts
from launcher.run.processes import RunOutcome
from launcher.run.restarts import Restarts, RunOptions
from tests.helpers import make_config, read_json
from tests.states import FACTS

KILLED = Failure(rank=1, message="killed by signal 9 (SIGKILL)", killed_by=9, kind="killed")
RAISED = Failure(rank=0, message="ValueError: no", where="a.py:1")
Attempt = tuple[int, Failure | None, int | None]  # exit code, failure, step of the saved checkpoint


def config(*settings: str, **batch: int) -> Config:
    return make_config(*settings, batch={"global_size": 12, "micro_size": 1, **batch}, run={"device": "cpu"})


class Play:
    """A fake launcher that plays a list of attempts."""

    def __init__(self, run_dir: Path, *attempts: Attempt):
        self.run_dir, self.attempts = run_dir, list(attempts)
        self.started: list[tuple[int, str]] = []
        self.logged: list[str] = []
        self.waits: list[float] = []
        self.stop = self.signal = self.made_ns = 0

    def start(self, ranks: int, resume: str) -> RunOutcome:
        self.started.append((ranks, resume))
        code, failure, step = self.attempts[len(self.started) - 1]
        if step is not None:
            folder = self.run_dir / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "state.json").write_text(json.dumps({**FACTS, "step": step}))
            self.made_ns += 1
            os.utime(folder, ns=(self.made_ns, self.made_ns))
        (self.run_dir / "summary.json").write_text(
            json.dumps({"status": "failed" if code else "done", "exit_code": code})
        )
        return RunOutcome(code, failure, self.signal)

    def sleep(self, seconds: float) -> int:
        self.waits.append(seconds)
        return self.stop

    def go(self, max_restarts: int, ranks: int = 4, micro_size: int = 1, **options: Any) -> RunOutcome:
        given, of = RunOptions(max_restarts=max_restarts, **options), config(micro_size=micro_size)
        runs = Restarts(of, self.run_dir, ranks, given, self.logged.append, self.sleep)
        while runs.next:
            outcome = runs.after(self.start(*runs.next))
        return outcome


NONE, AGREED = (1, RAISED, None), RAISED.model_copy(update={"agreed": True})
BAD = Failure(rank=0, message="bad", kind="bad_input")


@pytest.mark.parametrize(
    ("attempts", "code", "waits", "logged"),
    [
        ([(0, None, 9)], 0, [], None),
        ([(2, BAD, None)], 2, [], None),
        ([(143, KILLED, None)], 143, [], None),
        ([(1, AGREED, 8)], 1, [], "not restarted: all ranks stopped together for a reason that would recur"),
        ([(1, RAISED, 4), (0, None, 9)], 0, [1], "from step 4: rank 0: ValueError: no"),
        ([NONE, NONE, (1, RAISED, 3), NONE, (0, None, 9)], 0, [2, 4, 1, 2], "from step 3"),
        ([(1, RAISED, 2), NONE, NONE, NONE], 1, [1, 2, 4], "3 consecutive failures without a new checkpoint"),
    ],
)
def test_failures_are_restarted_with_growing_delays_up_to_a_limit(
    tmp_path: Path, attempts: list[Attempt], code: int, waits: list[float], logged: str | None
) -> None:
    play = Play(tmp_path, *attempts)
    assert play.go(9).exit_code == code
    assert (len(play.started), play.waits) == (len(attempts), waits)
    assert (logged is None) == (play.logged == [])
    assert logged is None or logged in play.logged[-1]
    assert len(read_json(tmp_path / "summary.json").get("restarts") or []) == len(waits)


def test_a_full_disk_does_not_prevent_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(processes.results, "write", full)
    play = Play(tmp_path, (1, RAISED, 4), (1, RAISED, 5))
    assert play.go(1).failure is RAISED
    assert len(play.started) == 2


@pytest.mark.parametrize("when", ["while it waits", "while the run fails"])
def test_a_stop_signal_ends_the_restarts(tmp_path: Path, when: str) -> None:
    play = Play(tmp_path, (1, RAISED, 2))
    play.stop, play.signal = (signal.SIGTERM, 0) if when == "while it waits" else (0, signal.SIGTERM)
    assert play.go(9).exit_code == (143 if play.stop else 1)
    assert len(play.started) == 1
    summary = read_json(tmp_path / "summary.json")
    assert (summary["exit_code"], summary.get("signal")) == ((143, 15) if play.stop else (1, None))


@pytest.mark.parametrize(
    ("resume", "newest", "attempts", "named"),
    [
        ("never", None, [None, 9], 1),
        ("named", None, [None, 5, 9], 2),  # another run's checkpoint is used until this run has its own
        # this run had step 100, was restarted from step 50 and has saved step 100 again
        ("named", 100, [100, 150], 1),
        # otherwise the run would resume from the newest, which the user did not choose
        ("named", 90, [None, None], 2),
    ],
)
def test_a_named_checkpoint_is_used_again_until_the_run_has_saved_one(
    tmp_path: Path, resume: str, newest: int | None, attempts: list[int | None], named: int
) -> None:
    if newest is not None:
        folder = tmp_path / "checkpoints" / f"step-{newest:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({**FACTS, "step": newest}))
    failed = [(1, RAISED, step) for step in attempts[:-1]]
    play = Play(tmp_path, *failed, (0, None, attempts[-1]))
    play.go(9, resume=resume)
    assert [each for _, each in play.started] == [resume] * named + ["auto"] * (len(attempts) - named)


def test_elastic_continues_with_the_largest_rank_count_that_divides(tmp_path: Path) -> None:
    play = Play(tmp_path, (1, KILLED, None), (1, KILLED, 3), (1, RAISED, 4), (1, RAISED, 5))
    assert play.go(3, elastic=True, ranks=6, micro_size=2).exit_code == 1
    # 12 = 2 x accumulation x ranks has no solution for 5 and 4 ranks
    assert [ranks for ranks, _ in play.started] == [6, 3, 2, 2]
    assert ["on 3 ranks from the start" in line for line in play.logged] == [True, False, False]
    summary = read_json(tmp_path / "summary.json")
    recorded = [(r["step"], r["ranks"], r["failure_kind"]) for r in summary["restarts"]]
    assert recorded == [(-1, 3, "killed"), (3, 2, "killed"), (4, 2, "error")]
    assert (summary["exit_code"], summary.get("signal")) == (1, None)


def test_elastic_uses_the_remaining_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_gpus", lambda: ([0, 1, 2], 4, None))
    free = config("run.device=auto")
    assert restarts.ranks_left(free, 4, RAISED) == 3
    assert restarts.ranks_left(free, 3, KILLED) == 2
    assert restarts.ranks_left(config(global_size=7), 1, KILLED) == 1
    assert restarts.ranks_left(config(), 4, RAISED) == 4  # GPUs do not matter to a CPU run


def test_the_wait_ends_with_a_stop_signal_and_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    assert restarts.wait_for_signal(30.0) == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
    assert restarts.wait_for_signal(0.01) == 0
