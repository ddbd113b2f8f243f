"""Medians, and intervals by bootstrap over repeats and stretches of steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DRAWS = 2000
BLOCK = 5  # steps that stay together: neighbours share a slow moment
LEVEL = 0.95


def resampled_means(repeats: Sequence[Sequence[float]], seed: int = 0) -> Floats:
    """[DRAWS]: mean step seconds of a cell under a two-level bootstrap (Davison & Hinkley 1997, 3.8).

    `repeats`: seconds of each timed step of each repeat. A draw takes as many repeats with replacement,
    blocks of BLOCK steps within each, and the median over the repeats of their means.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    means = np.stack([_block_means(np.asarray(steps, dtype=np.float64), draw) for steps in repeats])
    chosen = draw.integers(len(repeats), size=(DRAWS, len(repeats)))
    picked = means[chosen, draw.integers(DRAWS, size=chosen.shape)]
    return np.median(picked, axis=1)


def _block_means(steps: Floats, draw: np.random.Generator) -> Floats:
    """[DRAWS]: means of `steps` resampled in blocks, circular so that every step counts as much."""
    import numpy as np

    count = -(-len(steps) // BLOCK)
    starts = draw.integers(len(steps), size=(DRAWS, count))
    places = (starts[:, :, None] + np.arange(min(BLOCK, len(steps)))) % len(steps)
    means: Floats = steps[places].mean(axis=(1, 2))
    return means


def interval(draws: Floats) -> list[float]:
    """[low, high]: the central LEVEL of the draws."""
    import numpy as np

    tail = 100 * (1 - LEVEL) / 2
    return [float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))]


def ratio_interval(over: Floats, under: Floats, scale: float = 1.0) -> list[float]:
    """Interval of scale x over / under of two cells that were drawn independently."""
    return interval(scale * over / under)


def median(values: Sequence[float]) -> float:
    """Of anything countable; the mean of the two in the middle."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the values around it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def five_numbers(values: Sequence[float]) -> dict[str, float]:
    """min, q1, median, q3, max."""
    shares = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}
    return {name: percentile(values, share) for name, share in shares.items()}


def over(values: Sequence[float | None], how: Callable[[Sequence[float]], float] = median) -> float | None:
    """`how` of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return how(known) if known else None
