"""LAMB (arXiv 1904.00962) with the meaning of NVIDIA apex's FusedLAMB: Adam's bias correction, eps outside
the root, trust ratio ||w|| / ||u|| over a whole tensor, and only for tensors with weight decay. Clipping by
the global norm belongs to the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_dp.optimizer_contract import Optimizer

Tensors = list[Tensor]

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integer type of the same size."""


class Rule(NamedTuple):
    """The constants of a parameter group, but the learning rate."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Lamb(Optimizer):
    """State per tensor: step, exp_avg, exp_avg_sq, as Adam's. `step` leaves the update in .grad."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compiled: bool = False,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._moments, self._descend = moments, descend
        if "cuda" in {p.device.type for group in self.param_groups for p in group["params"]}:
            self._moments, self._descend = moments_of_all, descend_all
        elif compiled:
            self._moments = torch.compile(moments, dynamic=False)
            self._descend = torch.compile(descend, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every tensor that has a gradient, without a host sync."""
        work = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            keep, divisor = self.controls(params[0])
            exp_avgs, exp_avg_sqs, steps = self.adam_state(params)
            torch._foreach_add_(steps, [keep.float()] * len(steps))  # no host sync
            grads = [p.grad for p in params]
            beta1, beta2 = group["betas"]
            rule = Rule(beta1, beta2, group["eps"], group["weight_decay"])
            step = steps[0].to(torch.float64 if keep.dtype == torch.float64 else torch.float32)
            sums_2N = self._moments(params, grads, exp_avgs, exp_avg_sqs, step, keep, divisor, rule)
            lr = torch.full((), group["lr"], dtype=keep.dtype, device=keep.device) * keep
            work.append((params, grads, sums_2N, lr, rule.weight_decay != 0))
        if work:
            sums_2N = torch.cat([sums for _, _, sums, _, _ in work], dim=1)
            sums_2N = sums_2N if self.sharded_sums is None else self.sharded_sums(sums_2N)
            parts = sums_2N.split([len(params) for params, *_ in work], dim=1)
            for (params, updates, _, lr, adapted), part in zip(work, parts, strict=True):
                self._descend(params, updates, part, lr, adapted)


def moments(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor,
    keep: Tensor,
    divisor: Tensor,
    rule: Rule,
) -> Tensor:
    """Moments and updates in place (the update over the gradient); [2, N] squared norms, tensors first.

    `keep` = 0 leaves the moments as they are. A tensor with no element on this rank counts 0.
    """
    new1, new2 = (1.0 - rule.beta1) * keep, (1.0 - rule.beta2) * keep
    correction1 = 1.0 - rule.beta1 ** step.clamp(min=1.0)
    correction2 = 1.0 - rule.beta2 ** step.clamp(min=1.0)
    sums = []
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        gradient = torch.where(keep > 0, g / divisor, 0.0)
        m.copy_(m + new1 * (gradient - m))
        v.copy_(v + new2 * (gradient * gradient - v))
        update = (m / correction1) / ((v / correction2).sqrt() + rule.eps) + rule.weight_decay * p
        g.copy_(update)
        sums.append(torch.stack([(p * p).sum(), (update * update).sum()]))
    return torch.stack(sums, dim=1)


def descend(params: Tensors, updates: Tensors, sums_2N: Tensor, lr: Tensor, adapted: bool) -> None:
    """p -= lr x ratio x update; ratio = 1 where a norm is zero or nothing is adapted."""
    weight_N, update_N = sums_2N.sqrt()
    ratio_N = torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)
    for i, (p, update) in enumerate(zip(params, updates, strict=True)):
        p.sub_((lr * ratio_N[i] if adapted else lr) * update)


def moments_of_all(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor,
    keep: Tensor,
    divisor: Tensor,
    rule: Rule,
) -> Tensor:
    """`moments` by one kernel for all tensors at a time, for a GPU; not to the bit."""
    number = INTEGERS[keep.dtype]
    torch._foreach_mul_([g.view(number) for g in grads], keep.to(number))  # as bits: NaN times 0 is NaN
    torch._foreach_div_(grads, divisor)
    torch._foreach_mul_(exp_avgs, 1.0 - (1.0 - rule.beta1) * keep)
    torch._foreach_add_(exp_avgs, grads, alpha=1.0 - rule.beta1)
    torch._foreach_mul_(exp_avg_sqs, 1.0 - (1.0 - rule.beta2) * keep)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - rule.beta2)
    step = step.clamp(min=1.0)
    torch._foreach_copy_(grads, exp_avg_sqs)
    torch._foreach_div_(grads, (1.0 - rule.beta2**step).to(keep.dtype))
    torch._foreach_sqrt_(grads)
    torch._foreach_add_(grads, rule.eps)
    torch._foreach_mul_(grads, (1.0 - rule.beta1**step).to(keep.dtype))
    torch._foreach_reciprocal_(grads)
    torch._foreach_mul_(grads, exp_avgs)
    torch._foreach_add_(grads, params, alpha=rule.weight_decay)
    norms = [torch.stack(torch._foreach_norm(tensors)) for tensors in (params, grads)]
    return torch.stack(norms).square()


def descend_all(params: Tensors, updates: Tensors, sums_2N: Tensor, lr: Tensor, adapted: bool) -> None:
    """`descend` for a GPU: one kernel for each tensor with a ratio of its own, one for the others."""
    if not adapted:
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(params, updates)
        return
    weight_N, update_N = sums_2N.sqrt()
    rate_N = lr * torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)
    for p, update, rate in zip(params, updates, rate_N, strict=True):
        p.addcmul_(update, rate, value=-1.0)
