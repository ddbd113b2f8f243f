"""End a step, for every engine that steps itself: norm, clip, skip, update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bert_dp.parallel.grid import ShardedSums


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

    Clipping rides on the fused step's own division (`grad_scale`), so the gradients are read once, not twice.
    A norm that is not finite skips the step through `found_inf`; the norm is of reduced gradients, so
    all ranks skip together. Gradients stay for the caller to free.

    `sharded_sums` covers the ranks that hold parts of the optimizer's tensors (None = it holds them whole),
    `norm_sums` those that hold the other tensors as well (None = the same).
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in optimizer_parameters(optimizer) if p.grad is not None]
    sharded_sums = sharded_sums or ShardedSums()
    norm = (norm_sums or sharded_sums).total(torch.stack(torch._foreach_norm(gradients)).square()).sqrt()
    finite = norm.isfinite()
    scale = (norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    scale = torch.where(finite, scale, torch.ones_like(scale))
    if norm.dtype == torch.float64:  # the fused kernels take the divisor in float32 only
        torch._foreach_div_(gradients, scale)
        scale = torch.ones_like(scale)
    found_inf = (~finite).float()
    optimizer.grad_scale = scale.float()  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.sharded_sums = sharded_sums  # type: ignore[attr-defined]
    optimizer.step()
    if scaler is not None:
        for local in scaler._found_inf_per_device(optimizer).values():
            local.copy_(found_inf)  # one rank's parts may be finite where another's are not
        scaler.update()
    return norm
