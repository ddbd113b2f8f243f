"""Arrange ranks in replicas, and take optimizer steps with clipped gradients, for several engines."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bert_dp.training.distributed import TIMEOUT
from bert_dp.training.process import World


class RankGrid:
    """Grid of all ranks, [dp, tp]. A replica's tensor-parallel ranks are consecutive, so they share a node.
    If `replicas` > 1, dp is split further, into [replicas, dp / replicas]."""

    def __init__(self, world: World, tensor: int, device: torch.device, *, replicas: int = 1):
        self.tp_rank, self.tp_size = world.rank % tensor, tensor
        self.dp_rank, self.dp_size = world.rank // tensor, world.size // tensor
        sizes = {"replica": replicas, "shard": self.dp_size // replicas, "tp": tensor}
        shape = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        self.mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if device.type == "cuda":  # by default, a mesh's NCCL groups time out after 10 minutes
            for group in self.mesh.get_all_groups():
                distributed_c10d._set_pg_timeout(TIMEOUT, group)
        self.tp_group = self.mesh["tp"].get_group() if tensor > 1 else None
        self.dp_group = self.mesh["shard"].get_group()
        """Ranks with the same tp_rank. If `replicas` > 1, only those that share one copy of the weights."""
        self.data_mesh: DeviceMesh = self.mesh[tuple(name for name in shape if name != "tp")]
        """Mesh dimensions over which gradients are summed."""


class ShardedSums:
    """Callable that maps sums over this rank's parts of N tensors to whole-tensor sums: [k, N] -> [k, N].
    `counts_N`: 0 for tensors that another rank counts, else 1. Collective over `groups`."""

    def __init__(self, counts_N: Tensor | None = None, groups: Sequence[dist.ProcessGroup | None] = ()):
        self._counts_N = counts_N
        self._groups = [group for group in groups if group is not None and group.size() > 1]

    def __call__(self, sums_kN: Tensor) -> Tensor:
        if self._counts_N is not None:
            sums_kN = sums_kN * self._counts_N
        return self._reduce(sums_kN)

    def total(self, sums_N: Tensor) -> Tensor:
        """Return the sum over all tensors, a scalar. The reduction sends one number instead of N."""
        if self._counts_N is not None:
            sums_N = sums_N * self._counts_N
        return self._reduce(sums_N.sum())

    def _reduce(self, sums: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        return sums


def make_scaler(device: torch.device, fp16: bool) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler(device.type) if fp16 else None


def scaled_backward(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    scaled: Any = loss if scaler is None else scaler.scale(loss)
    scaled.backward()


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    max_norm: float,
    sharded_sums: ShardedSums | None = None,
    *,
    norm_sums: ShardedSums | None = None,
) -> Tensor:
    """Take one optimizer step on reduced gradients, without a host sync; return the norm before clipping.

    To clip, the fused step divides gradients by `grad_scale`, which saves a pass over memory. If the norm is
    not finite, `found_inf` makes the step change nothing. All ranks skip the same steps, because all get the
    same norm. The caller frees or zeroes the gradients.

    `sharded_sums` sums over the ranks that hold parts of the optimizer's tensors; None = every tensor is
    whole. `norm_sums` also sums over the ranks that own other tensors; None = use `sharded_sums`.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in optimizer_parameters(optimizer) if p.grad is not None]
    sharded_sums = sharded_sums or ShardedSums()
    norm = (norm_sums or sharded_sums).total(torch.stack(torch._foreach_norm(gradients)).square()).sqrt()
    finite = norm.isfinite()
    scale = (norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    scale = torch.where(finite, scale, torch.ones_like(scale))
    if norm.dtype == torch.float64:  # the fused kernels accept only a float32 divisor
        torch._foreach_div_(gradients, scale)
        scale = torch.ones_like(scale)
    found_inf = (~finite).float()
    optimizer.grad_scale = scale.float()  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.sharded_sums = sharded_sums  # type: ignore[attr-defined]
    optimizer.step()
    if scaler is not None:
        for local in scaler._found_inf_per_device(optimizer).values():
            local.copy_(found_inf)  # the scaler has checked this rank's parts only
        scaler.update()
    return norm
