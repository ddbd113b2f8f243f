"""Schedules as functions of f, parameter groups, and the fused AdamW against one written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bert_dp.config import ModelConfig, OptimConfig, ScheduleConfig
from bert_dp.model.bert import build_model
from bert_dp.model.interface import Model
from bert_dp.optim import lr_factor, make_optimizer, parameter_groups, set_lr

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


def test_set_lr_reaches_every_group() -> None:
    named = [("weight", nn.Parameter(torch.ones(2, 2))), ("bias", nn.Parameter(torch.ones(2)))]
    optimizer = make_optimizer(OptimConfig(), named, Model())
    set_lr(optimizer, 0.125)
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]
    assert all(g["fused"] for g in optimizer.param_groups)
