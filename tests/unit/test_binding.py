"""Which cores a rank gets, on machines made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.training.affinity import (
    Placement,
    Topology,
    bind,
    cpu_shares,
    format_cores,
    gpu_shares,
    omp_threads,
    parse_cores,
    pci_node,
    read_topology,
)

FLAT = Topology({}, {})


def machine(root: Path, nodes: list[str], siblings: dict[int, str], gpus: dict[str, int]) -> Path:
    """sysfs of a machine: cpulist of each node, thread_siblings_list of cores, NUMA node of PCI devices."""
    files = {f"devices/system/node/node{k}/cpulist": cores for k, cores in enumerate(nodes)}
    files |= {f"devices/system/cpu/cpu{c}/topology/thread_siblings_list": s for c, s in siblings.items()}
    files |= {f"bus/pci/devices/{address}/numa_node": str(node) for address, node in gpus.items()}
    for name, text in files.items():
        (root / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / name).write_text(f"{text}\n")
    return root


def two_sockets(root: Path) -> Path:
    """2 x 4 physical cores with two threads each, as Linux numbers them, and four GPUs."""
    pairs = {c: f"{c % 8},{c % 8 + 8}" for c in range(16)}
    gpus = {"0000:1a:00.0": 0, "0000:3d:00.0": 0, "0000:b1:00.0": 1, "0001:e3:00.0": 1}
    return machine(root, ["0-3,8-11", "4-7,12-15"], pairs, gpus)


def test_topology_is_read(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path))
    assert [topology.node[c] for c in (0, 8, 4, 12)] == [0, 0, 1, 1]
    assert topology.ordered(range(16)) == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert pci_node("0001:E3:00.0", tmp_path) == 1
    assert pci_node("0000:ff:00.0", tmp_path) is None
    assert pci_node("0000:0a:00.0", machine(tmp_path, [], {}, {"0000:0a:00.0": -1})) is None
    assert read_topology(tmp_path / "nothing") == FLAT


def test_cpu_ranks_keep_to_a_node_and_to_physical_cores(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path))
    everything = set(range(16))
    assert cpu_shares(everything, 2, topology) == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert cpu_shares(everything, 4, topology) == (
        (0, 1, 8, 9),
        (2, 3, 10, 11),
        (4, 5, 12, 13),
        (6, 7, 14, 15),
    )
    assert cpu_shares(everything, 1, topology) == (tuple(range(16)),)
    # 3 ranks of 5: the nodes hold one each, so one rank has to straddle
    assert len({c for share in cpu_shares(everything, 3, topology) for c in share}) == 15
    # 5 ranks of 2 on 6 + 6 cores: whole shares, and both nodes at work
    nodes = Topology({c: c // 6 for c in range(12)}, {})
    shares = cpu_shares(set(range(12)), 5, nodes)
    assert all(len({nodes.node[c] for c in share}) == 1 for share in shares)
    assert {nodes.node[share[0]] for share in shares} == {0, 1}


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 9), st.integers(1, 4))
def test_shares_are_equal_disjoint_and_allowed(allowed: set[int], ranks: int, nodes: int) -> None:
    topology = Topology({c: c * nodes // 64 for c in range(64)}, {})
    shares = cpu_shares(allowed, ranks, topology)
    taken = [c for share in shares for c in share]
    assert {len(share) for share in shares} == {len(allowed) // ranks}
    assert len(shares) == ranks
    assert len(taken) == len(set(taken))
    assert set(taken) <= allowed


def test_gpu_ranks_share_the_cores_of_their_gpus_node(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path))
    everything = set(range(16))
    four = gpu_shares(everything, [0, 0, 1, 1], topology)
    assert four == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert gpu_shares(everything, [1, 0, 1], topology)[1] == (0, 1, 2, 3, 8, 9, 10, 11)
    assert gpu_shares({0, 4, 5}, [0, 0, 1], topology) == ((0,), (0,), (4, 5))  # fewer cores than ranks
    assert gpu_shares({0, 1}, [1, 0], topology) == ((), (0, 1))  # no core of node 1 is allowed
    assert gpu_shares(everything, [None, None], topology) == cpu_shares(everything, 2, topology)


@given(
    st.sets(st.integers(0, 31), min_size=1), st.lists(st.sampled_from([0, 1, None]), min_size=1, max_size=8)
)
def test_gpu_ranks_never_leave_their_node(allowed: set[int], nodes: list[int | None]) -> None:
    topology = Topology({c: c // 16 for c in range(32)}, {})
    shares = gpu_shares(allowed, nodes, topology)
    for share, node in zip(shares, nodes, strict=True):
        assert set(share) <= allowed
        assert node is None or {topology.node[c] for c in share} <= {node}


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores_are_the_kernels(cores: set[int]) -> None:
    assert parse_cores(format_cores(cores)) == sorted(cores)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(((0, 1), (2, 3)), 2), "cores 0-1 | 2-3"),
        (Placement(((), ()), 1), "cores not bound"),
        (Placement(((), (2, 3)), 1), "cores not bound | 2-3"),
        (Placement(((4, 5),), 2, inherited=True), "cores 4-5 as started"),
    ],
)
def test_a_placement_says_what_it_did(placement: Placement, text: str) -> None:
    assert str(placement) == text


def test_place_binds_by_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    root = two_sockets(tmp_path)
    gpus = ["0000:1a:00.0", "0001:e3:00.0"]
    assert bind(1, 2, gpus, root).shares[1] == (4, 5, 6, 7, 12, 13, 14, 15)
    assert bound == [(4, 5, 6, 7, 12, 13, 14, 15)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})  # none of them near the second
    assert bind(1, 2, gpus, root) == Placement(((0, 1, 2, 3), ()), 2)
    assert len(bound) == 1, "a rank without a share is not bound, and its threads are an equal part"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell them apart")
def test_a_rank_that_was_bound_by_its_starter_keeps_its_cores() -> None:
    code = (
        "import os, sys; from bert_dp.training.affinity import bind\n"
        "mine = os.sched_getaffinity(0); placed = bind(0, 2)\n"
        "assert os.sched_getaffinity(0) == mine, placed; print(placed.inherited, len(placed.shares[0]))"
    )
    one = min(os.sched_getaffinity(0))
    run = f"os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {code!r}])"
    starter = f"import os; os.sched_setaffinity(0, [{one}]); {run}"
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "1"], done.stderr


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), (" 2 ", 2), ("4,2", 4), ("", None), ("0", None), ("-1", None), ("x", None)],
)
def test_a_limit_of_threads_is_a_number_above_0(value: str, threads: int | None) -> None:
    assert omp_threads({"OMP_NUM_THREADS": value}) == threads
    assert omp_threads({}) is None


TORCHRUN = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHELASTIC_RUN_ID"] = "none"
rank = "import os; from bert_dp.training.affinity import omp_threads; print(omp_threads(os.environ))"
sys.exit(subprocess.run([sys.executable, "-c", rank]).returncode)
"""


@pytest.mark.parametrize(("given", "read"), [(None, "None"), ("1", "1"), ("2", "2")])
def test_torchruns_own_1_is_no_limit_of_the_users(given: str | None, read: str) -> None:
    """A parent that sets the variable where it is not set, as torchrun does."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if given is not None:
        environ["OMP_NUM_THREADS"] = given
    done = subprocess.run(
        [sys.executable, "-c", TORCHRUN], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == read
