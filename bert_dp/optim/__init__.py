"""Make optimizers, one file each, and learning rate schedules.

A new optimizer is a file here with a function `make` and a row of `OPTIMIZERS` in bert_dp/config/engines.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch
from torch import nn

from bert_dp.config import OptimConfig
from bert_dp.model.interface import Model
from bert_dp.optim.contract import parameter_groups
from bert_dp.optim.schedule import lr_factor


def make_optimizer(
    config: OptimConfig,
    named: Iterable[tuple[str, nn.Parameter]],
    model: Model,
    *,
    compiled: bool = False,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """Build the optimizer `config.name`: function `make` of `bert_dp.optim.<name>`.

    `model` decides by the names of `named` which parameters are decayed and which are matrices. `precision`:
    of the run. The learning rate is set before every step.
    """
    module = importlib.import_module(f"bert_dp.optim.{config.name}")
    optimizer: torch.optim.Optimizer = module.make(
        config, list(named), model, compiled=compiled, precision=precision
    )
    set_lr(optimizer, 0.0 if config.lr == "auto" else config.lr)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
