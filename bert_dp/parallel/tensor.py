"""Split a model over ranks by its tensor plan, as in Megatron-LM (arXiv 1909.08053), with plain tensors.

A column-parallel linear layer computes a part of the outputs, and its input gradient is summed over the
ranks. A row-parallel layer uses a part of the inputs, and its output is summed. The vocabulary (the rows of
the embedding) is split over the ranks, and logits are never gathered.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from bert_dp.config import ConfigError, Issue
from bert_dp.model.interface import Model
from bert_dp.model.kernels import Linear, add_row_gradients, linear, product, widened
from bert_dp.parallel.base import RankGrid, ShardedSums, optimizer_parameters

Group = dist.ProcessGroup | None


class TensorParallel:
    """Tensor parallelism over the ranks of `grid.tp_group`. With a single rank, it does nothing."""

    def __init__(self, grid: RankGrid):
        self._group, self._rank, self._size = grid.tp_group, grid.tp_rank, grid.tp_size
        self._plan: Mapping[str, tuple[int, int]] = {}
        """Split parameters: name -> (dimension, number of matrices fused along it, each split separately)."""

    def shard_model(self, model: Model) -> None:
        """Replace each parameter in `model.tensor_plan()` with this rank's shard. Other parameters remain
        replicated. Raises ConfigError for a model without a plan."""
        if self._size == 1:
            return
        plan = model.tensor_plan()
        if plan is None:
            text = f"{self._size}, but this model cannot be split"
            raise ConfigError([Issue("parallel.tensor", "unsupported", text, self._size, hint="use 1")])
        assert self._group is not None
        group = self._group.group_name
        self._plan = plan
        for name, (dim, _) in plan.items():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = getattr(module, leaf)
            parameter.data = self.shard(name, parameter.data).clone()
            if isinstance(module, nn.Linear) and leaf == "weight":
                parent, _, child = path.rpartition(".")
                parallel = (ColumnLinear, RowLinear)[dim](module, group)
                setattr(model.get_submodule(parent), child, parallel)
        vocabulary = ParallelEmbedding(group, self._rank)
        for module in model.modules():
            if hasattr(module, "vocabulary"):
                module.vocabulary = vocabulary  # type: ignore[assignment]
            if hasattr(module, "tensor_rank"):
                module.tensor_rank = self._rank  # type: ignore[assignment]

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of `whole`, which has the full shape of parameter `name`."""
        if name not in self._plan:
            return whole
        dim, count = self._plan[name]
        return torch.cat([m.chunk(self._size, dim)[self._rank] for m in whole.chunk(count, dim)], dim)

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Gather the whole tensor; the inverse of `shard`. Collective over a replica's ranks."""
        if name not in self._plan:
            return shard
        dim, count = self._plan[name]
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(self._size)]
        dist.all_gather(shards, shard, group=self._group)
        matrices = zip(*(s.chunk(count, dim) for s in shards), strict=True)
        return torch.cat([part for parts in matrices for part in parts], dim)

    def sharded_sums(
        self, optimizer: torch.optim.Optimizer, named: list[tuple[str, Any]], *groups: Group
    ) -> ShardedSums:
        """Return a ShardedSums for the optimizer's parameters. It sums over a replica's ranks and over
        `groups`, and counts a replicated tensor on one rank only."""
        if self._size == 1:
            return ShardedSums(None, groups)
        names = {parameter: name for name, parameter in named}
        ordered = optimizer_parameters(optimizer)
        counts = [1.0 if self._rank == 0 or names[p] in self._plan else 0.0 for p in ordered]
        return ShardedSums(ordered[0].new_tensor(counts), (self._group, *groups))


class ParallelLinear(Linear):
    """Base class for linear layers that are split over ranks. An instance holds this rank's part."""

    def __init__(self, share: nn.Linear, group: str):
        nn.Module.__init__(self)
        self.weight, self.bias, self._group = share.weight, share.bias, group


class ColumnLinear(ParallelLinear):
    """Linear layer [..., in] -> [..., out / ranks]. The input is identical on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        out = column_product(x, self.weight, self._group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class RowLinear(ParallelLinear):
    """Linear layer [..., in / ranks] -> [..., out], summed over the ranks before the bias is added."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _SumOverRanks.apply(linear(x, self.weight), self._group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class ParallelEmbedding:
    """Embedding, tied decoder and loss over a split vocabulary: V / ranks rows of the weight on each rank."""

    def __init__(self, group: str, rank: int):
        self._group, self._rank = group, rank

    def look_up(self, ids_BS: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        return _LookUp.apply(ids_BS, weight_VH, self._rank, self._group)

    def logits(self, x_PH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return this rank's columns of the logits, [P, V / ranks]."""
        return column_product(x_PH, weight_VH, self._group)

    def loss(self, logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        """Return the cross entropy over the whole vocabulary, summed over the positions with a label >= 0."""
        return _CrossEntropy.apply(widened(logits_PV), labels_P, self._rank, self._group)

    def score(self, logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        """Return [2, P]: each position's cross entropy over the whole vocabulary, and 1 if its label has the
        greatest logit, else 0. Both are 0 for a negative label. The result has no gradient."""
        with torch.no_grad():
            _, sum_P, label_P, *_ = _reduced_sums(widened(logits_PV), labels_P, self._rank, self._group)
        loss_P, real_P = sum_P.log() - label_P, labels_P >= 0
        return torch.stack([loss_P * real_P, ((label_P == 0) & real_P).to(loss_P.dtype)])


# These collectives are custom operators, because torch's own break the graph of a compiled block. Groups are
# passed by name, because a graph cannot store objects.


@torch.library.custom_op("bert_dp::all_reduce", mutates_args=())
def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """Return a copy of `x`, reduced over the ranks by `operation`, SUM or MAX. The copy has no gradient."""
    out = x.contiguous().clone()
    dist.all_reduce(out, getattr(dist.ReduceOp, operation), group=_resolve_process_group(group))  # type: ignore[arg-type]
    return out


@all_reduce.register_fake
def _(x: Tensor, operation: str, group: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("bert_dp::column_gradients", mutates_args=())
def column_gradients(grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight in x @ weight.T. The gradient of x is summed over the ranks while
    the gradient of the weight is computed."""
    grad_MK = product(grad_MN, weight_NK.t())
    work = dist.all_reduce(grad_MK, group=_resolve_process_group(group), async_op=True)  # type: ignore[arg-type]
    grad_NK = product(grad_MN.t(), x_MK.t())
    assert work is not None
    work.wait()
    return grad_MK, grad_NK


@column_gradients.register_fake
def _(grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return x_MK.new_empty(x_MK.shape), weight_NK.new_empty(weight_NK.shape)


def column_product(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """Return x @ weight.T, in autocast's dtype if autocast is on. Backward sums x's gradient over ranks."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    return _ColumnProduct.apply(x, weight, group)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_MK, grad_weight = column_gradients(grad.flatten(0, -2), x.flatten(0, -2), weight, ctx.group)
        return grad_MK.view(x.shape), grad_weight, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, "SUM", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _LookUp(torch.autograd.Function):
    """Embedding lookup that returns (weight[ids], weight). Backward sums both gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, ids_BS: Tensor, weight_VH: Tensor, rank: int, group: str) -> tuple[Tensor, Tensor]:
        local_BS = ids_BS - rank * weight_VH.shape[0]
        foreign_BS = (local_BS < 0) | (local_BS >= weight_VH.shape[0])
        local_BS = local_BS.masked_fill(foreign_BS, 0)
        ctx.save_for_backward(local_BS, foreign_BS)
        out_BSH = F.embedding(local_BS, weight_VH).masked_fill_(foreign_BS[..., None], 0.0)
        return all_reduce(out_BSH, "SUM", group), weight_VH.view_as(weight_VH)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor, grad_VH: Tensor) -> tuple[None, Tensor, None, None]:
        local_BS, foreign_BS = ctx.saved_tensors
        return None, add_row_gradients(grad_VH, local_BS, grad_BSH, foreign_BS), None, None


def _reduced_sums(
    logits_PV: Tensor, labels_P: Tensor, rank: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the terms of the cross entropy. Two reductions, of P and 2 P numbers, replace a gather of P x V
    logits. Logits are relative to the position's largest logit on any rank. Return exp_PV, the exponentials
    of this rank's columns; sum_P, their sums over all ranks; label_P, the label's logit (0 for a negative
    label); local_P, the label's column on this rank; and mine_P, True if this rank holds that column."""
    top_P = all_reduce(logits_PV.max(dim=-1).values, "MAX", group)
    shifted_PV = logits_PV - top_P[:, None]
    local_P = labels_P - rank * logits_PV.shape[1]
    mine_P = (local_P >= 0) & (local_P < logits_PV.shape[1])
    local_P = local_P.masked_fill(~mine_P, 0)
    label_P = shifted_PV.gather(1, local_P[:, None])[:, 0].masked_fill(~mine_P, 0.0)
    exp_PV = shifted_PV.exp_()
    sum_P, label_P = all_reduce(torch.stack([exp_PV.sum(-1), label_P]), "SUM", group)
    return exp_PV, sum_P, label_P, local_P, mine_P


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, labels_P: Tensor, rank: int, group: str) -> Tensor:
        exp_PV, sum_P, label_P, local_P, mine_P = _reduced_sums(logits_PV, labels_P, rank, group)
        counts_P = labels_P >= 0
        ctx.save_for_backward(exp_PV, sum_P, local_P, mine_P, counts_P)
        return ((sum_P.log() - label_P) * counts_P).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exp_PV, sum_P, local_P, mine_P, counts_P = ctx.saved_tensors
        grad_PV = exp_PV / sum_P[:, None]
        grad_PV.scatter_add_(1, local_P[:, None], -mine_P[:, None].to(grad_PV.dtype))
        return grad_PV * (counts_P * grad)[:, None], None, None, None
