"""Wrap the pretraining task so that a test can change or observe one of its methods."""

from typing import Any

import torch

from bert_dp.config import Config
from bert_dp.tasks import mlm


class WrappedTask:
    """Pretraining task with `step`, the loop's optimizer step from 0; -1 = the dry run, -2 = before it."""

    def __init__(self, config: Config, device: torch.device):
        self.inner, self.step = mlm.make_task(config, device), -2

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def num_targets(self, first_sample: int, count: int) -> int:
        """Count the step, because the loop calls this once per step."""
        self.step += 1
        return self.inner.num_targets(first_sample, count)


class PoisonedTask(WrappedTask):
    """Task whose losses in the steps of `bad_steps` alternate between NaN and infinity on this rank."""

    def __init__(self, config: Config, device: torch.device, bad_steps: range):
        super().__init__(config, device)
        self._bad_steps = bad_steps

    def loss(self, model: Any, batch: Any) -> Any:
        value = self.inner.loss(model, batch)
        if self.step not in self._bad_steps:
            return value
        return value * (float("nan"), float("inf"))[self._bad_steps.index(self.step) % 2]
