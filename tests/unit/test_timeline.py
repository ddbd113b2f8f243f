"""Gradients of a model that was not profiled, by hand."""

import pytest

from bert_dp.config import ModelConfig
from bert_dp.cost import linear_parameters, num_parameters
from launcher.plan.timeline import Gradient, buckets, exposed, from_layers

MODEL = ModelConfig(
    num_layers=3, hidden_size=64, num_heads=4, intermediate_size=128, vocab_size=512, position="learned"
)


def test_blocks_are_ready_at_even_steps_and_all_the_rest_at_the_end() -> None:
    found = from_layers(MODEL, num_parameters(MODEL, 32), 2.0, 8.0)
    block = linear_parameters(MODEL) / 3
    assert [g.ready for g in found] == [2.0, 4.0, 6.0, 8.0]
    assert [g.size for g in found] == [
        2 * block,
        2 * block,
        2 * block,
        2 * (num_parameters(MODEL, 32) - 3 * block),
    ]


def test_the_first_bucket_alone_may_be_smaller_and_none_is_empty() -> None:
    gradients = [Gradient(2.0, t) for t in (4.0, 1.0, 2.0, 3.0)]
    assert buckets(gradients, 4.0, first=2.0) == [Gradient(2, 1), Gradient(4, 3), Gradient(2, 4)]
    assert buckets(gradients, 4.0) == [Gradient(4, 2), Gradient(4, 4)]
    assert buckets([*gradients, Gradient(9.0, 5.0)], 4.0)[-1] == Gradient(9, 5), "a tensor is never split"
    assert buckets([], 4.0) == []
    assert buckets(gradients, 2.0, first=0.0) == [Gradient(2, t) for t in (1, 2, 3, 4)]


def test_a_reduction_waits_for_its_bucket_and_for_the_one_before() -> None:
    fused = [Gradient(1, 1.0), Gradient(3, 1.5), Gradient(2, 9.0)]
    # 1-2, 2-5, 9-11: 6 s in all, of which 1 s is after the backward pass of 10 s
    assert exposed(fused, 10.0, lambda size: size) == pytest.approx(1.0)
    assert exposed(fused, 10.0, lambda size: size, gain=0.5) == pytest.approx(6 - 0.5 * 5)
    assert exposed(fused, 2.0, lambda size: size) == pytest.approx(6.0)  # never more than all of them
    at_once = [Gradient(0.5, 0.0), Gradient(0.25, 0.0)]
    assert exposed(at_once, 0.5, lambda size: size) == pytest.approx(0.25)
    assert exposed(at_once, 0.8, lambda size: size) == 0
    assert exposed([], 10.0, lambda size: size) == 0
