"""Create LAMB (arXiv 1904.00962) as in NVIDIA apex's FusedLAMB: with Adam's bias correction, with eps outside
the square root, and with a trust ratio ||w|| / ||u|| for each whole tensor that has weight decay. The engine
clips the gradients by their global norm."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_dp.config import OptimConfig
from bert_dp.model.interface import Model
from bert_dp.optim import Named, Optimizer, parameter_groups

Tensors = list[Tensor]


def make(config: OptimConfig, named: Named, model: Model, *, compiled: bool, precision: str) -> Optimizer:
    """Build LAMB; see `bert_dp.optim.make_optimizer`."""
    groups = parameter_groups(named, config.weight_decay, model.is_decayed)
    return Lamb(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, compiled=compiled)


class Lamb(Optimizer):
    """LAMB with Adam's state: step, exp_avg and exp_avg_sq. `step()` overwrites .grad with the update. If
    `compiled` is true, `moments` is a fused kernel that makes 7 passes over memory, as many as AdamW, and
    `descend` is a fused kernel that makes 3. The norms of whole tensors are computed between the two."""

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
        if compiled:
            self._moments = torch.compile(moments, dynamic=False)
            self._descend = torch.compile(descend, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor with a gradient, without a host sync."""
        adapted, sums = [], []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            keep, divisor = self.controls(params[0])
            if group["weight_decay"] == 0:  # LAMB without a trust ratio is AdamW, which needs only one kernel
                self.adamw(group, params)
                sums.append(keep.new_zeros(2, len(params)))
                continue
            exp_avgs, exp_avg_sqs, steps = self.adam_state(params)
            torch._foreach_add_(steps, [keep.float()] * len(steps))  # no host sync
            grads = [p.grad for p in params]
            rule = (*group["betas"], group["eps"], group["weight_decay"])
            step = steps[0].to(torch.float64 if keep.dtype == torch.float64 else torch.float32)
            adapted.append((len(sums), params, grads, keep * group["lr"]))
            sums.append(self._moments(params, grads, exp_avgs, exp_avg_sqs, step, keep, divisor, rule))
        if sums:
            sums_2N = torch.cat(sums, dim=1)
            sums_2N = sums_2N if self.sharded_sums is None else self.sharded_sums(sums_2N)
            parts = sums_2N.split([part.shape[1] for part in sums], dim=1)
            for i, params, updates, lr in adapted:
                self._descend(params, updates, parts[i], lr)


def moments(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor,
    keep: Tensor,
    divisor: Tensor,
    rule: tuple[float, float, float, float],
) -> Tensor:
    """Update the moments in place, overwrite each gradient with its update, and return the squared norms of
    the weights and of the updates, [2, N]. A tensor without elements on this rank has norm 0. `keep`: 0 =
    leave the moments unchanged. `rule`: both betas, eps, weight decay."""
    beta1, beta2, eps, weight_decay = rule
    new1, new2 = (1.0 - beta1) * keep, (1.0 - beta2) * keep
    correction1 = 1.0 - beta1 ** step.clamp(min=1.0)
    correction2 = 1.0 - beta2 ** step.clamp(min=1.0)
    sums = []
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        gradient = torch.where(keep > 0, g / divisor, 0.0)
        m.copy_(m + new1 * (gradient - m))
        v.copy_(v + new2 * (gradient * gradient - v))
        update = (m / correction1) / ((v / correction2).sqrt() + eps) + weight_decay * p
        g.copy_(update)
        # sum each row first, because otherwise inductor reads the weight and the update twice
        sums.append(torch.stack([(p * p).sum(-1).sum(), (update * update).sum(-1).sum()]))
    return torch.stack(sums, dim=1)


def descend(params: Tensors, updates: Tensors, sums_2N: Tensor, lr: Tensor) -> None:
    """Compute p -= lr * ratio * update in place. The trust ratio is 1 if either norm is 0."""
    weight_N, update_N = sums_2N.sqrt()
    rate_N = lr * torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)
    for i, (p, update) in enumerate(zip(params, updates, strict=True)):
        p.sub_(rate_N[i] * update)
