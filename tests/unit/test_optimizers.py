"""Tests of learning rate schedules, of parameter groups, and of what engines need from every optimizer:
skipped steps, scaled gradients and missing gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bert_dp.config import ModelConfig, OptimConfig, ScheduleConfig
from bert_dp.config.engines import OPTIMIZERS
from bert_dp.model.bert import build_model
from bert_dp.model.interface import Model
from bert_dp.optim import lr_factor, make_optimizer, parameter_groups, set_lr
from tests.tensors import bits, with_moments

SHAPES = {
    "wide": (6, 17),
    "tall": (19, 5),
    "square": (8, 8),
    "embedding": (12, 4),
    "norm": (9,),
    "bias": (5,),
}
Parameters = dict[str, nn.Parameter]


class Matrices(Model):
    def is_matrix(self, name: str) -> bool:
        return name in ("wide", "tall", "square")


def random_tensors(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def parameters_of(weights: dict[str, Tensor]) -> Parameters:
    return {name: nn.Parameter(w.clone()) for name, w in weights.items()}


def rate(step: int) -> float:
    """Return a learning rate that changes at every step."""
    return 0.01 * (1 + step % 4)


def take_step(
    optimizer: torch.optim.Optimizer, parameters: Parameters, grads: dict[str, Tensor], lr: float
) -> None:
    """Take a step with gradients for the parameters that `grads` names."""
    set_lr(optimizer, lr)
    for name, parameter in parameters.items():
        parameter.grad = grads[name].to(parameter.dtype).clone() if name in grads else None
    optimizer.step()


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[torch.optim.Optimizer, Parameters]:
    parameters = parameters_of(random_tensors(0, 0.02, dtype))
    config = OptimConfig(name=name, weight_decay=0.1)  # type: ignore[arg-type]
    return make_optimizer(config, parameters.items(), Matrices()), parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("skipped", [0, 3])
def test_a_skipped_step_changes_nothing_bit_for_bit(name: str, skipped: int, dtype: torch.dtype) -> None:
    results = []
    for with_bad_step in (True, False):
        optimizer, parameters = make(name, dtype)
        for step in range(6):
            grads = random_tensors(step + 1)
            if with_bad_step and step == skipped:
                before = with_moments(optimizer, parameters.items())
                before_bits = bits(before)
                optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
                bad = {key: g.clone() for key, g in grads.items()}
                bad["wide"][0, 0], bad["tall"][1, 1], bad["norm"][0] = torch.nan, torch.inf, -torch.inf
                take_step(optimizer, parameters, bad, 0.5)
                after = with_moments(optimizer, parameters.items())
                assert {key: bits(after)[key] for key in before} == before_bits
                assert not any(after[key].any() for key in after.keys() - before.keys())  # new moments are 0
                assert skipped or len(after) > len(before)
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            take_step(optimizer, parameters, grads, rate(step))
        assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} == {6.0}
        results.append(bits(with_moments(optimizer, parameters.items())))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_divided_by_grad_scale(name: str) -> None:
    """The moments show the division too, because Muon's update does not depend on the gradient's size."""
    results = []
    for scale in (1.0, 8.0):
        optimizer, parameters = make(name)
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        for step in range(5):
            grads = {key: g * scale for key, g in random_tensors(step + 1).items()}
            take_step(optimizer, parameters, grads, rate(step))
        results.append(bits(with_moments(optimizer, parameters.items())))
    assert results[0] == results[1]  # scaling by a power of two does not round


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_a_gradient_stay_as_they_are(name: str) -> None:
    optimizer, parameters = make(name)
    take_step(optimizer, parameters, {}, 0.1)
    take_step(optimizer, parameters, {key: random_tensors(1)[key] for key in ("wide", "norm")}, 0.1)
    start = random_tensors(0, 0.02)
    assert {key for key, p in parameters.items() if not torch.equal(p, start[key])} == {"wide", "norm"}
    assert set(optimizer.state) == {parameters["wide"], parameters["norm"]}


NAMES = ("budget_triangle", "linear", "cosine", "wsd", "constant", "exponential")


def schedule(name: str, **changed: float) -> ScheduleConfig:
    return ScheduleConfig(name=name, steps=1, **changed)  # type: ignore[arg-type]


RECIPE = {0: 0.25, 0.25: 0.5, 0.5: 0.75, 0.75: 1.0, 0.7: 0.95, 0.9: 0.4, 1: 0.0}


@pytest.mark.parametrize(
    ("name", "warmup", "decay", "factors"),
    [
        ("budget_triangle", 0.0, 0.2, RECIPE),
        ("linear", 0.2, 0.2, {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        ("linear", 0.0, 0.2, {0.0: 1.0}),
        ("cosine", 0.2, 0.2, {0.2: 1.0, 0.4: 0.5 + math.sqrt(0.125), 1.0: 0.0}),
        ("cosine", 0.0, 0.2, {0.0: 1.0}),
        ("wsd", 0.1, 0.4, {0.1: 1.0, 0.6: 1.0, 0.7: 0.5, 1.0: 0.0}),
        ("wsd", 0.0, 1.0, {0.25: 0.5}),
        ("constant", 0.0, 0.2, {0.0: 1.0}),
        ("exponential", 0.0, 0.2, {0.0: 1e-4, 0.25: 1e-3}),
    ],
)
def test_corners_of_schedules(name: str, warmup: float, decay: float, factors: dict[float, float]) -> None:
    config = schedule(name, warmup_fraction=warmup, decay_fraction=decay)
    assert {f: lr_factor(config, f) for f in factors} == pytest.approx(factors, abs=1e-15)


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    warmup = draw(st.floats(0.01, 0.7))
    decay = draw(st.floats(0.01, 1 - warmup))
    return schedule(draw(st.sampled_from(NAMES)), warmup_fraction=warmup, decay_fraction=decay)


@given(config=schedules(), f=st.floats(-0.5, 1.5))
def test_factor_stays_within_zero_and_one(config: ScheduleConfig, f: float) -> None:
    assert 0.0 <= lr_factor(config, f) <= 1.0
    assert lr_factor(config, f) == lr_factor(config, min(max(f, 0.0), 1.0))


@given(config=schedules(), f=st.floats(0, 1 - 1e-9))
def test_factor_has_no_jump(config: ScheduleConfig, f: float) -> None:
    """f moves by 1e-9. Ramps have slopes up to 100, and wsd starts its decay like a square root."""
    jump = abs(lr_factor(config, f + 1e-9) - lr_factor(config, f))
    assert jump <= math.sqrt(1e-9 / config.decay_fraction) + 4e-7


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"bias": True, "norm_bias": False, "head": "dense", "position": "learned", "mlp": "gelu"},
        {"bias": True, "norm": "rmsnorm", "head": "dense", "first_attention_norm": False, "position": "rope"},
    ],
)
def test_neither_biases_nor_norms_decay(changed: dict[str, object]) -> None:
    config = ModelConfig(
        vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=8, **changed
    )
    model = build_model(config, 8, seed=0)
    decayed, plain = parameter_groups(model.named_parameters(), 0.1, model.is_decayed)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    norms = {
        id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for p in m.parameters()
    }
    named = dict(model.named_parameters())  # each parameter once, the tied embedding too
    wanted = {name: not (id(p) in norms or name.endswith("bias")) for name, p in named.items()}
    found = {id(p): decays for group, decays in ((decayed, True), (plain, False)) for p in group["params"]}
    assert {name: found[id(p)] for name, p in named.items()} == wanted
    assert sum(len(group["params"]) for group in (decayed, plain)) == len(named)
