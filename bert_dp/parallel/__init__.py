"""Engines: ways of using the ranks. Each is one file, imported only when chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert_dp.config import ParallelConfig
from bert_dp.world import World

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""named parameters -> optimizer; called after sharding."""

State = dict[str, dict[str, Tensor]]
"""Canonical, unsharded: {"model": {name: tensor}, "optimizer": {"name/key": tensor}, "scaler": {...}}."""


class Engine(Protocol):
    """Six verbs and two numbers. Data is split by dp_rank and dp_size, never by world rank."""

    dp_rank: int
    dp_size: int

    def prepare(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap or shard `model` (already on its device), then build the optimizer."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro batch: gradients are reduced only when `last`."""

    def backward(self, loss: Tensor) -> None:
        """`loss` is this replica's share: summed over replicas it is the step's loss."""

    def step(self, max_norm: float) -> Tensor:
        """Clip by the reduced norm (0 = do not), skip on all ranks if it is not finite, step, zero the
        gradients. Returns the norm before clipping, a device scalar."""

    def gather_state(self) -> State | None:
        """Canonical state on rank 0, None elsewhere. Collective."""

    def scatter_state(self, state: State) -> None:
        """Load a canonical state, given whole on every rank."""


def engine_name(config: ParallelConfig, world_size: int) -> str:
    if config.engine == "auto":
        return "single" if world_size == 1 else "ddp"
    return config.engine


def make_engine(
    name: str, config: ParallelConfig, world: World, device: torch.device, *, fp16: bool
) -> Engine:
    """The engine `name`: class Engine of bert_dp.parallel.<name>. `fp16` adds a gradient scaler."""
    module = importlib.import_module(f"bert_dp.parallel.{name}")
    engine: Engine = module.Engine(config, world, device, fp16=fp16)
    return engine
