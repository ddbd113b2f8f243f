"""Tests of the pretraining task: masking, and micro batches that follow the documented algorithm."""

import json
import math
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import bert_dp
from bert_dp import tasks
from bert_dp.config import Config, read_manifest
from bert_dp.cost import flops_per_token
from bert_dp.data.stream import MlmBatch, Shards, held_out_batches
from bert_dp.measure.profile_step import lone_trainer
from bert_dp.training.loop import evaluate
from tests.helpers import issues_of, tiny_run, write_lines
from tests.shards import SPECIAL, edited_manifest, write_shards
from tests.states import FACTS
from tests.tensors import CPU


@pytest.mark.parametrize(("mask_rate", "sequences"), [(0.15, 20), (0.5, 20), (0.5, 6)])
def test_held_out_text_is_masked_at_15_percent_for_any_training_mask_rate(
    shards: Path, tmp_path: Path, mask_rate: float, sequences: int
) -> None:
    """In each sequence of 16 tokens, round(0.15 x 16) = 2 are masked."""
    config = tiny_run(shards, objective={"mask_rate": mask_rate}, eval={"max_sequences": sequences})
    masked: list[int] = []
    with lone_trainer(config, tmp_path) as trainer:
        task, model = trainer.task, trainer.bare_model
        model.register_forward_pre_hook(lambda module, inputs: masked.append(inputs[1].numel()))
        measured = evaluate(trainer, lambda: False)
    assert measured is not None
    assert (measured["mask_rate"], measured["masked_tokens"]) == (0.15, 2 * sequences)
    assert sum(masked) >= 2 * sequences
    loss_B, hit_B = by_sequence(model, task._held_out)  # type: ignore[attr-defined]
    assert measured["sequences"] == len(loss_B) == sequences
    assert measured["loss"] == pytest.approx(statistics.fmean(loss_B), rel=1e-6)
    assert measured["loss_se"] == pytest.approx(statistics.stdev(loss_B) / math.sqrt(sequences), rel=1e-5)
    assert measured["masked_accuracy"] == statistics.fmean(hit_B)
    assert task.num_targets(0, 4) == 4 * round(mask_rate * 16)


def test_without_held_out_text_there_is_no_held_out_loss(tmp_path: Path) -> None:
    """Shards built with data.build.held_out_fraction: 0 have no held-out text."""
    directory = write_shards(tmp_path / "shards", held_out=1)
    with edited_manifest(directory) as edited:
        edited["held_out"] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}
        edited["unigram_entropy_nats"] = None
    config = tiny_run(directory)
    with lone_trainer(config, tmp_path) as trainer:
        assert evaluate(trainer, lambda: False) is None
        assert trainer.stream.next().sample_ids.tolist() == [0, 1, 2, 3]


def test_a_replica_reads_its_part_with_the_configured_number_of_threads(shards: Path) -> None:
    config = tiny_run(shards, data={"workers": 1}, batch={"micro_size": 4, "global_size": 8})
    task = tasks.make_task(config, CPU)
    facts = task.open_data()
    assert (facts.num_samples, facts.data_hash) == (96, read_manifest(shards).hash)
    assert task.flops_per_token == flops_per_token(config.model, 16, config.objective.mask_rate)
    before = set(threading.enumerate())
    stream = task.stream(dp_rank=1, dp_size=2, start_sample=88)
    assert stream.next().sample_ids.tolist() == [92, 93, 94, 95]
    assert len(set(threading.enumerate()) - before) == 1
    stream.close()


def by_sequence(model: nn.Module, batches: Sequence[MlmBatch]) -> tuple[list[float], list[float]]:
    """Return the mean cross entropy of each held-out sequence's two masked tokens, and the share of them that
    is predicted correctly, computed from the definitions."""
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


TRAIN, LENGTH, VOCAB, NUM_SPECIAL = 96, 16, 64, 7  # the defaults of write_shards
ALL_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL_64
    return x ^ (x >> 31)


def hash64(*parts: int) -> int:
    state = 0
    for part in parts:
        state = mix64(((state ^ part) + GOLDEN) & ALL_64)
    return state


def permute(index: int, size: int, key: int) -> int:
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index & (2**half - 1)
        for round_ in range(6):
            left, right = right, left ^ (hash64(key, round_, right) & (2**half - 1))
        index = (left << half) | right
        if index < size:
            return index


def mask(row: list[int], key: int, count: int) -> tuple[list[int], list[int]]:
    """Return the masked row and the predicted positions in order."""
    draw = [mix64((key + (s + 1) * GOLDEN) & ALL_64) for s in range(len(row))]
    chosen = sorted(range(len(row)), key=lambda s: draw[s])[:count]
    tenth, seen = int(count / 10 + 0.5), list(row)
    for place, s in enumerate(chosen):
        if place < tenth:
            seen[s] = NUM_SPECIAL + mix64((draw[s] + GOLDEN) & ALL_64) % (VOCAB - NUM_SPECIAL)
        elif place >= 2 * tenth:
            seen[s] = SPECIAL["mask"]
    return seen, chosen


def tokens(shards: Path, split: str) -> list[list[int]]:
    rows: list[list[int]] = np.fromfile(shards / f"{split}-00000.bin", "<u2").reshape(-1, LENGTH).tolist()
    return rows


def config_of(shards: Path, **sections: Any) -> Config:
    given = {"batch": {"global_size": 12, "micro_size": 4}, "objective": {"mask_rate": 0.5}, **sections}
    return tiny_run(shards, run={"seed": 5}, **given)


def samples_of(given: Any, step: int) -> list[int]:
    return [int(i) for batch in bert_dp.batches(given, step) for i in batch.sample_ids]


@pytest.mark.parametrize("step", [1, 9, 10])
def test_the_micro_batches_of_a_step_equal_the_documented_ones(shards: Path, step: int) -> None:
    """Step 9 begins the second epoch."""
    rows, count = tokens(shards, "train"), 8
    drawn = list(bert_dp.batches(config_of(shards), step))
    assert [len(batch.sample_ids) for batch in drawn] == [4, 4, 4]
    sample = 12 * (step - 1)
    for batch in drawn:
        assert batch.num_masked == 4 * count
        for b in range(4):
            assert batch.sample_ids[b] == sample
            epoch, within = divmod(sample, TRAIN)
            index = permute(within, TRAIN, hash64(5, 1, epoch))
            seen, chosen = mask(rows[index], hash64(5, 2, epoch, index), count)
            part = slice(b * count, (b + 1) * count)
            assert batch.ids_BS[b].tolist() == seen
            assert batch.positions_P[part].tolist() == [b * LENGTH + s for s in chosen]
            assert batch.labels_P[part].tolist() == [rows[index][s] for s in chosen]
            assert int(batch.seed_B[b]) % 2**32 == hash64(5, 4, epoch, index) >> 32
            sample += 1


def test_the_held_out_masks_equal_the_documented_ones(shards: Path) -> None:
    rows = tokens(shards, "held_out")
    split = Shards(shards, read_manifest(shards), "held_out")
    (batch,) = held_out_batches(split, micro_size=20, num_masked=10, max_sequences=20, dp_rank=0, dp_size=1)
    for index, row in enumerate(rows):
        seen, chosen = mask(row, hash64(0, 3, index), 10)
        assert batch.ids_BS[index].tolist() == seen
        assert (batch.positions_P[10 * index : 10 * index + 10] - LENGTH * index).tolist() == chosen


RAMP = {"global_size": 12, "micro_size": 2, "ramp_fraction": 0.5, "ramp_quantum": 4}


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        # 4 sequences below progress f = 1/6, 8 below f = 1/3; the steps have f = 0, 0.1, 0.2 ...
        ({"schedule": {"steps": 10}, "batch": RAMP}, [4, 4, 8, 8, 12, 12, 12, 12, 12, 12]),
        # the batch grows after 11 and 22 of the 66 sequences of the budget
        ({"schedule": {"tokens": 66 * LENGTH}, "batch": RAMP}, [4, 4, 4, 8, 8, 12, 12, 12, 12]),
        ({"schedule": {"epochs": 0.5}}, [12, 12, 12, 12]),
        ({"schedule": {"tokens": 13 * LENGTH}}, [12, 12]),
    ],
)
def test_steps_follow_each_other_without_a_gap_to_the_end_of_the_budget(
    shards: Path, sections: dict[str, Any], sizes: list[int]
) -> None:
    config = config_of(shards, **sections)
    drawn = [samples_of(config, step) for step in range(1, len(sizes) + 1)]
    assert list(map(len, drawn)) == sizes
    assert [i for step in drawn for i in step] == list(range(sum(sizes)))
    (line,) = issues_of(bert_dp.batches, config, len(sizes) + 1)
    assert str(line).startswith(f"step: {len(sizes) + 1} ")


def run_of(folder: Path, config: Config) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    lines = [{"step": 2, "samples": 12, "global_batch": 8}, {"step": 4, "samples": 32, "global_batch": 12}]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


@pytest.mark.parametrize("schedule", [{"hours": 1.0}, {"kwh": 1.0}, {"steps": 400}])
def test_a_ramp_follows_the_logged_batches(tmp_path: Path, shards: Path, schedule: dict[str, Any]) -> None:
    """A time budget does not define the ramp in advance, and a later start may have raised the budget."""
    run = run_of(tmp_path / "run", config_of(shards, schedule=schedule, batch=RAMP))
    assert samples_of(run, 2) == list(range(4, 12))
    assert samples_of(str(run), 4) == list(range(20, 32))


def test_a_constant_batch_in_a_time_budget_needs_no_metrics(tmp_path: Path, shards: Path) -> None:
    config = config_of(shards, schedule={"hours": 1.0})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert samples_of(tmp_path / "mine.yaml", 1000) == list(range(11_988, 12_000))


def test_batches_that_cannot_be_drawn_are_refused(tmp_path: Path, shards: Path) -> None:
    config = config_of(shards)
    hours = run_of(tmp_path / "hours", config_of(shards, schedule={"hours": 1.0}, batch=RAMP))
    kwh = run_of(tmp_path / "kwh", config_of(shards, schedule={"kwh": 1.0}, batch=RAMP))
    other = run_of(tmp_path / "other", config)
    (other / "checkpoints/step-00000002").mkdir(parents=True)
    (other / "checkpoints/step-00000002/state.json").write_text(json.dumps({**FACTS, "step": 2}))
    refusals = [
        ("step", hours, 3),
        ("step", kwh, 3),
        ("step", config, 0),
        ("data", other, 1),
        ("RUN", config_of(shards, objective={"name": "finetune"}), 1),
        ("RUN", config.model_copy(update={"data": config.data.model_copy(update={"synthetic": True})}), 1),
        ("batch.global_size", config_of(shards, batch={"global_size": 12, "micro_size": 5}), 1),
        ("no-such-run", "no-such-run", 1),
    ]
    for setting, given, step in refusals:
        (line,) = issues_of(bert_dp.batches, given, step)
        assert str(line).partition(":")[0] == setting
