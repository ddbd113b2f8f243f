"""Tests that a model sharded over 2 and 4 ranks by tensor parallelism equals the whole model.

The ranks are started once and run every check; each check is one test. A check runs all its collectives
before it asserts, so that a failing check does not block the next one.
"""

import functools
import itertools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import ModelConfig, OptimConfig
from bert_dp.model.bert import IGNORE, CrammedBert, TiedEmbedding, build_model
from bert_dp.model.load import recompute_blocks
from bert_dp.optim import make_optimizer, set_lr
from bert_dp.parallel import zero1
from bert_dp.parallel.base import RankGrid, clip_and_step
from bert_dp.parallel.tensor import ParallelEmbedding, TensorParallel
from bert_dp.training.distributed import connect, disconnect
from bert_dp.training.process import read_world
from tests.helpers import read_json
from tests.ranks import run_ranks
from tests.tensors import CPU, assert_near, bits, randomise

SIZES = (2, 4)
VOCABULARY, HIDDEN, HEADS, WIDTH, LENGTH = 24, 16, 4, 12, 8
POSITIONS = ("scaled_sinusoidal", "rope", "learned")
Check = Callable[[TensorParallel, RankGrid], None]
Case = tuple[Tensor, Tensor, Tensor]
Numbers = dict[str, Tensor]

VARIANTS: dict[str, dict[str, Any]] = {
    f"{mlp}{'-bias' * bias}-{head}{'-dropout' * (dropout > 0)}": {
        "mlp": mlp,
        "bias": bias,
        "head": head,
        "dropout": dropout,
        "attention_dropout": dropout,
        "position": POSITIONS[i % 3],
        "norm": ("layernorm", "rmsnorm")[i // 3 % 2],
    }
    for i, (mlp, bias, head, dropout) in enumerate(
        itertools.product(("geglu", "gelu"), (True, False), ("none", "dense"), (0.0, 0.1))
    )
}


def small(**changes: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=HEADS,
        intermediate_size=WIDTH,
        **changes,
    )


def make_model(dtype: torch.dtype = torch.float64, **changes: Any) -> CrammedBert:
    """Return a model with equal weights at every call, large enough for every term to matter."""
    model = build_model(small(**changes), LENGTH, seed=0).to(dtype)
    randomise(model, 0.2, seed=1)
    return model


def make_case() -> Case:
    """Return a case that reads every token and predicts every label. Two more labels are ignored."""
    generator = torch.Generator().manual_seed(2)
    ids_BS = torch.randperm(5 * LENGTH, generator=generator).view(5, LENGTH) % VOCABULARY
    labels_P = torch.cat([torch.arange(VOCABULARY), torch.full((2,), IGNORE)])
    positions_P = torch.randperm(ids_BS.numel(), generator=generator)[: len(labels_P)]
    return ids_BS, positions_P, labels_P


def loss_and_gradients(model: CrammedBert, seed: int = 3) -> tuple[Tensor, Numbers]:
    model.zero_grad()
    loss = model(*make_case(), seed_B=torch.arange(seed, seed + 5, dtype=torch.int32))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gathered(tensor: TensorParallel, parts: Numbers) -> Numbers:
    return {name: tensor.unshard(name, part) for name, part in parts.items()}


TOLERANCES = {  # relative, absolute
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 0.1),
}


def check_cross_entropy(tensor: TensorParallel, grid: RankGrid) -> None:
    """Check labels in every shard and at its borders. exp of the last rows needs a subtracted maximum."""
    vocabulary = ParallelEmbedding(grid.tp_group.group_name, grid.tp_rank)
    generator = torch.Generator().manual_seed(0)
    labels_P = torch.cat([torch.arange(VOCABULARY), torch.tensor([IGNORE, 5, IGNORE, 17, 0, 23])])
    whole_PV = 5 * torch.randn(len(labels_P), VOCABULARY, generator=generator, dtype=torch.float64)
    whole_PV[-4:] *= 400
    whole_PV.requires_grad_()
    expected = F.cross_entropy(whole_PV, labels_P, ignore_index=IGNORE, reduction="sum")
    (0.7 * expected).backward()
    by_position_2P = TiedEmbedding().score(whole_PV.detach(), labels_P)
    width = VOCABULARY // grid.tp_size
    mine = slice(grid.tp_rank * width, (grid.tp_rank + 1) * width)
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        part_PV = whole_PV.detach()[:, mine].to(dtype).requires_grad_()
        before = part_PV.detach().clone()
        loss = vocabulary.loss(part_PV, labels_P)
        (0.7 * loss).backward()
        results.append((dtype, loss.detach(), part_PV, vocabulary.score(part_PV, labels_P)))
        assert torch.equal(part_PV.detach(), before), "the logits changed"
    assert vocabulary.loss(whole_PV.detach()[:2, mine].clone(), torch.full((2,), IGNORE)) == 0
    torch.testing.assert_close(by_position_2P[0].sum(), expected.detach(), rtol=1e-12, atol=0)
    assert 0 < by_position_2P[1].sum() < len(labels_P)
    for dtype, loss, part_PV, score_2P in results:
        rtol, atol = TOLERANCES[dtype]
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=rtol, atol=0)
        rows = slice(None) if dtype == torch.float64 else slice(None, -4)  # large logits round too much
        assert part_PV.grad is not None
        torch.testing.assert_close(
            part_PV.grad[rows].double(), whole_PV.grad[rows, mine], rtol=rtol, atol=atol
        )
        if dtype != torch.bfloat16:
            torch.testing.assert_close(score_2P.double(), by_position_2P, rtol=10 * rtol, atol=10 * rtol)


def divided_names(model: CrammedBert, bias: bool) -> set[str]:
    names = {"model.embeddings.tok_embeddings.weight"}
    inner = ["attn.Wqkv.weight", "attn.Wo.weight", "mlp.Wi.weight", "mlp.Wo.weight"]
    inner += ["attn.q_bias", "attn.v_bias", "mlp.Wi.bias"] * bias
    return names | {f"model.layers.{i}.{n}" for i in range(len(model.model.layers)) for n in inner}


def check_part_and_whole(tensor: TensorParallel, grid: RankGrid) -> None:
    """Check that shard and unshard are inverse for every parameter, and that each rank has its share."""
    shards = []
    for variant in VARIANTS.values():
        model = make_model(**variant)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        tensor.shard_model(model)
        for name, p in model.named_parameters():
            whole = torch.arange(shapes[name].numel(), dtype=torch.float64).view(shapes[name])
            part = tensor.shard(name, whole)
            turned = part.t().contiguous().t() if part.dim() == 2 else part  # with other strides
            again = [tensor.unshard(name, part), tensor.unshard(name, turned)]
            shards.append(((variant, name), p, whole, part, again))
        divided = {name for name, p in model.named_parameters() if p.shape != shapes[name]}
        assert divided == divided_names(model, variant["bias"])
    for what, p, whole, part, again in shards:
        assert all(torch.equal(each, whole) for each in again), what
        assert part.shape == p.shape, what
        assert p.numel() in (whole.numel(), whole.numel() // grid.tp_size), what
        assert p.is_contiguous(), what


def check_model(variant: dict[str, Any], tensor: TensorParallel, grid: RankGrid) -> None:
    """Compare loss, gradients, logits and the loss without dropout of the sharded and the whole model."""
    results = []
    for divide in (False, True):
        model = make_model(**variant)
        if divide:
            tensor.shard_model(model)
        loss, grads = loss_and_gradients(model)
        with torch.no_grad():
            evaluated = model.eval()(*make_case())
            logits_PV = model(*make_case()[:2])
        results.append((loss, grads, evaluated, logits_PV))
    (loss, grads, evaluated, logits_PV), (own_loss, parts, own_evaluated, own_logits_PV) = results
    wholes = gathered(tensor, parts)
    torch.testing.assert_close(own_loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(own_evaluated, evaluated, rtol=1e-10, atol=0)
    assert (loss != evaluated) == (variant["dropout"] > 0)
    assert_near(wholes, grads, 1e-10)
    width = VOCABULARY // grid.tp_size
    mine = logits_PV[:, grid.tp_rank * width : (grid.tp_rank + 1) * width]
    torch.testing.assert_close(own_logits_PV, mine, rtol=1e-10, atol=1e-10)


def output_dtypes(model: CrammedBert) -> dict[str, torch.dtype]:
    """Return the output dtype of every linear layer in a forward pass under bf16 autocast."""
    dtypes: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _x, out, name=name: dtypes.update({name: out.dtype}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(*make_case())
    for hook in hooks:
        hook.remove()
    return dtypes


def check_autocast(variant: dict[str, Any], tensor: TensorParallel, grid: RankGrid) -> None:
    results = []
    for divide in (False, True):
        model = make_model(torch.float32, **variant)
        if divide:
            tensor.shard_model(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss, grads = loss_and_gradients(model)
        results.append((loss, grads, output_dtypes(model)))
    (loss, grads, dtypes), (own_loss, parts, own_dtypes) = results
    wholes = gathered(tensor, parts)
    torch.testing.assert_close(own_loss, loss, rtol=2e-2, atol=0)
    del grads["model.embeddings.position_scale"], wholes["model.embeddings.position_scale"]  # nearly cancels
    assert_near(wholes, grads, 5e-2)
    assert all(p.dtype == torch.float32 for p in wholes.values())
    assert own_dtypes == dtypes, f"{own_dtypes} instead of {dtypes}"
    assert set(dtypes.values()) == {torch.bfloat16}


def check_lamb(tensor: TensorParallel, grid: RankGrid) -> None:
    """Check four clipped steps: norms span whole tensors and count replicated tensors once."""
    results = []
    for divide in (False, True):
        model = make_model(bias=True, head="dense")
        if divide:
            tensor.shard_model(model)
        named = list(model.named_parameters())
        optimizer = make_optimizer(OptimConfig(name="lamb", eps=1e-6), named, model)
        sums = tensor.sharded_sums(optimizer, named) if divide else None
        norms = []
        for _ in range(4):
            set_lr(optimizer, 0.05)
            loss_and_gradients(model)
            norms.append(clip_and_step(optimizer, None, 0.5, sums))
        results.append((torch.stack(norms), {name: p.detach() for name, p in named}))
    (norms, weights), (own_norms, parts) = results
    wholes = gathered(tensor, parts)
    torch.testing.assert_close(own_norms, norms, rtol=1e-10, atol=0)
    assert norms.min() > 0.5
    assert_near(wholes, weights, 1e-10)
    start = dict(make_model(bias=True, head="dense").named_parameters())
    assert all((weights[n] - p.detach()).norm() > 1e-3 * p.norm() for n, p in start.items())


def check_grid(tensor: TensorParallel, grid: RankGrid) -> None:
    """Check that the ranks of a replica are neighbours and that equal shards are `size` ranks apart."""
    rank, size = dist.get_rank(), grid.tp_size
    assert (grid.dp_rank, grid.tp_rank) == divmod(rank, size)
    first = rank - rank % size
    assert dist.get_process_group_ranks(grid.tp_group) == list(range(first, first + size))
    assert dist.get_process_group_ranks(grid.dp_group) == list(range(rank % size, 4, size))


CHECKS: dict[str, Check] = {
    "grid": check_grid,
    "cross_entropy": check_cross_entropy,
    "part_and_whole": check_part_and_whole,
    **{f"model-{name}": functools.partial(check_model, variant) for name, variant in VARIANTS.items()},
    "autocast-gelu-bias": functools.partial(check_autocast, {"mlp": "gelu", "bias": True, "head": "dense"}),
    "autocast-geglu": functools.partial(check_autocast, {}),
    "lamb": check_lamb,
}


def run_checks(folder: str) -> None:
    """Run all checks over pairs of ranks and over all four, and write the failures of this rank."""
    world = read_world(os.environ)
    connect(world, CPU)
    failures: dict[str, str] = {}
    for size in SIZES:
        grid = RankGrid(world, size, CPU)
        for name, check in CHECKS.items():
            failures[f"{name}/{size}"] = ""
            try:
                check(TensorParallel(grid), grid)
            except AssertionError:
                failures[f"{name}/{size}"] = traceback.format_exc(limit=-3)
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(failures))
    disconnect()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("tensor")
    run_ranks(4, run_checks, str(folder))
    return [read_json(folder / f"{rank}.json") for rank in range(4)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_equal_a_single_rank(failures: list[dict[str, str]], name: str, size: int) -> None:
    for rank, results in enumerate(failures):
        assert not results[f"{name}/{size}"], f"rank {rank}:\n{results[f'{name}/{size}']}"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mlp", ["geglu", "gelu"])
def test_activation_checkpointing_changes_no_bit(mlp: str, dropout: float) -> None:
    plain, again = (make_model(mlp=mlp, dropout=dropout, attention_dropout=dropout) for _ in range(2))
    recompute_blocks(again)
    calls: list[int] = []
    again.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss, grads = loss_and_gradients(plain)
    own_loss, own_grads = loss_and_gradients(again)
    assert len(calls) == 2, "the block is computed twice"
    assert torch.equal(own_loss, loss)
    assert bits(own_grads) == bits(grads)
    assert grads.keys() == dict(plain.named_parameters()).keys()
    other, _ = loss_and_gradients(plain, seed=4)
    assert torch.equal(other, loss) == (dropout == 0)


def test_tensors_of_a_bucket_begin_at_aligned_addresses() -> None:
    """A graph compiled for one layer's weights is used for every layer, so all need the same alignment."""
    for dtype in (torch.float32, torch.float64):
        sizes = {"bias": (2,), "weight": (5, 7), "norm": (13,), "last": (4, 4)}
        parameters = {name: nn.Parameter(torch.ones(*size, dtype=dtype)) for name, size in sizes.items()}
        engine = zero1.Zero1Engine.__new__(zero1.Zero1Engine)
        engine._parameters, engine._owners = parameters, dict.fromkeys(parameters, 0)
        bucket = engine._make_bucket(list(parameters))
        assert not any(p.data_ptr() % zero1.ALIGNED_BYTES for p in parameters.values())
        assert all((p == 1).all() for p in parameters.values())
        assert bucket.weights.count_nonzero() == sum(p.numel() for p in parameters.values())
        assert bucket.weights.numel() == bucket.gradients.numel()
