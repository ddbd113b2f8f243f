"""The linear layers' product is the same by oneDNN, which an AMD CPU takes, and by torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_dp.model import kernels

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)


def gradients(linear: object, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output [B, S, N] and the gradients of x [B, S, K], weight [N, K] and bias [N]."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = linear(*leaves)  # type: ignore[operator]
    out.square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_product_and_gradients_are_those_of_linear(
    by_onednn: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USES_ONEDNN", by_onednn)
    torch.manual_seed(0)
    inputs = (torch.randn(3, 5, 24), torch.randn(40, 24), torch.randn(40))
    ours = torch.compile(kernels.linear, fullgraph=True) if compiled else kernels.linear
    with torch.profiler.profile() as profile:
        mine = gradients(ours, inputs)
    torch.testing.assert_close(mine, gradients(F.linear, inputs), rtol=1e-4, atol=1e-4)
    calls = sum(event.count for event in profile.key_averages() if event.key == "mkldnn::_linear_pointwise")
    assert calls == (3 if by_onednn else 0)


@pytest.mark.parametrize(
    ("by_onednn", "mode", "calls"),
    [(True, torch.inference_mode, 1), (True, torch.no_grad, 1), (False, torch.inference_mode, 0)],
)
def test_what_needs_no_gradient_takes_the_same_way(
    by_onednn: bool, mode: type, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USES_ONEDNN", by_onednn)
    torch.manual_seed(0)
    inputs = (torch.randn(3, 5, 24), torch.randn(40, 24), torch.randn(40))
    with mode(), torch.profiler.profile() as profile:
        torch.testing.assert_close(kernels.linear(*inputs), F.linear(*inputs), rtol=1e-4, atol=1e-4)
    found = [event.count for event in profile.key_averages() if event.key == "mkldnn::_linear_pointwise"]
    assert sum(found) == calls


def test_what_is_exported_has_torchs_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of ours stands in a file for other programs."""
    monkeypatch.setattr(kernels, "USES_ONEDNN", True)
    with torch.no_grad():
        program = torch.export.export(kernels.Linear(24, 40), (torch.randn(5, 24),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names == {"aten.linear.default"}
