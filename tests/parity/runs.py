"""Run complete workers as ranks, several runs per spawn, and read their files."""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import nn

from bert_dp.data import stream as data
from bert_dp.training import devices, distributed
from bert_dp.training import rank as worker
from tests.helpers import logged, read_json, read_lines
from tests.one_device import share_device
from tests.ranks import run_ranks
from tests.tensors import saved_state
from tests.wrapped_task import PoisonedTask

BASE: dict[str, Any] = {
    "data": {"sequence_length": 16},
    "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 48},
    "batch": {"global_size": 8, "micro_size": 2},
    "schedule": {"steps": 50},
    "optim": {"lr": 5e-3},
    "log": {"every_steps": 1},
    "eval": {"every_steps": 25},
    "checkpoint": {"keep": 9},
    "compile": "off",
    "precision": "fp32",
}


def settings(shards: Path, *layers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return BASE with each layer of sections merged in, `sections` last. A schedule and values other than
    dictionaries are replaced instead of merged."""
    out = json.loads(json.dumps(BASE))
    out["data"]["path"] = str(shards)
    for name, value in itertools.chain.from_iterable(layer.items() for layer in (*layers, sections)):
        merges = isinstance(value, dict) and name != "schedule"
        out[name] = {**out.get(name, {}), **value} if merges else value
    return out


def parallel(engine: str, **settings: Any) -> dict[str, Any]:
    """Return the section `parallel` of an engine; `deepspeed-2` is DeepSpeed with stage 2."""
    name, _, stage = engine.partition("-")
    return {"engine": name, **({"zero_stage": int(stage)} if stage else {}), **settings}


def installed(*engines: str) -> list[str]:
    """Return the engines whose package is installed."""
    missing = {name for name in ("accelerate", "deepspeed") if importlib.util.find_spec(name) is None}
    return [engine for engine in engines if engine.partition("-")[0] not in missing]


def write_run(run_dir: Path, config: dict[str, Any]) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    return run_dir


def train_run(run_dir: Path, config: dict[str, Any], size: int = 1, **options: Any) -> Path:
    """Write a run and train it on `size` ranks."""
    train_runs(size, [write_run(run_dir, config)], **options)
    return run_dir


def train_runs(size: int, run_dirs: Sequence[Path], **options: Any) -> None:
    """Train every RUN/config.yaml on `size` ranks in its directory, with one spawn for all. Options include
    `share_device` (see one_device.py) and `backend` (of torch.compile)."""
    run_ranks(size, _train_all, [str(d) for d in run_dirs], options)


def train_named(root: Path, runs: Mapping[str, tuple[int, dict[str, Any]]], **options: Any) -> Path:
    """Train root/NAME for each name -> (ranks, configuration), with one spawn per number of ranks."""
    for size in sorted({ranks for ranks, _ in runs.values()}):
        alike = [write_run(root / name, config) for name, (ranks, config) in runs.items() if ranks == size]
        train_runs(size, alike, **options)
    return root


def _train_all(run_dirs: list[str], options: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    if options.get("share_device"):
        share_device()
    if units := options.get("bf16_units"):  # whether each rank has bf16 units
        devices.bf16_units = lambda: ("amx_bf16",) if units[rank] else ()
    if backend := options.get("backend"):
        nn.Module.compile = functools.partialmethod(nn.Module.compile, backend=backend)  # type: ignore[assignment]
    store = os.environ["BERT_DP_INIT_FILE"]
    plain_next, plain_clock = data.TrainingStream.next, distributed.SharedClock
    for number, run_dir in enumerate(run_dirs):
        os.environ["BERT_DP_INIT_FILE"] = f"{store}-{number}"
        os.chdir(run_dir)
        torch._dynamo.reset()  # each run compiles as in a new process
        torch._dynamo.utils.counters.clear()
        seen: list[Any] = []

        def watched(stream: Any, seen: list[Any] = seen) -> Any:
            batch = plain_next(stream)
            if not isinstance(batch, data.MlmBatch):  # batches of finetuning have no masks
                return batch
            positions = batch.positions_P.view(len(batch.sample_ids), -1) % batch.ids_BS.shape[1]
            seen.append((batch.sample_ids, positions.numpy(), batch.ids_BS.numpy()))
            return batch

        data.TrainingStream.next = watched  # type: ignore[method-assign]
        if "seconds_per_call" in options:  # the ranks' clocks differ in speed; only rank 0's may count
            ticks = itertools.count(step=options["seconds_per_call"] * (1 + 3 * rank))
            worker.time = SimpleNamespace(monotonic=lambda: 0.0)  # type: ignore[attr-defined]
            worker.Ledger = lambda *_: contextlib.nullcontext()  # type: ignore[misc,assignment]
            distributed.SharedClock = functools.partial(plain_clock, now=ticks.__next__)  # type: ignore[misc,assignment]
        bad_rank, bad_steps = options.get("poison", (None, range(0)))
        poisoned = functools.partial(PoisonedTask, bad_steps=bad_steps)
        make_task = poisoned if bad_rank == rank else options.get("make_task")
        code = worker.main([f"{run_dir}/config.yaml", "--resume", options.get("resume", "auto")], make_task)
        assert code == 0, f"worker exit code {code}"
        columns = [np.concatenate(column) for column in zip(*seen, strict=True)]
        columns = columns or [np.empty(0, np.int64), *[np.empty((0, 1), np.int64)] * 2]
        np.savez(
            f"{run_dir}/seen-{rank}.npz", **dict(zip(("ids", "positions", "inputs"), columns, strict=True))
        )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "metrics.jsonl")


def evals(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "evals.jsonl")


def losses(run_dir: Path) -> list[float]:
    return logged(run_dir, "loss")


def summary(run_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = read_json(run_dir / "summary.json")
    return data


def samples_by_step(run_dir: Path) -> list[dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]]:
    """Return, for each step, sample id -> (masked positions, corrupted input) over all ranks."""
    parts = [np.load(p) for p in sorted(run_dir.glob("seen-*.npz"))]
    seen = {
        int(i): (p, x)
        for part in parts
        for i, p, x in zip(part["ids"], part["positions"], part["inputs"], strict=True)
    }
    assert len(seen) == sum(len(part["ids"]) for part in parts), "a sample was used twice"
    out, start = [], min(seen)
    for line in metrics(run_dir):
        if line["samples"] <= start:
            continue
        stop = line["samples"]
        out.append({i: seen[i] for i in range(start, stop)})
        start = stop
    return out


def state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state of a checkpoint in one dictionary."""
    return saved_state(run_dir / "checkpoints" / f"step-{step:08d}")
