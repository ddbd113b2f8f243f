"""Train with ZeRO stage 1 (arXiv 1910.02054): every rank holds all weights, but only the optimizer state of
the tensors that it owns.

A tensor's gradient is reduced to its owner, which broadcasts the new weights. The two operations send as many
bytes as one all-reduce. Tensors stay whole, so that tensor norms (LAMB) and matrix products (Muon) are exact.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_dp.config import Config, ConfigError, Issue
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.base import RankGrid, clip_and_step, make_scaler, scaled_backward
from bert_dp.parallel.state import read_scaler, to_host, write_state
from bert_dp.parallel.tensor import TensorParallel
from bert_dp.training.distributed import gather_json
from bert_dp.training.noise import NormPairs
from bert_dp.training.process import World

MIB = 2**20
DEFAULT_BUCKET_MIB = 25.0
ALIGNED_BYTES = 16  # alignment of a bucket's tensors, so that one compiled graph fits all layers


@dataclass
class Bucket:
    """Tensors of one owner. They share one weight buffer and one gradient buffer, both padded with zeros."""

    owner: int
    names: list[str]
    weights: Tensor
    gradients: Tensor
    missing: set[str] = field(default_factory=set)


class Zero1Engine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        self._grid = RankGrid(world, config.parallel.tensor, device)
        self.dp_rank, self.dp_size = self._grid.dp_rank, self._grid.dp_size
        self._tensor = TensorParallel(self._grid)
        self._bucket_bytes = (config.parallel.bucket_mib or DEFAULT_BUCKET_MIB) * MIB
        self._scaler = make_scaler(device, precision == "fp16")
        self.norm_pairs = NormPairs(config, self.dp_size, share=1 / self.dp_size)
        self._last = True
        self._works: list[Any] = []

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard the model and assign owners. Raises ConfigError if there are more replicas than tensors."""
        self._tensor.shard_model(model)
        self._model = model
        self._parameters = dict(model.named_parameters())
        if len(self._parameters) < self.dp_size:
            text = f"zero1 distributes {len(self._parameters)} tensors, too few for {self.dp_size} replicas"
            raise ConfigError([Issue("parallel.engine", "conflict", text, "zero1", hint="use ddp or fsdp")])
        sizes = {name: p.numel() for name, p in self._parameters.items()}
        self._owners = assign(sizes, self.dp_size)
        self._buckets = self._make_buckets()
        mine = [(name, p) for name, p in self._parameters.items() if self._owners[name] == self.dp_rank]
        self._optimizer = make_optimizer(mine)
        self._sums = self._tensor.sharded_sums(self._optimizer, mine)
        self._norm_sums = self._tensor.sharded_sums(self._optimizer, mine, self._grid.dp_group)
        return model, self._optimizer

    def _make_buckets(self) -> list[Bucket]:
        """Create the buckets in the order in which backward completes them. All ranks use the same order."""
        open_buckets: dict[int, list[str]] = {}
        closed: list[list[str]] = []
        for name in reversed(self._parameters):
            owner, parameter = self._owners[name], self._parameters[name]
            names = open_buckets.setdefault(owner, [])
            names.append(name)
            total = sum(self._parameters[n].numel() for n in names) * parameter.element_size()
            if total >= self._bucket_bytes:
                closed.append(open_buckets.pop(owner))
        order = list(reversed(self._parameters))
        groups = sorted([*closed, *open_buckets.values()], key=lambda names: order.index(names[-1]))
        return [self._make_bucket(names) for names in groups]

    def _make_bucket(self, names: list[str]) -> Bucket:
        parameters = [self._parameters[name] for name in names]
        unit = ALIGNED_BYTES // parameters[0].element_size()
        starts = [0, *itertools.accumulate(-(-p.numel() // unit) * unit for p in parameters)]
        weights = parameters[0].new_zeros(starts[-1])
        bucket = Bucket(self._owners[names[0]], names, weights, torch.zeros_like(weights), set(names))
        for name, p, start in zip(names, parameters, starts[:-1], strict=True):
            weight, gradient = (t[start : start + p.numel()].view_as(p) for t in (weights, bucket.gradients))
            p.data, p.grad = weight.copy_(p.detach()), gradient

            def arrived(_: Tensor, name: str = name, bucket: Bucket = bucket) -> None:
                if self._last:
                    bucket.missing.discard(name)
                    self._send_complete()

            p.register_post_accumulate_grad_hook(arrived)
        return bucket

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def backward(self, loss: Tensor) -> None:
        scaled_backward(loss, self._scaler)
        self.norm_pairs.end_micro(self._optimizer, self._scaler)

    def _send_complete(self) -> None:
        """Start reducing complete buckets to their owners, in the same order on every rank."""
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.missing:
                return
            self.norm_pairs.reducing(bucket.gradients)
            group, owner = self._grid.dp_group, bucket.owner
            self._works.append(dist.reduce(bucket.gradients, group_dst=owner, group=group, async_op=True))

    def step(self, max_norm: float) -> Tensor:
        for bucket in self._buckets:
            bucket.missing.clear()  # gradients that backward did not compute are zero
        self._send_complete()
        self._wait()
        norm = clip_and_step(self._optimizer, self._scaler, max_norm, self._sums, norm_sums=self._norm_sums)
        self.norm_pairs.end_step(norm)
        for bucket in self._buckets:
            group, owner = self._grid.dp_group, bucket.owner
            self._works.append(dist.broadcast(bucket.weights, group_src=owner, group=group, async_op=True))
            bucket.gradients.zero_()
            bucket.missing.update(bucket.names)
        self._wait()
        return norm

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()

    def gather_state(self) -> State | None:
        """Gather the owners' state on rank 0, by broadcasting one tensor at a time to all replicas."""
        keep = self.dp_rank == 0 and self._grid.tp_rank == 0
        weights = dict(self._model.state_dict()) if self.dp_rank == 0 else {}
        model = to_host(((name, self._tensor.unshard(name, t)) for name, t in weights.items()), keep)
        moments = to_host(self._gather_moments(), keep)
        return {"model": model, "optimizer": moments, "scaler": read_scaler(self._scaler)} if keep else None

    def _gather_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name/key, tensor) for all optimizer state. Only the first replica unshards. Collective."""
        device = next(iter(self._parameters.values())).device
        mine = {name: self._optimizer.state.get(p, {}) for name, p in self._parameters.items()}
        facts = {
            name: [(key, list(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in state.items()]
            for name, state in mine.items()
        }
        of_owners = gather_json(facts, self._grid.dp_group, device)
        for name, parameter in self._parameters.items():
            owner = self._owners[name]
            for key, shape, dtype in of_owners[owner][name]:
                if owner == self.dp_rank:
                    value = mine[name][key].to(device).contiguous()
                else:
                    value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                dist.broadcast(value, group_src=owner, group=self._grid.dp_group)
                if self.dp_rank == 0 and value.shape == parameter.shape:
                    value = self._tensor.unshard(name, value)
                yield f"{name}/{key}", value

    def scatter_state(self, state: State) -> None:
        mine = {name: p for name, p in self._parameters.items() if self._owners[name] == self.dp_rank}
        write_state(
            self._model, self._optimizer, self._scaler, state, shard=self._tensor.shard, parameters=mine
        )


def assign(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Assign tensors, largest first, to the rank with the fewest elements so far. Return the owners."""
    load = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += sizes[name]
    return owners


make = Zero1Engine
