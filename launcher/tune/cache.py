"""What an earlier search on the same devices, versions and model has found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher import results
from launcher.output import COMPARED
from launcher.results import BatchChoice, TuneBatch
from launcher.tune.batch_trials import Question

MORE = 1.1  # times the memory of the search that it bounded


def key(question: Question, machine: Mapping[str, Any]) -> str:
    """16 hex digits of all that decides how fast a micro batch is and whether it fits; the micro batch itself
    is not in it. `machine` is `Environment.to_json()`."""
    config = question.config
    gpus = [[gpu["name"], gpu["driver"], gpu["memory_gib"]] for gpu in machine["gpus"]]
    facts = {
        "devices": gpus if question.on_gpu else [machine["cpu_model"], machine["affinity_cores"]],
        "versions": {name: machine["versions"].get(name) for name in COMPARED},
        "model": config.model.model_dump(mode="json"),
        "sequence_length": config.data.sequence_length,
        "mask_rate": config.objective.mask_rate,
        "precision": question.precision,
        "compile": config.compile,
        "deterministic": config.run.deterministic,
        "workers": config.data.workers,
        "parallel": config.parallel.model_dump(mode="json"),
        "optimizer": config.optim.name,
        "batch": config.batch.model_dump(mode="json", exclude={"micro_size"}),
        "noise_scale": config.log.noise_scale,  # it asks for two batches
        "ranks": question.ranks,
        "launcher": question.launcher,
        "memory_gib": question.user_limit_gib,
    }
    return digest(facts)


def digest(facts: object) -> str:
    """16 hex digits of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def path_of(name: str) -> Path:
    """Where the search with this key is kept, below $BERT_DP_CACHE or ~/.cache/bert-dp."""
    return record.cache_root() / "tune" / f"{name}.json"


def find(name: str, budget_s: float, limit_gib: float | None) -> TuneBatch | None:
    """tune.json of a whole earlier search that had at least this budget, and whose choice is one for the
    memory that a rank may use now; None when there is none, or it is torn."""
    kept = None if record.cache_issues() else results.find(path_of(name), TuneBatch)
    if kept is None or kept.choice is None or (kept.budget_s or 0.0) < budget_s:
        return None
    return kept if _fits(kept, kept.choice, limit_gib) else None


def _fits(kept: TuneBatch, choice: BatchChoice, limit_gib: float | None) -> bool:
    """Whether the choice would be the same with this limit: its peak is below it, and if memory bounded the
    search, there is hardly more of it now."""
    if limit_gib is None or kept.memory is None:
        return limit_gib is None
    peaks = [size.measured_gib or 0.0 for size in kept.sizes or () if size.micro_batch == choice.micro_batch]
    then = kept.memory.limit_gib
    more = choice.limited_by == "memory" and then is not None and limit_gib > MORE * then
    return bool(peaks) and max(peaks) <= limit_gib and not more


def keep(name: str, tune: TuneBatch) -> None:
    """Raises OSError, also where the cache is not to be trusted."""
    if issues := record.cache_issues():
        raise PermissionError(issues[0])
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    results.write(path_of(name), tune)
