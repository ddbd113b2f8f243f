"""Run a scaling benchmark (`bert-dp scale`): time all cells, all-reduces, one rank's step and matmuls."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bert_dp import files
from bert_dp.config import ConfigError, Issue, dump_config
from launcher import job, results
from launcher.job import Output, VerbOptions
from launcher.log import Log
from launcher.report.formats import count_of, format_si
from launcher.report.page import Report
from launcher.run import trials
from launcher.run.trials import Runner, Slot, Trial
from launcher.scale import models
from launcher.scale.analyze import analyze, diagnose
from launcher.scale.grid import Grid, Settings, run_dir
from launcher.scale.scale_page import FILE, scale_page

PLAN = "grid.json"
MUST_MATCH = ("config_hash", "settings", "cells")
MAY_INCREASE = ("settings.repeats",)
SIZES = tuple(4**k for k in range(6, 14))  # message sizes in bytes, 4 KiB to 64 MiB
SIZE_S = 0.3  # seconds of measurement per message size


def scale(
    name: str | None,
    overrides: Sequence[str],
    settings: Settings,
    how: VerbOptions,
    predict: Callable[[models.Scaling], models.Prediction | None],
) -> int:
    """Run the benchmark and return the exit code. `predict` returns predictions for the measured cells.

    Raise ConfigError with all issues before the first run starts.
    """
    setup = job.load(name, overrides)
    folder = setup.directory(how.out, "scaling")
    grid = Grid(setup.config, settings, setup.machine, on_gpu=setup.gpus > 0)
    output = Output(folder, "grid", PLAN, plan_of(grid), MUST_MATCH, MAY_INCREASE)
    issues: list[Issue] = [*job.input_issues(setup.config), *setup.device_issues(max(settings.gpus))]
    issues += [*grid.issues, *output.issues()]
    if issues:
        raise ConfigError(issues)

    log = how.log(setup)
    describe(grid, folder, log, overrides, cores=setup.machine.affinity_cores)

    def run() -> tuple[models.Scaling, Report, int]:
        scaling, outcome = measure(grid, output, log)
        scaling = scaling.model_copy(update={"prediction": predict(scaling)})
        results.write(folder / FILE, scaling)
        has_result = any(cell.status == "ok" for cell in scaling.cells)
        return scaling, scale_page(scaling, folder), outcome.exit_code or int(not has_result)

    return how.measure(output, run)


def plan_of(grid: Grid) -> models.GridFile:
    """Return the contents of grid.json. Its values are plain JSON and can be compared with a stored file."""
    return models.GridFile(
        config_hash=grid.config.hash(),
        config=grid.config.model_dump(mode="json"),
        settings=json.loads(json.dumps(dataclasses.asdict(grid.settings))),
        cells=[results.plain(cell) for cell in grid.cells],
        order=[[cell.id, repeat] for cell, repeat in grid.order()],
    )


def describe(grid: Grid, folder: Path, log: Log, overrides: Sequence[str], *, cores: int) -> None:
    """Log the cells and warnings before the first run. `cores`: number of cores that this process may use."""
    settings = grid.settings
    log(f"scaling benchmark: {folder}")
    log(
        f"{count_of(len(grid.cells), 'cell')} x {count_of(settings.repeats, 'repeat')} in random order, "
        f"{settings.warm_up} warm-up and {settings.steps} timed steps each"
    )
    for cell in grid.cells:
        split = f", tensor {cell.tensor}" if cell.tensor > 1 else ""
        batch = f"{cell.micro_batch} x accumulation {cell.accumulation} x dp {cell.world_size // cell.tensor}"
        ranks = f"{count_of(cell.world_size, 'rank')}{split}"
        log(f"  {cell.id}: {ranks}, global batch {cell.global_batch} = micro {batch}")
    ceilings = {(cell.mode, cell.world_size) for cell in grid.cells if cell.kind == "ceiling"}
    wanted = {(mode, n) for mode in settings.modes for n in settings.gpus if n > 1}
    for mode, n in sorted(wanted - ceilings):
        reason = "the batch cannot be split among independent copies, or the copies do not fit in memory"
        log(f"warning: {mode} mode, {n} ranks: ceiling and exposed communication are unknown: {reason}")
    for line in grid.overridden(overrides):
        log(f"warning: {line}")
    if not grid.on_gpu and max(settings.gpus) > cores:
        log("warning: there are more CPU ranks than cores, so efficiency is meaningless")


def measure(
    grid: Grid, output: Output[models.GridFile], log: Log
) -> tuple[models.Scaling, trials.SearchOutcome]:
    """Run the grid and return its result with verdicts. After a stop signal, the result is partial."""
    out = output.path
    facts, *_ = output.begin(grid.config)
    slots, launcher = [Slot()], grid.settings.launcher
    with trials.runner(out, slots, launcher=launcher, on_gpu=grid.on_gpu, log=log) as runs:
        outcome = trials.run_to_end(lambda: run_grid(grid, runs, log), out, log)
    scaling = analyze(grid, out, facts=facts)
    status = {"status": outcome.status} if outcome.exit_code else {}
    return scaling.model_copy(update={"verdicts": diagnose(scaling.cells), **status}), outcome


def run_grid(grid: Grid, runs: Runner, log: Log) -> None:
    """Run all measurements that earlier starts have not finished. Raise Stopped after a stop signal."""
    _run_cells(grid, runs, log)
    _measure_links(grid, runs, log)
    _measure_device(grid, runs, log)


def _run_cells(grid: Grid, runs: Runner, log: Log) -> None:
    """Run all unfinished repeats, except in cells where a repeat has failed or run out of memory."""
    cells = {run_dir(runs.out, cell, repeat): cell for cell, repeat in grid.order()}
    pending = [
        Trial(path, grid.config_of(cell), cell.world_size, cores_of(grid, cell.world_size))
        for path, cell in cells.items()
    ]
    found = {trial.directory: trials.earlier_outcome(trial) for trial in pending}
    earlier = {path: outcome for path, outcome in found.items() if outcome is not None}
    lost = {cells[path].id: path for path, outcome in earlier.items() if outcome.status != "ok"}
    progress = trials.Progress([1.0] * len(pending), log)
    if earlier:
        log(f"resuming: {len(earlier)} of {len(pending)} runs already done")

    def due() -> Iterator[Trial]:
        for trial in pending:
            if trial.directory in earlier or cells[trial.directory].id in lost:
                progress.skip(1.0)
            else:
                yield trial

    for trial, outcome in runs.run(due()):
        if outcome.status == "ok":
            summary = trials.read_summary(trial.directory)
            rate = format_si(summary.tokens_per_s if summary else None, "tokens/s")
            text = f"{rate} over {count_of(trial.ranks, 'rank')}, including warm-up"
        else:
            lost[cells[trial.directory].id] = trial.directory
            text = f"{outcome.status}: {trials.cause(trial.directory)}"
        progress.ended(1.0, outcome.seconds, f"{trial.name}: {text}")
    for name, path in lost.items():
        log(f"{name}: no result; to run this cell again, remove {path}")


def cores_of(grid: Grid, ranks: int) -> tuple[int, ...] | None:
    """Return the cores on which `ranks` CPU ranks run; None for GPUs.

    In every cell, a rank has as many cores as in the largest cell. If the largest cell has more
    ranks than this process has cores, return all cores.
    """
    if grid.on_gpu:
        return None
    cores = tuple(sorted(os.sched_getaffinity(0)))
    share = len(cores) // max(grid.settings.gpus)
    return cores[: ranks * share] if share else cores


def _measure_links(grid: Grid, runs: Runner, log: Log) -> None:
    """Measure all-reduces of several sizes for each number of ranks N, and write links-N.json."""
    for count in sorted({c.world_size for c in grid.cells if c.world_size > 1}):
        path = runs.out / f"links-{count}.json"
        if results.find(path, models.MeasuredLink) is not None:
            continue
        log(f"measuring all-reduces over {count} ranks at {len(SIZES)} message sizes")
        lines = runs.helper("bert_dp.measure.all_reduce", [str(count), str(SIZE_S), *map(str, SIZES)])
        if len(lines) == len(SIZES):  # otherwise, the next start repeats the measurement
            points = [{**line, "seconds": line["seconds_median"]} for line in lines]
            link = {"world_size": count, "backend": lines[0]["backend"], "points": points}
            results.write(path, results.parse(link, models.MeasuredLink, path.name))


def _measure_device(grid: Grid, runs: Runner, log: Log) -> None:
    """Measure one rank's step and its device's matmul rate; write profile.json and peak.json."""
    config = grid.config_of(next(cell for cell in grid.cells if cell.engine == "single"))
    batch = config.batch.model_copy(update={"global_size": config.batch.micro_size})
    data = config.data.model_copy(update={"synthetic": True})
    path = runs.scratch / "profile.yaml"
    files.write_text(path, dump_config(config.model_copy(update={"batch": batch, "data": data})))
    programs: list[tuple[str, type[results.StoredFile], str, list[str]]] = [
        ("profile.json", models.StepProfile, "profile_step", [str(path)]),
        ("peak.json", models.Peak, "matmul_peak", [grid.precision, "2"]),
    ]
    for file, model, program, arguments in programs:
        if results.find(runs.out / file, model) is None:
            log(f"measuring one device, to write {file}")
            if lines := runs.helper(f"bert_dp.measure.{program}", arguments, cores_of(grid, 1)):
                results.write(runs.out / file, results.parse(lines[-1], model, file))
