"""What an earlier search on the same devices, versions and model has found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config

VERSIONS = ("torch", "accelerate", "deepspeed", "bert-dp")


def key(
    config: Config, machine: Mapping[str, Any], *, ranks: int, on_gpu: bool, launcher: str,
    memory_gib: float | None,
) -> str:  # fmt: skip
    """16 hex digits of all that decides how fast a micro batch is and whether it fits; the micro batch itself
    is not in it. `machine` is `Environment.to_json()`."""
    gpus = [[gpu["name"], gpu["driver"], gpu["memory_gib"]] for gpu in machine["gpus"]]
    facts = {
        "devices": gpus if on_gpu else [machine["cpu_model"], machine["affinity_cores"]],
        "versions": {name: machine["versions"].get(name) for name in VERSIONS},
        "model": config.model.model_dump(mode="json"),
        "sequence_length": config.data.sequence_length,
        "mask_rate": config.objective.mask_rate,
        "precision": config.precision,
        "compile": config.compile,
        "parallel": config.parallel.model_dump(mode="json"),
        "optimizer": config.optim.name,
        "batch": config.batch.model_dump(mode="json", exclude={"micro_size"}),
        "noise_scale": config.log.noise_scale,  # it asks for two batches
        "ranks": ranks, "launcher": launcher, "memory_gib": memory_gib,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def path_of(name: str) -> Path:
    """Where the search with this key is kept, below $BERT_DP_CACHE or ~/.cache/bert-dp."""
    return record.cache_root() / "tune" / f"{name}.json"


def find(name: str, budget_s: float) -> dict[str, Any] | None:
    """tune.json of a whole earlier search that had at least this budget; None when there is none, or it is
    torn."""
    found = record.read_json(path_of(name)) or {}
    choice = found.get("choice")
    whole = isinstance(choice, dict) and isinstance(choice.get("micro_batch"), int)
    return found if whole and found.get("budget_s", 0.0) >= budget_s else None


def keep(name: str, tune: Mapping[str, Any]) -> None:
    """Raises OSError."""
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    record.write_json(path_of(name), dict(tune))
