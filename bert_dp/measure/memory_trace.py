"""What a training step's tensors take, by part: every storage counted as it comes and goes.

Under FakeTensorMode nothing is allocated; with real tensors the same operations are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert_dp import optim, tasks
from bert_dp.building import recompute_blocks
from bert_dp.config import Config
from bert_dp.matmul import USES_ONEDNN
from bert_dp.measure.memory_line import PARTS
from bert_dp.metrics import Timers
from bert_dp.parallel.stepping import clip_and_step
from bert_dp.precision import Precision
from bert_dp.tasks import Batch
from bert_dp.trainable import Model
from bert_dp.trainer import train_step

PRODUCTS = ("aten::mm", "bert_dp::matmul_nt")


class MemoryTrace(TorchDispatchMode):
    """Every storage that an operation under it makes, from its first tensor to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "set-up"
        self.in_head = False
        self._numbers: dict[int, int] = {}  # address of a living storage -> its number
        self._parts: list[str] = []  # of each storage
        self._events: list[tuple[int, int, bool]] = []  # storage, bytes gained, within forward or backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        if USES_ONEDNN and func.name() in PRODUCTS:
            self._see_copy(args[0])
        return out

    def hold(self, batch: Batch) -> None:
        """Count the tensors of a batch that was made before."""
        for tensor in vars(batch).values():
            if isinstance(tensor, Tensor):
                self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or not size:
            return
        number = self._numbers[address] = len(self._parts)
        self._parts.append(self._part())
        self._record(number, size)
        weakref.finalize(storage, self._gone, address, number, size).atexit = False

    def _see_copy(self, a_MK: Tensor) -> None:
        """oneDNN copies a transposed left operand (a gradient's) while it multiplies: fp32 on a CPU."""
        if a_MK.device.type == "cpu" and a_MK.dtype == torch.float32 and not a_MK.is_contiguous():
            self._parts.append(self._part())
            size = a_MK.numel() * a_MK.element_size()
            self._record(len(self._parts) - 1, size)
            self._record(len(self._parts) - 1, -size)

    def _gone(self, address: int, number: int, size: int) -> None:
        del self._numbers[address]
        self._record(number, -size)

    def _record(self, number: int, gained: int) -> None:
        self._events.append((number, gained, self.phase in ("forward", "backward")))

    def _part(self) -> str:
        if self.in_head:
            return "logits"
        computes_again = self.phase == "backward" and torch.is_grad_enabled()
        return "activations" if self.phase == "forward" or computes_again else "other"

    def name(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of these tensors as `part`, from their beginning."""
        for tensor in tensors:
            if tensor is not None:
                self._parts[self._numbers[tensor.untyped_storage()._cdata]] = part

    def history(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Bytes of each of PARTS after each event, [E, 6]; whether it is one of forward or backward, [E]."""
        columns = [PARTS.index(self._parts[number]) for number, _, _ in self._events]
        gained = np.zeros((len(self._events), len(PARTS)), np.int64)
        gained[np.arange(len(columns)), columns] = [size for _, size, _ in self._events]
        return gained.cumsum(axis=0), np.array([inside for _, _, inside in self._events])


class Replica:
    """The part of an engine that a step of one replica needs; it tells the trace where the step is.

    single frees its gradients after a step; the others keep theirs, as views of their buckets.
    """

    dp_size = 1

    def __init__(
        self, trace: MemoryTrace, bare: nn.Module, optimizer: torch.optim.Optimizer, *, keeps_gradients: bool
    ):
        self._trace, self._optimizer, self._keeps = trace, optimizer, keeps_gradients
        self._parameters = list(bare.parameters())
        trace.name("weights", self._parameters)
        if keeps_gradients:
            for p in self._parameters:
                p.grad = torch.zeros_like(p)

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        self._trace.phase = "forward"
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._trace.phase = "backward"
        loss.backward()

    def step(self, max_norm: float) -> Tensor:
        self._trace.phase = "step"
        self._trace.name("gradients", (p.grad for p in self._parameters))
        norm = clip_and_step(self._optimizer, None, max_norm)
        states = [s for state in self._optimizer.state.values() for s in state.values()]
        self._trace.name("optimizer", states)
        self._optimizer.zero_grad(set_to_none=not self._keeps)
        return norm


def fake() -> AbstractContextManager[Any]:
    """Under it tensors have shapes, and no memory."""
    mode: AbstractContextManager[Any] = FakeTensorMode()
    return mode


def count_step(
    config: Config,
    precision: Precision,
    device: torch.device,
    micro_size: int,
    *,
    accumulation: int,
    keeps_gradients: bool,
    tensors: AbstractContextManager[Any],
) -> MemoryTrace:
    """The trace of two steps of the eager model, the first of which makes the optimizer's state.

    tensors: `fake()`, or nullcontext() for a real step.
    """
    trace, task = MemoryTrace(), tasks.make_task(config, device)
    with tensors:
        batch = task.example_batch(micro_size)
    with tensors, trace:
        trace.hold(batch)
        bare = task.build_model(config.run.seed)
        convert(bare, device, precision.parameters)
        if config.parallel.activation_checkpointing:
            recompute_blocks(bare)
        optimizer = optim.make_optimizer(config.optim, bare.named_parameters(), bare)
        replica: Any = Replica(trace, bare, optimizer, keeps_gradients=keeps_gradients)
        watch_head(bare, trace)
        for _ in range(2):
            train_step(
                replica,
                bare,
                task.loss,
                [batch] * accumulation,
                grad_accum_steps=accumulation,
                num_targets=task.num_targets(0, micro_size * accumulation),
                device=device,
                precision=precision,
                max_norm=config.optim.clip,
                timers=Timers(device),
                progress=lambda: None,
            )
    return trace


def convert(bare: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Do what Module.to does, which cannot convert fake parameters that something refers to."""
    for module in bare.modules():
        for name, p in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(p.detach().to(device, dtype)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device, dtype), persistent=False)


def watch_head(bare: Model, trace: MemoryTrace) -> None:
    """Tell the trace when the decoder begins, and when the backward pass has left it, in a model with a
    `head`."""

    def leave(_: Tensor) -> None:
        trace.in_head = False

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        trace.in_head = True
        inputs[0].register_hook(leave)

    if isinstance(head := getattr(bare, "head", None), nn.Module):
        head.register_forward_pre_hook(enter)
