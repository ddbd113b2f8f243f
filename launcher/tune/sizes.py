"""Which micro batches can be tried: those that divide the global batch, and few enough of them. Pure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.config.schema import divisors
from launcher.tune.search import with_settings

MOST, FEWEST = 8, 3  # sizes of a throughput curve


def with_micro(config: Config, micro: int) -> Config:
    """The same configuration with another micro batch; the global batch stays."""
    return with_settings(config, batch={"micro_size": micro})


def dividing(config: Config, ranks: int) -> list[int]:
    """Every micro batch that the declared global batch allows on `ranks` ranks, ascending.

    Raises ConfigError when there is none: not even 1 divides, or the engine refuses.
    """
    allowed = []
    for micro in divisors(config.batch.global_size):
        with contextlib.suppress(ConfigError):
            batch_layout(with_micro(config, micro), ranks)
            allowed.append(micro)
    if not allowed:
        batch_layout(with_micro(config, 1), ranks)
    return allowed


def thin(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of `sizes` (ascending), about evenly spaced by ratio, the largest among them."""
    if len(sizes) <= count:
        return list(sizes)
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    even = [low + (high - low) * i / (count - 1) for i in range(count)]
    nearest = {min(sizes, key=lambda size: abs(math.log(size) - place)) for place in even}
    return sorted(nearest)


def samples_per_step(sizes: Sequence[int], dp: int) -> int:
    """Sequences of one step of every trial: the fewest that all sizes divide, so that an update is spread
    over as many whatever the size."""
    return math.lcm(*sizes) * dp
