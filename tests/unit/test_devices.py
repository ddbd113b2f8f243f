"""The device and the cores of a rank, and what is asked of a device: its memory, its joules."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bert_dp.training import devices
from bert_dp.training.affinity import Placement
from bert_dp.training.devices import HostAndDevice, choose_device, joules, own_host_and_device, set_affinity
from bert_dp.training.process import World
from tests.helpers import issues_of
from tests.tensors import CPU

LONE = World(0, 0, 1, 1)
GPU = torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_devices_of_a_machine_without_a_gpu() -> None:
    assert choose_device("cpu", LONE) == CPU
    assert choose_device("auto", World(1, 1, 2, 2)) == CPU
    (line,) = issues_of(choose_device, "cuda", LONE)
    assert line.startswith("run.device: cuda needs a GPU for each rank of this machine, 1, found 0; use run.")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", World(1, 1, 2, 2)) == torch.device("cuda", 1)
    assert choose_device("cpu", World(5, 5, 8, 8)) == CPU
    for rank in range(4):  # also those for which there is one: they would wait for the others
        (line,) = issues_of(choose_device, "auto", World(rank, rank, 4, 4))
        assert line.startswith(
            "run.device: auto needs a GPU for each rank of this machine, 4, found 2; use --"
        )


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task has its own, and that is number 0 to it: srun --gpus-per-task=1, --gpu-bind."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in range(4):
        assert choose_device("cuda", World(rank, rank, 4, 4)) == GPU


@pytest.mark.parametrize(
    ("setting", "given", "expected"),
    [
        ("auto", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cpu", {}, {}),
        *(("auto", given, given) for given in ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": "x"})),
    ],
)
def test_a_gpu_rank_expands_segments_unless_the_user_has_set_the_allocator(
    monkeypatch: pytest.MonkeyPatch, setting: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    """Before CUDA starts, as its allocator reads the variable once."""
    environment = dict(given)
    at_start: list[dict[str, str]] = []
    monkeypatch.setattr(devices.os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: at_start.append(dict(environment)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    choose_device(setting, LONE)
    assert environment == expected
    assert at_start == ([] if setting == "cpu" else [expected])


def test_a_gpu_rank_asks_for_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other ranks are not visible to it; what they are it is told."""
    calls: list[Any] = []

    def properties(index: int) -> Any:
        assert index == 0, "no such device"
        return SimpleNamespace(pci_domain_id=10, pci_bus_id=0x1B, pci_device_id=0)

    def placed(*arguments: Any) -> Placement:
        calls.append(arguments)
        return Placement(((0,), (1,)), 1)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(devices, "bind", placed)
    mine = own_host_and_device(GPU)
    assert mine.gpu == "000a:1b:00.0"
    other = dataclasses.replace(mine, gpu="0000:1a:00.0")
    elsewhere = HostAndDevice("n2/2", "0000:1a:00.0")
    namesake = dataclasses.replace(other, node=f"{mine.host}/another boot")
    set_affinity(GPU, World(2, 1, 4, 2), [elsewhere, other, mine, namesake])
    set_affinity(GPU, LONE)
    assert calls == [(1, 2, ["0000:1a:00.0", "000a:1b:00.0"]), (0, 1, ["000a:1b:00.0"])]


@pytest.mark.parametrize(("given", "allowed", "threads"), [(8, 4, 4), (2, 4, 2), (4, 4, 4), (4, 1, 1)])
def test_a_rank_has_no_more_threads_than_it_was_allowed(
    monkeypatch: pytest.MonkeyPatch, given: int, allowed: int, threads: int
) -> None:
    """OMP_NUM_THREADS says so, on any device; its share of the cores may be larger."""
    set_to: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", str(allowed))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(given)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mine: None)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for device, places in ((CPU, []), (GPU, [HostAndDevice("n1/1", "0000:1a:00.0")])):
        placed = set_affinity(device, LONE, places)
        assert (placed.threads, placed.limited_by_omp) == (threads, allowed < given)
    assert set_to == [threads] * 2


def test_a_cpu_rank_keeps_the_memory_that_tensors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc's M_MMAP_MAX is -4, M_TRIM_THRESHOLD -1."""
    asked: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(devices, "bind", lambda *_: Placement(((0,),), 1))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    set_affinity(CPU, LONE)
    assert asked == [(-4, 0), (-1, -1)]
    set_affinity(GPU, LONE, [HostAndDevice("n1/1", "0000:1a:00.0")])
    assert len(asked) == 2
    del libc.mallopt  # another libc
    set_affinity(CPU, LONE)


def test_a_deterministic_run_leaves_no_kernel_to_choose_by_timing() -> None:
    flags = torch.backends.cuda, torch.backends.cudnn
    before = flags[0].mem_efficient_sdp_enabled(), flags[0].cudnn_sdp_enabled(), flags[1].deterministic
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        for on in (True, False):
            torch.utils.deterministic.fill_uninitialized_memory = True
            devices.use_device(CPU, deterministic=on)
            assert torch.are_deterministic_algorithms_enabled() is on
            assert flags[1].deterministic is on
            assert not torch.utils.deterministic.fill_uninitialized_memory, "a pass over every new tensor"
            assert (flags[0].mem_efficient_sdp_enabled(), flags[0].cudnn_sdp_enabled()) == (not on, not on)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        flags[0].enable_mem_efficient_sdp(before[0])
        flags[0].enable_cudnn_sdp(before[1])
        flags[1].deterministic = before[2]


def test_peak_memory_is_the_resident_set_or_what_the_allocator_reserved_in_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kib = 3 * 2**20
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=kib))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    assert (devices.peak_memory_gib(CPU), devices.peak_memory_gib(GPU)) == (3.0, 5.0)


class NVMLError(Exception):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake = ModuleType("pynvml")
    fake.NVMLError = NVMLError
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda handle: {"GPU-abc": 12_500}[handle]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return fake


def test_an_old_gpu_has_no_counter(driver: ModuleType) -> None:
    def refuse(handle: str) -> int:
        raise NVMLError("Not Supported")

    driver.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert joules(GPU) is None


def test_a_cpu_and_a_missing_package_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert joules(GPU) is None
    assert joules(CPU) is None
