"""`bert-dp doctor` over two nodes: what differs, the clocks, and the rate of a link that is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.cli import command
from tests.nodes.harness import PORT, Cluster, Started, ended, needs_nodes, run
from tests.shards import write_shards

pytestmark = [pytest.mark.slow, needs_nodes]


def doctor(cluster: Cluster, run_dir: Path, data: list[Path]) -> list[Started]:
    place = ["--nnodes", "2", "--rendezvous", f"{cluster.address(0)}:{PORT}", "--run-dir", str(run_dir)]
    words = command("doctor", *place)
    return [cluster.start(k, *words, "--node-rank", str(k), "--data", str(data[k])) for k in (0, 1)]


def test_doctor_compares_two_nodes_and_measures_their_link(tmp_path: Path, shards: Path) -> None:
    """At 100 Mbit/s."""
    with Cluster() as cluster:
        for name in cluster.names:
            shape = "qdisc add dev data root tbf rate 100mbit burst 256kb latency 100ms".split()
            run("tc", "-n", name, *shape)
        said, _ = ended(doctor(cluster, tmp_path, [shards, shards]), 0)
    assert "the same versions" in said
    assert re.search(r"clock of node 1 \(host1\): [+-]\d+ ms ± \d+ ms", said)
    rate = re.search(r"all-reduce with node 1 \(host1\): gloo, 4 MiB at ([\d.]+) MB/s over data", said)
    assert rate, said
    assert 10.0 <= float(rate[1]) <= 12.5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".nodes")] == []


def test_doctor_refuses_other_data_on_every_node(tmp_path: Path, shards: Path) -> None:
    other = write_shards(tmp_path / "other", seed=1)
    with Cluster() as cluster:
        for said in ended(doctor(cluster, tmp_path, [shards, other]), 2):
            assert re.search(r"error: data: \w{16} on node 1 \(host1\) and \w{16} on node 0", said), said
