"""Parameters and optimizer state to the bit."""

from __future__ import annotations

import torch
from torch import nn


def snapshot(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, bytes]:
    out = {name: p.detach().numpy().tobytes() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            out[f"{name}/{key}"] = value.numpy().tobytes()
    return out
