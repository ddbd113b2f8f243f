"""Run a function on N gloo ranks that meet in a file: no port exists to collide.

Ranks are forks of one server that has imported what they need, and nothing else: a start takes a tenth of a
second in place of several.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "bert_dp.worker",
    "bert_dp.training.loop",
    "bert_dp.training.build",
]


def _enter(
    rank: int,
    size: int,
    folder: str,
    environ: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's
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
    """Call `function(*arguments)` in `size` ranks; raises what a rank raises."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        given = (size, folder, dict(os.environ), function, arguments)
        mp.start_processes(_enter, given, nprocs=size, start_method="forkserver")
