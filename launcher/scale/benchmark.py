"""`bert-dp scale`: a grid of real runs, and what each number of ranks contributed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import ConfigError
from launcher import job, results
from launcher.log import Log, logger
from launcher.output import Output, publish
from launcher.report.numbers import count_of
from launcher.run import trials
from launcher.run.trials import Slot, Stopped
from launcher.scale.collect import collect
from launcher.scale.columns import write_csv
from launcher.scale.grid import Grid, Settings
from launcher.scale.run_grid import measure_links, measure_peak, measure_profile, run_grid
from launcher.scale.scale_report import FILE, scale_report
from launcher.scale.verdict import verdicts

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "grid.json"
FIXED = ("config_hash", "settings", "cells")
GROWS = ("settings.repeats",)


def scale(
    name: str | None,
    overrides: Sequence[str],
    settings: Settings,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
    predict: Callable[[results.Scaling], results.Prediction | None],
) -> int:
    """Returns the exit code. `predict` gives what is predicted for the measured cells. Raises ConfigError
    before any run starts, with every cell that cannot run."""
    asked = job.load(name, overrides)
    folder = asked.directory(out, "scaling")
    grid = Grid(asked.config, settings, asked.machine, on_gpu=asked.gpus > 0)
    output = Output(folder, "grid", PLAN, plan_of(grid), FIXED, GROWS)
    issues = [*asked.issues(folder, "--out"), *asked.device_issues(max(settings.gpus))]
    if issues := [*issues, *grid.issues, *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    describe(grid, folder, log, overrides, cores=None if asked.gpus else asked.machine.affinity_cores)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.claim():
        return run_locked(
            grid, output, on_gpu=asked.gpus > 0, as_json=as_json, console=console, predict=predict
        )


def plan_of(grid: Grid) -> results.GridFile:
    """grid.json: what is to be run. JSON values only, so that it compares with what was read back."""
    return results.GridFile(
        config_hash=grid.config.hash(),
        config=grid.config.model_dump(mode="json"),
        settings=json.loads(json.dumps(dataclasses.asdict(grid.settings))),
        cells=[results.plain(cell) for cell in grid.cells],
        order=[[cell.id, repeat] for cell, repeat in grid.order(len(grid.cells))],
    )


def describe(grid: Grid, folder: Path, log: Log, overrides: Sequence[str], *, cores: int | None) -> None:
    """What is about to run. `cores`: of this machine, where ranks run on them."""
    s = grid.settings
    log(f"scaling benchmark: {folder}")
    log(
        f"{count_of(len(grid.cells), 'cell')} x {count_of(s.repeats, 'repeat')}, "
        f"{s.warm_up} + {s.steps} steps each, in random order"
    )
    for cell in grid.cells:
        split = f", tensor {cell.tensor}" if cell.tensor > 1 else ""
        batch = f"{cell.micro_batch} x {cell.accumulation} x {cell.world_size // cell.tensor}"
        log(
            f"  {cell.id}: {count_of(cell.world_size, 'rank')}{split}, "
            f"global batch {cell.global_batch} = {batch}"
        )
    for mode in s.modes:
        for count in [n for n in s.gpus if n > 1]:
            if not any(c.id == f"{mode}-ceiling-n{count}" for c in grid.cells):
                log(
                    f"warning: {mode}, {count} ranks: the batch does not divide over as many copies; no "
                    "ceiling, and no exposed communication"
                )
    if "weak" in s.modes and "strong" not in s.modes:
        log("weak scaling trains another global batch at every N: losses are not compared")
    for name in grid.displaced(overrides):
        log(f"warning: --set {name} has no effect: the grid sets it, or nothing is saved in a measured run")
    if cores is not None and max(s.gpus) > cores:
        log("warning: more CPU ranks than cores: efficiency says nothing about the program")


def run_locked(
    grid: Grid,
    output: Output[results.GridFile],
    *,
    on_gpu: bool,
    as_json: bool,
    console: Console,
    predict: Callable[[results.Scaling], results.Prediction | None],
) -> int:
    """The grid, and its result; also what there is of it when a signal came."""
    log, out = logger(console, as_json), output.path
    begun = output.begin(grid.config)
    stopped = 0
    try:
        with trials.runner(out, [Slot()], launcher=grid.settings.launcher, on_gpu=on_gpu, log=log) as runs:
            run_grid(grid, out, runs, on_gpu=on_gpu, log=log)
            measure_links(grid, out, runs, log)
            measure_profile(grid, out, runs, on_gpu=on_gpu, log=log)
            measure_peak(grid, out, runs, on_gpu=on_gpu, log=log)
    except Stopped as stop:
        stopped = stop.number
        log(f"stopped: {out} holds what was measured; the same command goes on")
    scaling = collect(grid, out, facts=begun.facts())
    judged = {"verdicts": verdicts(scaling.cells), "prediction": predict(scaling)}
    scaling = scaling.model_copy(update=judged | ({"status": "partial"} if stopped else {}))
    results.write(out / FILE, scaling)
    write_csv(scaling, out / "scaling.csv")
    publish(scaling, scale_report(scaling, out), out, as_json=as_json, console=console)
    ran = any(cell.status == "ok" for cell in scaling.cells)
    return 128 + stopped if stopped else 0 if ran else 1
