"""Make the files of `bert-dp scale` that a scaling prediction reads, and predictions from them."""

from typing import Any

from launcher import results
from launcher.plan.scaling import PlanSource, PlanSpec, predict_scaling, source_of
from launcher.scale.models import Prediction, Scaling


def profile(**changes: Any) -> dict[str, Any]:
    """Return profile.json of a micro batch of 1 s with three fp32 gradients of 3 M numbers in total."""
    ready = ((4_000_000, 0.2), (2_000_000, 0.4), (6_000_000, 0.6))
    gradients = [{"bytes": size, "ready_s": seconds} for size, seconds in ready]
    sizes = {"parameters": 3_000_000, "num_layers": 2, "hidden_size": 96, "num_heads": 6}
    model = {"micro_batch": 8, "sequence_length": 128, **sizes, "gradients": gradients}
    times = {"backward_s": 0.6, "micro_s": 1.0, "optimizer_s": 0.1}
    return {"device": "CPU", "precision": "fp32", **model, **times, **changes}


def cell(name: str, ranks: int, step: float, **changes: Any) -> dict[str, Any]:
    """Return a weak-scaling cell of accumulation 4 and micro batch 8, whose baseline takes 4.2 s per step."""
    rate = ranks * 4 * 8 * 128 / step
    batch = {"micro_batch": 8, "accumulation": 4, "global_batch": 32 * ranks}
    times = {"median": step, "p95": step, "mean": step, "ci95": [step * 0.98, step * 1.02]}
    figures = {"tokens_per_s": rate, "efficiency": rate / ranks / (4 * 8 * 128 / 4.2), "step_time_s": times}
    engine = "ddp" if ranks > 1 else "single"
    return {"id": name, "engine": engine, "world_size": ranks, "status": "ok", **batch, **figures, **changes}


def measured(**changes: Any) -> dict[str, Any]:
    """Return scaling.json of one and two ranks, whose all-reduce transfers 1 GB/s."""
    points = [{"bytes": size, "seconds": size / 1e9} for size in (10**6, 10**7, 10**8)]
    cells = [
        cell("weak-single-n1", 1, 4.2),
        cell("ddp-2", 2, 5.3, ceiling_efficiency=0.8),
        cell("oom", 4, 1.0, status="oom"),
        cell("ds-2", 2, 6.0, engine="deepspeed"),
        cell("ceiling-2", 2, 5.25, kind="ceiling"),
    ]
    links = [{"world_size": 2, "points": points}, {"world_size": 4, "points": []}]
    settings = {"accumulation": 4, "micro_batch": 8, "sequence_length": 128}
    return {"settings": settings, "cells": cells, "links": links, "profile": profile(), **changes}


def source(name: str = "it", **changes: Any) -> PlanSource:
    """Return the scaling.json of `measured` as the source of a prediction."""
    return source_of(results.parse(measured(**changes), Scaling, name), name)


def plan(source: PlanSource, *gpus: int, **options: Any) -> Prediction:
    """Predict the scaling to these numbers of GPUs."""
    return predict_scaling(source, PlanSpec(gpus=gpus, **options))
