"""Test faults of ranks, launchers, links and nodes: the named cause, restarts, and remaining processes."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from bert_dp import files
from tests.e2e.cli import step_reached, wait_for
from tests.e2e.test_launchers import with_site
from tests.helpers import read_json
from tests.nodes.harness import Cluster, Started, ended, needs_nodes, observe, rounds, run

pytestmark = needs_nodes
HANG_AFTER_S = 6.0
LONG = f"schedule.steps=100000 checkpoint.every_steps=5 run.hang_after_s={HANG_AFTER_S}"


def listening(cluster: Cluster, node: int) -> list[str]:
    """Return the local address:port of each listening socket."""
    lines = run(*cluster.inside(node, "ss", "-ltnH")).splitlines()
    return [line.split()[3] for line in lines]


def refuses(cluster: Cluster, node: int, host: str, port: str) -> bool:
    script = f"import socket; socket.create_connection(({host!r}, {port}), 2)"
    command = cluster.inside(node, "python3", "-c", script)
    done = subprocess.run(command, capture_output=True, check=False)
    return b"ConnectionRefusedError" in done.stderr


def test_a_run_restarts_after_a_killed_rank_and_a_signal_on_one_node_stops_it(
    shards: Path, tmp_path: Path
) -> None:
    """Each round restarts from a verified checkpoint. Ranks listen on the nodes' own addresses only."""
    run_dir, number = tmp_path / "run", len(rounds())
    with Cluster() as cluster:
        started = cluster.train(shards, run_dir, LONG, options=("--max-restarts", str(number)))
        for k in rounds():
            restarted = f"restart {k + 1} of {number}"
            wait_for(lambda: steps_since_start(started[0], k) >= 7, 240)  # noqa: B023
            if k == 0:
                for node in (0, 1):
                    own = f"{cluster.address(node)}:"
                    heard = listening(cluster, node)
                    assert heard
                    assert all(place.startswith(own) for place in heard), heard
                    other = cluster.address(node, net=78)
                    assert all(refuses(cluster, 1 - node, other, h.rpartition(":")[2]) for h in heard)
            (rank,) = cluster.ranks(1)
            began = time.monotonic()
            rank.send_signal(signal.SIGKILL)
            started[0].wait_for(f"{restarted} in", 5)
            observe("rank killed", seconds=time.monotonic() - began)
            line = next(line for line in started[0].output_text.splitlines() if restarted in line)
            assert "rank 1 on node 1 (host1): killed by signal 9" in line
        wait_for(lambda: steps_since_start(started[0], number) >= 3, 240)
        (rank,) = cluster.ranks(1)
        rank.send_signal(signal.SIGSTOP)
        started[0].wait_for("hang: rank 1 in step", HANG_AFTER_S + 60)
        rank.send_signal(signal.SIGCONT)
        started[0].wait_for("continues after", 60)
        started[1].process.send_signal(signal.SIGTERM)
        ended(started, 128 + signal.SIGTERM)
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["signal"], len(summary["restarts"])) == ("stopped", 15, number)
    assert summary["checkpoint"] == f"checkpoints/{newest(run_dir).name}"
    assert summary["step"] == read_json(newest(run_dir) / "state.json")["step"]


def test_a_signal_on_either_node_stops_both(shards: Path, tmp_path: Path) -> None:
    """CI signals node 0 in this test and node 1 in the test above."""
    for k in rounds(short=1):
        with Cluster() as cluster:
            started = cluster.train(shards, tmp_path / "run", LONG)
            wait_for(lambda: steps_since_start(started[0], min(k, 1)) >= 3, 240)  # noqa: B023
            started[k % 2].process.send_signal(signal.SIGTERM)
            ended(started, 128 + signal.SIGTERM)
            observe("signal on one node")
        summary = read_json(tmp_path / "run" / "summary.json")
        assert summary["checkpoint"] == f"checkpoints/{newest(tmp_path / 'run').name}"


def test_a_signal_before_a_restart_stops_both_nodes(shards: Path, tmp_path: Path) -> None:
    with Cluster() as cluster:
        started = cluster.train(shards, tmp_path / "run", LONG, options=("--max-restarts", "1"))
        wait_for(step_reached(tmp_path / "run", 6), 240)
        cluster.ranks(1)[0].send_signal(signal.SIGKILL)
        started[0].wait_for("restart 1 of 1 in", 30)
        started[1].process.send_signal(signal.SIGTERM)
        ended(started, 128 + signal.SIGTERM)


def steps_since_start(node_0: Started, number: int) -> int:
    """Return the number of steps that node 0 has shown since start `number` resumed."""
    parts = node_0.output_text.split("resuming from")
    return parts[number].count("\nstep ") if len(parts) > number else 0


def newest(run_dir: Path) -> Path:
    found = files.newest_checkpoint_facts(run_dir)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("fault", ["launcher of node 0", "launcher of node 1", "link", "node 1"])
def test_a_lost_node_ends_the_run_everywhere(shards: Path, tmp_path: Path, fault: str) -> None:
    for k in rounds(short=1):
        run_dir = tmp_path / f"run-{k}"
        with Cluster() as cluster:
            started = cluster.train(shards, run_dir, LONG, options=("--max-restarts", "3"))
            wait_for(step_reached(run_dir, 6), 240)
            began = time.monotonic()
            survivors = [0, 1]
            if fault.startswith("launcher"):
                gone = int(fault[-1])
                started[gone].process.send_signal(signal.SIGKILL)
                survivors.remove(gone)
                cluster.assert_empty(15.0)
            elif fault == "link":
                cluster.link(1, "down")
            else:
                cluster.signal(1, signal.SIGSTOP)
                survivors.remove(1)
            for node in survivors:
                name = "node 0 is lost" if node else "node 1 (host1) is lost"
                started[node].wait_for(name, 15.0 if fault.startswith("launcher") else HANG_AFTER_S + 5.0)
            observe(fault, seconds=time.monotonic() - began)
            ended([started[node] for node in survivors], 1, 60)
            if fault == "node 1":
                cluster.signal(1, signal.SIGCONT)
            if fault in ("link", "node 1"):
                cluster.assert_empty(5.0)
            if 0 in survivors:
                failure = read_json(run_dir / "summary.json")["failure"]
                assert failure["kind"] == "node_lost", failure


def test_a_node_whose_torchrun_fails_is_named_with_its_log(shards: Path, tmp_path: Path) -> None:
    """torchrun fails as behind a firewall, where it cannot reach the store."""
    fail = 'import sys; "torch.distributed.run" in sys.orig_argv and sys.exit("no route to the store")'
    path, settings = with_site(tmp_path, fail), f"{LONG} batch.global_size=12"
    with Cluster(3) as cluster:
        started = cluster.train(shards, tmp_path / "run", settings, nodes=(0, 2))
        started += cluster.train(shards, tmp_path / "run", settings, nodes=(1,), PYTHONPATH=path)
        outputs = ended(started, 1)
    assert "node 1 (host1): torchrun: exited with code 1" in outputs[0]
    assert "no route to the store" in outputs[0]
    assert all("failed: node 1 (host1): torchrun" in text for text in outputs[1:])
