"""The rank that the others wait for: from each rank's own work to the line of the closing table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bert_dp.training.metrics import STRAGGLER_RATIO, STRAGGLER_STEPS, Timers, straggler
from launcher.report.run_page import of_directories
from tests.report_fixture import make_run, shown, unfolded
from tests.tensors import CPU


@pytest.mark.parametrize(
    ("compute_before_reduction_s", "steps", "ratio", "seconds_per_step"),
    [
        ([1.0, 5.0, 2.0, 3.0], 20, 2.5, 0.15),  # against the median of the others
        ([10.0, 10.0 * STRAGGLER_RATIO], 1000, STRAGGLER_RATIO, None),  # even enough
        ([1.0, 3.0], STRAGGLER_STEPS - 1, 3.0, None),  # over a few steps nobody is named
        ([1.0, 3.0], STRAGGLER_STEPS, 3.0, 0.2),
        ([4.0], 100, None, None),  # nothing to compare with
        ([0.0, 0.0], 0, None, None),
        ([0.0, 3.0], 100, None, None),
        ([], 5, None, None),
    ],
)
def test_the_slowest_is_held_against_the_others(
    compute_before_reduction_s: list[float], steps: int, ratio: float | None, seconds_per_step: float | None
) -> None:
    slowest = {"rank": 1, "ratio": ratio, "seconds_per_step": seconds_per_step}
    expected = (ratio and pytest.approx(ratio), slowest if seconds_per_step else None)
    assert straggler(compute_before_reduction_s, steps) == expected


def test_timers_may_overlap_and_restart() -> None:
    timers = Timers(CPU)
    with timers.phase("forward_backward"):
        timers.start("compute_before_reduction")
        time.sleep(0.02)
        timers.stop("compute_before_reduction")
        time.sleep(0.02)
    timers.end_step()
    seconds = {name: each[0] for name, each in timers.drain().items()}
    assert 0.02 <= seconds["compute_before_reduction"] <= seconds["forward_backward"] - 0.02
    assert seconds["forward_backward"] <= seconds["step"]
    assert seconds["optimizer"] == 0.0
    assert set(map(tuple, timers.drain().values())) == {()}


def test_the_console_has_a_line_where_there_is_one(tmp_path: Path) -> None:
    named = {"rank": 3, "ratio": 1.5, "seconds_per_step": 0.25}
    run = make_run(tmp_path / "a", summary={"straggler": named, "straggler_ratio": 1.5})
    told = "straggler rank 3, own work 1.50 x the others' median, 250 ms lost per step"
    assert told in unfolded(shown(of_directories([run])))
    quiet = make_run(tmp_path / "b", summary={"straggler": None})
    assert "straggler" not in unfolded(shown(of_directories([quiet])))
