"""Train with Hugging Face Accelerate, whose `Accelerator.prepare` wraps the model in DistributedDataParallel.

bert-dp itself controls autocast, loss scaling, the optimizer and the learning rate. A scheduler prepared by
Accelerate would take as many steps per call as there are processes.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_dp.config import Config, ConfigError, Issue
from bert_dp.model.interface import Model
from bert_dp.parallel import MakeOptimizer, State
from bert_dp.parallel.base import clip_and_step, make_scaler
from bert_dp.parallel.state import read_state, write_state
from bert_dp.training.process import World, standard_variables


class AccelerateEngine:
    """See `bert_dp.parallel.Engine`."""

    def __init__(self, config: Config, world: World, device: torch.device, *, precision: str, run_dir: Path):
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

        self.dp_rank, self.dp_size = world.rank, world.size
        self.norm_pairs = None
        self._scaler = make_scaler(device, precision == "fp16")
        # accelerate ignores srun's variables and, on a GPU, mpirun's; on a CPU, it would set the thread count
        os.environ.update(standard_variables(world, device.index))
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        # pass no size if bucket_mib is not set: torch then limits the first bucket to 1 MiB
        bucket = {} if config.parallel.bucket_mib is None else {"bucket_cap_mb": config.parallel.bucket_mib}
        self._accelerator = Accelerator(
            cpu=device.type == "cpu",
            device_placement=False,  # the model is already on its device
            mixed_precision="no",
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # overrides the environment
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True, **bucket)
            ],
        )

    def prepare(self, model: Model, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model. Raises ConfigError if the environment makes accelerate choose anything but DDP."""
        self._model = model
        with warnings.catch_warnings():  # accelerate passes broadcast_buffers, which torch 2.13 has renamed
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = self._accelerator.prepare(model)
        if self.dp_size > 1 and not isinstance(self._wrapped, DistributedDataParallel):
            kind = self._accelerator.distributed_type.value
            text = f"accelerate chose {kind}, not DistributedDataParallel, for {self.dp_size} ranks"
            hint = "unset ACCELERATE_USE_*, or start accelerate's launcher with --multi_gpu"
            raise ConfigError([Issue("parallel.engine", "unsupported", text, "accelerate", hint=hint)])
        # accelerate must not wrap the optimizer: that would hide the attributes that `clip_and_step` sets
        self._optimizer = make_optimizer(model.named_parameters())
        return self._wrapped, self._optimizer

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self._wrapped)

    def backward(self, loss: Tensor) -> None:
        whole = loss * self.dp_size  # DDP averages gradients over replicas, but they must be summed
        self._accelerator.backward(whole if self._scaler is None else self._scaler.scale(whole))

    def step(self, max_norm: float) -> Tensor:
        norm = clip_and_step(self._optimizer, self._scaler, max_norm)
        # with several ranks, gradients are views of the buckets; if freed, they would be allocated again
        self._optimizer.zero_grad(set_to_none=self.dp_size == 1)
        return norm

    def gather_state(self) -> State | None:
        return None if self.dp_rank else read_state(self._model, self._optimizer, self._scaler)

    def scatter_state(self, state: State) -> None:
        write_state(self._model, self._optimizer, self._scaler, state)


make = AccelerateEngine
