"""A law of the loss over model size and tokens, L(N, D) = E + A N^-a + B D^-b, and what follows from it.

N: parameters, D: training tokens, L: held-out loss in nats (Hoffmann et al. 2022, arXiv 2203.15556, equation
2). `loss_fit.py` fits it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

from bert_dp.cost import student

MIN_RUNS, MIN_BUDGETS = 6, 3


@dataclasses.dataclass(frozen=True)
class CompletedRun:
    """A run whose schedule ended: its compute in FLOPs, parameters, tokens, and held-out loss in nats."""

    budget_flops: float
    parameters: float
    loss: float
    tokens: float


@dataclasses.dataclass(frozen=True)
class LossLaw:
    """Constants of L(N, D) = E + A N^-a + B D^-b, and the FLOPs per parameter and token."""

    E: float
    A: float
    B: float
    a: float
    b: float
    flops: float = 6.0

    @property
    def exponent(self) -> float:
        """Power of the budget by which the best number of parameters grows, b / (a + b)."""
        return self.b / (self.a + self.b)

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats."""
        return float(self.E + self.A * parameters**-self.a + self.B * tokens**-self.b)

    def best_parameters(self, budget_flops: float) -> float:
        """Return the number of parameters with the least loss for a budget in FLOPs."""
        ratio = math.pow(self.a * self.A / (self.b * self.B), 1 / (self.a + self.b))
        return ratio * math.pow(budget_flops / self.flops, self.exponent)

    def best_loss(self, budget_flops: float) -> float:
        """Return the loss at the best number of parameters."""
        parameters = self.best_parameters(budget_flops)
        return self.loss(parameters, budget_flops / self.flops / parameters)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Law fitted to runs, its resampled copies, and other minima that fit nearly as well."""

    runs: tuple[CompletedRun, ...]
    law: LossLaw
    draws: tuple[LossLaw, ...]
    """Fits of runs resampled within their budgets (and of whole budgets, from MANY_BUDGETS on)."""
    left_out: tuple[LossLaw, ...]
    """Fits without one budget each."""
    others: tuple[LossLaw, ...] = ()

    @property
    def budgets(self) -> list[float]:
        """Budgets of the runs in FLOPs, ascending."""
        return sorted({run.budget_flops for run in self.runs})

    def estimate(self, value: Callable[[LossLaw], float]) -> tuple[float, tuple[float, float]]:
        """Return `value` of the law and its 95 % interval.

        Its variance is that of the resampled fits plus the jackknife's over budgets; Student's t with
        budgets - 2 degrees of freedom widens it. `value` must be close to normal: take logarithms of sizes.
        """
        middle = value(self.law)
        spread = statistics.stdev([value(law) for law in self.draws])
        each = [value(law) for law in self.left_out]
        jackknife = (len(each) - 1) * statistics.pstdev(each) / math.sqrt(len(each) - 1)
        half = student(max(1, len(self.budgets) - 2)) * math.hypot(spread, jackknife)
        return middle, (middle - half, middle + half)
