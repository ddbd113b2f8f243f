"""What engines with a whole replica on every rank share: stepping and canonical state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bert_dp.parallel import State


def clip_and_step(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, max_norm: float
) -> Tensor:
    """One optimizer step on reduced gradients, without a host sync; returns the norm before clipping.

    Clipping rides on the fused step's own division (`grad_scale`), so the gradients are read once, not twice.
    A norm that is not finite skips the step through `found_inf`; the norm is of reduced gradients, so
    all ranks skip together. The gradients are then freed.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    finite = norm.isfinite()
    scale = (norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    scale = torch.where(finite, scale, torch.ones_like(scale))
    if norm.dtype == torch.float64:  # the fused kernels take the divisor in float32 only
        torch._foreach_div_(gradients, scale)
        scale = torch.ones_like(scale)
    optimizer.grad_scale = scale.float()  # type: ignore[attr-defined]
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def make_scaler(device: torch.device, fp16: bool) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler(device.type) if fp16 else None


def read_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> State:
    """Copies on the host; a tied tensor stands once, under its first name."""
    state: State = {"model": _host(model.state_dict().items()), "optimizer": {}, "scaler": {}}
    for name, parameter in model.named_parameters():
        values = optimizer.state.get(parameter, {})
        state["optimizer"].update(_host((f"{name}/{key}", value) for key, value in values.items()))
    if scaler is not None:
        numbers = scaler.state_dict()
        state["scaler"] = {
            k: torch.tensor(float(v), dtype=torch.float64) for k, v in numbers.items() if k != "enabled"
        }
    return state


def write_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, state: State
) -> None:
    """Load a canonical state in place; empty optimizer or scaler parts start those anew.

    Raises ValueError naming a parameter that is missing or of another shape.
    """
    with torch.no_grad():
        _copy(dict(model.state_dict()), state["model"])
        for name, parameter in model.named_parameters():
            values = {
                key.rpartition("/")[2]: value
                for key, value in state["optimizer"].items()
                if key.rpartition("/")[0] == name
            }
            if state["optimizer"] and not values:
                raise ValueError(f"{name}: the checkpoint has no optimizer state for it")
            optimizer.state[parameter] = {
                key: value.to(parameter.device, value.dtype if key == "step" else parameter.dtype, copy=True)
                for key, value in values.items()
            }
    if scaler is not None:
        fresh = torch.amp.GradScaler("cpu").state_dict()
        saved = {**fresh, **{k: v.item() for k, v in state["scaler"].items()}}
        saved["growth_interval"] = int(saved["growth_interval"])
        saved["_growth_tracker"] = int(saved["_growth_tracker"])
        scaler.load_state_dict(saved)


def _host(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in items}


def _copy(into: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    if into.keys() != state.keys():
        raise ValueError(f"checkpoint and model differ in: {', '.join(sorted(into.keys() ^ state.keys()))}")
    for name, tensor in into.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{name}: checkpoint has {tuple(state[name].shape)}, model {tuple(tensor.shape)}"
            )
        tensor.copy_(state[name])
