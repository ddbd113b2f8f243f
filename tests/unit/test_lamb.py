"""LAMB against timm's, against a rule written out in float64, and what an engine asks of it."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bert_dp.optim.lamb import Lamb
from tests.tensors import assert_near, with_moments
from tests.unit.test_optimizers import parameters_of, take_step

BETAS, EPS, DECAY = (0.9, 0.999), 1e-6, 0.01
DECAYED = {"wide": (6, 11), "tall": (13, 4)}
PLAIN = {"norm": (9,), "bias": (5,)}
SHAPES = DECAYED | PLAIN
SCALES = {"small": 0.02, "large": 20.0}  # large: ||w|| > 10, where some implementations cap it


def starting_weights(scale: float, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def gradients(steps: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """For each step, clipped to a global norm of 1 already, as an engine hands them over."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for step in range(steps):
        # of another size at every step and in every tensor
        raw = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (i - 2 + step % 3)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        norm = torch.sqrt(sum((g * g).sum() for g in raw.values()))  # type: ignore[arg-type]
        out.append({name: g / max(1.0, float(norm)) for name, g in raw.items()})
    return out


def rate(step: int) -> float:
    """Another one at every step: up, then down."""
    return 0.02 * min(step + 1, 40 - step) / 10


def groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [parameters[name] for name in DECAYED], "weight_decay": DECAY},
        {"params": [parameters[name] for name in PLAIN], "weight_decay": 0.0},
    ]


def make_lamb(parameters: dict[str, nn.Parameter], *, compiled: bool = False) -> Lamb:
    return Lamb(groups(parameters), lr=0.0, betas=BETAS, eps=EPS, compiled=compiled)


def train(
    make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], scale: float, steps: int = 30
) -> list[dict[str, Tensor]]:
    """The weights after every step."""
    parameters = parameters_of(starting_weights(scale))
    optimizer = make(parameters)
    out = []
    for step, grads in enumerate(gradients(steps)):
        take_step(optimizer, parameters, grads, rate(step))
        out.append({name: p.detach().clone() for name, p in parameters.items()})
    return out


class Reference:
    """LAMB as apex computes it, one number or one tensor at a time, in numpy: the ratio only with decay."""

    def __init__(self, weights: np.ndarray, decay: float):
        self.w, self.decay, self.t = weights.copy(), decay, 0
        self.m, self.v = np.zeros_like(weights), np.zeros_like(weights)

    def step(self, g: np.ndarray, lr: float) -> None:
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        m_hat = self.m / (1 - BETAS[0] ** self.t)
        v_hat = self.v / (1 - BETAS[1] ** self.t)
        u = m_hat / (np.sqrt(v_hat) + EPS) + self.decay * self.w
        size, length = np.linalg.norm(self.w.ravel()), np.linalg.norm(u.ravel())
        ratio = size / length if self.decay and size and length else 1.0
        self.w = self.w - lr * ratio * u


def timms_lamb() -> Any:
    """timm's Lamb without timm/__init__, which needs torchvision; the stand-in packages do not stay."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("timm is not installed: the rule written by hand is the only reference here")
    root = spec.submodule_search_locations[0]
    before = {name for name in sys.modules if name.partition(".")[0] == "timm"}
    try:
        for name, path in (("timm", root), ("timm.optim", f"{root}/optim")):
            stub = types.ModuleType(name)
            stub.__path__ = [path]
            sys.modules[name] = stub
        return importlib.import_module("timm.optim.lamb").Lamb
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "timm" and n not in before]:
            del sys.modules[name]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_thirty_steps_are_timms(scale: float) -> None:
    theirs = timms_lamb()
    expected = train(lambda p: theirs(groups(p), lr=0.0, betas=BETAS, eps=EPS, max_grad_norm=None), scale)
    for step, (a, b) in enumerate(zip(train(make_lamb, scale), expected, strict=True)):
        assert_near(a, b, 1e-12, step)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_thirty_steps_are_the_rule_written_by_hand(scale: float) -> None:
    start = starting_weights(scale)
    if scale > 1:
        assert all(float(start[name].norm()) > 10 for name in DECAYED)
    references = {name: Reference(w.numpy(), DECAY * (name in DECAYED)) for name, w in start.items()}
    for step, (ours, grads) in enumerate(zip(train(make_lamb, scale), gradients(30), strict=True)):
        for name, reference in references.items():
            reference.step(grads[name].numpy(), rate(step))
        assert_near(ours, {n: torch.from_numpy(r.w) for n, r in references.items()}, 1e-12, step)
    moved = {name: float((ours[name] - start[name]).norm() / start[name].norm()) for name in start}
    assert min(moved.values()) > 1e-3, moved  # far beyond the tolerance


def test_a_weight_of_norm_zero_has_ratio_one() -> None:
    """An update of all ones in the first step, so the weight is -lr exactly where the ratio is 1."""
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    other = nn.Parameter(torch.full((3, 4), 2.0, dtype=torch.float64))
    optimizer = Lamb(
        [{"params": [parameter, other], "weight_decay": DECAY}], lr=0.125, betas=BETAS, eps=1e-30
    )
    for p in (parameter, other):
        p.grad = torch.full((3, 4), 0.5, dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(parameter, torch.tensor(-0.125, dtype=torch.float64), rtol=1e-14, atol=0)
    # the weight's neighbour in the same call has its own: ||w|| / ||u|| = 2 / 1.02, times u = 1.02
    assert torch.allclose(other, torch.tensor(2.0 - 0.125 * 2.0, dtype=torch.float64), rtol=1e-14, atol=0)


def test_an_update_of_norm_zero_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = Lamb([{"params": [parameter], "weight_decay": 1e-300}], lr=1.0, betas=BETAS, eps=EPS)
    parameter.grad = torch.zeros(4, dtype=torch.float64)
    optimizer.step()  # the squares of the update underflow
    assert torch.equal(parameter, torch.ones(4, dtype=torch.float64))


def half_of(tensors: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """Along the first dimension, at one third: parts need not be equal."""
    return {
        name: t[: len(t) // 3].clone() if side == 0 else t[len(t) // 3 :].clone()
        for name, t in tensors.items()
    }


class Exchange:
    """Adds up what two threads bring, as an all-reduce does; also counts the calls."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._brought: list[Tensor] = [torch.empty(0), torch.empty(0)]
        self.shapes: list[torch.Size] = []

    def __call__(self, side: int, sums_2N: Tensor) -> Tensor:
        self._brought[side] = sums_2N.clone()
        self._barrier.wait()
        total = self._brought[0] + self._brought[1]
        self._barrier.wait()
        self.shapes.append(sums_2N.shape)
        return total


def test_two_optimizers_of_halves_are_one_of_whole_tensors() -> None:
    exchange, start, steps = Exchange(), starting_weights(0.02), gradients(10)
    halves = [parameters_of(half_of(start, side)) for side in (0, 1)]
    failures: list[BaseException] = []

    def work(side: int) -> None:
        try:
            optimizer = make_lamb(halves[side])
            optimizer.sharded_sums = lambda sums_2N: exchange(side, sums_2N)
            for step, grads in enumerate(steps):
                take_step(optimizer, halves[side], half_of(grads, side), rate(step))
        except BaseException as error:
            failures.append(error)
            exchange._barrier.abort()

    threads = [threading.Thread(target=work, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    together = {name: torch.cat([halves[0][name], halves[1][name]]) for name in SHAPES}
    assert_near(together, train(make_lamb, 0.02, steps=10)[-1], 1e-12, "the end")
    assert exchange.shapes == [torch.Size((2, len(SHAPES)))] * 20  # one exchange a step for all tensors


def test_the_order_of_the_sums_is_that_of_the_parameters() -> None:
    """A replicated tensor is counted by its place in this row (see `ShardedSums`); one without decay has no
    ratio and counts 0."""
    parameters = parameters_of(starting_weights(0.02))
    optimizer = make_lamb(parameters)
    seen: list[Tensor] = []
    optimizer.sharded_sums = lambda sums_2N: seen.append(sums_2N.clone()) or sums_2N  # type: ignore[func-returns-value]
    expected = [
        float((p.detach() ** 2).sum()) * (group["weight_decay"] > 0)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    take_step(optimizer, parameters, gradients(1)[0], 0.1)
    assert seen[0][0].tolist() == pytest.approx(expected, rel=1e-14)
    assert len({round(x, 6) for x in expected}) == len(DECAYED) + 1  # and the zeros


def ten_steps(optimizer: Lamb, parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """One of them divided and two skipped, of which one has a gradient of NaN and infinity; gives weights
    and moments after each."""
    for step, grads in enumerate(gradients(10)):
        optimizer.grad_scale = torch.tensor(3.0 if step == 4 else 1.0)
        optimizer.found_inf = torch.tensor(float(step in (0, 6)))
        if step == 6:
            grads["tall"][0, 0], grads["norm"][1] = torch.nan, -torch.inf
        take_step(optimizer, parameters, grads, rate(step))
        yield {name: t.clone() for name, t in with_moments(optimizer, parameters.items()).items()}


@pytest.mark.slow
def test_the_compiled_form_is_the_eager_one() -> None:
    """Two graphs, and no step makes another: what has no decay is torch's fused Adam."""
    results, frames = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # of the tests before
        parameters = parameters_of(starting_weights(0.02))
        optimizer = make_lamb(parameters, compiled=compiled)
        for _ in ten_steps(optimizer, parameters):
            frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(with_moments(optimizer, parameters.items()))
    assert_near(results[1], results[0], 1e-12, "the end")
    assert frames[9] == 0
    assert frames[10] == frames[19] == 2  # moments and descent
