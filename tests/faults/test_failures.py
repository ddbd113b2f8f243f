"""Rows 1 to 3: a rank that raises, is killed, or crashes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.e2e.cli import bert_dp, tiny
from tests.faults.harness import broken, rounds
from tests.shards import write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


def test_row_01_the_rank_that_raises_is_named(tmp_path: Path, shards: Path) -> None:
    for number in rounds(1, 100):
        rank, step = random.Random(number).choice([0, 1]), random.Random(number + 1).randrange(5)
        run_dir = tmp_path / f"run-{number}"
        done = bert_dp("train", "quickstart", *tiny(shards, "schedule.steps=100000"), "--run-dir",
                       str(run_dir), **broken("raise", rank=rank, step=step))  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"rank {rank}: ValueError: injected by a test" in done.stdout
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
