"""What an earlier search on the same devices, versions and model has found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config
from launcher.report.numbers import number

MORE = 1.1  # times the memory of the search that it bounded
VERSIONS = ("torch", "accelerate", "deepspeed", "bert-dp")


def key(
    config: Config,
    machine: Mapping[str, Any],
    *,
    ranks: int,
    on_gpu: bool,
    launcher: str,
    memory_gib: float | None,
) -> str:
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
        "ranks": ranks,
        "launcher": launcher,
        "memory_gib": memory_gib,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def path_of(name: str) -> Path:
    """Where the search with this key is kept, below $BERT_DP_CACHE or ~/.cache/bert-dp."""
    return record.cache_root() / "tune" / f"{name}.json"


def find(name: str, budget_s: float, limit_gib: float | None) -> dict[str, Any] | None:
    """tune.json of a whole earlier search that had at least this budget, and whose choice is one for the
    memory that a rank may use now; None when there is none, or it is torn."""
    found = {} if record.cache_issues() else record.read_json(path_of(name)) or {}
    choice = found.get("choice")
    if not isinstance(choice, dict) or not isinstance(choice.get("micro_batch"), int):
        return None
    short = (number(found.get("budget_s")) or 0.0) < budget_s
    return None if short or not _fits(found, limit_gib) else found


def _fits(found: Mapping[str, Any], limit_gib: float | None) -> bool:
    """Whether the choice would be the same with this limit: its peak is below it, and if memory bounded the
    search, there is hardly more of it now."""
    memory, choice = found.get("memory"), found["choice"]
    if limit_gib is None or not isinstance(memory, dict) or not isinstance(found.get("sizes"), list):
        return limit_gib is None
    peaks = [
        number(size.get("measured_gib")) or 0.0
        for size in found["sizes"]
        if isinstance(size, dict) and size.get("micro_batch") == choice["micro_batch"]
    ]
    then = number(memory.get("limit_gib"))
    more = choice.get("limited_by") == "memory" and then is not None and limit_gib > MORE * then
    return bool(peaks) and max(peaks) <= limit_gib and not more


def keep(name: str, tune: Mapping[str, Any]) -> None:
    """Raises OSError, also where the cache is not to be trusted."""
    if issues := record.cache_issues():
        raise PermissionError(issues[0])
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    record.write_json(path_of(name), dict(tune))
