"""Runs the grid: one real run per cell and repeat, then the links, one rank's profile, the matmul rate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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


def run_grid(grid: Grid, runs: Runner, log: Log) -> None:
    """What an earlier call has not measured yet. Raises Stopped."""
    _run_cells(grid, runs, log)
    _measure_links(grid, runs, log)
    _measure_profile(grid, runs, log)
    _measure_peak(grid, runs, log)


def _run_cells(grid: Grid, runs: Runner, log: Log) -> None:
    """Every run that has not ended yet. A cell that failed or ran out of memory is not repeated: that is its
    result."""
    cells: dict[Path, GridCell] = {}
    trials: list[Trial] = []
    for cell, repeat in grid.order():
        directory = run_dir(runs.out, cell, repeat)
        trials.append(Trial(directory, grid.config_of(cell), cell.world_size, _cores(grid, cell.world_size)))
        cells[directory] = cell
    earlier = {trial.directory: ended for trial in trials if (ended := earlier_outcome(trial)) is not None}
    lost = {cells[path].id: (path, ended.status) for path, ended in earlier.items() if ended.status != "ok"}
    progress = Progress([1.0] * len(trials), log)
    if earlier:
        log(f"resuming: {len(earlier)} of {len(trials)} runs already done")

    def due() -> Iterator[Trial]:
        for trial in trials:
            if trial.directory in earlier or cells[trial.directory].id in lost:
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
        progress.ended(1.0, outcome.seconds, f"{trial.name}: {how}")
    for name, (path, status) in lost.items():
        log(f"{name}: {status}; to run it again remove {path}")


def cores_of(ranks: int, most: int) -> tuple[int, ...]:
    """The cores that `ranks` CPU ranks may use so that each has as many as one of `most` ranks: on a CPU the
    device is a share of the cores. All of them when there are fewer cores than ranks."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    share = len(cores) // most
    return cores[: ranks * share] if share else cores


def _cores(grid: Grid, ranks: int) -> tuple[int, ...] | None:
    """None on GPUs: all of them."""
    return None if grid.on_gpu else cores_of(ranks, max(grid.settings.gpus))


def _measure_links(grid: Grid, runs: Runner, log: Log) -> None:
    """links-N.json: all-reduces over each number of ranks, at a sweep of sizes and DDP's real buckets."""
    for count in sorted({c.world_size for c in grid.cells if c.world_size > 1}):
        path = runs.out / f"links-{count}.json"
        if (link := results.find(path, results.Link)) is not None and link.points:
            continue
        buckets = _bucket_sizes(grid, runs.out, count)
        sizes = sorted({*SWEEP, *buckets})
        log(f"links: all-reduce over {count} ranks at {len(sizes)} sizes")
        arguments = [str(count), str(LINK_S), *map(str, sizes)]
        lines = runs.helper("bert_dp.measure.all_reduce", arguments)
        points = [
            results.LinkPoint(
                bytes=line["bytes"],
                seconds=line["seconds_median"],
                busbw_gb_s=line["busbw_gb_s"],
                algbw_gb_s=line["bytes"] / line["seconds_median"] / 1e9,
                repeats=line["repeats"],
                bucket=any(abs(line["bytes"] - size) < 8 for size in buckets),
            )
            for line in lines
        ]
        if len(points) == len(sizes):  # else it is measured again
            link = results.Link(world_size=count, backend=lines[0]["backend"], points=points)
            results.write(path, link)


def _bucket_sizes(grid: Grid, out: Path, count: int) -> list[int]:
    """Bytes of each bucket that DDP reduced over `count` ranks."""
    for cell in grid.cells:
        if cell.world_size == count and cell.kind == "run" and cell.tensor == 1:
            summary = read_summary(run_dir(out, cell, 0))
            if summary is not None and summary.ddp is not None and summary.ddp.bucket_bytes:
                return sorted({*summary.ddp.bucket_bytes})
    return []


def _measure_profile(grid: Grid, runs: Runner, log: Log) -> None:
    """profile.json: one rank's step, taken apart."""
    kept = runs.out / "profile.json"
    if results.find(kept, results.Profile) is not None:
        return
    config = grid.config_of(next(cell for cell in grid.cells if cell.engine == "single"))
    batch = config.batch.model_copy(update={"global_size": config.batch.micro_size})
    data = config.data.model_copy(update={"synthetic": True})
    path = runs.scratch / "profile.yaml"
    record.write_text(path, dump_config(config.model_copy(update={"batch": batch, "data": data})))
    log("profile: when each gradient is ready")
    _keep_last_line(grid, runs, "profiling", [str(path)], results.Profile, kept)


def _measure_peak(grid: Grid, runs: Runner, log: Log) -> None:
    """peak.json: the matmul rate of one rank's device."""
    kept = runs.out / "peak.json"
    if results.find(kept, results.PeakFile) is not None:
        return
    log("peak: the matmul rate of one device")
    _keep_last_line(grid, runs, "peak", [grid.precision, "2"], results.PeakFile, kept)


def _keep_last_line(
    grid: Grid, runs: Runner, program: str, arguments: list[str], model: type[results.StoredFile], path: Path
) -> None:
    """Write the last line that a program of bert_dp.measure prints on one rank's device; one that contradicts
    itself is told, and not kept."""
    lines = runs.helper(f"bert_dp.measure.{program}", arguments, _cores(grid, 1))
    if lines:
        try:
            results.write(path, results.parse(lines[-1], model, path.name))
        except ConfigError as error:
            complain(f"warning: {error}")
