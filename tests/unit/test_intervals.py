"""Every interval that a person is shown, against its documented formula, by plain arithmetic; that of a micro
batch is in test_throughput.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bert_dp.cost import student
from bert_dp.training import noise
from launcher import stats

NORMAL_95 = 1.960


@pytest.mark.parametrize("level", [0.5, 0.95, 0.998])
def test_quantiles_of_students_t_are_those_of_scipy(level: float) -> None:
    t = pytest.importorskip("scipy.stats").t
    for degrees in (*range(1, 201), 1_000, 10**6):
        expected = t.ppf((1 + level) / 2, degrees)
        assert student(degrees, level) == pytest.approx(expected, rel=1e-6), degrees


def test_the_half_width_of_a_mean_has_the_degrees_of_its_values() -> None:
    """11 values: 2.228139 at 10 degrees of freedom, where a table ended in 9's."""
    values = [float(k) for k in range(11)]
    sd = math.sqrt(sum((v - 5) ** 2 for v in values) / 10)
    assert stats.half_width(values) == pytest.approx(2.228139 * sd / math.sqrt(11), rel=1e-6)
    assert pytest.approx(2.093024, rel=1e-6) == noise.T_95
    assert pytest.approx(3.579400, rel=1e-6) == noise.T_999


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
        assert off.mean() ** 2 == pytest.approx(noise.T_95**2 * variance_of_mean(off), rel=1e-9)
    half = noise.T_95 * math.sqrt(variance_of_mean(grad))
    assert found.grad_sq_interval == pytest.approx((grad.mean() - half, grad.mean() + half))


# --- a cell of `bert-dp scale`


@pytest.mark.parametrize("repeats", [3, 5, 8])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(repeats: int) -> None:
    """Runs differ by 2 %, their steps by 5 %."""
    covered, tries = 0, 100
    for seed in range(tries):
        draw = np.random.default_rng(seed)
        steps = [list(draw.normal(draw.normal(1.0, 0.02), 0.05, 50)) for _ in range(repeats)]
        low, high = stats.interval(stats.resampled_means(steps, seed)) or (1, 0)
        covered += low <= 1.0 <= high
    assert covered >= 93


def test_the_interval_of_a_ratio_has_the_errors_of_both() -> None:
    over, under = np.exp(np.random.default_rng(0).normal(0, 0.1, (2, 2000)))
    half = NORMAL_95 * 0.1 * math.sqrt(2)
    interval = stats.ratio_interval(over, under, 2.0)
    assert interval == pytest.approx([2 * math.exp(-half), 2 * math.exp(half)], rel=0.05)
