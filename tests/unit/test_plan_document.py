"""What `plan scaling --from` reads: a document as the benchmark writes it, and damaged ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from launcher.plan import inputs, scaling
from launcher.plan.question import Question
from launcher.results import Scaling
from launcher.scale.collect import collect
from launcher.scale.grid import run_dir
from tests.unit.test_plan_scaling import cell, from_data, measured, profile
from tests.unit.test_scaling import grid, write_run


@pytest.fixture
def collected(tmp_path: Path) -> Scaling:
    """scaling.json of both modes on 1 and 2 ranks, by the code that writes it: accumulation 2, then 8."""
    made = grid(gpus=(1, 2), modes=("weak", "strong"), engines=("ddp",), synthetic=False)
    for one in made.cells:
        step = (0.5 if one.mode == "weak" else 2.0) * (1.25 if one.world_size > 1 else 1.0)
        for repeat in range(2):
            write_run(run_dir(tmp_path, one, repeat), one, step * (1 + 0.02 * repeat))
    points = [{"bytes": 10**k, "seconds": 10**k / 1e9, "busbw_gb_s": 1.0, "bucket": False} for k in (3, 6)]
    (tmp_path / "links-2.json").write_text(json.dumps({"world_size": 2, "backend": "gloo", "points": points}))
    (tmp_path / "profile.json").write_text(json.dumps(profile(micro_batch=4, sequence_length=16)))
    return collect(made, tmp_path, facts={"environment": {}, "config_hash": "x", "command": ["scale"]})


def test_the_benchmarks_own_document_gives_the_baseline(collected: Scaling) -> None:
    assert collected.baseline not in {c.id for c in collected.cells}
    source = inputs.from_scaling(collected, "scaling.json")
    assert source.accumulation == 2
    assert source.curves.keys() == {2}
    assert any("(cell weak-single-n1)" in note for note in source.notes)
    mean = next(c for c in collected.cells if c.id == "weak-single-n1").step_s
    assert mean == pytest.approx(0.505)
    found = scaling.answer(source, Question(gpus=(1, 2)))
    assert found.rows[0].step_time_s == pytest.approx(mean)
    told = {line.cell: line for line in found.measured}
    assert told.keys() == {f"{m}-{e}" for m in ("weak", "strong") for e in ("single-n1", "ddp-n1", "ddp-n2")}
    assert told["weak-single-n1"].predicted_tokens_per_s == pytest.approx(
        told["weak-single-n1"].measured_tokens_per_s
    )
    assert told["weak-single-n1"].within is True


@pytest.mark.parametrize(
    ("accumulation", "chosen"), [(8, "strong-single-n1"), (2, "weak-single-n1"), (None, "weak-single-n1")]
)
def test_of_several_baselines_that_of_the_settings(
    collected: Scaling, accumulation: int | None, chosen: str
) -> None:
    settings = collected.settings.model_copy(update={"accumulation": accumulation})
    source = inputs.from_scaling(collected.model_copy(update={"settings": settings}), "it")
    assert any(f"(cell {chosen})" in note for note in source.notes)


def test_no_baseline_that_ran_leaves_the_profile(collected: Scaling) -> None:
    others = [c for c in collected.cells if c.engine != "single" or c.kind != "run"]
    source = inputs.from_scaling(collected.model_copy(update={"cells": others}), "it")
    assert source.profile.micro_s == 1.0


def test_the_interval_is_of_the_mean_and_so_is_what_stands_beside_it() -> None:
    step = {"median": 9.0, "p95": 9.5, "mean": 5.3, "ci95": [5.2, 5.4]}
    found = scaling.answer(
        from_data(measured(cells=[cell("c", 2, 9.0, step_time_s=step)]), "it"), Question(gpus=(2,))
    ).measured
    assert found[0].measured_step_s == 5.3
    del step["mean"]
    found = scaling.answer(
        from_data(measured(cells=[cell("c", 2, 9.0, step_time_s=step)]), "it"), Question(gpus=(2,))
    ).measured
    assert found[0].measured_step_s == 9.0


def test_a_measured_cell_beyond_the_nodes_that_are_told_is_left_out() -> None:
    source = from_data(measured(), "it")
    found = scaling.answer(source, Question(gpus=(1,), link="nvlink4", gpus_per_node=1))
    assert [line.cell for line in found.measured] == ["weak-single-n1"]


def ready(seconds: object) -> dict[str, Any]:
    return profile(gradients=[{"name": "a", "bytes": 12_000_000, "ready_s": seconds}])


NAN = math.nan
DAMAGED: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda a=a: measured(cells=[cell("c", 2, 1.0, accumulation=a)]), "cells.0.accumulation")
        for a in (0, -3, float("1e400"), 1.5, True, None, "2", 10**400)
    ),
    (lambda: measured(cells=[cell("c", 2, 1.0) | {"world_size": 0}]), "cells.0.world_size"),
    (lambda: measured(cells=[cell("c", 2, 1.0, tensor=0)]), "cells.0.tensor"),
    (lambda: measured(cells=[cell("c", 2, 1.0, tensor=3)]), "cells.0: tensor: 3 does not divide"),
    (lambda: measured(cells=[cell("c", 2, 1.0, step_time_s={"median": 1.0, "ci95": [1.0]})]), "ci95"),
    (lambda: measured(cells=[cell("c", 2, 1.0, step_time_s={"median": 1.0, "ci95": [2.0, 1.0]})]), "ci95"),
    (lambda: measured(cells=[cell("c", 2, 1.0, step_time_s=1.0)]), "cells.0.step_time_s"),
    (lambda: measured(cells=[cell("c", 2, 1.0, step_time_s={"mean": 1e-310})]), "cells.0.step_time_s.mean"),
    (lambda: measured(cells=[cell("c", 2, 1.0, micro_batch=0.5)]), "cells.0.micro_batch"),
    (lambda: measured(cells=[cell("c", 2, 1.0, tokens_per_s=-1.0)]), "cells.0.tokens_per_s"),
    *(
        (lambda e=e: measured(cells=[cell("c", 2, 1.0, ceiling_efficiency=e)]), "cells.0.ceiling_efficiency")
        for e in (-0.5, 0.0, 2500.0, NAN)
    ),
    (lambda: measured(settings={"accumulation": -3}), "settings.accumulation"),
    (lambda: measured(profile=profile(micro_batch=0.5)), "profile.micro_batch"),
    *(
        (lambda p=p: measured(links=[{"world_size": 2, "points": [p]}]), "links.0.points.0")
        for p in (
            {"bytes": NAN, "seconds": 1.0},
            {"bytes": 0, "seconds": 1.0},
            {"bytes": 1, "seconds": 0.0},
            {"bytes": 1, "seconds": -1.0},
            {"bytes": 1},
            3,
        )
    ),
    (lambda: measured(links=[{"world_size": 1, "points": []}]), "links.0.world_size"),
    (lambda: profile(optimizer_s=-0.1), "optimizer_s"),
    (lambda: profile(backward_s=-0.6), "backward_s"),
    (lambda: profile(backward_s=1.1), "backward_s: 1.1 is above micro_s, 1"),
    (lambda: profile(parameters=-5), "parameters"),
    (lambda: profile(parameters=3), "parameters: 3 for gradients of"),
    (lambda: profile(forward_s=None, micro_s=None), "micro_s: missing"),
    (lambda: ready(0.7), "ready_s of a: 0.7 is above backward_s, 0.6"),
    (lambda: ready(-0.1), "gradients.0.ready_s"),
    (lambda: ready(NAN), "gradients.0.ready_s"),
]


@pytest.mark.parametrize(("make", "field"), DAMAGED)
def test_a_damaged_field_is_named_with_its_file(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_data(make(), "of/mine.json")
    (line,) = error.value.issues
    assert line.startswith("of/mine.json is damaged: ")
    assert field in line
    assert len(line) < 400


def test_ready_times_a_little_late_are_another_clock_and_many_problems_are_cut_short() -> None:
    assert from_data(ready(0.62), "it").profile.micro_s == 1.0
    with pytest.raises(ConfigError) as error:
        from_data(measured(cells=[cell("c", 2, 1.0, tensor=0)] * 40), "it")
    (line,) = error.value.issues
    assert "(and 39 more); " in line


def test_a_deep_file_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        inputs.from_file(path)
