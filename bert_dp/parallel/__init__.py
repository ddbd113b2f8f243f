"""Define engines, the ways of using several ranks. Each is one file, imported only if chosen."""

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
"""Function from named parameters to their optimizer; called after sharding."""

State = dict[str, dict[str, Tensor]]
"""Canonical unsharded state: {"model": {name: tensor}, "optimizer": {"name/key": tensor}, "scaler": {}}."""


class Engine(Protocol):
    """Interface of an engine: six methods, dp_rank and dp_size, and norm_pairs if it can measure gradient
    noise. Data is split by dp_rank and dp_size, never by world rank. A new engine is a file here with a class
    `Engine`, a row of `ENGINES` in `bert_dp/config/engines.py` (used by checks, memory estimates, `scale` and
    hang reports) and a row of the parity matrix."""

    dp_rank: int
    dp_size: int

    @property
    def norm_pairs(self) -> NormPairs | None:
        """Return the measurements for log.noise_scale; None = this engine cannot make them."""

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap or shard `model` (already on its device), then build the optimizer."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        """Wrap forward and backward of one micro batch; gradients are reduced only if `last`."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of `loss`, this replica's share; the shares sum to the step's loss."""

    def step(self, max_norm: float) -> Tensor:
        """Clip by the reduced norm (0 = do not), skip on all ranks if it is not finite, step, zero the
        gradients. Returns the norm before clipping, a device scalar; not finite = the step was skipped."""

    def gather_state(self) -> State | None:
        """Return the canonical state on rank 0, None elsewhere. Collective."""

    def scatter_state(self, state: State) -> None:
        """Load a canonical state of this model (see `checkpoint.state_issues`), whole on every rank."""


def engine_name(config: ParallelConfig, world_size: int) -> str:
    if config.engine == "auto":
        return "single" if world_size == 1 else "ddp"
    return config.engine


def make_engine(
    name: str, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path
) -> Engine:
    """Create class Engine of bert_dp.parallel.<name>. precision fp16 adds a gradient scaler. Raises
    ConfigError if a package that the engine wraps is not installed."""
    module = importlib.import_module(f"bert_dp.parallel.{name}")
    try:
        engine: Engine = module.Engine(config, world, device, precision=precision, run_dir=run_dir)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        what = "" if missing == name else f"{missing}, from "
        text = f"{name} needs {what}`{install_command(name)}`"
        raise ConfigError([Issue("parallel.engine", "needs_package", text, name)]) from None
    return engine
