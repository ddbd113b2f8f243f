"""Every interval that a person is shown, against its documented formula, by plain arithmetic; that of a micro
batch is in test_curve.py."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from bert_dp import noise
from launcher import stats

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 8: 2.306, 19: 2.093}  # Student's t, two-sided
NORMAL_95 = 1.960


def share_within(quantile: float, degrees: int) -> float:
    """Probability that Student's t lies within +- quantile: the integral of its density."""
    scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    x = np.linspace(0.0, quantile, 20_001)
    return float(2 * np.trapezoid(scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x))


def test_quantiles_of_students_t() -> None:
    for degrees, quantile in stats.STUDENT.items():
        assert share_within(quantile, degrees) == pytest.approx(0.95, abs=2e-4), degrees
    assert share_within(noise.T_95, noise.BLOCKS - 1) == pytest.approx(0.95, abs=2e-4)
    assert share_within(noise.T_999, noise.BLOCKS - 1) == pytest.approx(0.998, abs=2e-5)  # one-sided 99.9 %
    assert [stats.student(n) for n in (1, 4, 9, 15, 28, 29, 400)] == pytest.approx(
        [12.706, 2.776, 2.262, 2.262, 2.262, 2.045, 2.045]
    )


# --- the gradient noise scale


@pytest.mark.parametrize("steps", [50, 60, 207])
def test_ends_of_the_noise_interval_solve_fiellers_equation(steps: int) -> None:
    """(mean tr - x mean |G|^2)^2 = t^2 Var(mean tr - x mean |G|^2), the variance from 20 blocks of steps:
    20 / 19 of the sum of squared deviations of the blocks' sums, over steps^2."""
    rng = np.random.default_rng(steps)
    slow = np.repeat(rng.normal(0, 0.3, steps), 4)[:steps]  # neighbours are alike
    big = 5.0 + slow + rng.normal(0, 0.3, steps)
    small = big + 8.0 + rng.normal(0, 0.5, steps) - slow
    found = noise.estimate(small.tolist(), big.tolist(), 2, 10)
    grad, trace = (10 * big - 2 * small) / 8, (small - big) / (1 / 2 - 1 / 10)

    def variance_of_mean(values: np.ndarray) -> float:
        cuts = [k * steps // 20 for k in range(21)]
        deviations = [sum(values[a:b] - values.mean()) for a, b in itertools.pairwise(cuts)]
        return float(20 / 19 * sum(d**2 for d in deviations) / steps**2)

    assert found.noise_scale == pytest.approx(trace.mean() / grad.mean())
    assert found.interval is not None
    assert found.interval[0] < found.interval[1]
    for x in found.interval:
        off = trace - x * grad
        assert off.mean() ** 2 == pytest.approx(T_95[19] ** 2 * variance_of_mean(off), rel=1e-9)
    half = T_95[19] * math.sqrt(variance_of_mean(grad))
    assert found.grad_sq_interval == pytest.approx((grad.mean() - half, grad.mean() + half))


# --- a cell of `bert-dp scale`


@pytest.mark.parametrize("seconds", [(1.0, 1.1), (1.0, 1.02, 1.1), (1.0, 1.0, 1.02, 1.1, 1.1)])
def test_few_repeats_widen_the_bootstrap(seconds: Sequence[float]) -> None:
    """Repeats that each are all alike: at both ends a draw's median is the shortest and the longest repeat,
    widened about the median in logarithms by t / 1.960 and sqrt(R / (R - 1))."""
    count = len(seconds)
    wider = T_95[count - 1] / NORMAL_95 * math.sqrt(count / (count - 1))
    middle = math.log(statistics.median(seconds))
    expected = [math.exp(middle + (math.log(end) - middle) * wider) for end in (seconds[0], seconds[-1])]
    found = stats.interval(stats.resampled_means([[s] * 20 for s in seconds]))
    assert found == pytest.approx(expected, rel=1e-9)


def test_steps_of_a_slow_moment_are_drawn_together() -> None:
    """Steps that are slow and fast by turns, five each: the mean of 40 varies as that of 8 blocks of 5."""
    steps = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2, 1.2] * 4)
    blocks = [np.take(steps, range(k, k + 5), mode="wrap").mean() for k in range(40)]
    draws = stats.resampled_means([steps.tolist(), steps.tolist()])  # a draw: the mean of two such means
    assert draws is not None
    expected = np.std(blocks) / math.sqrt(8) / math.sqrt(2) / steps.mean()
    wider = T_95[1] / NORMAL_95 * math.sqrt(2)
    assert np.std(np.log(draws)) / wider == pytest.approx(expected, rel=0.05)
    assert math.exp(np.median(np.log(draws))) == pytest.approx(1.1, rel=0.01)


def test_an_interval_is_the_middle_95_per_cent_and_a_ratio_is_of_draws_that_know_nothing_of_each_other() -> (
    None
):
    draws = np.arange(2001.0)
    assert stats.interval(draws) == pytest.approx([50, 1950])
    over, under = np.exp(np.random.default_rng(0).normal(0, 0.1, (2, 2000)))
    half = NORMAL_95 * 0.1 * math.sqrt(2)
    found = stats.ratio_interval(over, under, 2.0)
    assert found == pytest.approx([2 * math.exp(-half), 2 * math.exp(half)], rel=0.05)
