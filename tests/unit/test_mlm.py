"""Pretraining as a task: what is masked where."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bert_dp import tasks
from bert_dp.config import read_manifest
from bert_dp.cost import flops_per_token
from bert_dp.data.stream import MlmBatch, Shards, training_batch
from bert_dp.measure.profile_step import lone_trainer
from bert_dp.model.bert import IGNORE, TiedEmbedding
from bert_dp.training.loop import evaluate
from tests.helpers import tiny_run
from tests.shards import edited_manifest, write_shards
from tests.tensors import CPU


@pytest.mark.parametrize("mask_rate", [0.15, 0.5])
def test_held_out_text_is_masked_alike_whatever_the_training_rate(
    shards: Path, tmp_path: Path, mask_rate: float
) -> None:
    """20 sequences of 16 tokens, of which round(0.15 x 16) = 2 are masked."""
    config = tiny_run(shards, objective={"mask_rate": mask_rate})
    masked: list[int] = []
    with lone_trainer(config, tmp_path) as trainer:
        task, model = trainer.task, trainer.bare_model
        model.register_forward_pre_hook(lambda module, inputs: masked.append(inputs[1].numel()))
        measured = evaluate(trainer, lambda: False)
    assert measured is not None
    assert (measured["mask_rate"], measured["masked_tokens"]) == (0.15, 40)
    assert sum(masked) == 40
    loss_B, hit_B = by_sequence(model, task._held_out)  # type: ignore[attr-defined]
    assert measured["sequences"] == len(loss_B) == 20
    assert measured["loss"] == pytest.approx(statistics.fmean(loss_B), rel=1e-6)
    assert measured["loss_se"] == pytest.approx(statistics.stdev(loss_B) / math.sqrt(20), rel=1e-5)
    assert measured["masked_accuracy"] == statistics.fmean(hit_B)
    assert task.num_targets(0, 4) == 4 * round(mask_rate * 16)


def test_no_more_held_out_sequences_are_read_than_asked_for(shards: Path, tmp_path: Path) -> None:
    config = tiny_run(shards, eval={"max_sequences": 6})
    with lone_trainer(config, tmp_path) as trainer:
        measured = evaluate(trainer, lambda: False)
        held_out = trainer.task._held_out  # type: ignore[attr-defined]
    assert measured is not None
    assert (measured["sequences"], measured["masked_tokens"]) == (6, 12)
    loss_B, _ = by_sequence(trainer.bare_model, held_out)
    assert measured["loss"] == pytest.approx(statistics.fmean(loss_B), rel=1e-6)


def test_without_held_out_text_there_is_no_held_out_loss(tmp_path: Path) -> None:
    """As data.build.held_out_fraction: 0 asks for."""
    directory = write_shards(tmp_path / "shards", held_out=1)
    with edited_manifest(directory) as edited:
        edited["held_out"] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}
        edited["unigram_entropy_nats"] = None
    config = tiny_run(directory)
    with lone_trainer(config, tmp_path) as trainer:
        assert evaluate(trainer, lambda: False) is None
        assert trainer.stream.next().sample_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("shuffle", "seed", "workers"), [(True, 3, 0), (False, 3, 1), (True, 4, 1)])
def test_samples_are_drawn_as_the_settings_say(shards: Path, shuffle: bool, seed: int, workers: int) -> None:
    """Order, seed, masks, place in the stream, and threads; FLOPs by the rate of training."""
    config = tiny_run(
        shards,
        data={"shuffle": shuffle, "workers": workers},
        run={"seed": seed},
        objective={"mask_rate": 0.5},
        batch={"micro_size": 4, "global_size": 8},
    )
    task = tasks.make_task(config, CPU)
    facts = task.open_data()
    assert (facts.num_samples, facts.data_hash) == (96, read_manifest(shards).hash)
    assert task.flops_per_token == flops_per_token(config.model, 16, 0.5)
    before = set(threading.enumerate())
    stream = task.stream(dp_rank=1, dp_size=2, start_sample=88)
    batch = stream.next()
    assert len(set(threading.enumerate()) - before) == workers
    stream.close()
    own = Shards(shards, read_manifest(shards), "train")
    expected = training_batch(own, np.arange(92, 96), seed=seed, num_masked=8, shuffle=shuffle)
    assert isinstance(batch, MlmBatch)
    assert batch.sample_ids.tolist() == [92, 93, 94, 95]
    for name in ("ids_BS", "positions_P", "labels_P", "seed_B"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name


def by_sequence(model: nn.Module, batches: Sequence[MlmBatch]) -> tuple[list[float], list[float]]:
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
    loss_P, hit_P = TiedEmbedding().score(logits_PV, torch.tensor([1, 2, IGNORE]))
    expected = [math.log(math.exp(-2) + 1 + math.exp(-1)), math.log(math.exp(4) + 2), 0.0]
    assert loss_P.tolist() == pytest.approx(expected)
    assert hit_P.tolist() == [1.0, 0.0, 0.0]
