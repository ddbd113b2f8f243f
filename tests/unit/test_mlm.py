"""Pretraining as a task: what is masked where."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bert_dp.config import resolve
from bert_dp.data import Batch
from bert_dp.dist import Comm
from bert_dp.model import IGNORE, CrammedBert, Vocabulary
from bert_dp.precision import Precision
from bert_dp.tasks import Context
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.world import World
from tests.helpers import TINY_MODEL
from tests.shards import write_shards


@pytest.mark.parametrize("mask_rate", [0.15, 0.5])
def test_held_out_text_is_masked_alike_whatever_the_training_rate(tmp_path: Path, mask_rate: float) -> None:
    """20 sequences of 16 tokens, of which round(0.15 x 16) = 2 are masked."""
    config = resolve(
        [
            {
                "data": {"path": str(write_shards(tmp_path)), "sequence_length": 16},
                "model": TINY_MODEL,
                "schedule": {"steps": 1},
                "objective": {"mask_rate": mask_rate},
                "batch": {"micro_size": 4, "global_size": 4},
            }
        ]
    )
    device, masked = torch.device("cpu"), []
    task = MaskedLanguageModel(config, device)
    task.open_data()
    model = task.build_model(0)
    model.register_forward_pre_hook(lambda module, inputs: masked.append(inputs[1].numel()))
    context = Context(
        Comm(World(0, 0, 1, 1), None),
        device,
        Precision("fp32", torch.float32, None),
        dp_rank=0,
        dp_size=1,
        tensor=1,
        progress=lambda: None,
        stopped=lambda: False,
    )
    measured = task.evaluate(model, context)
    assert measured is not None
    assert (measured["mask_rate"], measured["masked_tokens"]) == (0.15, 40)
    assert sum(masked) == 40
    loss_B, hit_B = by_sequence(model, task._evaluation_batches(context))
    assert measured["sequences"] == len(loss_B) == 20
    assert measured["loss"] == pytest.approx(statistics.fmean(loss_B), rel=1e-6)
    assert measured["loss_se"] == pytest.approx(statistics.stdev(loss_B) / math.sqrt(20), rel=1e-5)
    assert measured["masked_accuracy"] == statistics.fmean(hit_B)
    assert task.num_targets(0, 4) == 4 * round(mask_rate * 16)


def by_sequence(model: CrammedBert, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
    """Of each held-out sequence the mean cross entropy of its two masked tokens, and the share of them
    that is guessed, by the definition."""
    losses, hits = [], []
    for batch in batches:
        with torch.no_grad():
            logits_PV = model(batch.ids_BS, batch.positions_P)
        surprise_PV = -logits_PV.double().log_softmax(-1)
        for first in range(0, batch.num_masked, 2):
            labels = [int(batch.labels_P[p]) for p in (first, first + 1)]
            rows = [surprise_PV[p] for p in (first, first + 1)]
            losses.append(statistics.fmean(float(r[y]) for r, y in zip(rows, labels, strict=True)))
            hits.append(statistics.fmean(int(r.argmin()) == y for r, y in zip(rows, labels, strict=True)))
    return losses, hits


def test_a_score_is_the_cross_entropy_and_whether_the_label_is_the_guess() -> None:
    logits_PV = torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    loss_P, hit_P = Vocabulary().score(logits_PV, torch.tensor([1, 2, IGNORE]))
    expected = [math.log(math.exp(-2) + 1 + math.exp(-1)), math.log(math.exp(4) + 2), 0.0]
    assert loss_P.tolist() == pytest.approx(expected)
    assert hit_P.tolist() == [1.0, 0.0, 0.0]
