"""What each engine sends in one step: every collective with its size, and nothing else (gloo, counted)."""

from __future__ import annotations

import collections
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config import load_config
from bert_dp.model import build_model
from bert_dp.parallel.zero1 import assign
from tests.parity.runs import _train_all, settings, write_run
from tests.ranks import run_ranks
from tests.shards import write_shards
from tests.wrapped_task import WrappedTask

Counts = collections.Counter[tuple[str, int]]
"""(operation, elements) -> number in one optimizer step, on rank 0."""
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
OPTIMIZERS = ("adamw", "lamb")
STAGES = ("deepspeed-0", "deepspeed-1", "deepspeed-2")  # 3 gathers tensor by tensor, as it foresees their use
ACCUMULATION, LAYERS, MICRO, LENGTH, HIDDEN, PREDICTED = 2, 2, 2, 16, 32, 4
CONTROL = ("all_reduce", 3)  # elapsed time, stop signal, failure, one step ahead


def recorded() -> list[dict[str, Any]]:
    """The collectives of this process so far, as the process groups' flight recorder has them."""
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]


class WatchedTask(WrappedTask):
    """Writes what the ranks sent between the start of one step and the start of the next."""

    def num_targets(self, first_sample: int, count: int) -> int:
        targets = super().num_targets(first_sample, count)
        if self.step == 3:
            self.before = {entry["record_id"] for entry in recorded()}
        if self.step == 4:
            new = [entry for entry in recorded() if entry["record_id"] not in self.before]
            sent = [(e["profiling_name"].split(":")[1], math.prod(e["input_sizes"][0])) for e in new]
            Path(f"sent-{os.environ['RANK']}.json").write_text(json.dumps(sent))
        return targets


def count_step(run_dir: str) -> None:
    """Train; write what was sent to the run directory."""
    os.chdir(run_dir)
    _train_all([run_dir], {"make_task": WatchedTask})


def count_all(run_dirs: list[str]) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    store = os.environ["BERT_DP_INIT_FILE"]
    for number, run_dir in enumerate(run_dirs):
        os.environ["BERT_DP_INIT_FILE"] = f"{store}-run{number}"
        count_step(run_dir)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int, str], Counts]:
    root = tmp_path_factory.mktemp("collectives")
    shards = write_shards(root / "shards")
    runs: dict[int, dict[tuple[str, int, int, str], Path]] = {2: {}, 4: {}}
    cells = [(*cell, optimizer) for cell in CELLS for optimizer in OPTIMIZERS]
    for name, ranks, tensor, optimizer in [*cells, *((stage, 2, 1, "adamw") for stage in STAGES)]:
        dp = ranks // tensor
        engine, _, stage = name.partition("-")
        config = settings(
            shards,
            schedule={"steps": 6},
            optim={"name": optimizer},
            log={"every_steps": 100},
            parallel={"engine": engine, "tensor": tensor, **({"zero_stage": int(stage)} if stage else {})},
            batch={"global_size": MICRO * ACCUMULATION * dp, "micro_size": MICRO},
        )
        run_dir = write_run(root / f"{name}-{ranks}-{tensor}-{optimizer}", config)
        runs[ranks][name, ranks, tensor, optimizer] = run_dir
    for ranks, group in runs.items():
        run_ranks(ranks, count_all, [str(d) for d in group.values()])
    return {
        key: collections.Counter(tuple(pair) for pair in json.loads((run_dir / "sent-0.json").read_text()))
        for group in runs.values()
        for key, run_dir in group.items()
    }


def expected(engine: str, ranks: int, tensor: int, optimizer: str, run_dir: Path) -> Counts:
    """The list. A block: two sums forward and two backward. The vocabulary: the embedding's sum, the
    decoder's input gradient, two of the loss. Once a step: gradients, a norm, LAMB's norms."""
    config = load_config(run_dir / "config.yaml")
    model = build_model(config.model, LENGTH, 0)
    plan = model.tensor_plan()
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    if tensor > 1:
        for name, (dim, _) in plan.items():
            shapes[name][dim] //= tensor
    mine = {name: math.prod(shape) for name, shape in shapes.items()}
    dp = ranks // tensor
    counts: Counts = collections.Counter()
    if tensor > 1:
        activations, predicted = MICRO * LENGTH * HIDDEN, MICRO * PREDICTED
        counts["all_reduce", activations] += ACCUMULATION * (4 * LAYERS + 1)
        counts["all_reduce", predicted * HIDDEN] += ACCUMULATION
        counts["all_reduce", predicted] += ACCUMULATION  # the greatest logit
        counts["all_reduce", 2 * predicted] += ACCUMULATION  # the sum of exponentials, the label's logit
        counts["all_reduce", 1] += 1  # squared norm
        if optimizer == "lamb":
            number = len(mine) if engine != "zero1" else num_owned(mine, dp)
            counts["all_reduce", 2 * number] += 1
    if engine in ("ddp", "accelerate"):
        counts["all_reduce", sum(mine.values())] += 1  # one bucket, on the last micro batch alone
    if engine == "zero1":
        for owner in set(assign(mine, dp).values()):
            size = sum(mine[name] for name, rank in assign(mine, dp).items() if rank == owner)
            counts["reduce", size] += 1
            counts["broadcast", size] += 1
        counts["all_reduce", 1] += 1
    if engine == "fsdp":
        add_fsdp(counts, shapes, dp)
        counts["all_reduce", 1] += 1
        if optimizer == "lamb":
            counts["all_reduce", 2 * len(mine)] += 1
    return counts


def num_owned(sizes: dict[str, int], dp: int) -> int:
    return sum(rank == 0 for rank in assign(sizes, dp).values())


def add_fsdp(counts: Counts, shapes: dict[str, list[int]], dp: int) -> None:
    """The embedding's group is gathered once a micro batch, a block's for each pass; all are reduced once.

    Parts are padded to equal rows. gloo has no reduce-scatter: torch makes it of an all-reduce.
    """
    groups: dict[str, int] = collections.defaultdict(int)
    for name, (rows, *rest) in shapes.items():
        block = ".".join(name.split(".")[:3]) if ".layers." in name else ""
        groups[block] += -(-rows // dp) * math.prod(rest)
    for block, part in groups.items():
        counts["all_gather", part] += ACCUMULATION * (2 if block else 1)
        counts["all_reduce", part * dp] += 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("engine", "ranks", "tensor"), CELLS)
def test_a_step_sends_what_is_listed(
    sent: dict[tuple[str, int, int, str], Counts],
    tmp_path: Path,
    engine: str,
    ranks: int,
    tensor: int,
    optimizer: str,
) -> None:
    found = sent[engine, ranks, tensor, optimizer].copy()
    assert found.pop(CONTROL, 0) <= 2  # it may straddle either end of the window
    write_run(tmp_path, settings(tmp_path, optim={"name": optimizer}))
    wanted = expected(engine, ranks, tensor, optimizer, tmp_path)
    wanted.pop(CONTROL, None)
    assert found == wanted


@pytest.mark.parametrize("name", STAGES)
def test_deepspeed_sends_what_is_listed(
    sent: dict[tuple[str, int, int, str], Counts], tmp_path: Path, name: str
) -> None:
    """Stage 2 reduces every micro batch; 1 and 2 gather the weights of a parameter group, padded."""
    found = sent[name, 2, 1, "adamw"].copy()
    assert found.pop(CONTROL, 0) <= 2
    write_run(tmp_path, settings(tmp_path))
    model = build_model(load_config(tmp_path / "config.yaml").model, LENGTH, 0)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    decayed = sum(size for name, size in sizes.items() if model.is_decayed(name))
    total, stage, dp = sum(sizes.values()), int(name[-1]), 2
    wanted: Counts = collections.Counter({("all_reduce", total): ACCUMULATION if stage == 2 else 1})
    wanted["all_reduce", 1] = 1 if stage == 0 else 2  # the norm; with ZeRO also whether it is finite
    for size in (decayed, total - decayed) if stage else ():
        wanted["all_gather", -(-size // (2 * dp)) * 2] += 1
    assert found == wanted
