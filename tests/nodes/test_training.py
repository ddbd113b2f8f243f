"""Check that runs on several nodes train the same model as one process."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cli import resume_run, train, write_config
from tests.e2e.test_launchers import with_site
from tests.helpers import read_json
from tests.nodes.harness import FULL, ROUNDS, Cluster, ended, needs_nodes, stale_views
from tests.parity.runs import losses, state

pytestmark = needs_nodes
SETTINGS = "schedule.steps=20 checkpoint.keep=9"
CELLS = {  # (ranks per node, settings, tolerance of the loss, tolerance of the weights)
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


@pytest.mark.parametrize("cell", list(CELLS) if FULL else ["fsdp hybrid"])
def test_nodes_train_the_same_model_as_one_process(shards: Path, tmp_path: Path, cell: str) -> None:
    nproc, settings, of_loss, of_weights = CELLS[cell]
    precision = " precision=fp64" if "fp64" in settings else ""
    train(shards, tmp_path / "one", SETTINGS + precision, nproc=1, OMP_NUM_THREADS="1")
    with Cluster() as cluster:
        ended(cluster.train(shards, tmp_path / "many", f"{SETTINGS} {settings}", nproc=nproc), 0)
    assert_equal(tmp_path / "one", tmp_path / "many", of_loss, of_weights)


def test_a_run_resumes_on_two_nodes_then_one_then_two(shards: Path, tmp_path: Path) -> None:
    """Views of the shared directory may be 5 s old. Losses and weights equal those of one process."""
    settings = "checkpoint.keep=9 schedule.name=constant"
    train(shards, tmp_path / "one", f"{settings} schedule.steps=12", nproc=1, OMP_NUM_THREADS="1")
    views = [tmp_path / "view0", tmp_path / "view1"]
    with stale_views(tmp_path / "shared", *views), Cluster() as cluster:
        places = [view / "run" for view in views]
        ended(cluster.train(shards, places, f"{settings} schedule.steps=4"), 0)
        resume_run(tmp_path / "shared" / "run", "schedule.steps=8")
        outputs = ended(cluster.train(shards, places, f"{settings} schedule.steps=12"), 0)
        assert "resuming from step-00000008" in outputs[0]
        assert_equal(tmp_path / "one", tmp_path / "shared" / "run", 1e-5, 1e-4, step=12)


def test_torchrun_on_two_nodes_writes_a_complete_run(shards: Path, tmp_path: Path) -> None:
    """The command is taken from docs/cluster.md."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    (line,) = re.findall(r"^torchrun (.*)$", page, re.MULTILINE)
    config, run_dir = write_config(tmp_path / "made", shards, "compile=off"), tmp_path / "run"
    changes = {"8": "1", "own.yaml": str(config), "/shared/runs/own": str(run_dir)}
    words = [changes.get(word, word) for word in line.split()]
    with Cluster() as cluster:
        start = [sys.executable, "-P", "-m", "torch.distributed.run"]
        start += [cluster.address(0) if word == "10.0.0.1" else word for word in words]
        at = start.index("--node-rank") + 1
        environ = {"GLOO_SOCKET_IFNAME": "data"}  # because host names cannot be resolved
        started = [cluster.start(k, *start[:at], str(k), *start[at + 1 :], **environ) for k in (0, 1)]
        outputs = ended(started, 0)
    assert "step 2 |" in outputs[0]
    assert "step 2 |" not in outputs[1]
    assert (run_dir / "report.html").exists()
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["world_size"]) == ("done", 2)


@pytest.mark.skipif(not FULL, reason="20 runs are part of make nodes")
def test_stale_views_do_not_end_a_run(shards: Path, tmp_path: Path) -> None:
    """Every second run resumes the run before it as soon as that has ended."""
    views = [tmp_path / "view0", tmp_path / "view1"]
    with stale_views(tmp_path / "shared", *views), Cluster() as cluster:
        for k in range(2 * ROUNDS):
            places = [view / f"run-{k // 2}" for view in views]
            ended(cluster.train(shards, places, f"schedule.steps={2 + 2 * (k % 2)}"), 0)


def test_a_directory_that_is_not_shared_is_refused(shards: Path, tmp_path: Path) -> None:
    """The refusal comes after 45 s, in CI after 2 s."""
    path = with_site(tmp_path, "" if FULL else "from bert_dp.files import io; io.STALE_S = 2.0")
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    with Cluster() as cluster:
        began = time.monotonic()
        outputs = ended(cluster.train(shards, places, PYTHONPATH=path), 2)
    assert time.monotonic() - began < 60
    assert all("--run-dir: node 1 (host1) does not see node 0's files" in text for text in outputs), outputs
