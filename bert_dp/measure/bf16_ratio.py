"""How fast this CPU multiplies bf16 beside fp32: `python -m bert_dp.measure.bf16_ratio` prints one JSON line.

One product of a block's size, because an emulated one may take seconds a size.
"""

from __future__ import annotations

import json
import sys

import torch

from bert_dp.measure.peak import SHAPES, matmul_rate, use_all_cores
from bert_dp.rank_process import follow_launcher

SECONDS = 0.5  # of each


def main() -> None:
    """FLOP/s in both, over all cores that this process may use."""
    follow_launcher()
    device = torch.device("cpu")
    use_all_cores()
    shape = SHAPES["cpu"][0]
    fp32, bf16 = (
        matmul_rate(shape, device, dtype, SECONDS)["flops"] for dtype in (torch.float32, torch.bfloat16)
    )
    facts = {"torch": torch.__version__, "shape": shape, "fp32_flops": fp32, "bf16_flops": bf16}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
