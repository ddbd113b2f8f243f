"""tune.json of both searches: of real ones (tests/golden), with what so small ones do not show made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bert_dp.cost import GIB
from launcher import results
from launcher.tune import curve
from launcher.tune.transfer import transfer as carried
from tests.helpers import make_config
from tests.scaling_fixture import ENVIRONMENT

MADE = Path(__file__).parent / "golden/made"
NOISE, DECLARED = 310.0, 16  # sequences
INTERVAL = [255.0, 391.0]
TOO_LARGE = 12


def recorded(kind: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MADE / kind / "tune.json").read_text())
    return {**data, "environment": ENVIRONMENT, "command": ["bert-dp", "tune", kind]}


def batch(*, inconclusive: str = "", **changes: Any) -> dict[str, Any]:
    """A settled choice on a steady machine, a size that is too large, a noise scale or why it is
    `inconclusive`. `changes` replace whole entries."""
    data = recorded("batch")
    data["choice"]["not_settled"] = []
    data["drift"] |= {"last": 130.0, "ratio": 130.0 / data["drift"]["first"]}
    data["memory"] |= {"limit_gib": 0.5, "predicted_limit": 20}
    too_large = {"micro_batch": TOO_LARGE, "status": "oom", "predicted_gib": predicted_gib(data, TOO_LARGE)}
    data["memory"]["tried"].append(too_large)
    if inconclusive:
        data["noise"]["why"] = inconclusive
    else:
        estimate = {"verdict": "ok", "why": None, "noise_scale": NOISE, "interval": INTERVAL}
        data["noise"] |= {**estimate, "trace": 0.62, "grad_sq": 0.002}
        goodput = curve.goodput(
            micro_s=0.07,
            update_s=0.02,
            per_pass=8,
            global_size=DECLARED,
            noise=NOISE,
            interval=INTERVAL,
            sizes=[2**k for k in range(3, 10)],
        )
        data["goodput"] = results.plain(goodput)
    return {**data, **changes}


def unmeasured() -> dict[str, Any]:
    """A search of the micro batch that was stopped before its first trial ended."""
    partial = batch(status="partial", environment={}, config={}, trials=None, seconds=None)
    return partial | dict.fromkeys(("memory", "sizes", "drift", "choice", "noise", "goodput", "order"))


def predicted_gib(data: dict[str, Any], micro: float) -> float:
    """By the line of a search of the micro batch."""
    memory = data["memory"]
    counted = memory["line"]["intercept_bytes"] + memory["line"]["bytes_per_sequence"] * micro
    return float(memory["constant_gib"] + counted / GIB)


def lr(**changes: Any) -> dict[str, Any]:
    """Two rungs, a rate that has diverged, a finalist of one seed. `changes` replace whole entries."""
    data = recorded("lr")
    del data["settings"]["trials"]  # of an older program
    return {**data, **changes}


def transfer() -> dict[str, Any]:
    """A rate carried from one global batch to another."""
    config = make_config("optim.lr_scaling=sqrt", "optim.lr_batch=256", "optim.beta2=0.99")
    return results.plain(carried(config, 0.001, "optim.lr", 256, 4096))
