"""Tests of the gradient noise scale against its formulas, and of its norms, without starting ranks."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bert_dp.config import Config
from bert_dp.training.noise import NormPairs, estimate, estimate_of_run
from tests.helpers import make_config, write_lines
from tests.ranks import OneOf

# --- the estimate


def moments(values_2N: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return means and their covariance from sums over B = 20 blocks: B / (B - 1) / n^2 x their products."""
    n = len(values_2N[0])
    means = [math.fsum(row) / n for row in values_2N]
    cuts = [i * n // 20 for i in range(21)]
    sums = [
        [sum(x - mean for x in row[a:b]) for a, b in itertools.pairwise(cuts)]
        for row, mean in zip(values_2N, means, strict=True)
    ]
    return means, [[20 / 19 / n**2 * sum(map(float.__mul__, a, b)) for b in sums] for a in sums]


@pytest.mark.parametrize("steps", [50, 67, 200])
def test_estimates_and_intervals_equal_the_formulas(steps: int) -> None:
    draw = random.Random(steps)
    small = [13 + draw.gauss(0, 1) for _ in range(steps)]
    big = [5 + draw.gauss(0, 0.5) for _ in range(steps)]
    result = estimate(small, big, 2, 10)
    grads = [(10 * y - 2 * x) / 8 for x, y in zip(small, big, strict=True)]
    traces = [(x - y) / (1 / 2 - 1 / 10) for x, y in zip(small, big, strict=True)]
    (grad, trace), ((var, cov), (_, var_trace)) = moments([grads, traces])
    assert (result.steps, result.verdict, result.reason) == (steps, "ok", None)
    assert (result.grad_sq, result.trace) == (pytest.approx(grad), pytest.approx(trace))
    assert result.noise_scale == pytest.approx(trace / grad)
    assert result.interval is not None
    assert result.interval[0] < trace / grad < result.interval[1]
    for x in result.interval:  # Fieller's bounds: the difference is exactly t standard deviations
        variance = var_trace - 2 * x * cov + x * x * var
        assert (trace - x * grad) ** 2 == pytest.approx(2.0930240544**2 * variance, rel=1e-6)


DEVIATION = math.sqrt(20 / 19 / 60**2 * 20 * 3**2)
"""Standard error of the mean of 60 steps that alternate between +1 and -1 every three steps."""
TOO_WEAK = "the gradient {} is too weak to measure in 60 steps (not above 0 at 99.9 % confidence)"
TURNS = [1.0 if k // 3 % 2 else -1.0 for k in range(60)]


@pytest.mark.parametrize(("sigmas", "ok"), [(3.57, False), (3.59, True)])
def test_signal_and_noise_must_both_exceed_zero_at_99_9_percent(sigmas: float, ok: bool) -> None:
    mean = sigmas * DEVIATION
    big = [5 + mean + turn for turn in TURNS]
    result = estimate([x + 5 for x in big], big, 1, 2)  # |G|^2 = 2 y - x, tr = 2 (x - y) = 10
    assert (result.verdict == "ok") == ok
    assert result.reason == (None if ok else TOO_WEAK.format("signal"))
    assert result.trace == pytest.approx(10)
    assert (result.interval is not None, result.noise_scale is not None) == (ok, ok)
    big = [3 + (mean + turn) / 2 for turn in TURNS]
    result = estimate([2 * x - 3 for x in big], big, 1, 2)  # |G|^2 = 3, tr = 2 (y - 3)
    assert (result.verdict == "ok") == ok
    assert result.reason == (None if ok else TOO_WEAK.format("noise"))
    assert result.grad_sq == pytest.approx(3)


def test_too_few_steps_or_a_zero_estimate_are_inconclusive() -> None:
    few = estimate([13.0] * 49, [5.0] * 49, 2, 10)
    reason = "only 49 steps were measured; at least 50 are needed"
    assert (few.steps, few.verdict, few.reason) == (49, "inconclusive", reason)
    assert (few.noise_scale, few.interval, few.grad_sq, few.trace) == (None, None, None, None)
    # |G|^2 = 3, tr = 20 at every step: b = 2 gives 13, B = 10 gives 5, B = 5 gives 7
    by_hand = estimate([13.0] * 60, [5.0] * 30 + [7.0] * 30, 2, [10] * 30 + [5] * 30)
    assert (by_hand.noise_scale, *(by_hand.interval or ())) == pytest.approx((20 / 3,) * 3)
    assert (by_hand.grad_sq, by_hand.trace) == pytest.approx((3, 20))
    same = estimate([5.0] * 60, [5.0] * 60, 2, 10)
    assert same.reason == TOO_WEAK.format("noise")
    assert estimate([13.0] * 50, [5.0] * 50, 2, 10).verdict == "ok"
    none = estimate([2.0] * 50, [1.0] * 50, 1, 2)  # |G|^2 = 0
    assert (none.verdict, none.grad_sq) == ("inconclusive", 0.0)
    for big in (2, [10] * 49 + [2]):
        with pytest.raises(ValueError, match=r"^the small batch must be smaller than the big one$"):
            estimate([13.0] * 50, [5.0] * 50, 2, big)


def test_the_estimate_of_a_run_uses_its_last_200_steps(tmp_path: Path) -> None:
    line = {"step": 1, "small_batch": 2, "big_batch": 10, "small_sq": [13.0] * 60, "big_sq": [5.0] * 60}
    other = {**line, "big_batch": 5, "big_sq": [7.0] * 60}
    before = {**line, "small_sq": [99.0] * 80}
    write_lines(tmp_path / "noise.jsonl", (before, line, other, line))
    result = estimate_of_run(tmp_path)
    assert result.steps == 200
    assert result.noise_scale != pytest.approx(20 / 3)  # includes 20 steps of the first line
    write_lines(tmp_path / "noise.jsonl", (before, line, other, line, line))
    assert estimate_of_run(tmp_path).noise_scale == pytest.approx(20 / 3)
    assert estimate_of_run(tmp_path / "none").reason == "only 0 steps were measured; at least 50 are needed"


# --- the norms


def config(noise_scale: bool = True) -> Config:
    return make_config(batch={"global_size": 12, "micro_size": 3}, log={"noise_scale": noise_scale})


def parameters() -> torch.optim.Optimizer:
    """Return an optimizer of two tensors with a joint gradient norm of 5 and of one without gradient."""
    made = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return torch.optim.SGD([{"params": made[:1]}, {"params": made[1:]}], lr=0.1)


def lone(pairs: NormPairs, norm: float, micros: int, scaler: Any = None) -> None:
    optimizer = parameters()
    for _ in range(micros):
        pairs.end_micro(optimizer, scaler)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad + 100  # only the first micro batch counts
    pairs.end_step(torch.tensor(norm))


def drained(pairs: NormPairs, step: int, *parts: list[float]) -> list[dict[str, Any]]:
    return pairs.drain(OneOf(0, 1 + len(parts), lambda own: [own, *parts]), step)


def test_a_single_replica_uses_its_first_micro_batch_as_small_batch() -> None:
    pairs = NormPairs(config(), 1)
    lone(pairs, 7.0, micros=2)
    (line,) = drained(pairs, 4)
    assert line == {"step": 4, "small_batch": 3, "big_batch": 6, "small_sq": [100.0], "big_sq": [49.0]}
    assert drained(pairs, 4) == []  # drained pairs do not come again


def test_the_loss_scale_is_divided_out() -> None:
    pairs = NormPairs(config(), 1)
    lone(pairs, 7.0, micros=2, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    lone(pairs, 7.0, micros=2)  # the scale applies to its own step only
    (line,) = drained(pairs, 2)
    assert line["small_sq"] == [100.0 / 16, 100.0]


def test_several_replicas_use_the_batch_of_one_replica_as_small_batch() -> None:
    """Parts of norm 6 and 8 with share = 0.5 give 100 / 0.5^2 = 400; the other replica has 500, then 600."""
    pairs = NormPairs(config(), 2, share=0.5)
    optimizer = parameters()
    for norm in (4.0, 5.0):
        pairs.end_micro(optimizer, None)
        pairs.end_micro(optimizer, None)
        pairs.reducing(torch.tensor([6.0, 0.0]))
        pairs.reducing(torch.tensor([8.0]))
        pairs.end_step(torch.tensor(norm))
    (line,) = drained(pairs, 11, [500.0, 600.0])
    assert (line["step"], line["small_batch"], line["big_batch"]) == (11, 6, 12)
    assert (line["small_sq"], line["big_sq"]) == ([450.0, 500.0], [16.0, 25.0])
    whole = NormPairs(config(), 2)
    whole.end_micro(optimizer, None)
    whole.reducing(torch.tensor([3.0, 4.0]))
    whole.end_step(torch.tensor(1.0))
    assert drained(whole, 1, [25.0])[0]["small_sq"] == [25.0]


def test_a_bucket_is_measured_before_it_is_reduced() -> None:
    pairs, bucket = NormPairs(config(), 2), SimpleNamespace(buffer=lambda: torch.tensor([3.0, 4.0]))
    hook = pairs.before(lambda state, bucket: (state, bucket))
    assert hook("state", bucket) == ("state", bucket)
    assert hook.__annotations__ == {}
    pairs.end_micro(parameters(), None)
    pairs.end_step(torch.tensor(1.0))
    assert drained(pairs, 1, [25.0])[0]["small_sq"] == [25.0]


def test_each_line_has_one_batch_size_and_leaves_out_unusable_steps() -> None:
    pairs = NormPairs(config(), 1)
    for norm, micros in ((1.0, 2), (math.inf, 2), (3.0, 2), (4.0, 3), (5.0, 1), (6.0, 2), (math.nan, 4)):
        lone(pairs, norm, micros)
    assert [(e["step"], e["big_batch"], e["big_sq"]) for e in drained(pairs, 10)] == [
        (6, 6, [1.0, 9.0]),
        (7, 9, [16.0]),
        (9, 6, [36.0]),
    ]


def test_cleared_or_disabled_norms_give_no_lines() -> None:
    pairs = NormPairs(config(), 1)
    lone(pairs, 1.0, micros=2)
    pairs.end_micro(parameters(), None)  # a step that has not ended
    pairs.clear()
    assert drained(pairs, 1) == []
    lone(pairs, 1.0, micros=2)
    assert drained(pairs, 1)[0]["big_batch"] == 6
    off = NormPairs(config(noise_scale=False), 2)
    off.reducing(torch.ones(2))
    off.end_micro(parameters(), None)
    off.end_step(torch.tensor(1.0))
    assert drained(off, 1) == []
