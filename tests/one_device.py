"""Several ranks on one GPU, for tests of the CUDA path of engines on a machine with one GPU.

NCCL refuses ranks that share a GPU; gloo also carries CUDA tensors. The product allows neither, so a rank's
process is patched. Nothing is shown of NCCL or of speed.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from bert_dp.training import distributed


def share_device() -> None:
    """In a rank's process: use gloo on GPUs too, and accept ranks on one GPU."""
    plain = torch.distributed.init_process_group

    def init(backend: str, *, device_id: Any = None, **options: Any) -> None:
        # a group that is bound to a device accepts NCCL alone
        plain("gloo", **options)

    torch.distributed.init_process_group = init
    distributed.check_places = lambda places, tensor: None
