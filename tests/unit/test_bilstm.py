"""The BiLSTM student: beside torch's own bidirectional LSTM, padding, pairs, dropout, size."""

import pytest
import torch
from torch import Tensor, nn

from bert_dp import cost
from bert_dp.config import FinetuneConfig
from bert_dp.config.schema import ModelConfig
from bert_dp.model.bilstm import BiLstm, build_bilstm

CLS, SEP, PAD = 4, 5, 0
CONFIG = ModelConfig(vocab_size=64, hidden_size=12, num_layers=1, num_heads=1, lstm_size=7, dropout=0.3)


def model_of(pair: bool = False) -> BiLstm:
    finetune = FinetuneConfig(labels=("a", "b", "c"), head_size=10, pair=pair)
    return build_bilstm(CONFIG, finetune, seed=3)


def padded(rows: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def rows_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(7, 64, (n,), generator=generator).tolist() for n in lengths]


def states_by_torch(model: BiLstm, row: list[int]) -> Tensor:
    """The last states of torch's bidirectional LSTM with the same weights on one unpadded sentence."""
    own = nn.LSTM(12, 7, bidirectional=True, batch_first=True)
    reverse = {f"{name}_reverse": value for name, value in model.right_to_left.state_dict().items()}
    own.load_state_dict(model.left_to_right.state_dict() | reverse)
    _, (last_21H, _) = own(model.embedding(torch.tensor([row])))
    return last_21H.transpose(0, 1).flatten(1)


def head(model: BiLstm, features: Tensor) -> Tensor:
    return model.classifier(model.dense(features).relu())


def test_it_equals_torchs_lstm_on_unpadded_sentences() -> None:
    model, rows = model_of().eval(), rows_of(9, 1, 4, 12)
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
    model = model_of(pair).train()
    rows = [[CLS, *row, SEP, *row[:2], SEP] for row in rows_of(9, 1, 4, 12)]
    short, long = (
        torch.autograd.grad(
            model(*padded(rows, length), torch.arange(4, dtype=torch.int32)).square().sum(),
            list(model.parameters()),
        )
        for length in (18, 32)
    )
    for gradient, other in zip(short, long, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)
    assert not short[0][PAD].any(), "the embedding's"


def test_the_formula_counts_its_parameters() -> None:
    model = model_of()
    counted = [p.numel() for name, p in model.named_parameters() if not name.startswith(("dense", "class"))]
    assert cost.num_parameters(CONFIG, 128) == sum(counted)
    weights = sum(p.numel() for name, p in model.named_parameters() if "weight_" in name)
    assert cost.linear_parameters(CONFIG) == weights
    assert cost.flops_per_token(CONFIG, 128, 0.0) == 6 * weights


def test_it_is_a_function_of_its_seed() -> None:
    first, again = model_of().state_dict(), model_of().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["embedding.weight"].std() == pytest.approx(0.25 / 3**0.5, rel=0.05)
