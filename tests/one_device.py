"""Run several ranks on one GPU, to test the CUDA path of engines on a machine with one GPU.

NCCL refuses ranks that share a GPU, but gloo also transfers CUDA tensors. bert-dp allows neither, so each
rank's process is patched. These runs test neither NCCL nor speed.
"""

from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import Tensor

from bert_dp.training import distributed


def share_device() -> None:
    """Patch a rank's process to use gloo on GPUs and to allow several ranks on one GPU."""
    plain = torch.distributed.init_process_group

    def init(backend: str, *, device_id: Any = None, **options: Any) -> None:
        # `device_id` is dropped, because a group that is bound to a device accepts NCCL only
        plain("gloo", **options)

    torch.distributed.init_process_group = init
    distributed.check_places = lambda places, sets: None
    functional.all_gather_tensor = gather_now


def gather_now(tensor: Tensor, gather_dim: int, group: Any) -> Tensor:
    """Gather along `gather_dim` and wait. The asynchronous function of torch, with which DTensor unshards,
    crashes with a segmentation fault for CUDA tensors over gloo (torch 2.11)."""
    mesh, mesh_dim = group
    members = mesh.get_group(mesh_dim)
    parts = [torch.empty_like(tensor) for _ in range(members.size())]
    torch.distributed.all_gather(parts, tensor, group=members)
    return torch.cat(parts, gather_dim)
