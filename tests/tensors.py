"""Compare named tensors bit by bit or by their relative error."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
CPU = torch.device("cpu")


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (t.dtype, t.shape, t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def flat(state: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """Return the parts of a canonical state as one dictionary."""
    return {f"{part}:{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def with_moments(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """Return parameters and the optimizer state of each."""
    out: dict[str, Tensor] = {}
    for name, parameter in named:
        out[name] = parameter.detach()
        out |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return out


def randomise(model: nn.Module, spread: float, seed: int) -> None:
    """Set all weights, including norms and biases, to random values, so that every term affects outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))


def saved_state(folder: Path) -> dict[str, Tensor]:
    """Return the weights and the optimizer state of a checkpoint."""
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return |a - b| / |b| in the L2 norm, or |a - b| if b is 0."""
    norm = expected.detach().double().norm()
    error = (actual.detach().double() - expected.detach().double()).norm()
    return float(error / norm) if norm > 0 else float(error)


def largest_relative_error(actual: Tensors, expected: Tensors) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], tensor) for name, tensor in expected.items())


def assert_near(actual: Tensors, expected: Tensors, tolerance: float, at: Any = "") -> None:
    """Check the relative error of each tensor. An expected tensor of zeros fails, as it tests nothing."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.norm() > 0, f"{name}: the check is empty"
        error = relative_error(actual[name], tensor)
        assert error <= tolerance, f"{name} {at}: relative error {error:.1e}"
