"""Define the crammed BERT as PyTorch modules that do not depend on ranks, files or optimizers.

Axes: B sequences, S positions, H hidden, A heads, D = H / A, I intermediate, V vocabulary, P predicted
positions of the whole micro batch. Parameter names and shapes match ModernBERT's, so that transformers can
load exported models that use rotary positions. The architecture is that of arXiv 2212.14034 and of
`arch=crammed-bert` in github.com/JonasGeiping/cramming. To add a variant of a block, add a value for it to
`ModelConfig` (config/schema.py), and add its parameters and FLOPs to bert_dp/cost.py.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import ModelConfig
from bert_dp.model import kernels
from bert_dp.model.interface import Model

if kernels.HAS_TRITON:
    from bert_dp.model import gpu_kernels

INIT_STD = 0.02
IGNORE = -100  # label of positions that the loss ignores


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def sinusoidal_table(length: int, hidden: int) -> Tensor:
    """Return a float64 table [S, H]: sines in even, cosines in odd columns (arXiv 1706.03762, sec. 3.5)."""
    angle_SH = torch.arange(length, dtype=torch.float64)[:, None] * torch.exp(
        torch.arange(0, hidden, 2, dtype=torch.float64) * (-math.log(10_000.0) / hidden)
    )
    return torch.stack([angle_SH.sin(), angle_SH.cos()], dim=-1).reshape(length, hidden)


def rotary_table(length: int, head_size: int, theta: float) -> Tensor:
    """Return a float64 table [2, S, D]: cosines, then sines, in rotate-half layout (arXiv 2104.09864)."""
    frequency_D2 = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle_SD = (torch.arange(length, dtype=torch.float64)[:, None] * frequency_D2).repeat(1, 2)
    return torch.stack([angle_SD.cos(), angle_SD.sin()])


def rotate(x_BASD: Tensor, rotary_2SD: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys, in the dtype of `x_BASD`."""
    length = x_BASD.shape[-2]
    cos_SD, sin_SD = (table_SD[:length].to(x_BASD.dtype) for table_SD in rotary_2SD)
    first, second = x_BASD.chunk(2, dim=-1)
    return x_BASD * cos_SD + torch.cat([-second, first], dim=-1) * sin_SD


class TiedLookup(torch.autograd.Function):
    """Embedding lookup that returns (weight[ids], weight). The tied decoder uses the second output. To save
    memory, the backward pass adds the gradients of the looked-up rows to the decoder's gradient in place."""

    @staticmethod
    def forward(ctx: Any, ids_BS: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids_BS)
        return F.embedding(ids_BS, weight_VH), weight_VH.view_as(weight_VH)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor, grad_VH: Tensor) -> tuple[None, Tensor]:
        (ids_BS,) = ctx.saved_tensors
        return None, kernels.add_row_gradients(grad_VH, ids_BS, grad_BSH)


class TiedEmbedding:
    """Embedding, tied decoder and loss over the vocabulary. Tensor parallelism replaces this class."""

    def look_up(self, ids_BS: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token embeddings [B, S, H] and the weight for the decoder."""
        return TiedLookup.apply(ids_BS, weight_VH)

    def logits(self, x_PH: Tensor, weight_VH: Tensor) -> Tensor:
        return kernels.linear(x_PH, weight_VH)

    def loss(self, logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        """Return the sum of the cross entropies, ignoring labels equal to IGNORE."""
        return F.cross_entropy(kernels.widened(logits_PV), labels_P, ignore_index=IGNORE, reduction="sum")

    def score(self, logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        """Return [2, P]: the cross entropy of each position, and 1 if its label has the greatest logit, else
        0. Both are 0 if the label is IGNORE."""
        wide_PV = kernels.widened(logits_PV)
        loss_P = F.cross_entropy(wide_PV, labels_P, ignore_index=IGNORE, reduction="none")
        label_logit_P = wide_PV.gather(1, labels_P.clamp(min=0)[:, None])[:, 0]
        is_best_P = (label_logit_P == wide_PV.amax(-1)) & (labels_P != IGNORE)
        return torch.stack([loss_P, is_best_P.to(loss_P.dtype)])


class Embeddings(nn.Module):
    """Sum of token, position and token type embeddings, then norm and dropout: [B, S, H] -> [B, S, H]."""

    sinusoids_SH: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int):
        super().__init__()
        self.position = config.position
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "scaled_sinusoidal":
            self.position_scale = nn.Parameter(torch.full((1,), config.hidden_size**-0.5))
            table = sinusoidal_table(sequence_length, config.hidden_size)
            self.register_buffer("sinusoids_SH", table.to(torch.get_default_dtype()), persistent=False)
        elif config.position == "learned":
            self.first_position = config.position_offset
            self.position_embeddings = nn.Embedding(
                config.max_positions or sequence_length + config.position_offset, config.hidden_size
            )
        self.has_types = config.token_types > 0
        if self.has_types:
            self.token_type_embeddings = nn.Embedding(config.token_types, config.hidden_size)
        self.norm = make_norm(config)
        self.drop = kernels.KeyedDropout(config.dropout, site=0)
        self.narrow_residual = config.residual_dtype == "bf16"

    def forward(self, x_BSH: Tensor, seed_B: Tensor | None, types_BS: Tensor | None = None) -> Tensor:
        """Return the blocks' input, in bf16 if `residual_dtype` is bf16 and autocast uses bf16. `x_BSH`:
        token embeddings. `types_BS`: token types; None = all 0."""
        length = x_BSH.shape[1]
        if self.position == "scaled_sinusoidal":
            x_BSH = x_BSH + self.position_scale * self.sinusoids_SH[:length]
        elif self.position == "learned":
            x_BSH = x_BSH + self.position_embeddings.weight[self.first_position :][:length]
        if self.has_types:
            types_TH = self.token_type_embeddings.weight
            x_BSH = x_BSH + (types_TH[0] if types_BS is None else F.embedding(types_BS, types_TH))
        out: Tensor = self.drop(self.norm(x_BSH), seed_B)
        kind = out.device.type
        in_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        # under autocast, blocks add bf16 outputs, so a residual stream that starts in bf16 stays in bf16
        return out.bfloat16() if self.narrow_residual and in_bf16 else out


def is_slow_in_kernel(q_BASD: Tensor) -> bool:
    """Return True for bf16 on a CPU, where torch's attention kernel took 4.5 times as long as attention
    computed with plain matrix products (benchmarks/RESULTS.md)."""
    return q_BASD.device.type == "cpu" and q_BASD.dtype == torch.bfloat16


class Attention(nn.Module):
    """Bidirectional self-attention: [B, S, H] -> [B, S, H]. `seen`: mask, False for keys to ignore; shape
    [B, 1, 1, S] for padding or [1 or B, 1, S, S] for local attention; None = no mask, which is faster.
    `seed_B`: dropout keys; see bert_dp.model.kernels."""

    tensor_rank = 0
    """Index of this rank's shard of the attention heads in tensor parallelism."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.hidden_size
        self.head_size = hidden // config.num_heads
        self.Wqkv = kernels.Linear(hidden, 3 * hidden, bias=False)
        self.Wo = kernels.Linear(hidden, hidden, bias=config.bias)
        self.drop_probabilities = kernels.KeyedDropout(config.attention_dropout, site=0)
        self.drop = kernels.KeyedDropout(config.dropout, site=1)
        # no key bias: without rotary positions it shifts all scores of a query equally, so it has no effect
        self.q_bias = nn.Parameter(torch.zeros(hidden)) if config.bias else None
        self.v_bias = nn.Parameter(torch.zeros(hidden)) if config.bias else None

    def forward(
        self, x_BSH: Tensor, rotary_2SD: Tensor | None, seen: Tensor | None, seed_B: Tensor | None
    ) -> Tensor:
        batch, length, _ = x_BSH.shape
        qkv = self.Wqkv(x_BSH)
        if self.q_bias is not None and self.v_bias is not None:
            qkv = qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias]).to(qkv.dtype)
        drops = self.training and self.drop_probabilities.p > 0
        plain = rotary_2SD is None and seen is None and not drops
        if plain and kernels.takes_gpu_kernel(qkv) and gpu_kernels.fits(length, self.head_size):
            heads = qkv.shape[-1] // 3 // self.head_size
            return self.drop(self.Wo(gpu_kernels.packed_attention(qkv, heads)), seed_B)
        q, k, v = (
            part.view(batch, length, -1, self.head_size).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )  # each [B, A, S, D], where A counts only the heads of this rank
        if rotary_2SD is not None:
            q, k = rotate(q, rotary_2SD), rotate(k, rotary_2SD)
        if drops or is_slow_in_kernel(q):
            out_BASD = self._attend_in_full(q, k, v, seen, seed_B)
        else:
            out_BASD = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.drop(self.Wo(out_BASD.transpose(1, 2).reshape(batch, length, -1)), seed_B)

    def _attend_in_full(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, seed_B: Tensor | None
    ) -> Tensor:
        """Compute attention with explicit scores. Dropout requires them, because the elements that torch's
        kernels drop depend on the padded length."""
        heads = q.shape[1]
        score_BASS = (q * self.head_size**-0.5) @ k.transpose(-2, -1)
        if seen is not None:
            score_BASS = score_BASS.masked_fill(~seen, -math.inf)
        key_BA = None
        if self.drop_probabilities.p and seed_B is not None:
            head_A = torch.arange(heads, dtype=torch.int32, device=q.device) + self.tensor_rank * heads
            key_BA = kernels.fold_in(seed_B[:, None], head_A)
        probability_BASS = self.drop_probabilities(score_BASS.softmax(-1), key_BA)
        return probability_BASS.to(v.dtype) @ v


class MLP(nn.Module):
    """Feed-forward layer with GELU or gated GELU (arXiv 2002.05202): [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.mlp == "geglu"
        width = config.intermediate_size * (2 if self.gated else 1)
        self.Wi = kernels.Linear(config.hidden_size, width, bias=config.bias)
        self.Wo = kernels.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)
        self.drop = kernels.KeyedDropout(config.dropout, site=2)

    def forward(self, x_BSH: Tensor, seed_B: Tensor | None) -> Tensor:
        x = self.Wi(x_BSH)
        if self.gated and kernels.takes_gpu_kernel(x):
            x = gpu_kernels.gated_gelu(x)
        elif self.gated:
            x, gate = x.chunk(2, dim=-1)  # named as in ModernBERT; the paper calls gelu(x) the gate
            x = F.gelu(x) * gate
        else:
            x = F.gelu(x)
        return self.drop(self.Wo(x), seed_B)


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it (pre-norm) or after its residual sum (post-norm)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.post_norm = config.norm_position == "post"
        has_norm = index > 0 or config.first_attention_norm
        self.attn_norm = make_norm(config) if has_norm else nn.Identity()
        self.attn = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x_BSH: Tensor, rotary_2SD: Tensor | None, seen: Tensor | None, seed_B: Tensor | None
    ) -> Tensor:
        if self.post_norm:
            x_BSH = self.attn_norm(x_BSH + self.attn(x_BSH, rotary_2SD, seen, seed_B))
            return self.mlp_norm(x_BSH + self.mlp(x_BSH, seed_B))
        x_BSH = x_BSH + self.attn(self.attn_norm(x_BSH), rotary_2SD, seen, seed_B)
        return x_BSH + self.mlp(self.mlp_norm(x_BSH), seed_B)


class Encoder(nn.Module):
    """Embeddings, blocks and, after pre-norm blocks, a final norm: [B, S] -> [B, S, H]."""

    rotary_2SD: Tensor | None
    local_rotary_2SD: Tensor | None

    def __init__(self, config: ModelConfig, sequence_length: int):
        super().__init__()
        self.embeddings = Embeddings(config, sequence_length)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.final_norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
        self.has_dropout = config.dropout > 0 or config.attention_dropout > 0
        self.reach = config.local_attention // 2
        self.is_local = [config.is_local(i) for i in range(config.num_layers)]
        thetas = {"rotary_2SD": config.rope_theta, "local_rotary_2SD": config.local_rope_theta}
        for name, theta in thetas.items():
            table_2SD = None
            if config.position == "rope":
                table_2SD = rotary_table(sequence_length, config.hidden_size // config.num_heads, theta)
                table_2SD = table_2SD.to(torch.get_default_dtype())
            self.register_buffer(name, table_2SD, persistent=False)

    def forward(
        self, ids_BS: Tensor, real_BS: Tensor | None = None, types_BS: Tensor | None = None
    ) -> Tensor:
        return self.encode(self.embeddings.tok_embeddings(ids_BS), real_BS, types_BS=types_BS)

    def encode(
        self,
        x_BSH: Tensor,
        real_BS: Tensor | None = None,
        seed_B: Tensor | None = None,
        types_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, H]. `x_BSH`: token embeddings. `real_BS`: False for padding; None =
        no padding. `seed_B`: an int32 key per example, for dropout in training. `types_BS`: token types;
        None = all 0."""
        return self.final_norm(self.residual_stream(x_BSH, real_BS, seed_B, types_BS))

    def residual_stream(
        self, x_BSH: Tensor, real_BS: Tensor | None, seed_B: Tensor | None, types_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the final norm. For the arguments, see `encode`."""
        if not self.has_dropout:
            seed_B = None
        x_BSH = self.embeddings(x_BSH, seed_B, types_BS)
        padding = None if real_BS is None else real_BS[:, None, None, :]
        local = self._local_mask(x_BSH, padding) if any(self.is_local) else None
        # a separate key per layer, as a tensor, so that one compiled graph serves all layers
        keys: Sequence[Tensor | None] = [None] * len(self.layers)
        if seed_B is not None:
            site_L1 = torch.arange(1, len(keys) + 1, dtype=torch.int32, device=seed_B.device)[:, None]
            keys = kernels.fold_in(seed_B, site_L1).unbind()
        for layer, is_local, layer_key_B in zip(self.layers, self.is_local, keys, strict=True):
            rotary_2SD, seen = (self.local_rotary_2SD, local) if is_local else (self.rotary_2SD, padding)
            x_BSH = layer(x_BSH, rotary_2SD, seen, layer_key_B)
        return x_BSH

    def _local_mask(self, x_BSH: Tensor, real_B11S: Tensor | None) -> Tensor:
        """Return the local mask [1 or B, 1, S, S]: True for real keys at most `reach` positions away."""
        position_S = torch.arange(x_BSH.shape[1], device=x_BSH.device)
        distance_SS = (position_S[:, None] - position_S).abs()
        near_SS = distance_SS <= self.reach
        if real_B11S is None:
            return near_SS[None, None]
        # each padding position attends to itself, because a softmax over no keys would be NaN
        return near_SS & (real_B11S | (distance_SS == 0))


class PredictionHead(nn.Module):
    """Token-prediction head: the encoder's final norm (at predicted positions only, compiled with the head),
    then a dense layer, GELU and a norm if model.head is `dense`, then the tied decoder and the loss."""

    def __init__(self, config: ModelConfig, vocabulary: TiedEmbedding):
        super().__init__()
        self.transforms = config.head == "dense"
        if self.transforms:
            self.dense = kernels.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
            self.norm = make_norm(config)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.decoder_bias else None
        self.vocabulary = vocabulary

    def forward(
        self, x_PH: Tensor, weight_VH: Tensor, labels_P: Tensor | None, final_norm: nn.Module | None = None
    ) -> Tensor:
        if final_norm is not None:
            x_PH = final_norm(x_PH)
        if self.transforms:
            x_PH = self.norm(F.gelu(self.dense(x_PH)))
        logits_PV = self.vocabulary.logits(x_PH, weight_VH)
        if self.decoder_bias is not None:
            logits_PV = logits_PV + self.decoder_bias.to(logits_PV.dtype)
        return logits_PV if labels_P is None else self.vocabulary.loss(logits_PV, labels_P)


class EncoderModel(Model):
    """Base class of models that consist of an encoder and a `head`. Subclasses define the head."""

    head: nn.Module

    def __init__(self, config: ModelConfig, sequence_length: int):
        super().__init__()
        self.vocabulary = TiedEmbedding()
        self.model = Encoder(config, sequence_length)
        self.gated = config.mlp == "geglu"

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def compiled_parts(self) -> Sequence[nn.Module]:
        """Return the blocks, the embeddings and the head. Because each is compiled separately, all blocks
        share one compiled graph, and DDP gets gradients block by block and reduces them during backward."""
        return [*self.model.layers, self.model.embeddings, self.head]

    def is_matrix(self, name: str) -> bool:
        """Return True for the weight of a linear layer in a block."""
        return ".layers." in name and name.endswith(".weight") and "norm" not in name

    def tensor_plan(self) -> dict[str, tuple[int, int]]:
        """Return the parameters that tensor parallelism splits; see `Model.tensor_plan`. Attention is split
        by heads, the MLP by intermediate units and the vocabulary by rows. Other parameters stay whole."""
        fused = 2 if self.gated else 1
        splits = {
            "tok_embeddings.weight": (0, 1),
            "head.decoder_bias": (0, 1),
            "attn.Wqkv.weight": (0, 3),
            "attn.q_bias": (0, 1),
            "attn.v_bias": (0, 1),
            "attn.Wo.weight": (1, 1),
            "mlp.Wi.weight": (0, fused),
            "mlp.Wi.bias": (0, fused),
            "mlp.Wo.weight": (1, 1),
        }
        names = [name for name, _ in self.named_parameters()]
        return {name: split for name in names for end, split in splits.items() if name.endswith(end)}


class CrammedBert(EncoderModel):
    """Masked language model that applies its tied decoder only to the predicted positions."""

    def __init__(self, config: ModelConfig, sequence_length: int):
        super().__init__(config, sequence_length)
        self.head = PredictionHead(config, self.vocabulary)

    def forward(
        self,
        ids_BS: Tensor,
        positions_P: Tensor,
        labels_P: Tensor | None = None,
        real_BS: Tensor | None = None,
        seed_B: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [P, V] or, if there are labels, the SUM of their cross entropies, ignoring labels
        equal to IGNORE. `positions_P`: flat positions b * S + s. Other arguments: see Encoder.encode."""
        x_BSH, weight_VH = self.vocabulary.look_up(ids_BS, self.model.embeddings.tok_embeddings.weight)
        x_PH = self.model.residual_stream(x_BSH, real_BS, seed_B).flatten(0, 1)[positions_P]
        return self.head(x_PH, weight_VH, labels_P, self.model.final_norm)


def build_model(config: ModelConfig, sequence_length: int, seed: int) -> CrammedBert:
    """Build the whole model on the CPU, with the same weights on every rank; see `initialize`."""
    return initialize(CrammedBert(config, sequence_length), seed)


AnyModel = TypeVar("AnyModel", bound=nn.Module)


def initialize(model: AnyModel, seed: int) -> AnyModel:
    """Draw linear and embedding weights from a normal distribution with standard deviation INIT_STD, and set
    linear biases to 0. Norms keep weight 1 and bias 0. The result depends only on the shapes and the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, INIT_STD, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
    return model
