"""Every interval that a person is shown, against its documented formula, by plain arithmetic; that of a micro
batch is in test_throughput.py, that of the noise scale in test_noise_estimate.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bert_dp.cost import student
from bert_dp.training import noise
from launcher import stats


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
