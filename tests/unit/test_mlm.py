"""Pretraining as a task: what is masked where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bert_dp.config import resolve
from bert_dp.dist import Comm
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
    assert task.num_targets(0, 4) == 4 * round(mask_rate * 16)
