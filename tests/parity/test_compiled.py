"""Compile runs on two ranks: blocks share one graph of Dynamo, and the losses equal those of one eager rank.

Graphs are captured, differentiated and partitioned as for a device, then run with torch's own kernels
(backend aot_eager), which takes seconds. `make parity` and test_matrix.py use inductor, which takes minutes.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import read_json, read_lines
from tests.parity.runs import evals, metrics, settings, state, train_named, train_run
from tests.tensors import largest_relative_error
from tests.wrapped_task import WrappedTask

STEPS = 4
COMMON: dict[str, Any] = {
    "precision": "fp64",
    "model": {"dropout": 0.1},
    "schedule": {"steps": STEPS, "name": "constant"},
    "eval": {"every_steps": 2},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "static_graph": True, "bucket_mib": 0.01},
    "fsdp": {"engine": "fsdp"},
    "tensor": {"engine": "ddp", "tensor": 2},
}


class CountingTask(WrappedTask):
    """Task that writes Dynamo's counts of graphs and graph breaks at the start of each step."""

    def num_targets(self, first_sample: int, count: int) -> int:
        counters = torch._dynamo.utils.counters
        found = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
        with Path(f"dynamo-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        return super().num_targets(first_sample, count)


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train root/<name of PARALLEL> compiled on two ranks, and root/single eager on one."""
    root = tmp_path_factory.mktemp("compiled")
    train_run(root / "single", settings(shards, **COMMON))
    compiled = {"compile": "on", "parallel": {"activation_checkpointing": True}}
    runs = {name: (2, settings(shards, compiled, COMMON, parallel=own)) for name, own in PARALLEL.items()}
    return train_named(root, runs, make_task=CountingTask, backend="aot_eager")


@pytest.mark.parametrize("name", PARALLEL)
def test_blocks_share_one_graph_and_all_compile_before_the_first_step(runs: Path, name: str) -> None:
    """There are six graphs: embeddings, a block and the head, each for training and for evaluation."""
    for rank in (0, 1):
        lines = read_lines(runs / name / f"dynamo-{rank}.jsonl")
        assert len(lines) == 1 + STEPS
        assert [line["graphs"] for line in lines] == [0] + [6] * STEPS
        assert lines[-1]["breaks"] == {}


@pytest.mark.parametrize("name", PARALLEL)
def test_a_compiled_run_equals_the_eager_run_of_one_rank(runs: Path, name: str) -> None:
    """The runs have dropout, which torch's own kernels draw as in an eager run, and recompute each block."""
    one, many = runs / "single", runs / name
    assert read_json(many / "summary.json")["compiled"]
    for read in (metrics, evals):
        lines = list(zip(read(many), read(one), strict=True))
        assert max(abs(a["loss"] - b["loss"]) for a, b in lines) < 1e-10
    assert largest_relative_error(state(many, STEPS), state(one, STEPS)) < 1e-10
