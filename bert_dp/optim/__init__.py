"""Create optimizers and compute the learning rate.

To add an optimizer, add a module that defines `make` here, and a row to `OPTIMIZERS` in config/engines.py.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_update  # torch.optim's module, not adamw.py of this package

from bert_dp.config import ConfigError, Issue, OptimConfig
from bert_dp.config.own_code import load_function
from bert_dp.config.schema import CODE
from bert_dp.model.interface import Model
from bert_dp.optim.schedule import lr_factor

Named = Sequence[tuple[str, nn.Parameter]]


def make_optimizer(
    config: OptimConfig,
    named: Iterable[tuple[str, nn.Parameter]],
    model: Model,
    *,
    compiled: bool = False,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """Build the optimizer `config.name` with `bert_dp.optim.<name>.make` or with the user's function.
    `model` decides by name which parameters have weight decay and which are matrices. `precision`: the run's
    precision. The training loop sets the learning rate before every step."""
    is_own = CODE.fullmatch(config.name) is not None
    make = (
        load_function(config.name) if is_own else importlib.import_module(f"bert_dp.optim.{config.name}").make
    )
    optimizer: torch.optim.Optimizer = make(
        config, list(named), model, compiled=compiled, precision=precision
    )
    if is_own:
        check_steps(optimizer)
    set_lr(optimizer, 0.0 if config.lr == "auto" else config.lr)
    return optimizer


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Wrap the `step` of a user's optimizer. The wrapper clips the gradients and, if `found_inf` is 1,
    skips the step. This costs a host sync. Subclasses of `Optimizer` and torch's fused optimizers do both
    themselves. The first step raises ConfigError if a checkpoint cannot store the optimizer's state."""
    step, clips = optimizer.step, isinstance(optimizer, Optimizer) or optimizer.defaults.get("fused")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_checked = False

    def checked(*_: Any) -> None:
        nonlocal is_checked
        if not clips:
            if optimizer.found_inf:  # type: ignore[attr-defined]
                return
            for p in (p for p in parameters if p.grad is not None):
                p.grad.div_(optimizer.grad_scale)  # type: ignore[attr-defined]
        step()
        if not is_checked and optimizer.state:
            is_checked = True
            if not all(can_be_saved(p, optimizer.state.get(p, {})) for p in parameters):
                message = "must keep state for every parameter, as scalar tensors or tensors of its shape"
                raise ConfigError([Issue("optim.name", "unsupported", message)])

    optimizer.step = checked  # type: ignore[method-assign, assignment]


def can_be_saved(parameter: Tensor, state: Mapping[str, object]) -> bool:
    """Return whether a checkpoint can store the optimizer state of a parameter."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    fits = all(value.dim() == 0 or value.shape == parameter.shape for value in tensors)
    return bool(tensors) and len(tensors) == len(state) and fits


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, is_decayed: Callable[[str], bool]
) -> list[dict[str, object]]:
    """Split parameters, in the order of `named`, into a group with weight decay and a group without."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        groups[is_decayed(name)].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": groups[decayed], "weight_decay": decays[decayed]} for decayed in decays]


class Optimizer(torch.optim.Optimizer):
    """Base class for optimizers that clip gradients and skip steps without a host sync, like torch's fused
    AdamW. Before `step`, the engine sets `sharded_sums` and the float32 device scalars `grad_scale` and
    `found_inf`."""

    grad_scale: Tensor | None = None
    """Number by which to divide the gradients."""
    found_inf: Tensor | None = None
    """1.0 = skip this step, 0.0 = take it."""
    sharded_sums: Callable[[Tensor], Tensor] | None = None
    """Function that maps sums over this rank's parts of N tensors to sums over the whole tensors: [k, N] ->
    [k, N]. The tensors are in the order of the optimizer's parameters."""

    def controls(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keep, divisor), scalars on `like`'s device and in its dtype. `keep` is 0 to skip the step,
        else 1; `divisor` divides the gradients."""
        skip = torch.zeros((), device=like.device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=like.device) if self.grad_scale is None else self.grad_scale
        return 1.0 - skip.to(like.dtype), divisor.to(like.dtype)

    def adam_state(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return lists of exp_avg, exp_avg_sq and step for `params`; all are zero before the first step."""
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        names = ("exp_avg", "exp_avg_sq", "step")
        exp_avgs, exp_avg_sqs, steps = ([self.state[p][name] for p in params] for name in names)
        return exp_avgs, exp_avg_sqs, steps

    def adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update `params`, which must have gradients, with torch's fused AdamW kernel."""
        exp_avgs, exp_avg_sqs, steps = self.adam_state(params)
        beta1, beta2 = group["betas"]
        adamw_update(
            params,
            [p.grad for p in params if p.grad is not None],
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
