"""Check that a residual stream in bf16 trains as well as in fp32; test_matrix.py tests several ranks."""

import pytest
import torch
from torch import Tensor

from bert_dp.config import ModelConfig
from bert_dp.model.bert import build_model
from tests.tensors import bits

VOCABULARY, LENGTH, MASK = 24, 16, 6


def counting_up(seed: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences of consecutive tokens in which a quarter of the positions is to be predicted. Half of
    these are visible, so that the model learns to copy in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    first_B1 = torch.randint(VOCABULARY - 7, (sequences, 1), generator=generator)
    ids = ((first_B1 + torch.arange(LENGTH)) % (VOCABULARY - 7) + 7).flatten()
    rows = [torch.randperm(LENGTH, generator=generator)[: LENGTH // 4] for _ in range(sequences)]
    positions_P = torch.cat([row + LENGTH * b for b, row in enumerate(rows)])
    labels_P = ids[positions_P]
    ids[positions_P[::2]] = MASK
    return ids.view(sequences, LENGTH), positions_P, labels_P


def heldout_losses(residual: str, steps: int = 30) -> tuple[float, float, dict[str, Tensor]]:
    """Return the held-out losses before and after `steps` optimizer steps, in nats, and the weights."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    config = ModelConfig(num_layers=2, residual_dtype=residual, **sizes)  # type: ignore[arg-type]
    model = build_model(config, LENGTH, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(seed: int, sequences: int) -> Tensor:
        ids_BS, positions_P, labels_P = counting_up(seed, sequences)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(ids_BS, positions_P, labels_P) / len(labels_P)
        return loss

    with torch.no_grad():
        before = loss_of(steps, 128).item()
    for step in range(steps):
        loss_of(step, 16).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return before, loss_of(steps, 128).item(), {n: p.detach() for n, p in model.named_parameters()}


def test_a_bf16_residual_stream_reaches_the_heldout_loss_of_fp32() -> None:
    (start, wide, weights), (_, narrow, rounded) = heldout_losses("full"), heldout_losses("bf16")
    assert bits(weights) != bits(rounded), "no weight was rounded"
    assert start - wide > 1.0
    assert narrow == pytest.approx(wide, abs=0.02)
