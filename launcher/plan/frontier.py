"""Power law of the loss in parameters and tokens, L(N, D) = E + A N^-a + B D^-b, and its file frontier.json.

N: parameters, D: training tokens, L: held-out loss in nats (Hoffmann et al. 2022, arXiv 2203.15556, equation
2). `loss_fit.py` fits it.
"""

# ruff: noqa: RUF012 (pydantic copies a default)

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from bert_dp.cost import student
from bert_dp.files.models import StoredFile
from launcher.results import Interval

MIN_RUNS, MIN_BUDGETS = 6, 3
MAX_CONTRADICTION = 2.0


@dataclasses.dataclass(frozen=True)
class CompletedRun:
    """A run that completed its schedule: compute in FLOPs, parameters, held-out loss in nats, tokens."""

    budget_flops: float
    parameters: float
    loss: float
    tokens: float
    name: str = ""
    parameters_without_embedding: float | None = None
    tokens_per_s: float | None = None


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
        """Exponent of the best number of parameters as a power of the budget, b / (a + b)."""
        return self.b / (self.a + self.b)

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats."""
        return float(self.E + self.A * parameters**-self.a + self.B * tokens**-self.b)

    def best_parameters(self, budget_flops: float) -> float:
        """Return the number of parameters with the lowest loss for a budget in FLOPs."""
        ratio = math.pow(self.a * self.A / (self.b * self.B), 1 / (self.a + self.b))
        return ratio * math.pow(budget_flops / self.flops, self.exponent)

    def best_budget(self, parameters: float) -> float:
        """Return the budget in FLOPs at which this number of parameters is optimal."""
        return math.pow(parameters / self.best_parameters(1.0), 1 / self.exponent)

    def best_loss(self, budget_flops: float) -> float:
        """Return the loss at the best number of parameters."""
        parameters = self.best_parameters(budget_flops)
        return self.loss(parameters, budget_flops / self.flops / parameters)


class Frontier(StoredFile):
    """frontier.json: completed runs, the law fitted to them, resampled fits, and common settings."""

    model_config = ConfigDict(strict=False)  # a strict model accepts no dataclass from JSON
    hint: ClassVar[str] = "rewrite it with `bert-dp plan fit`"
    schema_version: Literal[1] = 1
    law: LossLaw
    runs: list[CompletedRun] = Field(min_length=MIN_RUNS)
    draws: list[LossLaw] = Field(min_length=2)
    """Fits of runs resampled within each budget; with six budgets or more, budgets are resampled too."""
    left_out: list[LossLaw] = Field(min_length=2)  # one fit per omitted budget
    others: list[LossLaw] = []  # other minima that fit nearly as well
    exponent: float | None = None
    exponent_ci95: Interval | None = None
    exponent_without_embedding: float | None = None
    parabola_exponent: float | None = None
    contradiction: float | None = None
    """Median factor between the law's best size and the parabola's, over the budgets with both."""
    outside: list[float] = []  # budgets whose best size is not within the sizes that were run
    mask_rate: float | None = None
    sequence_length: int | None = None
    data_hash: str | None = None
    device: str | None = None
    world_size: int | None = None

    @property
    def budgets(self) -> list[float]:
        """Budgets of the runs in FLOPs, ascending."""
        return sorted({run.budget_flops for run in self.runs})

    @property
    def contradicts(self) -> bool:
        """True if the law's best sizes differ from the runs' by a median factor above MAX_CONTRADICTION."""
        return self.contradiction is not None and self.contradiction > MAX_CONTRADICTION

    @property
    def student(self) -> float:
        """Quantile of Student's t with budgets - 2 degrees of freedom, used for the intervals."""
        return student(max(1, len(self.budgets) - 2))

    def rates(self) -> dict[float, float]:
        """Return measured tokens/s by number of parameters, averaged over runs of the same size."""
        found: dict[float, list[float]] = {}
        for run in self.runs:
            if run.tokens_per_s:
                found.setdefault(run.parameters, []).append(run.tokens_per_s)
        return {size: statistics.fmean(values) for size, values in found.items()}

    def estimate(self, value: Callable[[LossLaw], float]) -> tuple[float, tuple[float, float]]:
        """Return `value` of the law and its 95 % interval.

        Adds the variance of the resampled fits and the jackknife variance over budgets; uses Student's t with
        budgets - 2 degrees of freedom. `value` must be close to normal: use logarithms of sizes.
        """
        middle = value(self.law)
        spread = statistics.stdev([value(law) for law in self.draws])
        each = [value(law) for law in self.left_out]
        jackknife = (len(each) - 1) * statistics.pstdev(each) / math.sqrt(len(each) - 1)
        half = self.student * math.hypot(spread, jackknife)
        return middle, (middle - half, middle + half)
