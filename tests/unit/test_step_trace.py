"""Tests of profiled steps: refused plans, recorded steps and failed writes."""

import contextlib
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_dp.config.checks import ProfilePlan, parse_profile, profile_issues
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.process import World
from bert_dp.training.profiler import StepTrace
from tests.helpers import raised_issues


def test_a_plan_has_a_first_step_an_end_and_a_list_of_ranks() -> None:
    plan = parse_profile("10:13", "1, 0,1")
    assert plan == ProfilePlan(10, 12, (0, 1))
    assert plan.options(2) == ["--profile", "10:13", "--profile-ranks", "0,1"]
    assert plan.options(1) == ["--profile", "10:13", "--profile-ranks", "0"]
    assert ProfilePlan(10, 12, (1,)).options(1) == []
    assert parse_profile("1:2", "0") == ProfilePlan(1, 1, (0,))


@pytest.mark.parametrize(
    ("steps", "ranks", "setting"),
    [
        *((steps, "0", "--profile") for steps in ("10", "a:b", "1:9999999999999", "0:3", "5:5", "5:4")),
        *(("1:2", ranks, "--profile-ranks") for ranks in ("", "0,-1")),
    ],
)
def test_an_invalid_range_of_steps_or_list_of_ranks_is_refused(steps: str, ranks: str, setting: str) -> None:
    (issue,) = raised_issues(parse_profile, steps, ranks)
    assert issue.setting == setting


def test_steps_and_ranks_that_the_run_does_not_have_are_named() -> None:
    plan = ProfilePlan(10, 12, (0, 3))
    assert profile_issues(plan, 4, steps=12) == []
    assert profile_issues(plan, 4, steps=None, done=9) == []
    assert [(i.setting, i.value) for i in profile_issues(plan, 2, steps=11, done=10)] == [
        ("--profile", 12),
        ("--profile", 10),
        ("--profile-ranks", 3),
    ]


class Paused:
    """A fake meter that counts its pauses."""

    times, now = 0, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.times, self.now = self.times + 1, True
        yield
        self.now = False


def traced(plan: ProfilePlan, run_dir: Path, rank: int, steps: range, stop: int | None = None) -> StepTrace:
    """Run `steps`, each a matrix product, until step `stop`. Return the trace."""
    entered: list[str] = []
    heartbeat: Any = SimpleNamespace(enter=lambda phase, step: entered.append(phase))
    trace = StepTrace(plan, HostCollectives(World(rank, rank, 2, 2), None), run_dir, heartbeat)
    meter: Any = Paused()
    trace.reached(steps.start - 1, meter)
    for step in steps:
        torch.randn(8, 8) @ torch.randn(8, 8)
        trace.reached(step, meter)
        if step == stop:
            break
    trace.reached(step, meter, at_end=True)
    assert (meter.times, meter.now) == (0 if trace.steps is None else 2, False)
    assert entered == ["save"] * meter.times, "the launcher must not report a hung step"
    return trace


@pytest.mark.parametrize(
    ("plan", "steps", "stop", "recorded"),
    [
        ((2, 3), range(1, 6), None, [2, 3]),
        ((1, 1), range(1, 6), None, [1, 1]),
        ((4, 5), range(1, 6), None, [4, 5]),
        ((2, 4), range(1, 6), 3, [2, 3]),  # stopped by a signal
        ((2, 4), range(3, 6), None, [3, 4]),  # resumed from the checkpoint of step 2
    ],
)
def test_the_planned_steps_that_the_run_takes_are_recorded(
    tmp_path: Path, plan: tuple[int, int], steps: range, stop: int | None, recorded: list[int]
) -> None:
    assert traced(ProfilePlan(*plan, (0,)), tmp_path, 0, steps, stop).steps == recorded
    with gzip.open(tmp_path / "profile" / "rank-0.json.gz") as file:
        names = Counter(one.get("name") for one in json.load(file)["traceEvents"])
    assert names["aten::mm"] == recorded[1] - recorded[0] + 1


def test_other_ranks_and_steps_that_never_come_leave_no_profile(tmp_path: Path) -> None:
    assert traced(ProfilePlan(2, 3, (1,)), tmp_path, 0, range(1, 6)).steps == [2, 3]
    assert traced(ProfilePlan(8, 9, (0,)), tmp_path, 0, range(1, 6)).steps is None
    assert traced(ProfilePlan(2, 3, (0,)), tmp_path, 0, range(4, 6)).steps is None
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("in the way")
    trace = traced(ProfilePlan(2, 3, (0,)), tmp_path, 0, range(1, 4))
    assert (trace.steps, trace.failed_writes) == ([2, 3], 1)
    assert "warning: the profile could not be written" in capsys.readouterr().out
