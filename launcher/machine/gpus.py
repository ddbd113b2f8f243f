"""The GPUs of this machine: all, and those that a worker will see. Torch-free.

Every function that reads kernel files takes `root`, the directory that holds proc/ and sys/.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import shutil
from pathlib import Path

from launcher.children import run_command

ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Gpu:
    index: int
    """Position among the devices of the machine, before CUDA_VISIBLE_DEVICES."""
    name: str
    memory_gib: float | None
    driver: str | None
    numa_node: int | None = None
    """None = the kernel does not know it."""
    free_gib: float | None = None
    """What other processes left of it; None = not known."""


def num_gpus(root: Path = ROOT) -> int:
    """GPUs that a worker will see, CUDA_VISIBLE_DEVICES respected, without importing torch."""
    return len(find_gpus(root)[0])


def find_gpus(root: Path) -> tuple[list[Gpu], int, str | None]:
    """Visible GPUs, the number present, and why nvidia-smi failed. Falls back to the driver's own list."""
    devices: list[tuple[Gpu, str]] = []  # with the UUID, which CUDA_VISIBLE_DEVICES may name
    divided: list[bool] = []  # by MIG
    error: str | None = None
    if shutil.which("nvidia-smi"):
        facts = "index,uuid,name,memory.total,memory.free,driver_version,pci.bus_id,mig.mode.current"
        output, error = run_command(
            ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader,nounits"], 8
        )
        for row in csv.reader((output or "").splitlines(), skipinitialspace=True):
            if len(row) == 8 and row[0].isdigit():
                total, free = (float(mib) / 1024 if mib.isdigit() else None for mib in row[3:5])
                gpu = Gpu(int(row[0]), row[2], total, row[5], _numa_node(root, row[6]), free)
                devices.append((gpu, row[1]))
                divided.append(row[7] == "Enabled")
    if not devices:
        devices = _driver_gpus(root)
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    if divided and all(divided) and selection is None:  # CUDA then shows one instance
        return [_instance(devices[0][0])], len(devices), error
    return _visible(devices, selection), len(devices), error


def _instance(gpu: Gpu) -> Gpu:
    """A part of a GPU, whose memory is not known."""
    return dataclasses.replace(gpu, name=f"{gpu.name} (MIG)", memory_gib=None, free_gib=None)


def _numa_node(root: Path, address: str) -> int | None:
    """NUMA node of a PCI device; nvidia-smi writes its domain with 8 digits, sysfs with 4."""
    path = root / "sys/bus/pci/devices" / address.lower()[-len("0000:00:00.0") :] / "numa_node"
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None  # -1 = not known


def _driver_gpus(root: Path) -> list[tuple[Gpu, str]]:
    driver = re.search(r"Module\s+([\d.]+)", read_text(root / "proc/driver/nvidia/version"))
    devices = []
    for index, folder in enumerate(sorted((root / "proc/driver/nvidia/gpus").glob("*"))):
        facts = dict(
            line.split(":", 1) for line in read_text(folder / "information").splitlines() if ":" in line
        )
        name, uuid = facts.get("Model", "NVIDIA GPU").strip(), facts.get("GPU UUID", "").strip()
        gpu = Gpu(index, name, None, driver and driver[1], _numa_node(root, folder.name))
        devices.append((gpu, uuid))
    return devices


def _visible(devices: list[tuple[Gpu, str]], selection: str | None) -> list[Gpu]:
    """CUDA's rule: devices by index, UUID or prefix of one, up to the first entry that names none."""
    if selection is None:
        return [gpu for gpu, _ in devices]
    chosen: list[Gpu] = []
    for entry in (e.strip() for e in selection.split(",")):
        if entry.startswith("MIG-") and devices:
            named = [_instance(devices[0][0])]
        elif entry.startswith("GPU-"):
            named = [gpu for gpu, uuid in devices if uuid.startswith(entry)]
        else:
            named = [gpu for gpu, _ in devices if str(gpu.index) == entry]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return chosen


def read_text(path: Path) -> str:
    """Of a kernel file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
