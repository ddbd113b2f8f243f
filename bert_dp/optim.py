"""Parameter groups, optimizers, and schedules as pure functions of progress f.

What an engine sets before a step, of all of them: see `bert_dp.optimizer_contract.Optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from bert_dp.config import OptimConfig, ScheduleConfig
from bert_dp.lamb import Lamb
from bert_dp.muon import WHOLE, Muon
from bert_dp.trainable import Model

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def parameter_groups(
    named: NamedParameters, weight_decay: float, is_decayed: Callable[[str], bool]
) -> list[dict[str, object]]:
    """Two groups in the order of `named`: with and without weight decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        groups[is_decayed(name)].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def make_optimizer(
    config: OptimConfig,
    named: NamedParameters,
    model: Model,
    *,
    compiled: bool = False,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) in one fused kernel, LAMB or Muon; `lr` is set before every step.

    `model` tells what is decayed and what is a matrix, by the names of `named`. `precision`: of the run.
    """
    named = list(named)
    on_gpu = any(parameter.device.type == "cuda" for _, parameter in named)
    betas = (config.beta1, config.beta2)
    lr = 0.0 if config.lr == "auto" else config.lr
    if config.name == "muon":
        groups = parameter_groups(
            [pair for pair in named if not model.is_matrix(pair[0])], config.weight_decay, model.is_decayed
        )
        plan = model.tensor_plan() or {}
        matrices = {name: parameter for name, parameter in named if model.is_matrix(name)}
        groups.append(
            {
                "params": list(matrices.values()),
                "weight_decay": config.weight_decay,
                "matrix": True,
                "splits": [plan.get(name, WHOLE) for name in matrices],
            }
        )
        return Muon(
            groups,
            lr=lr,
            momentum=config.momentum,
            betas=betas,
            eps=config.eps,
            # as Muon's original, where the model's products are in bf16 too; a CPU gains nothing by it
            multiply_in=torch.bfloat16 if precision == "bf16" and on_gpu else None,
        )
    groups = parameter_groups(named, config.weight_decay, model.is_decayed)
    if config.name == "lamb":
        return Lamb(groups, lr=lr, betas=betas, eps=config.eps, compiled=compiled)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_factor(schedule: ScheduleConfig, progress: float) -> float:
    """Learning rate / peak at progress f in [0, 1].

    budget_triangle: min(0.25 + f, 4 (1 - f)), the recipe's (JonasGeiping/cramming, budget-triangle2).
    linear, cosine, wsd: linear warm-up over warmup_fraction first; wsd decays as 1 - sqrt over its last
    decay_fraction (arXiv 2405.18392). exponential: 1e-4^(1 - f), the range test (arXiv 1506.01186, 3.3, with
    equal ratios in place of equal differences).
    """
    f = min(max(progress, 0.0), 1.0)
    if schedule.name == "budget_triangle":
        return min(0.25 + f, 4.0 * (1.0 - f))
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "exponential":
        return float(1e-4 ** (1.0 - f))
    warmup = schedule.warmup_fraction
    if f < warmup:
        return f / warmup
    if schedule.name == "wsd":
        left = (1.0 - f) / schedule.decay_fraction
        return 1.0 if left >= 1.0 else 1.0 - math.sqrt(1.0 - left)
    done = (f - warmup) / (1.0 - warmup)
    return 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
