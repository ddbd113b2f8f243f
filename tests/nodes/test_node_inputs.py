"""Bad input of several nodes: every node exits with 2 and names the node and the fix."""

from pathlib import Path

import pytest

from tests.e2e.test_launchers import with_site
from tests.nodes.harness import PORT, Cluster, ended, needs_nodes
from tests.shards import write_shards

pytestmark = needs_nodes
OTHER_TORCH = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "0.1" if name == "torch" else version(name)
"""


@pytest.mark.parametrize(
    ("nproc", "settings", "words"),
    [
        ((1, 1), "batch.micro_size=8", ("batch.global_size: 8 is not a multiple", "nearest")),
        (
            (3, 1),
            "parallel.tensor=2",
            ("parallel.tensor: ", "node 0 (host0), node 1 (host1)", "multiple of 2"),
        ),
        ((1, 1), "run.device=cuda", ("run.device: ", "no GPU", "run.device=cpu")),
        ((1, 1), "parallel.engine=single", ("parallel.engine: single supports only one rank", "use ddp")),
    ],
)
def test_a_refusal_of_node_0_is_printed_on_every_node(
    shards: Path, tmp_path: Path, nproc: tuple[int, int], settings: str, words: tuple[str, ...]
) -> None:
    with Cluster() as cluster:
        started = [
            *cluster.train(shards, tmp_path / "run", settings, nproc=nproc[0], nodes=(0,)),
            *cluster.train(shards, tmp_path / "run", settings, nproc=nproc[1], nodes=(1,)),
        ]
        for text in ended(started, 2, 120):
            assert all(word in text for word in words), text
            assert "Traceback" not in text


def test_a_problem_of_one_node_is_refused_on_that_node(shards: Path, tmp_path: Path) -> None:
    with Cluster() as cluster:
        script = f"import socket, time; s = socket.create_server(('{cluster.address(0)}', {PORT})); print(s)"
        taken = cluster.start(0, "python3", "-uc", f"{script}; time.sleep(99)")
        taken.wait_for("socket")
        for node, options, words in (
            (0, (), "--rendezvous: node 0 (host0) cannot listen"),
            (0, ("--rendezvous", f"{cluster.address(1)}:9"), "--rendezvous: node 0 (host0) cannot listen"),
            (1, ("--interface", "eth7"), "--interface: eth7 does not exist on host1; use one of data"),
            (1, ("--rendezvous", "203.0.113.1:1"), "--rendezvous: host1 has no route"),
            (1, ("--launcher", "accelerate"), "--launcher: accelerate"),
            (1, ("--elastic", "--max-restarts", "1"), "--elastic: "),
            (1, ("--allow-code",), "--allow-code: your own code is supported on one node only"),
        ):
            (text,) = ended(cluster.train(shards, tmp_path / "run", options=options, nodes=(node,)), 2, 60)
            assert words in text, text
        assert taken.process.poll() is None


@pytest.mark.parametrize(
    ("settings", "before", "code", "words"),
    [
        ("", "mount --bind {other} {shards}", "", ("data: ", "on node 1 (host1)", "use the same shards")),
        ("optim.lr=0.5", "", "", ("optim.lr: 0.5 on node 1 (host1)", "same versions and configuration")),
        ("", "", OTHER_TORCH, ("torch: 0.1 on node 1 (host1)", "same versions and configuration")),
    ],
)
def test_a_difference_between_nodes_is_printed_on_both(
    shards: Path, tmp_path: Path, settings: str, before: str, code: str, words: tuple[str, ...]
) -> None:
    before = before.format(other=write_shards(tmp_path / "other", seed=1), shards=shards)
    with Cluster() as cluster:
        path = with_site(tmp_path, code)
        started = cluster.train(shards, tmp_path / "run", nodes=(0,))
        environ = {"PYTHONPATH": path, "BEFORE": before}
        started += cluster.train(shards, tmp_path / "run", settings, nodes=(1,), **environ)
        for text in ended(started, 2, 120):
            assert all(word in text for word in words), text
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (0, "--nnodes: node 1 did not connect within 2 s"),
        (1, "--rendezvous: node 0 did not answer at 10.77."),
    ],
)
def test_a_node_stops_waiting_for_an_absent_node(shards: Path, tmp_path: Path, node: int, words: str) -> None:
    """The time limit is shortened from 120 s to 2 s."""
    with Cluster() as cluster:
        path = with_site(tmp_path, "from launcher.run import peers; peers.ARRIVE_S = peers.REFUSE_S = 2.0")
        (text,) = ended(cluster.train(shards, tmp_path / "run", nodes=(node,), PYTHONPATH=path), 2, 60)
    assert words in text, text
    assert "check its output" in text
