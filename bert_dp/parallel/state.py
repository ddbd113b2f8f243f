"""Convert between the canonical state and a rank's tensors."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from bert_dp.parallel import State

Convert = Callable[[str, Tensor], Tensor]
"""Function (parameter name, tensor) -> tensor that unshards the tensor or returns this rank's shard."""


def identity(name: str, tensor: Tensor) -> Tensor:
    return tensor


def read_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    *,
    unshard: Convert = identity,
    parameters: Mapping[str, Tensor] | None = None,
    keep: bool = True,
) -> State | None:
    """Copy the canonical state to the host. Collective if `unshard` is. A rank without `keep` takes part, but
    copies nothing and returns None. `parameters`: the tensors that the optimizer updates, by name. They share
    memory with the model's parameters. A tied tensor has one optimizer state, under its first name."""
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    tensors = {**model.state_dict(), **parameters}
    weights = ((name, unshard(name, tensor)) for name, tensor in tensors.items())
    moments = (
        (f"{name}/{key}", unshard(name, value) if value.shape == parameter.shape else value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    )
    state = {"model": to_host(weights, keep), "optimizer": to_host(moments, keep)}
    return {**state, "scaler": read_scaler(scaler)} if keep else None


def read_scaler(scaler: torch.amp.GradScaler | None) -> dict[str, Tensor]:
    if scaler is None:
        return {}
    numbers = scaler.state_dict()
    return {k: torch.tensor(float(v), dtype=torch.float64) for k, v in numbers.items() if k != "enabled"}


def write_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    state: State,
    *,
    shard: Convert = identity,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Load a canonical state into the model in place. An optimizer or scaler without saved state is reset.
    `parameters`: see `read_state`."""
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    saved: dict[str, dict[str, Tensor]] = {}
    for name_key, value in state["optimizer"].items():
        name, _, key = name_key.rpartition("/")
        saved.setdefault(name, {})[key] = value
    with torch.no_grad():
        for name, tensor in {**model.state_dict(), **parameters}.items():
            tensor.copy_(shard(name, state["model"][name]))
        for name, parameter in parameters.items():
            own = optimizer.state[parameter] = {}
            for key, value in saved.get(name, {}).items():
                if value.dim() > 0:
                    value = shard(name, value)
                dtype = value.dtype if key == "step" else parameter.dtype
                own[key] = value.to(parameter.device, dtype, copy=True).contiguous()
    if scaler is not None:
        numbers = {name: value.item() for name, value in state["scaler"].items()}
        values = {**torch.amp.GradScaler("cpu").state_dict(), **numbers}
        for count in ("growth_interval", "_growth_tracker"):
            values[count] = int(values[count])
        scaler.load_state_dict(values)


def to_host(items: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Copy `items` to the host if `keep`. Iterate in any case, as producing an item may be collective."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in items if keep}
