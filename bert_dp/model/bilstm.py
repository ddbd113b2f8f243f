"""Define the BiLSTM student of Tang et al. 2019 (arXiv 1903.12136). Axes: B examples, S positions, E
embedding size (model.hidden_size), H units per direction, F features, W head width, L labels."""

import torch
from torch import Tensor, nn

from bert_dp.config import FinetuneConfig, ModelConfig
from bert_dp.model.classifier import HEAD_SITE
from bert_dp.model.interface import Model
from bert_dp.model.kernels import KeyedDropout, fold_in

EMBEDDING_BOUND = 0.25  # gives a variance close to that of word2vec's vectors (arXiv 1408.5882)


class BiLstm(Model):
    """Classifier for whole examples: an embedding, one bidirectional LSTM, a ReLU layer and a linear layer.
    Each direction is a separate LSTM on padded batches, and the second LSTM reads reversed examples. Packed
    sequences would give the same result, but torch.export and the ONNX exporters do not support them."""

    def __init__(self, config: ModelConfig, finetune: FinetuneConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.left_to_right = nn.LSTM(config.hidden_size, config.lstm_size, batch_first=True)
        self.right_to_left = nn.LSTM(config.hidden_size, config.lstm_size, batch_first=True)
        self.pair = finetune.pair
        self.dense = nn.Linear(2 * config.lstm_size * (4 if self.pair else 1), finetune.head_size)
        self.classifier = nn.Linear(finetune.head_size, finetune.num_outputs)
        self.drop_embedding = KeyedDropout(config.dropout, site=0)
        self.drop = KeyedDropout(config.dropout, HEAD_SITE)

    def forward(self, ids_BS: Tensor, real_BS: Tensor | None = None, seed_B: Tensor | None = None) -> Tensor:
        """Return logits [B, L], or scores [B, 1] for regression. `real_BS`: False for padding; None = no
        padding. `seed_B`: one int32 key per example, for dropout in training."""
        if real_BS is None:
            real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        encode = self._encode_pair if self.pair else self._encode
        features_BF = encode(ids_BS, real_BS.sum(1), seed_B)
        hidden_B1W = self.dense(self.drop(features_BF[:, None], seed_B)).relu()
        return self.classifier(hidden_B1W)[:, 0]

    def _encode_pair(self, ids_BS: Tensor, length_B: Tensor, seed_B: Tensor | None) -> Tensor:
        """Return [B, 8H]: the final states of both texts, their product and their absolute difference."""
        # an example is <cls> A <sep> B <sep>: the last token is <sep>, and the first <sep> ends A
        separator_B1 = ids_BS.gather(1, length_B[:, None] - 1)
        first_B = (ids_BS == separator_B1).long().argmax(1) + 1
        index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        second_BS = ids_BS.gather(1, (index_S + first_B[:, None]).clamp(max=ids_BS.shape[1] - 1))
        second_seed_B = None if seed_B is None else fold_in(seed_B, 1)
        one_B2H = self._encode(ids_BS, first_B, seed_B)
        two_B2H = self._encode(second_BS, (length_B - first_B).clamp(min=1), second_seed_B)
        return torch.cat([one_B2H, two_B2H, one_B2H * two_B2H, (one_B2H - two_B2H).abs()], dim=-1)

    def _encode(self, ids_BS: Tensor, length_B: Tensor, seed_B: Tensor | None) -> Tensor:
        """Return [B, 2H]: the state of each direction after it has read the first `length_B` tokens."""
        x_BSE = self.drop_embedding(self.embedding(ids_BS), seed_B)
        index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        reverse_BS = (length_B[:, None] - 1 - index_S).clamp(min=0)
        reversed_BSE = x_BSE.gather(1, reverse_BS[..., None].expand_as(x_BSE))
        last_B1H = (length_B - 1)[:, None, None].expand(-1, 1, self.left_to_right.hidden_size)
        states = [
            lstm(x)[0].gather(1, last_B1H)[:, 0]
            for lstm, x in ((self.left_to_right, x_BSE), (self.right_to_left, reversed_BSE))
        ]
        return torch.cat(states, dim=-1)


def build_bilstm(config: ModelConfig, finetune: FinetuneConfig, seed: int) -> BiLstm:
    """Build the model on the CPU and draw its weights from uniform distributions: embeddings within
    EMBEDDING_BOUND, others within torch's default bounds. The weights depend only on the arguments."""
    model = BiLstm(config, finetune)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.children():
            bound = EMBEDDING_BOUND
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
            elif isinstance(module, nn.LSTM):
                bound = module.hidden_size**-0.5
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
    return model
