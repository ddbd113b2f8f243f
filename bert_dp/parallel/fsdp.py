"""Train with FSDP2 (torch fully_shard): weights, gradients and optimizer state are sharded, and weights are
gathered block by block.

The optimizer updates this rank's shards as plain tensors. To compute the norm of a whole
tensor, the ranks add up their sums of squares.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bert_dp.config import Config
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.base import RankGrid, clip_and_step, make_scaler, scaled_backward
from bert_dp.parallel.state import read_state, write_state
from bert_dp.parallel.tensor import TensorParallel
from bert_dp.training.process import World


class FsdpEngine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        parallel = config.parallel
        self._grid = RankGrid(world, parallel.tensor, device, replicas=parallel.fsdp_replicas)
        self.dp_rank, self.dp_size = self._grid.dp_rank, self._grid.dp_size
        self._tensor = TensorParallel(self._grid)
        self.norm_pairs = None
        self._scaler = make_scaler(device, precision == "fp16")

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._tensor.shard_model(model)
        # gather weights in their own dtype, so that autocast casts the same weights as under ddp, and norm
        # layers and embeddings remain fp32 on every device
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self._grid.data_mesh, "mp_policy": policy}
        blocks = model.blocks()
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options, reshard_after_forward=False)
        assert isinstance(model, FSDPModule)
        sharded: list[Any] = [model, *blocks]
        for module in sharded:
            module.set_gradient_divide_factor(1.0)  # sum gradients, because the losses sum to the step's loss
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
        self._model: Any = model
        self._sharded: dict[str, Any] = dict(model.named_parameters())
        self._local = {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}
        named = list(self._local.items())
        self._optimizer = make_optimizer(named)
        self._sums = self._tensor.sharded_sums(self._optimizer, named, self._grid.dp_group)
        return model, self._optimizer

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        scaled_backward(loss, self._scaler)

    def step(self, max_norm: float) -> Tensor:
        for name, sharded in self._sharded.items():
            self._local[name].grad = sharded.grad.to_local()
            sharded.grad = None
        norm = clip_and_step(self._optimizer, self._scaler, max_norm, self._sums)
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def gather_state(self) -> State | None:
        return read_state(
            self._model,
            self._optimizer,
            self._scaler,
            unshard=self._unshard,
            parameters=self._local,
            keep=self.dp_rank == 0 and self._grid.tp_rank == 0,
        )

    def scatter_state(self, state: State) -> None:
        write_state(
            self._model, self._optimizer, self._scaler, state, shard=self._shard, parameters=self._local
        )

    def _unshard(self, name: str, shard: Tensor) -> Tensor:
        like = self._sharded[name]
        part = DTensor.from_local(
            shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return self._tensor.unshard(name, part.full_tensor())

    def _shard(self, name: str, whole: Tensor) -> Tensor:
        like = self._sharded[name]
        shard = self._tensor.shard(name, whole).to(like.device)
        return distribute_tensor(shard, like.device_mesh, like.placements, src_data_rank=None).to_local()


make = FsdpEngine
