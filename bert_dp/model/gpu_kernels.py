"""Implement attention over short sequences and the gated GELU in Triton, for 16-bit tensors on NVIDIA GPUs.

Both operators are deterministic and need no workspace. docs/gpu.md compares their speed with cuDNN and
inductor.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2_E = tl.constexpr(1.4426950408889634)


def fits(length: int, head_size: int) -> bool:
    """Return whether `packed_attention` supports this sequence length and head size. Both are limited,
    because one Triton program computes all scores of one head of one sequence."""
    return length <= 128 and head_size in (16, 32, 64)


@triton.jit
def probabilities(q, k, column, scale, length):
    score = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
    score = tl.where(column[None, :] < length, score, float("-inf"))
    p = tl.exp2(score - tl.max(score, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def attend(qkv, out, length, scale, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute attention for one head of one sequence."""
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    H: tl.constexpr = HEADS * D
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, D)[None, :]
    inside = row < length
    first = batch.to(tl.int64) * length
    source = qkv + (first + row) * (3 * H) + head * D + column
    q = tl.load(source, mask=inside, other=0.0)
    k = tl.load(source + H, mask=inside, other=0.0)
    v = tl.load(source + 2 * H, mask=inside, other=0.0)
    p = probabilities(q, k, tl.arange(0, BLOCK), scale, length)
    x = tl.dot(p.to(v.dtype), v).to(out.dtype.element_ty)
    tl.store(out + (first + row) * H + head * D + column, x, mask=inside)


@triton.jit
def attend_backward(
    qkv, grad_out, grad_qkv, length, scale, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradients of q, k and v for one head of one sequence, from recomputed probabilities."""
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    H: tl.constexpr = HEADS * D
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, D)[None, :]
    inside = row < length
    first = batch.to(tl.int64) * length
    packed = (first + row) * (3 * H) + head * D + column
    q = tl.load(qkv + packed, mask=inside, other=0.0)
    k = tl.load(qkv + packed + H, mask=inside, other=0.0)
    v = tl.load(qkv + packed + 2 * H, mask=inside, other=0.0)
    up = tl.load(grad_out + (first + row) * H + head * D + column, mask=inside, other=0.0)
    p = probabilities(q, k, tl.arange(0, BLOCK), scale, length)
    kind = grad_qkv.dtype.element_ty
    tl.store(grad_qkv + packed + 2 * H, tl.dot(tl.trans(p.to(up.dtype)), up).to(kind), mask=inside)
    grad_p = tl.dot(up, tl.trans(v))
    grad_score = (p * (grad_p - tl.sum(p * grad_p, 1)[:, None]) * scale).to(q.dtype)
    tl.store(grad_qkv + packed, tl.dot(grad_score, k).to(kind), mask=inside)
    tl.store(grad_qkv + packed + H, tl.dot(tl.trans(grad_score), q).to(kind), mask=inside)


@triton.jit
def gate(x_gate, out, rows, columns, BLOCK: tl.constexpr):
    """Write gelu(x) * gate. Every row of `x_gate` contains x, followed by its gate."""
    row = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    source = x_gate + row * (2 * columns) + column
    x = tl.load(source, mask=inside).to(tl.float32)
    g = tl.load(source + columns, mask=inside).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)) * g
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(x_gate, grad_out, grad_x_gate, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    packed = row * (2 * columns) + column
    x = tl.load(x_gate + packed, mask=inside).to(tl.float32)
    g = tl.load(x_gate + packed + columns, mask=inside).to(tl.float32)
    up = tl.load(grad_out + row * columns + column, mask=inside).to(tl.float32)
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # the normal CDF at x
    slope = below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    kind = grad_x_gate.dtype.element_ty
    tl.store(grad_x_gate + packed, (up * g * slope).to(kind), mask=inside)
    tl.store(grad_x_gate + packed + columns, (up * x * below).to(kind), mask=inside)


@triton_op("bert_dp::packed_attention", mutates_args=())
def packed_attention(qkv_BS3H: Tensor, heads: int) -> Tensor:
    """Compute bidirectional attention over sequences of at most 128 tokens: [B, S, 3 H] -> [B, S, H].

    One program processes one head of one sequence, so the backward pass needs neither the output nor the
    softmax's row sums, uses no atomics, and writes the gradients of q, k and v to one packed tensor.
    """
    batch, length, width = qkv_BS3H.shape
    out = qkv_BS3H.new_empty(batch, length, width // 3)
    size = width // 3 // heads
    block = max(16, triton.next_power_of_2(length))
    wrap_triton(attend)[(batch * heads,)](qkv_BS3H, out, length, size**-0.5, heads, size, block, num_warps=8)
    return out


@triton_op("bert_dp::packed_attention_backward", mutates_args=())
def packed_attention_backward(qkv_BS3H: Tensor, grad_BSH: Tensor, heads: int) -> Tensor:
    batch, length, width = qkv_BS3H.shape
    grad = torch.empty_like(qkv_BS3H)
    size = width // 3 // heads
    block = max(16, triton.next_power_of_2(length))
    wrap_triton(attend_backward)[(batch * heads,)](
        qkv_BS3H, grad_BSH.contiguous(), grad, length, size**-0.5, heads, size, block, num_warps=8
    )
    return grad


@triton_op("bert_dp::gated_gelu", mutates_args=())
def gated_gelu(x_gate: Tensor) -> Tensor:
    """Return gelu(x) * gate, [..., I]. `x_gate` [..., 2 I] contains x, followed by its gate."""
    columns = x_gate.shape[-1] // 2
    out = x_gate.new_empty(*x_gate.shape[:-1], columns)
    rows = out.numel() // columns
    grid = (triton.cdiv(rows, 4), triton.cdiv(columns, 512))
    wrap_triton(gate)[grid](x_gate, out, rows, columns, 512)
    return out


@triton_op("bert_dp::gated_gelu_backward", mutates_args=())
def gated_gelu_backward(x_gate: Tensor, grad: Tensor) -> Tensor:
    columns = x_gate.shape[-1] // 2
    grad_x_gate = torch.empty_like(x_gate)
    rows = grad.numel() // columns
    grid = (triton.cdiv(rows, 4), triton.cdiv(columns, 512))
    wrap_triton(gate_backward)[grid](x_gate, grad.contiguous(), grad_x_gate, rows, columns, 512)
    return grad_x_gate


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.rest = inputs[1:]


def _attention_gradient(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, None]:
    return packed_attention_backward(*ctx.saved_tensors, grad_BSH, *ctx.rest), None


def _gate_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return gated_gelu_backward(*ctx.saved_tensors, grad)


packed_attention.register_autograd(_attention_gradient, setup_context=_save)
gated_gelu.register_autograd(_gate_gradient, setup_context=_save)
