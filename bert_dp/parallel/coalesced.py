"""Train whole replicas, gradients all-reduced as one vector at the end of a step."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bert_dp.config import Config
from bert_dp.parallel import single
from bert_dp.parallel.grid import RankGrid
from bert_dp.world import World


class Engine(single.Engine):
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        super().__init__(config, world, device, precision=precision, run_dir=run_dir)
        self._group = RankGrid(world, 1, device).dp_group

    def step(self, max_norm: float) -> Tensor:
        """Sum the gradients over the replicas, then step as one rank does."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        whole = _flatten_dense_tensors(gradients)
        dist.all_reduce(whole, group=self._group)
        for gradient, part in zip(gradients, _unflatten_dense_tensors(whole, gradients), strict=True):
            gradient.copy_(part)
        return super().step(max_norm)
