"""When the watch speaks and when not, over heartbeats and stacks that a test writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import struct
import types
from pathlib import Path
from typing import Any

import pytest

from bert_dp.files import BEAT_SLOTS, PHASES, Heartbeat, heartbeat_path
from bert_dp.files.models import Failure
from launcher.watch import hangs
from launcher.watch.hangs import PATIENT_S, Watch

STACK = 'Current thread 0x1 (most recent call first):\n  File "/p/model.py", line 7 in forward\n'


class Rank:
    """Stands for a worker's process: a heartbeat file, and an answer to the signal."""

    def __init__(self, run_dir: Path, rank: int):
        self.pid, self.signals, self.goes_on_when_asked = os.getpid(), 0, False
        self.is_deaf, self.answer = False, STACK
        self.collectives: list[dict[str, Any]] = []
        self.path, self.stack = heartbeat_path(run_dir, rank), run_dir / "logs" / f"rank-{rank}.stack"
        self.path.parent.mkdir(exist_ok=True)
        self.beat = Heartbeat(pid=self.pid)
        self.write()

    def write(self, **changes: int) -> None:
        self.beat = dataclasses.replace(self.beat, **changes)
        self.path.write_bytes(struct.pack(f"@{len(BEAT_SLOTS)}q", *dataclasses.astuple(self.beat)))

    def live(self) -> None:
        self.write(alive=self.beat.alive + 1)

    def go(self, phase: str = "step", step: int | None = None) -> None:
        step = self.beat.step if step is None else step
        self.write(progress=self.beat.progress + 1, phase=PHASES.index(phase), step=step)

    def send_signal(self, number: int) -> None:
        self.signals += 1
        assert number == signal.SIGUSR2
        if self.is_deaf:
            return
        with self.stack.open("a") as file:
            file.write(self.answer)
        facts = {"pid": self.pid, "progress": self.beat.progress, "collectives": self.collectives}
        self.stack.with_name(f"{self.stack.stem}.collectives.json").write_text(json.dumps(facts))
        if self.goes_on_when_asked:
            self.go()


class Scene:
    """A watch over ranks, a clock, and what was said."""

    def __init__(self, run_dir: Path, num_ranks: int = 2, **options: float):
        (run_dir / "logs").mkdir()
        self.said: list[str] = []
        self.ranks = {number: Rank(run_dir, number) for number in range(num_ranks)}
        self.watch = Watch(
            run_dir, self.said.append, **{"hang_after_s": 30.0, "end_hung_after_s": 600.0, **options}
        )
        self.now = self.watch._looked
        self.ended: Failure | None = None

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.ended = self.ended or self.watch.poll(self.ranks, self.now)

    def quiet(self, seconds: float, *, frozen: int | None = None, going: int | None = None) -> float | None:
        """All alive and none progresses, but for `frozen` and `going`; seconds until the first report."""
        for second in range(round(seconds)):
            for number, rank in self.ranks.items():
                if number != frozen:
                    rank.live()
                if number == going:
                    rank.go("evaluate")
            self.look()
            if self.said:
                return second + 1
        return None

    def train(self, steps: int, seconds_per_step: float = 1.0) -> None:
        """From where the ranks are."""
        for _ in range(steps):
            for rank in self.ranks.values():
                rank.go("data", rank.beat.step + 1)
            passed = 0.0
            while passed < seconds_per_step:
                for rank in self.ranks.values():
                    rank.live()
                    rank.go()
                self.look()
                passed += 1.0


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_healthy_ranks_are_not_reported_nor_time_in_which_the_watch_did_not_run(scene: Scene) -> None:
    scene.train(100)
    scene.look(10_000.0)
    assert scene.said == []
    assert sum(rank.signals for rank in scene.ranks.values()) == 0


def test_a_rank_that_compiles_is_given_time(scene: Scene) -> None:
    """A padded length that comes for the first time is compiled in the middle of a step."""
    scene.train(5)
    scene.ranks[1].answer = STACK.replace("/p/model.py", "/p/torch/_inductor/async_compile.py")
    assert scene.quiet(PATIENT_S - 40) is None
    assert scene.ranks[0].signals < 12, "it is looked at again from time to time"
    assert scene.quiet(100) is not None, "a compiler may hang too"


def test_a_hang_is_reported_once_by_the_limit_and_its_end_too(scene: Scene, tmp_path: Path) -> None:
    scene.train(5)
    moved = scene.now
    scene.ranks[0].go("log")
    assert 20 <= scene.quiet(60) <= 30
    assert "hang: rank 1 in step 5 (step" in scene.said[0]
    assert "rank 1 at /p/model.py:7 in forward" in scene.said[1]
    assert (tmp_path / "hang.txt").read_text().count("hang: rank 1") == 1
    assert scene.said[-1].startswith("  the run is ended in 600 s")
    count = len(scene.said)
    scene.quiet(100)
    assert len(scene.said) == count
    again = scene.now + 1
    scene.train(3)
    assert scene.said[count] == f"goes on after {again - moved:.0f} s", "since rank 1 has moved last"
    assert len(scene.said) == count + 1
    assert "goes on" in (tmp_path / "hang.txt").read_text()
    assert scene.ended is None
    scene.said.clear()
    assert scene.quiet(60) is not None, "a second hang"


def test_a_run_that_stays_hung_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end_hung_after_s=50.0)
    scene.train(5)
    scene.ranks[0].go("log")
    assert scene.quiet(60) is not None
    scene.ranks[0].go("log")  # one rank that moves is no run that goes on
    for _ in range(45):
        scene.look()
    assert scene.ended is None
    for _ in range(10):
        scene.look()
    assert (scene.ended.rank, scene.ended.where) == (1, "/p/model.py:7")
    assert scene.ended.message.startswith("hang in step 5")
    assert scene.ended.log == str(tmp_path / "logs" / "rank-1.log")
    assert scene.ended.log_tail[0].startswith("  rank 1 at /p/model.py:7")


def test_what_an_earlier_hang_or_start_left_is_no_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that can write no stack has none, and is not waited for without end."""
    now, naps = itertools.count(0.0, 0.5), iter(range(50))
    clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: next(naps), strftime=str)
    monkeypatch.setattr(hangs, "time", clock)
    scene.train(5)
    scene.ranks[0].go("log")
    for rank in scene.ranks.values():
        rank.stack.write_text(STACK)
        rank.is_deaf = True
    (scene.ranks[1].stack.parent / "rank-1.collectives.json").write_text('{"pid": 1, "collectives": [{}]}')
    assert scene.quiet(60) is not None
    assert scene.said[1] == "  rank 1: no stack available"


def test_the_collectives_of_this_silence_are_evidence(scene: Scene) -> None:
    """Rank 0 is in the same place and is not named: it waits in a collective that rank 1 has not started."""
    entry = {"group": "0", "operation": "all_reduce", "sizes": [[8]], "state": "scheduled"}
    scene.train(5)
    scene.ranks[0].collectives = [{**entry, "sequence": n} for n in (1, 2)]
    scene.ranks[1].collectives = [{**entry, "sequence": 1}]
    assert scene.quiet(60) is not None
    assert "hang: rank 1" in scene.said[0]
    assert "has not started all_reduce" in scene.said[0]


def test_zero_never_ends_it_and_a_lone_rank_is_watched_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_ranks=1, end_hung_after_s=0.0)
    scene.train(5)
    assert scene.quiet(60) is not None
    assert "rank 0" in scene.said[0]
    assert scene.said[-1].startswith("  the run is not ended unless it goes on")
    for _ in range(5000):
        scene.look()
    assert scene.ended is None


@pytest.mark.parametrize("phase", ["compile", "save", "done"])
def test_patience_where_nothing_beats_for_long(scene: Scene, phase: str) -> None:
    scene.train(5)
    scene.ranks[0].go(phase)
    assert scene.quiet(PATIENT_S - 10) is None
    assert scene.quiet(20) is not None


@pytest.mark.parametrize(("step", "is_patient"), [(101, True), (104, False)])
def test_patience_until_a_first_step_is_done(scene: Scene, step: int, is_patient: bool) -> None:
    """Also where the hang comes in the first second of training."""
    for place in (("compile", 100), ("step", step)):
        for rank in scene.ranks.values():
            rank.go(*place)
        scene.look()
    waited = scene.quiet(PATIENT_S - 11)
    assert waited is None if is_patient else waited <= 30


@pytest.mark.parametrize(("seconds", "low", "high"), [([40] * 5, 90, 121), ([1, 1, 40, 1, 1], 20, 30)])
def test_long_steps_are_waited_for_three_times_the_median(
    scene: Scene, seconds: list[int], low: int, high: int
) -> None:
    scene.train(1)
    for each in seconds:
        scene.train(1, seconds_per_step=each)
    assert low <= scene.quiet(200) <= high


@pytest.mark.parametrize("phase", ["compile", "save"])
def test_a_frozen_rank_is_reported_without_patience_though_others_go_on(scene: Scene, phase: str) -> None:
    scene.train(5)
    scene.ranks[1].go(phase)
    assert scene.quiet(60, frozen=1, going=0) <= 30
    assert "not schedulable" in scene.said[0]
    assert "rank 1" in scene.said[0]


def test_setup_may_hold_the_lock(scene: Scene) -> None:
    assert scene.quiet(200, frozen=1) is None


def test_no_report_of_a_rank_that_goes_on_while_evidence_is_gathered(scene: Scene) -> None:
    scene.train(5)
    for rank in scene.ranks.values():
        rank.goes_on_when_asked = True
    assert scene.quiet(28) is None
    assert scene.ranks[0].signals >= 1


def test_no_report_of_a_rank_elsewhere_that_ends_while_evidence_is_gathered(scene: Scene) -> None:
    scene.train(5)
    elsewhere = {2: (scene.ranks[1].beat, "S")}
    scene.watch.others = types.SimpleNamespace(
        unheard_s=float, heartbeats=elsewhere.copy, ask_for_evidence=elsewhere.clear, evidence=dict
    )
    assert scene.quiet(28) is not None
    assert "rank 2" not in "".join(scene.said)


def test_a_process_without_a_heartbeat_of_its_own_gets_no_signal(scene: Scene) -> None:
    """SIGUSR2 would end a worker that has not asked for it yet."""
    scene.train(5)
    scene.ranks[1].write(pid=1)  # left by an earlier run
    assert scene.quiet(PATIENT_S + 5) is not None
    assert scene.ranks[0].signals == 1
    assert scene.ranks[1].signals == 0


def test_ranks_without_any_heartbeat_are_left_alone(scene: Scene) -> None:
    for rank in scene.ranks.values():
        rank.path.unlink()
    for _ in range(1000):
        scene.look()
    assert scene.said == []
