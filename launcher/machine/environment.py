"""What machine is this: `probe`, which is environment.json.

Torch-free. Every function that reads kernel files takes `root`, the directory that holds proc/ and sys/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import psutil

from bert_dp.config import bf16_units, cpu_field
from bert_dp.cost import GIB
from launcher.children import run_command
from launcher.machine.gpus import ROOT, Gpu, find_gpus, read_text
from launcher.redact import redact_argv

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
class Environment:
    """The machine as this process may use it; `dataclasses.asdict` of it is environment.json."""

    date: str
    command: list[str]
    platform: str
    kernel: str
    python: str
    cpu_model: str
    bf16_units: tuple[str, ...]
    """Flags of its units that multiply bf16; without any bf16 is emulated."""
    physical_cores: int | None
    logical_cores: int
    affinity_cores: int
    cpu_quota_cores: float | None
    """Limit of the control group; None = no limit."""
    numa_nodes: int
    numa_cores: dict[str, int]
    """NUMA node -> cores of it that this process may use."""
    memory_gib: float
    memory_available_gib: float
    memory_limit_gib: float | None
    swap_used_gib: float
    shm_gib: float | None
    shm_free_gib: float | None
    disk_free_gib: float | None
    open_files: int
    max_processes: int | None
    """Of this user or of the control group, whichever is less, threads included; None = no limit."""
    locked_memory_gib: float | None
    """None = no limit."""
    omp_num_threads: str | None
    cuda_visible_devices: str | None
    gpus: tuple[Gpu, ...]
    gpus_present: int
    """Devices of the machine, the ones hidden by CUDA_VISIBLE_DEVICES included."""
    gpu_error: str | None
    """Why nvidia-smi did not answer."""
    gpu_topology: str | None
    versions: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None

    @property
    def usable_cores(self) -> float:
        """Cores that this process may use: affinity and control-group quota, whichever is less."""
        return min(float(self.affinity_cores), self.cpu_quota_cores or float("inf"))

    @property
    def names_absent_gpus(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES asks for GPUs and none can be used; empty or -1 asks for none."""
        return not self.gpus and (self.cuda_visible_devices or "").strip() not in ("", "-1")

    @property
    def usable_memory_gib(self) -> float:
        """Upper bound of what a run can still get: the memory available, capped by the control group."""
        return min(self.memory_available_gib, self.memory_limit_gib or float("inf"))

    def rank_memory(self, ranks: int, on_gpu: bool) -> tuple[float | None, str]:
        """GiB that each of `ranks` may have (None = not known), and of what: the GPU with least of it free,
        or a share of the host."""
        if not on_gpu:
            return self.usable_memory_gib / ranks, f"this machine / {ranks} ranks"
        rooms = [
            (gpu.memory_gib if gpu.free_gib is None else gpu.free_gib, gpu.index, gpu.memory_gib)
            for gpu in self.gpus[:ranks]
            if gpu.memory_gib is not None
        ]
        if not rooms:
            return None, "the GPUs"
        free, index, total = min(rooms)
        return free, f"free of the {total:.1f} GiB of GPU {index}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-able object, for `record.write_json`."""
        return {**dataclasses.asdict(self), "usable_cores": self.usable_cores}


def probe(path: Path = Path(), root: Path = ROOT) -> Environment:
    """The machine, the versions, and the git commit of `path`. Never raises for something that is absent."""
    gpus, present, gpu_error = find_gpus(root)
    numa_cores = _numa_cores(root)
    processes, locked = (_limit(kind) for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK))
    memory_limit, pids = cgroup_limit(root, "memory"), cgroup_limit(root, "pids")
    memory = psutil.virtual_memory()
    shm = _disk(root / "dev/shm")
    disk = _disk(existing(path))
    git = ["git", "-C", str(existing(path))]
    commit = run_command([*git, "rev-parse", "HEAD"], 2)[0]
    status = run_command([*git, "status", "--porcelain"], 2)[0] if commit else None
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=redact_argv(sys.argv),
        platform=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        python=platform.python_version(),
        cpu_model=cpu_field("model name", root) or platform.machine(),
        bf16_units=bf16_units(root),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=os.cpu_count() or 1,
        affinity_cores=len(os.sched_getaffinity(0)),
        cpu_quota_cores=cgroup_limit(root, "cpu"),
        numa_nodes=max(1, len(numa_cores)),
        numa_cores=numa_cores,
        memory_gib=memory.total / GIB,
        memory_available_gib=memory.available / GIB,
        memory_limit_gib=None if memory_limit is None or memory_limit > memory.total else memory_limit / GIB,
        swap_used_gib=psutil.swap_memory().used / GIB,
        shm_gib=shm.total / GIB if shm else None,
        shm_free_gib=shm.free / GIB if shm else None,
        disk_free_gib=disk.free / GIB if disk else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_processes=min((int(n) for n in (processes, pids) if n is not None), default=None),
        locked_memory_gib=None if locked is None else locked / GIB,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(gpus),
        gpus_present=present,
        gpu_error=gpu_error,
        gpu_topology=run_command(["nvidia-smi", "topo", "-m"], 5)[0] if gpus else None,
        versions=versions(),
        git_commit=commit,
        git_dirty=None if status is None else bool(status),
    )


def versions() -> dict[str, str]:
    """Versions of the installed packages that a run depends on."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def cgroup_limit(root: Path, controller: Literal["cpu", "memory", "pids"]) -> float | None:
    """Limit of this process' control group and its ancestors: cores, bytes or processes; None = unlimited."""
    limits = [_own_limit(group, controller) for group in control_groups(root, controller)]
    return min((limit for limit in limits if limit is not None), default=None)


def control_groups(root: Path, controller: Literal["cpu", "memory", "pids"]) -> list[Path]:
    """Directories of this process' control group and its ancestors, outermost first; v1 and v2."""
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


def _limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _disk(path: Path) -> Any:
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def existing(path: Path) -> Path:
    """`path` or its nearest ancestor that exists."""
    path = path.absolute()
    return next((p for p in (path, *path.parents) if p.is_dir()), path)
