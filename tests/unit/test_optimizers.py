"""What an engine asks of every optimizer: a skipped step, gradients that are divided, missing gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bert_dp.config import OptimConfig
from bert_dp.model.interface import Model
from bert_dp.optim import make_optimizer, set_lr
from tests.tensors import bits, with_moments

SHAPES = {
    "wide": (6, 17),
    "tall": (19, 5),
    "square": (8, 8),
    "embedding": (12, 4),
    "norm": (9,),
    "bias": (5,),
}
OPTIMIZERS = ("adamw", "lamb", "muon")
Parameters = dict[str, nn.Parameter]


class Matrices(Model):
    def is_matrix(self, name: str) -> bool:
        return name in ("wide", "tall", "square")


def random_tensors(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def parameters_of(weights: dict[str, Tensor]) -> Parameters:
    return {name: nn.Parameter(w.clone()) for name, w in weights.items()}


def rate(step: int) -> float:
    """Another one at every step."""
    return 0.01 * (1 + step % 4)


def take_step(
    optimizer: torch.optim.Optimizer, parameters: Parameters, grads: dict[str, Tensor], lr: float
) -> None:
    """Of the parameters that `grads` names."""
    set_lr(optimizer, lr)
    for name, parameter in parameters.items():
        parameter.grad = grads[name].to(parameter.dtype).clone() if name in grads else None
    optimizer.step()


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[torch.optim.Optimizer, Parameters]:
    parameters = parameters_of(random_tensors(0, 0.02, dtype))
    config = OptimConfig(name=name, weight_decay=0.1)  # type: ignore[arg-type]
    return make_optimizer(config, parameters.items(), Matrices()), parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("skipped", [0, 3])
def test_a_skipped_step_leaves_everything_bit_for_bit(name: str, skipped: int, dtype: torch.dtype) -> None:
    results = []
    for with_bad_step in (True, False):
        optimizer, parameters = make(name, dtype)
        for step in range(6):
            grads = random_tensors(step + 1)
            if with_bad_step and step == skipped:
                before = with_moments(optimizer, parameters.items())
                before_bits = bits(before)
                optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
                bad = {key: g.clone() for key, g in grads.items()}
                bad["wide"][0, 0], bad["tall"][1, 1], bad["norm"][0] = torch.nan, torch.inf, -torch.inf
                take_step(optimizer, parameters, bad, 0.5)
                after = with_moments(optimizer, parameters.items())
                assert {key: bits(after)[key] for key in before} == before_bits
                assert not any(after[key].any() for key in after.keys() - before.keys())  # made as zeros
                assert skipped or len(after) > len(before)
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            take_step(optimizer, parameters, grads, rate(step))
        counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        assert counts == {6.0}
        results.append(bits(with_moments(optimizer, parameters.items())))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_divided_by_grad_scale(name: str) -> None:
    """Seen in the moments too: Muon's update has no memory of the gradient's size."""
    results = []
    for scale in (1.0, 8.0):
        optimizer, parameters = make(name)
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        for step in range(5):
            grads = {key: g * scale for key, g in random_tensors(step + 1).items()}
            take_step(optimizer, parameters, grads, rate(step))
        results.append(bits(with_moments(optimizer, parameters.items())))
    assert results[0] == results[1]  # a power of two rounds nothing


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_a_gradient_stay_as_they_are(name: str) -> None:
    optimizer, parameters = make(name)
    take_step(optimizer, parameters, {}, 0.1)
    take_step(optimizer, parameters, {key: random_tensors(1)[key] for key in ("wide", "norm")}, 0.1)
    start = random_tensors(0, 0.02)
    assert {key for key, p in parameters.items() if not torch.equal(p, start[key])} == {"wide", "norm"}
    assert set(optimizer.state) == {parameters["wide"], parameters["norm"]}
