"""Bind a rank to cores near its GPU, or to an equal share within a NUMA node, and count its threads.
Torch-free.

A GPU reached over the link between sockets costs copies and launches; a CPU rank on two nodes reads half of
its memory over it. Linux names the nodes in sysfs (Documentation/admin-guide/mm/numaperf.rst, sysfs-bus-pci).
Every function that reads kernel files takes `root`, the directory that holds sys/.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

ROOT = Path("/")
OMP = "OMP_NUM_THREADS"
Cores = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Logical cores of the machine: the NUMA node of each, and the first of those on its physical core."""

    node: dict[int, int]
    sibling: dict[int, int]

    def ordered(self, cores: Iterable[int]) -> list[int]:
        """Sort cores by node, then by physical core."""
        return sorted(cores, key=lambda c: (self.node.get(c, 0), self.sibling.get(c, c), c))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The cores that `bind` has given."""

    shares: tuple[Cores, ...]
    """Cores of each rank of this node; an empty share is not bound."""
    threads: int
    """Threads of this rank: one for each of its cores, or OMP_NUM_THREADS where that is less."""
    inherited: bool = False
    """The starter of this rank had bound it already: `shares` holds its own cores alone."""
    limited_by_omp: bool = False
    """`threads` is OMP_NUM_THREADS, which is less than the cores."""

    def __str__(self) -> str:
        if self.inherited:
            return f"cores {format_cores(self.shares[0])} as started"
        if not any(self.shares):
            return "cores not bound"
        return f"cores {' | '.join(format_cores(share) or 'not bound' for share in self.shares)}"


def bind(local_rank: int, local_size: int, gpus: Sequence[str] = (), root: Path = ROOT) -> Placement:
    """Bind this process to its share of the cores that it may use. Returns the shares of all local ranks.

    `gpus`: the PCI address of each local rank's GPU, empty for CPU ranks. With fewer cores than ranks nothing
    is bound. A rank that has fewer cores than its parent was bound on purpose (srun, numactl) and keeps them.
    """
    allowed = os.sched_getaffinity(0)
    if allowed < _parent_affinity():
        return _placement((tuple(sorted(allowed)),), len(allowed), inherited=True)
    topology = read_topology(root)
    if gpus:
        shares = gpu_shares(allowed, [pci_node(gpu, root) for gpu in gpus], topology)
    else:
        shares = cpu_shares(allowed, local_size, topology)
    mine = shares[local_rank]
    if mine:
        os.sched_setaffinity(0, mine)
    return _placement(shares, max(1, len(mine) or len(allowed) // local_size))


def _placement(shares: tuple[Cores, ...], cores: int, *, inherited: bool = False) -> Placement:
    limit = omp_threads(os.environ) or cores
    return Placement(shares, min(cores, limit), inherited, limited_by_omp=limit < cores)


def omp_threads(environ: Mapping[str, str]) -> int | None:
    """Read OMP_NUM_THREADS as the user set it; None when it is not set, or is no number above 0.

    torchrun gives its ranks 1 where the user set nothing. Then the environment that torchrun, the parent of
    this process, was started with has no such variable.
    """
    first = environ.get(OMP, "").partition(",")[0].strip()  # a list has one number for each level of nesting
    if not first.isdecimal() or not int(first):
        return None
    if first == "1" and "TORCHELASTIC_RUN_ID" in environ:
        started_with = _read(Path(f"/proc/{os.getppid()}/environ")).split("\0")
        if not any(variable.startswith(f"{OMP}=") for variable in started_with):
            return None
    return int(first)


def cpu_shares(allowed: Set[int], num_ranks: int, topology: Topology) -> tuple[Cores, ...]:
    """Divide cores into equal shares, each within one node where the nodes hold enough of them; empty ones
    when cores are fewer than ranks. Equal, so that no rank waits for one with fewer cores."""
    size = len(allowed) // num_ranks
    if not size:
        return ((),) * num_ranks
    ordered = topology.ordered(allowed)
    whole = []  # shares that lie within a node
    for node in dict.fromkeys(topology.node.get(core, 0) for core in ordered):
        members = [core for core in ordered if topology.node.get(core, 0) == node]
        whole += [members[i : i + size] for i in range(0, len(members) - size + 1, size)]
    if len(whole) < num_ranks:
        whole = [ordered[i * size : (i + 1) * size] for i in range(num_ranks)]
    spread = [whole[rank * len(whole) // num_ranks] for rank in range(num_ranks)]
    return tuple(tuple(sorted(share)) for share in spread)


def gpu_shares(allowed: Set[int], gpu_nodes: Sequence[int | None], topology: Topology) -> tuple[Cores, ...]:
    """Give each local rank, by the node of its GPU (None = unknown), a share of that node's allowed cores:
    all of them when they are fewer than its ranks, none when no core of the node is allowed."""
    shares: list[Cores] = [()] * len(gpu_nodes)
    for node in dict.fromkeys(gpu_nodes):
        ranks = [rank for rank, other in enumerate(gpu_nodes) if other == node]
        near = {core for core in allowed if node is None or topology.node.get(core, 0) == node}
        for rank, share in zip(ranks, cpu_shares(near, len(ranks), topology), strict=True):
            shares[rank] = share or (() if node is None else tuple(sorted(near)))
    return tuple(shares)


def read_topology(root: Path = ROOT) -> Topology:
    """Read the topology from sysfs; by default there is one node, and every core is a physical one."""
    node, sibling = {}, {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for core in parse_cores(_read(folder / "cpulist")):
            node[core] = int(folder.name[4:])
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        core = int(folder.name[3:])
        sibling[core] = min(parse_cores(_read(folder / "topology/thread_siblings_list")), default=core)
    return Topology(node, sibling)


def pci_node(address: str, root: Path = ROOT) -> int | None:
    """Read the NUMA node of a PCI device, domain:bus:device.function; None when the kernel knows none."""
    text = _read(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1 = not known


def parse_cores(text: str) -> list[int]:
    """Parse the kernel's list format: 0-3,8 -> [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def format_cores(cores: Iterable[int]) -> str:
    """Format cores in the kernel's list format, the inverse of `parse_cores`."""
    ordered = sorted(cores)
    groups = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    runs = [[core for _, core in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parent_affinity() -> Set[int]:
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has gone, or is another user's
        return set()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
