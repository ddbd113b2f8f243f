"""Files that a scaling prediction starts from, as `bert-dp scale` writes them, and what is made of them."""

from __future__ import annotations

from typing import Any

from launcher.plan import inputs, scaling
from launcher.plan.question import Question
from launcher.scale import models


def profile(**changes: Any) -> dict[str, Any]:
    """profile.json of a micro batch of 1 s with three fp32 gradients of 3 M numbers."""
    names = ("model.final_norm.weight", "model.layers.1.mlp.Wo.weight", "model.layers.0.mlp.Wo.weight")
    gradients = [
        {"name": name, "bytes": size, "ready_s": ready}
        for name, size, ready in zip(names, (4_000_000, 2_000_000, 6_000_000), (0.2, 0.4, 0.6), strict=True)
    ]
    model = {"micro_batch": 8, "sequence_length": 128, "parameters": 3_000_000, "gradients": gradients}
    times = {"forward_s": 0.4, "backward_s": 0.6, "micro_s": 1.0, "optimizer_s": 0.1}
    return {"device": "CPU", "precision": "fp32", **model, **times, **changes}


def of_crammed_bert(**changes: Any) -> dict[str, Any]:
    gradients = [{"name": "all", "bytes": 4 * 119_589_889, "ready_s": 0.6}]
    return profile(**{"parameters": 119_589_889, "gradients": gradients, **changes})


def cell(name: str, ranks: int, step: float, **changes: Any) -> dict[str, Any]:
    """A weak cell of accumulation 4 and micro batch 8, whose baseline takes 4.2 s a step."""
    rate = ranks * 4 * 8 * 128 / step
    batch = {"micro_batch": 8, "accumulation": 4, "global_batch": 32 * ranks}
    times = {"median": step, "p95": step, "mean": step, "ci95": [step * 0.98, step * 1.02]}
    figures = {"tokens_per_s": rate, "efficiency": rate / ranks / (4 * 8 * 128 / 4.2), "step_time_s": times}
    engine = "ddp" if ranks > 1 else "single"
    return {"id": name, "engine": engine, "world_size": ranks, "status": "ok", **batch, **figures, **changes}


def measured(**changes: Any) -> dict[str, Any]:
    """scaling.json of one and two ranks, whose all-reduce sends 1 GB/s."""
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


def source_of(data: Any, name: str = "it", model: str | None = None) -> inputs.Source:
    """What a prediction starts from when the file `name` holds `data`."""
    return inputs.from_scaling(inputs.read_measured(data, name), name, model)


def answer(source: inputs.Source, *gpus: int, **options: Any) -> models.Prediction:
    """What `plan scaling` predicts for so many GPUs."""
    return scaling.answer(source, Question(gpus=gpus, **options))
