"""DistributedDataParallel: whole replicas, gradients all-reduced in buckets on the last micro batch only."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_dp.config import ParallelConfig
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.replica import clip_and_step, make_scaler, read_state, write_state
from bert_dp.world import World

# every rank builds the same buffers; the option's name changed after torch 2.11
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class Engine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: ParallelConfig, world: World, device: torch.device, *, fp16: bool):
        self.dp_rank, self.dp_size = world.rank, world.size
        self._bucket_mib = config.bucket_mib
        self._device = device
        self._scaler = make_scaler(device, fp16)

    def prepare(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._model = model
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mib,
            gradient_as_bucket_view=True,
            **NO_BUFFER_SYNC,
        )
        self._optimizer = make_optimizer(model.named_parameters())
        return self._ddp, self._optimizer

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        whole = loss * self.dp_size  # DDP divides the sum over replicas by their number
        scaled: Any = whole if self._scaler is None else self._scaler.scale(whole)
        scaled.backward()

    def step(self, max_norm: float) -> Tensor:
        return clip_and_step(self._optimizer, self._scaler, max_norm)

    def gather_state(self) -> State | None:
        if self.dp_rank:
            return None
        return read_state(self._model, self._optimizer, self._scaler)

    def scatter_state(self, state: State) -> None:
        write_state(self._model, self._optimizer, self._scaler, state)
