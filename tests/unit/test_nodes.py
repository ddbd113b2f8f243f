"""Tests of a launcher's place among nodes, from options or environment, and of node 0's refusals."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import Issue
from bert_dp.config.schema import MAX_SECONDS
from bert_dp.files.models import Failure, RunMemory
from launcher import results
from launcher.run import nodes, peers
from launcher.run.nodes import Place, find_place, first_host
from launcher.watch.failure import RankExit, RanksEnded
from tests.e2e.cli import here, tiny, wait_for
from tests.helpers import issues_of, raised_issues

STEP = {"NUM_NODES": "2", "NUM_TASKS": "2", "NODELIST": "192.0.2.[7-8]"}
SLURM = {f"SLURM_STEP_{name}": value for name, value in STEP.items()}
SLURM |= {"SLURM_NODEID": "1", "SLURM_JOB_ID": "16001"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "192.0.2.7", "PET_MASTER_PORT": "1234"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "192.0.2.7\n192.0.2.8"}
NONE: dict[str, str] = {}
Options = tuple[int | None, int | None, str | None, str | None]
NOTHING: Options = (None, None, None, None)


@pytest.mark.parametrize(
    ("options", "environ", "place"),
    [
        (NOTHING, NONE, None),
        ((1, 0, "192.0.2.7:1", None), SLURM, None),
        (NOTHING, {**SLURM, "SLURM_STEP_NUM_NODES": "1"}, None),
        (NOTHING, {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, None),  # in a batch script, not in a step
        (NOTHING, {"PET_NNODES": "1"}, None),
        ((2, 1, "192.0.2.7:1234", "lo"), NONE, (2, 1, "192.0.2.7", 1234)),
        ((None, None, None, "lo"), SLURM, (2, 1, "192.0.2.7", 15001)),
        ((None, None, None, "lo"), PET, (2, 1, "192.0.2.7", 1234)),
        ((None, None, None, "lo"), {**PET, "PET_NPROC_PER_NODE": "gpu"}, (2, 1, "192.0.2.7", 1234)),
        ((None, None, None, "lo"), SKYPILOT, (2, 1, "192.0.2.7", 29400)),
        ((3, 2, None, "lo"), PET, (3, 2, "192.0.2.7", 1234)),
        ((None, None, "192.0.2.9:9", "lo"), {**PET, **SKYPILOT}, (2, 1, "192.0.2.9", 9)),
    ],
)
def test_options_override_the_variables_of_a_cluster(
    options: Options, environ: dict[str, str], place: tuple[int, int, str, int] | None
) -> None:
    found = find_place(*options, environ)
    assert found == (None if place is None else Place(*place, "lo"))


@pytest.mark.parametrize(("nproc", "ranks"), [((), 6), (("--nproc", "1"), 2)])
def test_kubeflow_sets_the_ranks_per_node(
    shards: Path, tmp_path: Path, nproc: tuple[str, ...], ranks: int
) -> None:
    words = ["train", "quickstart", *tiny(shards, "batch.global_size=12"), "--dry-run", "--interface", "lo"]
    environ = {**PET, "PET_NPROC_PER_NODE": "3"}
    done = here(*words, "--run-dir", str(tmp_path / "run"), *nproc, **environ)
    assert f"x dp {ranks} =" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "environ", "setting", "kind"),
    [
        ((None, 1, None, None), NONE, "--nnodes", "missing"),
        ((2, None, "192.0.2.7:1", None), NONE, "--node-rank", "missing"),
        ((2, 0, None, None), NONE, "--rendezvous", "missing"),
        ((2, 2, "192.0.2.7:1", None), NONE, "--node-rank", "out_of_range"),
        ((2, -1, "192.0.2.7:1", None), NONE, "--node-rank", "out_of_range"),
        ((2, 0, "192.0.2.7", None), NONE, "--rendezvous", "wrong_type"),
        ((2, 0, "no.such.host.invalid:1", None), NONE, "--rendezvous", "not_found"),
        ((2, 0, "localhost:1", None), NONE, "--rendezvous", "unsupported"),
        ((2, 0, "0.0.0.0:1", None), NONE, "--rendezvous", "unsupported"),
        ((2, 0, "192.0.2.7:1", "none0"), NONE, "--interface", "not_found"),
        (NOTHING, {**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, "srun", "conflict"),
        (NOTHING, {**PET, "PET_NNODES": "1:4"}, "--nnodes", "wrong_type"),
        (NOTHING, {**PET, **SKYPILOT, "PET_NODE_RANK": "0"}, "--nnodes", "conflict"),
    ],
)
def test_an_invalid_place_among_nodes_is_refused(
    options: Options, environ: dict[str, str], setting: str, kind: str
) -> None:
    (issue,) = raised_issues(find_place, *options, environ)
    assert (issue.setting, issue.kind, bool(issue.hint)) == (setting, kind, True)


def test_the_first_host_is_read_from_slurms_node_list() -> None:
    lists = {"node1": "node1", "node[01-03,7],gpu2": "node01", "a,b": "a", "r[1-2]-x.org": "r1-x.org", "": ""}
    assert {names: first_host(names) for names in lists} == lists


def test_the_default_interface_is_on_the_route_to_node_0() -> None:
    assert nodes._interface(None, "127.0.0.1") == "lo"


# --- node 0 and another node, on one machine


def hello(rank: int, **changes: Any) -> dict[str, Any]:
    facts = {"rank": rank, "nodes": 2, "host": f"h{rank}", "nproc": 1, "gpus": False, "issues": []}
    return {**facts, "versions": {"torch": "2"}, "config": {"optim": {"lr": 1.0}}, **changes}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(peers, "ARRIVE_S", 1.0)
    monkeypatch.setattr(peers, "REFUSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return Place(2, 0, "127.0.0.1", port, "lo")


@pytest.mark.parametrize(
    ("nodes", "others", "words"),
    [
        (2, [{"gpus": True}], "run.device: GPUs on node 1 (h1) and CPU cores on node 0"),
        (2, [{"nodes": 3}], "--nnodes: 3 on node 1 (h1) and 2 on node 0"),
        (2, [{"issues": [Issue("--nproc", "out_of_range", "no").to_json()]}], "--nproc: no"),
        (3, [{}], "--nnodes: node 2 did not connect within 1 s"),
        (3, [{}, {"host": "g"}], "--node-rank: 1 was passed on two nodes, "),
    ],
)
def test_refusals_of_node_0_are_reported_on_every_node(
    place: Place, tmp_path: Path, nodes: int, others: list[dict[str, Any]], words: str
) -> None:
    place = place._replace(nodes=nodes)
    answers: list[Future[str]] = []

    def follow(changes: dict[str, Any]) -> str:
        member = peers.join(place, tmp_path, hello(1, **{"nodes": nodes, **changes}), 30.0)
        (issue,) = (member.next() or {})["issues"]
        member.link.close()
        return f"{issue['setting']}: {issue['message']}"

    def coordinate() -> None:
        with peers.coordinating(place, tmp_path, print, 30.0) as coordinator:
            answers.extend(pool.submit(follow, changes) for changes in others)
            coordinator.gather(hello(0, nodes=nodes))

    with ThreadPoolExecutor() as pool:
        (refusal,) = issues_of(coordinate)
    for line in (refusal, *(each.result() for each in answers)):
        assert line.startswith(words)
    assert not list(tmp_path.glob(".nodes-*"))


@contextlib.contextmanager
def two_nodes(
    place: Place, run_dir: Path, act: Callable[[peers.Member], None]
) -> Iterator[peers.Coordinator]:
    """Yield node 0's coordinator after node 1 has joined. A thread runs `act` as node 1."""

    def follow() -> None:
        member = peers.join(place, run_dir, hello(1), 30.0)
        act(member)
        assert member.next() is not None
        member.link.close()

    with ThreadPoolExecutor() as pool, peers.coordinating(place, run_dir, print, 30.0) as coordinator:
        followed = pool.submit(follow)
        coordinator.gather(hello(0))
        yield coordinator
    followed.result()


def test_the_node_that_failed_first_is_named_by_the_clock_of_node_0(place: Place, tmp_path: Path) -> None:
    """Node 1's clock is 1,000 s ahead."""
    ahead_ns, now_ns = 10**12, time.monotonic_ns()
    memory = RunMemory(oom_kills=0, counter="")
    ours = RanksEnded(code=1, failed_ns=now_ns, said="", log="", errors=[], exits=[], memory=memory)
    error, rank_exit = Failure(message="no", rank=1, time_ns=now_ns - 7), RankExit(1, 1, now_ns - 5)
    theirs = ours.model_copy(update={"failed_ns": now_ns - 3, "errors": [error], "exits": [rank_exit]})

    def report(member: peers.Member) -> None:
        ended, there_ns = theirs.by_clock(-ahead_ns), time.monotonic_ns() + ahead_ns
        member.link.send("ended", attempt=0, ended=results.plain(ended), now_ns=there_ns)

    with two_nodes(place, tmp_path, report) as coordinator:
        ended = coordinator.collect(ours)
        unknown = Failure(message="torchrun", kind="no_cause")
        found = (coordinator.blame(cause, unknown, k) for cause, k in ((None, 1), (error, 0), (None, 0)))
        named = [(cause and cause.headline(), node) for cause, node in found]
    assert named == [("node 1 (h1): torchrun", 1), ("rank 1 on node 1 (h1): no", 1), (None, 0)]
    assert ended[0] == ours
    late_ns = (ended[1].failed_ns or 0) - now_ns + 3  # the delay of the message
    assert 0 <= late_ns < 10**10
    assert ended[1] == theirs.by_clock(-late_ns)


def test_a_remote_rank_that_leaves_before_the_summary_has_failed(place: Place, tmp_path: Path) -> None:
    """The exit code does not matter. A completed run writes its summary before its ranks leave."""

    def leave(member: peers.Member) -> None:
        member.link.status = {"attempt": 0}
        member.exchange(False, 0, left=True)

    with two_nodes(place, tmp_path, leave) as coordinator:
        wait_for(lambda: coordinator.exchange(False, 0, left=False).failed, 10)
        (tmp_path / "summary.json").touch()
        assert not coordinator.exchange(False, 0, left=False).failed


def test_a_sender_waits_at_most_until_a_node_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side reads nothing, like a cut link. The longest limit is MAX_SECONDS."""
    monkeypatch.setattr(peers, "SUSPENDED_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        patient, link = (
            peers.Link(socket.create_connection(server.getsockname()), limit_s)
            for limit_s in (MAX_SECONDS, 1.0)
        )
        link.start(lambda message: None)
        link.send("evidence", ranks="x" * 2**26)
    assert "node 1 is lost: no message for" in str(link.lost("node 1"))
    assert patient.lost("node 1") is None


def test_a_server_that_is_not_node_0_is_refused(place: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", place.port)) as server:

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b'{"kind": "challenge", "nonce": "", "file": "../../etc/passwd"}\n')

        with ThreadPoolExecutor() as pool:
            pool.submit(greet)
            (issue,) = raised_issues(peers.join, place, tmp_path, hello(1), 30.0)
    assert (issue.setting, issue.kind) == ("--rendezvous", "conflict")
