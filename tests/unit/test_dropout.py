"""Dropout by example and place: its rate, and what it does and does not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert_dp.model.bert import build_model
from bert_dp.model.kernels import KeyedDropout, dropped, fold_in
from tests.helpers import make_config

KEYS = torch.tensor([5, -7, 2**31 - 1, 0], dtype=torch.int32)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_as_many_are_dropped_as_the_probability_says(p: float) -> None:
    out = dropped(KEYS, 256, 512, p)
    assert out.shape == (4, 256, 512)
    each = out.flatten(1).double().mean(1)
    assert (each - p).abs().max() < 5 * (p * (1 - p) / (256 * 512)) ** 0.5
    for mean in (out.double().mean(1), out.double().mean(2)):  # no row or column is special
        assert (mean - p).abs().max() < 6 * (p * (1 - p) / 256) ** 0.5


def test_neighbours_are_independent() -> None:
    """Of pairs at any short distance along rows, columns, keys and places, p^2 are dropped together."""
    p = 0.5
    out = torch.stack([dropped(fold_in(KEYS, place), 128, 128, p) for place in range(4)])
    for axis in range(out.dim()):
        for distance in (1, 2, 3):
            n = out.shape[axis] - distance
            both = (out.narrow(axis, 0, n) & out.narrow(axis, distance, n)).double()
            assert abs(both.mean() - p * p) < 6 * (p * p * (1 - p * p) / both.numel()) ** 0.5, (
                axis,
                distance,
            )


def test_a_cut_of_the_grid_drops_the_same() -> None:
    whole = dropped(KEYS, 100, 70, 0.1)
    assert torch.equal(dropped(KEYS, 30, 20, 0.1), whole[:, :30, :20])
    assert torch.equal(dropped(KEYS[2:], 100, 70, 0.1), whole[2:])


def test_keys_and_places_differ() -> None:
    seen = [dropped(fold_in(KEYS[:1], place), 16, 16, 0.5) for place in range(6)]
    seen += [dropped(KEYS[i : i + 1], 16, 16, 0.5) for i in range(4)]
    assert len({bytes(mask.numpy().tobytes()) for mask in seen}) == 10


def test_the_keys_of_many_places_are_those_of_each() -> None:
    places = torch.arange(6, dtype=torch.int32)[:, None]
    assert torch.equal(fold_in(KEYS, places), torch.stack([fold_in(KEYS, place) for place in range(6)]))


def test_a_model_without_dropout_computes_nothing_for_its_keys() -> None:
    """Small operations of every layer keep a GPU waiting for its host."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    def calls_of(dropout: str, seed_B: torch.Tensor | None) -> list[str]:
        settings = (f"model.dropout={dropout}", "data.sequence_length=16", "model.num_layers=2")
        config = make_config("model.vocab_size=64", "model.hidden_size=32", "model.num_heads=2", *settings)
        model = build_model(config.model, 16, seed=0).model.train()
        with Count() as counted:
            model.encode(torch.zeros(4, 16, 32), None, seed_B)
        return counted.calls

    assert calls_of("0.0", KEYS) == calls_of("0.0", None)
    assert not any("scalar_tensor" in call or "_to_copy" in call for call in calls_of("0.1", KEYS))


def test_what_is_kept_is_scaled_and_evaluation_drops_nothing() -> None:
    layer, x = KeyedDropout(0.25, site=3), torch.ones(4, 8, 8, dtype=torch.float64)
    out = layer(x, KEYS)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(out == 0, dropped(fold_in(KEYS, 3), 8, 8, 0.25))
    assert layer.eval()(x, None) is x
    with pytest.raises(ValueError, match="needs a key for each example"):
        layer.train()(x, None)
