"""Time one optimizer step of the 120 M model: LAMB (eager and compiled) and Muon, compared with fused AdamW.

    python benchmarks/optimizer_speed.py [--rounds 5] [--threads 2] [--device cpu|cuda]

The optimizers alternate within each round; medians and ratios are over the rounds. Gradients are random and
not clipped. On a GPU, LAMB has only one form. Prints JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import records
from benchmarks.turns import ratios
from bert_dp.config import ModelConfig, OptimConfig
from bert_dp.model.bert import build_model
from bert_dp.optim import make_optimizer
from bert_dp.training.devices import keep_freed_memory, synchronize

VARIANTS = {
    "adamw": ("adamw", False),
    "lamb": ("lamb", False),
    "lamb compiled": ("lamb", True),
    "muon": ("muon", False),
}


def main() -> None:
    parser = records.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    keep_freed_memory()  # every CPU rank does this too
    device = torch.device(o.device)
    model = build_model(ModelConfig(num_layers=o.layers), 128, seed=0).to(device)
    generator = torch.Generator(device).manual_seed(0)
    gradients = [torch.randn(p.shape, generator=generator, device=device) for p in model.parameters()]
    optimizers = {
        name: make_optimizer(
            OptimConfig.model_validate({"name": kind}), model.named_parameters(), model, compiled=compiled
        )
        for name, (kind, compiled) in VARIANTS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(o.rounds + 1):
        for name, optimizer in optimizers.items():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
            synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            synchronize(device)
            if number:  # the first round compiles and creates the optimizer state
                seconds[name].append(time.perf_counter() - start)
    result: dict[str, Any] = {
        "environment": {"torch": torch.__version__, "device": o.device, "threads": o.threads},
        "parameters": sum(g.numel() for g in gradients),
    }
    for name in VARIANTS:
        to_adamw = ratios(seconds[name], seconds["adamw"])
        result[name] = {
            "seconds_median": statistics.median(seconds[name]),
            "seconds": seconds[name],
            "ratio_to_adamw_median": statistics.median(to_adamw),
            "ratio_min": min(to_adamw),
            "ratio_max": max(to_adamw),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
