"""Compute confidence intervals with Student's t, or with a bootstrap over repeats and blocks of steps."""

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

DRAWS = 2000  # number of bootstrap draws
BLOCK = 5  # steps per block; single steps are not resampled, because neighbouring step times are correlated
LEVEL = 0.95  # confidence level
WIDEST = 2.0  # a ratio is measurable if its interval spans at most this factor
NORMAL = 1.960  # two-sided normal quantile at LEVEL


def resampled_means(repeats: Sequence[Sequence[float]], seed: int = 0) -> Floats | None:
    """Resample the mean step time of repeated runs by a two-level bootstrap (Davison & Hinkley 1997, 3.8).

    `repeats`: R lists of step times in seconds. A draw resamples R repeats with replacement, and
    blocks of BLOCK steps within each repeat; its value is the median of the R means. With few repeats, the
    draws spread too little, so each draw's log distance from the measured median is multiplied by
    (Student's t / normal quantile) * sqrt(R / (R - 1)). Return the draws [DRAWS] in seconds; None if R is 1.
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
    """Return half the width of the mean's confidence interval (Student's t) for two or more values."""
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """Return the confidence interval of the mean (Student's t), or None for a single value."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), half_width(values)
    return [mean - half, mean + half]


def geometric_mean(ratios: Sequence[float]) -> tuple[float, list[float] | None]:
    """Return the geometric mean and its confidence interval (Student's t on the logarithms)."""
    logs = [math.log(ratio) for ratio in ratios]
    interval = mean_interval(logs)
    return math.exp(statistics.fmean(logs)), interval and [math.exp(end) for end in interval]


def is_measurable(interval: Sequence[float] | None) -> bool:
    """Return True if the interval of a ratio is unknown (None) or spans at most a factor of WIDEST."""
    return interval is None or 0 < interval[1] <= WIDEST * interval[0]


def _block_means(steps: Floats, draw: np.random.Generator) -> Floats:
    """Resample `steps` in circular blocks, which give all steps equal weight. Return the means [DRAWS]."""
    import numpy as np

    count = -(-len(steps) // BLOCK)
    starts = draw.integers(len(steps), size=(DRAWS, count))
    indices = (starts[:, :, None] + np.arange(min(BLOCK, len(steps)))) % len(steps)
    means: Floats = steps[indices].mean(axis=(1, 2))
    return means


def interval(draws: Floats | None) -> list[float] | None:
    """Return the central interval [low, high] holding a share LEVEL of the draws; None if `draws` is None."""
    if draws is None:
        return None
    import numpy as np

    tail = 100 * (1 - LEVEL) / 2
    return [float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))]


def ratio_interval(over: Floats | None, under: Floats | None, scale: float = 1.0) -> list[float] | None:
    """Return the interval of scale * over / under for independent sets of draws; None if either is None."""
    return None if over is None or under is None else interval(scale * over / under)
