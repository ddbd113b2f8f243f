"""Compute quantiles of Student's t, for every interval of the program. Torch-free."""

from __future__ import annotations

import functools
import math

PANELS = 200  # of Simpson's rule: its error is below 1e-9
ITERATIONS = 40  # of Newton's method; about ten suffice


@functools.cache
def student(degrees: int, level: float = 0.95) -> float:
    """Return the two-sided quantile t of Student's distribution, P(|T| <= t) = level.

    With theta = atan(t / sqrt(degrees)) the density is proportional to cos(theta)^(degrees - 1). Its integral
    is concave in theta, so Newton's method from 0 rises to the solution.
    """

    def density(angle: float) -> float:
        return math.cos(angle) ** (degrees - 1)

    log_ratio = math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2)
    wanted = level * math.sqrt(math.pi) / 2 * math.exp(log_ratio)  # of the integral from 0 to pi / 2
    theta = 0.0
    for _ in range(ITERATIONS):
        h = theta / PANELS
        inner = sum((4 if k % 2 else 2) * density(k * h) for k in range(1, PANELS))
        step = (wanted - h / 3 * (1 + inner + density(theta))) / density(theta)
        theta += step
        if abs(step) <= 1e-13 * theta:
            break
    return math.sqrt(degrees) * math.tan(theta)
