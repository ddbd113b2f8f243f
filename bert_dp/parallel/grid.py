"""Place ranks among and inside replicas, and sum over tensors that they hold in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bert_dp.dist import TIMEOUT
from bert_dp.world import World


class RankGrid:
    """Arrange ranks as [dp, tp]: the tensor-parallel ranks of a replica are neighbours, so they share a node.

    `replicas` > 1 divides dp further, into [replicas, dp / replicas].
    """

    def __init__(self, world: World, tensor: int, device: torch.device, *, replicas: int = 1):
        self.tp_rank, self.tp_size = world.rank % tensor, tensor
        self.dp_rank, self.dp_size = world.rank // tensor, world.size // tensor
        shape = {"replica": replicas, "shard": self.dp_size // replicas, "tp": tensor}
        if replicas == 1:
            shape.pop("replica")
        if tensor == 1:
            shape.pop("tp")
        self.mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if device.type == "cuda":  # NCCL gives groups of a mesh 10 minutes, whatever the world has
            for group in self.mesh.get_all_groups():
                distributed_c10d._set_pg_timeout(TIMEOUT, group)
        self.tp_group = self.mesh["tp"].get_group() if tensor > 1 else None
        self.dp_group = self.mesh["shard"].get_group()
        """The ranks that hold the same part of other replicas; with `replicas` > 1 those of one shard set."""
        self.data_mesh: DeviceMesh = self.mesh[tuple(name for name in shape if name != "tp")]
        """The dimensions that gradients are summed over."""


class ShardedSums:
    """Sum over whole tensors from sums over the parts on this rank: [k, N] -> [k, N], N tensors.

    `counts_N` is 0 for a tensor that another rank of the group already counts. Collective over `groups`.
    """

    def __init__(self, counts_N: Tensor | None = None, groups: Sequence[dist.ProcessGroup | None] = ()):
        self._counts_N = counts_N
        self._groups = [group for group in groups if group is not None and group.size() > 1]

    def __call__(self, sums_kN: Tensor) -> Tensor:
        if self._counts_N is not None:
            sums_kN = sums_kN * self._counts_N
        return self._reduce(sums_kN)

    def total(self, sums_N: Tensor) -> Tensor:
        """Return the sum over all tensors, a scalar: one number on the wire, not N."""
        if self._counts_N is not None:
            sums_N = sums_N * self._counts_N
        return self._reduce(sums_N.sum())

    def _reduce(self, sums: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        return sums
