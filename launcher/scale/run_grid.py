"""Runs the grid: one real run per cell and repeat, then the links, one rank's profile, the matmul rate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import ConfigError, dump_config
from launcher import results
from launcher.log import Log, complain
from launcher.report.numbers import count_of, format_si
from launcher.results import GridCell
from launcher.run.read_run import cause, read_summary
from launcher.run.trials import Progress, Runner, Trial, earlier_outcome
from launcher.scale.grid import Grid, run_dir

SWEEP = tuple(4**k for k in range(6, 14))  # bytes: 4 KiB to 64 MiB
LINK_S = 0.3  # per size


def run_grid(grid: Grid, out: Path, runs: Runner, *, on_gpu: bool, log: Log) -> None:
    """Every run that has not ended yet. A cell that failed or ran out of memory is not repeated: that is its
    result. Raises Stopped."""
    most = max(grid.settings.gpus)
    cells: dict[Path, GridCell] = {}
    trials: list[Trial] = []
    for cell, repeat in grid.order(len(grid.cells)):
        cores = None if on_gpu else tuple(cores_of(cell.world_size, most))
        directory = run_dir(out, cell, repeat)
        trials.append(Trial(directory, grid.config_of(cell), cell.world_size, cores))
        cells[directory] = cell
    ended = {trial.directory: outcome for trial in trials if (outcome := earlier_outcome(trial)) is not None}
    lost = {cells[path].id: (path, o.status) for path, o in ended.items() if o.status != "ok"}
    progress = Progress([1.0] * len(trials), log)
    if ended:
        log(f"resuming: {len(ended)} of {len(trials)} runs already done")

    def due() -> Iterator[Trial]:
        for trial in trials:
            if trial.directory in ended or cells[trial.directory].id in lost:
                progress.had(1.0)
            else:
                yield trial

    for trial, outcome in runs.run(due()):
        if outcome.status == "ok":
            summary = read_summary(trial.directory)
            rate = format_si(summary.tokens_per_s if summary else None, "tokens/s")
            how = f"{rate} over {count_of(trial.ranks, 'rank')}, warm-up included"
        else:
            lost[cells[trial.directory].id] = trial.directory, outcome.status
            how = f"{outcome.status}: {cause(trial.directory)}"
        progress.ended(1.0, f"{trial.name}: {how}")
    for name, (path, status) in lost.items():
        log(f"{name}: {status}; to run it again remove {path}")


def cores_of(ranks: int, most: int) -> list[int]:
    """The cores that `ranks` CPU ranks may use so that each has as many as one of `most` ranks: on a CPU the
    device is a share of the cores. All of them when there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // most
    return cores[: ranks * share] if share else cores


def measure_links(grid: Grid, out: Path, runs: Runner, log: Log) -> None:
    """links-N.json: all-reduces over each number of ranks, at a sweep of sizes and DDP's real buckets."""
    for count in sorted({c.world_size for c in grid.cells if c.world_size > 1}):
        path = out / f"links-{count}.json"
        if (link := results.find(path, results.Link)) is not None and link.points:
            continue
        buckets = bucket_sizes(grid, out, count)
        sizes = sorted({*SWEEP, *buckets})
        log(f"links: all-reduce over {count} ranks at {len(sizes)} sizes")
        arguments = [str(count), str(LINK_S), *map(str, sizes)]
        lines = runs.helper("bert_dp.measure.all_reduce", arguments)
        points = [
            results.LinkPoint(
                bytes=p["bytes"],
                seconds=p["seconds_median"],
                busbw_gb_s=p["busbw_gb_s"],
                algbw_gb_s=p["bytes"] / p["seconds_median"] / 1e9,
                repeats=p["repeats"],
                bucket=any(abs(p["bytes"] - size) < 8 for size in buckets),
            )
            for p in lines
        ]
        if points:
            link = results.Link(world_size=count, backend=lines[0]["backend"], points=points)
            results.write(path, link)


def bucket_sizes(grid: Grid, out: Path, count: int) -> list[int]:
    """Bytes of each bucket that DDP reduced over `count` ranks."""
    for cell in grid.cells:
        if cell.world_size == count and cell.kind == "run" and cell.tensor == 1:
            summary = read_summary(run_dir(out, cell, 0))
            if summary is not None and summary.ddp is not None and summary.ddp.bucket_bytes:
                return sorted({*summary.ddp.bucket_bytes})
    return []


def measure_profile(grid: Grid, out: Path, runs: Runner, *, on_gpu: bool, log: Log) -> None:
    """profile.json: one rank's step, taken apart."""
    if results.find(out / "profile.json", results.Profile) is not None:
        return
    lone = next(cell for cell in grid.cells if cell.engine == "single")
    config = grid.config_of(lone)
    batch = config.batch.model_copy(update={"global_size": config.batch.micro_size})
    data = config.data.model_copy(update={"synthetic": True})
    path = runs.scratch / "profile.yaml"
    record.write_text(path, dump_config(config.model_copy(update={"batch": batch, "data": data})))
    log("profile: when each gradient is ready")
    lines = runs.helper("bert_dp.measure.profiling", [str(path)], None if on_gpu else _one_share(grid))
    _keep(lines, results.Profile, out / "profile.json")


def measure_peak(grid: Grid, out: Path, runs: Runner, *, on_gpu: bool, log: Log) -> None:
    """peak.json: the matmul rate of one rank's device."""
    if results.find(out / "peak.json", results.PeakFile) is not None:
        return
    log("peak: the matmul rate of one device")
    cores = None if on_gpu else _one_share(grid)
    lines = runs.helper("bert_dp.measure.peak", [grid.precision, "2"], cores)
    _keep(lines, results.PeakFile, out / "peak.json")


def _keep(lines: Sequence[Any], model: type[results.StoredFile], path: Path) -> None:
    """Write the last line that a helper printed; one that contradicts itself is told, and not kept."""
    if lines:
        try:
            results.write(path, results.parse(lines[-1], model, path.name))
        except ConfigError as error:
            complain(f"warning: {error}")


def _one_share(grid: Grid) -> list[int]:
    return cores_of(1, max(grid.settings.gpus))
