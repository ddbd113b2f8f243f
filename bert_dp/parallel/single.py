"""Train on one rank with a plain module and no process group. This is the baseline for all measurements.

The engine `independent` uses this class on N ranks, which train separate models on separate samples.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from bert_dp.config import Config
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.base import clip_and_step, make_scaler, scaled_backward
from bert_dp.parallel.state import read_state, write_state
from bert_dp.training.noise import NormPairs
from bert_dp.training.process import World


class SingleEngine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        self.dp_rank, self.dp_size = world.rank, world.size
        self._scaler = make_scaler(device, precision == "fp16")
        self.norm_pairs = NormPairs(config, self.dp_size)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._model, self._optimizer = model, make_optimizer(model.named_parameters())
        return self._model, self._optimizer

    def accumulate(self, *, last: bool) -> nullcontext[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        scaled_backward(loss, self._scaler)
        self.norm_pairs.end_micro(self._optimizer, self._scaler)

    def step(self, max_norm: float) -> Tensor:
        norm = clip_and_step(self._optimizer, self._scaler, max_norm)
        self.norm_pairs.end_step(norm)
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def gather_state(self) -> State | None:
        return read_state(self._model, self._optimizer, self._scaler) if self.dp_rank == 0 else None

    def scatter_state(self, state: State) -> None:
        write_state(self._model, self._optimizer, self._scaler, state)


make = SingleEngine
