"""`batch.micro_size: auto`: find the micro batch before the run starts, in the cache or by a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp import record
from bert_dp.config import ConfigError, load_config, micro_is_auto, read_manifest, resolve
from bert_dp.config.checks import ProfilePlan
from launcher import job, results
from launcher.log import PLAIN, show
from launcher.output import identity
from launcher.report.run_report import PAGE
from launcher.run.run_directory import start_issues
from launcher.run.train import check_profile

if TYPE_CHECKING:
    from rich.console import Console

BUDGET_S = 300.0


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

    A run that goes on keeps its own size. The search writes to the cache, so a stopped one goes on. A dry run
    starts none: without a cached search it shows the smallest size. Raises ConfigError, also for steps or
    ranks of `profile` that the run does not have.
    """
    path = job.find_config(name, run_dir)
    if not micro_is_auto(path, overrides):
        return list(overrides), 0

    def with_micro(size: int, why: str) -> tuple[list[str], int]:
        show(console, f"batch.micro_size: auto = {size}, {why}", **PLAIN)
        return [*overrides, f"batch.micro_size={size}"], 0

    own = run_dir / "config.yaml" if run_dir else None
    if own is not None and own.exists():
        return with_micro(load_config(own).batch.micro_size, "as this run has it")
    earlier = None if resume in ("auto", "never") else record.newest_checkpoint_facts(Path(resume))
    if earlier is not None:
        return with_micro(resolve([earlier[1].config]).batch.micro_size, "as the run of --resume has it")
    from launcher.tune import FILE, batch, cache
    from launcher.tune.throughput import TuneBatch

    setup = batch.load(name, overrides, run_dir)
    options = batch.BatchOptions(nproc, BUDGET_S, None, launcher)
    spec = batch.search_spec(setup, options)
    folder = setup.directory(run_dir, "runs")
    if issues := start_issues(setup, folder, resume) or record.cache_issues():
        raise ConfigError(issues)
    check_profile(profile, setup.config, spec.ranks, folder, resume)
    machine = setup.machine.to_json()
    key = cache.key(spec, machine)
    kept = cache.find(key, 0.0, spec.limit_gib)
    if kept is not None and kept.choice is not None:
        return with_micro(kept.choice.micro_batch, f"measured on {kept.date}")
    if dry_run:
        return with_micro(
            spec.sizes[0], f"for this dry run; a search of {BUDGET_S / 60:.0f} min would find the best"
        )
    data_hash = read_manifest(job.prepare_data(spec.config)).hash
    facts = [spec.config.hash(), *sorted(identity(machine, data_hash).items())]
    folder = cache.path_of(key).with_suffix("") / cache.digest(facts)
    code = batch.tune_batch(
        name, overrides, options, out=folder, fresh=False, dry_run=False, as_json=False, console=console
    )
    if code:
        return list(overrides), code
    choice = results.read(folder / FILE, TuneBatch).choice
    assert choice is not None  # exit code 0
    return with_micro(choice.micro_batch, f"measured just now; {folder / PAGE}")
