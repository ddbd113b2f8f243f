"""Tests of the rules of `tune batch` by hand: sizes, memory line, rates, intervals and choice."""

import itertools
import math
import statistics
from typing import Any

import pytest

from launcher.tune import throughput
from launcher.tune.throughput import BatchTrial, MemoryLine
from tests.helpers import make_config, raised_issues


def timed(samples: int, steps: list[float], passes: list[float], exposed_s: float = 0.0) -> BatchTrial:
    times = {"step_s": steps, "forward_backward_s": passes, "data_wait_s": [0.0] * len(steps)}
    facts = {"name": "r", "micro_batch": 1, "samples": samples, "seconds": 9.0, "status": "ok"}
    return BatchTrial(**facts, **times, exposed_s=exposed_s)  # type: ignore[arg-type]


def sizes(ranks: int, **batch: Any) -> list[int]:
    return throughput.dividing_sizes(make_config(batch={"micro_size": 1, **batch}), ranks)


def test_only_micro_batches_that_keep_the_global_batch_are_candidates() -> None:
    assert sizes(2, global_size=48) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes(1, global_size=48)[-1] == 48
    assert sizes(2, global_size=64, ramp_fraction=0.5, ramp_quantum=16) == [1, 2, 4, 8]
    (issue,) = raised_issues(sizes, 2, global_size=7)
    assert (issue.setting, issue.kind) == ("batch.global_size", "does_not_divide")


def test_the_sizes_that_are_timed_divide_the_largest_and_are_evenly_spaced() -> None:
    every = sizes(2, global_size=2**14)
    assert len(every) == 14
    kept = throughput.sizes_to_time(every)
    assert len(kept) == 8
    assert (kept[0], kept[-1]) == (1, 2**13)
    assert max(b / a for a, b in itertools.pairwise(kept)) <= 4
    assert throughput.sizes_to_time([1, 2, 3, 4, 6, 8, 12, 16]) == [1, 2, 4, 8, 16]


def trials(peaks: dict[int, float | None]) -> list[BatchTrial]:
    """Return a trial of each micro batch on two ranks. A trial without a peak ran out of memory."""
    some = timed(8, [1.0], [0.8])
    ends = {m: {"peaks_gib": [peak - 0.5, peak]} if peak else {"status": "oom"} for m, peak in peaks.items()}
    return [some.model_copy(update={"micro_batch": m, **end}) for m, end in ends.items()]


def test_the_memory_line_goes_through_the_two_largest_sizes_that_ran() -> None:
    line = throughput.memory_line(trials({1: 2.0, 8: 3.0, 4: 2.0, 16: None}), 9.0)
    assert line == MemoryLine(intercept_gib=1.0, gib_per_sequence=0.25)
    one = throughput.memory_line(trials({4: 3.0}) + trials({4: 5.0}), 0.5)
    assert one == MemoryLine(intercept_gib=3.0, gib_per_sequence=0.5), "the formula's slope"
    assert throughput.memory_line(trials({4: 3.0, 8: 2.0}), 0.5).gib_per_sequence == 0
    assert throughput.memory_line(trials({4: None}), 0.5) is None


def test_passes_scale_with_the_global_batch_and_the_rest_counts_once() -> None:
    run = timed(64, [1.0] * 3, [0.7] * 3, exposed_s=0.2)
    assert throughput.run_rate(run, 256) == pytest.approx(256 / (1.0 + 3 * 0.5))
    assert throughput.run_rate(run, 64) == pytest.approx(64)
    hidden = run.model_copy(update={"exposed_s": 0.9})  # more than the passes took
    assert throughput.run_rate(hidden, 256) == pytest.approx(256)
    waiting = timed(64, [1.0] * 3, [0.2] * 3).model_copy(update={"data_wait_s": [0.7] * 3})
    assert throughput.run_rate(waiting, 256) == pytest.approx(256 / (1.0 + 3 * 0.9))


def test_the_interval_uses_students_t_and_a_deviation_pooled_over_sizes() -> None:
    rates = {1: [90.0, 110.0, 100.0], 2: [200.0, 190.0], 4: [300.0]}
    logs = [[math.log(r) for r in rates[m]] for m in (1, 2)]
    sd = math.sqrt(sum((len(each) - 1) * statistics.variance(each) for each in logs) / 3)
    assert throughput.deviation(rates) == (pytest.approx(sd), 3)
    middle, half = statistics.fmean(logs[0]), 3.182 * sd / math.sqrt(3)
    ends = [math.exp(middle - half), math.exp(middle + half)]
    assert throughput.rate_interval(rates, 1) == pytest.approx(ends, rel=1e-4)
    assert throughput.rate_interval({1: [100.0], 2: [200.0]}, 1) is None


@pytest.mark.parametrize(
    ("sizes", "following"),
    [([1, 2, 4, 8, 16], [2, 4, 8]), ([2, 4, 8], [2, 4]), ([2, 4], [2, 4]), ([2], [2]), ([2, 4, 32], [2, 4])],
)
def test_the_faster_half_of_a_round_runs_again(sizes: list[int], following: list[int]) -> None:
    rates = {1: [1.0], 2: [5.0], 4: [4.0], 8: [3.0], 16: [2.0]}  # 32 has no successful run
    assert throughput.next_round(rates, sizes) == following


def repeated(rates: dict[int, float], spread: float, times: int = 4) -> dict[int, list[float]]:
    """Return runs whose log rates alternate between - and + `spread` around the given rate."""
    signs = [1 if k % 2 else -1 for k in range(times)]
    return {m: [rate * math.exp(sign * spread) for sign in signs] for m, rate in rates.items()}


@pytest.mark.parametrize(
    ("rates", "chosen", "fastest"),
    [
        ({1: 96.9, 2: 97.1, 4: 100.0, 8: 99.0}, 2, 4),
        ({1: 80.0, 2: 90.0}, 2, 2),
        ({1: 99.9, 2: 100.0, 4: 99.5}, 1, 2),
        ({1: 100.0, 2: 98.0}, 1, 1),
        ({4: 80.0}, 4, 4),
    ],
)
def test_the_smallest_size_within_three_percent_is_chosen(rates, chosen, fastest) -> None:
    assert throughput.choose_size(repeated(rates, 1e-4))[:2] == (chosen, fastest)


def test_a_smaller_size_must_be_within_three_percent_by_a_standard_error() -> None:
    """Four runs at +-s have deviation s x sqrt(4 / 3). The error of a difference is sqrt(2) times smaller."""
    for times, chosen in ((0.99, 1), (1.01, 2)):
        error = times * (math.log(0.99) - math.log(0.97))
        spread = error * math.sqrt(2) / math.sqrt(4 / 3)
        assert throughput.choose_size(repeated({1: 99.0, 2: 100.0}, spread))[0] == chosen


def test_a_size_that_may_be_three_percent_faster_is_not_settled() -> None:
    assert throughput.choose_size(repeated({1: 99.0, 2: 100.0, 4: 90.0}, 1e-4))[2] == []
    assert throughput.choose_size(repeated({1: 99.0, 2: 100.0, 4: 90.0}, 1e-4), 1.0)[:2] == (2, 2), "on a GPU"
    chosen, _, open_sizes = throughput.choose_size(repeated({1: 99.0, 2: 100.0, 4: 80.0}, 0.03))
    assert (chosen, open_sizes) == (2, [1])
    assert throughput.choose_size({1: [99.0], 2: [100.0], 4: [50.0]}) == (2, 2, [1, 4])  # no size ran twice
