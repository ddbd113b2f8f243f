"""A realistic scaling.json from a seed: the records of `bert-dp scale` without running it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

HOSTILE = "<script>alert(1)</script>\"'&$x_1$\x00\x1b[0m\ud800"
MIB = 2**20
ENVIRONMENT = {
    "date": "2026-11-21T12:00:00+00:00",
    "command": ["bert-dp", "scale"],
    "platform": "Linux",
    "cpu_model": "AMD EPYC 7B13",
    "physical_cores": 1,
    "logical_cores": 2,
    "memory_gib": 15.6,
    "gpus": [],
    "gpu_topology": None,
    "versions": {"bert-dp": "0.1.0", "torch": "2.13.0"},
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
}
SETTINGS = {
    "steps": 50,
    "warm_up": 10,
    "repeats": 3,
    "micro_batch": 8,
    "accumulation": 4,
    "global_batch": None,
    "sequence_length": 128,
    "parameters": 119589889,
    "flops_per_token": 6.2e8,
    "precision": "fp32",
    "compiled": False,
    "device": "CPU",
    "model": "crammed BERT, 16 layers x 768, vocabulary 32,768",
}
SEQUENCE, STEPS = 128, 50
COST = {"single": 0.0, "ddp": 0.02, "zero1": 0.03, "fsdp": 0.12, "accelerate": 0.03, "deepspeed": 0.2}


def scaling(
    seed: int = 0,
    *,
    modes: Sequence[str] = ("weak",),
    engines: Sequence[str] = ("ddp", "zero1"),
    sizes: Sequence[int] = (1, 2, 4),
    failed: Mapping[str, tuple[str, str]] | None = None,
    controls: bool = True,
    prediction: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """scaling.json as a dictionary. `failed`: cell id -> (status, cause); `controls`: ceiling and synthetic
    cells; `changes` replace whole entries."""
    rng = random.Random(seed)
    cells = []
    for mode in modes:
        runs = [_run(rng, mode, engine, n) for engine in engines for n in sizes]
        cells += [_run(rng, mode, "single", 1), *runs]
        for cell in runs:
            if controls and cell["world_size"] > 1 and cell["engine"] == engines[0]:
                cells += [_control(rng, cell, kind) for kind in ("ceiling", "synthetic")]
    for name, (status, cause) in (failed or {}).items():
        _fail(next(cell for cell in cells if cell["id"] == name), status, cause)
    data: dict[str, Any] = {
        "schema_version": 1,
        "status": "complete",
        "environment": copy.deepcopy(ENVIRONMENT),
        "config_hash": "5f2c9a1e",
        "command": ["bert-dp", "scale", "crammed-bert", "--gpus", "1,2,4"],
        "mode": modes[0] if len(modes) == 1 else "both",
        "settings": dict(SETTINGS),
        "baseline": "single",
        "baselines": {name: [f"{mode}-{name}-n1" for mode in modes] for name in ("single", "ddp")},
        "peak": {"datasheet_flops": None, "matmul_flops": 6.5e11, "shapes": []},
        "cells": cells,
        "links": [_link(rng, n) for n in sizes if n > 1],
        "profile": _profile(rng),
        "verdicts": [
            _verdict(cell)
            for cell in cells
            if cell["kind"] == "run" and cell["status"] == "ok" and cell["world_size"] > 1
        ],
        "prediction": _prediction(rng, cells) if prediction else None,
    }
    return {**data, **changes}


def nulls() -> dict[str, Any]:
    """A grid that has just begun: every measured number is null."""
    data = scaling(status="partial", links=[], verdicts=[], profile=None)
    data["environment"] = {}
    data["settings"] = {key: None for key in data["settings"]}
    data["peak"] = {"datasheet_flops": None, "matmul_flops": None, "shapes": []}
    for cell in data["cells"]:
        _fail(cell, "pending", None)
    return data


def _run(rng: random.Random, mode: str, engine: str, n: int) -> dict[str, Any]:
    weak = mode == "weak"
    accumulation = 4 if weak else max(1, 16 // n)
    batch = 8 * accumulation * n
    lost = COST.get(engine, 0.05) * (n > 1) + rng.uniform(0, 0.01)
    hardware = 1 - 0.06 * (n > 1) - 0.02 * math.log2(n)
    efficiency = 1.0 if engine == "single" else hardware * (1 - lost)
    rate = 900.0 * n * efficiency * (1 if engine == "single" else rng.uniform(0.995, 1.005))
    step = batch * SEQUENCE / rate
    efficiency = rate / (900.0 * n)
    many = n > 1
    gib = 2.0 / (1 + 0.2 * (engine == "zero1") * (n - 1))
    ranks = [_rank(rng, k, step, many, gib) for k in range(n)]
    return {
        "id": f"{mode}-{engine}-n{n}",
        "mode": mode,
        "engine": engine,
        "launcher": "torchrun",
        "world_size": n,
        "tensor": 1,
        "micro_batch": 8,
        "accumulation": accumulation,
        "global_batch": batch,
        "kind": "run",
        "of": None,
        "status": "ok",
        "cause": None,
        "repeats": [_repeat(rng, f"{mode}-{engine}-n{n}", k, step, batch) for k in range(3)],
        **_rates(step, batch, accumulation * n, n),
        "step_time_s": {
            "median": step,
            "p95": step * 1.06,
            "mean": step * 1.004,
            "ci95": [step * 0.99, step * 1.01],
        },
        "split_s": _split(step, lost if many else 0.0),
        "data_wait_fraction": 0.004,
        "exposed_comm_fraction": lost if many else None,
        "exposed_comm_ddp_fraction": lost * 0.96 if many and engine == "ddp" else None,
        "straggler_ratio": 1.02 if many else None,
        "straggler_rank": n - 1 if many and n > 2 else None,
        "ranks": ranks,
        "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
        "energy_j": None,
        "energy_j_per_mtoken": None,
        "mfu": None,
        "mamfu": 6.2e8 * rate / n / 6.5e11,
        "speedup": efficiency * n,
        "efficiency": efficiency,
        "efficiency_ci95": [efficiency - 0.015, efficiency + 0.012],
        "efficiency_ddp1": efficiency / 0.985 if many else None,
        "ceiling_tokens_per_s": 900.0 * n * hardware if many else None,
        "ceiling_efficiency": hardware if many else None,
        "communication_efficiency": 1 - lost if many else None,
        "communication_efficiency_ci95": [1 - lost - 0.01, 1 - lost + 0.008] if many else None,
        "loss": {"final": 7.5, "curve": _curve(batch)},
        "launch_fraction": None,
        "loss_agrees": None if weak else True,
        "loss_deviation": None if weak else 1.2e-6,
        "flags": ["efficiency above 100 %"] if efficiency > 1 and engine != "single" else [],
    }


def _rates(step_s: float, batch: int, micro_batches: int, n: int) -> dict[str, float]:
    return {
        "steps_per_s": 1 / step_s,
        "global_steps_per_s": micro_batches / step_s,
        "samples_per_s": batch / step_s,
        "tokens_per_s": batch * SEQUENCE / step_s,
        "tokens_per_s_per_gpu": batch * SEQUENCE / step_s / n,
    }


def _split(step_s: float, comm: float) -> dict[str, float]:
    parts = {"data": 0.004, "forward_backward": 0.0, "exposed_comm": comm, "optimizer": 0.05, "other": 0.01}
    parts["forward_backward"] = 1 - sum(parts.values())
    return {name: share * step_s for name, share in parts.items()}


def _repeat(rng: random.Random, name: str, k: int, step_s: float, batch: int) -> dict[str, Any]:
    step_s *= rng.uniform(0.99, 1.01)
    return {
        "run": f"runs/{name}-r{k}",
        "steps": STEPS,
        "steps_per_s": 1 / step_s,
        "tokens_per_s": batch * SEQUENCE / step_s,
        "step_time_s": {"median": step_s, "p95": 1.05 * step_s},
    }


def _rank(rng: random.Random, rank: int, step_s: float, many: bool, gib: float) -> dict[str, Any]:
    def box(middle: float) -> dict[str, float]:
        spread = middle * rng.uniform(0.006, 0.012)
        return {
            "min": middle - 3 * spread,
            "q1": middle - spread,
            "median": middle,
            "q3": middle + spread,
            "max": middle + 6 * spread,
        }

    own = box(step_s * rng.uniform(0.9, 0.93)) if many else None
    return {
        "rank": rank,
        "step_time_s": box(step_s),
        "own_work_s": own,
        "peak_memory_gib": gib * (1 + 0.05 * rng.random()),
    }


def _curve(batch: int) -> list[list[float]]:
    tokens = [batch * SEQUENCE * k for k in range(1, STEPS + 1)]
    return [[t, 7.0 + 3.4 / (1 + t / 60_000)] for t in tokens]


def _control(rng: random.Random, cell: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The same cell with every collective off (`ceiling`), or without the loader (`synthetic`)."""
    other = copy.deepcopy(dict(cell))
    cut = cell["split_s"]["exposed_comm" if kind == "ceiling" else "data"] or 0.0
    step = cell["step_time_s"]["median"] - cut
    name = {"ceiling": "ceiling", "synthetic": f"{cell['engine']}-synthetic"}[kind]
    other |= {"id": f"{cell['mode']}-{name}-n{cell['world_size']}", "kind": kind}
    other |= {"of": cell["id"]} if kind == "synthetic" else {"of": None, "engine": "independent"}
    other |= _rates(step, cell["global_batch"], cell["accumulation"] * cell["world_size"], cell["world_size"])
    other["step_time_s"] = {"median": step, "p95": step * 1.05, "ci95": [step * 0.99, step * 1.01]}
    other["split_s"] = {**cell["split_s"], "exposed_comm" if kind == "ceiling" else "data": 0.0}
    other["repeats"] = [_repeat(rng, other["id"], k, step, cell["global_batch"]) for k in range(3)]
    for key in (
        "speedup",
        "efficiency",
        "efficiency_ci95",
        "efficiency_ddp1",
        "ceiling_tokens_per_s",
        "ceiling_efficiency",
        "communication_efficiency",
        "communication_efficiency_ci95",
        "exposed_comm_fraction",
        "exposed_comm_ddp_fraction",
        "loss_agrees",
        "loss_deviation",
    ):
        other[key] = None
    return other | {"loss": {"final": None, "curve": []}, "flags": []}


def _fail(cell: dict[str, Any], status: str, cause: str | None) -> None:
    kept = (
        "id",
        "mode",
        "engine",
        "launcher",
        "world_size",
        "tensor",
        "micro_batch",
        "accumulation",
        "global_batch",
        "kind",
        "of",
    )
    empty: dict[str, Any] = {
        "repeats": [],
        "ranks": [],
        "flags": [],
        "loss": {"final": None, "curve": []},
        "split_s": None,
        "step_time_s": None,
    }
    for key in cell:
        if key not in kept:
            cell[key] = empty.get(key)
    cell |= {"status": status, "cause": cause}


def _link(rng: random.Random, n: int) -> dict[str, Any]:
    points = []
    for size in [2**k for k in range(12, 28)] + [25 * MIB, 9_437_184]:
        bus = 1.4 * size / (size + 4e5) * rng.uniform(0.95, 1.05)
        algorithm = bus / (2 * (n - 1) / n)
        points.append(
            {
                "bytes": size,
                "seconds": size / algorithm / 1e9,
                "busbw_gb_s": bus,
                "algbw_gb_s": algorithm,
                "bucket": size in (25 * MIB, 9_437_184),
            }
        )
    points.sort(key=lambda point: point["bytes"])
    return {"world_size": n, "backend": "gloo", "points": points}


def _profile(rng: random.Random) -> dict[str, Any]:
    gradients = [
        {"name": f"layers.{15 - k}.weight", "bytes": 28_311_552, "ready_s": 0.04 * (k + 1)} for k in range(16)
    ]
    return {
        "device": "CPU",
        "precision": "fp32",
        "compiled": False,
        "engine": "single",
        "micro_batch": 8,
        "sequence_length": SEQUENCE,
        "parameters": 119589889,
        "forward_s": 0.31,
        "backward_s": 0.66,
        "optimizer_s": 0.08,
        "micro_s": 0.97,
        "gradients": gradients,
    }


def _verdict(cell: Mapping[str, Any]) -> dict[str, str]:
    lost = cell["exposed_comm_fraction"] or 0.0
    if lost > 0.1:
        name, next_ = "communication-bound", "more accumulation, or 16-bit gradients"
    elif cell["mode"] == "strong":
        name, next_ = "no claim: intervals overlap", "more --repeats or --steps"
    elif cell["world_size"] == 2:
        name, next_ = "scales", "nothing"
    else:
        name, next_ = "hardware ceiling", "nothing in software: the devices slow each other"
    evidence = (
        f"{100 * lost:.1f} % of a step waits for gradients, ceiling {cell['ceiling_efficiency'] or 1:.1%}"
    )
    return {"cell": cell["id"], "verdict": name, "evidence": evidence, "next": next_}


def _prediction(rng: random.Random, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [
        {
            "cell": cell["id"],
            "ranks": cell["world_size"],
            "measured_step_s": cell["step_time_s"]["median"],
            "predicted_step_s": cell["step_time_s"]["median"] * rng.uniform(0.98, 1.02),
            "ci95": cell["step_time_s"]["ci95"],
            "within": True,
            "measured_efficiency": cell["efficiency"],
            "predicted_efficiency": cell["efficiency"] * rng.uniform(0.98, 1.02),
        }
        for cell in cells
        if cell["kind"] == "run" and cell["status"] == "ok"
    ]
    rows = [
        {
            "world_size": n,
            "tensor": 1,
            "accumulation": 4,
            "global_batch": 32 * n,
            "step_time_s": 5.2,
            "exposed_comm_fraction": 0.03,
            "tokens_per_s": 790.0 * n,
            "speedup": 0.88 * n,
            "efficiency": 0.88,
        }
        for n in (8, 64)
    ]
    return {
        "schema_version": 1,
        "engine": "ddp",
        "rows": rows,
        "measured": measured,
        "assumptions": ["all-reduce as measured over 2 ranks"],
    }
