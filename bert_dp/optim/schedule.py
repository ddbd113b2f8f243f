"""Compute the learning rate as a pure function of progress f."""

import math

from bert_dp.config import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, progress: float) -> float:
    """Return the learning rate, divided by its peak, at progress f in [0, 1].

    budget_triangle: min(0.25 + f, 4 (1 - f)), as in JonasGeiping/cramming (budget-triangle2). The schedules
    linear, cosine and wsd start with a linear warmup over warmup_fraction; wsd ends with a 1 - sqrt decay
    over decay_fraction (arXiv 2405.18392). exponential: 1e-4^(1 - f), for a learning-rate range test. The
    test in arXiv 1506.01186, section 3.3, raises the rate linearly instead.
    """
    f = min(max(progress, 0.0), 1.0)
    if schedule.name == "budget_triangle":
        return min(0.25 + f, 4.0 * (1.0 - f))
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "exponential":
        return float(1e-4 ** (1.0 - f))
    warmup = schedule.warmup_fraction
    if f < warmup:
        return f / warmup
    if schedule.name == "wsd":
        left = (1.0 - f) / schedule.decay_fraction
        return 1.0 if left >= 1.0 else 1.0 - math.sqrt(1.0 - left)
    done = (f - warmup) / (1.0 - warmup)
    return 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
