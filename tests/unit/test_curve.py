"""Throughput against micro batch: intervals against their formula, the choice at its bounds."""

import dataclasses
import math
import statistics

import pytest

from launcher.results import BatchChoice, SizeResult, TimedRun
from launcher.tune import curve
from launcher.tune.curve import Rate


def timed(steps: list[float], passes: list[float] | None = None, exposed_s: float = 0.0) -> TimedRun:
    return TimedRun(
        name="r",
        step_s=steps,
        forward_backward_s=passes or [0.8 * s for s in steps],
        peak_gib=[1.0],
        exposed_s=exposed_s,
    )


def rate(micro: int, median: float, half: float = 0.0) -> Rate:
    """`half`: of its interval, in logarithms."""
    return Rate(micro, median, median * math.exp(-half), median * math.exp(half))


def size(runs: list[TimedRun]) -> SizeResult:
    return SizeResult(micro_batch=4, accumulation=1, status="ok", runs=runs)


def test_the_interval_is_students_over_three_stretches_of_each_run() -> None:
    runs = [timed([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]), timed([1.0, 2.0, 4.0, 4.0, 1.0, 1.0, 1.0])]
    interval = curve.rate(size(runs), 64, 64)
    # stretches of 2, 2 and 3 steps
    blocks = [math.log(x) for x in (1.0, 2.0, 3.0, 1.5, 4.0, 1.0)]
    middle = statistics.median(blocks)
    half = 2.5705818366 * statistics.stdev(blocks) / math.sqrt(6)
    expected = (4, 64 / math.exp(middle), 64 / math.exp(middle + half), 64 / math.exp(middle - half))
    assert dataclasses.astuple(interval) == pytest.approx(expected)


def test_passes_count_as_often_as_the_declared_batch_needs_and_the_rest_once() -> None:
    run = timed([1.0] * 3, [0.7, 0.7, 0.7], exposed_s=0.2)
    assert curve.rate(size([run]), 64, 256).median == pytest.approx(256 / (1.0 + 3 * 0.5))
    assert curve.rate(size([run]), 64, 64).median == pytest.approx(64)
    hidden = run.model_copy(update={"exposed_s": 0.9})  # more than there is: no pass takes less than nothing
    assert curve.rate(size([hidden]), 64, 256).median == pytest.approx(256)


def test_the_wait_for_data_counts_as_often_as_the_passes() -> None:
    """A run whose loader is the bottleneck waits for four times the sequences four times as long."""
    run = timed([1.0] * 3, [0.2, 0.2, 0.2]).model_copy(update={"data_wait_s": [0.7] * 3})
    assert curve.rate(size([run]), 64, 256).median == pytest.approx(256 / (1.0 + 3 * 0.9))
    assert curve.parts(size([run])) == pytest.approx((0.9, 1.0))


def test_parts_are_means_over_runs() -> None:
    runs = [timed([1.0, 3.0], [0.5, 1.5], 0.25), timed([4.0, 4.0], [2.0, 2.0])]
    assert curve.parts(size(runs)) == pytest.approx(((0.75 + 2.0) / 2, 3.0))
    assert curve.parts(size([timed([1.0], [0.5], 0.9)])) == (0.0, 1.0)


def test_the_smallest_that_reaches_97_of_100_is_chosen() -> None:
    rates = [rate(1, 96.9), rate(2, 97.0), rate(4, 100.0), rate(8, 99.0)]
    assert curve.choose(rates) == BatchChoice(
        micro_batch=2,
        best_micro_batch=4,
        samples_per_s=97.0,
        best_samples_per_s=100.0,
        share_of_best=0.97,
        flat=False,
        not_settled=[],
        why="the smallest within 3 % of the best",
    )


def test_on_a_gpu_the_fastest_is_chosen() -> None:
    rates = [rate(128, 98.0), rate(256, 99.0), rate(512, 100.0), rate(1024, 99.5)]
    assert curve.choose(rates).micro_batch == 128
    on_gpu = curve.choose(rates, on_gpu=True)
    assert (on_gpu.micro_batch, on_gpu.best_micro_batch, on_gpu.share_of_best) == (512, 512, 1.0)
    assert (on_gpu.not_settled, on_gpu.flat) == ([], False)


@pytest.mark.parametrize(
    ("rates", "micro", "flat", "why"),
    [
        ([rate(4, 80.0)], 4, False, "the only size that ran"),
        (
            [rate(1, 80.0), rate(2, 90.0)],
            2,
            False,
            "the best of those tried, and no smaller one is sure to come within 3 %",
        ),
        (
            [rate(1, 97.0), rate(2, 100.0)],
            1,
            True,
            "the curve is flat: every size is within 3 % of the best, so the smallest",
        ),
        ([rate(1, 99.0), rate(2, 100.0), rate(4, 50.0)], 1, False, "the smallest within 3 % of the best"),
        (
            [rate(1, 100.0), rate(2, 98.0)],
            1,
            True,
            "the curve is flat: every size is within 3 % of the best, ",
        ),
    ],
)
def test_why_it_was_chosen(rates: list[Rate], micro: int, flat: bool, why: str) -> None:
    choice = curve.choose(rates)
    assert (choice.micro_batch, choice.flat) == (micro, flat)
    assert choice.why == why or (flat and choice.why.startswith(why))


def test_a_smaller_one_must_be_sure_of_94_at_its_low_end() -> None:
    """Half widths add as independent errors do: sqrt(0.03^2 + 0.04^2) = 0.05."""
    low = 0.98 * math.exp(-0.05)
    assert low < 0.94
    assert curve.choose([rate(1, 98.0, 0.03), rate(2, 100.0, 0.04)]).micro_batch == 2
    assert curve.choose([rate(1, 98.0, 0.02), rate(2, 100.0, 0.03)]).micro_batch == 1
    assert curve.choose([rate(1, 96.0), rate(2, 100.0)]).micro_batch == 2  # sure, and below the line
    assert curve.open_sizes([rate(1, 98.0, 0.03), rate(2, 100.0, 0.04)]) == [1, 2]  # the best counts as well


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_a_share_of_the_best_is_not_settled_while_its_interval_reaches_the_line(times: float) -> None:
    """The share lies below 97 % by its half width, of both errors as above, `times` over."""
    share = 0.97 * math.exp(-0.05 * times)
    assert curve.unsettled([rate(8, 100 * share, 0.03), rate(16, 100.0, 0.04)]) == ([8] if times < 1 else [])


def test_what_may_reach_the_line_and_is_not_known_to_is_open() -> None:
    best = rate(8, 100.0)
    rates = [rate(1, 90.0, 0.01), rate(2, 96.0, 0.03), rate(4, 98.0, 0.2), best, rate(16, 96.0, 0.05)]
    assert curve.unsettled(rates) == curve.choose(rates).not_settled == [2, 4]
    assert curve.open_sizes(rates) == [2, 4, 8]
    assert curve.unsettled([rate(1, 97.0), best]) == []  # reaches it for sure
    assert curve.unsettled([Rate(1, 96.0, 96.0, 96.0), best]) == []  # misses it for sure
    assert curve.open_sizes([rate(1, 90.0), best]) == []
    chosen = [rate(1, 80.0), rate(2, 98.0, 0.02), best]  # the chosen one itself is not settled
    assert curve.open_sizes(chosen) == [2, 8]
    assert (curve.choose(chosen).micro_batch, curve.choose(chosen).not_settled) == (2, [])
    between = [rate(1, 96.0, 0.02), rate(2, 99.0), best]
    assert curve.open_sizes(between) == [1, 2, 8]


def test_goodput_by_hand() -> None:
    """A pass of 4 takes 0.5 s, an update 1 s; a sequence in a step of B is worth (8 + n) / (B + n)."""
    goodput = curve.goodput(
        micro_s=0.5,
        update_s=1.0,
        per_pass=4,
        global_size=8,
        noise=8.0,
        interval=(2.0, 32.0),
        sizes=(4, 8, 16),
    )
    speeds = {4: 4 / 1.5, 8: 4.0, 16: 16 / 3}

    def worth(size: int, noise: float) -> float:
        return (8 + noise) / (size + noise)

    for size, point in zip(speeds, goodput.points, strict=True):
        ends = [speeds[size] * worth(size, noise) for noise in (2.0, 32.0)]
        assert point.model_dump() == pytest.approx(
            {
                "global_batch": size,
                "samples_per_s": speeds[size],
                "efficiency": worth(size, 8.0),
                "goodput": speeds[size] * worth(size, 8.0),
                "low": min(ends),
                "high": max(ends),
            }
        )
    # 4: 2.67 x 1.33 = 3.56, 8: 4, 16: 5.33 x 0.67 = 3.56; noise 2: 4, noise 32: 16
    assert (goodput.recommended, goodput.recommended_interval, goodput.declared) == (8, [4, 16], 8)
    assert (goodput.gain, goodput.at_edge) == (0.0, False)
    more = curve.goodput(
        micro_s=0.5, update_s=1.0, per_pass=4, global_size=4, noise=32.0, interval=(32.0, 2.0), sizes=(4, 8)
    )
    # the declared 4: 2.67; 8: 4 x 36 / 40 = 3.6
    assert (more.recommended, more.recommended_interval, more.at_edge) == (8, [4, 8], True)
    assert more.gain == pytest.approx(3.6 / (4 / 1.5) - 1)
    low = curve.goodput(
        micro_s=4.0, update_s=0.0, per_pass=4, global_size=8, noise=1.0, interval=(1.0, 1.0), sizes=(4, 8, 16)
    )
    assert (low.recommended, low.at_edge) == (4, True)


@pytest.mark.parametrize(
    ("per_pass", "declared", "sizes"),
    [
        (8, 64, [8, 16, 32, 64, 128, 256, 512, 1024]),
        (2, 65_536, [2**k for k in range(12, 21)]),
        (48, 64, [48, 64, 96, 192, 384, 768]),
        (64, 64, [2**k for k in range(6, 11)]),
        (4096, 64, [64]),
    ],
)
def test_goodput_compares_doublings_within_a_factor_of_16(
    per_pass: int, declared: int, sizes: list[int]
) -> None:
    assert curve.batch_sizes(per_pass, declared) == sizes
