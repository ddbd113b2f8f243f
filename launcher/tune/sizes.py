"""Which micro batches can be tried: those that divide, that fit the memory, that fit the time. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.cost import GIB

SPARE = 0.1  # of a rank's memory that the choice leaves free
MOST, FEWEST = 8, 3  # sizes of a throughput curve


@dataclasses.dataclass(frozen=True)
class MemoryLine:
    """A rank's peak in bytes is intercept + slope x micro batch + constant.

    The line counts tensors (`bert_dp.measure.memory_line`); the constant, measured in one real step, is the
    rest: the program, its libraries and, on a GPU, the context and what the allocator keeps.
    """

    intercept: float
    slope: float
    constant: float = 0.0

    def gib(self, micro: float) -> float:
        """Predicted peak of a rank."""
        return (self.constant + self.intercept + self.slope * micro) / GIB

    def largest(self, limit_gib: float) -> int:
        """The largest micro batch that leaves SPARE of the limit free; 0 = none."""
        room = (1 - SPARE) * limit_gib * GIB - self.constant - self.intercept
        return max(0, int(room / self.slope))

    def through(self, micro: int, measured_gib: float) -> MemoryLine:
        """The same line with the constant that makes it true at one measured peak."""
        counted = self.intercept + self.slope * micro
        return dataclasses.replace(self, constant=measured_gib * GIB - counted)


def with_micro(config: Config, micro: int) -> Config:
    """The same configuration with another micro batch; the global batch stays."""
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": micro})})


def dividing(config: Config, ranks: int, option: str = "--nproc") -> list[int]:
    """Every micro batch that the declared global batch allows on `ranks` ranks, ascending.

    Raises ConfigError when there is none: not even 1 divides, or the engine refuses. `option` sets the ranks.
    """
    whole = config.batch.global_size
    share = max(1, whole // max(1, ranks // config.parallel.tensor))
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    dividing_sizes = []
    for micro in sorted({*small, *(whole // n for n in small)}):
        if micro > share:
            break
        try:
            batch_layout(with_micro(config, micro), ranks)
        except ConfigError:
            continue
        dividing_sizes.append(micro)
    if not dividing_sizes:
        batch_layout(with_micro(config, 1), ranks, option)
    return dividing_sizes


def thin(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of `sizes` (ascending), about evenly spaced by ratio, the largest among them."""
    if len(sizes) <= count:
        return list(sizes)
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    wanted = [low + (high - low) * i / (count - 1) for i in range(count)]
    nearest = {min(sizes, key=lambda s: abs(math.log(s) - place)) for place in wanted}
    return sorted(nearest)


def samples_per_step(sizes: Sequence[int], dp: int) -> int:
    """Sequences of one step of every trial: the fewest that all sizes divide, so that an update is spread
    over as many whatever the size."""
    return math.lcm(*sizes) * dp


def parts_at(parts: Mapping[str, Sequence[float]], micro: int) -> dict[str, float]:
    """GiB of each part of the peak (`parts` of `bert_dp.measure.memory_line`) at this micro batch."""
    return {name: (a + c * micro) / GIB for name, (a, c) in parts.items()}
