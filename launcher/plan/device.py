"""What one device can do and hold: its share of peak in a prediction, and whether the model's state fits."""

from __future__ import annotations

import dataclasses

from bert_dp.cost import GIB
from launcher.plan.predict import Prediction, Profile, Scenario

MOMENTS = 2  # of Adam, per parameter


@dataclasses.dataclass(frozen=True)
class Device:
    """None where it is not known."""

    name: str
    precision: str | None
    peak_flops: float | None
    """FLOP/s at `precision`."""
    flops_per_token: float | None
    """Of the model."""
    memory_gib: float | None = None

    def mfu(self, predicted: Prediction) -> float | None:
        """Model FLOPs per second over the peak of all devices."""
        if not self.peak_flops or not self.flops_per_token:
            return None
        return predicted.tokens_per_s * self.flops_per_token / (predicted.ranks * self.peak_flops)

    def holds(self, state: float) -> bool | None:
        """Whether `state` GiB fit at all."""
        return None if self.memory_gib is None else state < self.memory_gib


def state_gib(profile: Profile, scenario: Scenario) -> float:
    """Weights, gradients and optimizer state of one rank, GiB, as the engine divides them; a lower bound,
    without activations. fsdp keeps whole gradients between the micro batches of a step."""
    weights = profile.weight_size / scenario.tensor
    optimizer, gradients, n = MOMENTS * weights, weights, scenario.replicas
    if scenario.engine in ("zero1", "fsdp"):
        optimizer /= n
    if scenario.engine == "fsdp":
        weights /= n
        gradients = gradients if scenario.accumulation > 1 else gradients / n
    return (weights + gradients + optimizer) / GIB
