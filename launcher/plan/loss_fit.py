"""Fit the loss of completed runs, L(N, D) = E + A N^-a + B D^-b.

For a given pair of exponents the fit is linear, so E, A, B >= 0 follow by least squares and only a and b are
searched (variable projection, Golub & Pereyra 1973).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_dp.config import ConfigError, Issue
from launcher.plan.frontier import MIN_BUDGETS, MIN_RUNS, CompletedRun, Frontier, LossLaw
from launcher.report.formats import count_of

Floats = NDArray[np.float64]

HUBER = 1e-3  # of ln(fit / loss), beyond which a run counts by its distance (Hoffmann et al., appendix D.2)
EXPONENTS = np.geomspace(0.03, 2.0, 36)
REWEIGHTINGS = 8
BASINS = 3  # local minima over the grid of exponents that are polished
SECOND_BASIN = 1.10  # of the best sum of losses, up to which another minimum is reported
DRAWS = 100  # resampled fits behind an interval
MANY_BUDGETS = 6  # from which whole budgets are resampled too


def fit(runs: Sequence[CompletedRun], seed: int = 0, draws: int = DRAWS) -> Frontier:
    """Fit the law and its resampled copies. Raises ConfigError for too few runs or budgets."""
    budgets = sorted({run.budget_flops for run in runs})
    if len(runs) < MIN_RUNS or len(budgets) < MIN_BUDGETS:
        counts = f"{count_of(len(runs), 'run')} of {count_of(len(budgets), 'budget')}"
        message = f"{counts}; a fit needs {MIN_RUNS} runs of {MIN_BUDGETS} budgets"
        raise ConfigError([Issue("RUNS", "missing", message, len(runs))])
    flops = float(np.median([run.budget_flops / (run.parameters * run.tokens) for run in runs]))
    best, *others = _minima(runs, flops)
    random = np.random.default_rng(seed)
    resampled = [_polish(_resample(runs, budgets, random), best, flops)[1] for _ in range(draws)]
    left_out = [_minima([run for run in runs if run.budget_flops != budget], flops)[0] for budget in budgets]
    return Frontier(runs=list(runs), law=best, draws=resampled, left_out=left_out, others=others)


def _resample(
    runs: Sequence[CompletedRun], budgets: Sequence[float], random: np.random.Generator
) -> list[CompletedRun]:
    """Draw as many runs of each budget with replacement; from MANY_BUDGETS on also the budgets."""
    groups = [[run for run in runs if run.budget_flops == budget] for budget in budgets]
    if len(groups) >= MANY_BUDGETS:
        groups = [groups[i] for i in random.integers(len(groups), size=len(groups))]
    return [group[i] for group in groups for i in random.integers(len(group), size=len(group))]


def _minima(runs: Sequence[CompletedRun], flops: float) -> list[LossLaw]:
    """Return the polished minima over the exponents, best first, those near the best alone."""
    a, b = (axis.ravel() for axis in np.meshgrid(EXPONENTS, EXPONENTS, indexing="ij"))
    constants, sums = _project(runs, a, b)
    grid = np.pad(sums.reshape(len(EXPONENTS), -1), 1, constant_values=np.inf)
    lowest = np.full(grid[1:-1, 1:-1].shape, True)
    for i, j in itertools.product((-1, 0, 1), repeat=2):
        if i or j:
            rows = slice(1 + i, grid.shape[0] - 1 + i)
            lowest &= grid[1:-1, 1:-1] <= grid[rows, 1 + j : grid.shape[1] - 1 + j]
    starts = sorted(np.flatnonzero(lowest.ravel()), key=lambda i: float(sums[i]))[:BASINS]
    polished = [_polish(runs, LossLaw(*map(float, (*constants[i], a[i], b[i]))), flops) for i in starts]
    polished.sort(key=lambda each: each[0])
    kept: list[LossLaw] = []
    for total, law in polished:
        far = all(abs(law.exponent - other.exponent) > 0.02 for other in kept)
        if far and total <= SECOND_BASIN * polished[0][0]:
            kept.append(law)
    return kept


def _project(runs: Sequence[CompletedRun], a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Solve for E, A, B >= 0 at each pair of exponents.

    a, b: [pairs]. Returns [pairs, 3] constants and [pairs] sums of the Huber loss of ln(fit / loss). Weights
    psi(r) / r / L^2 make least squares of the loss into the Huber loss of its logarithm (iteratively
    reweighted least squares); the seven sets of constants above zero are each solved, and the best one with
    none below zero is kept.
    """
    n, d, loss = (np.array([getattr(run, name) for run in runs]) for name in ("parameters", "tokens", "loss"))
    n0, d0 = math.exp(np.log(n).mean()), math.exp(np.log(d).mean())  # so that the columns are near 1
    columns = np.stack([np.ones((len(a), len(n))), (n / n0) ** -a[:, None], (d / d0) ** -b[:, None]], axis=-1)
    weights = np.broadcast_to(1 / loss**2, columns.shape[:2])
    for _ in range(REWEIGHTINGS):
        constants = _non_negative(columns, loss, weights)
        fitted = np.maximum((columns @ constants[:, :, None])[:, :, 0], 1e-12)
        residual = np.log(fitted / loss)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-15)) / loss**2
    constants[:, 1] *= n0**a
    constants[:, 2] *= d0**b
    return constants, _huber(residual).sum(axis=1)


def _non_negative(columns: Floats, loss: Floats, weights: Floats) -> Floats:
    """Return [pairs, 3] constants >= 0 of weighted least squares, by trying each set of positive ones."""
    gram = np.einsum("prc,pr,prk->pck", columns, weights, columns)
    right = np.einsum("prc,pr,r->pc", columns, weights, loss)
    best, least = np.zeros(right.shape), np.full(len(right), np.inf)
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        part = gram[:, chosen][:, :, chosen] + 1e-12 * np.eye(len(chosen))
        solved = np.zeros_like(best)
        solved[:, chosen] = np.linalg.solve(part, right[:, chosen, None])[:, :, 0]
        cost = np.einsum("pc,pck,pk->p", solved, gram, solved) - 2 * np.einsum("pc,pc->p", solved, right)
        better = (solved >= 0).all(axis=1) & (cost < least)
        best[better], least[better] = solved[better], cost[better]
    return best


def _polish(runs: Sequence[CompletedRun], start: LossLaw, flops: float) -> tuple[float, LossLaw]:
    """Minimise the summed Huber loss of ln(fit / loss) over all five constants from `start`, by L-BFGS.

    The sum, not the mean, whose small gradients end the search early (Besiroglu et al., arXiv 2404.10102).
    """
    from scipy.optimize import minimize

    n, d, loss = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens", "loss"))
    n0, d0 = n.mean(), d.mean()
    n, d = n - n0, d - d0
    tiny = 1e-300

    def cost(x: Floats) -> tuple[float, Floats]:
        terms = np.stack([np.full(len(n), x[0]), x[1] - x[3] * n, x[2] - x[4] * d])
        top = terms.max(axis=0)
        total = np.exp(terms - top)
        shares = total / total.sum(axis=0)
        residual = top + np.log(total.sum(axis=0)) - loss
        slope = np.clip(residual, -HUBER, HUBER)
        gradient = np.array(
            [*(shares @ slope), -(shares[1] * n) @ slope, -(shares[2] * d) @ slope], dtype=np.float64
        )
        return float(_huber(residual).sum()) / HUBER**2, gradient / HUBER**2

    x0 = np.array(
        [
            math.log(max(start.E, tiny)),
            math.log(max(start.A, tiny)) - start.a * n0,
            math.log(max(start.B, tiny)) - start.b * d0,
            start.a,
            start.b,
        ]
    )
    x0[:3] = np.maximum(x0[:3], -20.0)
    bounds = [(-20.0, None)] * 3 + [(1e-3, 5.0)] * 2
    found: Any = minimize(
        cost, x0, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500, "ftol": 1e-12}
    )
    e, log_a, log_b, a, b = (float(v) for v in found.x)
    law = LossLaw(math.exp(e), math.exp(log_a + a * n0), math.exp(log_b + b * d0), a, b, flops)
    return float(found.fun), law


def _huber(residual: Floats) -> Floats:
    size = np.abs(residual)
    return np.where(size <= HUBER, residual**2 / 2, HUBER * (size - HUBER / 2))


# --- the older method, as a check


def parabola_minima(runs: Sequence[CompletedRun]) -> dict[float, tuple[float, bool]]:
    """Return for each budget the parameters at the minimum of a parabola of the loss over ln N, and whether
    they lie within its runs; budgets with fewer than three runs or no minimum are left out."""
    minima = {}
    for budget in sorted({run.budget_flops for run in runs}):
        group = [run for run in runs if run.budget_flops == budget]
        sizes = np.log([run.parameters for run in group])
        if len(set(sizes)) < 3:
            continue
        square, slope, _ = np.polyfit(sizes - sizes.mean(), [run.loss for run in group], 2)
        if square > 0:
            best = float(sizes.mean() - slope / (2 * square))
            minima[budget] = math.exp(best), bool(sizes.min() <= best <= sizes.max())
    return minima


def parabola_exponent(minima: dict[float, tuple[float, bool]]) -> float:
    """Return the power of the budget by which the minima grow, by least squares of the logarithms."""
    sizes = [math.log(parameters) for parameters, _ in minima.values()]
    return float(np.polyfit(np.log(list(minima)), sizes, 1)[0])
