"""Run a function on N gloo ranks, whose rendezvous is a file, so that ports cannot collide.

Ranks are forks of one server that has only imported PRELOADED, so a start takes a tenth of a second instead
of several seconds.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from bert_dp.training.distributed import HostCollectives
from bert_dp.training.process import World

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "bert_dp.worker",
    "bert_dp.training.loop",
    "bert_dp.training.build",
]


def _enter(rank: int, size: int, folder: str, environ: dict[str, str], function: Any, arguments: Any) -> None:
    os.environ.clear()  # removes the server's variables
    os.environ.update(
        environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        BERT_DP_INIT_FILE=f"{folder}/store",
    )
    torch.set_num_threads(1)
    function(*arguments)


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(*arguments)` in `size` ranks, and raise the exception of a rank that fails."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        given = (size, folder, dict(os.environ), function, arguments)
        mp.start_processes(_enter, given, nprocs=size, start_method="forkserver")


class OneOf(HostCollectives):
    """Collectives of one rank of `size`, without the other ranks.

    `gather` maps this rank's values to those of all ranks. `broadcast` returns `said` unless it is None.
    """

    def __init__(
        self, rank: int, size: int, gather: Callable[[Any], Any] = lambda own: [own], said: Any = None
    ):
        super().__init__(World(rank, rank, size, size), None)
        self._gather, self._said = gather, said

    def all_gather(self, values: Any) -> torch.Tensor:
        return torch.tensor(self._gather(values), dtype=torch.float64)

    def broadcast(self, value: Any) -> Any:
        return value if self._said is None else self._said
