"""Multiply matrices for the linear layers: by oneDNN on an AMD CPU with AVX-512 in fp32, else torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import cpu_field

# torch hands fp32 products on x86 to MKL, and carries oneDNN too. For the products of a training step oneDNN
# takes 5-10 % less time on AMD with AVX-512 (Zen 4), 22 % more on AMD with AVX2 (Zen 3) and 39 % more on
# Intel (Xeon, AVX-512): benchmarks/RESULTS.md
USES_ONEDNN = (
    cpu_field("vendor_id") == "AuthenticAMD"
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


@torch.library.custom_op("bert_dp::matmul_nt", mutates_args=())
def matmul_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a @ b.T, [M, N]. An operator of its own because inductor takes oneDNN's only with constant
    weights."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return product


@matmul_nt.register_fake
def _(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = ctx.saved_tensors
    return matmul_nt(grad_MN, b_NK.t()), matmul_nt(grad_MN.t(), a_MK.t())


matmul_nt.register_autograd(_backward, setup_context=_save)


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a @ b.T, [M, N], by the faster library for this device and dtype; for code with its own
    backward."""
    fast = USES_ONEDNN and a_MK.device.type == "cpu" and a_MK.dtype == b_NK.dtype == torch.float32
    out: Tensor = matmul_nt(a_MK, b_NK) if fast else a_MK @ b_NK.t()
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear. Sharded weights, autocast, other widths and devices, and what is exported take
    torch's own way."""
    if not (
        USES_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(weight) in (nn.Parameter, Tensor)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_exporting()
    ):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        out = matmul_nt(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias
    inferred: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return inferred


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def widened(logits_PV: Tensor) -> Tensor:
    """Convert to fp32 at least, as cross entropies are computed."""
    return logits_PV if logits_PV.dtype == torch.float64 else logits_PV.float()
