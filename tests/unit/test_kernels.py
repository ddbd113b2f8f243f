"""Products by oneDNN and torch, both ways of adding the gradient of looked-up rows, and dropout by place."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bert_dp.model import kernels
from bert_dp.model.bert import build_model
from bert_dp.model.kernels import KeyedDropout, dropped, fold_in
from tests.helpers import make_config

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)


# --- products


def gradients(linear: object, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output [B, S, N] and the gradients of x [B, S, K], weight [N, K] and bias [N]."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = linear(*leaves)  # type: ignore[operator]
    out.square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@needs_onednn
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("way", ["eager", "compiled", "no gradient", "inference"])
def test_product_and_gradients_are_those_of_linear(
    by_onednn: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USES_ONEDNN", by_onednn)
    torch.manual_seed(0)
    inputs = (torch.randn(3, 5, 24), torch.randn(40, 24), torch.randn(40))
    ours = torch.compile(kernels.linear, fullgraph=True) if way == "compiled" else kernels.linear
    without = {"no gradient": torch.no_grad, "inference": torch.inference_mode}.get(way)
    with torch.profiler.profile() as profile, without() if without else nullcontext():
        mine = [ours(*inputs)] if without else gradients(ours, inputs)
    torch.testing.assert_close(mine, gradients(F.linear, inputs)[: len(mine)], rtol=1e-4, atol=1e-4)
    calls = sum(event.count for event in profile.key_averages() if event.key == "mkldnn::_linear_pointwise")
    assert calls == len(mine[:3]) * by_onednn


@needs_onednn
def test_what_is_exported_has_torchs_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of ours stands in a file for other programs."""
    monkeypatch.setattr(kernels, "USES_ONEDNN", True)
    with torch.no_grad():
        program = torch.export.export(kernels.Linear(24, 40), (torch.randn(5, 24),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names == {"aten.linear.default"}


# --- looked-up rows


ROWS, HIDDEN = 11, 6


def case(dtype: torch.dtype, *, foreign: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Row 4 is looked up most, row 0 and the last once each, row 7 never; four places are foreign."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.tensor([[4, 4, 1, 4, 10, 2], [2, 4, 0, 4, 4, 9]])
    grad_BSH = torch.randn(2, 6, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    grad_VH = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    foreign_BS = torch.tensor([[0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 1]], dtype=torch.bool) if foreign else None
    return grad_VH, ids_BS, grad_BSH, foreign_BS


def by_one_hot_vectors(
    grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None
) -> Tensor:
    one_hot_BSV = F.one_hot(ids_BS, ROWS).double()
    if foreign_BS is not None:
        one_hot_BSV[foreign_BS] = 0
    return grad_VH.double() + torch.einsum("bsv,bsh->vh", one_hot_BSV, grad_BSH.double())


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "some foreign"])
@pytest.mark.parametrize("add", [kernels.add_by_index, kernels.add_dense])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_place_of_a_row_counts_in_place(add, dtype: torch.dtype, foreign: bool) -> None:
    grad_VH, ids_BS, grad_BSH, foreign_BS = case(dtype, foreign=foreign)
    expected = by_one_hot_vectors(grad_VH, ids_BS, grad_BSH, foreign_BS)
    kept = grad_BSH.clone()
    out = add(grad_VH, ids_BS, grad_BSH, foreign_BS)
    assert out.data_ptr() == grad_VH.data_ptr()
    assert out.dtype == dtype
    assert torch.equal(grad_BSH, kept)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("add_by_index", "add_dense"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: called.append(name))
    for device in ("cpu", "cuda"):
        with FakeTensorMode(), torch.device(device):
            ids_BS = torch.zeros(2, 3, dtype=torch.int64)
            kernels.add_row_gradients(torch.ones(4, 5), ids_BS, torch.ones(2, 3, 5))
    assert called == ["add_by_index", "add_dense"]


# --- dropout


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
    with pytest.raises(ValueError, match="needs a key per example"):
        layer.train()(x, None)
