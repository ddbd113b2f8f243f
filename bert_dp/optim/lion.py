"""Make Lion (arXiv 2302.06675), whose update is the sign of an interpolated momentum."""

from __future__ import annotations

import torch

from bert_dp.config import OptimConfig
from bert_dp.optim.contract import Named, Optimizer, parameter_groups
from bert_dp.trainable import Model


def make(config: OptimConfig, named: Named, model: Model, *, compiled: bool, precision: str) -> Lion:
    """Build Lion; see `bert_dp.optim.make_optimizer`."""
    groups = parameter_groups(named, config.weight_decay, model.is_decayed)
    return Lion(groups, {"lr": 0.0, "betas": (config.beta1, config.beta2)})


class Lion(Optimizer):
    """Keep one moment of each tensor."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient, without a host sync."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                keep, divisor = self.controls(p)
                moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                gradient = torch.where(keep > 0, p.grad / divisor, 0.0)
                p.mul_(1.0 - keep * group["lr"] * group["weight_decay"])
                p.sub_(keep * group["lr"] * moment.lerp(gradient, 1.0 - beta1).sign())
                moment.lerp_(gradient, (1.0 - beta2) * keep)
