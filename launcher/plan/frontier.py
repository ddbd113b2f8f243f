"""Define the loss law L(N, D) = E + A N^-a + B D^-b and the file that stores it, frontier.json.

N: parameters, D: training tokens, L: held-out loss in nats. The law is equation 2 of Hoffmann et al. 2022
(arXiv 2203.15556). `loss_fit.py` fits it.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

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
    """Figures of a run that completed its schedule; `loss` is the held-out loss in nats."""

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
        """Return the exponent x = b / (a + b). The best number of parameters grows as budget^x."""
        return self.b / (self.a + self.b)

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted held-out loss in nats."""
        return float(self.E + self.A * parameters**-self.a + self.B * tokens**-self.b)

    def best_parameters(self, budget_flops: float) -> float:
        """Return the number of parameters that minimises the loss for a budget in FLOPs."""
        ratio = math.pow(self.a * self.A / (self.b * self.B), 1 / (self.a + self.b))
        return ratio * math.pow(budget_flops / self.flops, self.exponent)

    def best_budget(self, parameters: float) -> float:
        """Return the budget in FLOPs at which this number of parameters is optimal."""
        return math.pow(parameters / self.best_parameters(1.0), 1 / self.exponent)

    def best_loss(self, budget_flops: float) -> float:
        """Return the lowest loss, in nats, that a budget in FLOPs can reach."""
        parameters = self.best_parameters(budget_flops)
        return self.loss(parameters, budget_flops / self.flops / parameters)


class Frontier(StoredFile):
    """Contents of frontier.json: runs, the law fitted to them, fits to resampled runs, common settings."""

    model_config = ConfigDict(strict=False)  # in strict mode, pydantic accepts no dict for a dataclass
    hint: ClassVar[str] = "rewrite it with `bert-dp plan fit`"
    schema_version: Literal[1] = 1
    law: LossLaw
    runs: list[CompletedRun] = Field(min_length=MIN_RUNS)
    draws: list[LossLaw] = Field(min_length=2)
    """Laws fitted to runs resampled within budgets. Budgets are resampled too if there are six or more."""
    left_out: list[LossLaw] = Field(min_length=2)  # for each budget, the law fitted without its runs
    others: list[LossLaw] = []  # laws at other local minima, which fit nearly as well
    exponent: float | None = None
    exponent_ci95: Interval | None = None
    exponent_without_embedding: float | None = None
    parabola_exponent: float | None = None
    contradiction: float | None = None
    """Median factor between the best sizes from the law and from parabolas, over budgets not in `outside`."""
    outside: list[float] = []  # budgets for which the sizes of the runs do not enclose a minimum
    mask_rate: float | None = None
    sequence_length: int | None = None
    data_hash: str | None = None
    device: str | None = None
    world_size: int | None = None

    @property
    def budgets(self) -> list[float]:
        """Return the budgets of the runs in FLOPs, ascending."""
        return sorted({run.budget_flops for run in self.runs})

    @property
    def contradicts(self) -> bool:
        """Return True if the law contradicts its own runs: `contradiction` exceeds MAX_CONTRADICTION."""
        return self.contradiction is not None and self.contradiction > MAX_CONTRADICTION

    @property
    def student(self) -> float:
        """Return Student's t quantile for the 95 % intervals; degrees of freedom: number of budgets - 2."""
        return student(max(1, len(self.budgets) - 2))

    def rates(self) -> dict[float, float]:
        """Return the measured tokens/s by number of parameters, averaged over runs of the same size."""
        found: dict[float, list[float]] = {}
        for run in self.runs:
            if run.tokens_per_s:
                found.setdefault(run.parameters, []).append(run.tokens_per_s)
        return {size: statistics.fmean(values) for size, values in found.items()}

    def estimate(self, value: Callable[[LossLaw], float]) -> tuple[float, tuple[float, float]]:
        """Apply `value` to the law; return the result and its 95 % interval.

        The variance is the sum of the variance over `draws` and the jackknife variance over budgets.
        The interval assumes a normal distribution, so `value` should return ln(size) rather than a size.
        """
        middle = value(self.law)
        spread = statistics.stdev([value(law) for law in self.draws])
        each = [value(law) for law in self.left_out]
        jackknife = (len(each) - 1) * statistics.pstdev(each) / math.sqrt(len(each) - 1)
        half = self.student * math.hypot(spread, jackknife)
        return middle, (middle - half, middle + half)
