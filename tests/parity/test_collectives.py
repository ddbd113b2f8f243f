"""Count the collectives of each engine in one step and the elements that each kind sends (gloo)."""

import collections
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config import load_config
from bert_dp.model.bert import build_model
from tests.helpers import read_json
from tests.parity.runs import parallel, settings, train_named, write_run
from tests.wrapped_task import WrappedTask

Counts = collections.Counter[tuple[str, int]]
"""(operation, elements) -> number of collectives of rank 0 in one optimizer step."""
CELLS = (
    ("ddp", 2, 1),
    ("zero1", 2, 1),
    ("fsdp", 2, 1),
    ("ddp", 2, 2),
    ("ddp", 4, 2),
    ("zero1", 4, 2),
    ("fsdp", 4, 2),
    ("accelerate", 2, 1),
)
Cell = tuple[str, int, int, str]
"""(engine, ranks, tensor, optimizer)."""
STAGES = ("deepspeed-0", "deepspeed-1", "deepspeed-2")  # stage 3 gathers single tensors in a predicted order
ALL: list[Cell] = [
    *((*cell, optimizer) for cell in CELLS for optimizer in ("adamw", "lamb")),
    *((stage, 2, 1, "adamw") for stage in STAGES),
]
ACCUMULATION, LAYERS, MICRO, LENGTH, HIDDEN, PREDICTED = 2, 2, 2, 16, 32, 4
CONTROL = ("all_reduce", 4)  # budget spent, elapsed time, stop signal and failure, sent one step ahead


def recorded() -> list[dict[str, Any]]:
    """Return the collectives of this process so far from torch's flight recorder."""
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]


class WatchedTask(WrappedTask):
    """Task that writes the collectives between the start of one step and the start of the next."""

    def num_targets(self, first_sample: int, count: int) -> int:
        targets = super().num_targets(first_sample, count)
        if self.step == 3:
            self.before = {entry["record_id"] for entry in recorded()}
        if self.step == 4:
            new = [entry for entry in recorded() if entry["record_id"] not in self.before]
            sent = [(e["profiling_name"].split(":")[1], math.prod(e["input_sizes"][0])) for e in new]
            Path(f"sent-{os.environ['RANK']}.json").write_text(json.dumps(sent))
        return targets


@pytest.fixture(scope="module")
def sent(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Counts]:
    root, runs = tmp_path_factory.mktemp("collectives"), {}
    for cell in ALL:
        name, ranks, tensor, optimizer = cell
        config = settings(
            shards,
            schedule={"steps": 6},
            optim={"name": optimizer},
            log={"every_steps": 100},
            parallel=parallel(name, tensor=tensor),
            batch={"global_size": MICRO * ACCUMULATION * (ranks // tensor), "micro_size": MICRO},
        )
        runs[str(cell)] = (ranks, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
        train_named(root, runs, make_task=WatchedTask)
    return {
        cell: collections.Counter(map(tuple, read_json(root / str(cell) / "sent-0.json"))) for cell in ALL
    }


def volume(counts: Counts, *operations: str) -> int:
    """Return the number of elements that these operations send in a step."""
    return sum(elements * count for (name, elements), count in counts.items() if name in operations)


def tensor_parallel_volume(tensor: int) -> tuple[int, int]:
    """Return (elements, collectives). A block has two sums forward and two backward. The vocabulary has
    the embedding's sum, the decoder's input gradient, the largest logit, and the sum of exponentials together
    with the label's logit."""
    if tensor == 1:
        return 0, 0
    activations, predicted = MICRO * LENGTH * HIDDEN, MICRO * PREDICTED
    return ACCUMULATION * ((4 * LAYERS + 1) * activations + predicted * (HIDDEN + 3)), ACCUMULATION * (
        4 * LAYERS + 4
    )


@pytest.mark.parametrize(("name", "ranks", "tensor", "optimizer"), ALL)
def test_a_step_sends_gradients_once_and_only_sharded_weights(
    sent: dict[Cell, Counts], tmp_path: Path, name: str, ranks: int, tensor: int, optimizer: str
) -> None:
    """Padding and norms may add a tenth to the necessary elements; the number of collectives is limited."""
    counts = sent[name, ranks, tensor, optimizer].copy()
    assert counts.pop(CONTROL, 0) <= 2  # the window may include this collective of two steps
    write_run(tmp_path, settings(tmp_path))
    model = build_model(load_config(tmp_path / "config.yaml").model, LENGTH, 0)
    plan = model.tensor_plan()
    sizes = {n: p.numel() // (tensor if n in plan else 1) for n, p in model.named_parameters()}
    total, dp = sum(sizes.values()), ranks // tensor
    activations, collectives = tensor_parallel_volume(tensor)
    gradients = total * (ACCUMULATION if name == "deepspeed-2" else 1)  # stage 2 reduces every micro batch
    reduced = volume(counts, "all_reduce", "reduce")
    assert gradients + activations <= reduced <= 1.1 * (gradients + activations)
    gathered = volume(counts, "broadcast", "all_gather")
    if name == "fsdp":  # blocks are gathered for the forward and the backward pass; gloo's inputs are shards
        blocks = sum(size for n, size in sizes.items() if ".layers." in n)
        weights = ACCUMULATION * (total + blocks) / dp
        most = (LAYERS + 1) * (2 * ACCUMULATION + 1)
    elif name == "zero1":
        weights, most = total, 2 * dp
    else:
        weights = total / dp if name in ("deepspeed-1", "deepspeed-2") else 0
        most = 2 + 2 * ACCUMULATION
    assert weights <= gathered <= 1.1 * weights
    assert counts.total() <= most + collectives + 3  # gradient norm, LAMB's norms, check for finite values
