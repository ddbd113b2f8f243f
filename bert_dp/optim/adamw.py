"""Create torch's fused AdamW (arXiv 1711.05101)."""

import torch

from bert_dp.config import OptimConfig
from bert_dp.model.interface import Model
from bert_dp.optim import Named, parameter_groups


def make(
    config: OptimConfig, named: Named, model: Model, *, compiled: bool, precision: str
) -> torch.optim.Optimizer:
    """Build AdamW; see `bert_dp.optim.make_optimizer`."""
    groups = parameter_groups(named, config.weight_decay, model.is_decayed)
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
