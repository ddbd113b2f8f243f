"""Where ZeRO-1 puts the tensors of a bucket."""

from __future__ import annotations

import torch
from torch import nn

from bert_dp.parallel import zero1


def test_tensors_of_a_bucket_begin_at_aligned_addresses() -> None:
    """A graph that is compiled for one layer's weights serves every layer, so all must lie alike."""
    sizes = {"bias": (2,), "weight": (5, 7), "norm": (13,), "last": (4, 4)}
    for dtype in (torch.float32, torch.float64):
        parameters = {name: nn.Parameter(torch.randn(*size, dtype=dtype)) for name, size in sizes.items()}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        engine = zero1.Engine.__new__(zero1.Engine)
        engine._parameters, engine._owners = parameters, dict.fromkeys(parameters, 0)
        bucket = engine._make_bucket(list(parameters))
        for name, p in parameters.items():
            assert p.data_ptr() % zero1.ALIGNED_BYTES == 0, name
            assert p.grad is not None
            p.grad.fill_(1.0)
            assert torch.equal(p.detach(), before[name])
        assert bucket.weights.numel() == bucket.gradients.numel()
        assert bucket.gradients.sum() == sum(p.numel() for p in parameters.values())
        assert bucket.weights.count_nonzero() == bucket.gradients.count_nonzero()
