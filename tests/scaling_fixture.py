"""A realistic scaling.json from a seed: the records of `bert-dp scale` without running it."""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import results
from launcher.scale import models

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
COST = {"single": 0.0, "ddp": 0.02, "zero1": 0.03, "fsdp": 0.12, "accelerate": 0.03, "deepspeed": 0.2}


def scaling(
    seed: int = 0,
    *,
    modes: Sequence[str] = ("weak",),
    engines: Sequence[str] = ("ddp", "zero1"),
    sizes: Sequence[int] = (1, 2, 4),
    failed: Mapping[str, tuple[str, str | None]] | None = None,
    controls: bool = True,
    prediction: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """scaling.json as a dictionary. `failed`: cell id -> (status, cause); `controls`: ceilings; `changes`
    replace whole entries."""
    rng = random.Random(seed)
    cells = []
    for mode in modes:
        runs = [_run(rng, mode, engine, n) for engine in engines for n in sizes]
        cells += [_run(rng, mode, "single", 1), *runs]
        for cell in runs:
            if controls and cell["world_size"] > 1 and cell["engine"] == engines[0]:
                cells.append(_ceiling(rng, cell))
    cells = [_without_figures(cell, *(failed or {}).get(cell["id"], ("ok", None))) for cell in cells]
    ok = [c for c in cells if c["kind"] == "run" and c["status"] == "ok"]
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
        "links": [_link(rng, n) for n in sizes if n > 1],
        "profile": _profile(),
        "verdicts": [_verdict(cell) for cell in ok if cell["world_size"] > 1],
        "prediction": _prediction(rng, ok) if prediction else None,
    }
    return {**data, **changes}


def nulls() -> dict[str, Any]:
    """A grid that has just begun: every measured number is null."""
    nothing: dict[str, Any] = {"settings": {}, "peak": {"datasheet_flops": None, "matmul_flops": None}}
    data = scaling(status="partial", links=[], verdicts=[], profile=None, environment={}, **nothing)
    data["cells"] = [_without_figures(cell, "pending", None) for cell in data["cells"]]
    return data


def _run(rng: random.Random, mode: str, engine: str, n: int) -> dict[str, Any]:
    weak, many = mode == "weak", n > 1
    accumulation = 4 if weak else max(1, 16 // n)
    batch = 8 * accumulation * n
    lost = COST.get(engine, 0.05) * many + rng.uniform(0, 0.01)
    hardware = 1 - 0.06 * many - 0.02 * math.log2(n)
    own = 1.0 if engine == "single" else hardware * (1 - lost) * rng.uniform(0.995, 1.005)
    rate = 900.0 * n * own
    step = batch * SEQUENCE / rate
    efficiency = rate / (900.0 * n)
    gib = 2.0 / (1 + 0.2 * (engine == "zero1") * (n - 1))
    against_ceiling = {
        "exposed_comm_fraction": lost,
        "exposed_comm_ddp_fraction": lost * 0.96 if engine == "ddp" else None,
        "straggler_ratio": 1.02,
        "straggler_rank": n - 1 if n > 2 else None,
        "efficiency_ddp1": efficiency / 0.985,
        "ceiling_efficiency": hardware,
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
        **_times(rng, f"{mode}-{engine}-n{n}", step, batch, accumulation * n, n),
        split_s=_split(step, lost if many else 0.0),
        data_wait_fraction=0.004,
        peak_memory_gib=gib * (1 + 0.05 * rng.random()),
        mamfu=FLOPS * rate / n / PEAK,
        speedup=efficiency * n,
        efficiency=efficiency,
        efficiency_ci95=[efficiency - 0.015, efficiency + 0.012],
        **(against_ceiling if many else {}),
        loss_agrees=None if weak else True,
        loss_deviation=None if weak else 1.2e-6,
        flags=["efficiency above 100 %"] if efficiency > 1 and engine != "single" else [],
    )
    return results.plain(cell)


def _ceiling(rng: random.Random, cell: Mapping[str, Any]) -> dict[str, Any]:
    """The same cell with every collective off."""
    step = cell["step_time_s"]["median"] - cell["split_s"]["exposed_comm"]
    n, batch = cell["world_size"], cell["global_batch"]
    changes = {"id": f"{cell['mode']}-ceiling-n{n}", "kind": "ceiling", "engine": "independent"}
    kept = (*models.GridCell.model_fields, "status", "peak_memory_gib", "mamfu")
    figures = {
        **{key: cell[key] for key in kept},
        **_times(rng, changes["id"], step, batch, cell["accumulation"] * n, n),
        "split_s": {**cell["split_s"], "exposed_comm": 0.0},
    }
    return results.plain(models.CellMeasurement(**{**figures, **changes}))


def _without_figures(cell: dict[str, Any], status: str, cause: str | None) -> dict[str, Any]:
    """A cell that has no result; the same where it is ok."""
    if status == "ok":
        return cell
    kept = {key: cell[key] for key in models.GridCell.model_fields}
    return results.plain(models.CellMeasurement(**kept, status=status, cause=cause))


def _times(
    rng: random.Random, name: str, step: float, batch: int, micro_batches: int, n: int
) -> dict[str, Any]:
    """The repeats of a cell whose step takes so many seconds, its rates and the step's times."""
    repeats, interval = [], [step * 0.99, step * 1.01]
    for k in range(REPEATS):
        s = step * rng.uniform(0.99, 1.01)
        rates = {"steps_per_s": 1 / s, "tokens_per_s": batch * SEQUENCE / s}
        times = {"median": s, "p95": 1.05 * s}
        repeats.append({"run": f"runs/{name}-r{k}", "steps": STEPS, **rates, "step_time_s": times})
    return {
        "repeats": repeats,
        "steps_per_s": 1 / step,
        "global_steps_per_s": micro_batches / step,
        "samples_per_s": batch / step,
        "tokens_per_s": batch * SEQUENCE / step,
        "tokens_per_s_per_gpu": batch * SEQUENCE / step / n,
        "step_time_s": {"median": step, "p95": step * 1.06, "mean": step * 1.004, "ci95": interval},
    }


def _split(step_s: float, comm: float) -> dict[str, float]:
    parts = {"data": 0.004, "forward_backward": 0.0, "exposed_comm": comm, "optimizer": 0.05, "other": 0.01}
    parts["forward_backward"] = 1 - sum(parts.values())
    return {name: share * step_s for name, share in parts.items()}


def _link(rng: random.Random, n: int) -> dict[str, Any]:
    points = []
    for size in (2**k for k in range(12, 28)):
        bus = 1.4 * size / (size + 4e5) * rng.uniform(0.95, 1.05)
        points.append({"bytes": size, "seconds": size * 2 * (n - 1) / n / bus / 1e9, "busbw_gb_s": bus})
    return {"world_size": n, "backend": "gloo", "points": points}


def _profile() -> dict[str, Any]:
    ready = [0.04 * (k + 1) for k in range(16)]
    gradients = [{"name": f"layer {s}", "bytes": 28_311_552, "ready_s": s} for s in ready]
    times = {"backward_s": 0.66, "optimizer_s": 0.08, "micro_s": 0.97}
    model = {"micro_batch": 8, "sequence_length": SEQUENCE, "parameters": PARAMETERS}
    model |= {"num_layers": 16, "hidden_size": 768, "num_heads": 12}
    return {"device": "CPU", "precision": "fp32", **model, **times, "gradients": gradients}


def _verdict(cell: Mapping[str, Any]) -> dict[str, str]:
    lost = cell["exposed_comm_fraction"]
    if lost > 0.1:
        kind, text, hint = "communication_bound", "communication-bound", "more accumulation"
    elif cell["mode"] == "strong":
        kind, text, hint = "intervals_overlap", "intervals overlap", "more --repeats or --steps"
    elif cell["world_size"] == 2:
        kind, text, hint = "scales", "scales", "nothing"
    else:
        kind, text, hint = "hardware_ceiling", "hardware ceiling", "the devices slow each other"
    evidence = f"{100 * lost:.1f} % of a step waits for gradients, ceiling {cell['ceiling_efficiency']:.1%}"
    return {"cell": cell["id"], "kind": kind, "verdict": text, "evidence": evidence, "next": hint}


def _prediction(rng: random.Random, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [
        {
            "cell": cell["id"],
            "measured_step_s": cell["step_time_s"]["median"],
            "predicted_step_s": cell["step_time_s"]["median"] * rng.uniform(0.98, 1.02),
            "ci95": cell["step_time_s"]["ci95"],
            "within": True,
            "measured_efficiency": cell["efficiency"],
            "measured_efficiency_ci95": cell["efficiency_ci95"],
            "repeats": REPEATS,
            "predicted_efficiency": cell["efficiency"] * rng.uniform(0.98, 1.02),
        }
        for cell in cells
    ]
    figures = {"tensor": 1, "accumulation": 4, "step_time_s": 5.2, "exposed_comm_fraction": 0.03}
    figures["split_s"] = {"forward_backward": 4.7, "optimizer": 0.3, "straggler": 0.04, "exposed_comm": 0.16}
    rows = [
        {"world_size": n, "global_batch": 32 * n, "tokens_per_s": 790.0 * n, "speedup": 0.88 * n}
        | {"efficiency": 0.88, **figures}
        for n in (8, 64)
    ]
    notes = ["all-reduce as measured over 2 ranks"]
    return {"schema_version": 1, "engine": "ddp", "rows": rows, "measured": measured, "assumptions": notes}
