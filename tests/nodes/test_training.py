"""Runs over several nodes: the model of one process, on one address."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cli import train
from tests.nodes.harness import FULL, Cluster, ended, needs_nodes
from tests.parity.runs import losses, state

pytestmark = needs_nodes
SETTINGS = "schedule.steps=20 checkpoint.keep=9"
CELLS = {  # (ranks a node, settings, tolerance of the loss, of the weights)
    "ddp": (1, "", 1e-5, 1e-4),
    "fsdp hybrid": (2, "parallel.engine=fsdp parallel.fsdp_replicas=2 precision=fp64", 1e-10, 1e-10),
    "zero1": (1, "parallel.engine=zero1", 1e-5, 1e-4),
    "fsdp": (1, "parallel.engine=fsdp", 1e-5, 1e-4),
    "ddp fp64": (1, "precision=fp64", 1e-10, 1e-10),
    "zero1 fp64": (1, "parallel.engine=zero1 precision=fp64", 1e-10, 1e-10),
    "fsdp fp64": (1, "parallel.engine=fsdp precision=fp64", 1e-10, 1e-10),
    "tensor": (2, "parallel.tensor=2 precision=fp64", 1e-10, 1e-10),
}


def assert_equal(one: Path, many: Path, of_loss: float, of_weights: float, step: int = 20) -> None:
    assert losses(many) == pytest.approx(losses(one), abs=of_loss)
    expected, found = state(one, step), state(many, step)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.double() - found[name].double()).abs().max() <= of_weights, name


@pytest.mark.parametrize("cell", list(CELLS) if FULL else list(CELLS)[:2])
def test_nodes_train_what_one_process_trains(shards: Path, tmp_path: Path, cell: str) -> None:
    nproc, settings, of_loss, of_weights = CELLS[cell]
    precision = " precision=fp64" if "fp64" in settings else ""
    train(shards, tmp_path / "one", SETTINGS + precision, nproc=1, OMP_NUM_THREADS="1")
    with Cluster() as cluster:
        ended(cluster.train(shards, tmp_path / "many", f"{SETTINGS} {settings}", nproc=nproc), 0)
    assert_equal(tmp_path / "one", tmp_path / "many", of_loss, of_weights)
