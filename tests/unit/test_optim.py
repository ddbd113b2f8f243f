"""Schedules as functions of f, parameter groups, and the fused AdamW against one written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bert_dp.config import ModelConfig, OptimConfig, ScheduleConfig
from bert_dp.model import build_model
from bert_dp.optim import lr_factor, make_optimizer, parameter_groups, set_lr
from bert_dp.trainable import Model
from tests.tensors import bits, with_moments

NAMES = ("budget_triangle", "linear", "cosine", "wsd", "constant", "exponential")


def schedule(name: str, **changed: float) -> ScheduleConfig:
    return ScheduleConfig(name=name, steps=1, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("f", "factor"), [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (0.7, 0.95), (0.9, 0.4), (1, 0.0)]
)
def test_budget_triangle_is_the_recipes(f: float, factor: float) -> None:
    assert lr_factor(schedule("budget_triangle"), f) == pytest.approx(factor, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "changed", "f", "factor"),
    [
        ("linear", {"warmup_fraction": 0.2}, 0.0, 0.0),
        ("linear", {"warmup_fraction": 0.2}, 0.1, 0.5),
        ("linear", {"warmup_fraction": 0.2}, 0.2, 1.0),
        ("linear", {"warmup_fraction": 0.2}, 0.6, 0.5),
        ("linear", {"warmup_fraction": 0.2}, 1.0, 0.0),
        ("linear", {"warmup_fraction": 0.0}, 0.0, 1.0),
        ("cosine", {"warmup_fraction": 0.2}, 0.1, 0.5),
        ("cosine", {"warmup_fraction": 0.2}, 0.2, 1.0),
        ("cosine", {"warmup_fraction": 0.2}, 0.4, 0.5 + math.sqrt(0.125)),
        ("cosine", {"warmup_fraction": 0.2}, 0.6, 0.5),
        ("cosine", {"warmup_fraction": 0.2}, 1.0, 0.0),
        ("cosine", {"warmup_fraction": 0.0}, 0.0, 1.0),
        ("wsd", {"warmup_fraction": 0.1, "decay_fraction": 0.4}, 0.05, 0.5),
        ("wsd", {"warmup_fraction": 0.1, "decay_fraction": 0.4}, 0.1, 1.0),
        ("wsd", {"warmup_fraction": 0.1, "decay_fraction": 0.4}, 0.6, 1.0),
        ("wsd", {"warmup_fraction": 0.1, "decay_fraction": 0.4}, 0.7, 0.5),
        ("wsd", {"warmup_fraction": 0.1, "decay_fraction": 0.4}, 1.0, 0.0),
        ("wsd", {"warmup_fraction": 0.0, "decay_fraction": 1.0}, 0.25, 0.5),
        ("constant", {}, 0.0, 1.0),
        ("constant", {}, 1.0, 1.0),
        ("exponential", {}, 0.0, 1e-4),
        ("exponential", {}, 0.25, 1e-3),
        ("exponential", {}, 0.5, 1e-2),
        ("exponential", {}, 1.0, 1.0),
    ],
)
def test_schedule_corners(name: str, changed: dict[str, float], f: float, factor: float) -> None:
    assert lr_factor(schedule(name, **changed), f) == pytest.approx(factor, abs=1e-12)


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
    """A move of 1e-9 in f: ramps have slopes up to 100 here, and wsd begins its decay as a square root."""
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
    kinds = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter in plain["params"]:
        is_norm = isinstance(kinds[id(parameter)], (nn.LayerNorm, nn.RMSNorm))
        assert is_norm or names[id(parameter)].endswith("bias"), names[id(parameter)]
    for parameter in decayed["params"]:
        assert not isinstance(kinds[id(parameter)], (nn.LayerNorm, nn.RMSNorm)), names[id(parameter)]
        assert parameter.ndim == 2 or names[id(parameter)].endswith("position_scale"), names[id(parameter)]
    together = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(together) == sorted(names)  # each parameter once, the tied embedding too
    in_decay = {names[id(p)] for p in decayed["params"]}
    assert "model.embeddings.tok_embeddings.weight" in in_decay
    if config.position == "scaled_sinusoidal":
        assert "model.embeddings.position_scale" in in_decay
    if config.position == "learned":
        assert "model.embeddings.position_embeddings.weight" in in_decay


class Reference:
    """AdamW of arXiv 1711.05101 in float64, written out."""

    def __init__(self, values: np.ndarray, decay: float, config: OptimConfig):
        self.values, self.decay, self.config = values.copy(), decay, config
        self.m = np.zeros_like(values)
        self.v = np.zeros_like(values)
        self.steps = 0

    def step(self, gradient: np.ndarray, lr: float, scale: float) -> None:
        c, g = self.config, gradient / scale
        self.steps += 1
        self.m = c.beta1 * self.m + (1 - c.beta1) * g
        self.v = c.beta2 * self.v + (1 - c.beta2) * g * g
        corrected = self.m / (1 - c.beta1**self.steps)
        root = np.sqrt(self.v / (1 - c.beta2**self.steps))
        self.values = self.values - lr * self.decay * self.values - lr * corrected / (root + c.eps)


def test_fused_adamw_equals_one_written_by_hand() -> None:
    """Five steps of two parameters: lr changes, step 2 is clipped through grad_scale, step 3 is skipped."""
    rng = np.random.default_rng(0)
    config = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-3)
    start = {"weight": rng.normal(size=(5, 7)), "bias": rng.normal(size=7)}
    parameters = {n: nn.Parameter(torch.from_numpy(v.copy())) for n, v in start.items()}
    reference = {n: Reference(v, 0.1 if n == "weight" else 0.0, config) for n, v in start.items()}
    optimizer = make_optimizer(config, parameters.items(), Model())
    for step in range(5):
        lr, scale, skip = 0.01 * (step + 1), 3.75 if step == 2 else 1.0, step == 3
        set_lr(optimizer, lr)
        before = bits(with_moments(optimizer, parameters.items()))
        for name, parameter in parameters.items():
            gradient = rng.normal(size=parameter.shape)
            if skip:
                gradient[0] = np.nan
            parameter.grad = torch.from_numpy(gradient.copy())
            if not skip:
                reference[name].step(gradient, lr, scale)
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(float(skip))  # type: ignore[attr-defined]
        optimizer.step()
        if skip:
            assert bits(with_moments(optimizer, parameters.items())) == before
        for name, parameter in parameters.items():
            wanted = reference[name]
            error = np.abs(parameter.detach().numpy() - wanted.values) / np.abs(wanted.values).max()
            assert error.max() < 1e-12, (step, name)
            np.testing.assert_allclose(
                optimizer.state[parameter]["exp_avg"].numpy(), wanted.m, rtol=1e-12, atol=1e-15
            )
            np.testing.assert_allclose(
                optimizer.state[parameter]["exp_avg_sq"].numpy(), wanted.v, rtol=1e-12, atol=1e-15
            )
            assert optimizer.state[parameter]["step"].item() == wanted.steps


def test_set_lr_reaches_every_group() -> None:
    named = [("weight", nn.Parameter(torch.ones(2, 2))), ("bias", nn.Parameter(torch.ones(2)))]
    optimizer = make_optimizer(OptimConfig(), named, Model())
    set_lr(optimizer, 0.125)
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]
    assert all(g["fused"] for g in optimizer.param_groups)
