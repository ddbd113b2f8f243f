"""Test how a budget becomes a model size and a number of tokens, with published figures as reference."""

import functools
import itertools
import math

import pytest

from bert_dp.config import load_config
from bert_dp.config.load import find_config
from launcher.plan import budget, loss_fit
from launcher.plan.budget import BudgetOptions, Costs, make_plan, solve_above_tip
from launcher.plan.frontier import CompletedRun, Frontier, LossLaw
from launcher.plan.gpu_speed import Rate, gpu_rate, measured_rate
from tests.helpers import raised_issues

# From the demo "How Big Should My Language Model Be" (2020): best size by compute / 86400, and GPU speed
D, E, F = 4.04827974e-2, 0.721157332, -4.54598480e4
GPUS = {  # factor, exponents of width and log batch size, depth offset, batch size
    "V100": (2.21527743e7, 1.66015023, 1.32808220, 5.91503856, 64),
    "P100": (6.01863899e7, 1.46733667, 1.03031298, 5.38021875, 64),
    "K80": (2.58592374e7, 1.44360777, 0.750695980, 6.25951436, 16),
}


def demo_width(gpu: str, hours: float) -> float:
    """Return the width of the best model for a budget of `hours`."""
    k, a, c, b, batch = GPUS[gpu]

    def hours_of(width: float) -> float:
        depth, parameters = width / 128, 7 / 128 * width**3 + 8 / 128 * width**2 + 3 * width + 3
        speed = k * width**a * depth / (depth + b) * math.log(batch + 1) ** c
        return ((parameters - F) / D) ** (1 / E) * 86400 / speed / 3600

    widths = [16 * 10 ** (k / 300) for k in range(840)]
    return solve_above_tip(widths, [hours_of(width) for width in widths], hours)


def test_the_solver_reproduces_the_answers_of_the_demo() -> None:
    widths = {("V100", 1): 240.5, ("V100", 3.23): 478.6, ("V100", 24): 1305.8, ("P100", 24): 932.5}
    assert {answer: demo_width(*answer) for answer in widths} == pytest.approx(widths, rel=0.005)


@pytest.mark.parametrize(("gpu", "least"), [("V100", 0.489), ("P100", 0.623), ("K80", 3.685)])
def test_a_budget_below_the_tipping_width_is_refused_with_the_minimum_hours(gpu, least) -> None:
    for hours in (0.01, 0.99 * least):
        with pytest.raises(ValueError, match=r"\d") as refused:
            demo_width(gpu, hours)
        assert refused.value.args[0] == pytest.approx(least, rel=0.005)


def test_the_units_of_a_budget_agree() -> None:
    costs = Costs(1, price=2.005, watts=119.35)  # the demo's V100
    assert 12 * costs.per_hour["kwh"] == pytest.approx(1.43, abs=0.005)  # the demo first showed 5,432
    for hours, unit in itertools.product((0.5, 3.23, 24.0), ("dollars", "kwh")):
        assert costs.hours(unit, hours * costs.per_hour[unit]) == pytest.approx(hours, rel=1e-9)
    for unit, option in (("dollars", "--price"), ("kwh", "--watts")):
        (found,) = raised_issues(Costs(1).hours, unit, 1.0)
        assert (found.setting, found.kind) == (option, "missing")


BASE = load_config(find_config("crammed-bert"))
H100 = "H100-SXM-80G"
LAW = LossLaw(1.7, 400.0, 410.0, 0.34, 0.28)


h100_rate = functools.partial(gpu_rate, gpu=H100, gpus=1, precision="bf16")


@functools.cache
def fitted_frontier() -> Frontier:
    runs = []
    for flops, share in itertools.product((1e17, 3e17, 1e18, 3e18), (0.2, 0.4, 0.7, 1.0, 1.4, 2.5, 5.0)):
        parameters = LAW.best_parameters(flops) * share
        tokens = flops / 6 / parameters
        runs.append(CompletedRun(flops, parameters, LAW.loss(parameters, tokens), tokens))
    return loss_fit.fit(runs, draws=3)


def test_a_plan_with_a_fitted_frontier_spends_the_budget_at_the_best_size() -> None:
    plan = make_plan(BudgetOptions(dollars=50.0), BASE, Costs(1, price=2.5), h100_rate, fitted_frontier())
    assert plan.hours == 20.0
    best = plan.figures["best parameters"]
    assert best.value == pytest.approx(LAW.best_parameters(plan.figures["compute"].value), rel=0.02)
    assert best.origin == "fitted"
    assert best.ci95[0] < best.value < best.ci95[1]
    assert [model.name for model in plan.models] == ["deep", "wide", "half the size", "twice the size"]
    deep, _, half, _ = plan.models
    assert deep.tokens.value == pytest.approx(deep.tokens_per_s * 20 * 3600)
    losses = [model.loss.value for model in plan.models]
    assert min(losses) == pytest.approx(plan.figures["best loss"].value, rel=0.01)
    assert half.loss.value - deep.loss.value < 0.05, "the optimum is flat"


def test_without_a_frontier_every_published_answer_is_listed() -> None:
    plan = make_plan(BudgetOptions(hours=24.0), BASE, Costs(1), h100_rate)
    assert not plan.is_chosen
    assert len(plan.models) == len(budget.PUBLISHED)
    sizes = [model.parameters for model in plan.models]
    assert max(sizes) / min(sizes) > 5
    assert plan.models[1].tokens.value / plan.models[1].parameters == pytest.approx(200, rel=0.3)
    assert all(model.note for model in plan.models)
    assert plan.warnings


def test_a_given_ratio_of_tokens_to_parameters_is_used() -> None:
    options = BudgetOptions(hours=24.0, tokens_available=1e9, tokens_per_parameter=200.0)
    plan = make_plan(options, BASE, Costs(1), h100_rate)
    assert plan.models[0].tokens.value / plan.models[0].parameters == pytest.approx(200, rel=0.3)
    assert plan.figures["epochs"].value == pytest.approx(plan.models[0].tokens.value / 1e9)
    assert len(plan.warnings) == 1


def test_costs_have_an_origin_and_are_null_where_unknown() -> None:
    costs = Costs(4, 2.0, 500.0, 1.2, 481.0, {"dollars": ("published", "a list")})
    options = BudgetOptions(hours=10.0, keep_model=True)
    plan = make_plan(options, BASE, costs, h100_rate)
    assert (plan.models[0].parameters, plan.models[0].hidden_size) == (119_589_889, 768), "the model is kept"
    assert plan.figures["dollars"].value == pytest.approx(80)
    assert (plan.figures["dollars"].origin, plan.figures["dollars"].note) == ("published", "a list")
    assert plan.figures["kwh"].value == pytest.approx(24)
    assert plan.figures["co2_kg"].value == pytest.approx(24 * 0.481)
    plan = make_plan(options, BASE, Costs(1), h100_rate)
    assert [plan.figures[name].value for name in ("dollars", "kwh", "co2_kg")] == [None, None, None]


@pytest.mark.parametrize(("hours", "bound"), [(1e-4, "least"), (1e9, "most")])
def test_a_budget_that_no_size_fits_is_refused_with_the_bound(hours, bound) -> None:
    options = BudgetOptions(hours=hours, tokens_per_parameter=200.0)
    (found,) = raised_issues(make_plan, options, BASE, Costs(1), h100_rate)
    assert (found.setting, found.kind) == ("--hours", "out_of_range")
    assert bound in (found.hint or "")


def test_a_small_budget_is_flagged() -> None:
    slow = Rate(20_000.0, 1.1, "measured", "here")
    enough, plan = (
        make_plan(BudgetOptions(hours=hours, keep_model=True), BASE, Costs(1), lambda config: slow)
        for hours in (0.5, 0.01)
    )
    assert enough.figures["compute"].value > budget.MLM_MIN_FLOPS
    assert not enough.warnings
    assert any("below 2.2 PFLOP" in warning for warning in plan.warnings)


def test_measured_rates_are_interpolated_on_logarithmic_scales() -> None:
    rates = {1e6: 8000.0, 4e6: 4000.0, 16e6: 2000.0, 64e6: 1000.0}
    between = measured_rate(2e6, rates, "here")
    assert between.tokens_per_s == pytest.approx(8000 / math.sqrt(2))
    assert between.factor == pytest.approx(math.exp(0.05))
    beyond = measured_rate(256e6, rates, "here")
    assert beyond.tokens_per_s == pytest.approx(500.0)
    assert beyond.factor > between.factor


def test_each_of_several_gpus_is_slower_than_a_single_one() -> None:
    one, eight = (gpu_rate(BASE, H100, count, "bf16").tokens_per_s for count in (1, 8))
    assert 0.7 * 8 * one < eight < 8 * one
