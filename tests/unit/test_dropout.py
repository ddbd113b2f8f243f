"""Dropout by example and place: its rate, and what it does and does not depend on."""

from __future__ import annotations

import pytest
import torch

from bert_dp.dropout import KeyedDropout, dropped, subkey

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
    out = torch.stack([dropped(subkey(KEYS, place), 128, 128, p) for place in range(4)])
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
    seen = [dropped(subkey(KEYS[:1], place), 16, 16, 0.5) for place in range(6)]
    seen += [dropped(KEYS[i : i + 1], 16, 16, 0.5) for i in range(4)]
    assert len({bytes(mask.numpy().tobytes()) for mask in seen}) == 10


def test_what_is_kept_is_scaled_and_evaluation_drops_nothing() -> None:
    layer, x = KeyedDropout(0.25, place=3), torch.ones(4, 8, 8, dtype=torch.float64)
    out = layer(x, KEYS)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(out == 0, dropped(subkey(KEYS, 3), 8, 8, 0.25))
    assert layer.eval()(x, None) is x
    with pytest.raises(ValueError, match="needs a key for each example"):
        layer.train()(x, None)
