"""Estimate the time of a micro batch on one GPU from its name, for a machine that was not measured.

    seconds = matmul FLOPs / (peak x share) x (1 + TOKENS / tokens) + bytes / bandwidth + layers x launch

The shares, the framework's memory traffic and its launch time are fitted to published rows of one GPU by
benchmarks/gpu_speed.py and stand in hardware.yaml under `gpu_speed`, with the spread of rows whose source the
fit had not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from bert_dp.config import ModelConfig
from bert_dp.cost import flops_per_token, num_parameters, peak_flops
from launcher.plan.step_model import GB, constant, hardware

FRAMEWORK = "compiled"  # class of torch.compile; the others are those of published rows
PASSES, ATTENTION_PASSES = 60, 24  # numbers read and written per token and layer, of H and of heads x S
OPTIMIZER_BYTES = {"adamw": 28, "lamb": 52, "muon": 28}  # read and written per parameter by a fused step


class GpuWork(NamedTuple):
    """Work of one micro batch, and of one optimizer step, on one GPU."""

    tokens: int
    layers: int
    flops: float  # forward and backward
    memory_bytes: float  # of elementwise kernels
    optimizer_bytes: float


class GpuSpeed(NamedTuple):
    """Rates of a GPU in one precision."""

    peak: float  # FLOP/s of matrix products
    memory: float  # bytes/s
    precision: str


class EstimatedTime(NamedTuple):
    """Seconds of one micro batch and of one optimizer step, and the factor of their 95 % interval."""

    micro_s: float
    optimizer_s: float
    factor: float


@cache
def fitted() -> Mapping[str, Any]:
    """Return the fitted constants of hardware.yaml."""
    return dict(hardware()["gpu_speed"])


def work_of(
    model: ModelConfig,
    sequence_length: int,
    mask_rate: float,
    micro_batch: int,
    precision: str,
    optimizer: str,
) -> GpuWork:
    """Count the work of a micro batch of `micro_batch` sequences."""
    tokens = micro_batch * sequence_length
    width = 2 if precision in ("bf16", "fp16") else 4
    numbers = PASSES * model.hidden_size + ATTENTION_PASSES * model.num_heads * sequence_length
    return GpuWork(
        tokens,
        model.num_layers,
        tokens * flops_per_token(model, sequence_length, mask_rate),
        tokens * model.num_layers * width * numbers,
        num_parameters(model, sequence_length) * OPTIMIZER_BYTES[optimizer],
    )


def speed_of(gpu: str, precision: str) -> GpuSpeed | None:
    """Return the rates of a GPU of hardware.yaml; None where its peak in this precision is not known."""
    row = hardware()["gpus"][gpu]
    peak = peak_flops(row["device"], precision)
    return None if peak is None else GpuSpeed(peak, row["memory_gb_s"] * GB, precision)


def estimate(
    work: GpuWork, speed: GpuSpeed, framework: str = FRAMEWORK, constants: Mapping[str, Any] | None = None
) -> EstimatedTime:
    """Estimate the times of `work`. `constants`: other ones than those of hardware.yaml."""
    known = constants or fitted()
    share = known["matmul_share"]["16-bit" if speed.precision in ("bf16", "fp16") else speed.precision]
    matmul = work.flops / (speed.peak * share) * (1 + known["tokens"] / work.tokens)
    bytes_s = speed.memory * constant("memory_reach")
    memory = work.memory_bytes * known["memory_traffic"][framework] / bytes_s
    launch = work.layers * known["launch_s"][framework]
    optimizer = work.optimizer_bytes * known["optimizer_traffic"] / bytes_s
    return EstimatedTime(matmul + memory + launch, optimizer, math.exp(1.96 * known["spread"]))
