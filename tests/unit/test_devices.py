"""Test the choice of device and cores for a rank, and the measurement of memory and energy."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.training import devices
from bert_dp.training.devices import HostAndDevice, Placement, choose_device, joules, set_affinity
from bert_dp.training.process import World
from tests.helpers import raised_issues, write_files
from tests.tensors import CPU

LONE = World(0, 0, 1, 1)
GPU = torch.device("cuda", 0)


def test_each_rank_gets_its_own_gpu_and_additional_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", World(1, 1, 2, 2)) == CPU
    (issue,) = raised_issues(choose_device, "cuda", LONE)
    assert (issue.setting, issue.value) == ("run.device", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", World(1, 1, 2, 2)) == torch.device("cuda", 1)
    assert choose_device("cpu", World(5, 5, 8, 8)) == CPU
    for rank in range(4):  # also ranks that have a GPU, because they would wait for the others
        (issue,) = raised_issues(choose_device, "auto", World(rank, rank, 4, 4))
        assert (issue.setting, issue.other) == ("run.device", "--nproc")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in range(4):  # each task sees its own GPU as number 0 (srun --gpus-per-task=1, --gpu-bind)
        assert choose_device("cuda", World(rank, rank, 4, 4)) == GPU


def test_a_gpu_rank_enables_expandable_segments_unless_the_user_configures_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variable is set before CUDA starts, because the allocator reads it only once."""
    at_start: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: at_start.append(dict(os.environ)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for environ in ({}, {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}):
        monkeypatch.setattr(os, "environ", dict(environ))
        choose_device("auto", LONE)
        expected = environ or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert (os.environ, at_start.pop()) == (expected, expected)
    monkeypatch.setattr(os, "environ", {})
    choose_device("cpu", LONE)
    assert (os.environ, at_start) == ({}, [])


def machine(root: Path) -> Path:
    """Write the sysfs files of three GPUs and two nodes, each with four cores of two threads."""
    texts = {"node/node0/cpulist": "0-3,8-11", "node/node1/cpulist": "4-7,12-15"}
    for core in range(16):
        texts[f"cpu/cpu{core}/topology/thread_siblings_list"] = f"{core % 8},{core % 8 + 8}"
    files = {f"sys/devices/system/{name}": f"{text}\n" for name, text in texts.items()}
    nodes = {"0000:1a:00.0": 0, "0001:e3:00.0": 1, "0000:0a:00.0": -1}
    gpus = {f"sys/bus/pci/devices/{address}/numa_node": f"{node}\n" for address, node in nodes.items()}
    return write_files(root, files | gpus)


def test_the_topology_is_read_from_sysfs(tmp_path: Path) -> None:
    nodes = {0: [0, 8, 1, 9, 2, 10, 3, 11], 1: [4, 12, 5, 13, 6, 14, 7, 15]}
    assert devices.cores_by_node(set(range(16)), machine(tmp_path)) == nodes
    assert devices.cores_by_node({3, 1}, tmp_path / "nothing") == {0: [1, 3]}
    addresses = ("0001:E3:00.0", "0000:ff:00.0", "0000:0a:00.0")
    assert [devices.pci_node(address, tmp_path) for address in addresses] == [1, None, None]


QUARTERS = ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
HALVES = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


@pytest.mark.parametrize(
    ("allowed", "wanted", "shares"),
    [
        # CPU ranks stay within a node and share no physical core
        (range(16), [None], (tuple(range(16)),)),
        (range(16), [None] * 2, HALVES),
        (range(16), [None] * 4, QUARTERS),
        (range(2), [None] * 3, ((), (), ())),
        # GPU ranks share the cores of their GPU's node
        (range(16), [0, 0, 1, 1], QUARTERS),
        (range(16), [0, 1], HALVES),
        ((0, 4, 5), [0, 0, 1], ((0,), (0,), (4, 5))),  # fewer cores than ranks
        (range(2), [1, 0], ((), (0, 1))),  # no core of node 1 is allowed
    ],
)
def test_cores_are_divided_between_ranks(tmp_path: Path, allowed: Any, wanted: Any, shares: Any) -> None:
    assert devices.core_shares(devices.cores_by_node(set(allowed), machine(tmp_path)), wanted) == shares


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 9), st.integers(1, 4))
def test_shares_are_equal_disjoint_and_allowed(allowed: set[int], ranks: int, nodes: int) -> None:
    by_node: dict[int, list[int]] = {}
    for core in allowed:
        by_node.setdefault(core * nodes // 64, []).append(core)
    shares = devices.core_shares(by_node, [None] * ranks)
    taken = [c for share in shares for c in share]
    assert {len(share) for share in shares} == {len(allowed) // ranks}
    assert len(taken) == len(set(taken))
    assert set(taken) <= allowed


@given(st.sets(st.integers(0, 300)))
def test_core_lists_survive_a_round_trip_through_the_kernel_format(cores: set[int]) -> None:
    assert devices.parse_cores(devices.format_cores(cores)) == sorted(cores)


def test_a_rank_is_bound_to_the_cores_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    root, gpus = machine(tmp_path), ["0000:1a:00.0", "0001:e3:00.0"]
    assert devices.bind(1, 2, gpus, root).shares == HALVES
    assert bound == [HALVES[1]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})  # none is near the second GPU
    assert devices.bind(1, 2, gpus, root) == Placement(((0, 1, 2, 3), ()), 2)
    assert len(bound) == 1, "a rank without a share must not be bound and gets an equal part of the threads"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell them apart")
def test_a_rank_bound_by_its_starter_keeps_its_cores() -> None:
    code = (
        "import os; from bert_dp.training.devices import bind\n"
        "mine = os.sched_getaffinity(0); placed = bind(0, 2)\n"
        "assert os.sched_getaffinity(0) == mine, placed; print(*map(set, placed.shares))"
    )
    one = min(os.sched_getaffinity(0))
    run = f"os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {code!r}])"
    starter = f"import os; os.sched_setaffinity(0, [{one}]); {run}"
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{{{one}}}", done.stderr


def test_a_gpu_rank_queries_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank cannot see the GPUs of other ranks; it receives their addresses."""
    placed = mock.Mock(return_value=Placement(((0,), (1,)), 1))

    def properties(index: int) -> Any:
        assert index == 0, "no such device"
        return SimpleNamespace(pci_domain_id=10, pci_bus_id=0x1B, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(devices, "bind", placed)
    mine = devices.own_host_and_device(GPU)
    assert mine.gpu == "000a:1b:00.0"
    other = dataclasses.replace(mine, gpu="0000:1a:00.0")
    elsewhere = HostAndDevice("n2/2", "0000:1a:00.0")
    namesake = dataclasses.replace(other, node=f"{mine.node.partition('/')[0]}/another boot")
    set_affinity(GPU, World(2, 1, 4, 2), [elsewhere, other, mine, namesake])
    set_affinity(GPU, LONE)
    of_two, alone = (1, 2, ["0000:1a:00.0", "000a:1b:00.0"]), (0, 1, ["000a:1b:00.0"])
    assert placed.call_args_list == [mock.call(*of_two), mock.call(*alone)]


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), (" 2 ", 2), ("4,2", 4), ("1", 1), ("", None), ("0", None), ("-1", None), ("x", None)],
)
def test_omp_num_threads_is_a_limit_if_it_is_a_number_above_0(value: str, threads: int | None) -> None:
    assert devices.omp_threads({"OMP_NUM_THREADS": value}) == threads
    under_torchrun = {"OMP_NUM_THREADS": value, "TORCHELASTIC_RUN_ID": "none"}
    assert devices.omp_threads(under_torchrun) == (None if threads == 1 else threads), "torchrun's default"


@pytest.mark.parametrize(("given", "allowed", "threads"), [(8, 4, 4), (2, 4, 2), (4, 1, 1)])
def test_threads_are_limited(monkeypatch: pytest.MonkeyPatch, given: int, allowed: int, threads: int) -> None:
    """OMP_NUM_THREADS limits the threads on any device, even if the rank has more cores."""
    set_to: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", str(allowed))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(given)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mine: None)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for device, places in ((CPU, []), (GPU, [HostAndDevice("n1/1", "0000:1a:00.0")])):
        assert set_affinity(device, LONE, places).threads == threads
    assert set_to == [threads] * 2


def test_a_cpu_rank_keeps_the_memory_that_tensors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In glibc, M_MMAP_MAX is -4 and M_TRIM_THRESHOLD is -1."""
    libc = mock.Mock()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(devices, "bind", lambda *_: Placement(((0,),), 1))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    set_affinity(CPU, LONE)
    set_affinity(GPU, LONE, [HostAndDevice("n1/1", "0000:1a:00.0")])
    assert libc.mallopt.call_args_list == [mock.call(-4, 0), mock.call(-1, -1)]
    del libc.mallopt  # a libc without mallopt
    set_affinity(CPU, LONE)


def test_peak_memory_in_gib_is_resident_on_cpu_and_reserved_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**20))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    assert (devices.peak_memory_gib(CPU), devices.peak_memory_gib(GPU)) == (3.0, 5.0)


def test_joules_are_none_without_an_energy_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = ModuleType("pynvml")
    driver.NVMLError = type("NVMLError", (Exception,), {})
    driver.nvmlInit = lambda: None
    driver.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    driver.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=[12_500, driver.NVMLError("old GPU")])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert (joules(GPU), joules(GPU)) == (12.5, None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # no package
    assert (joules(GPU), joules(CPU)) == (None, None)
