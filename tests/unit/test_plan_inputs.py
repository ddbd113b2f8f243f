"""What `plan scaling` starts from: a file as the benchmark writes it, damaged ones, and a rate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from bert_dp.cost import GIB, num_parameters
from launcher.plan import hardware, inputs
from launcher.plan.scaling import answer_measured
from launcher.scale.analyze import analyze
from launcher.scale.grid import run_dir
from launcher.scale.models import Scaling
from tests.plan_fixture import answer, cell, measured, of_crammed_bert, profile, source_of
from tests.unit.test_scaling import grid, write_run

# --- what was measured


def test_scaling_json_gives_profile_curve_ceiling_and_baseline() -> None:
    source = source_of(measured())
    assert source.accumulation == 4
    assert source.spread == 0  # a CPU
    assert source.profile.gradient_bytes == 4
    assert source.profile.layers == 2
    assert source.profile.micro_s == pytest.approx((4.2 - 0.1) / 4)
    assert source.profile.backward_s == pytest.approx(0.6 * 4.1 / 4)
    assert source.curves.keys() == {2}
    assert [source.slowdown(n) for n in (1, 2, 4)] == pytest.approx([1.0, 1.25, 1.25])


def test_the_slowdown_is_the_middle_of_the_measured_ceilings_of_runs() -> None:
    shares = {"ddp-2": 0.8, "zero1-2": 0.5, "fsdp-2": 0.4}
    cells = [cell(name, 2, 5.3, ceiling_efficiency=share) for name, share in shares.items()]
    cells.append(cell("ddp-synthetic-2", 2, 5.3, kind="synthetic", ceiling_efficiency=0.1))
    source = source_of(measured(cells=[cell("weak-single-n1", 1, 4.2), *cells]))
    assert source.slowdowns == {2: pytest.approx(1 / 0.5)}


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2.0), ("fp16", 2.0), ("fp32", 4.0), ("fp64", 8.0)])
def test_activations_have_the_width_of_the_profiles_precision(precision: str, size: float) -> None:
    assert source_of(profile(precision=precision)).profile.activation_bytes == size


def test_a_ceiling_above_one_speeds_nothing_up() -> None:
    cells = [cell("weak-single-n1", 1, 4.2), cell("ddp-2", 2, 5.3, ceiling_efficiency=13.0)]
    assert source_of(measured(cells=cells)).slowdown(2) == 1.0


def test_a_step_shorter_than_the_optimizers_leaves_the_profile() -> None:
    cells = [cell("weak-single-n1", 1, 0.05)]
    assert source_of(measured(cells=cells)).profile.micro_s == 1.0


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
    return analyze(made, tmp_path, facts={"environment": {}, "config_hash": "x", "command": ["scale"]})


def test_the_benchmarks_own_document_gives_the_baseline(collected: Scaling) -> None:
    source = inputs.from_scaling(collected, "scaling.json")
    assert source.accumulation == 2
    assert source.curves.keys() == {2}
    assert any("(cell weak-single-n1)" in note for note in source.notes)
    mean = next(c for c in collected.cells if c.id == "weak-single-n1").step_s
    assert mean == pytest.approx(0.505)
    predicted = answer(source, 1, 2)
    assert predicted.rows[0].step_time_s == pytest.approx(mean)
    lines = {line.cell: line for line in predicted.measured}
    assert lines.keys() == {f"{m}-{e}" for m in ("weak", "strong") for e in ("single-n1", "ddp-n1", "ddp-n2")}
    single = lines["weak-single-n1"]
    assert single.predicted_tokens_per_s == pytest.approx(single.measured_tokens_per_s)
    assert single.within is True
    assert answer_measured(collected) == predicted
    assert answer_measured(collected.model_copy(update={"profile": None})) is None


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


def test_another_model_than_the_profiled_one_is_refused() -> None:
    message = r"--model: bert-base has .* parameters, the profile in p.json 119,"
    with pytest.raises(ConfigError, match=message):
        source_of(of_crammed_bert(), "p.json", "bert-base")
    near = source_of(of_crammed_bert(parameters=119_000_000), "p.json", "crammed-bert").profile
    assert (near.layers, near.hidden_size, near.heads) == (16, 768, 12)


# --- damaged files

NAN = math.nan


def of_cell(**changes: Any) -> dict[str, Any]:
    return measured(cells=[cell("c", 2, 1.0, **changes)])


def of_points(*points: Any, ranks: int = 2) -> dict[str, Any]:
    return measured(links=[{"world_size": ranks, "points": [*points]}])


def of_gradients(*gradients: Any) -> dict[str, Any]:
    return profile(gradients=[*gradients])


def ready(seconds: object) -> dict[str, Any]:
    return of_gradients({"name": "a", "bytes": 12_000_000, "ready_s": seconds})


@pytest.mark.parametrize("data", [{}, [], "x", None, {"profile": None}])
def test_a_file_without_a_profile_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"^(--from: )?it holds no profile"):
        source_of(data)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        *(
            (of_cell(accumulation=a), "cells.0.accumulation")
            for a in (0, -3, float("1e400"), 1.5, True, None, "2", 10**400)
        ),
        (of_cell(world_size=0), "cells.0.world_size"),
        (of_cell(tensor=0), "cells.0.tensor"),
        (of_cell(tensor=3), "cells.0: tensor: 3 does not divide"),
        (of_cell(step_time_s={"median": 1.0, "ci95": [1.0]}), "ci95"),
        (of_cell(step_time_s={"median": 1.0, "ci95": [2.0, 1.0]}), "ci95"),
        (of_cell(step_time_s=1.0), "cells.0.step_time_s"),
        (of_cell(step_time_s={"mean": 1e-310}), "cells.0.step_time_s.mean"),
        (of_cell(micro_batch=0.5), "cells.0.micro_batch"),
        (of_cell(tokens_per_s=-1.0), "cells.0.tokens_per_s"),
        *((of_cell(ceiling_efficiency=e), "cells.0.ceiling_efficiency") for e in (-0.5, 0.0, 2500.0, NAN)),
        (measured(cells=["x"]), "cells.0"),
        (measured(settings=3), "settings"),
        (measured(settings={"accumulation": -3}), "settings.accumulation"),
        (measured(profile=profile(micro_batch=0.5)), "profile.micro_batch"),
        (measured(links="none"), "links"),
        (of_points({"bytes": NAN, "seconds": 1.0}), "links.0.points.0"),
        (of_points({"bytes": 0, "seconds": 1.0}), "links.0.points.0"),
        (of_points({"bytes": 1, "seconds": 0.0}), "links.0.points.0"),
        (of_points({"bytes": 1, "seconds": -1.0}), "links.0.points.0"),
        (of_points({"bytes": 1}), "links.0.points.0"),
        (of_points(3), "links.0.points.0"),
        (of_points(ranks=1), "links.0.world_size"),
        ({"gradients": []}, "micro_batch"),
        (of_gradients(), "gradients"),
        (of_gradients({}), "gradients.0"),
        (of_gradients({"name": "a", "bytes": 0, "ready_s": 1}), "gradients.0.bytes"),
        (ready(None), "gradients.0.ready_s"),
        (ready(-0.1), "gradients.0.ready_s"),
        (ready(NAN), "gradients.0.ready_s"),
        (ready(0.7), "ready_s of a: 0.7 is above backward_s, 0.6"),
        (profile(micro_batch=0), "micro_batch"),
        (profile(optimizer_s=-0.1), "optimizer_s"),
        (profile(backward_s="1"), "backward_s"),
        (profile(backward_s=NAN), "backward_s"),
        (profile(backward_s=-0.6), "backward_s"),
        (profile(backward_s=1.1), "backward_s: 1.1 is above micro_s, 1"),
        (profile(micro_s=-1.0), "micro_s"),
        (profile(forward_s=None, micro_s=None), "micro_s: missing"),
        (profile(parameters=-5), "parameters"),
        (profile(parameters=3), "parameters: 3 for gradients of"),
        (profile(hidden_size=96, num_heads=5), "num_heads: 5 does not divide hidden_size 96"),
    ],
)
def test_a_damaged_field_is_named_with_its_file(data: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        source_of(data, "of/mine.json")
    (line,) = map(str, error.value.issues)
    assert line.startswith("of/mine.json: ")
    assert field in line
    assert len(line) < 400


def test_ready_times_a_little_late_are_another_clock_and_many_problems_are_cut_short() -> None:
    assert source_of(ready(0.62)).profile.micro_s == 1.0
    with pytest.raises(ConfigError) as error:
        source_of(measured(cells=[cell("c", 2, 1.0, tensor=0)] * 40))
    (line,) = map(str, error.value.issues)
    assert "(and 39 more); " in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("{}", "holds no profile"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_option(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "it.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^--from: .*{message}"):
        inputs.from_file(path)


# --- a rate


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_rate_is_given_back_by_one_rank_at_its_own_accumulation(accumulation: int) -> None:
    """AdamW reads four and writes three fp32 numbers a parameter, at the memory's speed, once a step."""
    source = inputs.from_rate("bert-large", 580, 256, accumulation, "A100-80G")
    speed = hardware.hardware().gpus["A100-80G"].memory_gb_s * 1e9 * hardware.constant("memory_reach")
    parameters = num_parameters(inputs.MODELS["bert-large"], 512)
    assert source.profile.optimizer_s == pytest.approx(parameters * (4 + 3) * 4 / speed)
    assert answer(source, 1).rows[0].samples_per_s == pytest.approx(580)
    state = 4 * 4 * parameters / GIB  # weights, gradients and two moments, all with 512 positions
    assert answer(source, 1).rows[0].state_gib == pytest.approx(state, rel=1e-9)


def test_a_rate_of_no_named_gpu_is_of_whole_steps() -> None:
    source = inputs.from_rate("crammed-bert", 1000, 128, 4, None)
    assert (source.profile.optimizer_s, source.profile.layers) == (0, 16)
    assert any("--gpu" in note for note in source.notes)


def test_options_of_a_rate_are_refused_beside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile()))
    assert inputs.choose(path, None, None, None, None, 1).profile.micro_s == 1.0
    with pytest.raises(ConfigError) as error:
        inputs.choose(path, None, 0.0, 8, "T4-16G", 1)
    assert [issue.setting for issue in error.value.issues] == ["--gpu", "--seq-per-s", "--micro"]


@pytest.mark.parametrize(
    ("model", "rate", "micro", "gpu", "message"),
    [
        (None, 1.0, 1, None, "--model, --seq-per-s and --micro"),
        ("bert-base", None, 1, None, "--model, --seq-per-s and --micro"),
        ("bert-base", 1.0, None, None, "--model, --seq-per-s and --micro"),
        *(
            ("bert-base", rate, 32, None, r"--seq-per-s: .* is not between")
            for rate in (1e-310, 0.0, -1.0, NAN, math.inf, 1e300)
        ),
        *(("bert-base", 100.0, micro, None, "--micro: .* is not between") for micro in (0, -1, 10**400)),
        ("bert-base", 100.0, 32, "K80", "--gpu: 'K80'"),
        ("bert-large", 1e9, 1, "T4-16G", "--seq-per-s: 1e.09 leaves no time"),
    ],
)
def test_an_impossible_rate_is_refused(
    model: str | None, rate: float | None, micro: int | None, gpu: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inputs.choose(None, model, rate, micro, gpu, 1)
