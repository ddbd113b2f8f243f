"""Detect loss spikes, skipped steps and divergence when a line is logged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bert_dp.config import Config

WINDOW = 128  # logged losses that a spike is seen against, and its height: OLMo-core's SkipStepOptimizer
SIGMAS = 6.0
ENOUGH = 16  # logged losses before there is a spread to speak of
FP16_ROOM = 16  # the scaler starts at 2^16 and halves at each skip: so many may pass before it is at 1


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Return True if a logged loss is above mean + SIGMAS standard deviations of the ones before it."""
    if len(recent) < ENOUGH or not math.isfinite(loss):  # the latter is skipped and counted elsewhere
        return False
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in recent) / len(recent))
    return loss > mean + SIGMAS * deviation


def has_diverged(heldout_loss: float, step: int) -> str | None:
    """Return the reason to stop when the held-out loss is no number."""
    if math.isfinite(heldout_loss):
        return None
    return (
        f"the held-out loss after step {step} is {heldout_loss}: the model has diverged; lower optim.lr, or "
        "go on from an earlier checkpoint"
    )


def too_many_skipped(config: Config, precision: str, in_a_row: int, step: int, lr: float) -> str | None:
    """Return the reason to stop when too many steps in a row had a gradient that is not finite, up to `step`,
    whose rate was `lr`. Asked when a line is logged, so that no step waits for the device."""
    run = config.run
    if in_a_row < run.max_skipped_in_a_row + (FP16_ROOM if precision == "fp16" else 0):
        return None
    steps = "1 step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    return (
        f"{steps} up to step {step} had a gradient that is not finite and were skipped, "
        f"at learning rate {lr:.3g}; run.max_skipped_in_a_row is {run.max_skipped_in_a_row}, looked at "
        f"every {config.log.every_steps} steps; {_advice(config, precision)}"
    )


def nothing_learned(config: Config, precision: str, skipped: int, step: int) -> str | None:
    """Return the reason that a run has failed whose every step was skipped."""
    if not step or skipped < step:
        return None
    return (
        f"all {step} steps had a gradient that is not finite and were skipped: the weights are those that "
        f"the run began with; {_advice(config, precision)}"
    )


def _advice(config: Config, precision: str) -> str:
    other = ", or try precision: fp32" if precision in ("fp16", "bf16") else ""
    return f"lower optim.lr (now {config.optim.lr}) in a new run directory{other}"
