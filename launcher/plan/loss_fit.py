"""Fit the loss law L(N, D) = E + A N^-a + B D^-b to completed runs.

For given a and b, the law is linear in E, A and B, so nonnegative least squares fits them and a grid over
a and b suffices (variable projection, Golub & Pereyra 1973). L-BFGS then refines all five constants.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import require
from launcher.plan.frontier import MIN_BUDGETS, MIN_RUNS, CompletedRun, Frontier, LossLaw
from launcher.report.formats import count_of

Floats = NDArray[np.float64]

HUBER = 1e-3  # |ln(fit / loss)| above which the Huber loss is linear (Hoffmann et al., D.2)
EXPONENTS = np.geomspace(0.03, 2.0, 36)
REWEIGHTINGS = 8
BASINS = 3  # L-BFGS refines this many of the local minima on the grid of exponents
SECOND_BASIN = 1.10  # minima up to this multiple of the lowest summed Huber loss are reported
DRAWS = 100  # number of fits to resampled runs
MANY_BUDGETS = 6  # if there are at least this many budgets, they are resampled too


def fit(runs: Sequence[CompletedRun], seed: int = 0, draws: int = DRAWS) -> Frontier:
    """Fit the law to all runs, to `draws` resampled sets of runs and, for each budget, to the runs of the
    other budgets. Raises ConfigError for too few runs or budgets."""
    budgets = [run.budget_flops for run in runs]
    groups = [np.flatnonzero(np.equal(budgets, budget)) for budget in sorted(set(budgets))]
    if len(runs) < MIN_RUNS or len(groups) < MIN_BUDGETS:
        counts = f"{count_of(len(runs), 'run')} at {count_of(len(groups), 'budget')}"
        message = f"{counts}; a fit needs at least {MIN_RUNS} runs at {MIN_BUDGETS} budgets"
        raise ConfigError([Issue("RUNS", "missing", message, len(runs))])
    flops = float(np.median([run.budget_flops / (run.parameters * run.tokens) for run in runs]))
    logs = np.log([[run.parameters, run.tokens, run.loss] for run in runs]).T
    best, *others = _minima(logs, flops)
    random = np.random.default_rng(seed)
    resampled = [_polish(logs[:, _resample(groups, random)], best, flops)[1] for _ in range(draws)]
    left_out = [_minima(np.delete(logs, group, axis=1), flops)[0] for group in groups]
    return Frontier(runs=list(runs), law=best, draws=resampled, left_out=left_out, others=others)


def _resample(groups: Sequence[NDArray[np.intp]], random: np.random.Generator) -> NDArray[np.intp]:
    """Return resampled run indices. Given MANY_BUDGETS or more budgets, resample the budgets first. Then
    resample the runs of each budget. `groups`: run indices by budget."""
    if len(groups) >= MANY_BUDGETS:
        groups = [groups[i] for i in random.integers(len(groups), size=len(groups))]
    return np.concatenate([group[random.integers(len(group), size=len(group))] for group in groups])


def _minima(logs: Floats, flops: float) -> list[LossLaw]:
    """Return the laws with the lowest summed Huber loss, best first. `logs`: ln of N, D, loss [3, runs]."""
    ndimage = require("scipy.ndimage", "glue", "RUNS: fitting")
    a, b = (axis.ravel() for axis in np.meshgrid(EXPONENTS, EXPONENTS, indexing="ij"))
    constants, sums = _project(logs, a, b)
    grid = sums.reshape(len(EXPONENTS), -1)
    lowest = np.flatnonzero(grid == ndimage.minimum_filter(grid, 3, mode="nearest"))
    starts = sorted(lowest, key=lambda i: float(sums[i]))[:BASINS]
    polished = [_polish(logs, LossLaw(*map(float, (*constants[i], a[i], b[i]))), flops) for i in starts]
    polished.sort(key=lambda each: each[0])
    kept: list[LossLaw] = []
    for total, law in polished:
        far = all(abs(law.exponent - other.exponent) > 0.02 for other in kept)
        if far and total <= SECOND_BASIN * polished[0][0]:
            kept.append(law)
    return kept


def _project(logs: Floats, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return E, A, B >= 0 [pairs, 3] and the summed Huber losses [pairs] for the exponents a, b [pairs]."""
    means = logs[:2].mean(axis=1)
    n, d = logs[:2] - means[:, None]  # centre the logarithms, so that the values in `columns` are near 1
    loss = np.exp(logs[2])
    columns = np.stack([np.ones((len(a), len(n))), np.exp(-a[:, None] * n), np.exp(-b[:, None] * d)], axis=-1)
    # iterated least squares with weights psi(r) / r / loss^2 minimises the Huber loss of r = ln(fit / loss)
    weights = np.broadcast_to(1 / loss**2, columns.shape[:2])
    for _ in range(REWEIGHTINGS):
        constants = _non_negative(columns, loss, weights)
        fitted = np.maximum((columns @ constants[:, :, None])[:, :, 0], 1e-12)
        residual = np.log(fitted / loss)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-15)) / loss**2
    constants[:, 1:] *= np.exp(np.stack([a, b], axis=1) * means)
    return constants, _huber(residual).sum(axis=1)


def _non_negative(columns: Floats, loss: Floats, weights: Floats) -> Floats:
    """Solve weighted least squares for constants >= 0 [pairs, 3]. Try each subset of nonzero constants."""
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


def _polish(logs: Floats, start: LossLaw, flops: float) -> tuple[float, LossLaw]:
    """Find the five constants that minimise (summed Huber loss) / HUBER^2. Return the minimum and the law."""
    optimize = require("scipy.optimize", "glue", "RUNS: fitting")
    means = logs[:2].mean(axis=1)
    sizes, loss = logs[:2] - means[:, None], logs[2]

    def cost(x: Floats) -> tuple[float, Floats]:
        terms = np.vstack([np.full(len(loss), x[0]), x[1:3, None] - x[3:, None] * sizes])
        fitted = np.logaddexp.reduce(terms)
        shares = np.exp(terms - fitted)
        slope = np.clip(fitted - loss, -HUBER, HUBER)
        gradient = np.concatenate([shares @ slope, -(shares[1:] * sizes) @ slope])
        # the sum, not the mean, whose gradients are so small that the search stops early (arXiv 2404.10102)
        return float(_huber(fitted - loss).sum()) / HUBER**2, gradient / HUBER**2

    exponents = np.array([start.a, start.b])
    constants = np.log(np.maximum([start.E, start.A, start.B], 1e-300))
    constants[1:] -= exponents * means
    x0 = np.concatenate([np.maximum(constants, -20.0), exponents])
    bounds, options = [(-20.0, None)] * 3 + [(1e-3, 5.0)] * 2, {"maxiter": 500, "ftol": 1e-12}
    found = optimize.minimize(cost, x0, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    x = found.x
    x[1:3] += x[3:] * means
    E, A, B = map(float, np.exp(x[:3]))
    return float(found.fun), LossLaw(E, A, B, float(x[3]), float(x[4]), flops)


def _huber(residual: Floats) -> Floats:
    size = np.abs(residual)
    return np.where(size <= HUBER, residual**2 / 2, HUBER * (size - HUBER / 2))


# --- fit by parabolas, as a cross-check


def parabola_minima(runs: Sequence[CompletedRun]) -> dict[float, tuple[float, bool]]:
    """Fit a parabola in ln N to the losses of each budget's runs.

    Returns {budget: (N at the minimum, True if the sizes of the runs enclose this N)}. Omits budgets with
    fewer than three sizes or without a minimum.
    """
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


def parabola_exponent(minima: Mapping[float, float]) -> float:
    """Fit the exponent x of N_opt ~ C^x by least squares in log-log space."""
    return float(np.polyfit(np.log(list(minima)), np.log(list(minima.values())), 1)[0])
