"""Test the fit of L(N, D), its intervals, and the fit of parabolas, on synthetic laws and published runs."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from launcher.plan import loss_fit
from launcher.plan.frontier import CompletedRun, LossLaw
from tests.helpers import raised_issues

PROTEIN_LMS = Path(__file__).parents[3] / "shared" / "data" / "isoflop_protein_mlm.csv"
LAW = LossLaw(1.7, 400.0, 410.0, 0.34, 0.28)
BUDGETS = (1e15, 3e15, 1e16, 3e16)


def runs_of(
    law: LossLaw, seed: int = 0, noise: float = 0.0, sizes: tuple[float, float] = (0.2, 5.0)
) -> list[CompletedRun]:
    """Return runs of nine sizes around the best one at each budget, with noise in the log of the loss."""
    random = np.random.default_rng(seed)
    runs = []
    for budget in BUDGETS:
        for share in np.geomspace(*sizes, 9):
            parameters = law.best_parameters(budget) * share
            tokens = budget / law.flops / parameters
            loss = law.loss(parameters, tokens) * math.exp(noise * random.standard_normal())
            runs.append(CompletedRun(budget, parameters, loss, tokens))
    return runs


ASYMMETRIC = LossLaw(1.2, 60.0, 3000.0, 0.25, 0.45)


@pytest.mark.parametrize(
    ("law", "sizes", "parabola_is_off"),
    [
        (LAW, (0.2, 5.0), False),
        (LAW, (0.05, 20.0), True),
        (ASYMMETRIC, (0.05, 4.0), True),
        (ASYMMETRIC, (0.5, 20.0), True),
    ],
)
def test_without_noise_the_best_size_is_exact_where_a_parabola_is_not(law, sizes, parabola_is_off) -> None:
    runs = runs_of(law, sizes=sizes)
    found = loss_fit.fit(runs, draws=2).law
    for budget in (BUDGETS[-1], 10 * BUDGETS[-1]):
        assert found.best_parameters(budget) == pytest.approx(law.best_parameters(budget), rel=0.01)
        assert found.best_loss(budget) == pytest.approx(law.best_loss(budget), rel=1e-3)
    assert found.exponent == pytest.approx(law.b / (law.a + law.b), abs=1e-3)
    minima = loss_fit.parabola_minima(runs)
    assert (abs(minima[BUDGETS[-1]][0] / law.best_parameters(BUDGETS[-1]) - 1) >= 0.05) == parabola_is_off


@pytest.mark.parametrize(("seeds", "least"), [(4, 4), pytest.param(100, 90, marks=pytest.mark.slow)])
def test_intervals_cover_the_best_size_in_nine_of_ten(seeds: int, least: int) -> None:
    """The budgets are the largest one of the runs and ten times as much."""
    counts = [0, 0]
    for seed in range(seeds):
        fit = loss_fit.fit(runs_of(LAW, seed, 0.01), draws=30)
        for i, budget in enumerate((BUDGETS[-1], 10 * BUDGETS[-1])):
            _, (low, high) = fit.estimate(lambda law, c=budget: math.log(law.best_parameters(c)))
            counts[i] += low <= math.log(LAW.best_parameters(budget)) <= high
    assert min(counts) >= least


def test_parabolas_of_the_published_masked_lms_have_the_known_exponents() -> None:
    if not PROTEIN_LMS.is_file():
        pytest.skip(f"the published runs are missing: {PROTEIN_LMS.name}")
    with PROTEIN_LMS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [[float(row[name]) for name in ("budget_flops", "parameters", "loss")] for row in rows]
    minima = loss_fit.parabola_minima([CompletedRun(c, n, x, c / 6 / n) for c, n, x in runs])
    best = {budget: parameters for budget, (parameters, _) in minima.items()}
    assert loss_fit.parabola_exponent(best) == pytest.approx(0.749, abs=0.005)
    assert [budget for budget, (_, inside) in minima.items() if not inside] == [3e20]
    del best[3e20]
    assert loss_fit.parabola_exponent(best) == pytest.approx(0.789, abs=0.005)


def test_too_few_runs_are_refused() -> None:
    for runs in (runs_of(LAW)[:5], runs_of(LAW)[:18]):
        (found,) = raised_issues(loss_fit.fit, runs)
        assert (found.setting, found.kind) == ("RUNS", "missing")
