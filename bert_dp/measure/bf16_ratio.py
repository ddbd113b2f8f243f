"""Measure how fast this CPU multiplies bf16 beside fp32: `python -m bert_dp.measure.bf16_ratio` prints one
JSON line."""

from __future__ import annotations

import json
import sys

import torch

from bert_dp.measure.matmul_peak import SHAPES, matmul_rate, use_all_cores
from bert_dp.training.process import follow_launcher

SECONDS = 0.5  # of each


def main() -> None:
    """Print the FLOP/s in both, over all cores that this process may use."""
    follow_launcher()
    use_all_cores()
    shape = SHAPES["cpu"][0]  # one product of a block's size: an emulated one may take seconds a size
    dtypes = {"fp32_flops": torch.float32, "bf16_flops": torch.bfloat16}
    rates = {name: matmul_rate(shape, torch.device("cpu"), t, SECONDS) for name, t in dtypes.items()}
    sys.stdout.write(json.dumps({"torch": torch.__version__, "shape": shape, **rates}) + "\n")


if __name__ == "__main__":
    main()
