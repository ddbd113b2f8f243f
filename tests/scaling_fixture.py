"""Make a plausible scaling.json without running `bert-dp scale`."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import results
from launcher.plan.scaling import source_of
from launcher.scale import models
from launcher.scale.analyze import diagnose
from tests.plan_fixture import plan, profile

SEQUENCE, STEPS, REPEATS = 128, 50, 3
PARAMETERS, FLOPS, PEAK = 119_589_889, 6.2e8, 6.5e11
ENVIRONMENT = {
    "date": "2026-11-21T12:00:00+00:00",
    "command": ["bert-dp", "scale"],
    "cpu_model": "AMD EPYC 7B13",
    "gpus": [],
    "versions": {"bert-dp": "0.1.0", "torch": "2.13.0"},
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
}
SETTINGS = {
    **{"steps": STEPS, "warm_up": 10, "repeats": REPEATS, "micro_batch": 8, "accumulation": 4},
    **{"sequence_length": SEQUENCE, "parameters": PARAMETERS, "flops_per_token": FLOPS},
    **{"precision": "fp32", "device": "CPU", "global_batch": None},
    "model": "crammed BERT, 16 layers x 768, vocabulary 32,768",
}
COST = {"single": 0.0, "ddp": 0.025, "zero1": 0.035}  # fraction of a step spent waiting for gradients


def scaling(
    *,
    modes: Sequence[str] = ("weak",),
    engines: Sequence[str] = ("ddp", "zero1"),
    sizes: Sequence[int] = (1, 2, 4),
    failed: Mapping[str, tuple[str, str | None]] | None = None,
    prediction: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Return scaling.json. `failed` maps a cell id to (status, cause); `changes` replace whole entries."""
    cells = []
    for mode in modes:
        runs = [_run(mode, engine, n) for engine in engines for n in sizes]
        several = [run for run in runs if run["world_size"] > 1 and run["engine"] == engines[0]]
        cells += [_run(mode, "single", 1), *runs, *map(_ceiling, several)]
    cells = [_without_figures(c, *failed[c["id"]]) if failed and c["id"] in failed else c for c in cells]
    data: dict[str, Any] = {
        "schema_version": 1,
        "status": "complete",
        "environment": copy.deepcopy(ENVIRONMENT),
        "config_hash": "5f2c9a1e",
        "command": ["bert-dp", "scale", "crammed-bert", "--nproc", "1,2,4"],
        "mode": modes[0] if len(modes) == 1 else "both",
        "settings": copy.deepcopy(SETTINGS),
        "peak": {"datasheet_flops": None, "matmul_flops": PEAK},
        "cells": cells,
        "links": [_link(n) for n in sizes if n > 1],
        "profile": profile(),
    }
    made = results.parse(data, models.Scaling, "it")
    data["verdicts"] = [results.plain(verdict) for verdict in diagnose(made.cells)]
    data["prediction"] = results.plain(plan(source_of(made, "it"), 8, 64)) if prediction else None
    return {**data, **changes}


def nulls() -> dict[str, Any]:
    """Return scaling.json of a grid that has just started: every measured number is null."""
    nothing: dict[str, Any] = {"settings": {}, "peak": {"datasheet_flops": None, "matmul_flops": None}}
    data = scaling(status="partial", links=[], verdicts=[], profile=None, environment={}, **nothing)
    data["cells"] = [_without_figures(cell, "pending", None) for cell in data["cells"]]
    return data


def _run(mode: str, engine: str, n: int) -> dict[str, Any]:
    weak, many, cost = mode == "weak", n > 1, COST.get(engine, 0.05)
    accumulation = 4 if weak else max(1, 16 // n)
    lost, hardware = cost * (1.0 if weak else 1.2) * many, 1 - 0.06 * many - 0.02 * math.log2(n)
    efficiency, batch = hardware * (1 - lost - 0.1 * cost), 8 * accumulation * n
    step_s = batch * SEQUENCE / (900.0 * n * efficiency)
    parts = {"data": 0.004, "exposed_comm": lost, "optimizer": 0.05, "other": 0.01}
    parts["forward_backward"] = 1 - sum(parts.values())
    against_ceiling = {
        "exposed_comm_fraction": lost,
        "exposed_comm_ddp_fraction": lost * 0.96 if engine == "ddp" else None,
        "straggler_ratio": 1.02,
        "efficiency_ddp1": efficiency / 0.985,
        "ceiling_efficiency": hardware,
        "ceiling_efficiency_ci95": [hardware - 0.01, hardware + 0.01],
        "communication_efficiency": 1 - lost,
        "communication_efficiency_ci95": [1 - lost - 0.01, 1 - lost + 0.008],
    }
    cell = models.CellMeasurement(
        id=f"{mode}-{engine}-n{n}",
        mode="weak" if weak else "strong",
        engine=engine,
        world_size=n,
        micro_batch=8,
        accumulation=accumulation,
        global_batch=batch,
        status="ok",
        **_times(f"{mode}-{engine}-n{n}", step_s, batch, n),
        split_s={name: share * step_s for name, share in parts.items()},
        data_wait_fraction=0.004,
        peak_memory_gib=(2.0 + 0.1 * weak + cost) / (1 + 0.2 * (engine == "zero1") * (n - 1)),
        mamfu=FLOPS * 900.0 * efficiency / PEAK,
        speedup=efficiency * n,
        efficiency=efficiency,
        efficiency_ci95=[efficiency - 0.015, efficiency + 0.012],
        **(against_ceiling if many else {}),
        loss_agrees=None if weak else True,
        loss_deviation=None if weak else 1.2e-6,
    )
    return results.plain(cell)


def _ceiling(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ceiling of a cell, which runs without collectives."""
    n, split_s = cell["world_size"], cell["split_s"]
    named = {"id": f"{cell['mode']}-ceiling-n{n}", "kind": "ceiling", "engine": "independent"}
    kept = {key: cell[key] for key in (*models.GridCell.model_fields, "status", "peak_memory_gib", "mamfu")}
    step_s = cell["step_time_s"]["median"] - split_s["exposed_comm"]
    times = _times(named["id"], step_s, cell["global_batch"], n)
    split = {"split_s": {**split_s, "exposed_comm": 0.0}}
    return results.plain(models.CellMeasurement(**{**kept, **times, **split, **named}))


def _without_figures(cell: Mapping[str, Any], status: str, cause: str | None) -> dict[str, Any]:
    kept = {key: cell[key] for key in models.GridCell.model_fields}
    return results.plain(models.CellMeasurement(**{**kept, "status": status, "cause": cause}))


def _times(name: str, step_s: float, batch: int, n: int) -> dict[str, Any]:
    """Return the repeats, rates and step times of a cell whose step takes `step_s` seconds."""
    rates = {"steps_per_s": 1 / step_s, "tokens_per_s": batch * SEQUENCE / step_s}
    time = {"median": step_s, "p95": step_s * 1.06}
    repeats = [
        {"run": f"runs/{name}-r{k}", "steps": STEPS, **rates, "step_time_s": time} for k in range(REPEATS)
    ]
    return {
        "repeats": repeats,
        **rates,
        "global_steps_per_s": batch / 8 / step_s,
        "samples_per_s": batch / step_s,
        "tokens_per_s_per_gpu": batch * SEQUENCE / step_s / n,
        "step_time_s": {**time, "mean": step_s * 1.004, "ci95": [step_s * 0.99, step_s * 1.01]},
    }


def _link(n: int) -> dict[str, Any]:
    rates = {size: 1.4 * size / (size + 4e5) for size in (2**k for k in range(12, 28))}
    seconds = {size: size * 2 * (n - 1) / n / bus / 1e9 for size, bus in rates.items()}
    points = [{"bytes": size, "seconds": seconds[size], "busbw_gb_s": bus} for size, bus in rates.items()]
    return {"world_size": n, "backend": "gloo", "points": points}
