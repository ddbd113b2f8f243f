"""tune.json as the searches write it, from a seed: every number is made, none was measured."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

from tests.scaling_fixture import ENVIRONMENT

GIB = 2**30
GLOBAL, SEQUENCE, RANKS, CHOSEN = 128, 128, 2, 16
LIMIT_GIB, CONSTANT_GIB, LINE = 4.0, 0.3, (1.0, 0.045)  # of the line: GiB, GiB a sequence
PARTS = {
    "weights": (0.3, 0.0),
    "gradients": (0.2, 0.0),
    "optimizer": (0.4, 0.0),
    "activations": (0.1, 0.025),
    "logits": (0.0, 0.015),
    "other": (0.0, 0.005),
}
RATES = {1: 92.0, 2: 141.0, 4: 184.0, 8: 208.0, 16: 221.0, 32: 225.3}  # sequences/s
NOISE = (310.0, 255.0, 391.0)
CONFIG = {"run": {"seed": 0}, "batch": {"global_size": GLOBAL, "micro_size": 8}, "optim": {"lr": 0.001}}
COMMON = {
    "schema_version": 1,
    "status": "complete",
    "date": "2026-11-21T12:00:00+00:00",
    "config_hash": "5f2c9a1e",
    "data_hash": "77aa01bc",
    "ranks": RANKS,
}


def batch(seed: int = 0, *, inconclusive: str = "", **changes: Any) -> dict[str, Any]:
    """Of kind batch. `inconclusive`: why there is no noise scale; `changes` replace whole entries."""
    rng = random.Random(seed)
    data: dict[str, Any] = {
        **COMMON,
        "kind": "batch",
        "cached": False,
        "why": None,
        "seconds": 251.0,
        "budget_s": 300.0,
        "environment": copy.deepcopy(ENVIRONMENT),
        "config": copy.deepcopy(CONFIG),
        "command": ["bert-dp", "tune", "batch", "crammed-bert"],
        "dp": RANKS,
        "tensor": 1,
        "engine": "ddp",
        "launcher": "torchrun",
        "device": "cpu",
        "global_batch": GLOBAL,
        "sequence_length": SEQUENCE,
        "trials": 12,
        "trial_samples": GLOBAL,
        "order": [8, 1, 32, 4, 16, 2, 8],
        "memory": _memory(rng),
        "sizes": [_size(rng, micro, rate) for micro, rate in RATES.items()],
        "drift": {"micro_batch": 8, "first": 208.9, "last": 207.1, "ratio": 207.1 / 208.9},
        "choice": {
            "micro_batch": CHOSEN,
            "accumulation": GLOBAL // CHOSEN // RANKS,
            "best_micro_batch": 32,
            "samples_per_s": RATES[CHOSEN],
            "best_samples_per_s": RATES[32],
            "share_of_best": RATES[CHOSEN] / RATES[32],
            "flat": False,
            "not_settled": [],
            "limited_by": "memory",
            "why": "the smallest within 3 % of the best",
        },
        "noise": _noise(rng),
        "goodput": _goodput(),
    }
    if inconclusive:
        data["noise"] |= {
            "verdict": "inconclusive",
            "why": inconclusive,
            "noise_scale": None,
            "interval": None,
        }
        data["goodput"] = None
    return {**data, **changes}


def unmeasured() -> dict[str, Any]:
    """A search of the micro batch that was stopped before its first trial ended."""
    found = batch(status="partial", environment={}, config={}, trials=None, seconds=None)
    return found | dict.fromkeys(("memory", "sizes", "drift", "choice", "noise", "goodput", "order"))


def lr(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Of kind lr: two short rungs and the last one of three seeds; the highest rate has diverged."""
    rng = random.Random(seed)
    rates = [0.004 / 2**k for k in range(5)]
    every = [("adamw", 0.01, rate) for rate in rates]
    first = _rung(rng, 131_072, [0], every)
    order = sorted(every, key=lambda c: _loss(c, 131_072))
    second = _rung(rng, 262_144, [0], order[:3])
    last = _rung(rng, 1_048_576, [0, 1, 2], order[:2]) | {"last": True}
    first["kept"], second["kept"] = [list(c) for c in order[:3]], [list(c) for c in order[:2]]
    best = order[0]
    losses = [t["heldout_loss"] for t in last["trials"] if t["lr"] == best[2]]
    tokens = sum(t["tokens"] for rung in (first, second, last) for t in rung["trials"])
    data: dict[str, Any] = {
        **COMMON,
        "kind": "lr",
        "ranks": 1,
        "at_a_time": 2,
        "seconds": 1231.0,
        "settings": {"rates": 5, "seeds": 3},
        "environment": copy.deepcopy(ENVIRONMENT),
        "config": copy.deepcopy(CONFIG),
        "command": ["bert-dp", "tune", "lr", "quickstart"],
        "unigram_entropy_nats": 6.9,
        "range_test": _range_test(),
        "rungs": [first, second, last],
        "choice": {
            "lr": best[2],
            "weight_decay": best[1],
            "optimizer": best[0],
            "heldout_loss": sum(losses) / len(losses),
            "band": [min(losses), max(losses)],
            "sd": 0.004,
            "seeds": 3,
            "at_edge": False,
            "edge_side": None,
            "tied": [],
            "why": "the lowest mean of 3 seeds",
        },
        "cost": {"tokens": tokens, "grid_tokens": 15 * 1_048_576, "trials": 15},
        "transfer": None,
    }
    return {**data, **changes}


def transfer() -> dict[str, Any]:
    """A rate carried from one global batch to another."""
    rules = [
        {
            "rule": "sqrt",
            "for": "Adam and AdamW",
            "lr": 0.004,
            "equation": "0.004 = 0.001 x sqrt(4096 / 256)",
            "beta1": None,
            "beta2": 0.84,
            "eps": 2.5e-9,
            "source": "arXiv 2205.10287",
        },
        {
            "rule": "linear",
            "for": "SGD",
            "lr": 0.016,
            "equation": "0.016 = 0.001 x 4096 / 256",
            "source": "arXiv 1706.02677",
        },
    ]
    return {
        "from_batch": 256,
        "to_batch": 4096,
        "ratio": 16.0,
        "lr": 0.001,
        "lr_source": "optim.lr",
        "optimizer": "adamw",
        "rules": rules,
        "ours": "sqrt",
    }


def gib(micro: float) -> float:
    """What the line predicts."""
    return CONSTANT_GIB + LINE[0] + LINE[1] * micro


def _memory(rng: random.Random) -> dict[str, Any]:
    tried = [
        {
            "micro_batch": micro,
            "status": status,
            "predicted_gib": gib(micro),
            "rank": rank,
            "measured_gib": gib(micro) * rng.uniform(0.98, 1.02) if status == "ok" else None,
        }
        for micro, status, rank in ((2, "ok", 1), (51, "oom", None), (45, "ok", 0))
    ]
    line = {
        "source": "fake tensors",
        "why": None,
        "precision": "fp32",
        "ranks": RANKS,
        "sizes": [2, 4],
        "peak_bytes": [(LINE[0] + LINE[1] * b) * GIB for b in (2, 4)],
        "intercept_bytes": LINE[0] * GIB,
        "bytes_per_sequence": LINE[1] * GIB,
        "parts": {name: [a * GIB, c * GIB] for name, (a, c) in PARTS.items()},
    }
    return {
        "limit_gib": LIMIT_GIB,
        "limit_of": "this machine / 2 ranks",
        "spare": 0.1,
        "constant_gib": CONSTANT_GIB,
        "predicted_limit": 51,
        "verified": 45,
        "line": line,
        "tried": tried,
        "parts_gib": {
            "program and libraries": CONSTANT_GIB,
            **{name: a + c * CHOSEN for name, (a, c) in PARTS.items()},
        },
    }


def _size(rng: random.Random, micro: int, rate: float) -> dict[str, Any]:
    runs = [_run(rng, f"micro-{micro}-r{k}", micro, rate) for k in range(2 if micro >= 8 else 1)]
    accumulation = GLOBAL // micro // RANKS
    return {
        "micro_batch": micro,
        "accumulation": accumulation,
        "trial_accumulation": accumulation,
        "status": "ok",
        "why": None,
        "samples_per_s": rate,
        "samples_per_s_ci95": [0.98 * rate, 1.02 * rate] if len(runs) > 1 else None,
        "relative": rate / RATES[32],
        "predicted_gib": gib(micro),
        "measured_gib": max(peak for run in runs for peak in run["peak_gib"]),
        "runs": runs,
    }


def _run(rng: random.Random, name: str, micro: int, rate: float) -> dict[str, Any]:
    steps = [GLOBAL / rate * rng.uniform(0.98, 1.02) for _ in range(10)]
    return {
        "name": name,
        "step_s": steps,
        "forward_backward_s": [0.9 * s for s in steps],
        "peak_gib": [gib(micro) * rng.uniform(0.98, 1.01) for _ in range(RANKS)],
        "alloc_retries": None,
    }


def _noise(rng: random.Random) -> dict[str, Any]:
    small, trace, pairs = GLOBAL // RANKS, 0.62, []
    grad = trace / NOISE[0]
    for last in (20, 40, 60, 80):
        small_sq, big_sq = (
            [(grad + trace / b) * rng.lognormvariate(0, 0.15) for _ in range(20)] for b in (small, GLOBAL)
        )
        pairs.append(
            {"step": last, "small_batch": small, "big_batch": GLOBAL, "small_sq": small_sq, "big_sq": big_sq}
        )
    return {
        "verdict": "ok",
        "why": None,
        "noise_scale": NOISE[0],
        "interval": list(NOISE[1:]),
        "grad_sq": grad,
        "trace": trace,
        "steps": 80,
        "of_steps": 80,
        "init_from": None,
        "pairs": pairs,
    }


def _goodput() -> dict[str, Any]:
    def at(size: int, noise: float) -> float:
        return size / (size / 235 + 0.03) * (GLOBAL + noise) / (size + noise)

    points = []
    for size in [2**k for k in range(4, 12)]:
        low, high = sorted(at(size, end) for end in NOISE[1:])
        points.append(
            {
                "global_batch": size,
                "samples_per_s": size / (size / 235 + 0.03),
                "low": low,
                "high": high,
                "efficiency": (GLOBAL + NOISE[0]) / (size + NOISE[0]),
                "goodput": at(size, NOISE[0]),
            }
        )
    return {
        "points": points,
        "recommended": 64,
        "recommended_interval": [32, 64],
        "declared": GLOBAL,
        "gain": at(64, NOISE[0]) / at(GLOBAL, NOISE[0]) - 1,
    }


def _loss(candidate: tuple[str, float, float], tokens: int) -> float:
    name, _, rate = candidate
    return 5.6 + 3e4 / tokens + 0.08 * math.log2(rate / 0.001) ** 2 + 0.15 * (name != "adamw")


def _rung(
    rng: random.Random, tokens: int, seeds: Sequence[int], candidates: Sequence[tuple[str, float, float]]
) -> dict[str, Any]:
    trials = []
    for name, decay, rate in candidates:
        for seed in seeds:
            bad = rate >= 0.004
            loss = 7.4 if bad else _loss((name, decay, rate), tokens) + rng.gauss(0, 0.004)
            curve = [[tokens * k // 8, loss + 2.5 * (1 - k / 8) ** 2] for k in range(1, 9)]
            trials.append(
                {
                    "trial": f"{name}-wd{decay:g}-lr{rate:g}-t{tokens}-s{seed}",
                    "lr": rate,
                    "weight_decay": decay,
                    "optimizer": name,
                    "seed": seed,
                    "status": "diverged" if bad else "ok",
                    "cause": "7.4 nats, above the unigram entropy 6.9" if bad else None,
                    "heldout_loss": loss,
                    "tokens": tokens,
                    "seconds": tokens / 9_000,
                    "curve": curve,
                }
            )
    return {"tokens": tokens, "seeds": list(seeds), "last": False, "trials": trials, "kept": []}


def _range_test() -> dict[str, Any]:
    points = [[1e-5 * 10 ** (k / 25), 9.6 - 2.4 * k / 75] for k in range(76)]
    points += [[1e-2 * 10 ** (k / 25), 7.2 + 0.02 * math.exp(k)] for k in range(1, 10)]
    return {
        "points": points,
        "edge": points[-4][0],
        "why": "the loss rose 0.81 nats above its minimum",
        "trial": "range-test",
    }
