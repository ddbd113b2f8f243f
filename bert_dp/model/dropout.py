"""Drop by example and site alone.

What is dropped follows from a key for each example (`data.key32`, of seed, epoch and index), the site
in the model, and row and column on the whole grid. So it does not change with the micro batch, the
padded length, the rank or the shard that a number falls to, and a block that is computed again drops the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROW = 2**17  # above any number of columns: a column is below it, a row times it below 2^31


def mix32(x: Tensor) -> Tensor:
    """Apply a 32-bit bijection of int32 (C. Wellons, hash-prospector, "lowbias32")."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def fold_in(key: Tensor, site: int | Tensor) -> Tensor:
    """Return the key of a site below `key`, int32 of their broadcast shape; for sites, an int32 tensor on the
    same device, theirs."""
    if isinstance(site, int):  # filled there: a number that is copied there makes the host wait
        site = torch.full((), site, dtype=torch.int32, device=key.device)
    return mix32(key ^ mix32(site + 1))


def dropped(key: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """Return [*key.shape, rows, columns] bool, True with probability p; int32 keys."""
    row_R1 = torch.arange(rows, dtype=torch.int32, device=key.device)[:, None] * ROW
    column_C = torch.arange(columns, dtype=torch.int32, device=key.device)
    return (mix32(key[..., None, None] ^ (row_R1 + column_C)) & 0x7FFFFFFF) < int(p * 2**31)


class KeyedDropout(nn.Module):
    """Zero in training what `dropped` says, with probability p, and divide the rest by 1 - p."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Apply to x, [*key.shape, rows, columns]. Raises ValueError in training without a key."""
        if not self.training or not self.p:
            return x
        if key is None:
            raise ValueError("dropout needs a key for each example: its random numbers follow from it")
        out = dropped(fold_in(key, self.site), x.shape[-2], x.shape[-1], self.p)
        return (x / (1 - self.p)).masked_fill(out, 0.0)
