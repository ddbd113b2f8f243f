"""Tests of intervals and statistics against their documented formulas.

test_throughput.py checks the interval of a micro batch, and test_noise_estimate.py the noise scale.
"""

import math
import statistics

import numpy as np
import pytest

from bert_dp.cost import student
from bert_dp.training import noise
from launcher import stats


def widening(repeats: int, quantile: float) -> float:
    return quantile / 1.960 * math.sqrt(repeats / (repeats - 1))


@pytest.mark.parametrize(
    ("levels", "quantile", "shares"),
    [
        # 1/4 of the draws have the lower repeat twice, 1/2 have both
        ((1.0, 4.0), 12.706204736, [1 / 4, 1 / 2, 1 / 4]),
        # the median is the lowest repeat in 7/27 and the middle one in 13/27 of the draws
        ((1.0, 2.0, 8.0), 4.302652730, [7 / 27, 13 / 27, 7 / 27]),
        ((1.0, 1.0, 1.02, 1.1, 1.1), 2.776445105, None),
    ],
)
def test_draws_of_repeats_with_constant_steps(levels, quantile, shares) -> None:
    """A draw is the median of equally many repeats with replacement, widened in logarithms about the median.
    The interval reaches from the shortest to the longest repeat."""
    drawn = stats.resampled_means([[level] * 12 for level in levels])
    assert drawn is not None
    assert drawn.shape == (2000,)
    middle, wider = math.log(statistics.median(levels)), widening(len(levels), quantile)
    medians = sorted({statistics.median(levels), *levels})
    expected = [math.exp(middle + (math.log(m) - middle) * wider) for m in medians]
    assert stats.interval(drawn) == pytest.approx([expected[0], expected[-1]], rel=1e-9)
    values, counts = np.unique(drawn.round(9), return_counts=True)
    assert values == pytest.approx(expected)
    assert shares is None or counts / 2000 == pytest.approx(shares, abs=0.05)


def test_steps_are_drawn_in_blocks_of_five_that_wrap_around() -> None:
    """The variance is that of a mean over ceil(n / 5) windows of 5 steps; two equal repeats halve it."""
    steps = [1 + 0.001 * (k % 7 == 0) + 0.002 * (k % 11 < 3) for k in range(33)]
    windows = [statistics.fmean(steps[(k + i) % 33] for i in range(5)) for k in range(33)]
    drawn = stats.resampled_means([steps, steps])
    assert drawn is not None
    expected = math.sqrt(statistics.pvariance(windows) / 7 / 2) / statistics.fmean(steps)
    # half of the draws take the same repeat twice, with different windows
    assert statistics.stdev(np.log(drawn)) == pytest.approx(expected * widening(2, 12.706204736), rel=0.06)
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(steps), rel=1e-3)


def test_draws_follow_from_the_seed_and_need_two_repeats() -> None:
    """A block is not longer than the list of steps."""
    assert stats.resampled_means([[1.0, 2.0, 3.0]] * 2) == pytest.approx(2.0)
    repeats = [[1.0, 2.0, 3.0, 5.0, 4.0, 6.0, 2.0], [1.0, 3.0, 3.0, 4.0, 4.0, 6.0, 2.0]]
    first, again, other = (stats.resampled_means(repeats, *seed) for seed in ((), (0,), (1,)))
    assert first is not None
    assert other is not None
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert stats.resampled_means(repeats[:1]) is None


def test_intervals_are_the_central_95_percent() -> None:
    assert stats.interval(np.arange(1001.0)) == pytest.approx([25, 975])
    assert stats.interval(None) is None
    over, under = np.full(5, 6.0), np.full(5, 3.0)
    assert stats.ratio_interval(over, under) == [2, 2]
    assert stats.ratio_interval(over, under, 5.0) == [10, 10]
    assert stats.ratio_interval(None, under) is stats.ratio_interval(over, None) is None


@pytest.mark.parametrize("level", [0.5, 0.95, 0.998])
def test_quantiles_of_students_t_equal_scipys(level: float) -> None:
    t = pytest.importorskip("scipy.stats").t
    for degrees in (*range(1, 201), 1_000, 10**6):
        expected = t.ppf((1 + level) / 2, degrees)
        assert student(degrees, level) == pytest.approx(expected, rel=1e-6), degrees


def test_the_half_width_of_a_mean_uses_the_degrees_of_freedom_of_its_values() -> None:
    """11 values have 10 degrees of freedom: t = 2.228139."""
    values = [float(k) for k in range(11)]
    sd = math.sqrt(sum((v - 5) ** 2 for v in values) / 10)
    assert stats.half_width(values) == pytest.approx(2.228139 * sd / math.sqrt(11), rel=1e-6)
    assert pytest.approx(2.093024, rel=1e-6) == noise.T_95
    assert pytest.approx(3.579400, rel=1e-6) == noise.T_999
