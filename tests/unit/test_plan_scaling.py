"""Tests of `bert-dp plan scaling`: sources, rows and refused options."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bert_dp.cost import flops_per_token, num_parameters
from launcher.plan import scaling
from launcher.plan.scaling import PlanSpec, find_source, scenario_of, source_of, source_of_rate
from launcher.plan.step_model import AllReduceCurve, constant, hardware
from launcher.scale.analyze import analyze
from launcher.scale.grid import run_dir
from launcher.scale.models import Scaling
from tests.helpers import raised_issues
from tests.plan_fixture import cell, measured, plan, profile, source
from tests.unit.test_scaling import grid, write_run

BASE = source_of_rate("bert-base", 400, 32, 1, "V100-16G")
LARGE = source_of_rate("bert-large", 580, 256, 1, "A100-80G")
ONE = cell("weak-single-n1", 1, 4.2)


def test_scaling_json_gives_profile_curve_ceiling_and_baseline() -> None:
    found = source()
    assert (found.accumulation, found.spread) == (4, 0)  # a CPU has no spread between devices
    assert found.profile.micro_s == pytest.approx((4.2 - 0.1) / 4)
    assert found.profile.backward_s == pytest.approx(0.6 * 4.1 / 4)
    assert found.profile.gradients[0].ready_s == pytest.approx(0.2 * 4.1 / 4)
    assert found.curves == {2: AllReduceCurve(2, {1e6: 1e-3, 1e7: 1e-2, 1e8: 0.1})}
    assert [found.slowdown(n) for n in (1, 2, 4)] == pytest.approx([1.0, 1.25, 1.25])
    gpu = source(profile=profile(device="NVIDIA H100 80GB HBM3"))
    assert gpu.spread == constant("device_spread")


def test_the_slowdown_is_the_median_over_the_ceilings_of_the_runs() -> None:
    """The slowdown is at least 1 and ignores cells with tensor parallelism."""
    shares = {"ddp-2": 0.8, "zero1-2": 0.5, "fsdp-2": 0.4}
    cells = [cell(name, 2, 5.3, ceiling_efficiency=share) for name, share in shares.items()]
    cells.append(cell("ceiling-2", 2, 5.3, kind="ceiling", ceiling_efficiency=0.1))
    cells.append(cell("tp", 2, 5.3, tensor=2, ceiling_efficiency=0.1))
    assert source(cells=[ONE, *cells]).slowdowns == {2: pytest.approx(1 / 0.5)}
    assert source(cells=[ONE, cell("ddp-2", 2, 5.3, ceiling_efficiency=13.0)]).slowdown(2) == 1.0


@pytest.fixture
def collected(tmp_path: Path) -> Scaling:
    """Return scaling.json of both modes on 1 and 2 ranks, made by the benchmark's own code."""
    made = grid(gpus=(1, 2), modes=("weak", "strong"), engines=("ddp",))
    for one in made.cells:
        step = (0.5 if one.mode == "weak" else 2.0) * (1.25 if one.world_size > 1 else 1.0)
        for repeat in range(2):
            write_run(run_dir(tmp_path, one, repeat), one, step * (1 + 0.02 * repeat))
    points = [{"bytes": 10**k, "seconds": 10**k / 1e9, "busbw_gb_s": 1.0} for k in (3, 6)]
    (tmp_path / "links-2.json").write_text(json.dumps({"world_size": 2, "backend": "gloo", "points": points}))
    (tmp_path / "profile.json").write_text(json.dumps(profile(micro_batch=4, sequence_length=16)))
    return analyze(made, tmp_path, facts={"environment": {}, "config_hash": "x", "command": ["scale"]})


def test_the_file_of_the_benchmark_gives_the_baseline(collected: Scaling) -> None:
    found = source_of(collected, "scaling.json")
    assert found.accumulation == 2
    mean = next(c for c in collected.cells if c.id == "weak-single-n1").step_s
    assert mean == pytest.approx(0.505)
    predicted = plan(found, 1, 2)
    assert predicted.rows[0].step_time_s == pytest.approx(mean)
    lines = {line.cell: line for line in predicted.measured}
    assert lines.keys() == {f"{m}-{e}" for m in ("weak", "strong") for e in ("single-n1", "ddp-n1", "ddp-n2")}
    single = lines["weak-single-n1"]
    assert single.predicted_step_s == pytest.approx(single.measured_step_s)
    assert single.within is True
    assert scaling.predict_measured(collected) == predicted
    assert scaling.predict_measured(collected.model_copy(update={"profile": None})) is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("{}", "contains no step-time profile"),
        (measured(cells=[cell("c", 2, 1.0, accumulation=0)]), "cells.0.accumulation"),
        (measured(links=[{"world_size": 2, "points": [{"bytes": 1, "seconds": 0.0}]}]), "points.0.seconds"),
        (measured(profile=profile(gradients=[])), "gradients"),
        (measured(profile=profile(backward_s=1.1)), "exceeds micro_s"),
    ],
)
def test_a_damaged_file_gives_one_line_with_option_and_field(tmp_path: Path, data, words) -> None:
    path = tmp_path / "it.json"
    if data is not None:
        path.write_text(data if isinstance(data, str) else json.dumps(data))
    (issue,) = raised_issues(find_source, path, None, None, None, None, 1)
    assert issue.setting == "--from"
    assert words in issue.message
    assert len(str(issue)) < 400 + len(str(path))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_rank_at_the_given_accumulation_has_the_given_rate(accumulation: int) -> None:
    """Once per step, AdamW reads four and writes three fp32 numbers per parameter at memory speed."""
    found = source_of_rate("bert-large", 580, 256, accumulation, "A100-80G")
    speed = hardware()["gpus"]["A100-80G"]["memory_gb_s"] * 1e9 * constant("memory_reach")
    parameters = num_parameters(scaling.MODELS["bert-large"], 512)
    assert found.profile.optimizer_s == pytest.approx(parameters * (4 + 3) * 4 / speed)
    assert sum(g.bytes for g in found.profile.gradients) == pytest.approx(4 * parameters)
    assert plan(found, 1).rows[0].tokens_per_s == pytest.approx(580 * 128)


RATE = ("--model", "--seq-per-s", "--micro", "--gpu")


@pytest.mark.parametrize(
    ("path", "options", "refused"),
    [
        (None, (None, 1.0, 1, None), {"--from": "missing"}),
        (None, ("bert-base", None, 1, None), {"--from": "missing"}),
        (None, ("bert-base", 1.0, None, None), {"--from": "missing"}),
        (None, ("bert-base", 100.0, 32, "K80"), {"--gpu": "unknown"}),
        (None, ("bert-large", 1e9, 1, "T4-16G"), {"--seq-per-s": "out_of_range"}),
        (None, ("bert-base", 1e9, 1, None), {"--seq-per-s": "out_of_range"}),
        (None, ("bert-base", math.nan, 1, "T4-16G"), {"--seq-per-s": "out_of_range"}),
        (Path("it.json"), ("bert-base", 1.0, 8, "T4-16G"), dict.fromkeys(RATE, "conflict")),
    ],
)
def test_an_impossible_rate_is_refused(path: Path | None, options: Any, refused: dict[str, str]) -> None:
    issues = raised_issues(find_source, path, *options, 1)
    assert {issue.setting: issue.kind for issue in issues} == refused
    assert path is None or {issue.other for issue in issues} == {"--from"}


def test_one_rank_equals_the_measurement_and_two_follow_by_hand() -> None:
    one, two = plan(source(), 1, 2).rows
    assert one.step_time_s == pytest.approx(4.2)
    assert (one.efficiency, one.speedup, one.exposed_comm_fraction) == (1, 1, 0)
    # the ceiling slows the whole step; overlap hides at most its gain of the 12 MB at 1 GB/s
    exposed = two.step_time_s - 4.2 * 1.25
    assert 0.012 * (1 - constant("overlap_gain")) <= exposed <= 0.012
    assert two.split_s.exposed_comm == pytest.approx(exposed)
    assert two.global_batch == 64


def test_an_unmeasured_count_uses_the_next_higher_curve_and_the_next_lower_slowdown() -> None:
    """Beyond the largest measured count, its curve is used. Ranks slow each other only within a node, and
    --link replaces all curves."""
    curves = {n: AllReduceCurve(n, {1e6: 1e-3}) for n in (2, 8)}
    found = scaling.PlanSource(BASE.profile, curves=curves, slowdowns={2: 1.1, 8: 1.4})
    for ranks, over, slowdown in ((2, 2, 1.1), (4, 8, 1.1), (8, 8, 1.4), (16, 8, 1.4)):
        scenario = scenario_of(found, PlanSpec(gpus=(16,)), ranks)
        assert (scenario.fabric.curve, scenario.slowdown) == (curves[over], slowdown)
    assert found.slowdown(1) == 1.0
    nodes = PlanSpec(gpus=(16,), link="nvlink4", inter="ib-ndr", gpus_per_node=4)
    scenario = scenario_of(found, nodes, 16)
    assert (scenario.slowdown, scenario.fabric.curve) == (1.1, None)


def test_tensor_sizes_that_do_not_divide_are_left_out() -> None:
    rows = plan(LARGE, 1, 2, 4, link="nvlink4", tensor=(1, 2)).rows
    assert [(row.tensor, row.world_size) for row in rows] == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]


def test_mfu_is_relative_to_the_peak_of_the_device() -> None:
    one, two = plan(LARGE, 1, 2, link="nvlink3").rows
    flops = flops_per_token(scaling.MODELS["bert-large"], 128, 0.15)
    assert one.mfu == pytest.approx(580 * 128 * flops / 312e12)
    assert two.mfu == pytest.approx(one.mfu * two.efficiency)
    assert (BASE.profile.precision, BASE.peak_flops) == ("fp16", 125e12)
    settings = {"accumulation": 4, "flops_per_token": 1e9}
    for device, precision, peak in (("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("CPU", "fp32", None)):
        found = source(settings=settings, profile=profile(device=device, precision=precision))
        (row,) = plan(found, 1).rows
        assert row.mfu == (pytest.approx(row.tokens_per_s * 1e9 / peak) if peak else None)


def test_measured_cells_have_a_prediction() -> None:
    """Ceilings, failures, engines without a model and rank counts without a known link have none."""
    one, two = plan(source(), 2).measured
    assert (one.cell, two.cell) == ("weak-single-n1", "ddp-2")
    assert one.within is True
    assert one.predicted_step_s == pytest.approx(4.2)
    assert two.measured_step_s == 5.3
    low, high = two.ci95
    assert two.within == (low <= two.predicted_step_s <= high)
    assert plan(source(), 1, link="nvlink4", gpus_per_node=1).measured == [one, two]
    assert [line.cell for line in plan(source(links=[]), 1).measured] == ["weak-single-n1"]
    nodes = plan(source(links=[]), 4, link="pcie4", inter="ib-ndr", gpus_per_node=2)
    assert [line.cell for line in nodes.measured] == ["weak-single-n1", "ddp-2"]


def test_a_measured_cell_is_predicted_with_its_own_batch() -> None:
    """The cell has twice the profile's micro batch and half its accumulation. Its mean is compared, because
    the interval belongs to the mean."""
    time = {"median": 9.0, "mean": 5.3, "p95": 9.5, "ci95": [5.2, 5.4]}
    own = cell("strong-ddp-n1", 1, 4.0, engine="ddp", micro_batch=16, accumulation=2, step_time_s=time)
    lines = {line.cell: line for line in plan(source(cells=[ONE, own]), 2).measured}
    micro_s = (4.2 - 0.1) / 4
    assert lines["weak-single-n1"].predicted_step_s == pytest.approx(4 * micro_s + 0.1)
    assert lines["strong-ddp-n1"].predicted_step_s == pytest.approx(2 * 2 * micro_s + 0.1)
    assert (lines["strong-ddp-n1"].measured_step_s, lines["strong-ddp-n1"].within) == (5.3, False)


def test_levers_equal_the_models_prediction_of_the_change() -> None:
    (row,) = plan(BASE, 8, link="pcie3").rows
    levers = {lever.lever: lever for lever in row.levers}
    gains = [lever.gain for lever in row.levers]
    assert gains == sorted(gains, reverse=True)
    changed = {
        "2 x accumulation": plan(BASE, 8, link="pcie3", accumulation=(2,)),
        "no stragglers": plan(dataclasses.replace(BASE, spread=0.0), 8, link="pcie3"),
    }
    for name, predicted in changed.items():
        assert levers[name].tokens_per_s == pytest.approx(predicted.rows[0].tokens_per_s), name
        assert levers[name].gain == pytest.approx(levers[name].tokens_per_s / row.tokens_per_s - 1)
    assert {name for name, lever in levers.items() if lever.bound} == {"no stragglers", "perfect overlap"}
    assert levers["2 x link speed"].gain > 0
    assert plan(BASE, 1).rows[0].levers == []
    bounded = plan(LARGE, 8, link="nvlink4")
    bound, best = bounded.rows[0].levers[:2]
    assert bound.lever == "no stragglers"  # a bound, not a setting
    shown_best = scaling.plan_page(bounded).sections[0].tables[0].rows[0].cells[-1]
    assert shown_best.text == f"{100 * best.gain:+.1f} % {best.lever}"


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("link", "bucket"), [("ethernet10", 10_000), ("nvlink4", 1_000), ("gloo-loopback", 25 * 2**20)]
)
def test_bounds_never_reduce_throughput(engine: str, link: str, bucket: float) -> None:
    scenario = scenario_of(BASE, PlanSpec(gpus=(8,), link=link, gpus_per_node=8, engine=engine), 8)
    found = scaling.levers(BASE.profile, dataclasses.replace(scenario, bucket_bytes=bucket))
    assert all(lever.gain >= 0 for lever in found if lever.bound)


def test_only_ddp_with_fp32_gradients_can_send_16_bits() -> None:
    def names(**options: Any) -> set[str]:
        (row,) = plan(BASE, 8, link="pcie3", **options).rows
        return {lever.lever for lever in row.levers}

    assert "16-bit gradients" in names()
    for engine in ("zero1", "fsdp"):
        assert "16-bit gradients" not in names(engine=engine)
    assert names() - names(engine="fsdp") == {"16-bit gradients", "2 x bucket size", "no overlap: one bucket"}


UNMEASURED = source(links=[], cells=[])


@pytest.mark.parametrize(
    ("found", "gpus", "options", "setting", "kind"),
    [
        (UNMEASURED, 2, {}, "--link", "missing"),
        (UNMEASURED, 2, {"link": "nvlink"}, "--link", "unknown"),
        (UNMEASURED, 16, {"link": "nvlink4"}, "--inter", "missing"),
        (UNMEASURED, 16, {"link": "nvlink4", "inter": "ib-ndx"}, "--inter", "unknown"),
        (source(), 16, {"inter": "ib-ndr", "gpus_per_node": 4}, "--link", "missing"),
        (BASE, 8, {"link": "nvlink4", "inter": "ib-ndr"}, "--inter", "no_effect"),
        (BASE, 2, {"link": "pcie4", "tensor": (4,)}, "--tensor", "does_not_divide"),
        (source(), 4, {"tensor": (1, 4)}, "--tensor", "does_not_divide"),
    ],
)
def test_options_that_contradict_each_other_or_the_source_are_refused(
    found: scaling.PlanSource, gpus: int, options: dict[str, Any], setting: str, kind: str
) -> None:
    issues = raised_issues(plan, found, gpus, **options)
    assert [(issue.setting, issue.kind) for issue in issues] == [(setting, kind)]


@pytest.mark.parametrize("device", ["CPU", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("link", ["nvlink4", "gloo-loopback", "ethernet10"])
def test_a_cpu_profile_with_gpu_links_gives_a_warning(device: str, link: str) -> None:
    predicted = plan(source(profile=profile(device=device)), 1, 2, link=link)
    assert bool(predicted.warnings) == ((device, link) == ("CPU", "nvlink4"))


def test_a_model_is_a_known_name_or_a_configuration() -> None:
    for name, parameters in (("bert-base", 109_474_560), ("crammed-bert", 119_589_889)):
        assert num_parameters(*scaling.find_model(name)[:2]) == parameters
    assert raised_issues(scaling.find_model, "bert-bse")[0].setting == "--model"


def test_a_prediction_outside_its_interval_gives_the_first_warning() -> None:
    predicted = plan(source(), 1, 2, 4)
    (cell,) = predicted.measured[:1]
    cells = [cell.model_copy(update={"cell": f"ddp-n{n}", "within": n == 4}) for n in (2, 4)]
    first, *_ = scaling.plan_page(predicted.model_copy(update={"measured": cells})).verdicts
    assert (first.level, "Do not use this" in first.text) == ("warn", True)
    assert ("ddp-n2" in first.text, "ddp-n4" in first.text) == (True, False)
