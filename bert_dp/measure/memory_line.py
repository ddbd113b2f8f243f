"""The memory line: peak tensor bytes of a rank in the micro batch b, M(b) = a + c b, nothing allocated.

`python -m bert_dp.measure.memory_line CONFIG.yaml RANKS b1 b2` prints one JSON line. A step of the real model
runs on fake tensors at two micro batches, with the configuration's precision, checkpointing and optimizer,
but never compiled. What no tensor holds (interpreter, libraries, an allocator's rest, a CUDA context) is the
caller's to measure at one micro batch.

A step's peak is the greatest of many lines, one per operation, so it bends upwards. The line given is the
one that leads at large b (FAR), within forward and backward. At a small b another operation, or the optimizer
step, may lie above it: peak_bytes is the whole step's. parts, [bytes, bytes per sequence], sum to the line:

weights, gradients, optimizer  as counted, or as cost.py divides them among the ranks (`state`)
activations  what forward keeps, autocast's narrow weights among it, and what checkpointing computes again
logits       what decoder and loss add: logits, their gradients, the decoder's gradient until it is added
other        buffers, the micro batch, temporaries of backward
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert_dp import cost
from bert_dp.config import Config, load_config, sharded
from bert_dp.corpus.command import run_command
from bert_dp.parallel import engine_name
from bert_dp.precision import Precision, choose_precision

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "other")
STATE = PARTS[:3]
FAR = 16  # the line is the one that leads at this many times b2


def memory_line(config: Config, ranks: int, sizes: tuple[int, int]) -> dict[str, Any]:
    """The object that main prints. Where fake tensors fail: the line of cost.py's formula, and `why`."""
    device, precision = choose_device(config)
    line: dict[str, Any] | None = None
    why: str | None = "fake tensors do not know tensor parallelism"
    if config.parallel.tensor == 1:
        try:
            line, why = traced(config, precision, device, ranks, sizes), None
        except Exception as error:  # private API of torch: anything
            why = f"{type(error).__name__}: {error}"
    source = "fake tensors" if line else "formula"
    line = line or by_formula(config, precision, ranks, sizes)
    return {
        "source": source,
        "why": why,
        "precision": precision.name,
        "compiled": False,
        "ranks": ranks,
        "sizes": list(sizes),
        **line,
    }


def choose_device(config: Config) -> tuple[torch.device, Precision]:
    """Device and precision of a rank. When run.device is cuda and this machine has no GPU, `auto` counts as
    bf16."""
    if config.run.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return device, choose_precision(config.precision, device, config.parallel.engine)
    device = torch.device("cpu")
    elsewhere = config.run.device == "cuda" and config.precision == "auto"
    setting = "bf16" if elsewhere else config.precision
    return device, choose_precision(setting, device, config.parallel.engine)


def traced(
    config: Config, precision: Precision, device: torch.device, ranks: int, sizes: tuple[int, int]
) -> dict[str, Any]:
    """The line by fake tensors. Raises whatever torch raises."""
    from bert_dp.measure.memory_trace import count_step, fake

    engine = engine_name(config.parallel, ranks)
    accumulates = config.batch.global_size > min(config.batch.micro_size, sizes[0]) * ranks
    histories = []
    for size in sizes:
        trace = count_step(
            config,
            precision,
            device,
            size,
            accumulation=1 + accumulates,
            keeps_gradients=engine not in ("single", "independent"),
            tensors=fake(),
        )
        bytes_EP, inside_E = trace.history()
        histories.append(bytes_EP)
    if len(histories[0]) != len(histories[1]):
        raise RuntimeError(f"micro batches {sizes[0]} and {sizes[1]} run other operations")
    divides = sharded(engine, config.parallel.zero_stage)
    if divides:
        divided = cost.memory_estimate_gib(config, precision.name, ranks)
        for bytes_EP in histories:
            bytes_EP[:, : len(STATE)] = [int(divided[part] * cost.GIB) for part in STATE]
    state = f"cost.py: {engine} on {ranks} ranks" if divides else "counted"
    return {"state": state, **line_through(sizes, histories, inside_E)}


def line_through(
    sizes: tuple[int, int], histories: Sequence[NDArray[np.int64]], inside_E: NDArray[np.bool_]
) -> dict[str, Any]:
    """The line of the operation that leads at FAR.

    histories: bytes of each of PARTS after each operation, [E, 6]; inside_E: whether it is one of forward or
    backward.
    """
    low_EP, high_EP = histories
    slope_EP = (high_EP - low_EP) / (sizes[1] - sizes[0])
    far_E = (high_EP + slope_EP * (FAR - 1) * sizes[1]).sum(axis=1)
    lead = int(np.where(inside_E, far_E, 0).argmax())
    slope_P = slope_EP[lead]
    intercept_P = high_EP[lead] - slope_P * sizes[1]
    parts = dict(zip(PARTS, np.stack([intercept_P, slope_P], axis=1).tolist(), strict=True))
    return _line([int(bytes_EP.sum(axis=1).max()) for bytes_EP in histories], parts)


def by_formula(config: Config, precision: Precision, ranks: int, sizes: tuple[int, int]) -> dict[str, Any]:
    """The line by cost.memory_estimate_gib."""
    points = []
    for size in sizes:
        batch = config.batch.model_copy(update={"micro_size": size})
        gib = cost.memory_estimate_gib(config.model_copy(update={"batch": batch}), precision.name, ranks)
        gib["activations"] += gib.pop("autocast weights", 0.0)
        points.append({part: gib.get(part, 0.0) * cost.GIB for part in PARTS})
    low, high = points
    slopes = {part: (high[part] - low[part]) / (sizes[1] - sizes[0]) for part in PARTS}
    parts = {part: [high[part] - slopes[part] * sizes[1], slopes[part]] for part in PARTS}
    return {"state": "cost.py", **_line([round(sum(point.values())) for point in points], parts)}


def _line(peaks: list[int], parts: dict[str, list[float]]) -> dict[str, Any]:
    intercept, slope = (sum(part[i] for part in parts.values()) for i in range(2))
    return {"peak_bytes": peaks, "intercept_bytes": intercept, "bytes_per_sequence": slope, "parts": parts}


def main(argv: list[str]) -> int:
    """`CONFIG.yaml RANKS b1 b2`. Exit codes: 0 done, 1 failed, 2 bad input."""
    path, ranks, low, high = argv
    sizes = int(low), int(high)
    return run_command(lambda: (json.dumps(memory_line(load_config(path), int(ranks), sizes)), 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
