"""Compute parameter counts, FLOPs, memory estimates and quantiles of Student's t distribution, and look up
the peak FLOP/s of devices. No other module has formulas for these quantities. Torch-free."""

import functools
import math
import re

from bert_dp.config import Config, ModelConfig, engine_facts, num_masked, sharded
from bert_dp.config.engines import optimizer_facts

GIB = 2**30

# (part of a device's name, {precision: peak FLOP/s of dense matrix products}), from the vendors' data sheets.
# The first match applies, so longer names come first. MFU is null for unlisted devices.
PEAK_FLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12}),
    ("H100 NVL", {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12}),
    ("GH200", {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
    ("H200 NVL", {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12}),
    ("H200", {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
    ("H100", {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
    ("B200", {"bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12}),
    ("A100", {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    ("A800", {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    ("A40", {"bf16": 149.7e12, "fp16": 149.7e12, "fp32": 37.4e12}),
    ("RTX A6000", {"bf16": 154.8e12, "fp16": 154.8e12, "fp32": 38.7e12}),
    ("L40S", {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12}),
    ("L4", {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12}),
    ("V100-PCIE", {"fp16": 112e12, "fp32": 14e12}),
    ("V100", {"fp16": 125e12, "fp32": 15.7e12}),
    ("T4", {"fp16": 65e12, "fp32": 8.1e12}),
)


def num_parameters(model: ModelConfig, sequence_length: int) -> int:
    """Count the trainable parameters, without a classification head. The tied embedding counts once.

    Reference value: 119,589,889 for Crammed BERT with a vocabulary of 32,768 tokens.
    """
    h, i, layers = model.hidden_size, model.intermediate_size, model.num_layers
    if model.lstm_size:
        return model.vocab_size * h + linear_parameters(model) + 16 * model.lstm_size  # two biases per gate
    norm = h * (2 if model.norm == "layernorm" and model.norm_bias else 1)
    count = linear_parameters(model)
    if model.bias:
        count += layers * (3 * h + i * (2 if model.mlp == "geglu" else 1) + h)  # q, v, output, Wi, Wo
    norms = 2 * layers - (0 if model.first_attention_norm else 1) + 1  # blocks' norms + embedding norm
    norms += model.norm_position == "pre"  # final norm
    count += model.vocab_size * h + norms * norm + model.token_types * h
    count += model.vocab_size if model.decoder_bias else 0
    if model.head == "dense":
        count += h * h + norm + (h if model.bias else 0)
    if model.position == "scaled_sinusoidal":
        count += 1
    if model.position == "learned":
        count += (model.max_positions or sequence_length + model.position_offset) * h
    return count


def linear_parameters(model: ModelConfig) -> int:
    """Count the weights of the linear layers in the blocks, or of the gates in both directions of a BiLSTM.
    This number is N_linear in the formula of flops_per_token."""
    h, i = model.hidden_size, model.intermediate_size
    if model.lstm_size:
        return 8 * model.lstm_size * (h + model.lstm_size)
    return model.num_layers * (4 * h * h + (3 if model.mlp == "geglu" else 2) * h * i)


def flops_per_token(model: ModelConfig, sequence_length: int, mask_rate: float) -> float:
    """Return the model FLOPs per token: those of the matrix products in one forward and one backward pass.

    Formula: 6 N_linear + 12 L S H + 6 H (V + H) p for L layers, sequence length S, hidden size H, vocabulary
    size V and share p of predicted positions. Without a dense head, V replaces V + H. Recomputed
    products are not counted. Reference value: 622.9e6 for Crammed BERT with S = 128 and mask rate 0.25.
    """
    h = model.hidden_size
    predicted = num_masked(mask_rate, sequence_length) / sequence_length
    head = h * (model.vocab_size + (h if model.head == "dense" else 0))
    attention = 0 if model.lstm_size else 12 * model.num_layers * sequence_length * h
    return 6 * linear_parameters(model) + attention + 6 * head * predicted


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s for dense matrix products, or None if unknown; MFU is then null."""
    if "MIG" in device_name:  # a slice of a GPU has a lower peak
        return None
    for name, peaks in PEAK_FLOPS:
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name):
            return peaks.get(precision)
    return None


def memory_estimate_gib(config: Config, precision: str, world_size: int = 1) -> dict[str, float]:
    """Estimate each rank's peak memory in a run without torch.compile, as {part: GiB}.

    Weights, gradients and optimizer state follow arXiv 1910.02054; each is divided among the ranks that shard
    it. fsdp and ZeRO stage 3 also gather the embedding and two blocks. With gradient accumulation, fsdp keeps
    whole gradients between micro batches. `rank_memory_gib` adds the parts that depend on the device.
    """
    model, parallel = config.model, config.parallel
    wide, narrow = _widths(precision)
    tensor = parallel.tensor
    dp = max(1, world_size // tensor)
    total = num_parameters(model, config.data.sequence_length)
    divided = linear_parameters(model) + model.vocab_size * model.hidden_size
    parameters = total - divided + divided / tensor
    block = linear_parameters(model) / model.num_layers / tensor
    gathered = (model.vocab_size * model.hidden_size / tensor + 2 * block) * wide
    weights = gradients = parameters * wide
    optimizer = _moments(config, parameters) * wide
    facts, state = engine_facts(parallel.engine), sharded(parallel.engine, parallel.zero_stage)
    shards = dp // parallel.fsdp_replicas
    accumulates = config.batch.global_size > config.batch.micro_size * dp
    if "optimizer" in state:
        optimizer /= shards
    if "parameters" in state:
        weights = weights / shards + gathered
        if not (facts.whole_gradients and accumulates):
            gradients = gradients / shards + gathered
    elif "gradients" in state:
        gradients /= shards
    if facts.master_copy and "optimizer" in state and "parameters" not in state:
        weights += parameters * wide / dp
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    parts |= _activation_bytes(config, wide, narrow)
    if narrow != wide:  # weight copies that autocast keeps for the backward pass, even with sharding
        parts["autocast weights"] = parameters * narrow
    return {name: size / GIB for name, size in parts.items()}


# constants for CPU ranks, derived from the peak resident set of short runs of quickstart and small-text
# (micro batch sizes 4 to 64, without torch.compile, torch 2.13, glibc 2.36)
PROGRAM_GIB = 0.32  # interpreter, torch and its libraries
HEAP_SHARE = 0.5  # glibc heap fragmentation and kernels' scratch memory, relative to activations and logits


def rank_memory_gib(config: Config, precision: str, world_size: int = 1, *, on_gpu: bool) -> dict[str, float]:
    """Estimate the peak GPU memory of a rank, or the peak resident set of a CPU rank, as {part: GiB}.

    The CPU estimate includes the program, heap fragmentation, and rank 0's copy of the state for checkpoints.
    """
    parts = memory_estimate_gib(config, precision, world_size)
    if on_gpu:
        return parts
    model, length = config.model, config.data.sequence_length
    wide, narrow = _widths(precision)
    tokens = config.batch.micro_size * length
    layers = 1 if config.parallel.activation_checkpointing else model.num_layers
    more = 0.0
    if model.norm == "rmsnorm":  # CPUs compute it in several operations and also save the normalized input
        more += 2 * layers * model.hidden_size * wide
    if precision == "bf16" and not model.attention_dropout:  # CPUs materialize the attention probabilities
        more += layers * model.num_heads * length * narrow / config.parallel.tensor
    parts["activations"] += tokens * more / GIB
    # without checkpoints, only the initial weights are copied
    parameters = num_parameters(model, length)
    copied: float = parameters
    if config.checkpoint.keep:
        copied += _moments(config, parameters)
    heap = HEAP_SHARE * (parts["activations"] + parts["logits"])
    return {**parts, "checkpoint": copied * wide / GIB, "heap": heap, "program": PROGRAM_GIB}


def _moments(config: Config, parameters: float) -> float:
    """Return the number of values in the optimizer state for `parameters` parameters."""
    missing = 2 - optimizer_facts(config.optim.name).matrix_moments
    return 2 * parameters - missing * linear_parameters(config.model)


def _widths(precision: str) -> tuple[int, int]:
    """Return the bytes per parameter and the bytes per value of the autocast dtype."""
    return (8 if precision == "fp64" else 4), {"fp32": 4, "fp64": 8}.get(precision, 2)


def _activation_bytes(config: Config, wide: int, narrow: int) -> dict[str, float]:
    """Estimate the bytes that autograd saves for one micro batch, as {part: bytes}."""
    model, tensor = config.model, config.parallel.tensor
    h, i = model.hidden_size, model.intermediate_size
    mlp_saved = 4 * i if model.mlp == "geglu" else 2 * i
    attention_saved = (6 if model.position == "rope" else 4) * h  # QKV, rotated Q and K, output
    residual = 2 if model.residual_dtype == "bf16" else wide
    # per token: inputs (residual stream) and outputs of two norms, which tensor parallelism does not shard
    a_block = 2 * residual * h + narrow * (2 * h + (attention_saved + mlp_saved) / tensor)
    tokens = config.batch.micro_size * config.data.sequence_length
    if model.attention_dropout:  # saved: scores, probabilities before and after dropout, dropout mask
        length = config.data.sequence_length
        a_block += model.num_heads * length * (3 * narrow + 1) / tensor
    saved = model.num_layers * a_block
    if config.parallel.activation_checkpointing:  # saved: one block's activations, and all blocks' inputs
        saved = a_block + model.num_layers * residual * h
    predicted = config.batch.micro_size * config.num_masked
    # logits in the autocast dtype; log-probabilities and their gradient in fp32 or wider
    logits = predicted * model.vocab_size / tensor * (narrow + 2 * max(4, wide))
    return {"activations": tokens * saved, "logits": logits}


ITERATIONS = 40  # maximum number of iterations of Newton's method; about ten suffice


@functools.cache
def student(degrees: int, level: float = 0.95) -> float:
    """Return t with P(|T| <= t) = level, where T follows Student's t with `degrees` degrees of freedom.

    With theta = atan(t / sqrt(degrees)), the density of theta is proportional to cos(theta)^(degrees - 1).
    Its integral (Gauss-Legendre quadrature) is concave, so Newton's method converges monotonically from 0.
    """
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(40)
    log_ratio = math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2)
    wanted = level * math.sqrt(math.pi) / 2 * math.exp(log_ratio)  # level * (integral from 0 to pi / 2)
    theta = 0.0
    for _ in range(ITERATIONS):
        integral = theta / 2 * float(weights @ np.cos(theta / 2 * (nodes + 1)) ** (degrees - 1))
        step = (wanted - integral) / math.cos(theta) ** (degrees - 1)
        theta += step
        if abs(step) <= 1e-13 * theta:
            break
    return math.sqrt(degrees) * math.tan(theta)
