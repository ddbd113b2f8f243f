"""Training on GPUs that do not exist: tensors without numbers, which know their shape, type and device. An
operation on tensors of two devices raises, and so does one that reads a number.

    python -m tests.fake_cuda LIBRARY RESULTS

LIBRARY is fake_cuda.cpp, compiled. RESULTS: one line of JSON, the traceback of each check or nothing.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from bert_dp import optim
from bert_dp.config import batch_layout
from bert_dp.data.stream import random_batch
from bert_dp.model.bert import CrammedBert
from bert_dp.parallel import Engine, make_engine
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.training.devices import Precision
from bert_dp.training.loop import train_step
from bert_dp.training.metrics import Meter
from bert_dp.training.process import World
from tests.helpers import make_config

GPU, LENGTH, VOCABULARY = torch.device("cuda", 0), 16, 64
FP32 = Precision("fp32", torch.float32, None)
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 16,
}


def settings(engine: str, optimizer: str, tensor: int) -> Any:
    return make_config(
        data={"sequence_length": LENGTH},
        batch={"global_size": 4, "micro_size": 2},
        model={**MODEL, "dropout": 0.1},
        optim={"name": optimizer, "clip": 0.5},
        parallel={"engine": engine, "tensor": tensor},
        precision="fp32",
    )


def made_on_gpu(config: Any) -> CrammedBert:
    with GPU:
        return CrammedBert(config.model, LENGTH)


def check_steps(engine_name: str, optimizer_name: str, tensor: int, ranks: int) -> None:
    """Two steps from batches on the host, what the meter adds up of them, and a checkpoint out and in."""
    config, world = settings(engine_name, optimizer_name, tensor), World(0, 0, ranks, ranks)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(engine_name, config, world, GPU, precision="fp32", run_dir=Path(folder))
    with FakeTensorMode():
        take_steps(engine, config, world)


def take_steps(engine: Engine, config: Any, world: World) -> None:
    bare = made_on_gpu(config)
    model, optimizer = engine.prepare(bare, lambda named: optim.make_optimizer(config.optim, named, bare))
    optim.set_lr(optimizer, 0.1)
    layout = batch_layout(config, world.size)
    meter = Meter(
        SimpleNamespace(world=world),  # type: ignore[arg-type]
        GPU,
        layout,
        tokens_per_sample=LENGTH,
        flops_per_token=1.0,
        peak_flops=None,
    )
    for _ in range(2):
        batches = [random_batch(seed, 2, LENGTH, 4, VOCABULARY) for seed in range(layout.grad_accum_steps)]
        loss, norm = train_step(
            engine,
            model,
            MaskedLanguageModel.loss,
            batches,
            grad_accum_steps=layout.grad_accum_steps,
            num_targets=16,
            device=GPU,
            precision=FP32,
            max_norm=0.5,
            timers=meter.timers,
            progress=lambda: None,
        )
        assert (loss.device, norm.device) == (GPU, GPU)
        meter.observe(loss, norm, 4, layout.grad_accum_steps, 0.0)
    if config.parallel.engine != "zero1":  # whose owners tell each other by numbers what they have
        state = engine.gather_state()
        assert state is not None
        engine.scatter_state(state)


def check_evaluation() -> None:
    """No host read before the sum over all batches is asked for."""
    config = settings("single", "adamw", 1)
    task = MaskedLanguageModel(config, GPU)
    each = round(0.15 * LENGTH)
    seen: list[int] = []
    context = SimpleNamespace(
        device=GPU,
        precision=FP32,
        stopped=lambda: False,
        progress=lambda: seen.append(1),
        sum_over_replicas=lambda sums: sums,
    )
    try:
        with FakeTensorMode():
            task._held_out = [random_batch(seed, 2, LENGTH, each, VOCABULARY) for seed in range(3)]
            task.evaluate(made_on_gpu(config).eval(), context)  # type: ignore[arg-type]
    except DataDependentOutputException:
        assert len(seen) == 3
    else:
        raise AssertionError("the sums were never read")


def check_that_a_host_read_is_seen() -> None:
    try:
        with FakeTensorMode():
            float(torch.ones((), device=GPU))
    except DataDependentOutputException:
        return
    raise AssertionError("a host read passed")


def check_that_a_mix_of_devices_is_seen() -> None:
    try:
        with FakeTensorMode():
            torch.ones(3, device=GPU) + torch.ones(3)
    except FakeTensorDeviceMismatchError:
        return
    raise AssertionError("a mix of devices passed")


CHECKS: dict[str, Callable[[], None]] = {
    "a host read is seen": check_that_a_host_read_is_seen,
    "a mix of devices is seen": check_that_a_mix_of_devices_is_seen,
    "evaluation": check_evaluation,
    **{
        f"{engine}, {optimizer}, tensor {tensor} of {ranks}": functools.partial(
            check_steps, engine, optimizer, tensor, ranks
        )
        for engine, optimizer, tensor, ranks in (
            ("single", "adamw", 1, 1),
            ("single", "lamb", 1, 1),
            ("single", "muon", 1, 1),
            ("zero1", "lamb", 2, 4),
            ("fsdp", "lamb", 2, 4),
        )
    },
}


@contextmanager
def pretence(ranks: int) -> Iterator[None]:
    """Events and streams that order nothing, and collectives of `ranks` that do nothing."""
    idle = {name: mock.MagicMock() for name in ("Event", "Stream", "current_stream", "stream")}
    with mock.patch.multiple(
        "torch.cuda", current_device=lambda: 0, get_device_capability=lambda *_: (9, 0), **idle
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    told = {}
    for name, check in CHECKS.items():
        ranks = check.args[-1] if isinstance(check, functools.partial) else 1
        try:
            with pretence(ranks):
                check()
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
