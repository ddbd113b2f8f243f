"""`bert-dp plan scaling`: what it answers, and which questions it refuses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from bert_dp.config import ConfigError
from bert_dp.cost import flops_per_token
from launcher import results
from launcher.plan import inputs
from launcher.plan.hardware import constant
from launcher.plan.plan_report import plan_report
from launcher.plan.question import Question
from launcher.plan.scaling import scenario_of
from tests.plan_fixture import answer, cell, measured, of_crammed_bert, profile, source_of
from tests.report_fixture import shown, unfolded

SHAPE = {"num_layers": 2, "hidden_size": 96, "num_heads": 6}
BASE = inputs.from_rate("bert-base", 400, 32, 1, "V100-16G")
LARGE = inputs.from_rate("bert-large", 580, 256, 1, "A100-80G")


def test_one_rank_is_the_measured_one_and_two_follow_by_hand() -> None:
    one, two = answer(source_of(measured()), 1, 2).rows
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


# --- measured cells beside their prediction


def test_prediction_stands_beside_what_was_measured() -> None:
    """No ceiling, no engine that is not modelled, no failure; and no more ranks than a link is known for."""
    one, two = answer(source_of(measured()), 2).measured
    assert (one.cell, two.cell) == ("weak-single-n1", "ddp-2")
    assert one.within is True
    assert one.predicted_step_s == pytest.approx(4.2)
    assert two.measured_step_s == 5.3
    low, high = two.ci95
    assert two.within == (low <= two.predicted_step_s <= high)
    assert answer(source_of(measured()), 1, link="nvlink4", gpus_per_node=1).measured == [one, two]
    blind = answer(source_of(measured(links=[])), 1).measured
    assert [line.cell for line in blind] == ["weak-single-n1"]


def test_a_measured_cell_is_predicted_with_its_own_batch() -> None:
    """Twice the micro batch of the profile, half its accumulation."""
    own = cell("strong-ddp-n1", 1, 4.0, engine="ddp", micro_batch=16, accumulation=2)
    source = source_of(measured(cells=[cell("weak-single-n1", 1, 4.2), own]))
    micro_s = (4.2 - 0.1) / 4
    lines = {line.cell: line for line in answer(source, 2).measured}
    assert lines["weak-single-n1"].predicted_step_s == pytest.approx(4 * micro_s + 0.1)
    assert lines["strong-ddp-n1"].predicted_step_s == pytest.approx(2 * 2 * micro_s + 0.1)
    assert lines["strong-ddp-n1"].within == (3.92 <= 4 * micro_s + 0.1 <= 4.08)


def test_a_prediction_is_compared_with_the_mean_step_whose_interval_it_has() -> None:
    time = {"median": 9.0, "mean": 5.3, "p95": 9.5, "ci95": [5.2, 5.4]}
    source = source_of(measured(cells=[cell("c", 2, 9.0, step_time_s=time)]))
    assert answer(source, 2).measured[0].measured_step_s == 5.3


def test_nulls_of_a_partial_result_are_no_numbers() -> None:
    partial = measured(
        status="partial",
        links=[],
        settings={},
        cells=[cell("weak-single-n1", 1, 4.2, step_time_s=None, tokens_per_s=None)],
    )
    source = source_of(partial)
    assert source.accumulation == 1
    predicted = answer(source, 1, 2, link="gloo-loopback")
    assert predicted.measured == []
    assert json.dumps(results.plain(predicted), allow_nan=False)


# --- levers


def test_levers_are_what_the_model_says_of_the_change() -> None:
    (row,) = answer(BASE, 8, link="pcie3").rows
    levers = {lever.lever: lever for lever in row.levers}
    gains = [lever.gain for lever in row.levers]
    assert gains == sorted(gains, reverse=True)
    changed = {
        "2 x accumulation": answer(BASE, 8, link="pcie3", accumulation=(2,)),
        "16-bit gradients": answer(BASE, 8, link="pcie3", reduce_dtype="bf16"),
        "no stragglers": answer(dataclasses.replace(BASE, spread=0.0), 8, link="pcie3"),
    }
    for name, predicted in changed.items():
        assert levers[name].tokens_per_s == pytest.approx(predicted.rows[0].tokens_per_s), name
    assert {name for name, lever in levers.items() if lever.bound} == {"no stragglers", "perfect overlap"}
    assert levers["2 x link speed"].gain > 0
    assert answer(BASE, 1).rows[0].levers == []
    (bounded,) = answer(LARGE, 8, link="nvlink4").rows
    assert bounded.levers[0].lever == "no stragglers"  # is no setting
    best = plan_report(answer(LARGE, 8, link="nvlink4")).sections[0].tables[0].rows[0].cells[-1]
    assert best.text == f"{100 * bounded.levers[1].gain:+.1f} % {bounded.levers[1].lever}"


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("link", "bucket_mib"), [("ethernet10", 0.01), ("nvlink4", 0.001), ("gloo-loopback", None)]
)
def test_bounds_never_lose(engine: str, link: str, bucket_mib: float | None) -> None:
    size = None if engine == "fsdp" else bucket_mib  # which has no buckets
    (row,) = answer(BASE, 8, link=link, gpus_per_node=8, engine=engine, bucket_mib=size).rows
    assert all(lever.gain >= 0 for lever in row.levers if lever.bound)


def test_only_ddp_with_wider_gradients_can_send_16_bits() -> None:
    def names(**options: Any) -> set[str]:
        (row,) = answer(BASE, 8, link="pcie3", **options).rows
        return {lever.lever for lever in row.levers}

    assert "16-bit gradients" in names()
    for options in ({"engine": "zero1"}, {"engine": "fsdp"}, {"reduce_dtype": "bf16"}):
        assert "16-bit gradients" not in names(**options), options
    assert names() - names(engine="fsdp") == {"16-bit gradients", "2 x bucket size", "no overlap: one bucket"}


# --- links and tensor parallelism


def test_the_all_reduce_is_that_of_the_next_greater_number_of_ranks() -> None:
    """Else of the most that were measured; --link takes the place of all of them."""
    points = {2: 1.0, 4: 2.0, 8: 3.0}
    links = [{"world_size": n, "points": [{"bytes": 1000, "seconds": s}]} for n, s in points.items()]
    source = source_of(measured(links=links))
    for ranks, measured_over in ((2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (16, 8)):
        curve = scenario_of(source, Question(gpus=(ranks,)), ranks, 1, 1).fabric.curve
        assert curve is not None
        assert curve.ranks == measured_over, ranks
    assert scenario_of(source, Question(gpus=(2,), link="pcie4"), 2, 1, 1).fabric.curve is None


def test_ranks_of_one_node_slow_each_other_down_and_not_those_of_others() -> None:
    cells = [cell(f"ddp-{n}", n, 5.3, ceiling_efficiency=share) for n, share in ((2, 0.8), (4, 0.5))]
    source = source_of(measured(cells=[cell("weak-single-n1", 1, 4.2), *cells]))
    nodes = Question(gpus=(8,), link="pcie4", inter="ib-ndr", gpus_per_node=2)
    assert scenario_of(source, nodes, 8, 1, 1).slowdown == pytest.approx(1.25)
    assert scenario_of(source, Question(gpus=(8,)), 8, 1, 1).slowdown == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "bucket", "first"),
    [
        ({}, 25 * 2**20, 2**20),
        ({"bucket_mib": 4.0}, 4 * 2**20, None),
        ({"engine": "zero1"}, 25 * 2**20, None),
    ],
)
def test_the_first_bucket_is_smaller_with_ddps_own_sizes_alone(
    options: dict[str, Any], bucket: float, first: float | None
) -> None:
    scenario = scenario_of(BASE, Question(gpus=(2,), link="pcie3", **options), 2, 1, 3)
    assert (scenario.bucket_bytes, scenario.first_bucket) == (bucket, first)
    assert (scenario.accumulation, scenario.spread) == (3, BASE.spread)


@pytest.mark.parametrize("link", ["ethernet1", "ethernet2.5", "ethernet10"])
def test_one_gpu_a_node_needs_no_link_within_it(link: str) -> None:
    without, with_link = (
        answer(BASE, 1, 4, gpus_per_node=1, inter=link, link=within) for within in (None, "nvlink4")
    )
    assert f"one GPU a node, 1 x {link} between nodes" in without.assumptions
    assert [row.step_time_s for row in without.rows] == [row.step_time_s for row in with_link.rows]


@pytest.mark.parametrize(
    ("gpus", "options", "note"),
    [
        (8, {"link": "nvlink4"}, "nvlink4 within a node"),
        (
            16,
            {"link": "nvlink4", "inter": "ib-ndr", "nics": 4},
            "nvlink4 within a node of 8 GPUs, 4 x ib-ndr between nodes",
        ),
        (2, {}, "all-reduce as measured over 2 ranks; its bus bandwidth for other numbers"),
    ],
)
def test_links_are_told(gpus: int, options: dict[str, Any], note: str) -> None:
    assert note in answer(source_of(measured()), gpus, **options).assumptions
    assert answer(source_of(profile()), 1).assumptions[1] == "one rank: no link"


def test_what_is_assumed_is_told_with_its_numbers() -> None:
    notes = answer(dataclasses.replace(source_of(measured()), spread=0.015), 2).assumptions
    gain = f"{100 * constant('overlap_gain'):.0f} %"
    assert notes[:2] == [
        "profile of CPU, fp32: it",
        "one rank's step is the measured one, 4.2 s (cell weak-single-n1)",
    ]
    assert "computation slowed as the measured ceiling says (2: x 1.250), beyond as the last" in notes
    assert "weak scaling: every replica keeps its micro batch of 8 and its accumulation" in notes
    assert any("spread by 1.5 %" in note for note in notes)
    hidden = f"running communication beside the backward pass hides {gain} of what it ideally could "
    assert f"{hidden}(overlap_gain of hardware.yaml)" in notes
    ready = "when each gradient is ready is estimated from the layers"
    assert BASE.notes[0] == f"400 sequences/s on one rank at accumulation 1; {ready}"
    optimizer = (
        f"optimizer {1000 * BASE.profile.optimizer_s:.1f} ms: fused AdamW at V100-16G's memory bandwidth"
    )
    assert BASE.notes[1] == optimizer
    assert (
        len(source_of(measured(cells=[cell("tp", 2, 9.0, tensor=2, ceiling_efficiency=0.5)])).slowdowns) == 0
    )


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
    predicted = answer(source_of(profile(device=device)), 1, 2, link=link)
    assert [text[:24] for text in predicted.warnings] == ["The profile is of a CPU,"] * warned
    assert (f"{link} joins GPUs" in unfolded(shown(plan_report(predicted)))) == warned


def test_tensor_sizes_that_do_not_divide_are_left_out() -> None:
    rows = answer(LARGE, 1, 2, 4, link="nvlink4", tensor=(1, 2)).rows
    assert [(row.tensor, row.world_size) for row in rows] == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
    with pytest.raises(ConfigError, match="--tensor: no size"):
        answer(LARGE, 1, 2, link="nvlink4", tensor=(4,))


def test_tensor_parallelism_needs_the_models_shape() -> None:
    """From --model, or from a profile that has it."""
    two = cell("tp", 2, 9.0, tensor=2)
    blind = source_of(measured(cells=[two]))
    assert answer(blind, 2).measured == []
    with pytest.raises(ConfigError, match="add --model"):
        answer(blind, 2, tensor=(2,))
    named = source_of(of_crammed_bert(), "p.json", "crammed-bert")
    assert answer(named, 2, link="gloo-loopback", tensor=(2,)).rows
    shaped = source_of(measured(cells=[two], profile=profile(**SHAPE)))
    predicted = answer(shaped, 2, tensor=(1, 2))
    assert [row.tensor for row in predicted.rows] == [1, 2]
    assert [line.cell for line in predicted.measured] == ["tp"]
    for sizes in ((4,), (1, 2, 4)):
        with pytest.raises(ConfigError, match=r"--tensor: 4 does not divide .* 6 .*num_heads.* 1, 2, 3, 6"):
            answer(shaped, 4, tensor=sizes)


# --- the device


def test_mfu_of_a_named_gpu() -> None:
    one, two = answer(LARGE, 1, 2, link="nvlink3").rows
    flops = flops_per_token(inputs.MODELS["bert-large"], 128, 0.15)
    assert one.mfu == pytest.approx(580 * 128 * flops / 312e12)
    assert two.mfu == pytest.approx(one.mfu * two.efficiency)
    assert BASE.device is not None
    assert (BASE.device.precision, BASE.device.peak_flops) == ("fp16", 125e12)


@pytest.mark.parametrize(
    ("device", "precision", "peak"), [("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("CPU", "fp32", None)]
)
def test_mfu_of_the_profiled_device(device: str, precision: str, peak: float | None) -> None:
    settings = {"accumulation": 4, "flops_per_token": 1e9}
    data = measured(settings=settings, profile=profile(device=device, precision=precision))
    (row,) = answer(source_of(data), 1).rows
    assert row.mfu == (pytest.approx(row.tokens_per_s * 1e9 / peak) if peak else None)
    assert row.fits is None


def test_the_flops_of_a_profile_without_settings_are_of_the_named_model() -> None:
    device = source_of(of_crammed_bert(device="A100", precision="bf16"), "it", "crammed-bert").device
    assert device is not None
    assert device.flops_per_token == pytest.approx(622.9e6, rel=1e-3)


def test_a_row_has_the_state_of_a_rank_and_says_whether_it_fits() -> None:
    options: dict[str, Any] = {"link": "nvlink3", "engine": "fsdp"}
    (row,) = answer(LARGE, 4, accumulation=(2,), **options).rows
    count = sum(g.size for g in LARGE.profile.gradients) / 4
    assert row.state_gib == pytest.approx((4 + 12 / 4) * count / 2**30)
    assert row.fits is True
    assert LARGE.device is not None
    small = dataclasses.replace(LARGE, device=dataclasses.replace(LARGE.device, memory_gib=4.0))
    predicted = answer(small, 1, 2, 4, **options)
    assert [row.fits for row in predicted.rows] == [False, True, True]
    state = 16 * count / 2**30  # weights, gradients and two moments
    note = f"DOES NOT FIT on 1 GPUs: weights, gradients and optimizer alone take up to {state:.1f} GiB a rank"
    assert any(text.startswith(f"{note} with fsdp, A100-80G has 4;") for text in predicted.assumptions), note
    assert "MFU over 312 TFLOP/s a GPU: A100-80G, bf16" in predicted.assumptions
    text = unfolded(shown(plan_report(predicted), 120))
    assert "DOES NOT FIT" in text
    assert "MFU" in text


# --- what is refused, and what is shown


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (2, {}, "--link: not given"),
        (2, {"link": "nvlink"}, "did you mean nvlink"),
        (16, {"link": "nvlink4"}, "--inter: 16 GPUs fill more than one node of 8"),
        (16, {"link": "nvlink4", "inter": "ib-ndx"}, "--inter: unknown link"),
        (16, {"inter": "ib-ndr", "gpus_per_node": 4}, "--link"),
        (2, {"link": "pcie4", "engine": "deepspeed"}, "--engine: 'deepspeed' is not modelled"),
        (2, {"link": "pcie4", "nics": 0}, "--nics: 0 is not above 0"),
        (2, {"link": "pcie4", "gpus_per_node": -8}, "--gpus-per-node"),
        (2, {"link": "pcie4", "bucket_mib": float("nan")}, "--bucket-mib"),
        (2, {"link": "pcie4", "reduce_dtype": "int8"}, "--reduce-dtype: 'int8' is not modelled"),
        (
            2,
            {"link": "pcie4", "engine": "zero1", "reduce_dtype": "bf16"},
            "bf16 is sent by ddp alone, not by",
        ),
        (2, {"link": "pcie4", "engine": "fsdp", "bucket_mib": 4.0}, "--bucket-mib: fsdp has no buckets"),
    ],
)
def test_a_bad_question_is_refused_with_the_setting(gpus: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        answer(source_of(profile()), gpus, **options)
    assert message in str(error.value)


def test_an_unknown_model_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError) as error:
        inputs.find_model("bert-bse")
    (issue,) = map(str, error.value.issues)
    assert issue.startswith("--model: bert-bse")
    assert issue.endswith("; or bert-base or bert-large")


def test_a_link_that_nothing_crosses_is_warned_of() -> None:
    options: dict[str, Any] = {"link": "nvlink4", "inter": "ib-ndr"}
    (warning,) = answer(BASE, 8, **options).warnings
    assert warning.startswith("--inter: 8 GPUs stand in one node of 8, so ib-ndr carries nothing; ")
    assert answer(BASE, 8, gpus_per_node=4, **options).warnings == []


def test_a_measured_curve_within_a_node_does_not_replace_its_link() -> None:
    with pytest.raises(ConfigError, match="--link: give the link within a node as well as --inter ib-ndr"):
        answer(source_of(measured()), 16, inter="ib-ndr", gpus_per_node=4)


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_table_shows_every_row_and_lever(columns: int) -> None:
    predicted = answer(source_of(measured(), "[bold]x\x1b[31m.json"), 1, 2, 4)
    report = plan_report(predicted)
    text = unfolded(shown(report, columns))
    assert report.next == ""  # it has been measured
    assert plan_report(predicted, "crammed-bert").next == "bert-dp scale crammed-bert --nproc 1,2,4"
    assert "What one change would do on 4 GPUs" in text
    bound = next(lever for lever in predicted.rows[2].levers if lever.bound)
    assert f"{bound.lever} {100 * bound.gain:+.1f} %, an upper bound, no setting" in text
    assert "\x1b" not in text
    assert "[bold]x" in text
    for lever in predicted.rows[-1].levers:
        assert lever.lever in text
    assert "ddp-2" in text
    if columns == 160:
        assert f"{100 * predicted.rows[1].efficiency:.1f} %" in text
