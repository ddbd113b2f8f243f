"""Input that several nodes cannot use: exit 2 on every node, with the node and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.harness import PORT, Cluster, ended, needs_nodes

pytestmark = needs_nodes


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
        ((1, 1), "parallel.engine=single", ("parallel.engine: single runs one rank", "use ddp")),
    ],
)
def test_what_node_0_refuses_is_told_on_every_node(
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


def test_what_a_node_finds_by_itself_is_refused_there(shards: Path, tmp_path: Path) -> None:
    with Cluster() as cluster:
        script = f"import socket, time; s = socket.create_server(('{cluster.address(0)}', {PORT})); print(s)"
        taken = cluster.start(0, "python3", "-uc", f"{script}; time.sleep(99)")
        taken.wait_for("socket")
        for node, options, words in (
            (0, (), "--rendezvous: node 0 (host0) cannot listen"),
            (1, ("--interface", "eth7"), "--interface: eth7 does not exist on host1; use one of data"),
            (1, ("--rendezvous", "203.0.113.1:1"), "--rendezvous: host1 has no route"),
            (1, ("--launcher", "accelerate"), "--launcher: accelerate"),
            (1, ("--elastic", "--max-restarts", "1"), "--elastic: "),
            (1, ("--allow-code",), "--allow-code: own code runs on one node"),
        ):
            (text,) = ended(cluster.train(shards, tmp_path / "run", options=options, nodes=(node,)), 2, 60)
            assert words in text, text
        assert taken.process.poll() is None
