"""The BiLSTM student: beside torch's own bidirectional LSTM, padding, pairs, dropout, size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bert_dp import cost
from bert_dp.config import FinetuneConfig
from bert_dp.config.schema import ModelConfig
from bert_dp.model.bilstm import BiLstm, build_bilstm

CLS, SEP, PAD = 4, 5, 0
LENGTHS = (9, 1, 4, 12)


def model_of(pair: bool = False, dropout: float = 0.0) -> BiLstm:
    config = ModelConfig(
        vocab_size=64, hidden_size=12, num_layers=1, num_heads=1, lstm_size=7, dropout=dropout
    )
    finetune = FinetuneConfig(labels=("a", "b", "c"), head_size=10, pair=pair)
    return build_bilstm(config, finetune, seed=3)


def padded(rows: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return ids, torch.tensor([[i < len(row) for i in range(length)] for row in rows])


def rows_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(7, 64, (n,), generator=generator).tolist() for n in lengths]


def states_by_torch(model: BiLstm, row: list[int]) -> Tensor:
    """The last states of torch's bidirectional LSTM with the same weights on one unpadded sentence."""
    own = nn.LSTM(12, 7, bidirectional=True, batch_first=True)
    for name, value in model.left_to_right.named_parameters():
        getattr(own, name).data.copy_(value)
    for name, value in model.right_to_left.named_parameters():
        getattr(own, f"{name}_reverse").data.copy_(value)
    _, (last_21H, _) = own(model.embedding(torch.tensor([row])))
    return torch.cat([last_21H[0], last_21H[1]], dim=-1)


def head(model: BiLstm, features: Tensor) -> Tensor:
    return model.classifier(model.dense(features).relu())


def test_it_equals_torchs_lstm_on_unpadded_sentences() -> None:
    model, rows = model_of().eval(), rows_of(*LENGTHS)
    logits = model(*padded(rows, 16))
    expected = torch.cat([head(model, states_by_torch(model, row)) for row in rows])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    alone = torch.cat([model(torch.tensor([row])) for row in rows])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-6)


def test_each_text_of_a_pair_is_read_apart() -> None:
    model = model_of(pair=True).eval()
    one, two = rows_of(3, 5)
    texts = [[CLS, *one, SEP], [*two, SEP]]
    logits = model(*padded([texts[0] + texts[1], texts[0] + texts[1][2:]], 16))[:1]
    a, b = (states_by_torch(model, text) for text in texts)
    expected = head(model, torch.cat([a, b, a * b, (a - b).abs()], dim=-1))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pair", [False, True])
def test_padding_changes_neither_the_loss_nor_dropout_nor_gradients(pair: bool) -> None:
    model = model_of(pair, dropout=0.3).train()
    rows = [[CLS, *row, SEP, *row[:2], SEP] for row in rows_of(*LENGTHS)]
    seed_B = torch.arange(4, dtype=torch.int32)
    gradients = []
    for length in (18, 32):
        model.zero_grad()
        model(*padded(rows, length), seed_B).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == len(list(model.parameters()))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)
    assert not gradients[0]["embedding.weight"][PAD].any()


def test_the_formula_counts_its_parameters() -> None:
    model = model_of()
    config = ModelConfig(vocab_size=64, hidden_size=12, num_layers=1, num_heads=1, lstm_size=7)
    names = ("embedding", "left_to_right", "right_to_left")
    counted = sum(p.numel() for name, p in model.named_parameters() if name.startswith(names))
    assert cost.num_parameters(config, 128) == counted
    weights = [p.numel() for name, p in model.named_parameters() if "weight_" in name]
    assert cost.linear_parameters(config) == sum(weights)
    assert cost.flops_per_token(config, 128, 0.0) == 6 * sum(weights)


def test_it_is_a_function_of_its_seed() -> None:
    first, again = model_of().state_dict(), model_of().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["embedding.weight"].std() == pytest.approx(0.25 / 3**0.5, rel=0.05)
