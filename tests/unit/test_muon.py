"""Tests of Muon against a rule written with singular values, and against torch's AdamW."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bert_dp.config import OptimConfig, load_config
from bert_dp.model.bert import CrammedBert
from bert_dp.model.interface import Model
from bert_dp.optim import make_optimizer, muon
from bert_dp.optim.muon import WHOLE, Muon, orthogonalize
from tests.helpers import PRETRAINING
from tests.unit.test_optimizers import parameters_of, random_tensors, rate, take_step

MOMENTUM, BETAS, EPS, DECAY = 0.9, (0.8, 0.95), 1e-6, 0.1
MATRICES = ("wide", "tall", "square")
REST = ("embedding", "norm", "bias")  # only the embedding decays


def make_muon(*groups: dict[str, Any], lr: float = 0.0) -> Muon:
    return Muon(groups, lr=lr, momentum=MOMENTUM, betas=BETAS, eps=EPS)


def groups_of_rest(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [parameters["embedding"]], "weight_decay": DECAY},
        {"params": [parameters["norm"], parameters["bias"]], "weight_decay": 0.0},
    ]


def muon_of_all(parameters: dict[str, nn.Parameter]) -> Muon:
    matrices = [parameters[name] for name in MATRICES]
    return make_muon(
        *groups_of_rest(parameters), {"params": matrices, "weight_decay": DECAY, "splits": [WHOLE] * 3}
    )


def through_singular_values(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix after five Newton-Schulz steps: an odd polynomial of each singular value, five times.

    The coefficients are from kellerjordan.github.io/posts/muon.
    """
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(5, 17), (17, 5), (9, 9), (1, 6), (6, 1)])
def test_orthogonalize_changes_only_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1.0, 1e-3, 1e4):
        out = orthogonalize(scale * matrix)
        assert out.shape == shape
        expected = through_singular_values(matrix.numpy())
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
        singular = torch.linalg.svdvals(out)
        assert float(singular.min()) > 0.6
        assert float(singular.max()) < 1.3


class Watched(TorchDispatchMode):
    """A recorder of the precision allowed for each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default or func is torch.ops.aten.bmm.default:
            self.allowed.append(torch.get_float32_matmul_precision())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("models", ["high", "highest"])
def test_products_are_in_fp32_even_if_the_model_uses_tf32(models: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(models)
    try:
        with Watched() as watched:
            orthogonalize(torch.ones(2, 3, 4))
            assert torch.get_float32_matmul_precision() == models
            with pytest.raises(IndexError):
                orthogonalize(torch.ones(3))
        assert torch.get_float32_matmul_precision() == models, "the precision is restored after an error"
    finally:
        torch.set_float32_matmul_precision(before)
    assert watched.allowed == ["highest"] * 15  # five iterations of three products


def test_ten_steps_equal_the_rule_written_by_hand() -> None:
    """buffer <- mu buffer + (1 - mu) g; the direction of the update applies this once more (Nesterov)."""
    parameters = parameters_of(random_tensors(0, 0.02))
    optimizer = muon_of_all(parameters)
    weights = {name: parameters[name].detach().numpy().copy() for name in MATRICES}
    start = {name: w.copy() for name, w in weights.items()}
    buffers = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(10):
        grads = random_tensors(step + 1, 10.0 ** (step % 3 - 2))
        take_step(optimizer, parameters, grads, rate(step))
        for name, w in weights.items():
            g = grads[name].numpy()
            buffers[name] = MOMENTUM * buffers[name] + (1 - MOMENTUM) * g
            ahead = MOMENTUM * buffers[name] + (1 - MOMENTUM) * g
            size = 0.2 * max(w.shape) ** 0.5
            kept = (1 - rate(step) * DECAY) * w
            weights[name] = kept - rate(step) * size * through_singular_values(ahead)
            actual = parameters[name].detach().numpy()
            np.testing.assert_allclose(
                actual, weights[name], rtol=0, atol=1e-12 * np.abs(weights[name]).max()
            )
            buffer = optimizer.state[parameters[name]]["momentum_buffer"].numpy()
            np.testing.assert_allclose(buffer, buffers[name], rtol=1e-12, atol=1e-15)
    for name, w in weights.items():
        assert np.linalg.norm(w - start[name]) > np.linalg.norm(start[name])  # far more than the tolerance


@pytest.mark.parametrize("dim", [0, 1])
def test_fused_matrices_are_orthogonalised_separately(dim: int) -> None:
    """A parameter of three fused matrices moves like three parameters, even next to one of their shape."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((6, 6), generator=generator, dtype=torch.float64) for _ in range(3)]
    grads = [torch.randn((6, 6), generator=generator, dtype=torch.float64) for _ in range(3)]
    fused = parameters_of({"fused": torch.cat(parts, dim), "other": parts[0]})
    apart = parameters_of({str(i): part for i, part in enumerate(parts)})
    for parameters, wanted, splits in (
        (fused, {"fused": torch.cat(grads, dim), "other": grads[0]}, [(dim, 3), WHOLE]),
        (apart, {str(i): grad for i, grad in enumerate(grads)}, [WHOLE] * 3),
    ):
        optimizer = make_muon({"params": list(parameters.values()), "splits": splits})
        for step in range(3):
            take_step(optimizer, parameters, {n: g * (step + 1) for n, g in wanted.items()}, 0.1)
    torch.testing.assert_close(
        fused["fused"].detach(), torch.cat([p.detach() for p in apart.values()], dim), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(fused["other"], apart["0"], rtol=1e-12, atol=1e-12)


def test_splitting_the_batch_of_matrices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (2**25, 70):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", elements)
        parameters = parameters_of({str(i): random_tensors(i)["square"] for i in range(5)})
        optimizer = make_muon({"params": list(parameters.values()), "splits": [WHOLE] * 5})
        take_step(optimizer, parameters, {n: p.detach() ** 2 for n, p in parameters.items()}, 0.1)
        results.append([p.detach() for p in parameters.values()])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_parameters_equal_torchs_fused_adamw_bit_for_bit(dtype: torch.dtype) -> None:
    start = random_tensors(0, 0.02, dtype)
    ours, theirs = parameters_of(start), parameters_of({name: start[name] for name in REST})
    own = muon_of_all(ours)
    adamw = torch.optim.AdamW(groups_of_rest(theirs), lr=0.0, betas=BETAS, eps=EPS, fused=True)
    for step in range(6):
        grads = random_tensors(step + 1)
        for optimizer in (own, adamw):
            optimizer.grad_scale = torch.tensor(2.5 if step == 2 else 1.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(step == 3))  # type: ignore[attr-defined]
        take_step(own, ours, grads, rate(step))
        take_step(adamw, theirs, grads, rate(step))
        for name, parameter in theirs.items():
            assert torch.equal(ours[name], parameter), (step, name)
            for key, value in adamw.state[parameter].items():
                assert torch.equal(own.state[ours[name]][key], value), (step, name, key)
        assert own.state[ours["norm"]].keys() == adamw.state[theirs["norm"]].keys()


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda p: p.stem)
def test_muon_gets_the_linear_weights_of_the_blocks(path: Path) -> None:
    config = load_config(path, ["model.num_layers=2"])
    with torch.device("meta"):
        model = CrammedBert(config.model, config.data.sequence_length)
    linears = {
        f"model.layers.{name}.weight"
        for name, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert len(linears) == 2 * 4
    named = dict(model.named_parameters())
    assert {name for name in named if model.is_matrix(name)} == linears
    settings = OptimConfig(name="muon", momentum=0.75, weight_decay=0.25, beta1=0.8, beta2=0.95, eps=1e-3)
    optimizer = make_optimizer(settings, named.items(), model)
    assert isinstance(optimizer, Muon)
    plain, bare, matrices = optimizer.param_groups
    names = {parameter: name for name, parameter in named.items()}
    assert [g["splits"] is not None for g in optimizer.param_groups] == [False, False, True]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0, 0.25]
    assert {names[p] for p in matrices["params"]} == linears
    pairs = zip(matrices["params"], matrices["splits"], strict=True)
    splits = {names[p].rpartition("layers.")[2]: split for p, split in pairs}
    assert splits["0.attn.Wqkv.weight"] == (0, 3)
    assert splits["1.mlp.Wi.weight"] == (0, 2 if config.model.mlp == "geglu" else 1)
    assert {count for name, (_, count) in splits.items() if "Wo" in name} == {1}
    assert {names[p] for p in bare["params"]} == {n for n in named if not model.is_decayed(n)}
    assert {names[p] for p in plain["params"]} == {n for n in named if model.is_decayed(n)} - linears
    assert all(
        (g["momentum"], g["betas"], g["eps"]) == (0.75, (0.8, 0.95), 1e-3) for g in optimizer.param_groups
    )


@pytest.mark.parametrize(
    ("device", "precision", "wanted"),
    [("cuda", "bf16", torch.bfloat16), ("cuda", "fp32", None), ("cpu", "bf16", None)],
)
def test_only_gpus_run_newton_schulz_in_bf16(device: str, precision: str, wanted: torch.dtype | None) -> None:
    with FakeTensorMode():
        named = {"layer.weight": nn.Parameter(torch.ones(4, 3, device=device))}
        optimizer = make_optimizer(OptimConfig(name="muon"), named.items(), Model(), precision=precision)
    assert optimizer._multiply_in == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(2, 40, 90), (90, 40)])
def test_an_update_in_bf16_equals_fp32_up_to_rounding(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wide, narrow = orthogonalize(matrices), orthogonalize(matrices, torch.bfloat16)
    assert narrow.dtype == torch.float32
    assert 1e-4 < float((narrow - wide).norm() / wide.norm()) < 0.06
