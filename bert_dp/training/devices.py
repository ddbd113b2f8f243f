"""Choose the device of a rank and its precision; read its address, memory and energy."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bert_dp.config import ConfigError, Issue, bf16_units, decide_precision
from bert_dp.cost import GIB
from bert_dp.training.affinity import Placement, bind
from bert_dp.training.process import World

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch's CUDA allocator reads (2.11 to 2.13), when it first allocates."""


@dataclasses.dataclass(frozen=True)
class HostAndDevice:
    node: str
    """Host name and, after a slash, boot identifier: images are copied with their names."""
    gpu: str | None
    """Address of the GPU, see pci_address; None on a CPU."""

    @property
    def host(self) -> str:
        return self.node.partition("/")[0]


def own_host_and_device(device: torch.device) -> HostAndDevice:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    gpu = pci_address(device.index) if device.type == "cuda" else None
    return HostAndDevice(f"{socket.gethostname()}/{boot}", gpu)


def pci_address(index: int) -> str:
    """Return domain:bus:device.function of a visible GPU, as sysfs names it."""
    gpu: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack the PCI fields
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def choose_device(setting: str, world: World) -> torch.device:
    """Choose the device of this rank: the GPU of its local number, or the only one that it sees, which its
    starter has chosen (srun --gpus-per-task=1, --gpu-bind).

    Raises ConfigError, on all ranks of the machine, when there are more of them than GPUs.
    """
    if setting != "cpu" and torch.cuda.is_available():
        expand_segments()
        torch.cuda.init()  # before that whole GPUs are counted, also where each is divided (MIG)
    gpus, ranks = torch.cuda.device_count(), world.local_size
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 1:
        return torch.device("cuda", 0)
    if ranks > gpus:
        fix = f"use --nproc {gpus}, or run.device: cpu" if gpus else "use run.device: cpu or auto"
        message = f"{setting} needs a GPU for each rank of this machine, {ranks}, found {gpus}"
        raise ConfigError([Issue("run.device", "conflict", message, setting, "--nproc", fix)])
    return torch.device("cuda", world.local_rank)


def expand_segments() -> None:
    """Let the CUDA allocator grow its segments in place, unless the user has configured it: memory that other
    shapes have left in pieces then does not count as used, so larger micro batches fit."""
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def use_device(device: torch.device, *, deterministic: bool) -> None:
    """Select `device` before anything runs on a GPU, and let torch compute in a fixed order or as is fastest:
    gradients of attention and of look-ups, and what cuBLAS and inductor choose by timing. The dry run raises
    where torch knows no fixed order."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    # inductor's setting follows, and is slow to load
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass
    # what remains: flash attention, which torch then lets add in one order, and plain attention
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_affinity(device: torch.device, world: World, places: Sequence[HostAndDevice] = ()) -> Placement:
    """Give this rank its cores and threads, see affinity.py.

    `places`: of all ranks; () = this one is alone. A GPU of another rank may not be visible here.
    """
    if device.type == "cuda":
        places = places or [own_host_and_device(device)]
        here = [rank for rank, other in enumerate(places) if other.node == places[world.rank].node]
        placed = bind(here.index(world.rank), len(here), [str(places[rank].gpu) for rank in here])
    else:
        placed = bind(world.local_rank, world.local_size)
        keep_freed_memory()
    torch.set_num_threads(placed.threads)
    return placed


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free; else every micro batch gets its large tensors from the kernel again,
    page by page (110,000 faults a micro batch at 4 layers x 768). Nothing where there is no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this rank: reserved by the allocator on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts KiB


def restart_peak_memory(device: torch.device) -> None:
    """Count a GPU's peak from here on; what its allocator holds and nobody uses, such as what compilation
    tried, goes back first. The peak of a CPU rank stays: what a process has freed remains its own."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def alloc_retries(device: torch.device) -> int | None:
    """Count how often this rank's GPU allocator failed and freed what it kept, to retry; None on a CPU."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else None


def joules(device: torch.device) -> float | None:
    """Read NVML's counter of this device: joules since its driver was loaded.

    None on a CPU, without the package, or on a GPU older than Volta.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # it counts mJ
    except pynvml.NVMLError:
        return None


@dataclasses.dataclass(frozen=True)
class Precision:
    """Width of the parameters and of autocast (None = no autocast)."""

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()


def precision_of(name: str) -> Precision:
    """Return the widths of fp64, fp32, bf16 or fp16."""
    wide = torch.float64 if name == "fp64" else torch.float32
    return Precision(name, wide, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name))


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 itself."""
    if device.type == "cpu":
        return bool(bf16_units())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_precision(setting: str, device: torch.device, engine: str = "auto") -> Precision:
    """Choose the precision of a process that runs alone; ranks agree on one (`setup.agree_precision`)."""
    on_gpu = device.type == "cuda"
    native = setting == "auto" and has_bf16(device)
    return precision_of(decide_precision(setting, [engine], on_gpu=on_gpu, has_bf16=native))


def inference_precision(setting: str, device: torch.device) -> Precision:
    """Choose the precision of a model that only predicts: auto = bf16 on a GPU that multiplies it, else fp32.
    fp32 means no autocast: the precision of the weights, whatever it is."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return precision_of(setting)


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Multiply fp32 matrices in TF32 on a GPU beside bf16 or fp16; an fp32 run, whose MFU divides by the fp32
    peak, multiplies in fp32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision.name == "fp32" else "high")
