"""`bert-dp scale`: a grid of real runs, and what each number of ranks contributed."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp.config import ConfigError, load_config, read_manifest
from launcher import environment, outdir, results, starters, training
from launcher.display import PLAIN, show, teller
from launcher.plan import inputs
from launcher.plan.scaling import Question, answer
from launcher.redact import redact_argv
from launcher.report.console import ConsoleReport
from launcher.report.html import write_or_warn
from launcher.report.run_report import PAGE
from launcher.scaling.columns import write_csv
from launcher.scaling.grid import Grid, Settings
from launcher.scaling.measure import Say, Stopped, measure_links, measure_peak, measure_profile, run_grid
from launcher.scaling.reduce import collect
from launcher.scaling.scale_report import FILE, scale_report
from launcher.scaling.verdict import verdicts

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_CONFIG = "quickstart"
FIXED = ("config_hash", "settings", "cells")
COMPARED = ("torch", "accelerate", "deepspeed", "bert-dp")


def scale(
    name: str | None,
    overrides: Sequence[str],
    settings: Settings,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError before any run starts, with every cell that cannot run."""
    path = training.find_config(name or DEFAULT_CONFIG, None)
    config = training.absolute(load_config(path, overrides))
    gpus = 0 if config.run.device == "cpu" else environment.num_gpus()
    where = (out or Path("scaling") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    issues = [*starters.launcher_issues(settings.launcher), *training.input_issues(config)]
    issues += training.exposure_issues(config, where)
    if gpus and max(settings.gpus) > gpus:
        issues.append(
            f"--gpus: {max(settings.gpus)} ranks but {gpus} GPUs; use --set run.device=cpu, or fewer"
        )
    machine = environment.probe()
    grid = Grid(config, settings, machine, on_gpu=gpus > 0)
    if issues := [*issues, *grid.issues, *outdir.issues(where, "grid.json", "grid", plan_of(grid), FIXED)]:
        raise ConfigError(issues)

    say = teller(console, as_json)
    describe(grid, where, say, overrides, cores=None if gpus else machine.affinity_cores)
    if dry_run:
        if as_json:
            sys.stdout.write(results.to_json(plan_of(grid)))
        return 0
    directory = training.prepare_data(config)
    with training.claim(where, ".lock", "--out", "benchmark"):
        return run_locked(grid, where, directory, on_gpu=gpus > 0, as_json=as_json, console=console)


def identity(machine: Mapping[str, Any], data_hash: object) -> dict[str, Any]:
    """What must be the same in every run of a grid: else its figures do not compare."""
    gpus = [[gpu["name"], gpu["driver"]] for gpu in machine["gpus"]]
    versions = {name: machine["versions"].get(name) for name in COMPARED}
    return {
        "cpu": machine["cpu_model"],
        "cores": machine["affinity_cores"],
        "gpus": gpus,
        "versions": versions,
        "data": data_hash,
    }


def plan_of(grid: Grid) -> results.GridFile:
    """grid.json: what is to be run. JSON values only, so that it compares with what was read back."""
    return results.GridFile(
        config_hash=grid.config.hash(),
        config=grid.config.model_dump(mode="json"),
        settings=json.loads(json.dumps(dataclasses.asdict(grid.settings))),
        cells=[dataclasses.asdict(cell) for cell in grid.cells],
        order=[[cell.id, repeat] for cell, repeat in grid.order(len(grid.cells))],
    )


def describe(grid: Grid, where: Path, say: Say, overrides: Sequence[str], *, cores: int | None) -> None:
    """What is about to run. `cores`: of this machine, where ranks run on them."""
    s = grid.settings
    say(f"scaling benchmark: {where}")
    say(f"{len(grid.cells)} cells x {s.repeats} repeats, {s.warm_up} + {s.steps} steps each, in random order")
    for cell in grid.cells:
        split = f", tensor {cell.tensor}" if cell.tensor > 1 else ""
        batch = f"{cell.micro_batch} x {cell.accumulation} x {cell.world_size // cell.tensor}"
        say(f"  {cell.id}: {cell.world_size} ranks{split}, global batch {cell.global_batch} = {batch}")
    for mode in s.modes:
        for count in [n for n in s.gpus if n > 1]:
            if not any(c.id == f"{mode}-ceiling-n{count}" for c in grid.cells):
                say(
                    f"warning: {mode}, {count} ranks: the batch does not divide over as many copies; no "
                    "ceiling, and no exposed communication"
                )
    if "weak" in s.modes and "strong" not in s.modes:
        say("weak scaling trains another global batch at every N: losses are not compared")
    for name in grid.displaced(overrides):
        say(f"warning: --set {name} has no effect: the grid sets it, or nothing is saved in a measured run")
    if cores is not None and max(s.gpus) > cores:
        say("warning: more CPU ranks than cores: efficiency says nothing about the program")


def run_locked(
    grid: Grid, out: Path, directory: Path, *, on_gpu: bool, as_json: bool, console: Console
) -> int:
    """The grid, and its result; also what there is of it when a signal came."""
    say = teller(console, as_json)
    plan = plan_of(grid)
    machine = environment.probe(out).to_json()
    manifest = read_manifest(directory)
    here = identity(machine, manifest.hash)
    outdir.check_machine(out, results.find(out / "grid.json", results.GridFile), here)
    results.write(out / "grid.json", plan.model_copy(update={"machine": here}))
    facts = {
        "environment": machine,
        "config_hash": plan.config_hash,
        "data_hash": manifest.hash,
        "command": redact_argv(sys.argv),
    }
    stopped = 0
    try:
        run_grid(grid, out, on_gpu=on_gpu, say=say)
        measure_links(grid, out, say)
        measure_profile(grid, out, on_gpu=on_gpu, say=say)
        measure_peak(grid, out, on_gpu=on_gpu, say=say)
    except Stopped as stop:
        stopped = stop.number
        say(f"stopped: {out} holds what was measured; the same command goes on")
    scaling = collect(grid, out, facts=facts)
    judged = {"verdicts": verdicts(scaling.cells), "prediction": predicted(scaling)}
    scaling = scaling.model_copy(update=judged | ({"status": "partial"} if stopped else {}))
    results.write(out / FILE, scaling)
    write_csv(scaling, out / "scaling.csv")
    report = scale_report(scaling)
    has_page = write_or_warn(report, out / PAGE)
    if as_json:
        sys.stdout.write(results.to_json(scaling))
    else:
        show(console, ConsoleReport(report))
        if has_page:
            show(console, f"page: {out / PAGE}", **PLAIN)
    ran = any(cell.status == "ok" for cell in scaling.cells)
    return 128 + stopped if stopped else 0 if ran else 1


def predicted(scaling: results.Scaling) -> results.Prediction | None:
    """What `plan scaling` says of these cells from one rank's profile, the links and the ceiling; None where
    one of them was not measured."""
    try:
        source = inputs.from_scaling(scaling, "scaling.json")
        gpus = tuple(sorted({cell.world_size for cell in scaling.cells}))
        return answer(source, Question(gpus=gpus))
    except ConfigError:
        return None
