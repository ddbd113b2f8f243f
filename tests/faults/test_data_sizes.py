"""Row 17: with training and held-out splits of any size, all ranks take equally many steps and none hangs."""

import functools
import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bert_dp.config import read_manifest
from bert_dp.data.stream import Shards, TrainingStream, held_out_batches, training_batch
from tests.faults.harness import FULL, observe, rounds
from tests.parity.runs import settings, train_runs, write_run
from tests.shards import write_shards

MICRO = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sizes")


@hypothesis.settings(max_examples=500 if FULL else 50, deadline=None, database=None, derandomize=True)
@hypothesis.given(
    train=st.integers(1, 3 * MICRO),
    held_out=st.integers(0, 3 * MICRO),
    dp=st.integers(1, 4),
    accumulation=st.integers(1, 3),
)
def test_row_17_every_replica_gets_equally_many_batches(
    folder: Path, train: int, held_out: int, dp: int, accumulation: int
) -> None:
    directory = folder / f"{train}-{held_out}"
    if not (directory / "manifest.json").exists():
        write_shards(directory, train=train, held_out=max(1, held_out))
    manifest = read_manifest(directory)
    seen = []
    for rank in range(dp):
        stream = TrainingStream(
            functools.partial(
                training_batch, Shards(directory, manifest, "train"), seed=0, num_masked=2, shuffle=True
            ),
            micro_size=MICRO,
            dp_rank=rank,
            dp_size=dp,
            start_sample=0,
            workers=0,
            pin=False,
        )
        batches = [stream.next() for _ in range(2 * accumulation)]
        assert {b.num_masked for b in batches} == {2 * MICRO}
        seen += [int(i) for b in batches for i in b.sample_ids]
    assert sorted(seen) == list(range(2 * accumulation * dp * MICRO))  # every sample exactly once
    shares = [
        held_out_batches(
            Shards(directory, manifest, "held_out"),
            micro_size=MICRO,
            num_masked=2,
            max_sequences=max(1, held_out),
            dp_rank=rank,
            dp_size=dp,
        )
        for rank in range(dp)
    ]
    assert len({len(share) for share in shares}) == 1
    assert sum(b.num_masked for share in shares for b in share) == 2 * max(1, held_out)
    assert all(np.array_equal(np.unique(b.ids_BS.shape), np.unique((MICRO, 16))) for s in shares for b in s)
    observe(17, train=train, held_out=held_out, dp=dp)


def test_row_17_runs_on_odd_split_sizes_complete(tmp_path: Path) -> None:
    """Train on 1 to 4 ranks. Splits are shorter than a batch, no multiple of one, or one sequence long."""
    sizes = [(1, 1), (5, 3), (13, 7)]
    for train, held_out in sizes[: len(rounds(2, 3))]:
        shards = write_shards(tmp_path / f"s-{train}", train=train, held_out=held_out)
        common = {"schedule": {"steps": 3}, "batch": {"global_size": 12, "micro_size": 1}}
        losses = []
        for size in (1, 2, 3, 4):
            run_dir = write_run(tmp_path / f"{train}-{size}", settings(shards, **common))
            train_runs(size, [run_dir])
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)["loss"] for line in lines])
            assert len(lines) == 3
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], abs=1e-5)
