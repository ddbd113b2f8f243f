"""Define the encoder with a head that predicts class labels or a score for whole examples.

Axes: as in bert_dp.model.bert, plus W (head width) and L (labels).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import FinetuneConfig, ModelConfig, finetuned_head
from bert_dp.model.bert import EncoderModel, make_norm
from bert_dp.model.kernels import KeyedDropout

HEAD_SITE = 1_000_000  # dropout site of the head, greater than the site of any layer

HEADS = {
    # head of github.com/JonasGeiping/cramming: Linear 1024, tanh, dropout, Linear
    "recipe": {"bias", "tanh", "drops output"},
    # heads of the ...ForSequenceClassification classes in transformers
    "ModernBERT": {"norm", "drops output"},
    "RobertaPreLayerNorm": {"bias", "tanh", "drops input", "drops output"},
    "EuroBERT": {"bias"},
    "BERT": {"bias", "tanh", "drops output"},
    "RoBERTa": {"bias", "tanh", "drops input", "drops output"},
}
"""Optional parts of each head: a bias in the dense layer, tanh (otherwise GELU), a norm after the activation,
dropout before the dense layer ("drops input") and before the last linear layer ("drops output")."""


class ClassificationHead(nn.Module):
    """Classification head with the parts in HEADS: [B, H] -> [B, L]."""

    def __init__(self, config: ModelConfig, finetune: FinetuneConfig):
        super().__init__()
        name = finetuned_head(config, finetune)
        self.parts = parts = HEADS[name]
        width = finetune.head_size if name == "recipe" else config.hidden_size
        self.dense = nn.Linear(config.hidden_size, width, bias="bias" in parts)
        self.norm = make_norm(config) if "norm" in parts else None
        self.drop_in = KeyedDropout(config.dropout if "drops input" in parts else 0.0, HEAD_SITE)
        self.drop = KeyedDropout(config.dropout if "drops output" in parts else 0.0, HEAD_SITE + 1)
        self.classifier = nn.Linear(width, finetune.num_outputs)

    def forward(self, x_BH: Tensor, seed_B: Tensor | None) -> Tensor:
        x_B1H = self.dense(self.drop_in(x_BH[:, None], seed_B))
        x_B1W = x_B1H.tanh() if "tanh" in self.parts else F.gelu(x_B1H)
        if self.norm is not None:
            x_B1W = self.norm(x_B1W)
        return self.classifier(self.drop(x_B1W, seed_B))[:, 0]


def pool(x_BSH: Tensor, real_BS: Tensor | None, pooling: str) -> Tensor:
    """Return [B, H]: the state of the first token (`cls`), or the mean state of real tokens (`mean`)."""
    if pooling == "cls":
        return x_BSH[:, 0]
    if real_BS is None:
        return x_BSH.mean(1)
    weight_BS1 = real_BS[..., None].to(x_BSH.dtype)
    return (x_BSH * weight_BS1).sum(1) / weight_BS1.sum(1)


def pair_types(ids_BS: Tensor, sep: int) -> Tensor:
    """Return the token types [B, S] of examples: 0 up to and including the first separator, then 1."""
    is_sep_BS = ids_BS == sep
    return (is_sep_BS.cumsum(1) - is_sep_BS.long()).clamp(max=1)


class Classifier(EncoderModel):
    """Encoder with a classification head for whole examples."""

    def __init__(self, config: ModelConfig, sequence_length: int, finetune: FinetuneConfig):
        super().__init__(config, sequence_length)
        self.head = ClassificationHead(config, finetune)
        self.pooling = finetune.pooling

    def forward(
        self,
        ids_BS: Tensor,
        real_BS: Tensor | None = None,
        seed_B: Tensor | None = None,
        types_BS: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, L], or scores [B, 1] for regression. For the arguments, see Encoder.encode."""
        x_BSH, _ = self.vocabulary.look_up(ids_BS, self.model.embeddings.tok_embeddings.weight)
        x_BSH = self.model.encode(x_BSH, real_BS, seed_B, types_BS)
        return self.head(pool(x_BSH, real_BS, self.pooling), seed_B)

    def is_pretrained(self, name: str) -> bool:
        return name.startswith("model.")
