"""Test parameter counts and FLOPs against the model, peak FLOP/s, and memory estimates."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bert_dp import cost
from bert_dp.config import ModelConfig
from bert_dp.cost import GIB, memory_estimate_gib, num_parameters, peak_flops
from bert_dp.model.bert import build_model
from tests.helpers import make_config

TINY = {"vocab_size": 40, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": 20}


def test_crammed_bert_reference_values() -> None:
    crammed = ModelConfig()
    assert num_parameters(crammed, 128) == 119_589_889
    assert cost.linear_parameters(crammed) == 94_371_840
    assert cost.flops_per_token(crammed, 128, 0.25) / 1e6 == pytest.approx(622.9, abs=0.05)


CHOICES = {
    "position": ("scaled_sinusoidal", "rope", "learned"),
    "mlp": ("geglu", "gelu"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_bias": (True, False),
    "bias": (False, True),
    "head": ("none", "dense"),
    "first_attention_norm": (True, False),
}


@pytest.mark.parametrize("position", CHOICES["position"])
def test_parameter_counts_equal_those_of_the_model(position: str) -> None:
    others = [name for name in CHOICES if name != "position"]
    for values in itertools.product(*(CHOICES[name] for name in others)):
        chosen = dict(zip(others, values, strict=True))
        model_config = ModelConfig(**TINY, position=position, **chosen)  # type: ignore[arg-type]
        model = build_model(model_config, 24, seed=0)
        assert num_parameters(model_config, 24) == sum(p.numel() for p in model.parameters()), chosen


def counted_flops(model_config: ModelConfig, length: int, batch: int, predicted: int) -> int:
    """Return torch's count of the FLOPs of matrix products and attention, forward and backward."""
    model = build_model(model_config, length, seed=0)
    ids = torch.randint(0, model_config.vocab_size, (batch, length))
    positions = torch.arange(batch)[:, None] * length + torch.arange(predicted)
    labels = torch.zeros(batch * predicted, dtype=torch.int64)
    ours = {torch.ops.bert_dp.matmul_nt: lambda a, b, **_: 2 * a[0] * a[1] * b[0]}
    counter = FlopCounterMode(display=False, custom_mapping=ours)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(ids, positions.flatten(), labels).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("mlp", ["geglu", "gelu"])
@pytest.mark.parametrize("head", ["none", "dense"])
@pytest.mark.parametrize("first_attention_norm", [True, False])
def test_flops_equal_the_count_of_torch(mlp: str, head: str, first_attention_norm: bool) -> None:
    """Formula and counter agree exactly because both count matrix products. The math kernel computes
    attention as two batched products; fused kernels also count recomputation in the backward pass, which
    model FLOPs exclude. The input of every weight needs a gradient, including the output of the embedding."""
    model_config = ModelConfig(**TINY, mlp=mlp, head=head, first_attention_norm=first_attention_norm)  # type: ignore[arg-type]
    batch, length, predicted = 3, 16, 4
    wanted = cost.flops_per_token(model_config, length, predicted / length) * batch * length
    assert counted_flops(model_config, length, batch, predicted) == wanted


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp64", None),
        ("CPU", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA L40", "fp16", None),  # 181 TFLOP/s, not the L4's 121
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a slice of a device
    ],
)
def test_the_peak_depends_on_device_and_precision(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_every_peak_is_found_by_its_own_name() -> None:
    for name, peaks in cost.PEAK_FLOPS:
        for precision, value in peaks.items():
            assert peak_flops(f"NVIDIA {name}", precision) == value, name


# --- memory estimates against values computed by hand

V, H, WIDTH, L, S, MICRO = 40, 16, 20, 3, 24, 4
SCENE = {"data": {"sequence_length": S}, "batch": {"micro_size": MICRO, "global_size": 4 * MICRO}}
LINEAR = L * (4 * H * H + 3 * H * WIDTH)


def memory(
    parallel: dict[str, object] | None = None, world: int = 1, precision: str = "fp32", **more: object
) -> dict[str, int]:
    """Return the estimated bytes of each part."""
    settings = {"model": TINY, **SCENE, "parallel": parallel or {}, **more}
    parts = memory_estimate_gib(make_config(**settings), precision, world)
    return {name: round(size * GIB) for name, size in parts.items()}


def state(found: dict[str, int]) -> tuple[int, int, int]:
    return found["weights"], found["gradients"], found["optimizer"]


TOTAL = num_parameters(ModelConfig(**TINY), S)  # type: ignore[arg-type]
GATHERED = (V * H + 2 * LINEAR // L) * 4  # the embedding and two blocks
HALF = TOTAL - (LINEAR + V * H) // 2  # parameters on each of two ranks that share a replica


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({}, 1, (4 * TOTAL, 4 * TOTAL, 8 * TOTAL)),
        ({"engine": "zero1"}, 4, (4 * TOTAL, 4 * TOTAL, 2 * TOTAL)),
        ({"engine": "zero1", "tensor": 2}, 4, (4 * HALF, 4 * HALF, 4 * HALF)),
        ({"engine": "ddp", "tensor": 2}, 1, (4 * HALF, 4 * HALF, 8 * HALF)),
        ({"engine": "deepspeed", "zero_stage": 0}, 4, (4 * TOTAL, 4 * TOTAL, 8 * TOTAL)),
        ({"engine": "deepspeed", "zero_stage": 1}, 4, (5 * TOTAL, 4 * TOTAL, 2 * TOTAL)),
        ({"engine": "deepspeed", "zero_stage": 2}, 4, (5 * TOTAL, TOTAL, 2 * TOTAL)),
        ({"engine": "deepspeed", "zero_stage": 3}, 4, (TOTAL + GATHERED, TOTAL + GATHERED, 2 * TOTAL)),
        ({"engine": "fsdp"}, 4, (TOTAL + GATHERED, TOTAL + GATHERED, 2 * TOTAL)),
        ({"engine": "fsdp"}, 2, (2 * TOTAL + GATHERED, 4 * TOTAL, 4 * TOTAL)),  # two micro batches per step
        ({"engine": "fsdp", "fsdp_replicas": 2}, 4, (2 * TOTAL + GATHERED, 2 * TOTAL + GATHERED, 4 * TOTAL)),
        ({"engine": "fsdp", "tensor": 2}, 4, (2 * HALF + GATHERED // 2, 4 * HALF, 4 * HALF)),
    ],
)
def test_weights_gradients_and_optimizer_state_are_sharded_by_engine(parallel, world, expected) -> None:
    assert state(memory(parallel, world)) == expected


def test_muon_has_one_moment_for_matrices() -> None:
    assert memory(optim={"name": "muon"})["optimizer"] == 4 * (2 * TOTAL - LINEAR)


@pytest.mark.parametrize(("precision", "wide", "narrow"), [("fp32", 4, 4), ("fp64", 8, 8), ("bf16", 4, 2)])
def test_the_activations_of_a_micro_batch_are_counted(precision: str, wide: int, narrow: int) -> None:
    tokens, predicted = MICRO * S, MICRO * 6
    block = 2 * wide * H + narrow * (2 * H + 4 * H + 4 * WIDTH)
    found = memory(precision=precision)
    assert found["activations"] == tokens * L * block
    assert found["logits"] == predicted * V * (narrow + 2 * wide)
    gelu = memory(precision=precision, model={**TINY, "mlp": "gelu"})
    assert gelu["activations"] == tokens * L * (block - narrow * 2 * WIDTH)
    # attention dropout materialises the probabilities of 2 heads
    dropped = memory(precision=precision, model={**TINY, "attention_dropout": 0.1})
    assert dropped["activations"] == tokens * L * (block + 2 * S * (3 * narrow + 1))
    halved = memory({"tensor": 2}, 2, precision)
    assert halved["activations"] == tokens * L * (2 * wide * H + narrow * (2 * H + 2 * H + 2 * WIDTH))
    assert halved["logits"] == found["logits"] // 2
    kept = memory({"activation_checkpointing": True}, precision=precision)
    assert kept["activations"] == tokens * (block + L * wide * H)
    rope = memory(precision=precision, model={**TINY, "position": "rope"})  # rotated queries and keys
    assert rope["activations"] == tokens * L * (block + narrow * 2 * H)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_cpu_rank_also_has_the_program_and_a_copy_of_the_state(norm: str, precision: str) -> None:
    model = {**TINY, "norm": norm}

    def parts(*, on_gpu: bool = False, **more: object) -> dict[str, float]:
        return cost.rank_memory_gib(make_config(model=model, **SCENE, **more), precision, 2, on_gpu=on_gpu)

    tensors, found = parts(on_gpu=True), parts()
    assert tensors == memory_estimate_gib(make_config(model=model, **SCENE), precision, 2)
    kept = MICRO * S * L * ((norm == "rmsnorm") * 2 * H * 4 + (precision == "bf16") * 2 * S * 2)
    assert (found["activations"] - tensors["activations"]) * GIB == pytest.approx(kept)
    assert found["heap"] == (found["activations"] + found["logits"]) / 2
    parameters = num_parameters(ModelConfig(**model), S)  # type: ignore[arg-type]
    assert found["checkpoint"] * GIB == pytest.approx(4 * 3 * parameters)
    assert parts(checkpoint={"keep": 0})["checkpoint"] * GIB == pytest.approx(4 * parameters)
    muon = parts(optim={"name": "muon"})["checkpoint"] * GIB
    assert muon == pytest.approx(4 * (3 * parameters - LINEAR))
    assert found["program"] > 0


def test_autocast_keeps_narrow_copies_of_the_weights() -> None:
    weights = [memory(precision=p)["weights"] for p in ("fp32", "fp64", "bf16")]
    assert weights == [4 * TOTAL, 8 * TOTAL, 4 * TOTAL]
    assert memory(precision="bf16")["autocast weights"] == 2 * TOTAL
    assert memory({"engine": "ddp", "tensor": 2}, 2, "fp16")["autocast weights"] == 2 * HALF
    assert "autocast weights" not in memory()
    narrow = memory({"engine": "fsdp"}, 4, "bf16")
    assert narrow["autocast weights"] == 2 * TOTAL
    assert narrow["weights"] == TOTAL + GATHERED
