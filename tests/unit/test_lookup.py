"""Both ways of adding the gradient of looked-up rows, against a product with one-hot vectors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_dp.model import kernels

ROWS, HIDDEN = 11, 6


def case(dtype: torch.dtype, *, foreign: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Row 4 is looked up most, row 0 and the last once each, row 7 never; four places are foreign."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.tensor([[4, 4, 1, 4, 10, 2], [2, 4, 0, 4, 4, 9]])
    grad_BSH = torch.randn(2, 6, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    grad_VH = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    foreign_BS = torch.tensor([[0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 1]], dtype=torch.bool) if foreign else None
    return grad_VH, ids_BS, grad_BSH, foreign_BS


def by_one_hot_vectors(
    grad_VH: Tensor, ids_BS: Tensor, grad_BSH: Tensor, foreign_BS: Tensor | None
) -> Tensor:
    one_hot_BSV = F.one_hot(ids_BS, ROWS).double()
    if foreign_BS is not None:
        one_hot_BSV[foreign_BS] = 0
    return grad_VH.double() + torch.einsum("bsv,bsh->vh", one_hot_BSV, grad_BSH.double())


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "some foreign"])
@pytest.mark.parametrize("add", [kernels.add_by_index, kernels.add_dense])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_place_of_a_row_counts_in_place(add, dtype: torch.dtype, foreign: bool) -> None:
    grad_VH, ids_BS, grad_BSH, foreign_BS = case(dtype, foreign=foreign)
    expected = by_one_hot_vectors(grad_VH, ids_BS, grad_BSH, foreign_BS)
    kept = grad_BSH.clone()
    out = add(grad_VH, ids_BS, grad_BSH, foreign_BS)
    assert out.data_ptr() == grad_VH.data_ptr()
    assert out.dtype == dtype
    assert torch.equal(grad_BSH, kept)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    called = []
    for name in ("add_by_index", "add_dense"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: called.append(name))
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            ids_BS = torch.zeros(2, 3, dtype=torch.int64, device=device)
            kernels.add_row_gradients(
                torch.ones(4, 5, device=device), ids_BS, torch.ones(2, 3, 5, device=device)
            )
    assert called == ["add_by_index", "add_dense"]
