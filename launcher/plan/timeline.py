"""Buckets of gradients, when each is ready, and how long they keep the step waiting. Seconds, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bert_dp.config import ModelConfig
from bert_dp.cost import linear_parameters

MIB = 2**20
FIRST_BUCKET = 1 * MIB  # of torch's DDP, unless a size is asked for
BUCKET = 25 * MIB


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One tensor's gradient."""

    size: float
    """Bytes."""
    ready: float
    """Seconds since the start of the backward pass."""


def from_layers(model: ModelConfig, parameters: int, width: float, backward_s: float) -> list[Gradient]:
    """Gradients of a model that was not profiled: the blocks' at even steps of the backward pass, the
    embedding's at its very end because the decoder is tied to it, with the little that is left.
    `parameters`: of the whole model; `width`: bytes of a number."""
    block = linear_parameters(model) / model.num_layers
    rest = parameters - linear_parameters(model)
    steps = [(i + 1) / (model.num_layers + 1) for i in range(model.num_layers)]
    blocks = [Gradient(block * width, step * backward_s) for step in steps]
    return [*blocks, Gradient(rest * width, backward_s)]


def buckets(gradients: Sequence[Gradient], size: float, first: float | None = None) -> list[Gradient]:
    """Fused in order of readiness until `size` bytes are reached, the first until `first`; a tensor is never
    split. A bucket is ready with its last tensor."""
    out: list[Gradient] = []
    total = ready = 0.0
    for gradient in sorted(gradients, key=lambda g: g.ready):
        total, ready = total + gradient.size, gradient.ready
        if total >= (first if first is not None and not out else size):
            out.append(Gradient(total, ready))
            total = 0.0
    return [*out, Gradient(total, ready)] if total else out


def exposed(
    fused: Sequence[Gradient], backward_s: float, duration: Callable[[float], float], gain: float = 1.0
) -> float:
    """Seconds by which the reductions outlast the backward pass: start = max(ready, end of the one before).

    `gain` is the share of the hidden time that is really gained: what runs beside the computation slows it.
    """
    durations = [duration(bucket.size) for bucket in fused]
    end = 0.0
    for bucket, seconds in zip(fused, durations, strict=True):
        end = max(bucket.ready, end) + seconds
    total = sum(durations)
    ideal = min(total, max(0.0, end - backward_s))
    return total - gain * (total - ideal)
