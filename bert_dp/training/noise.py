"""Estimate the gradient noise scale B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv 1812.06162,
appendix A.1). In batches larger than B_simple, additional samples bring diminishing returns.

NormPairs collects gradient norms at two batch sizes per step; `estimate` computes B_simple from the norms.
"""

import collections
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bert_dp import files
from bert_dp.config import Config
from bert_dp.cost import student
from bert_dp.files.models import NoiseScale
from bert_dp.training.distributed import HostCollectives

WINDOW = 200  # the summary uses only the last steps, because the noise scale grows during a run
MIN_STEPS = 50
BLOCKS = 20
T_95, T_999 = (student(BLOCKS - 1, level) for level in (0.95, 0.998))  # two-sided 95 %, one-sided 99.9 %

CommHook = Callable[[Any, Any], Any]
"""DDP communication hook: (state, bucket) -> future of the reduced bucket."""


class NormPairs:
    """Collector of two norms per step, before clipping: those of the mean gradients of a small batch and of
    the global batch. They stay on the device until `drain`. Does nothing unless log.noise_scale is set.

    The small batch is one replica's share of the global batch or, with one replica, the first micro batch.

    `share`: ratio of a replica's gradient before the reduction to the mean gradient of its samples.
    """

    def __init__(self, config: Config, dp_size: int, *, share: float = 1.0):
        self.on = config.log.noise_scale
        self._micro_size, self._dp_size, self._share = config.batch.micro_size, dp_size, share
        self._ended: list[tuple[Tensor, Tensor, int]] = []
        self.clear()

    def clear(self) -> None:
        """Discard all steps, including the current one."""
        self._ended.clear()
        self._begin()

    def _begin(self) -> None:
        self._parts: list[Tensor] = []
        self._num_micro = 0
        self._loss_scale: Tensor | None = None

    def reducing(self, gradient: Tensor) -> None:
        """Record the norm of a part of this replica's gradient before the part is reduced."""
        if self.on and self._dp_size > 1:
            self._parts.append(torch.linalg.vector_norm(gradient))

    def before(self, reduce: CommHook) -> CommHook:
        """Return a hook that records the norm of each bucket and then calls `reduce`."""

        def measured(state: Any, bucket) -> Any:
            self.reducing(bucket.buffer())
            return reduce(state, bucket)

        measured.__annotations__.clear()  # torch rejects annotations other than its own types
        return measured

    def end_micro(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Record that the gradient of a micro batch has been accumulated."""
        if not self.on:
            return
        self._num_micro += 1
        if self._num_micro > 1:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scaler is not None:
            self._loss_scale = scaler.scale(torch.ones((), device=parameters[0].device))
        if self._dp_size == 1:
            self._parts = list(torch._foreach_norm([p.grad for p in parameters]))

    def end_step(self, norm: Tensor) -> None:
        """Complete the step. `norm`: norm of the reduced gradient, unscaled and before clipping."""
        if not self.on:
            return
        # with one replica, the first micro batch's gradient was divided by the number of micro batches
        own = torch.stack(self._parts).norm() * (self._num_micro if self._dp_size == 1 else 1 / self._share)
        own = own if self._loss_scale is None else own / self._loss_scale
        self._ended.append((own, norm, self._num_micro))
        self._begin()

    def drain(self, comm: HostCollectives, step: int) -> list[dict[str, Any]]:
        """Return the steps since the last drain, up to `step`, as lines for noise.jsonl: one per size of the
        global batch. Omit skipped steps and those whose small batch is the global batch. Collective."""
        ended, self._ended = self._ended, []
        if not ended:
            return []
        own, reduced, micros = zip(*ended, strict=True)
        own_sq, big_sq = torch.stack([*own, *reduced]).view(2, -1).double().square().tolist()  # device sync
        small_sq = comm.all_gather(own_sq).mean(0).tolist()
        rows = zip(itertools.count(step - len(ended) + 1), micros, small_sq, big_sq, strict=False)
        lines = []
        for num_micro, group in itertools.groupby(rows, key=lambda row: row[1]):
            big = self._micro_size * num_micro * self._dp_size
            small = self._micro_size if self._dp_size == 1 else big // self._dp_size
            measured = [row for row in group if np.isfinite(row[2:]).all() and small < big]
            if measured:
                numbers, _, smalls, bigs = (list(column) for column in zip(*measured, strict=True))
                batches = {"step": numbers[-1], "small_batch": small, "big_batch": big}
                lines.append({**batches, "small_sq": smalls, "big_sq": bigs})
        return lines


def estimate(
    small_sq: Sequence[float], big_sq: Sequence[float], b_small: ArrayLike, b_big: ArrayLike
) -> NoiseScale:
    """Estimate B_simple from each step's squared gradient norms at batch sizes b < B, which may vary by step.
    Because E |g_b|^2 = |G|^2 + tr(Sigma) / b, each step yields the unbiased estimates

        |G|^2      = (B |g_B|^2 - b |g_b|^2) / (B - b)
        tr(Sigma)  = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

    Both are averaged over the steps before the division. The 95 % interval is Fieller's: all ratios x with
    (mean tr - x mean |G|^2)^2 <= t^2 Var(mean tr - x mean |G|^2). Var is estimated from 20 blocks of steps.
    The result is inconclusive with fewer than 50 steps, or if |G|^2 or tr(Sigma) is not above 0 with a
    confidence of 99.9 %.
    """
    small_N, big_N, b_N, B_N = np.broadcast_arrays(
        *(np.asarray(x, np.float64) for x in (small_sq, big_sq, b_small, b_big))
    )
    if not (b_N < B_N).all():
        raise ValueError("the small batch must be smaller than the big one")
    steps = small_N.size
    if steps < MIN_STEPS:
        reason = f"only {steps} steps were measured; at least {MIN_STEPS} are needed"
        return NoiseScale(steps=steps, verdict="inconclusive", reason=reason)
    both_2N = np.stack([(B_N * big_N - b_N * small_N) / (B_N - b_N), (small_N - big_N) / (1 / b_N - 1 / B_N)])
    grad, trace = both_2N.mean(1)
    # variances and covariance of the two means, from sums over blocks of consecutive steps
    starts = np.arange(BLOCKS) * steps // BLOCKS
    sums = np.add.reduceat(both_2N - both_2N.mean(1, keepdims=True), starts, axis=1)
    (var, cov), (_, var_trace) = sums @ sums.T * (BLOCKS / (BLOCKS - 1) / steps**2)
    facts: dict[str, Any] = {"grad_sq": float(grad), "trace": float(trace)}
    for name, mean, variance in (("gradient signal", grad, var), ("gradient noise", trace, var_trace)):
        if mean <= T_999 * variance**0.5:
            reason = f"the {name} is too weak to measure in {steps} steps (not above 0 at 99.9 % confidence)"
            return NoiseScale(steps=steps, verdict="inconclusive", reason=reason, **facts)
    # the interval: all x with a x^2 - 2 h x + c <= 0; a > 0 after the checks above
    a, h, c = grad**2 - T_95**2 * var, grad * trace - T_95**2 * cov, trace**2 - T_95**2 * var_trace
    root = max(h**2 - a * c, 0.0) ** 0.5
    facts |= {"noise_scale": float(trace / grad), "interval": [float((h - root) / a), float((h + root) / a)]}
    return NoiseScale(steps=steps, verdict="ok", **facts)


def estimate_of_run(run_dir: Path) -> NoiseScale:
    """Estimate the noise scale over the last WINDOW measured steps in a run's noise.jsonl."""
    pairs: collections.deque[tuple[float, float, int, int]] = collections.deque(maxlen=WINDOW)
    for line in files.read_lines(run_dir / "noise.jsonl"):
        batches = itertools.repeat(line["small_batch"]), itertools.repeat(line["big_batch"])
        pairs.extend(zip(line["small_sq"], line["big_sq"], *batches, strict=False))
    columns: Any = zip(*pairs, strict=True) if pairs else ((), (), (), ())
    return estimate(*columns)
