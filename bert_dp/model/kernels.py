"""Implement dropout keyed by example and site, gradients of embedding rows, and matrix products with oneDNN.

The dropped elements depend only on the example's key (`data.stream.key32` of seed, epoch and index), the site
in the model, and the row and column in the unsharded tensor. Therefore, they do not change with the micro
batch, the padded length, the rank or the shard, and a recomputed block drops the same elements again.
"""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import cpu_field

# On x86, torch computes fp32 products with MKL, but it also includes oneDNN. For the products of a training
# step, oneDNN takes 5-10 % less time than MKL on AMD with AVX-512 (Zen 4), 22 % more on AMD with AVX2 (Zen 3)
# and 39 % more on Intel with AVX-512 (Xeon); the last two figures are from benchmarks/RESULTS.md
USES_ONEDNN = (
    cpu_field("vendor_id") == "AuthenticAMD"
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)

HAS_TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def takes_gpu_kernel(x: Tensor) -> bool:
    """Return whether gpu_kernels supports `x`: a 16-bit tensor on an NVIDIA GPU, except during export."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return HAS_TRITON and narrow and x.device.type == "cuda" and not torch.compiler.is_exporting()


@torch.library.custom_op("bert_dp::matmul_nt", mutates_args=())
def matmul_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Compute a @ b.T with oneDNN: [M, N]. Inductor by itself calls oneDNN only for constant weights."""
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")


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
    """Compute a @ b.T, [M, N], with the library that is faster for the device and dtype."""
    fast = USES_ONEDNN and a_MK.device.type == "cpu" and a_MK.dtype == b_NK.dtype == torch.float32
    return matmul_nt(a_MK, b_NK) if fast else a_MK @ b_NK.t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear, with oneDNN if it is faster. Sharded weights, autocast, dtypes other than fp32, GPUs
    and exported graphs use torch's implementation."""
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
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def widened(logits_PV: Tensor) -> Tensor:
    """Return the logits in at least fp32, for computing cross entropies."""
    return logits_PV if logits_PV.dtype == torch.float64 else logits_PV.float()


def add_row_gradients(
    grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None = None
) -> Tensor:
    """Add the gradients of the looked-up rows to grad_VH in place. `foreign_BS`: True for positions to
    ignore, whose ids can be any valid row numbers."""
    add = add_dense if grad_VH.device.type == "cuda" else add_by_index
    return add(grad_VH, ids_BS, grad_BSH, foreign_BS)


def add_by_index(grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None) -> Tensor:
    """Add the gradients position by position, which is fastest on a CPU. On a GPU, a single warp would add
    all gradients of a token id."""
    if foreign_BS is not None:
        grad_BSH = grad_BSH.masked_fill(foreign_BS[..., None], 0.0)
    return grad_VH.index_put_((ids_BS,), grad_BSH, accumulate=True)


def add_dense(grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None) -> Tensor:
    """Add the gradients to `grad_VH` with nn.Embedding's backward kernel. It sums the gradients of a token id
    in parallel, using fp32 for 16-bit gradients. It skips the positions that `foreign_BS` marks."""
    rows = grad_VH.shape[0]
    if foreign_BS is None:
        dense_VH = torch.ops.aten.embedding_dense_backward(grad_BSH, ids_BS, rows, -1, False)
    else:
        ids_BS = ids_BS.masked_fill(foreign_BS, rows)
        dense_VH = torch.ops.aten.embedding_dense_backward(grad_BSH, ids_BS, rows + 1, rows, False)[:rows]
    return grad_VH.add_(dense_VH)


ROW = 2**17  # row stride, greater than any number of columns; rows * ROW stays below 2^31


def mix32(x: Tensor) -> Tensor:
    """Hash int32 values bijectively ("lowbias32" from C. Wellons's hash-prospector)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def fold_in(key: Tensor, site: int | Tensor) -> Tensor:
    """Derive the int32 keys of a dropout site from `key`. `site`: an int, or an int32 tensor that is on the
    same device as `key` and is broadcast with it."""
    if isinstance(site, int):  # created on the device, because a copy from the host would block the host
        site = torch.full((), site, dtype=torch.int32, device=key.device)
    return mix32(key ^ mix32(site + 1))


def dropped(key: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """Return a mask [*key.shape, rows, columns]: True for elements to drop (probability p). `key`: int32."""
    row_R1 = torch.arange(rows, dtype=torch.int32, device=key.device)[:, None] * ROW
    column_C = torch.arange(columns, dtype=torch.int32, device=key.device)
    return (mix32(key[..., None, None] ^ (row_R1 + column_C)) & 0x7FFFFFFF) < int(p * 2**31)


class KeyedDropout(nn.Module):
    """Dropout: in training, zero the elements selected by `dropped` and divide the others by 1 - p."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Apply dropout to x, [*key.shape, rows, columns]. Raise ValueError in training if `key` is None."""
        if not self.training or not self.p:
            return x
        if key is None:
            raise ValueError("dropout needs a key per example, from which it derives random numbers")
        out = dropped(fold_in(key, self.site), x.shape[-2], x.shape[-1], self.p)
        return (x / (1 - self.p)).masked_fill(out, 0.0)
