"""The matmul rate of one device, measured on the spot: the denominator of MAMFU.

`python -m bert_dp.measure.peak PRECISION [SECONDS]` prints one JSON line: the best of several shapes, as
MAMF-finder (stas00/ml-engineering) takes it; on a CPU with as many threads as this process has cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch

from bert_dp.devices import keep_freed_memory, synchronize
from bert_dp.matmul import product
from bert_dp.precision import allow_tf32, choose_precision
from bert_dp.rank_process import follow_launcher

WARM_UP = 3
SHAPES = {  # (M, N, K) of [M, K] x [K, N]: from a block's products to what keeps a large device busy
    "cpu": ((1024, 768, 768), (1024, 3072, 768), (2048, 2048, 2048)),
    "cuda": ((16384, 768, 768), (16384, 3072, 768), (8192, 8192, 8192), (16384, 8192, 4096)),
}


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """FLOP/s of each shape, median over about `seconds` in all."""
    shapes = SHAPES[device.type]
    return [matmul_rate(shape, device, dtype, seconds / len(shapes)) for shape in shapes]


def matmul_rate(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    """m, n, k and flops, FLOP/s of [m, k] x [k, n]: the median over about `seconds`."""
    m, n, k = shape
    x, w = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)

    def once() -> float:
        start = time.perf_counter()
        product(x, w)
        synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        one_s = once()
    times = [once() for _ in range(max(WARM_UP, int(seconds / one_s)))]
    return {"m": m, "n": n, "k": k, "flops": 2 * m * n * k / statistics.median(times)}


def use_all_cores() -> None:
    """Use as many threads as this process has cores, and keep freed memory as a CPU rank does."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()


def main(precision: str, seconds: float = 2.0) -> None:
    """`precision` as the configuration has it; about `seconds` in all."""
    follow_launcher()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        use_all_cores()
    chosen = choose_precision(precision, device)
    allow_tf32(chosen, device)
    shapes = matmul_flops(device, chosen.autocast or chosen.parameters, seconds)
    facts = {"device": device.type, "precision": chosen.name, "shapes": shapes}
    sys.stdout.write(json.dumps({**facts, "matmul_flops": max(s["flops"] for s in shapes)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(float(s) for s in sys.argv[2:]))
