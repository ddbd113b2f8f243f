"""Add the gradient of an embedding's rows to the gradient that the matrix has from another use.

Both ways are deterministic. A row is looked up many times: `<mask>` alone is a fifth of all positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_row_gradients(
    grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None = None
) -> Tensor:
    """Add the gradient of every looked-up row to grad_VH in place; nothing of the places that `foreign_BS`
    marks, whose ids may be any within V."""
    add = add_dense if grad_VH.device.type == "cuda" else add_by_index
    return add(grad_VH, ids_BS, grad_BSH, foreign_BS)


def add_by_index(grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None) -> Tensor:
    """Add row by row: the fastest on a CPU. On a GPU one warp would walk all places of a row, one by one."""
    if foreign_BS is not None:
        grad_BSH = grad_BSH.masked_fill(foreign_BS[..., None], 0.0)
    return grad_VH.index_put_((ids_BS,), grad_BSH, accumulate=True)


def add_dense(grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None) -> Tensor:
    """Add by the kernel of nn.Embedding's backward, which sums a row's places in parallel, and 16-bit
    gradients in fp32. Foreign places go to a padding row behind the last one, which the kernel leaves out."""
    rows = grad_VH.shape[0]
    if foreign_BS is None:
        dense_VH = torch.ops.aten.embedding_dense_backward(grad_BSH, ids_BS, rows, -1, False)
    else:
        ids_BS = ids_BS.masked_fill(foreign_BS, rows)
        dense_VH = torch.ops.aten.embedding_dense_backward(grad_BSH, ids_BS, rows + 1, rows, False)[:rows]
    return grad_VH.add_(dense_VH)
