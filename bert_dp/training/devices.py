"""Choose a rank's device, cores and precision; read the device's PCI address, memory and energy."""

import ctypes
import dataclasses
import itertools
import os
import resource
import socket
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bert_dp.config import ConfigError, Issue, bf16_units, decide_precision
from bert_dp.cost import GIB
from bert_dp.training.process import World


@dataclasses.dataclass(frozen=True)
class HostAndDevice:
    node: str
    """Host name, a slash and the boot ID: machines copied from one image can have the same host name."""
    gpu: str | None
    """PCI address of the GPU (domain:bus:device.function, as in sysfs); None for a CPU."""


def own_host_and_device(device: torch.device) -> HostAndDevice:
    node = f"{socket.gethostname()}/{_read(Path('/proc/sys/kernel/random/boot_id')).strip()}"
    if device.type == "cpu":
        return HostAndDevice(node, None)
    gpu: Any = torch.cuda.get_device_properties(device.index)  # torch's stubs lack the PCI fields
    return HostAndDevice(node, f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def choose_device(setting: str, world: World) -> torch.device:
    """Choose this rank's device: the CPU, the only visible GPU (as with srun --gpus-per-task=1) or the GPU
    whose index is the local rank. Raises ConfigError if too few GPUs are visible."""
    if setting != "cpu" and torch.cuda.is_available():
        # let the allocator's segments grow in place, unless the user has set an allocator option. Memory
        # fragmented by tensors of other shapes can then be reused, so that larger micro batches fit.
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.init()  # otherwise device_count() returns the number of GPUs, not of their MIG partitions
    gpus, ranks = torch.cuda.device_count(), world.local_size
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 1:
        return torch.device("cuda", 0)
    if ranks > gpus:
        fix = f"use --nproc {gpus}, or run.device: cpu" if gpus else "use run.device: cpu or auto"
        message = f"{setting} needs one GPU per rank; ranks on this machine: {ranks}, visible GPUs: {gpus}"
        raise ConfigError([Issue("run.device", "conflict", message, setting, "--nproc", fix)])
    return torch.device("cuda", world.local_rank)


def use_device(device: torch.device, *, deterministic: bool) -> None:
    """Select `device`. With `deterministic`, allow only deterministic kernels; an operation that has
    none raises RuntimeError in the dry run. Call this before any GPU work."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this when it starts
    # call torch only if the setting changes: use_deterministic_algorithms imports inductor, which is slow
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
    # forbid the attention kernels that torch cannot make deterministic; flash and math attention remain
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)


Cores = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Cores and threads assigned by `set_affinity`."""

    shares: tuple[Cores, ...]
    """Cores of each rank on this node; () = rank not bound. Only this rank's cores if the user bound it."""
    threads: int
    """Number of threads of this rank: one per core, but at most OMP_NUM_THREADS."""

    def __str__(self) -> str:
        if not any(self.shares):
            return "cores not bound"
        return f"cores {' | '.join(format_cores(share) or 'not bound' for share in self.shares)}"


def set_affinity(device: torch.device, world: World, places: Sequence[HostAndDevice] = ()) -> Placement:
    """Bind this rank to its cores and set its number of threads. `places`: host and device of every rank (a
    rank may be unable to see the other ranks' GPUs). On a GPU, () means that there is only this rank."""
    if device.type == "cuda":
        places = places or [own_host_and_device(device)]
        ranks = [rank for rank, other in enumerate(places) if other.node == places[world.rank].node]
        placed = bind(ranks.index(world.rank), len(ranks), [str(places[rank].gpu) for rank in ranks])
    else:
        placed = bind(world.local_rank, world.local_size)
        keep_freed_memory()
    torch.set_num_threads(placed.threads)
    return placed


def bind(local_rank: int, local_size: int, gpus: Sequence[str] = (), root: Path = Path("/")) -> Placement:
    """Bind this process to its share of the cores near its GPU or, for a CPU rank, of all allowed cores (see
    `core_shares`). If a rank may use fewer cores than its parent process, the user has bound it (srun,
    numactl), and it keeps these cores. `gpus`: PCI address of each local rank's GPU; empty for CPU ranks.
    `root`: directory that contains sys/."""
    allowed = os.sched_getaffinity(0)
    if allowed < _parent_affinity():
        shares: tuple[Cores, ...] = (tuple(sorted(allowed)),)
        cores = len(allowed)
    else:
        nodes = cores_by_node(allowed, root)
        shares = core_shares(nodes, [pci_node(gpu, root) for gpu in gpus] or [None] * local_size)
        if shares[local_rank]:
            os.sched_setaffinity(0, shares[local_rank])
        cores = max(1, len(shares[local_rank]) or len(allowed) // local_size)
    return Placement(shares, min(cores, omp_threads(os.environ) or cores))


def omp_threads(environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS; None if it is unset, not a positive number, or 1 as set by torchrun."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number per nesting level
    if first == "1" and "TORCHELASTIC_RUN_ID" in environ:
        return None
    return int(first) or None if first.isdecimal() else None


def core_shares(nodes: Mapping[int, Sequence[int]], wanted: Sequence[int | None]) -> tuple[Cores, ...]:
    """Return each rank's cores; () = rank not bound. `nodes`: allowed cores by NUMA node. `wanted`: each
    rank's NUMA node; None = any. The ranks of a node get equal shares of its cores, so that none is slower
    than the others. If a node has fewer cores than ranks, each of its ranks gets all cores of the node. Ranks
    without a node get equal shares of all cores, or () if there are fewer cores than such ranks."""
    shares: list[Cores] = [()] * len(wanted)
    for node in dict.fromkeys(wanted):
        ranks = [rank for rank, other in enumerate(wanted) if other == node]
        near = list(itertools.chain(*nodes.values())) if node is None else nodes.get(node, ())
        size = len(near) // len(ranks)
        for place, rank in enumerate(ranks):
            share = near[place * size : (place + 1) * size] or (() if node is None else near)
            shares[rank] = tuple(sorted(share))
    return tuple(shares)


def cores_by_node(allowed: Set[int], root: Path) -> dict[int, list[int]]:
    """Group the allowed cores by NUMA node, as listed in sysfs. Hardware threads of one core are adjacent
    in the result. Without sysfs, all cores are assigned to node 0, and each counts as a physical core."""
    node, sibling = {}, {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for core in parse_cores(_read(folder / "cpulist")):
            node[core] = int(folder.name[4:])
    for core in allowed:
        listed = _read(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        sibling[core] = min(parse_cores(listed), default=core)
    ordered = sorted(allowed, key=lambda core: (node.get(core, 0), sibling[core], core))
    return {k: list(cores) for k, cores in itertools.groupby(ordered, lambda core: node.get(core, 0))}


def pci_node(address: str, root: Path) -> int | None:
    """Return the NUMA node of the PCI device at `address` (domain:bus:device.function); None if unknown."""
    text = _read(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1 = unknown


def parse_cores(text: str) -> list[int]:
    """Parse the kernel's list format: 0-3,8 -> [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def format_cores(cores: Iterable[int]) -> str:
    """Format cores in the kernel's list format; inverse of `parse_cores`."""
    groups = itertools.groupby(enumerate(sorted(cores)), key=lambda pair: pair[1] - pair[0])
    runs = [[core for _, core in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parent_affinity() -> Set[int]:
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # the parent has just exited
        return set()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors. Otherwise the kernel would map the memory of large
    tensors anew, page by page, for every micro batch. Does nothing if the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping per tensor
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_memory_gib(device: torch.device) -> float:
    """Return this rank's peak memory in GiB: reserved by the allocator on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux reports KiB


def restart_peak_memory(device: torch.device) -> None:
    """Release a GPU's cached memory (autotuning leaves some), and reset its peak-memory counter. Does nothing
    on a CPU, where the process keeps freed memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def alloc_retries(device: torch.device) -> int | None:
    """Return how many times the GPU allocator freed its cache to retry an allocation; None on a CPU."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else None


def joules(device: torch.device) -> float | None:
    """Return the joules that NVML has counted for the GPU since its driver was loaded; None if unknown."""
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
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # NVML counts mJ
    except pynvml.NVMLError:
        return None


@dataclasses.dataclass(frozen=True)
class Precision:
    """Data types of the parameters and of autocast (None = no autocast)."""

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()


def precision_of(name: str) -> Precision:
    """Return the Precision for fp64, fp32, bf16 or fp16."""
    wide = torch.float64 if name == "fp64" else torch.float32
    return Precision(name, wide, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name))


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 numbers in hardware."""
    if device.type == "cpu":
        return bool(bf16_units())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_precision(setting: str, device: torch.device) -> Precision:
    """Choose the precision of a standalone process; the ranks of a run use `build.agree_precision`."""
    on_gpu = device.type == "cuda"
    native = setting == "auto" and has_bf16(device)
    return precision_of(decide_precision(setting, [], on_gpu=on_gpu, has_bf16=native))


def inference_precision(setting: str, device: torch.device) -> Precision:
    """Choose the precision for inference. `auto` means bf16 on a GPU with bf16 hardware, else fp32. With
    fp32 there is no autocast: the model computes in the data type of its weights."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return precision_of(setting)


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Allow TF32 for fp32 matrix products on a GPU. Forbid it if the run's precision is fp32: the MFU of such
    a run is relative to the device's fp32 peak."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision.name == "fp32" else "high")
