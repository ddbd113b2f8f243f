"""Several ranks on one GPU, for tests of the CUDA path of engines on a machine with one GPU.

NCCL refuses ranks that share a GPU; gloo also carries CUDA tensors. The product allows neither, so a rank's
process is patched. Nothing is shown of NCCL or of speed.
"""

from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import Tensor

from bert_dp.training import distributed


def share_device() -> None:
    """Patch a rank's process: gloo on GPUs too, and several ranks on one GPU."""
    plain = torch.distributed.init_process_group

    def init(backend: str, *, device_id: Any = None, **options: Any) -> None:
        # a group that is bound to a device accepts NCCL alone
        plain("gloo", **options)

    torch.distributed.init_process_group = init
    distributed.check_places = lambda places, sets: None
    functional.all_gather_tensor = gather_now


def gather_now(tensor: Tensor, gather_dim: int, group: Any) -> Tensor:
    """Gather along `gather_dim` and wait. torch's own asynchronous form, by which DTensor unshards, ends in a
    segmentation fault with CUDA tensors over gloo (torch 2.11)."""
    mesh, mesh_dim = group
    members = mesh.get_group(mesh_dim)
    parts = [torch.empty_like(tensor) for _ in range(members.size())]
    torch.distributed.all_gather(parts, tensor, group=members)
    return torch.cat(parts, gather_dim)
