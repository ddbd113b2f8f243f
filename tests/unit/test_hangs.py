"""Test which ranks the evidence of a hang names (stacks, process states, steps, collectives), and when
the watch reports a hang. The tests write heartbeats and stacks."""

import dataclasses
import itertools
import json
import os
import signal
import struct
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config.schema import RunConfig
from bert_dp.files import BEAT_SLOTS, PHASES, Heartbeat, heartbeat_path
from bert_dp.files.models import Failure
from launcher.watch import hangs
from launcher.watch.hangs import Frame, RankSnapshot, Watch, compare_collectives, find_culprit

STDLIB = sysconfig.get_paths()["stdlib"]
TORCH = f"{STDLIB}/site-packages/torch"
WORK = (Frame("/p/bert_dp/data/stream.py", 40, "next"), Frame("/p/bert_dp/training/loop.py", 99, "train"))
GATHER = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 4000, "all_gather"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/p/bert_dp/training/distributed.py", 43, "gather"),
)
TICK = (
    Frame("/p/bert_dp/training/distributed.py", 57, "wait"),
    Frame("/p/bert_dp/training/loop.py", 90, "train"),
)
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
    Frame("/p/bert_dp/parallel/ddp.py", 76, "backward"),
)


def snapshot(
    rank: int, stack: Sequence[Frame] = (), *, step: int = 4, phase: str = "step", done: int = 0, **more: Any
) -> RankSnapshot:
    beat = Heartbeat(pid=9, step=step, phase=PHASES.index(phase), done=done)
    return RankSnapshot(rank, beat, **{"silent_s": 30.0, "unheard_s": 0.5, "stack": stack, **more})


def started(*names: str, group: str = "0", size: int = 8) -> list[dict[str, Any]]:
    entry = {"group": group, "sizes": [[size]], "state": "started"}
    return [{**entry, "sequence": i, "operation": name} for i, name in enumerate(names, 1)]


# --- stacks

DUMP = f"""Thread 0x00007f01 (most recent call first):
  File "{STDLIB}/threading.py", line 331 in wait
  File "/p/bert_dp/training/process.py", line 60 in _live

Current thread 0x00007f02 (most recent call first):
  File "{STDLIB}/socket.py", line 12 in recv
  File "/users/me/my model.py", line 3 in <lambda>
  File "/p/bert_dp/training/loop.py", line 128 in train_step
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_frames_of_the_main_thread_are_read() -> None:
    stack = hangs.parse_stack(DUMP)
    assert [f.function for f in stack] == ["recv", "<lambda>", "train_step"]
    assert (hangs.parse_stack(DUMP + DUMP), hangs.parse_stack("")) == (stack, ())
    assert (snapshot(0, stack[:1]).where, snapshot(0).where) == (stack[0], None), "only packages, or no stack"
    assert snapshot(0, stack).where == Frame("/users/me/my model.py", 3, "<lambda>")


def test_a_stack_shows_the_operation_that_it_waits_in() -> None:
    assert hangs.waits_in(GATHER) == (2, "all_gather")
    inside = Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "_store_based_barrier")
    assert hangs.waits_in((inside, *GATHER[:1])) == (2, "all_gather"), "not the inner call"
    zero1 = (Frame("/p/bert_dp/parallel/zero1.py", 9, "_wait"),)
    device = (Frame(f"{TORCH}/cuda/__init__.py", 9, "synchronize"),)
    assert [hangs.waits_in(stack)[0] for stack in (TICK, BACKWARD, zero1, device)] == [2, 1, 2, 1]
    for working in (WORK, (Frame("/p/mine/dist_tools.py", 9, "wait"),), ()):
        assert hangs.waits_in(working) == (0, "")


# --- the diagnosis


ABSENT = RankSnapshot(1, Heartbeat(), 400.0, 400.0)
CULPRITS: dict[str, tuple[list[RankSnapshot], tuple[int, ...], str]] = {
    "a stopped rank takes precedence": (
        [snapshot(0, WORK, step=3), snapshot(1, state="T", step=5, unheard_s=30.0)],
        (1,),
        "stopped by a signal (SIGSTOP)",
    ),
    "two stopped ranks": ([snapshot(0, state="T"), snapshot(1, state="t")], (0, 1), "stopped by a signal"),
    "behind a rank that compiles": (
        [snapshot(0, step=0, phase="setup"), snapshot(1, step=0, phase="compile")],
        (0,),
        "behind the others, which are in phase compile",
    ),
    "behind a rank that evaluates": ([snapshot(0), snapshot(1, phase="evaluate")], (0,), "behind the others"),
    "frozen": ([snapshot(0, WORK), snapshot(1, unheard_s=29.0)], (1,), "not responding: interpreter"),
    "in the kernel": ([snapshot(0), snapshot(1, unheard_s=29.0, state="D")], (1,), "not responding: blocked"),
    "silent ranks ahead of a rank that is heard wait for the full queue of their GPU": (
        [snapshot(0, WORK, step=4), snapshot(1, step=5, unheard_s=29.0), snapshot(2, step=5, unheard_s=29.0)],
        (0,),
        "behind the others",
    ),
    "not started, so not frozen": ([snapshot(0, GATHER, step=0, phase="compile"), ABSENT], (1,), "behind"),
    "the last of several places": (
        [snapshot(0, step=5), snapshot(1, phase="log"), snapshot(2), snapshot(3, phase="log")],
        (2,),
        "behind the others, which are in step 5 (phase step, micro batches done: 0)",
    ),
    "outside the collective": (
        [snapshot(0, GATHER), snapshot(1, WORK), snapshot(2, TICK)],
        (1,),
        "not in the collective in which the others wait",
    ),
    "working, not in the backward pass": ([snapshot(0, BACKWARD), snapshot(1, WORK)], (1,), "not in the"),
    "in the backward pass, not the collective": ([snapshot(0, BACKWARD), snapshot(1, GATHER)], (0,), "not"),
    "no rank: all wait alike": ([snapshot(0, GATHER), snapshot(1, GATHER)], (), "the cause is unknown"),
    "no rank: no stacks": ([snapshot(0), snapshot(1)], (), "the cause is unknown"),
    "a lone rank": ([snapshot(0, WORK)], (0,), "the only rank"),
    "a late heartbeat": ([snapshot(0, unheard_s=10.0), snapshot(1)], (), "the cause is unknown"),
    "heartbeat with progress": ([snapshot(0, silent_s=2.0, unheard_s=2.0), snapshot(1)], (), "the cause"),
    "waiting for data with an equal number of micro batches done": (
        [snapshot(0, BACKWARD, done=3), snapshot(1, WORK, phase="data", done=3), snapshot(2, done=3)],
        (1,),
        "behind",
    ),
} | {
    f"behind {other}": (
        [snapshot(0, **other), snapshot(1, done=1), snapshot(2, **other)],
        (1,),
        "behind the others",
    )
    for other in ({"step": 5, "phase": "data"}, {"phase": "log"}, {"done": 2}, {"phase": "data", "done": 2})
}


@pytest.mark.parametrize("case", CULPRITS)
def test_the_evidence_names_the_hung_ranks(case: str) -> None:
    snapshots, ranks, reason = CULPRITS[case]
    diagnosis = find_culprit(snapshots)
    assert diagnosis.ranks == ranks
    assert diagnosis.reason.startswith(reason)


# --- collectives


SUM, COPY, GATHERED = "all_reduce", "broadcast", "all_gather"
SAME, OLD = started(SUM, COPY), started(COPY, SUM, SUM)
# tensor parallelism 2 x data parallelism 2: rank 1 sleeps, so rank 0 waits for it, and rank 2 for rank 0
IN_GROUPS = {
    0: started(SUM, SUM, group="tp0") + started(SUM, group="dp0"),
    1: started(SUM, group="tp0") + started(SUM, group="dp1"),
    2: started(SUM, group="tp1") + started(SUM, SUM, group="dp0"),
    3: started(SUM, group="tp1") + started(SUM, SUM, group="dp1"),
}
MUTUAL = {
    0: started(SUM, SUM, group="a") + started(GATHERED, group="b"),
    1: started(SUM, group="a") + started(GATHERED, GATHERED, group="b"),
}


@pytest.mark.parametrize(
    ("recorded", "ranks", "words"),
    [
        ({0: SAME, 1: SAME}, None, ""),
        ({0: (), 1: ()}, None, ""),
        ({0: SAME, 1: ()}, None, ""),  # rank 1 could not answer
        ({0: OLD, 1: OLD[1:]}, None, ""),  # only operations that both ranks recorded are compared
        ({0: started("scatter"), 1: started("scatter", size=0)}, None, ""),  # inputs of scatter may differ
        (
            {0: SAME, 1: SAME[:1], 2: SAME},
            (1,),
            "has not started broadcast of [[8]], whereas ranks 0, 2 wait in it",
        ),
        (
            {0: started(SUM), 1: started(COPY)},
            (0, 1),
            "rank 0 calls all_reduce of [[8]], rank 1 calls broadc",
        ),
        (
            {rank: started(SUM, size=8 + (rank == 2)) for rank in range(4)},
            (2,),
            "ranks 0, 1, 3 call all_reduce of [[8]], rank 2 calls all_reduce of [[9]]",
        ),
        (IN_GROUPS, (1,), "has not started"),
        (MUTUAL, (0, 1), "wait for each other"),
    ],
)
def test_collectives_show_the_hung_ranks(recorded: Any, ranks: tuple[int, ...] | None, words: str) -> None:
    diagnosis = compare_collectives(recorded)
    assert (diagnosis and diagnosis.ranks) == ranks
    assert ranks is None or words in diagnosis.reason


def test_a_rank_is_named_if_only_its_gpu_is_behind() -> None:
    """Both ranks have launched the same collectives, but one GPU has not started the last of them."""
    ahead = started(SUM, SUM)
    behind = [*ahead[:-1], {**ahead[-1], "state": "scheduled"}]
    assert compare_collectives({0: ahead, 1: behind}) is None
    snapshots = [snapshot(0, BACKWARD, collectives=ahead), snapshot(1, BACKWARD, done=2, collectives=behind)]
    diagnosis = find_culprit(snapshots)  # takes precedence over the place in the step, where rank 0 is behind
    reason = "has not started all_reduce of [[8]] on its GPU, whereas rank 0 waits in it"
    assert diagnosis == hangs.HangDiagnosis((1,), reason)
    assert "rank 1 in step 4 (phase step, micro batches done: 2)" in hangs.report(snapshots, diagnosis)[0]
    gloo = [{**entry, "state": "scheduled"} for entry in ahead]
    assert find_culprit([snapshot(0, collectives=gloo), snapshot(1, collectives=gloo)]).ranks == ()


# --- the report


def test_a_report_has_the_stack_of_the_named_rank_and_one_line_for_each_other_rank() -> None:
    deep = tuple(Frame("/p/mine.py", line, "f") for line in range(1, 40))
    snapshots = [snapshot(0, GATHER, phase="log", silent_s=40.0), snapshot(1, deep, step=3), snapshot(2)]
    head, place, *lines = hangs.report(snapshots, find_culprit(snapshots))
    assert head.startswith("hang: rank 1 in step 3 (phase step, micro batches done: 0): behind")
    assert head.endswith("(no progress for 30 s)")
    assert place == "  rank 1 at /p/mine.py:1 in f"
    assert lines[:-2] == [f"    | /p/mine.py:{line} in f" for line in range(1, 13)]
    assert lines[-2].startswith(
        "  rank 0 in step 4 (phase log): waits in all_gather (/p/bert_dp/training/distri"
    )
    assert lines[-1] == "  rank 2 in step 4 (phase step, micro batches done: 0)"
    stopped = [snapshot(rank, state="T", silent_s=20.0 + rank) for rank in range(2)]
    head, place, *_ = hangs.report(stopped, find_culprit(stopped))
    assert head.endswith("(no progress for 21 s)")
    assert place == "  rank 0: no stack available"


STACK = 'Current thread 0x1 (most recent call first):\n  File "/p/model.py", line 7 in forward\n'


class Rank:
    """Fake process of a worker, with a heartbeat file and an answer to SIGUSR2."""

    def __init__(self, run_dir: Path, rank: int):
        self.pid, self.signals = os.getpid(), 0
        self.progresses_when_signalled = self.is_deaf = False
        self.answer, self.collectives = STACK, list[dict[str, Any]]()
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
        if self.progresses_when_signalled:
            self.go()


class Scene:
    """Watch over fake ranks, with a fake clock and the lines that the watch reports."""

    def __init__(self, run_dir: Path, num_ranks: int = 2, **options: float):
        (run_dir / "logs").mkdir()
        self.reported: list[str] = []
        self.ranks = {number: Rank(run_dir, number) for number in range(num_ranks)}
        limits = RunConfig(**{"hang_after_s": 30.0, "end_hung_after_s": 600.0, **options})
        self.watch = Watch(run_dir, self.reported.append, limits)
        self.now = self.watch._looked
        self.ended: Failure | None = None

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.ended = self.ended or self.watch.poll(self.ranks, self.now)

    def quiet(self, seconds: float, *, frozen: int | None = None, going: int | None = None) -> float | None:
        """Keep all ranks but `frozen` alive and let only `going` progress. Return the seconds to a report."""
        for second in range(round(seconds)):
            for number, rank in self.ranks.items():
                if number != frozen:
                    rank.live()
                if number == going:
                    rank.go("evaluate")
            self.look()
            if self.reported:
                return second + 1
        return None

    def train(self, steps: int, seconds_per_step: float = 1.0) -> None:
        """Train `steps` more steps on every rank."""
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


def test_healthy_and_unstarted_ranks_are_not_reported(scene: Scene) -> None:
    """A pause of the watch is not reported either."""
    scene.train(100)
    scene.look(10_000.0)
    assert sum(rank.signals for rank in scene.ranks.values()) == 0
    for rank in scene.ranks.values():
        rank.path.unlink()
    for _ in range(1000):
        scene.look()
    assert scene.reported == []


def test_a_rank_that_compiles_gets_more_time(scene: Scene) -> None:
    """A new padded length is compiled in the middle of a step."""
    scene.train(5)
    scene.ranks[1].answer = STACK.replace("/p/model.py", "/p/torch/_inductor/async_compile.py")
    assert scene.quiet(hangs.PATIENT_S - 40) is None
    assert scene.ranks[0].signals < 12, "the evidence must be gathered again only from time to time"
    assert scene.quiet(100) is not None, "a compiler may hang too"


def test_a_hang_and_its_end_are_each_reported_once(scene: Scene, tmp_path: Path) -> None:
    scene.train(5)
    moved = scene.now
    scene.ranks[0].go("log")
    assert 20 <= scene.quiet(60) <= 30
    assert "hang: rank 1 in step 5 (phase step" in scene.reported[0]
    assert "rank 1 at /p/model.py:7 in forward" in scene.reported[1]
    assert (tmp_path / "hang.txt").read_text().count("hang: rank 1") == 1
    assert scene.reported[-1].startswith("  bert-dp ends the run in 600 s")
    count = len(scene.reported)
    scene.quiet(100)
    assert len(scene.reported) == count
    again = scene.now + 1
    scene.train(3)
    assert scene.reported[count] == f"the run continues after {again - moved:.0f} s without progress", (
        "counted from the last progress of rank 1"
    )
    assert len(scene.reported) == count + 1
    assert "continues after" in (tmp_path / "hang.txt").read_text()
    assert scene.ended is None
    scene.reported.clear()
    assert scene.quiet(60) is not None, "a second hang must be reported"


def test_a_run_that_stays_hung_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end_hung_after_s=50.0)
    scene.train(5)
    scene.ranks[0].go("log")
    assert scene.quiet(60) is not None
    scene.ranks[0].go("log")  # progress of one rank does not end the hang
    for _ in range(45):
        scene.look()
    assert scene.ended is None
    for _ in range(10):
        scene.look()
    assert (scene.ended.rank, scene.ended.where) == (1, "/p/model.py:7")
    assert scene.ended.message.startswith("hang in step 5")
    assert scene.ended.log == str(tmp_path / "logs" / "rank-1.log")
    assert scene.ended.log_tail[0].startswith("  rank 1 at /p/model.py:7")


def test_the_evidence_of_an_earlier_hang_is_not_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a rank that cannot write a stack is limited."""
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
    assert scene.reported[1] == "  rank 1: no stack available"


def test_the_collectives_of_this_hang_are_evidence(scene: Scene) -> None:
    """Rank 0 is at the same place but waits in a collective that rank 1 has not started."""
    scene.train(5)
    scene.ranks[0].collectives, scene.ranks[1].collectives = started(SUM, SUM), started(SUM)
    assert scene.quiet(60) is not None
    assert "hang: rank 1" in scene.reported[0]
    assert "has not started all_reduce" in scene.reported[0]


def test_a_limit_of_zero_never_ends_a_run_and_a_lone_rank_is_watched(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_ranks=1, end_hung_after_s=0.0)
    scene.train(5)
    assert scene.quiet(60) is not None
    assert "rank 0" in scene.reported[0]
    assert scene.reported[-1].startswith("  bert-dp does not end the run")
    for _ in range(5000):
        scene.look()
    assert scene.ended is None


@pytest.mark.parametrize("phase", ["compile", "save", "done"])
def test_phases_without_frequent_progress_get_more_time(scene: Scene, phase: str) -> None:
    scene.train(5)
    scene.ranks[0].go(phase)
    assert scene.quiet(hangs.PATIENT_S - 10) is None
    assert scene.quiet(20) is not None


@pytest.mark.parametrize(("step", "is_patient"), [(101, True), (104, False)])
def test_the_first_steps_after_a_start_get_more_time(scene: Scene, step: int, is_patient: bool) -> None:
    """The hang may start in the first second of training."""
    for place in (("compile", 100), ("step", step)):
        for rank in scene.ranks.values():
            rank.go(*place)
        scene.look()
    waited = scene.quiet(hangs.PATIENT_S - 11)
    assert waited is None if is_patient else waited <= 30


@pytest.mark.parametrize(("seconds", "low", "high"), [([40] * 5, 90, 121), ([1, 1, 40, 1, 1], 20, 30)])
def test_the_limit_is_three_median_steps(scene: Scene, seconds: list[int], low: int, high: int) -> None:
    scene.train(1)
    for each in seconds:
        scene.train(1, seconds_per_step=each)
    assert low <= scene.quiet(200) <= high


@pytest.mark.parametrize("phase", ["compile", "save"])
def test_a_frozen_rank_is_reported_early_even_if_others_progress(scene: Scene, phase: str) -> None:
    assert scene.quiet(200, frozen=1) is None, "setup may hold the interpreter lock"
    scene.train(5)
    scene.ranks[1].go(phase)
    assert scene.quiet(60, frozen=1, going=0) <= 30
    assert "not responding" in scene.reported[0]
    assert "rank 1" in scene.reported[0]


def test_a_rank_that_progresses_while_evidence_is_gathered_is_not_reported(scene: Scene) -> None:
    scene.train(5)
    for rank in scene.ranks.values():
        rank.progresses_when_signalled = True
    assert scene.quiet(28) is None
    assert scene.ranks[0].signals >= 1


def test_a_rank_on_another_node_that_ends_while_evidence_is_gathered_is_not_reported(scene: Scene) -> None:
    scene.train(5)
    remote = {2: (scene.ranks[1].beat, "S")}
    scene.watch.others = types.SimpleNamespace(
        unheard_s=float, heartbeats=remote.copy, ask_for_evidence=remote.clear, evidence=dict
    )
    assert scene.quiet(28) is not None
    assert "rank 2" not in "".join(scene.reported)


def test_a_process_without_its_own_heartbeat_gets_no_signal(scene: Scene) -> None:
    """SIGUSR2 would kill a worker that has not installed its handler yet."""
    scene.train(5)
    scene.ranks[1].write(pid=1)  # left by an earlier run
    assert scene.quiet(hangs.PATIENT_S + 5) is not None
    assert scene.ranks[0].signals == 1
    assert scene.ranks[1].signals == 0
