"""Options of `plan scaling` that contradict each other or the model, and what the named GPU adds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from bert_dp.cost import flops_per_token
from launcher.plan import inputs, scaling
from launcher.plan.plan_report import plan_report
from launcher.plan.question import Question
from tests.report_fixture import shown, unfolded
from tests.unit.test_plan_scaling import cell, from_data, measured, of_crammed_bert, profile

SHAPE = {"num_layers": 2, "hidden_size": 96, "num_heads": 6}


def test_options_of_a_rate_are_refused_beside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile()))
    assert inputs.choose(path, None, None, None, None, 1).profile.micro_s == 1.0
    with pytest.raises(ConfigError) as error:
        inputs.choose(path, None, 0.0, 8, "T4-16G", 1)
    assert [issue.split(":")[0] for issue in error.value.issues] == ["--gpu", "--seq-per-s", "--micro"]


@pytest.mark.parametrize("given", [(None, 1.0, 1), ("bert-base", None, 1), ("bert-base", 1.0, None)])
def test_a_rate_needs_all_three(given: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ConfigError, match="--model, --seq-per-s and --micro"):
        inputs.choose(None, *given, None, 1)


@pytest.mark.parametrize("rate", [1e-310, 0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"--seq-per-s: .* is not between"):
        inputs.from_rate("bert-base", rate, 32, 1, None)


@pytest.mark.parametrize("micro", [0, -1, 10**400])
def test_an_impossible_micro_batch_is_refused(micro: int) -> None:
    with pytest.raises(ConfigError, match="--micro"):
        inputs.from_rate("bert-base", 100.0, micro, 1, None)


def test_another_model_than_the_profiled_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--model: bert-base has .* parameters, the profile in p.json 119,"
    ):
        from_data(of_crammed_bert(), "p.json", "bert-base")
    near = from_data(of_crammed_bert() | {"parameters": 119_000_000}, "p.json", "crammed-bert").profile
    assert (near.layers, near.hidden_size, near.heads) == (16, 768, 12)


@pytest.mark.parametrize(
    ("device", "link", "warned"),
    [
        ("CPU", "nvlink4", True),
        ("CPU", "gloo-loopback", False),
        ("CPU", "ethernet10", False),
        ("NVIDIA H100 80GB HBM3", "nvlink4", False),
    ],
)
def test_a_cpus_profile_with_links_of_gpus_is_warned_of(device: str, link: str, warned: bool) -> None:
    source = from_data(profile() | {"device": device}, "p.json")
    found = scaling.answer(source, Question(gpus=(1, 2), link=link))
    assert [text[:24] for text in found.warnings] == ["The profile is of a CPU,"] * warned
    assert (f"{link} joins GPUs" in unfolded(shown(plan_report(found)))) == warned


def test_a_profile_that_knows_its_shape_needs_no_model() -> None:
    two = cell("tp", 2, 9.0, tensor=2)
    source = from_data(measured(cells=[two], profile=profile(**SHAPE)), "it")
    found = scaling.answer(source, Question(gpus=(2,), tensor=(1, 2)))
    assert [row.tensor for row in found.rows] == [1, 2]
    assert [line.cell for line in found.measured] == ["tp"]
    blind = from_data(measured(cells=[two]), "it")
    assert scaling.answer(blind, Question(gpus=(2,))).measured == []
    for sizes in ((4,), (1, 2, 4)):
        with pytest.raises(ConfigError, match=r"--tensor: 4 does not divide .* 6 .*num_heads.* 1, 2, 3, 6"):
            scaling.answer(source, Question(gpus=(4,), tensor=sizes))
    with pytest.raises(ConfigError, match="num_heads: 5 does not divide hidden_size 96"):
        from_data(profile(**{**SHAPE, "num_heads": 5}), "it")


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
def test_bounds_never_lose(engine: str) -> None:
    for link, bucket in (("ethernet10", 0.01), ("nvlink4", 0.001), ("gloo-loopback", None)):
        source = inputs.from_rate("bert-base", 400, 32, 1, "V100-16G")
        asked = Question(gpus=(8,), link=link, gpus_per_node=8, engine=engine, bucket_mib=bucket)
        for lever in scaling.answer(source, asked).rows[0].levers:
            assert not lever.bound or lever.gain >= 0


def test_mfu_of_a_named_gpu_and_of_the_profiled_one() -> None:
    source = inputs.from_rate("bert-large", 580, 256, 1, "A100-80G")
    one, two = scaling.answer(source, Question(gpus=(1, 2), link="nvlink3")).rows
    flops = flops_per_token(inputs.MODELS["bert-large"], 128, 0.15)
    assert one.mfu == pytest.approx(580 * 128 * flops / 312e12)
    assert two.mfu == pytest.approx(one.mfu * two.efficiency)
    volta = inputs.from_rate("bert-base", 400, 32, 1, "V100-16G")
    assert volta.device is not None
    assert (volta.device.precision, volta.device.peak_flops) == ("fp16", 125e12)
    settings = {"accumulation": 4, "flops_per_token": 1e9}
    for device, precision, peak in (("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("CPU", "fp32", None)):
        facts = measured(settings=settings, profile=profile(device=device, precision=precision))
        (row,) = scaling.answer(from_data(facts, "it"), Question(gpus=(1,))).rows
        assert row.mfu == (pytest.approx(row.tokens_per_s * 1e9 / peak) if peak else None)
        assert row.fits is None
    crammed = from_data(of_crammed_bert(device="A100", precision="bf16"), "it", "crammed-bert").device
    assert crammed is not None
    assert crammed.flops_per_token == pytest.approx(622.9e6, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "accumulation", "tensor", "bytes_each"),
    [
        ("ddp", 1, 1, 16),
        ("zero1", 1, 1, 8 + 8 / 4),
        ("fsdp", 1, 1, 16 / 4),
        ("fsdp", 2, 1, 4 + 12 / 4),
        ("ddp", 1, 2, 8),
    ],
)
def test_state_is_what_the_engine_leaves_a_rank(
    engine: str, accumulation: int, tensor: int, bytes_each: float
) -> None:
    source = inputs.from_rate("bert-large", 580, 256, 1, "A100-80G")
    asked = Question(
        gpus=(4,),
        link="nvlink3",
        engine=engine,
        tensor=(tensor,),
        accumulation=(accumulation,),
        reduce_dtype="bf16",
    )
    (row,) = scaling.answer(source, asked).rows
    count = sum(g.size for g in source.profile.gradients) / 4
    assert row.state_gib == pytest.approx(bytes_each * count / 2**30)
    assert row.fits is True


def test_a_state_that_cannot_fit_is_said() -> None:
    source = inputs.from_rate("bert-large", 580, 256, 1, "A100-80G")
    assert source.device is not None
    small = dataclasses.replace(source, device=dataclasses.replace(source.device, memory_gib=4.0))
    found = scaling.answer(small, Question(gpus=(1, 2, 4), link="nvlink3", engine="fsdp"))
    assert [row.fits for row in found.rows] == [False, True, True]
    assert any(note.startswith("DOES NOT FIT on 1 GPUs: ") for note in found.assumptions)
    text = unfolded(shown(plan_report(found), 120))
    assert "DOES NOT FIT" in text
    assert "MFU" in text
