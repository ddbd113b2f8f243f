"""Cache of the micro batches that `tune batch` chose, by devices, versions and model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config.manifest import hash_json
from launcher import results
from launcher.output import COMPARED
from launcher.tune.throughput import TuneBatch

if TYPE_CHECKING:
    from launcher.tune.batch import BatchSearchSpec

MAX_MEMORY_RATIO = 1.1  # of the present limit over that of a search that memory bounded


def key(spec: BatchSearchSpec, machine: Mapping[str, Any]) -> str:
    """Hash everything that decides the speed and the memory of a micro batch, but the micro batch itself.

    `machine` is `Environment.to_json()`.
    """
    config = spec.config
    gpus = [[gpu["name"], gpu["driver"], gpu["memory_gib"]] for gpu in machine["gpus"]]
    return digest(
        {
            "devices": gpus if spec.on_gpu else [machine["cpu_model"], machine["affinity_cores"]],
            "versions": {name: machine["versions"].get(name) for name in COMPARED},
            "model": config.model.model_dump(mode="json"),
            "sequence_length": config.data.sequence_length,
            "mask_rate": config.objective.mask_rate,
            "precision": spec.precision,
            "compile": config.compile,
            "deterministic": config.run.deterministic,
            "workers": config.data.workers,
            "parallel": config.parallel.model_dump(mode="json"),
            "optimizer": config.optim.name,
            "batch": config.batch.model_dump(mode="json", exclude={"micro_size"}),
            "noise_scale": config.log.noise_scale,  # it needs two batches
            "ranks": spec.ranks,
            "launcher": spec.launcher,
            "memory_gib": spec.user_limit_gib,
        }
    )


def digest(facts: object) -> str:
    """Return 16 hex digits of JSON values."""
    return hash_json(facts)[:16]


def path_of(name: str) -> Path:
    """Return the file of the search with this key, below $BERT_DP_CACHE or ~/.cache/bert-dp."""
    return record.cache_root() / "tune" / f"{name}.json"


def find(name: str, budget_s: float, limit_gib: float | None) -> TuneBatch | None:
    """Return a complete search that had at least this budget, and whose choice holds with this limit.

    The choice holds if its peak is below the limit, and if memory bounded the search, there is hardly more of
    it now. Return None also for a damaged file.
    """
    kept = None if record.cache_issues() else results.find(path_of(name), TuneBatch)
    if kept is None or kept.choice is None or kept.budget_s < budget_s:
        return None
    if limit_gib is None or kept.memory.limit_gib is None:
        return kept if limit_gib is None else None
    peaks = [size.measured_gib or 0.0 for size in kept.sizes if size.micro_batch == kept.choice.micro_batch]
    more = kept.choice.limited_by == "memory" and limit_gib > MAX_MEMORY_RATIO * kept.memory.limit_gib
    return kept if peaks and max(peaks) <= limit_gib and not more else None


def keep(name: str, tune: TuneBatch) -> None:
    """Write a search into the cache. Raises OSError, also if other users can write to the cache."""
    if issues := record.cache_issues():
        raise PermissionError(issues[0])
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    results.write(path_of(name), tune)
