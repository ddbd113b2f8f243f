"""Train with DistributedDataParallel: every replica holds all weights, and gradients are all-reduced in
buckets on the last micro batch only."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from bert_dp.config import Config
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.base import RankGrid, clip_and_step, make_scaler, scaled_backward
from bert_dp.parallel.state import read_state, write_state
from bert_dp.parallel.tensor import TensorParallel
from bert_dp.training.noise import CommHook, NormPairs
from bert_dp.training.process import World

# no buffer synchronisation, because all ranks build equal buffers; torch renamed the option after 2.11
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}
REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DdpEngine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        self._grid = RankGrid(world, config.parallel.tensor, device)
        self.dp_rank, self.dp_size = self._grid.dp_rank, self._grid.dp_size
        self._tensor = TensorParallel(self._grid)
        self._config = config.parallel
        self._device = device
        self._first = True
        self._scaler = make_scaler(device, precision == "fp16")
        self.norm_pairs = NormPairs(config, self.dp_size)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._tensor.shard_model(model)
        self._model = model
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            process_group=self._grid.dp_group,
            bucket_cap_mb=self._config.bucket_mib,
            gradient_as_bucket_view=True,
            static_graph=self._config.static_graph,
            init_sync=False,  # because all ranks build equal weights
            **NO_BUFFER_SYNC,
        )
        # without a hook, DDP does the same as `allreduce_hook`
        group, dtype = self._grid.dp_group, REDUCE_DTYPES.get(self._config.reduce_dtype)
        reduce: CommHook = allreduce_hook if dtype is None else reduce_narrow
        if self.norm_pairs.on:
            reduce = self.norm_pairs.before(reduce)
        if reduce is not allreduce_hook:
            self._ddp.register_comm_hook(group if dtype is None else (group, dtype), reduce)
        named = list(model.named_parameters())
        self._optimizer = make_optimizer(named)
        self._sums = self._tensor.sharded_sums(self._optimizer, named)
        return self._ddp, self._optimizer

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        first, self._first = self._first, False
        if last or (first and self._config.static_graph):
            # also reduce in the dry run, in which DDP records the static graph; its result is discarded
            return nullcontext()
        return self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        whole = loss * self.dp_size  # DDP averages gradients over replicas, but they must be summed
        scaled_backward(whole, self._scaler)
        self.norm_pairs.end_micro(self._optimizer, self._scaler)

    def step(self, max_norm: float) -> Tensor:
        norm = clip_and_step(self._optimizer, self._scaler, max_norm, self._sums)
        self.norm_pairs.end_step(norm)
        # gradients are views of the buckets; if freed, they would be allocated again
        self._optimizer.zero_grad(set_to_none=False)
        return norm

    def gather_state(self) -> State | None:
        if self.dp_rank:
            return None
        return read_state(
            self._model,
            self._optimizer,
            self._scaler,
            unshard=self._tensor.unshard,
            keep=self._grid.tp_rank == 0,
        )

    def scatter_state(self, state: State) -> None:
        write_state(self._model, self._optimizer, self._scaler, state, shard=self._tensor.shard)


def reduce_narrow(
    state: tuple[dist.ProcessGroup, torch.dtype], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks in 16 bits. The division comes first, so that fp16 does not overflow.
    torch's own bf16 hook does not support gloo."""
    group, dtype = state
    buffer = bucket.buffer()
    narrow = (buffer / group.size()).to(dtype)
    work = dist.all_reduce(narrow, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda f: buffer.copy_(f.value()[0]))


make = DdpEngine
