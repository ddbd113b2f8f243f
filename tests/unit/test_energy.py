"""Joules from a driver's counter, here one of ours."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bert_dp import metrics

GPU = torch.device("cuda", 0)


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


def test_the_counter_is_read_in_joules(driver: ModuleType) -> None:
    assert metrics.joules(GPU) == 12.5


def test_an_old_gpu_has_no_counter(driver: ModuleType) -> None:
    def refuse(handle: str) -> int:
        raise NVMLError("Not Supported")

    driver.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert metrics.joules(GPU) is None


def test_a_cpu_and_a_missing_package_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert metrics.joules(GPU) is None
    assert metrics.joules(torch.device("cpu")) is None
