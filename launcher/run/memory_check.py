"""Whether what a rank is estimated to need fits the memory that it may have, before anything starts."""

from __future__ import annotations

import dataclasses

from bert_dp.config import Config
from bert_dp.cost import rank_memory_gib
from launcher.machine.environment import Environment, precision_of
from launcher.report.numbers import format_gib
from launcher.watch import advice

STATE = ("weights", "gradients", "optimizer")  # parts of the memory estimate that are no estimate
FAR_ABOVE = 1.25  # times what there is: more than the estimate is off by


@dataclasses.dataclass(frozen=True)
class MemoryCheck:
    """The estimate for one configuration beside what each of its ranks may have, GiB."""

    config: Config
    precision: str
    world_size: int
    on_gpu: bool
    parts_gib: dict[str, float]
    """The estimate by part, as cost.rank_memory_gib has it."""
    limit_gib: float | None
    """None = not known: then nothing is said against the run."""
    limit_of: str

    @property
    def state_gib(self) -> float:
        return sum(self.parts_gib[name] for name in STATE)

    @property
    def total_gib(self) -> float:
        return sum(self.parts_gib.values())

    def impossible(self) -> list[str]:
        """Why it cannot fit, whatever the micro batch: at most one line."""
        if self.limit_gib is None or self.state_gib <= self.limit_gib:
            return []
        return [
            f"weights, gradients and optimizer state take {self.state_gib:.1f} GiB of a rank's "
            f"{self.limit_gib:.1f} GiB; use zero1 or fsdp, more ranks, or a smaller model"
        ]

    def issues(self) -> list[str]:
        """Why the run must be expected to fail for want of memory; at most one line."""
        if issues := self.impossible():
            return [f"model: {issues[0]}"]
        return self._tight() if self._times() > FAR_ABOVE else []

    def warnings(self) -> list[str]:
        """Why it may fail; at most one line."""
        return self._tight() if 1 < self._times() <= FAR_ABOVE else []

    def _times(self) -> float:
        return 0.0 if self.limit_gib is None else self.total_gib / max(self.limit_gib, 1e-9)

    def _tight(self) -> list[str]:
        _, fixes = advice.what_fits(
            self.config, self.precision, self.world_size, self.limit_gib, on_gpu=self.on_gpu
        )
        return [
            f"batch.micro_size: {self.config.batch.micro_size} takes about {format_gib(self.total_gib)} a "
            f"rank (estimate), and there are {format_gib(self.limit_gib)} ({self.limit_of}); {fixes[0]}"
        ]


def check_memory(
    config: Config, world_size: int, machine: Environment, *, on_gpu: bool, kept: str | None = None
) -> MemoryCheck:
    """What a rank of `world_size` needs, and what it may have on this machine. `kept`: see precision_of."""
    precision = precision_of(config, machine.bf16_units, on_gpu=on_gpu, kept=kept)
    parts = rank_memory_gib(config, precision, world_size, on_gpu=on_gpu)
    limit, limit_of = machine.rank_memory(world_size, on_gpu)
    return MemoryCheck(config, precision, world_size, on_gpu, parts, limit, limit_of)
