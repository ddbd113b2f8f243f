"""Read facts about this machine for environment.json, and predict the precision that ranks will use.

Torch-free. Functions that read kernel files accept `root`, the parent directory of proc/ and sys/.
"""

import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from bert_dp.config import Config, bf16_units, cpu_field, decide_precision
from bert_dp.cost import GIB
from launcher.children import run_command
from launcher.log import masked_command
from launcher.report.formats import count_of

ROOT = Path("/")
PACKAGES = (
    "bert-dp",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "PyYAML",
    "psutil",
    "accelerate",
    "deepspeed",
    "datasets",
    "transformers",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "triton",
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    index: int  # index on the machine, ignoring CUDA_VISIBLE_DEVICES
    name: str
    memory_gib: float | None
    driver: str | None
    numa_node: int | None = None  # None = unknown to the kernel
    free_gib: float | None = None  # memory not used by other processes; None = unknown


@dataclasses.dataclass(frozen=True)
class Environment:
    """Facts about this machine and the resources usable by this process, as stored in environment.json."""

    date: str
    command: list[str]
    platform: str
    kernel: str
    python: str
    cpu_model: str
    bf16_units: tuple[str, ...]  # CPU flags for bf16 multiplication; if empty, bf16 is emulated
    affinity_cores: int
    cpu_quota_cores: float | None  # limit of the control group; None = no limit
    numa_cores: dict[str, int]  # NUMA node -> number of its cores usable by this process
    memory_gib: float
    memory_available_gib: float
    memory_limit_gib: float | None
    shm_gib: float | None
    disk_free_gib: float | None
    max_processes: int | None  # lowest limit of control groups and user; threads count too; None = no limit
    cuda_visible_devices: str | None
    gpus: tuple[Gpu, ...]
    gpus_present: int  # GPUs of the machine, including those hidden by CUDA_VISIBLE_DEVICES
    gpu_error: str | None  # error from nvidia-smi
    gpu_topology: str | None
    versions: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None

    @property
    def usable_cores(self) -> float:
        """Return the number of usable cores: the CPU-affinity count, capped at the cgroup quota."""
        return min(float(self.affinity_cores), self.cpu_quota_cores or float("inf"))

    @property
    def names_absent_gpus(self) -> bool:
        """Return True if CUDA_VISIBLE_DEVICES names GPUs but selects no usable one. "" and "-1" name none."""
        return not self.gpus and (self.cuda_visible_devices or "").strip() not in ("", "-1")

    @property
    def usable_memory_gib(self) -> float:
        """Return the GiB available to a run: free memory, capped at the control group's limit."""
        return min(self.memory_available_gib, self.memory_limit_gib or float("inf"))

    def rank_memory(self, ranks: int, on_gpu: bool) -> tuple[float | None, str]:
        """Return a rank's available memory in GiB (None if unknown) and a text that describes this memory. On
        GPUs, it is the lowest free memory on a rank's GPU; on CPUs, an equal share of usable host memory."""
        if not on_gpu:
            return self.usable_memory_gib / ranks, f"host memory, shared by {count_of(ranks, 'rank')}"
        free = [(gpu.free_gib, gpu) for gpu in self.gpus[:ranks] if gpu.free_gib is not None]
        if not free:
            return None, "the GPUs"
        least, gpu = min(free, key=lambda pair: pair[0])
        return least, f"free on GPU {gpu.index}, which has {gpu.memory_gib:.1f} GiB"

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values for `files.write_json`."""
        return {**dataclasses.asdict(self), "usable_cores": self.usable_cores}


def probe(path: Path = Path(), root: Path = ROOT) -> Environment:
    """Read facts about the machine, package versions and the git commit of `path`. Unknown facts are None."""
    gpus, present, gpu_error = find_gpus(root)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    memory_limit, pids = cgroup_limit(root, "memory"), cgroup_limit(root, "pids")
    memory = psutil.virtual_memory()
    shm = _disk(root / "dev/shm")
    disk = _disk(existing(path))
    git = ["git", "-C", str(existing(path))]
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = run_command([*git, "rev-parse", "HEAD"], 2)[0]
    status = run_command([*git, "status", "--porcelain"], 2)[0] if commit else None
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=masked_command(sys.argv),
        platform=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        python=platform.python_version(),
        cpu_model=cpu_field("model name", root) or platform.machine(),
        bf16_units=bf16_units(root),
        affinity_cores=len(os.sched_getaffinity(0)),
        cpu_quota_cores=cgroup_limit(root, "cpu"),
        numa_cores=_numa_cores(root),
        memory_gib=memory.total / GIB,
        memory_available_gib=memory.available / GIB,
        memory_limit_gib=None if memory_limit is None or memory_limit > memory.total else memory_limit / GIB,
        shm_gib=shm.total / GIB if shm else None,
        disk_free_gib=disk.free / GIB if disk else None,
        max_processes=min(
            (int(n) for n in (processes, pids) if n not in (None, resource.RLIM_INFINITY)), default=None
        ),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(gpus),
        gpus_present=present,
        gpu_error=gpu_error,
        gpu_topology=run_command(["nvidia-smi", "topo", "-m"], 5)[0] if gpus else None,
        versions=versions,
        git_commit=commit,
        git_dirty=None if status is None else bool(status),
    )


def cgroup_limit(root: Path, controller: Literal["cpu", "memory", "pids"]) -> float | None:
    """Return the lowest limit (cores, bytes, processes) of this process's control groups; None = no limit."""
    limits = [_own_limit(group, controller) for group in control_groups(root, controller)]
    return min((limit for limit in limits if limit is not None), default=None)


def control_groups(root: Path, controller: Literal["cpu", "memory", "pids"]) -> list[Path]:
    """List the directories of this process's control group (v1 and v2) and its ancestors, outermost first."""
    groups = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [p for p in path.split("/") if p and p != ".."]
        groups += [mount.joinpath(*parts[:n]) for n in range(len(parts) + 1)]
    return groups


def _own_limit(group: Path, controller: str) -> float | None:
    if controller == "cpu":
        words = read_text(group / "cpu.max").split()
        words = words or [read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) < 2 or not words[0].isdigit() or not words[1].isdigit():  # "max", "-1" or no such file
            return None
        return int(words[0]) / int(words[1])
    text = (read_text(group / f"{controller}.max") or read_text(group / "memory.limit_in_bytes")).strip()
    return float(text) if text.isdigit() and int(text) < 2**60 else None  # v1 writes about 2**63 for no limit


def _numa_cores(root: Path) -> dict[str, int]:
    cores = os.sched_getaffinity(0)
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda n: int(n.name[4:]))
    return {node.name[4:]: sum((node / f"cpu{core}").exists() for core in cores) for node in nodes}


def _disk(path: Path) -> Any:
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def existing(path: Path) -> Path:
    """Return `path` if it is a directory, else its nearest ancestor that is one."""
    path = path.absolute()
    return next((p for p in (path, *path.parents) if p.is_dir()), path)


def find_gpus(root: Path = ROOT) -> tuple[list[Gpu], int, str | None]:
    """Return the visible GPUs, the number of GPUs present and the error from nvidia-smi, if any. If
    nvidia-smi lists no GPU, the kernel driver's list is read instead."""
    devices: list[tuple[Gpu, str]] = []  # (GPU, UUID), because CUDA_VISIBLE_DEVICES may contain UUIDs
    divided: list[bool] = []  # for each GPU: whether MIG divides it into instances
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
    if divided and all(divided) and selection is None:  # CUDA then uses only one instance
        return [_instance(devices[0][0])], len(devices), error
    return _visible(devices, selection), len(devices), error


def _instance(gpu: Gpu) -> Gpu:
    """Return a MIG instance of `gpu`. Its memory is unknown."""
    return dataclasses.replace(gpu, name=f"{gpu.name} (MIG)", memory_gib=None, free_gib=None)


def _numa_node(root: Path, address: str) -> int | None:
    """Return the NUMA node of a PCI device. The PCI domain has 8 digits in nvidia-smi, but 4 in sysfs."""
    path = root / "sys/bus/pci/devices" / address.lower()[-len("0000:00:00.0") :] / "numa_node"
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None  # -1 = unknown


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
    """Select devices by index, UUID or UUID prefix, up to the first invalid entry, as CUDA does."""
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
    """Read a kernel file; return "" if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def process_stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the third (state) onwards, or [] if the process is gone."""
    return read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def precision_of(config: Config, bf16_units: Sequence[str], *, on_gpu: bool, kept: str | None = None) -> str:
    """Predict the precision that the ranks will use. `kept`: precision of the checkpoint to resume from."""
    has_bf16 = on_gpu or bool(bf16_units)  # assume that a GPU has bf16, because only a rank can query it
    engines = [config.parallel.engine]
    return decide_precision(config.precision, engines, on_gpu=on_gpu, has_bf16=has_bf16, kept=kept)
