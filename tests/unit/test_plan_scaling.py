"""`bert-dp plan scaling`: what it reads, what it answers, what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from launcher import results
from launcher.plan import inputs, scaling
from launcher.plan.hardware import constant
from launcher.plan.plan_report import plan_report
from launcher.plan.question import Question
from tests.report_fixture import shown, unfolded

SIZES = (400, 200, 600)  # bytes of three fp32 gradients: 300 parameters


def profile(**changes: Any) -> dict[str, Any]:
    names = ("model.final_norm.weight", "model.layers.1.mlp.Wo.weight", "model.layers.0.mlp.Wo.weight")
    gradients = [
        {"name": name, "bytes": size * 10_000, "ready_s": 0.2 * (i + 1)}
        for i, (name, size) in enumerate(zip(names, SIZES, strict=True))
    ]
    return {
        "device": "CPU",
        "precision": "fp32",
        "compiled": False,
        "engine": "single",
        "micro_batch": 8,
        "sequence_length": 128,
        "parameters": 3_000_000,
        "forward_s": 0.4,
        "backward_s": 0.6,
        "micro_s": 1.0,
        "optimizer_s": 0.1,
        "gradients": gradients,
        **changes,
    }


def from_data(data: Any, name: str, model: str | None = None) -> inputs.Source:
    """What a prediction starts from when the file `name` holds `data`."""
    return inputs.from_scaling(inputs.read_measured(data, name), name, model)


def of_crammed_bert(**changes: Any) -> dict[str, Any]:
    gradients = [{"name": "all", "bytes": 4 * 119_589_889, "ready_s": 0.6}]
    return profile(parameters=119_589_889, gradients=gradients, **changes)


def cell(name: str, ranks: int, step: float, **changes: Any) -> dict[str, Any]:
    tokens = ranks * 4 * 8 * 128 / step
    return {
        "id": name,
        "mode": "weak",
        "engine": "ddp" if ranks > 1 else "single",
        "world_size": ranks,
        "tensor": 1,
        "micro_batch": 8,
        "accumulation": 4,
        "global_batch": 32 * ranks,
        "kind": "run",
        "status": "ok",
        "tokens_per_s": tokens,
        "step_time_s": {"median": step, "p95": step, "ci95": [step * 0.98, step * 1.02]},
        "efficiency": tokens / ranks / (4 * 8 * 128 / 4.2),
        "ceiling_efficiency": None,
        **changes,
    }


def measured(**changes: Any) -> dict[str, Any]:
    points = [{"bytes": size, "seconds": size / 1e9, "bucket": False} for size in (10**6, 10**7, 10**8)]
    return {
        "schema_version": 1,
        "status": "complete",
        "baseline": "single",
        "settings": {"accumulation": 4, "micro_batch": 8, "sequence_length": 128},
        "cells": [
            cell("weak-single-n1", 1, 4.2),
            cell("ddp-2", 2, 5.3, ceiling_efficiency=0.8),
            cell("oom", 4, 1.0, status="oom"),
            cell("ds-2", 2, 6.0, engine="deepspeed"),
            cell("ceiling-2", 2, 5.25, kind="ceiling"),
        ],
        "links": [{"world_size": 2, "backend": "gloo", "points": points}, {"world_size": 4, "points": []}],
        "profile": profile(),
        **changes,
    }


def test_scaling_json_gives_profile_curve_ceiling_and_baseline() -> None:
    source = from_data(measured(), "scaling.json")
    assert source.accumulation == 4
    assert source.spread == 0  # a CPU
    assert source.profile.gradient_bytes == 4
    assert source.profile.layers == 2
    assert source.profile.micro_s == pytest.approx((4.2 - 0.1) / 4)
    assert source.profile.backward_s == pytest.approx(0.6 * 4.1 / 4)
    assert source.curves.keys() == {2}
    assert [source.slowdown(n) for n in (1, 2, 4)] == pytest.approx([1.0, 1.25, 1.25])


def test_a_ceiling_above_one_speeds_nothing_up() -> None:
    cells = [cell("weak-single-n1", 1, 4.2), cell("ddp-2", 2, 5.3, ceiling_efficiency=13.0)]
    source = from_data(measured(cells=cells), "scaling.json")
    assert source.slowdown(2) == 1.0


def test_one_rank_is_the_measured_one_and_two_follow_by_hand() -> None:
    source = from_data(measured(), "scaling.json")
    found = scaling.answer(source, Question(gpus=(1, 2)))
    one, two = found.rows
    assert one.step_time_s == pytest.approx(4.2)
    assert (one.efficiency, one.speedup, one.exposed_comm_fraction) == (1, 1, 0)
    # the ceiling slows all of the step; of 12 MB at 1 GB/s at most the gain of overlap is hidden
    exposed = two.step_time_s - 4.2 * 1.25
    assert 0.012 * (1 - constant("overlap_gain")) <= exposed <= 0.012
    assert two.split_s.exposed_comm == pytest.approx(exposed)
    assert two.speedup == pytest.approx(2 * two.efficiency)
    assert two.global_batch == 64
    assert sum(two.split_s.model_dump().values()) == pytest.approx(two.step_time_s)
    assert two.tokens_per_s == pytest.approx(64 * 128 / two.step_time_s)
    assert two.samples_per_s == pytest.approx(64 / two.step_time_s)


def test_prediction_stands_beside_what_was_measured() -> None:
    found = scaling.answer(from_data(measured(), "scaling.json"), Question(gpus=(2,))).measured
    # no ceiling, no other engine, no failure
    assert [line.cell for line in found] == ["weak-single-n1", "ddp-2"]
    assert found[0].within is True
    assert found[0].predicted_step_s == pytest.approx(4.2)
    assert found[1].measured_step_s == 5.3
    low, high = found[1].ci95
    assert found[1].within == (low <= found[1].predicted_step_s <= high)


def test_levers_are_what_the_model_says_of_the_change() -> None:
    source = inputs.from_rate("bert-base", 400, 32, 1, "V100-16G")
    asked = Question(gpus=(8,), link="pcie3")
    (row,) = scaling.answer(source, asked).rows
    levers = {lever.lever: lever for lever in row.levers}
    gains = [lever.gain for lever in row.levers]
    assert gains == sorted(gains, reverse=True)
    (twice,) = scaling.answer(source, Question(gpus=(8,), link="pcie3", accumulation=(2,))).rows
    assert levers["2 x accumulation"].tokens_per_s == pytest.approx(twice.tokens_per_s)
    (narrow,) = scaling.answer(source, Question(gpus=(8,), link="pcie3", reduce_dtype="bf16")).rows
    assert levers["16-bit gradients"].tokens_per_s == pytest.approx(narrow.tokens_per_s)
    (even,) = scaling.answer(dataclasses.replace(source, spread=0.0), asked).rows
    assert levers["no stragglers"].tokens_per_s == pytest.approx(even.tokens_per_s)
    assert {name for name, lever in levers.items() if lever.bound} == {"no stragglers", "perfect overlap"}
    assert levers["2 x link speed"].gain > 0
    assert scaling.answer(source, Question(gpus=(1,))).rows[0].levers == []


@pytest.mark.parametrize("link", ["ethernet1", "ethernet2.5", "ethernet10"])
def test_one_gpu_a_node_needs_no_link_within_it(link: str) -> None:
    source = inputs.from_rate("bert-base", 400, 32, 1, "V100-16G")
    asked = Question(gpus=(1, 4), gpus_per_node=1, inter=link)
    found = scaling.answer(source, asked)
    assert f"one GPU a node, 1 x {link} between nodes" in found.assumptions
    other = scaling.answer(source, dataclasses.replace(asked, link="nvlink4"))
    assert [row.step_time_s for row in found.rows] == [row.step_time_s for row in other.rows]


def test_rate_without_a_profile() -> None:
    source = inputs.from_rate("bert-large", 580, 256, 1, "A100-80G")
    (row,) = scaling.answer(source, Question(gpus=(1,))).rows
    assert row.samples_per_s == pytest.approx(580)
    bare = inputs.from_rate("crammed-bert", 1000, 128, 4, None)
    assert bare.profile.optimizer_s == 0
    assert any("--gpu" in note for note in bare.notes)
    assert bare.profile.layers == 16


def test_tensor_sizes_that_do_not_divide_are_left_out() -> None:
    source = inputs.from_rate("bert-large", 580, 256, 1, None)
    rows = scaling.answer(source, Question(gpus=(1, 2, 4), link="nvlink4", tensor=(1, 2))).rows
    assert [(row.tensor, row.world_size) for row in rows] == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
    with pytest.raises(ConfigError, match="--tensor: no size"):
        scaling.answer(source, Question(gpus=(1, 2), link="nvlink4", tensor=(4,)))
    alone = from_data(profile(), "p.json")
    with pytest.raises(ConfigError, match="add --model"):
        scaling.answer(alone, Question(gpus=(2,), link="gloo-loopback", tensor=(2,)))
    shaped = from_data(of_crammed_bert(), "p.json", "crammed-bert")
    assert scaling.answer(shaped, Question(gpus=(2,), link="gloo-loopback", tensor=(2,))).rows


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question(gpus=(2,)), "--link: not given"),
        (Question(gpus=(2,), link="nvlink"), "did you mean nvlink"),
        (Question(gpus=(16,), link="nvlink4"), "--inter: 16 GPUs fill more than one node of 8"),
        (Question(gpus=(16,), link="nvlink4", inter="ib-ndx"), "--inter: unknown link"),
        (Question(gpus=(16,), inter="ib-ndr", gpus_per_node=4), "--link"),
        (Question(gpus=(2,), link="pcie4", engine="deepspeed"), "--engine: 'deepspeed' is not modelled"),
        (Question(gpus=(2,), link="pcie4", nics=0), "--nics: 0 is not above 0"),
        (Question(gpus=(2,), link="pcie4", gpus_per_node=-8), "--gpus-per-node"),
        (Question(gpus=(2,), link="pcie4", bucket_mib=float("nan")), "--bucket-mib"),
        (Question(gpus=(2,), link="pcie4", reduce_dtype="int8"), "--reduce-dtype"),
    ],
)
def test_bad_questions_are_refused_with_the_setting(question: Question, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        scaling.answer(from_data(profile(), "p.json"), question)
    assert message in " ".join(error.value.issues)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "x",
        None,
        {"profile": None},
        {"gradients": []},
        profile(gradients=[]),
        profile(micro_batch=0),
        profile(backward_s="1"),
        profile(backward_s=float("nan")),
        profile(micro_s=-1.0),
        profile(gradients=[{}]),
        profile(gradients=[{"name": "a", "bytes": 0, "ready_s": 1}]),
        profile(gradients=[{"name": "a", "bytes": 4, "ready_s": None}]),
        measured(links=[{"world_size": 2, "points": [{"bytes": 1}]}]),
        measured(links="none"),
        measured(cells=["x"]),
        measured(settings=3),
    ],
)
def test_damaged_files_are_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"^(--from: )?it (holds no profile|is damaged)"):
        from_data(data, "it")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--from: .* cannot be read"):
        inputs.from_file(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^--from: .* is not JSON"):
        inputs.from_file(tmp_path / "broken.json")
    with pytest.raises(ConfigError, match="--gpu: 'K80'"):
        inputs.from_rate("bert-base", 100, 32, 1, "K80")
    with pytest.raises(ConfigError, match="--seq-per-s"):
        inputs.from_rate("bert-large", 1e9, 1, 1, "T4-16G")


def test_nulls_of_a_partial_result_are_no_numbers() -> None:
    partial = measured(
        status="partial",
        baseline=None,
        links=None,
        settings=None,
        cells=[cell("weak-single-n1", 1, 4.2, step_time_s=None, tokens_per_s=None)],
    )
    source = from_data(partial, "it")
    assert source.accumulation == 1
    found = scaling.answer(source, Question(gpus=(1, 2), link="gloo-loopback"))
    assert found.measured == []
    assert json.dumps(results.plain(found), allow_nan=False)


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_table_shows_every_row_and_lever(columns: int) -> None:
    source = from_data(measured(), "[bold]x\x1b[31m.json")
    found = scaling.answer(source, Question(gpus=(1, 2, 4)))
    text = unfolded(shown(plan_report(found), columns))
    assert "\x1b" not in text
    assert "[bold]x" in text
    for lever in found.rows[-1].levers:
        assert lever.lever in text
    assert "ddp-2" in text
    if columns == 160:
        assert f"{100 * found.rows[1].efficiency:.1f} %" in text
