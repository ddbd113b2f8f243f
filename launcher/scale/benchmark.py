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
from launcher.run.trials import Ending, Slot, run_to_end
from launcher.scale.collect import collect
from launcher.scale.columns import write_csv
from launcher.scale.grid import Grid, Settings
from launcher.scale.run_grid import run_grid
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
    setup = job.load(name, overrides)
    folder = setup.directory(out, "scaling")
    grid = Grid(setup.config, settings, setup.machine, on_gpu=setup.gpus > 0)
    output = Output(folder, "grid", PLAN, plan_of(grid), FIXED, GROWS)
    issues = [*setup.issues(folder, "--out"), *setup.device_issues(max(settings.gpus))]
    if issues := [*issues, *grid.issues, *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in setup.device_warnings():
        log(f"warning: {line}")
    describe(grid, folder, log, overrides, cores=setup.machine.affinity_cores)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.claim():
        scaling, ending = measure(grid, output, log)
        scaling = scaling.model_copy(update={"prediction": predict(scaling)})
        results.write(folder / FILE, scaling)
        write_csv(scaling, folder / "scaling.csv")
        publish(scaling, scale_report(scaling, folder), folder, as_json=as_json, console=console)
    has_result = any(cell.status == "ok" for cell in scaling.cells)
    return ending.exit_code or int(not has_result)


def plan_of(grid: Grid) -> results.GridFile:
    """grid.json: what is to be run. JSON values only, so that it compares with what was read back."""
    return results.GridFile(
        config_hash=grid.config.hash(),
        config=grid.config.model_dump(mode="json"),
        settings=json.loads(json.dumps(dataclasses.asdict(grid.settings))),
        cells=[results.plain(cell) for cell in grid.cells],
        order=[[cell.id, repeat] for cell, repeat in grid.order()],
    )


def describe(grid: Grid, folder: Path, log: Log, overrides: Sequence[str], *, cores: int) -> None:
    """What is about to run. `cores`: of this machine."""
    settings = grid.settings
    log(f"scaling benchmark: {folder}")
    log(
        f"{count_of(len(grid.cells), 'cell')} x {count_of(settings.repeats, 'repeat')}, "
        f"{settings.warm_up} + {settings.steps} steps each, in random order"
    )
    for cell in grid.cells:
        split = f", tensor {cell.tensor}" if cell.tensor > 1 else ""
        batch = f"{cell.micro_batch} x {cell.accumulation} x {cell.world_size // cell.tensor}"
        log(
            f"  {cell.id}: {count_of(cell.world_size, 'rank')}{split}, "
            f"global batch {cell.global_batch} = {batch}"
        )
    ceilings = {(cell.mode, cell.world_size) for cell in grid.cells if cell.kind == "ceiling"}
    for mode, ranks in [(mode, n) for mode in settings.modes for n in settings.gpus if n > 1]:
        if (mode, ranks) not in ceilings:
            log(
                f"warning: {mode}, {ranks} ranks: the batch does not divide over as many copies, or they "
                "do not fit into memory; no ceiling, and no exposed communication"
            )
    if "weak" in settings.modes and "strong" not in settings.modes:
        log("weak scaling trains another global batch at every N: losses are not compared")
    for line in grid.displaced(overrides):
        log(f"warning: {line}")
    if not grid.on_gpu and max(settings.gpus) > cores:
        log("warning: more CPU ranks than cores: efficiency says nothing about the program")


def measure(grid: Grid, output: Output[results.GridFile], log: Log) -> tuple[results.Scaling, Ending]:
    """The grid's result with its verdicts, or what there is of it when a signal came."""
    out = output.path
    facts = output.begin(grid.config).facts()
    slots, launcher = [Slot()], grid.settings.launcher
    with trials.runner(out, slots, launcher=launcher, on_gpu=grid.on_gpu, log=log) as runs:
        ending = run_to_end(lambda: run_grid(grid, runs, log), out, log)
    scaling = collect(grid, out, facts=facts)
    status = {"status": ending.status} if ending.exit_code else {}
    return scaling.model_copy(update={"verdicts": verdicts(scaling.cells), **status}), ending
