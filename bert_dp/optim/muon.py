"""Create Muon (Keller Jordan, kellerjordan.github.io/posts/muon) for matrices, with AdamW for the rest.

A matrix's update is its orthogonalised Nesterov momentum times 0.2 sqrt(max(rows, columns)). The factor makes
the update as large as an AdamW update, so that one learning rate suits both (arXiv 2502.16982, section 2.2).
A parameter that fuses several matrices is split, because orthogonalising it as one matrix makes training
worse (Megatron-LM pull request 1428).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bert_dp.config import OptimConfig
from bert_dp.model.interface import Model
from bert_dp.optim import Named, Optimizer, parameter_groups

# Newton-Schulz: x <- a x + b (x x') x + c (x x')^2 x, five times
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
BATCH_ELEMENTS = 2**25  # maximum number of matrix elements in a batched product: 128 MiB in fp32

FusedSplit = tuple[int, int]
"""(dimension, number of matrices fused along it), as in a model's tensor plan."""
WHOLE: FusedSplit = (0, 1)


def make(config: OptimConfig, named: Named, model: Model, *, compiled: bool, precision: str) -> Optimizer:
    """Build Muon for the matrices and AdamW for the rest; see `bert_dp.optim.make_optimizer`."""
    matrices = {name: parameter for name, parameter in named if model.is_matrix(name)}
    rest = [(name, parameter) for name, parameter in named if name not in matrices]
    plan = model.tensor_plan() or {}
    groups = parameter_groups(rest, config.weight_decay, model.is_decayed)
    groups.append(
        {
            "params": list(matrices.values()),
            "weight_decay": config.weight_decay,
            "splits": [plan.get(name, WHOLE) for name in matrices],
        }
    )
    on_gpu = any(parameter.device.type == "cuda" for _, parameter in named)
    return Muon(
        groups,
        lr=0.0,
        momentum=config.momentum,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        # the original always uses bf16; bert-dp does so only in bf16 runs on a GPU, where it is faster
        multiply_in=torch.bfloat16 if precision == "bf16" and on_gpu else None,
    )


class Muon(Optimizer):
    """Optimizer that updates matrices with Muon and other tensors with AdamW. Every matrix must be whole on
    the rank that updates it. A parameter group of matrices has the key `splits`: one FusedSplit per matrix.
    A matrix's only state is momentum_buffer. `step` overwrites .grad with the matrix to orthogonalise.
    `multiply_in`: dtype of the Newton-Schulz products; None = the parameters' dtype."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        multiply_in: torch.dtype | None = None,
    ):
        self._multiply_in = multiply_in
        settings = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(params, {**settings, "splits": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient, without a host sync."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["splits"] is not None:
                split_of = dict(zip(group["params"], group["splits"], strict=True))
                self._muon(group, params, [split_of[p] for p in params])
            elif params:
                self.adamw(group, params)

    def _muon(self, group: dict[str, Any], params: list[Tensor], splits: list[FusedSplit]) -> None:
        keep, divisor = self.controls(params[0])
        lr, momentum = group["lr"] * keep, group["momentum"]
        weights: list[Tensor] = []
        directions: list[Tensor] = []
        for p, (dim, count) in zip(params, splits, strict=True):
            assert p.grad is not None
            if not self.state[p]:
                self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
            buffer = self.state[p]["momentum_buffer"]
            p.grad.copy_(torch.where(keep > 0, p.grad / divisor, 0.0))
            buffer.lerp_(p.grad, (1.0 - momentum) * keep)
            p.grad.lerp_(buffer, momentum)
            p.mul_(1.0 - lr * group["weight_decay"])
            weights += p.chunk(count, dim)
            directions += p.grad.chunk(count, dim)
        for batch in batches_of_a_shape(directions):
            updates = orthogonalize(torch.stack([directions[i] for i in batch]), self._multiply_in)
            updates *= lr * (0.2 * max(updates.shape[-2:]) ** 0.5)
            for i, update in zip(batch, updates, strict=True):
                weights[i].sub_(update)


def batches_of_a_shape(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield lists of indices of equally shaped matrices. The matrices in a list have at most BATCH_ELEMENTS
    elements in total, unless there is only one."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    for shape, numbers in by_shape.items():
        most = max(1, BATCH_ELEMENTS // shape.numel())
        for start in range(0, len(numbers), most):
            yield numbers[start : start + most]


@contextmanager
def no_tf32() -> Iterator[None]:
    """Turn TF32 off within this context, even if the model may use it (`devices.allow_tf32`)."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


@no_tf32()
def orthogonalize(matrices: Tensor, multiply_in: torch.dtype | None = None) -> Tensor:
    """Approximate U V' for each matrix, whose singular value decomposition is U S V'. Return [..., R, C] in
    the matrices' dtype. `multiply_in`: dtype of the products; None = the matrices' dtype."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(multiply_in or x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
