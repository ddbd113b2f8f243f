"""Measure the matmul rate of one device. This rate is the denominator of MAMFU.

`python -m bert_dp.measure.matmul_peak PRECISION [SECONDS]` prints a JSON line with the best rate over several
shapes, as MAMF-finder (stas00/ml-engineering) does. On a CPU, it uses all cores available to the process.
"""

import json
import os
import statistics
import sys
import time

import torch

from bert_dp.model.kernels import product
from bert_dp.training.devices import allow_tf32, choose_precision, keep_freed_memory, synchronize
from bert_dp.training.process import follow_launcher

WARM_UP = 3
SHAPES = {  # (M, N, K): matmuls of a transformer block, and sizes that keep a large device busy
    "cpu": ((1024, 768, 768), (1024, 3072, 768), (2048, 2048, 2048)),
    "cuda": ((16384, 768, 768), (16384, 3072, 768), (8192, 8192, 8192), (16384, 8192, 4096)),
}


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of the fastest shape, measured for about `seconds` in total."""
    shapes = SHAPES[device.type]
    return max(matmul_rate(shape, device, dtype, seconds / len(shapes)) for shape in shapes)


def matmul_rate(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    """Return the median FLOP/s of the product [m, k] x [k, n], measured for about `seconds`."""
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
    return 2 * m * n * k / statistics.median(times)


def use_all_cores() -> None:
    """Use all cores available to this process and, like a rank on a CPU, keep freed memory for reuse."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()


def main(precision: str, seconds: float = 2.0) -> None:
    """Print the matmul rate for a value of the setting `precision`, measured for about `seconds`."""
    follow_launcher()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        use_all_cores()
    chosen = choose_precision(precision, device)
    allow_tf32(chosen, device)
    flops = matmul_flops(device, chosen.autocast or chosen.parameters, seconds)
    facts = {"device": device.type, "precision": chosen.name, "matmul_flops": flops}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(float(s) for s in sys.argv[2:]))
