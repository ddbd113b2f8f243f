"""Check in a browser that the planner's page computes the same as `bert-dp plan`, without a network."""

import json
import math
import random
from pathlib import Path

import pytest

from bert_dp.config import ConfigError
from launcher.plan import planner_page
from launcher.plan.budget import BudgetOptions, Costs, family, make_plan
from launcher.plan.gpu_speed import gpu_rate
from launcher.plan.step_model import hardware
from tests.browser import Browser
from tests.unit.test_budget import BASE, fitted_frontier

pytestmark = pytest.mark.slow


def written(path: Path, with_law: bool) -> dict:
    fit = fitted_frontier() if with_law else None
    data = planner_page.planner_data(family(BASE), fit, {}, grams_per_kwh=481)
    path.write_text(planner_page.planner_html(data, "test"))
    return data


def random_inputs(draw: random.Random, devices: list[str]) -> dict:
    return {
        "unit": draw.choice(("hours", "dollars", "kwh")),
        "amount": 10 ** draw.uniform(-1, 5),
        "gpu": draw.choice(devices),
        "count": draw.choice(planner_page.COUNTS),
        "price": draw.uniform(0.1, 10),
        "ratio": 10 ** draw.uniform(1, 3.5),
    }


def python_answer(state: dict, fit, rates: dict) -> dict:
    row = hardware()["gpus"][state["gpu"]]
    costs = Costs(state["count"], state["price"], row["watts"])

    def rate_of(config):
        key = (state["gpu"], state["count"], config.model.hidden_size)
        if key not in rates:
            try:
                rates[key] = gpu_rate(config, state["gpu"], state["count"], "bf16")
            except ConfigError as error:
                rates[key] = error
        if isinstance(rates[key], ConfigError):
            raise rates[key]
        return rates[key]

    ratio = None if fit else state["ratio"]
    options = BudgetOptions(**{state["unit"]: state["amount"]}, tokens_per_parameter=ratio)
    plan = make_plan(options, BASE, costs, rate_of, fit)
    found = {"hours": plan.hours, "flops": plan.figures["compute"].value}
    found |= {unit: plan.hours * costs.per_hour[unit] for unit in ("dollars", "kwh")}
    if fit is not None:
        middle, (low, high) = fit.estimate(lambda law: law.best_loss(plan.figures["compute"].value))
        found["loss"] = [middle, low, high]
        ends = fit.estimate(lambda law: math.log(law.best_parameters(plan.figures["compute"].value)))
        found["sizes"] = [math.exp(v) for v in (ends[0], *ends[1])]
    return found


@pytest.mark.parametrize("with_law", [True, False])
def test_the_script_computes_the_same_as_python(browser: Browser, tmp_path: Path, with_law: bool) -> None:
    data = written(tmp_path / "plan.html", with_law)
    fit, rates, draw = fitted_frontier() if with_law else None, {}, random.Random(0)
    states = [random_inputs(draw, list(data["devices"])) for _ in range(500)]
    browser.open(tmp_path / "plan.html")
    answers = browser.evaluate(f"{json.dumps(states)}.map(plan)")
    assert browser.errors == []
    assert browser.evaluate('document.getElementById("given").textContent.includes("ratio")') is not with_law
    refused = 0
    for state, answer in zip(states, answers, strict=True):
        try:
            wanted = python_answer(state, fit, rates)
        except ConfigError:
            refused += 1
            assert "bound" in answer, state
            continue
        for name, value in wanted.items():
            assert answer[name] == pytest.approx(value, rel=1e-9), (name, state)
    assert 0 < refused < 250


def test_the_address_restores_the_answer(browser: Browser, tmp_path: Path) -> None:
    written(tmp_path / "plan.html", with_law=True)
    browser.open(tmp_path / "plan.html")
    browser.evaluate(
        "field('amount').value = 2, field('unit').value = 'dollars', field('price').value = 2.5, show()"
    )
    address, answer = browser.evaluate("[location.hash, document.getElementById('answer').innerText]")
    browser.evaluate("field('amount').value = 0, show()")
    browser.evaluate(f"location.hash = {json.dumps(address)}, load()")
    assert browser.evaluate("document.getElementById('answer').innerText") == answer
    assert "dollars\t100" in answer
    assert browser.evaluate("document.getElementById('curve').getAttribute('points').length") > 20
    assert browser.errors == []
