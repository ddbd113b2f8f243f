"""Tests of the model against restatements of its sources, of its initial weights and precision, of oneDNN
products, row gradients and dropout."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bert_dp.config import ModelConfig
from bert_dp.model import kernels
from bert_dp.model.bert import IGNORE, INIT_STD, CrammedBert, build_model, sinusoidal_table
from bert_dp.model.kernels import KeyedDropout, dropped, fold_in
from tests.helpers import make_config
from tests.tensors import assert_near, randomise

Case = tuple[Tensor, Tensor, Tensor]  # ids [B, S], flat positions [P], labels [P]
SMALL = {"vocab_size": 100, "hidden_size": 48, "num_layers": 3, "num_heads": 4, "intermediate_size": 40}
MODERN = {"position": "rope", "norm_bias": False, "first_attention_norm": False, "head": "dense"}


def make_case(batch: int = 3, length: int = 16, vocab: int = 100, seed: int = 7) -> Case:
    """Return a micro batch with a quarter of each sequence predicted."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocab, (batch, length), generator=generator)
    rows = [torch.randperm(length, generator=generator)[: length // 4].sort().values for _ in range(batch)]
    positions_P = torch.cat([row + length * b for b, row in enumerate(rows)])
    labels_P = torch.randint(vocab, positions_P.shape, generator=generator)
    return ids_BS, positions_P, labels_P


def make_model(**changes) -> CrammedBert:
    """Return a freshly initialised model for 16 positions."""
    return build_model(ModelConfig(**(SMALL | changes)), 16, seed=1)


def random_model(**changes) -> CrammedBert:
    """Return a model whose random weights make every term matter."""
    model = make_model(**changes)
    randomise(model, 0.15, seed=3)
    return model


def gradients(loss: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


# The recipe restated from its description (arXiv 2212.14034 and JonasGeiping/cramming): sequence first, with
# explicit matrix products in the order of the description.


def restated_norm(x: Tensor, weights: dict[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def restated_attention(x_SBH: Tensor, Wqkv: Tensor, Wo: Tensor, heads: int) -> Tensor:
    length, batch, hidden = x_SBH.shape
    size = hidden // heads
    # rows of Wqkv: all heads of the query, then of the key, then of the value
    q, k, v = (
        (x_SBH @ Wqkv[i * hidden : (i + 1) * hidden].T).reshape(length, batch * heads, size).transpose(0, 1)
        for i in range(3)
    )
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(size)
    out = torch.bmm(scores.softmax(-1), v)  # [B A, S, D]
    return out.transpose(0, 1).reshape(length, batch, hidden) @ Wo.T


def restated_loss(w: dict[str, Tensor], case: Case, *, layers: int, heads: int) -> Tensor:
    """Return the crammed variant's cross entropy, summed over the predicted positions."""
    ids_BS, positions_P, labels_P = case
    length = ids_BS.shape[1]
    embedding_VH = w["model.embeddings.tok_embeddings.weight"]
    hidden = embedding_VH.shape[1]
    table_SH = torch.zeros(length, hidden, dtype=torch.float64)
    for s in range(length):
        for i in range(0, hidden, 2):
            angle = s / 10_000 ** (i / hidden)
            table_SH[s, i], table_SH[s, i + 1] = math.sin(angle), math.cos(angle)
    x_BSH = embedding_VH[ids_BS] + w["model.embeddings.position_scale"] * table_SH.to(embedding_VH.dtype)
    x_SBH = restated_norm(x_BSH, w, "model.embeddings.norm", 1e-12).transpose(0, 1)
    for i in range(layers):
        name = f"model.layers.{i}"
        normed = restated_norm(x_SBH, w, f"{name}.attn_norm", 1e-12)
        Wqkv, Wo = w[f"{name}.attn.Wqkv.weight"], w[f"{name}.attn.Wo.weight"]
        x_SBH = x_SBH + restated_attention(normed, Wqkv, Wo, heads)
        normed = restated_norm(x_SBH, w, f"{name}.mlp_norm", 1e-12)
        both = normed @ w[f"{name}.mlp.Wi.weight"].T
        width = both.shape[-1] // 2
        x_SBI, gate_SBI = both.split(width, dim=-1)
        gated_x = 0.5 * x_SBI * (1 + torch.erf(x_SBI / math.sqrt(2))) * gate_SBI
        x_SBH = x_SBH + gated_x @ w[f"{name}.mlp.Wo.weight"].T
    x_BSH = restated_norm(x_SBH, w, "model.final_norm", 1e-12).transpose(0, 1)
    loss = torch.zeros((), dtype=embedding_VH.dtype)
    for position, label in zip(positions_P.tolist(), labels_P.tolist(), strict=True):
        logits_V = embedding_VH @ x_BSH[position // length, position % length]
        loss = loss + logits_V.logsumexp(0) - logits_V[label]
    return loss


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_crammed_variant_equals_the_published_recipe(dtype, tolerance):
    model = random_model()
    # the table must not be rounded to fp32 first
    model.model.embeddings.sinusoids_SH.data = sinusoidal_table(16, 48).to(dtype)
    model = model.to(dtype)
    case = make_case()
    parameters = dict(model.named_parameters())
    # the reference runs in fp64 for both, so that only the model's own rounding is judged
    wide = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    expected = restated_loss(wide, case, layers=3, heads=4)
    loss = model(*case)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    actual = {name: g.double() for name, g in gradients(loss, parameters).items()}
    reference = gradients(expected, wide)
    scale = "model.embeddings.position_scale"  # one number, a sum of B S H terms that nearly cancel
    torch.testing.assert_close(actual.pop(scale), reference.pop(scale), rtol=50 * tolerance, atol=0.0)
    assert_near(actual, reference, tolerance)


OPTIONS = {
    "crammed": {},
    "modern": MODERN,
    "bert": {"mlp": "gelu", "bias": True, "position": "learned", "head": "dense"},
    "rms": {"norm": "rmsnorm", "norm_eps": 1e-6},
    "rope with biases": {"position": "rope", "bias": True, "norm_bias": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_parameter_of_every_variant_learns(options):
    model = make_model(**options)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if "k_bias" in name or name.endswith("Wqkv.bias")], (
        "a parameter without effect"
    )
    model(*make_case()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


KEYS = torch.tensor([[3, 4, 5], [6, 7, 8]], dtype=torch.int32)


def test_every_dropout_acts_and_no_two_masks_are_equal():
    """Masks differ between the 3 layers, between the dropouts of a layer, and between the 4 heads."""
    model = make_model(dropout=0.5, attention_dropout=0.5).train()
    places = [module for module in model.modules() if isinstance(module, KeyedDropout)]
    masks = []
    hooks = [m.register_forward_hook(lambda _m, _x, out: masks.append(out == 0)) for m in places]
    model(*make_case(), seed_B=KEYS[0])
    for hook in hooks:
        hook.remove()
    grids = [grid for out_BASS in masks if out_BASS.dim() == 4 for grid in out_BASS.unbind(1)]
    rows = [out_BSH for out_BSH in masks if out_BSH.dim() == 3]
    assert (len(places), len(rows), len(grids)) == (1 + 3 * 3, 1 + 3 * 2, 3 * 4)
    for alike in (rows, grids):
        assert len({mask.numpy().tobytes() for mask in alike}) == len(alike)
    losses = set()
    for alone in places:
        for place in places:
            place.p = 0.5 if place is alone else 0.0
        losses |= {model(*make_case(), seed_B=seed_B).item() for seed_B in KEYS}
    assert len(losses) == 2 * len(places)


def test_explicit_attention_equals_torchs_kernel():
    """The dropout probability is so small that nothing is dropped, and the batch has padding."""
    model = make_model(attention_dropout=1e-9)
    case, real_BS = make_case(), torch.arange(16) < torch.tensor([[16], [9], [3]])
    written = model.train()(*case, real_BS, KEYS[0])
    torch.testing.assert_close(written, model.eval()(*case, real_BS), rtol=1e-6, atol=1e-6)


def test_attention_in_bf16_on_a_cpu_rounds_as_torchs_kernel_does(monkeypatch):
    """bf16 attention on a CPU is computed explicitly, because torch's kernel is slow."""
    model = random_model()
    (ids_BS, _, _), real_BS = make_case(), torch.arange(16) < torch.tensor([[16], [9], [3]])
    wanted = model.double().model(ids_BS, real_BS)
    model.float()
    errors = {}
    for way, written in (("written", True), ("kernel", False)):
        monkeypatch.setattr("bert_dp.model.bert.is_slow_in_kernel", lambda q, written=written: written)
        with torch.autocast("cpu", torch.bfloat16):
            out = model.model(ids_BS, real_BS)
        errors[way] = ((out - wanted)[real_BS].norm() / wanted[real_BS].norm()).item()
    assert errors["written"] != errors["kernel"]
    assert errors["written"] < min(1.5 * errors["kernel"], 0.02), errors


def test_an_ignored_label_contributes_nothing():
    model = make_model()
    ids_BS, positions_P, labels_P = make_case()
    kept = torch.arange(len(labels_P)) % 3 > 0
    ignored = torch.where(kept, labels_P, IGNORE)
    parameters = dict(model.named_parameters())
    with_ignored = model(ids_BS, positions_P, ignored)
    without = model(ids_BS, positions_P[kept], labels_P[kept])
    assert with_ignored.item() == pytest.approx(without.item(), rel=1e-6)
    assert_near(gradients(with_ignored, parameters), gradients(without, parameters), 1e-5)
    assert model(ids_BS, positions_P, torch.full_like(labels_P, IGNORE)).item() == 0.0


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_initial_weights_are_a_pure_function_of_the_seed(options):
    def weights(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(noise)
        return build_model(ModelConfig(**SMALL, **options), 16, seed).state_dict()

    first, again, other = weights(5, noise=0), weights(5, noise=1), weights(6, noise=0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [n for n in first if first[n].dim() == 2]
    assert random
    assert not any(torch.equal(first[name], other[name]) for name in random)


def test_initial_weights_have_the_published_standard_deviation():
    assert make_model().model.embeddings.position_scale.item() == pytest.approx(48**-0.5)
    config = ModelConfig(**{**SMALL, **OPTIONS["bert"], "hidden_size": 96, "vocab_size": 2000})
    model = build_model(config, 128, seed=1)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(INIT_STD, rel=0.05), name
            assert abs(p.mean().item()) < 5 * INIT_STD / math.sqrt(p.numel()), name
        elif "norm" in name and name.endswith("weight"):
            assert (p == 1).all(), name
        else:
            assert (p == 0).all(), name


def shapes_and_dtypes(forward: Callable[[], object], *modules: nn.Module) -> list[Any]:
    """Return the shape and dtype of the first input of each module in one pass."""
    seen: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append((tuple(args[0].shape), args[0].dtype)))
        for module in modules
    ]
    forward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_final_norm_is_applied_to_predicted_positions_only(options):
    """model.model() normalises hidden states at every position, and both results agree."""
    model = random_model(**options)
    ids_BS, positions_P, labels_P = make_case()
    norm = model.model.final_norm
    (seen,) = shapes_and_dtypes(lambda: model(ids_BS, positions_P, labels_P), norm)
    assert seen == ((len(positions_P), 48), torch.float32)
    (seen,) = shapes_and_dtypes(lambda: model.model(ids_BS), norm)
    assert seen == ((*ids_BS.shape, 48), torch.float32)
    table_VH = model.model.embeddings.tok_embeddings.weight
    of_states = model.head(model.model(ids_BS).flatten(0, 1)[positions_P], table_VH, None)
    torch.testing.assert_close(model(ids_BS, positions_P), of_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("residual", "autocast", "wanted"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16", torch.float16, torch.float32),
        ("bf16", None, torch.float32),
        ("full", torch.bfloat16, torch.float32),
    ],
)
def test_the_residual_stream_is_in_bf16_only_under_bf16_autocast(options, residual, autocast, wanted):
    model = random_model(**options, residual_dtype=residual)
    case = make_case()

    def forward():
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            model(*case).backward()

    modules = (*model.model.layers, model.model.final_norm)
    assert [dtype for _, dtype in shapes_and_dtypes(forward, *modules)] == [wanted] * len(modules)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    if wanted is torch.float32:
        plain = random_model(**options)
        assert model(*case).item() == plain(*case).item(), "without bf16 autocast the setting has no effect"


needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)


# --- products


def with_gradients(linear: object, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output [B, S, N] and the gradients of x [B, S, K], weight [N, K] and bias [N]."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = linear(*leaves)  # type: ignore[operator]
    out.square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@needs_onednn
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("way", ["eager", "compiled", "no gradient", "inference"])
def test_product_and_gradients_equal_torchs_linear(
    by_onednn: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USES_ONEDNN", by_onednn)
    torch.manual_seed(0)
    inputs = (torch.randn(3, 5, 24), torch.randn(40, 24), torch.randn(40))
    ours = torch.compile(kernels.linear, fullgraph=True) if way == "compiled" else kernels.linear
    without = {"no gradient": torch.no_grad, "inference": torch.inference_mode}.get(way)
    with torch.profiler.profile() as profile, without() if without else nullcontext():
        mine = [ours(*inputs)] if without else with_gradients(ours, inputs)
    torch.testing.assert_close(mine, with_gradients(F.linear, inputs)[: len(mine)], rtol=1e-4, atol=1e-4)
    calls = sum(event.count for event in profile.key_averages() if event.key == "mkldnn::_linear_pointwise")
    assert calls == len(mine[:3]) * by_onednn


@needs_onednn
def test_an_exported_model_uses_torchs_linear_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs do not know bert-dp's operator."""
    monkeypatch.setattr(kernels, "USES_ONEDNN", True)
    with torch.no_grad():
        program = torch.export.export(kernels.Linear(24, 40), (torch.randn(5, 24),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names == {"aten.linear.default"}


# --- looked-up rows


ROWS, HIDDEN = 11, 6


def row_case(dtype: torch.dtype, *, foreign: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return lookups in which row 4 is most frequent and row 7 missing; `foreign` ignores 4 of them."""
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


@pytest.mark.parametrize("foreign", [False, True], ids=["own rows", "some foreign rows"])
@pytest.mark.parametrize("add", [kernels.add_by_index, kernels.add_dense])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_row_gradients_are_summed_in_place(add, dtype: torch.dtype, foreign: bool) -> None:
    grad_VH, ids_BS, grad_BSH, foreign_BS = row_case(dtype, foreign=foreign)
    expected = by_one_hot_vectors(grad_VH, ids_BS, grad_BSH, foreign_BS)
    kept = grad_BSH.clone()
    out = add(grad_VH, ids_BS, grad_BSH, foreign_BS)
    assert out.data_ptr() == grad_VH.data_ptr()
    assert out.dtype == dtype
    assert torch.equal(grad_BSH, kept)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_device_selects_the_row_gradient_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("add_by_index", "add_dense"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: called.append(name))
    for device in ("cpu", "cuda"):
        with FakeTensorMode(), torch.device(device):
            ids_BS = torch.zeros(2, 3, dtype=torch.int64)
            kernels.add_row_gradients(torch.ones(4, 5), ids_BS, torch.ones(2, 3, 5))
    assert called == ["add_by_index", "add_dense"]


# --- dropout


FOUR_KEYS = torch.tensor([5, -7, 2**31 - 1, 0], dtype=torch.int32)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_the_dropped_share_equals_the_probability(p: float) -> None:
    out = dropped(FOUR_KEYS, 256, 512, p)
    assert out.shape == (4, 256, 512)
    each = out.flatten(1).double().mean(1)
    assert (each - p).abs().max() < 5 * (p * (1 - p) / (256 * 512)) ** 0.5
    for mean in (out.double().mean(1), out.double().mean(2)):  # the share is the same in each row and column
        assert (mean - p).abs().max() < 6 * (p * (1 - p) / 256) ** 0.5


def test_neighbours_are_independent() -> None:
    """Pairs at short distances along rows, columns, keys and sites are dropped together at a rate of p^2."""
    p = 0.5
    out = torch.stack([dropped(fold_in(FOUR_KEYS, place), 128, 128, p) for place in range(4)])
    for axis in range(out.dim()):
        for distance in (1, 2, 3):
            n = out.shape[axis] - distance
            both = (out.narrow(axis, 0, n) & out.narrow(axis, distance, n)).double()
            assert abs(both.mean() - p * p) < 6 * (p * p * (1 - p * p) / both.numel()) ** 0.5, axis


def test_masks_do_not_depend_on_the_grid_size_or_the_number_of_sites() -> None:
    whole = dropped(FOUR_KEYS, 100, 70, 0.1)
    assert torch.equal(dropped(FOUR_KEYS, 30, 20, 0.1), whole[:, :30, :20])
    assert torch.equal(dropped(FOUR_KEYS[2:], 100, 70, 0.1), whole[2:])
    places = torch.arange(6, dtype=torch.int32)[:, None]
    assert torch.equal(
        fold_in(FOUR_KEYS, places), torch.stack([fold_in(FOUR_KEYS, place) for place in range(6)])
    )


def test_a_model_without_dropout_computes_nothing_for_its_keys() -> None:
    """Small operations in every layer would make a GPU wait for its host."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    calls: list[str] = []

    def calls_of(dropout: str, seed_B: torch.Tensor | None) -> list[str]:
        settings = (f"model.dropout={dropout}", "data.sequence_length=16", "model.num_layers=2")
        config = make_config("model.vocab_size=64", "model.hidden_size=32", "model.num_heads=2", *settings)
        model = build_model(config.model, 16, seed=0).model.train()
        calls.clear()
        with Count():
            model.encode(torch.zeros(4, 16, 32), None, seed_B)
        return [*calls]

    assert calls_of("0.0", FOUR_KEYS) == calls_of("0.0", None)
    assert not any("scalar_tensor" in call or "_to_copy" in call for call in calls_of("0.1", FOUR_KEYS))


def test_dropout_scales_kept_values_and_is_off_in_evaluation() -> None:
    layer, x = KeyedDropout(0.25, site=3), torch.ones(4, 8, 8, dtype=torch.float64)
    out = layer(x, FOUR_KEYS)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(out == 0, dropped(fold_in(FOUR_KEYS, 3), 8, 8, 0.25))
    assert layer.eval()(x, None) is x
    with pytest.raises(ValueError, match="needs a key per example"):
        layer.train()(x, None)
