"""Confidence intervals: Student's t, and a bootstrap over repeats and blocks of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_dp.cost import student

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DRAWS = 2000
BLOCK = 5  # steps that stay together: neighbours share a slow moment
LEVEL = 0.95
WIDEST = 2.0  # high / low of an interval above which a ratio is not measurable
NORMAL = 1.960  # two-sided quantile at LEVEL


def resampled_means(repeats: Sequence[Sequence[float]], seed: int = 0) -> Floats | None:
    """Draw mean step seconds of a cell by a two-level bootstrap (Davison & Hinkley 1997, 3.8).

    `repeats`: seconds of each timed step of each repeat. A draw takes as many repeats with replacement,
    blocks of BLOCK steps within each, and the median over the repeats of their means. Few repeats understate
    the spread: the logarithms are widened about their median by Student's t over the normal quantile, and by
    sqrt(R / (R - 1)). Returns [DRAWS], or None for a single repeat.
    """
    import numpy as np

    if len(repeats) < 2:
        return None
    draw = np.random.default_rng(seed)
    means = np.stack([_block_means(np.asarray(steps, dtype=np.float64), draw) for steps in repeats])
    chosen = draw.integers(len(repeats), size=(DRAWS, len(repeats)))
    logs = np.log(np.median(means[chosen, draw.integers(DRAWS, size=chosen.shape)], axis=1))
    middle = np.log(np.median([np.mean(steps) for steps in repeats]))
    count = len(repeats)
    widening = student(count - 1) / NORMAL * math.sqrt(count / (count - 1))
    widened: Floats = np.exp(middle + (logs - middle) * widening)
    return widened


def half_width(values: Sequence[float]) -> float:
    """Compute half the width of the mean's interval by Student's t, from two values or more."""
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """Return the interval of the mean by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), half_width(values)
    return [mean - half, mean + half]


def geometric_mean(ratios: Sequence[float]) -> tuple[float, list[float] | None]:
    """Return the geometric mean and its interval, by Student's t over the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    interval = mean_interval(logs)
    return math.exp(statistics.fmean(logs)), interval and [math.exp(end) for end in interval]


def is_measurable(interval: Sequence[float] | None) -> bool:
    """Return False for a ratio whose interval is wider than a factor of WIDEST."""
    return interval is None or 0 < interval[1] <= WIDEST * interval[0]


def _block_means(steps: Floats, draw: np.random.Generator) -> Floats:
    """Draw [DRAWS] means of `steps` resampled in blocks, circular so that every step counts as much."""
    import numpy as np

    count = -(-len(steps) // BLOCK)
    starts = draw.integers(len(steps), size=(DRAWS, count))
    places = (starts[:, :, None] + np.arange(min(BLOCK, len(steps)))) % len(steps)
    means: Floats = steps[places].mean(axis=(1, 2))
    return means


def interval(draws: Floats | None) -> list[float] | None:
    """Return [low, high], the central LEVEL of the draws."""
    if draws is None:
        return None
    import numpy as np

    tail = 100 * (1 - LEVEL) / 2
    return [float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))]


def ratio_interval(over: Floats | None, under: Floats | None, scale: float = 1.0) -> list[float] | None:
    """Compute the interval of scale x over / under for two cells that were drawn independently."""
    return None if over is None or under is None else interval(scale * over / under)
