"""Run a function on N gloo ranks that meet in a file: no port exists to collide."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _enter(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", BERT_DP_INIT_FILE=f"{folder}/store",
    )  # fmt: skip
    torch.set_num_threads(1)
    function(*arguments)


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(*arguments)` in `size` ranks; raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (size, folder, function, arguments), nprocs=size, start_method="spawn")
