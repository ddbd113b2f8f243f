"""What a rank checks and does before it goes on from a checkpoint, whoever has started it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_dp import checkpoint, setup
from bert_dp.config import Config, ConfigError, resolve
from bert_dp.dist import Comm
from bert_dp.measure.profiling import ALONE
from bert_dp.tasks import Metadata
from bert_dp.train_state import TrainState
from bert_dp.world import World
from tests.helpers import read_lines, write_lines
from tests.states import FACTS
from tests.tensors import CPU


def config() -> Config:
    return resolve([{"data": {"path": "x"}, "schedule": {"steps": 9}}])


def rank_with(run_dir: Path, digit: str) -> Any:
    """A lone rank whose data have this hash."""
    return SimpleNamespace(
        config=config(),
        run_dir=run_dir,
        comm=Comm(ALONE, None),
        device=CPU,
        data=Metadata(data_hash=digit * 64, tokenizer=None, num_samples=9),
        log_rank0=lambda text: None,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has saved step 3."""
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"w/step": torch.tensor(3.0)}, "scaler": {}}
    facts = {**FACTS, "config": config().model_dump(mode="json"), "samples": 12, "elapsed_s": 7.5}
    checkpoint.save(tmp_path / "checkpoints", 3, state, facts, 9)
    return tmp_path


def test_a_rank_goes_on_with_the_data_of_the_checkpoint_only(run_dir: Path) -> None:
    """srun and mpirun start ranks without the launcher, which checks the same."""
    resumed = setup.select_checkpoint(rank_with(run_dir, "0"), "auto")
    assert resumed.path == run_dir / "checkpoints" / "step-00000003"
    assert resumed.state == TrainState(step=3, samples=12, elapsed_s=7.5, logged_step=3)
    with pytest.raises(ConfigError, match=f"was trained on shards {'0' * 16}, these are {'1' * 16}"):
        setup.select_checkpoint(rank_with(run_dir, "1"), "auto")


class Meeting(Comm):
    """Notes the steps that the records hold when the ranks meet."""

    def __init__(self, world: World, record: Path):
        super().__init__(world, None)
        self._record = record
        self.seen: list[list[int]] = []

    def barrier(self) -> None:
        self.seen.append([line["step"] for line in read_lines(self._record)])


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_writes_before_rank_0_has_cut_the_records_back(run_dir: Path, rank: int) -> None:
    record = run_dir / "steps" / "rank-1.jsonl"
    write_lines(record, ({"step": step} for step in range(1, 6)))
    meeting = Meeting(World(rank, rank, 2, 2), record)
    trainer: Any = SimpleNamespace(run_dir=run_dir, comm=meeting, config=config())
    state = TrainState(step=3)
    resumed = setup.Checkpoint(run_dir / "checkpoints" / "step-00000003", {}, state, None, "fp32", None)
    setup.cut_records_back(trainer, state, resumed)
    assert meeting.seen == [[1, 2, 3] if rank == 0 else [1, 2, 3, 4, 5]]


def test_only_a_checkpoint_of_the_run_itself_counts_as_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for parent, saved in ((folder, 7), (tmp_path / "other" / "checkpoints", None)):
        resumed = setup.Checkpoint(parent / "step-00000007", {}, TrainState(step=7), None, "fp32", None)
        assert setup.saved_step(resumed, folder) == saved
    assert setup.saved_step(None, folder) is None
