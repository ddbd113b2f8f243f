"""Measure the bandwidth of all-reduces.

`python -m bert_dp.measure.all_reduce [N] [SECONDS BYTES...]` runs N local ranks, each on its own GPU if
there are enough, for SECONDS (default 2) per size, and prints one JSON line per size. `pair RANK HOST PORT
INTERFACE [SOCKET]` runs one rank of a pair on two nodes; SOCKET is the descriptor of rank 0's bound socket.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bert_dp.training.devices import synchronize
from bert_dp.training.process import exit_process, follow_launcher

MEASURE_S = 2.0
WARM_UP = 5


def _measure(
    rank: int,
    size: int,
    store: str | dist.Store,
    backend: str,
    sizes: Sequence[int],
    seconds: float,
    interface: str = "lo",
) -> None:
    """Time all-reduces of `sizes` bytes as one rank, for about `seconds` each, and exit. Rank 0 prints the
    results. `store`: path of the store's file for ranks on one node, or a store for ranks on two nodes."""
    follow_launcher()
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    torch.set_num_threads(1)
    gpu = rank if isinstance(store, str) else 0
    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = dist.FileStore(store, size) if isinstance(store, str) else store
    dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=size)
    for num_bytes in sizes:
        result = _time_all_reduce(num_bytes, seconds, device)
        if rank == 0:
            facts = {"world_size": size, "backend": backend, **result}
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()
    exit_process(0)


def _time_all_reduce(num_bytes: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Time all-reduces for about `seconds`. busbw_gb_s: bus bandwidth as in nccl-tests; 1 GB = 1e9 bytes."""
    data = torch.zeros(max(1, num_bytes // 4), device=device)

    def once() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        synchronize(device)
        return time.perf_counter() - start

    start = time.perf_counter()
    for _ in range(WARM_UP):
        once()
    one_s = (time.perf_counter() - start) / WARM_UP  # includes the time of the barrier
    count = torch.tensor([max(WARM_UP, int(seconds / one_s))], device=device)
    dist.broadcast(count, 0)
    times = sorted(once() for _ in range(int(count)))
    median, size = times[len(times) // 2], dist.get_world_size()
    sent = data.nbytes
    busbw = sent / median * 2 * (size - 1) / size / 1e9
    return {"bytes": sent, "repeats": len(times), "seconds_median": median, "busbw_gb_s": busbw}


def main(size: int = 0, seconds: float = MEASURE_S, *sizes: int) -> None:
    """Start `size` ranks; 0 = one rank per GPU if there are several GPUs, else two ranks on the CPU."""
    follow_launcher()
    gpus = torch.cuda.device_count()
    size = size or (gpus if gpus > 1 else 2)
    backend, num_bytes = ("nccl", 64 * 2**20) if 1 < size <= gpus else ("gloo", 4 * 2**20)
    with tempfile.TemporaryDirectory(prefix="bert-dp-") as folder:
        torch.multiprocessing.start_processes(
            _measure,
            (size, f"{folder}/store", backend, sizes or (num_bytes,), seconds),
            nprocs=size,
            start_method="spawn",
        )


def pair(rank: int, host: str, port: int, interface: str, bound: int | None = None) -> None:
    """Time all-reduces as one of two ranks on two nodes. `bound`: descriptor of rank 0's bound socket."""
    is_master = bound is not None
    store = dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, master_listen_fd=bound)
    backend, num_bytes = ("nccl", 64 * 2**20) if torch.cuda.is_available() else ("gloo", 4 * 2**20)
    _measure(rank, 2, store, backend, (num_bytes,), MEASURE_S, interface)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pair"]:
        rank, host, port, interface, *bound = sys.argv[2:]
        pair(int(rank), host, int(port), interface, *map(int, bound))
    else:
        kinds = (int, float, *[int] * len(sys.argv))
        main(*(kind(word) for kind, word in zip(kinds, sys.argv[1:], strict=False)))
