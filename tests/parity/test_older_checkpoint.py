"""A checkpoint of 2026-11-22 (tests/parity/older: step 3 of 6, LAMB, fp64) goes on as the program of that
day went on from it. On the machine that made it the tensors are equal bit by bit; elsewhere a product may
round otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import logged
from tests.parity.runs import losses, settings, state, train_run
from tests.shards import write_shards
from tests.tensors import largest_relative_error, saved_state

OLDER = Path(__file__).parent / "older"
LOSSES = [3.4784872324207394, 3.4857147693165094, 3.485904553265891]


def test_an_older_checkpoint_goes_on_as_before(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", train=24, held_out=6, length=8, vocab_size=32)
    config = settings(
        shards,
        data={"sequence_length": 8},
        model={"vocab_size": 32, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8},
        batch={"global_size": 4, "micro_size": 2},
        schedule={"steps": 6, "name": "cosine"},
        optim={"name": "lamb", "lr": 5e-3},
        precision="fp64",
    )
    run_dir = train_run(tmp_path / "run", config, resume=str(OLDER / "step-00000003"))
    assert logged(run_dir, "step") == [4, 5, 6]
    assert losses(run_dir) == pytest.approx(LOSSES, rel=1e-12)
    end = saved_state(OLDER / "end")
    assert state(run_dir, 6).keys() == end.keys()
    assert largest_relative_error(state(run_dir, 6), end) < 1e-11
    start = saved_state(OLDER / "step-00000003")
    weights = [name for name in start if "/" not in name]
    assert any(not torch.allclose(start[name], end[name], rtol=1e-3) for name in weights)
