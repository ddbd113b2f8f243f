"""Throughput against micro batch, the choice from it, and goodput against the global batch. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from launcher import stats
from launcher.results import BatchChoice, Goodput, GoodputPoint, SizeResult, TimedRun

WITHIN = 0.97  # of the best throughput: what a smaller micro batch must reach
SURE = 0.94  # of the best, at the low end of its interval: as much again as it may miss by
BLOCKS = 3  # stretches of a run's steps whose means are compared


@dataclasses.dataclass(frozen=True)
class Rate:
    """Sequences per second at the declared global batch."""

    micro: int
    median: float
    low: float
    high: float
    """95 % within its runs, by Student's t over the means of BLOCKS stretches of steps of each; how much a
    machine changes from run to run is known only as far as there are several."""


def rate(size: SizeResult, trial_samples: int, global_size: int) -> Rate:
    """From trials whose step takes `trial_samples` sequences, which may be fewer than the declared ones."""
    blocks = []
    for run in size.runs:
        steps = step_times(run, global_size / trial_samples)
        cuts = [len(steps) * i // BLOCKS for i in range(BLOCKS + 1)]
        blocks += [math.log(statistics.fmean(steps[a:b])) for a, b in itertools.pairwise(cuts)]
    middle = statistics.median(blocks)
    half = stats.half_width(blocks)
    rates = (global_size / math.exp(x) for x in (middle, middle + half, middle - half))
    return Rate(size.micro_batch, *rates)


def step_times(run: TimedRun, times: float) -> list[float]:
    """Seconds of each step if it took `times` as many sequences: forward and backward and the wait for data
    count as often, reduction and update once."""
    return [step + (times - 1) * own for step, own in zip(run.step_s, _micro_s(run), strict=True)]


def parts(size: SizeResult) -> tuple[float, float]:
    """Seconds of a trial's step: (what its micro batches take, the whole step)."""
    micro = [statistics.fmean(_micro_s(run)) for run in size.runs]
    return statistics.fmean(micro), statistics.fmean(statistics.fmean(run.step_s) for run in size.runs)


def _micro_s(run: TimedRun) -> list[float]:
    """Of each step, what its micro batches take: forward and backward without the exposed reduction, and the
    wait for data."""
    waits = run.data_wait_s or [0.0] * len(run.step_s)
    passes = [max(0.0, seconds - run.exposed_s) for seconds in run.forward_backward_s]
    return [passed + wait for passed, wait in zip(passes, waits, strict=True)]


def unsettled(rates: Sequence[Rate]) -> list[int]:
    """Micro batches up to the chosen one that may reach WITHIN of the best and are not known to, or to miss
    it."""
    chosen, best = _pick(rates)
    below = [(r, *_share(r, best)) for r in rates if r.micro <= chosen.micro and r is not best]
    return [r.micro for r, low, high in below if low < WITHIN <= high]


def open_sizes(rates: Sequence[Rate]) -> list[int]:
    """What another run each would tell more about: the unsettled ones and what they are held against."""
    unsure = unsettled(rates) if rates else []
    return sorted({*unsure, *(rate.micro for rate in _pick(rates))}) if unsure else []


def _share(rate: Rate, best: Rate) -> tuple[float, float]:
    """95 % interval of one rate over another, their errors independent."""
    half = math.hypot(*(math.log(r.high / r.low) / 2 for r in (rate, best)))
    share = rate.median / best.median
    return share * math.exp(-half), share * math.exp(half)


def _pick(rates: Sequence[Rate]) -> tuple[Rate, Rate]:
    """(the smallest that reaches WITHIN of the best, the best). A larger micro batch costs memory and no
    time, so in doubt it is the larger: a smaller one must also be SURE at its interval's low end."""
    best = max(rates, key=lambda r: r.median)
    sure = [
        r for r in rates if r is best or (r.median >= WITHIN * best.median and _share(r, best)[0] >= SURE)
    ]
    return min(sure, key=lambda r: r.micro), best


def choose(rates: Sequence[Rate], *, on_gpu: bool = False) -> BatchChoice:
    """`choice` of tune.json: the smallest micro batch whose throughput is WITHIN of the best; on a GPU, whose
    memory serves nothing else, the fastest."""
    chosen, best = _pick(rates)
    open_micros = [] if on_gpu else unsettled(rates)
    chosen = best if on_gpu else chosen
    flat = len(rates) > 1 and chosen is rates[0] and all(r.median >= WITHIN * best.median for r in rates)
    if len(rates) == 1:
        why = "the only size that ran"
    elif on_gpu:
        why = "the fastest of those tried"
    elif flat:
        why = "the curve is flat: every size is within 3 % of the best, so the smallest"
    elif chosen is best:
        why = "the best of those tried, and no smaller one is sure to come within 3 %"
    else:
        why = "the smallest within 3 % of the best"
    return BatchChoice(
        micro_batch=chosen.micro,
        best_micro_batch=best.micro,
        samples_per_s=chosen.median,
        best_samples_per_s=best.median,
        share_of_best=chosen.median / best.median,
        flat=flat,
        not_settled=[micro for micro in open_micros if micro != chosen.micro],
        why=why,
    )


def batch_sizes(per_pass: int, declared: int) -> list[int]:
    """Global batches to compare: `per_pass` and its doublings within a factor 16 of `declared`, and that."""
    doubled = (per_pass * 2**k for k in range((16 * declared // per_pass).bit_length()))
    return sorted({size for size in doubled if declared / 16 <= size <= 16 * declared} | {declared})


def goodput(
    *,
    micro_s: float,
    update_s: float,
    per_pass: int,
    global_size: int,
    noise: float,
    interval: Sequence[float],
    sizes: Sequence[int],
) -> Goodput:
    """Throughput x statistical efficiency against the global batch (Pollux, OSDI 2021, section 3).

    A step of B sequences takes B / per_pass x micro_s + update_s seconds; a sequence in it is worth
    (B_ref + noise) / (B + noise) of one in the declared batch B_ref (arXiv 1812.06162, equation 2.7). The
    recommendation is the top of the curve, at the noise scale and at both ends of its interval.
    """

    def speed(size: int) -> float:
        return size / (size / per_pass * micro_s + update_s)

    def worth(size: int, scale: float) -> float:
        return (global_size + scale) / (size + scale)

    def good(size: int, scale: float) -> float:
        return speed(size) * worth(size, scale)

    def top(scale: float) -> int:
        return max(sizes, key=lambda size: good(size, scale))

    def point(size: int) -> GoodputPoint:
        low, high = sorted(good(size, scale) for scale in interval)
        return GoodputPoint(
            global_batch=size,
            samples_per_s=speed(size),
            efficiency=worth(size, noise),
            goodput=good(size, noise),
            low=low,
            high=high,
        )

    best = top(noise)
    return Goodput(
        points=[point(size) for size in sizes],
        recommended=best,
        recommended_interval=sorted(top(scale) for scale in interval),
        gain=good(best, noise) / good(global_size, noise) - 1,
        declared=global_size,
        at_edge=best in (min(sizes), max(sizes)),
    )
