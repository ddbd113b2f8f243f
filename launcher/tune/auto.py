"""`batch.micro_size: auto`: find the micro batch before the run starts, in the cache or by a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import files
from bert_dp.config import ConfigError, load_config, micro_is_auto, read_manifest, resolve
from bert_dp.config.checks import ProfilePlan
from bert_dp.config.manifest import hash_json
from launcher import job, results
from launcher.job import COMPARED, identity
from launcher.log import PLAIN, show
from launcher.report.run_page import PAGE
from launcher.run.train import check_profile, start_issues

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.tune.batch import BatchSearchSpec
    from launcher.tune.throughput import TuneBatch

BUDGET_S = 300.0
MAX_MEMORY_RATIO = 1.1  # of the present limit over that of a search that memory bounded


def resolve_auto_batch(
    name: str | None,
    overrides: Sequence[str],
    *,
    nproc: str,
    run_dir: Path | None,
    resume: str,
    launcher: str,
    dry_run: bool,
    console: Console,
    profile: ProfilePlan | None = None,
) -> tuple[list[str], int]:
    """Return the overrides with a number for `batch.micro_size: auto`, and the exit code of the search.

    A resumed run keeps its own size. The search is kept in the cache, so a stopped one goes on. A dry run
    starts none: without a cached search it shows the smallest size. Raises ConfigError, also for steps or
    ranks of `profile` that the run does not have.
    """
    path = job.find_config(name, run_dir)
    if not micro_is_auto(path, overrides):
        return list(overrides), 0

    def with_micro(size: int, origin: str) -> tuple[list[str], int]:
        show(console, f"batch.micro_size: auto = {size}, {origin}", **PLAIN)
        return [*overrides, f"batch.micro_size={size}"], 0

    own = run_dir / "config.yaml" if run_dir else None
    if own is not None and own.exists():
        return with_micro(load_config(own).batch.micro_size, "as this run has it")
    earlier = None if resume in ("auto", "never") else files.newest_checkpoint_facts(Path(resume))
    if earlier is not None:
        return with_micro(resolve([earlier[1].config]).batch.micro_size, "as the run of --resume has it")
    from launcher.tune import FILE, batch
    from launcher.tune.throughput import TuneBatch

    setup = batch.load(name, overrides, run_dir)
    options = batch.BatchOptions(nproc, BUDGET_S, None, launcher)
    spec = batch.search_spec(setup, options)
    folder = setup.directory(run_dir, "runs")
    if issues := start_issues(setup, folder, resume) or files.cache_issues():
        raise ConfigError(issues)
    check_profile(profile, setup.config, spec.ranks, folder, resume)
    machine = setup.machine.to_json()
    place = files.cache_root() / "tune" / cache_key(spec, machine)
    for file in sorted(place.glob(f"*/{FILE}")):
        kept = results.find(file, TuneBatch)
        if kept is not None and kept.choice is not None and still_holds(kept, spec.limit_gib):
            return with_micro(kept.choice.micro_batch, f"measured on {kept.date}")
    if dry_run:
        origin = f"for this dry run; a search of {BUDGET_S / 60:.0f} min would find the best"
        return with_micro(spec.sizes[0], origin)
    data_hash = read_manifest(job.prepare_data(spec.config)).hash
    out = place / digest([spec.config.hash(), identity(machine, data_hash)])
    code = batch.tune_batch(name, overrides, options, out=out, dry_run=False, as_json=False, console=console)
    if code:
        return list(overrides), code
    choice = results.read(out / FILE, TuneBatch).choice
    assert choice is not None  # exit code 0
    return with_micro(choice.micro_batch, f"measured just now; {out / PAGE}")


def cache_key(spec: BatchSearchSpec, machine: Mapping[str, Any]) -> str:
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
        }
    )


def digest(facts: object) -> str:
    """Return 16 hex digits of JSON values."""
    return hash_json(facts)[:16]


def still_holds(search: TuneBatch, limit_gib: float | None) -> bool:
    """Return True if a search is complete and its choice holds with this memory limit.

    Its peak must be below the limit, and if memory bounded the search, there must hardly be more of it now.
    """
    choice, before_gib = search.choice, search.memory.limit_gib
    if search.status != "complete" or choice is None:
        return False
    if limit_gib is None or before_gib is None:
        return limit_gib is None
    peaks = [size.measured_gib or 0.0 for size in search.sizes if size.micro_batch == choice.micro_batch]
    has_more = choice.limited_by == "memory" and limit_gib > MAX_MEMORY_RATIO * before_gib
    return max(peaks, default=math.inf) <= limit_gib and not has_more
