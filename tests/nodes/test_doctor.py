"""Test `bert-dp doctor` on two nodes: versions, clocks, and the measured rate of a known link."""

import re
from pathlib import Path

import pytest

from tests.e2e.cli import command
from tests.nodes.harness import FULL, PORT, Cluster, ended, needs_nodes, run

pytestmark = [pytest.mark.slow, needs_nodes]


def test_doctor_compares_two_nodes_and_measures_their_link(tmp_path: Path, shards: Path) -> None:
    """The link is limited to 100 Mbit/s."""
    with Cluster() as cluster:
        for name in cluster.names:
            shape = "qdisc add dev data root tbf rate 100mbit burst 64kb latency 100ms".split()
            run("tc", "-n", name, *shape)
        place = ["--nnodes", "2", "--rendezvous", f"{cluster.address(0)}:{PORT}", "--run-dir", str(tmp_path)]
        words = command("doctor", *place, "--data", str(shards), "--node-rank")
        output, _ = ended([cluster.start(k, *words, str(k)) for k in (0, 1)], 0)
    assert "the same versions" in output
    assert re.search(r"clock of node 1 \(host1\): [+-]\d+ ms ± \d+ ms", output)
    rate = re.search(r"all-reduce with node 1 \(host1\): gloo, 4 MiB at ([\d.]+) MB/s over data", output)
    assert rate, output
    assert (10.0 if FULL else 5.0) <= float(rate[1]) <= 12.5  # a busy machine is slower
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".nodes")] == []
