"""Tests of LAMB against timm's implementation, in eager and compiled form."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_dp.optim.lamb import Lamb
from tests.tensors import assert_near, with_moments
from tests.unit.test_optimizers import parameters_of, random_tensors, take_step

BETAS, EPS, DECAY = (0.9, 0.999), 1e-6, 0.01
DECAYED, PLAIN = ("wide", "tall"), ("norm", "bias")
NAMES = (*DECAYED, *PLAIN)
SCALES = {"small": 0.02, "large": 20.0}  # large: ||w|| > 10, at which some implementations cap the norm


def starting_weights(scale: float) -> dict[str, Tensor]:
    tensors = random_tensors(0, scale)
    return {name: tensors[name] for name in NAMES}


def gradients(steps: int) -> list[dict[str, Tensor]]:
    """Return the gradients of each step, clipped to a global norm of 1 as an engine does."""
    out = []
    for step in range(steps):
        tensors = random_tensors(step + 1)
        # the magnitude differs between steps and between tensors
        raw = {name: tensors[name] * 10.0 ** (i - 2 + step % 3) for i, name in enumerate(NAMES)}
        norm = float(torch.stack([g.norm() for g in raw.values()]).norm())
        out.append({name: g / max(1.0, norm) for name, g in raw.items()})
    return out


def rate(step: int) -> float:
    """Return a learning rate that rises and then falls."""
    return 0.02 * min(step + 1, 40 - step) / 10


def groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [parameters[name] for name in DECAYED], "weight_decay": DECAY},
        {"params": [parameters[name] for name in PLAIN], "weight_decay": 0.0},
    ]


def make_lamb(parameters: dict[str, nn.Parameter], *, compiled: bool = False) -> Lamb:
    return Lamb(groups(parameters), lr=0.0, betas=BETAS, eps=EPS, compiled=compiled)


def train(
    make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], scale: float, steps: int = 30
) -> list[dict[str, Tensor]]:
    """Return the weights after every step."""
    parameters = parameters_of(starting_weights(scale))
    optimizer = make(parameters)
    out = []
    for step, grads in enumerate(gradients(steps)):
        take_step(optimizer, parameters, grads, rate(step))
        out.append({name: p.detach().clone() for name, p in parameters.items()})
    return out


def timms_lamb() -> Any:
    """Return timm's Lamb without importing timm/__init__, which needs torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("timm is not installed")
    root = spec.submodule_search_locations[0]
    before = {name for name in sys.modules if name.partition(".")[0] == "timm"}
    try:
        for name, path in (("timm", root), ("timm.optim", f"{root}/optim")):
            stub = types.ModuleType(name)
            stub.__path__ = [path]
            sys.modules[name] = stub
        return importlib.import_module("timm.optim.lamb").Lamb
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "timm" and n not in before]:
            del sys.modules[name]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_thirty_steps_equal_timms(scale: float) -> None:
    theirs, start = timms_lamb(), starting_weights(scale)
    assert scale < 1 or all(float(start[name].norm()) > 10 for name in DECAYED)
    expected = train(lambda p: theirs(groups(p), lr=0.0, betas=BETAS, eps=EPS, max_grad_norm=None), scale)
    for step, (a, b) in enumerate(zip(train(make_lamb, scale), expected, strict=True)):
        assert_near(a, b, 1e-12, step)
    moved = {name: float((b[name] - start[name]).norm() / start[name].norm()) for name in start}
    assert min(moved.values()) > 1e-3, moved  # the weights moved by far more than the tolerance


def test_a_weight_of_norm_zero_has_ratio_one_and_an_update_of_norm_zero_moves_nothing() -> None:
    """The first step's update is all ones, so the weight becomes exactly -lr if the trust ratio is 1."""
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    other = nn.Parameter(torch.full((3, 4), 2.0, dtype=torch.float64))
    optimizer = Lamb(
        [{"params": [parameter, other], "weight_decay": DECAY}], lr=0.125, betas=BETAS, eps=1e-30
    )
    for p in (parameter, other):
        p.grad = torch.full((3, 4), 0.5, dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(parameter, torch.tensor(-0.125, dtype=torch.float64), rtol=1e-14, atol=0)
    # the other weight has its own ratio: ||w|| / ||u|| = 2 / 1.02, times u = 1.02
    assert torch.allclose(other, torch.tensor(2.0 - 0.125 * 2.0, dtype=torch.float64), rtol=1e-14, atol=0)
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = Lamb([{"params": [parameter], "weight_decay": 1e-300}], lr=1.0, betas=BETAS, eps=EPS)
    parameter.grad = torch.zeros(4, dtype=torch.float64)
    optimizer.step()  # the squares of the update underflow
    assert torch.equal(parameter, torch.ones(4, dtype=torch.float64))


@pytest.mark.slow
def test_the_compiled_form_equals_the_eager_one() -> None:
    """Only two graphs are compiled, each once, because weights without decay use torch's fused Adam."""
    results, frames = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # from earlier tests
        parameters = parameters_of(starting_weights(0.02))
        optimizer = make_lamb(parameters, compiled=compiled)
        for step, grads in enumerate(gradients(10)):  # step 4 is rescaled; 0 and 6 are skipped
            optimizer.grad_scale = torch.tensor(3.0 if step == 4 else 1.0)
            optimizer.found_inf = torch.tensor(float(step in (0, 6)))
            if step == 6:
                grads["tall"][0, 0], grads["norm"][1] = torch.nan, -torch.inf
            take_step(optimizer, parameters, grads, rate(step))
            frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(with_moments(optimizer, parameters.items()))
    assert_near(results[1], results[0], 1e-12, "after the last step")
    assert frames[9] == 0
    assert frames[10] == frames[19] == 2  # one for the moments, one for the descent
