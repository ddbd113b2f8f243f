"""Define the interface of engines, which distribute training over ranks, and import the chosen engine."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert_dp.config import Config, ConfigError, Issue, ParallelConfig, install_command
from bert_dp.model.interface import Model
from bert_dp.training.noise import NormPairs
from bert_dp.training.process import World

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Function that builds an optimizer for named parameters. Engines call it in `prepare`."""

State = dict[str, dict[str, Tensor]]
"""Canonical state, whole tensors: {"model": {name: ..}, "optimizer": {name/key: ..}, "scaler": {key: ..}}."""


class Engine(Protocol):
    """Interface of an engine. Data is split by dp_rank and dp_size, never by world rank. To add an engine,
    add a module that defines `make` to this package, a row to `ENGINES` in `bert_dp/config/engines.py` (used
    by checks, memory estimates, `scale` and hang reports) and a row to `tests/parity/matrix.py`."""

    dp_rank: int
    dp_size: int

    @property
    def norm_pairs(self) -> NormPairs | None:
        """Return the collector of gradient norms for log.noise_scale, or None if the engine has none."""

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap or shard `model`, which is already on its device, and build the optimizer."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro batch's forward and backward. Gradients must be reduced if `last`."""

    def backward(self, loss: Tensor) -> None:
        """Run backward for `loss`. The losses of all micro batches and replicas sum to the step's loss."""

    def step(self, max_norm: float) -> Tensor:
        """Clip the norm of the reduced gradients to `max_norm` (0 = do not clip), take an optimizer step and
        zero the gradients. If the norm is not finite, all ranks skip the step. Return the unclipped norm."""

    def gather_state(self) -> State | None:
        """Return the canonical state on rank 0, None elsewhere. Collective."""

    def scatter_state(self, state: State) -> None:
        """Load a canonical state, unsharded on every rank, that matches the model (see `state_issues`)."""


def engine_name(config: ParallelConfig, world_size: int) -> str:
    if config.engine == "auto":
        return "single" if world_size == 1 else "ddp"
    return config.engine


def make_engine(
    name: str, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path
) -> Engine:
    """Call bert_dp.parallel.<name>.make to create an engine, with a gradient scaler if `precision` is fp16.
    Raises ConfigError if a package that the engine needs is not installed."""
    module = importlib.import_module(f"bert_dp.parallel.{name}")
    try:
        engine: Engine = module.make(config, world, device, precision=precision, run_dir=run_dir)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        text, hint = f"{name} needs package {missing}, which is not installed", f"`{install_command(name)}`"
        raise ConfigError([Issue("parallel.engine", "needs_package", text, name, hint=hint)]) from None
    return engine
