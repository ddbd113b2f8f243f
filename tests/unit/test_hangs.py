"""Whom the evidence names: stacks, states, places and collectives of ranks that stand still."""

from __future__ import annotations

import sysconfig
from typing import Any

import pytest

from bert_dp.files import PHASES, Heartbeat
from launcher.watch.hangs import (
    Frame,
    HangDiagnosis,
    RankSnapshot,
    compare_collectives,
    find_culprit,
    parse_stack,
    report,
    waits_in,
)

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
    rank: int,
    stack: tuple[Frame, ...] = (),
    *,
    step: int = 4,
    phase: str = "step",
    done: int = 0,
    **more: Any,
) -> RankSnapshot:
    beat = Heartbeat(pid=9, step=step, phase=PHASES.index(phase), done=done)
    return RankSnapshot(rank, beat, **{"silent_s": 30.0, "unheard_s": 0.5, "stack": stack, **more})


def started(*names: str, group: str = "0", size: int = 8, first: int = 1) -> list[dict[str, Any]]:
    return [
        {"group": group, "sequence": first + i, "operation": name, "sizes": [[size]], "state": "started"}
        for i, name in enumerate(names)
    ]


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


def test_the_main_threads_frames_are_read() -> None:
    stack = parse_stack(DUMP)
    assert [f.function for f in stack] == ["recv", "<lambda>", "train_step"]
    assert (parse_stack(DUMP + DUMP), parse_stack("")) == (stack, ())
    assert (snapshot(0, stack[:1]).where, snapshot(0).where) == (stack[0], None), "a package's, or none"
    assert snapshot(0, stack).where == Frame("/users/me/my model.py", 3, "<lambda>")


def test_what_a_stack_waits_in() -> None:
    assert waits_in(GATHER) == (2, "all_gather")
    assert waits_in(TICK)[0] == 2
    assert waits_in(BACKWARD)[0] == 1
    assert waits_in(WORK) == (0, "")
    zero1 = Frame("/p/bert_dp/parallel/zero1.py", 9, "_wait")
    device = Frame(f"{TORCH}/cuda/__init__.py", 9, "synchronize")
    assert [waits_in((frame,))[0] for frame in (zero1, device)] == [2, 1]
    inside = Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "_store_based_barrier")
    assert waits_in((inside, *GATHER[:1])) == (2, "all_gather"), "the call, not what it is made of"
    elsewhere = Frame("/p/mine/dist_tools.py", 9, "wait")
    assert waits_in((elsewhere,)) == (0, "")
    assert waits_in(()) == (0, "")


# --- the diagnosis


ABSENT = RankSnapshot(1, Heartbeat(), 400.0, 400.0)
CULPRITS: dict[str, tuple[list[RankSnapshot], tuple[int, ...], str]] = {
    "stopped, before all else": (
        [snapshot(0, WORK, step=3), snapshot(1, state="T", step=5, unheard_s=30.0)],
        (1,),
        "stopped by a signal (SIGSTOP)",
    ),
    "stopped by two": ([snapshot(0, state="T"), snapshot(1, state="t")], (0, 1), "stopped by a signal"),
    "behind one that compiles": (
        [snapshot(0, step=0, phase="setup"), snapshot(1, step=0, phase="compile")],
        (0,),
        "behind the others, which are in compile",
    ),
    "behind one that evaluates": ([snapshot(0), snapshot(1, phase="evaluate")], (0,), "behind the others"),
    "frozen": ([snapshot(0, WORK), snapshot(1, unheard_s=29.0)], (1,), "not schedulable: h"),
    "frozen in the kernel": (
        [snapshot(0), snapshot(1, unheard_s=29.0, state="D")],
        (1,),
        "not schedulable: stuck in the kernel",
    ),
    "ahead of one that is heard, its launch waits for room in its GPU's queue": (
        [snapshot(0, WORK, step=4), snapshot(1, step=5, unheard_s=29.0), snapshot(2, step=5, unheard_s=29.0)],
        (0,),
        "behind the others",
    ),
    "not begun: behind, not frozen": ([snapshot(0, GATHER, step=0, phase="compile"), ABSENT], (1,), "behind"),
    "the last of many places": (
        [snapshot(0, step=5), snapshot(1, phase="log"), snapshot(2), snapshot(3, phase="log")],
        (2,),
        "behind the others, which are in step 5 (step, 0 micro batches done)",
    ),
    "outside the collective": (
        [snapshot(0, GATHER), snapshot(1, WORK), snapshot(2, TICK)],
        (1,),
        "not in the collective that the others wait in",
    ),
    "at work, not in the backward pass": ([snapshot(0, BACKWARD), snapshot(1, WORK)], (1,), "not in the"),
    "in the backward pass, not the collective": ([snapshot(0, BACKWARD), snapshot(1, GATHER)], (0,), "not"),
    "nobody: all wait alike": ([snapshot(0, GATHER), snapshot(1, GATHER)], (), "no rank stands out"),
    "nobody: no stacks": ([snapshot(0), snapshot(1)], (), "no rank stands out"),
    "a lone rank": ([snapshot(0, WORK)], (0,), "makes no progress"),
    "waiting for data, with as many micro batches done": (
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


@pytest.mark.parametrize("what", CULPRITS)
def test_whom_the_evidence_names(what: str) -> None:
    snapshots, ranks, reason = CULPRITS[what]
    diagnosis = find_culprit(snapshots)
    assert diagnosis.ranks == ranks
    assert diagnosis.reason.startswith(reason)


def test_a_late_heartbeat_is_not_a_frozen_rank() -> None:
    assert not snapshot(0, unheard_s=10.0).frozen  # of 30 s
    assert not snapshot(0, silent_s=2.0, unheard_s=2.0).frozen


# --- collectives


SAME, OLD = started("all_reduce", "broadcast"), started("broadcast", "all_reduce", "all_reduce")


@pytest.mark.parametrize(
    ("recorded", "diagnosis"),
    [
        ({0: SAME, 1: SAME}, None),
        ({0: (), 1: ()}, None),
        ({0: SAME, 1: ()}, None),  # rank 1 could not answer
        ({0: OLD, 1: OLD[1:]}, None),  # compared where they meet
        ({0: started("scatter"), 1: started("scatter", size=0)}, None),  # inputs that may differ
        (
            {0: SAME, 1: SAME[:1], 2: SAME},
            HangDiagnosis((1,), "has not started broadcast of [[8]], in which ranks 0, 2 wait"),
        ),
    ],
)
def test_who_has_not_started_a_collective(recorded: dict[int, Any], diagnosis: HangDiagnosis | None) -> None:
    assert compare_collectives(recorded) == diagnosis


def test_another_operation_or_size_under_one_number_is_a_mismatch() -> None:
    diagnosis = compare_collectives({0: started("all_reduce"), 1: started("broadcast")})
    assert diagnosis.ranks == (0, 1)
    assert "rank 0 calls all_reduce of [[8]], rank 1 calls broadcast of [[8]]" in diagnosis.reason
    diagnosis = compare_collectives({r: started("all_reduce", size=8 + (r == 2)) for r in range(4)})
    assert diagnosis.ranks == (2,)
    assert "ranks 0, 1, 3 call all_reduce of [[8]], rank 2 calls all_reduce of [[9]]" in diagnosis.reason


def test_a_rank_that_waits_for_another_in_its_own_group_is_not_named() -> None:
    """Tensor parallelism 2 x data parallelism 2: rank 1 sleeps, its partner 0 waits, so 2 waits for 0."""
    done = {
        0: started("all_reduce", group="tp0"),
        2: started("all_reduce", group="tp1"),
        3: started("all_reduce", group="tp1"),
    }
    first = started("all_reduce", group="dp0")
    second = started("all_reduce", group="dp1")
    recorded = {
        0: done[0] + started("all_reduce", group="tp0", first=2) + first,
        1: done[0] + second,
        2: done[2] + first + started("all_reduce", group="dp0", first=2),
        3: done[3] + second + started("all_reduce", group="dp1", first=2),
    }
    diagnosis = compare_collectives(recorded)
    assert diagnosis.ranks == (1,)


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    a, b = started("all_reduce", group="a"), started("all_gather", group="b")
    more_a, more_b = started("all_reduce", group="a", first=2), started("all_gather", group="b", first=2)
    diagnosis = compare_collectives({0: a + b + more_a, 1: a + b + more_b})
    assert diagnosis.ranks == (0, 1)
    assert "wait for each other" in diagnosis.reason


def test_a_gpu_that_is_behind_is_named_where_its_rank_is_not() -> None:
    """All ranks have passed on as much: the GPU of one has not begun what those of the others are in."""
    ahead = [*started("all_reduce"), {**started("all_reduce", first=2)[0], "state": "started"}]
    behind = [*ahead[:-1], {**ahead[-1], "state": "scheduled"}]
    assert compare_collectives({0: ahead, 1: behind}) is None
    snapshots = [snapshot(0, BACKWARD, collectives=ahead), snapshot(1, BACKWARD, done=2, collectives=behind)]
    diagnosis = find_culprit(snapshots)  # before the place in the step: rank 0 is behind there
    reason = "has not begun on its GPU all_reduce of [[8]], in which rank 0 waits"
    assert diagnosis == HangDiagnosis((1,), reason)
    assert "rank 1 in step 4 (step, 2 micro batches done)" in report(snapshots, diagnosis)[0]
    gloo = [{**entry, "state": "scheduled"} for entry in ahead]
    assert find_culprit([snapshot(0, collectives=gloo), snapshot(1, collectives=gloo)]).ranks == ()


# --- the report


def test_a_report_has_the_stack_of_the_named_and_a_line_of_each_other() -> None:
    deep = tuple(Frame("/p/mine.py", line, "f") for line in range(1, 40))
    snapshots = [snapshot(0, GATHER, phase="log", silent_s=40.0), snapshot(1, deep, step=3), snapshot(2)]
    head, place, *lines = report(snapshots, find_culprit(snapshots))
    assert head.startswith("hang: rank 1 in step 3 (step, 0 micro batches done): behind")
    assert head.endswith("(no progress for 30 s)")
    assert place == "  rank 1 at /p/mine.py:1 in f"
    assert lines[:-2] == [f"    | /p/mine.py:{line} in f" for line in range(1, 13)]
    assert lines[-2].startswith("  rank 0 in step 4 (log): waits in all_gather (/p/bert_dp/training/distri")
    assert lines[-1] == "  rank 2 in step 4 (step, 0 micro batches done)"
    stopped = [snapshot(rank, state="T", silent_s=20.0 + rank) for rank in range(2)]
    head, place, *_ = report(stopped, find_culprit(stopped))
    assert head.endswith("(no progress for 21 s)")
    assert place == "  rank 0: no stack available"
