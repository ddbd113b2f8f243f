"""Decisions of the learning rate search as pure functions: the divergence edge, the ladder of rates, who goes
on to the next rung, and the choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bert_dp.record.models import FailureKind
from launcher.results import TrialStatus
from launcher.stats import student

SMOOTH = 5  # losses of a range test that are averaged
RISE = 0.1  # of what the loss had fallen by, that counts as risen
SIGMAS = 8.0  # of the smoothed noise, that counts as risen: the least of 100 means lies 2.5 below by itself
SAFETY = 4.0  # the ladder begins at the edge over this (Smith, arXiv 1506.01186, takes a third)
EXTENSIONS = 3  # rates that may be added at either end
FINALISTS = 2
BEHIND = 0.03  # nats after the first seed, the same for all, by which a finalist is out


Side = Literal["high", "low"]


@dataclasses.dataclass
class Outcome:
    """One trial."""

    trial: str
    lr: float
    seed: int
    status: TrialStatus
    cause: str | None
    heldout_loss: float | None
    tokens: int
    seconds: float | None = None
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """[(tokens, held-out loss), ...]"""
    failure_kind: FailureKind | None = None
    """Of a run that failed."""

    @property
    def score(self) -> float:
        """Nats; infinite for what cannot be chosen."""
        return self.heldout_loss if self.status == "ok" and self.heldout_loss is not None else math.inf


@dataclasses.dataclass
class Rung:
    """Trials of one length."""

    tokens: int
    seeds: tuple[int, ...]
    last: bool
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    kept: list[float] = dataclasses.field(default_factory=list)

    def mean(self, lr: float) -> float:
        """Mean score over its trials here: infinite when one of them is, not a number when there is none."""
        scores = [o.score for o in self.outcomes if o.lr == lr]
        return statistics.fmean(scores) if scores else math.nan

    def num_seeds(self, lr: float) -> int:
        """Of its trials here."""
        return sum(o.lr == lr for o in self.outcomes)


class Edge(NamedTuple):
    """The lowest rate at which training broke; None: none up to `highest`."""

    lr: float | None
    highest: float
    why: str


def find_edge(points: Sequence[tuple[float, float | None, int]]) -> Edge:
    """The divergence edge of a range test.

    `points`: (rate, loss or None, steps skipped so far) of each step, rates rising. It is the lowest rate
    at which a loss was not finite, a step was skipped (but the first ones, while fp16's loss scale falls), or
    the mean of SMOOTH losses stood above its minimum by RISE of its fall and by SIGMAS deviations of its
    noise (from the differences of neighbours).
    """
    losses: list[float] = []
    smoothed: list[float] = []
    falling = next((k for k, point in enumerate(points) if point[2] <= k), len(points))
    for lr, loss, skipped in points:
        if skipped > falling:
            return Edge(lr, lr, "a step was skipped for a gradient that is not finite")
        if loss is None or not math.isfinite(loss):
            return Edge(lr, lr, "the loss is not finite")
        losses.append(loss)
        if len(losses) < SMOOTH:
            continue
        smoothed.append(statistics.fmean(losses[-SMOOTH:]))
        steps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        noise = 1.4826 * statistics.median(steps) / math.sqrt(2 * SMOOTH)  # median -> standard deviation
        low = min(smoothed)
        rise = smoothed[-1] - low
        if rise > max(RISE * (smoothed[0] - low), SIGMAS * noise):
            return Edge(lr, lr, f"the loss rose {rise:.3g} nats above its minimum")
    highest = points[-1][0]
    return Edge(None, highest, f"no divergence up to {highest:.3g}")


def first_ladder(edge: Edge, count: int) -> list[float]:
    """`count` rates spaced 2x downwards from edge / SAFETY (rounded down to two digits), highest first."""
    top = (edge.highest if edge.lr is None else edge.lr) / SAFETY
    digit = math.floor(math.log10(top)) - 1
    rounded = float(f"{math.floor(top / 10.0**digit * (1 + 1e-9)) * 10.0**digit:.2g}")
    return [rounded / 2**k for k in range(count)]


def extension(outcomes: Sequence[Outcome], edge: Edge, first: Sequence[float]) -> float | None:
    """The rate to add to the first rung because the best one is its highest or lowest, or, when all diverged,
    below the first ladder; None when there is a bracket, or no room. `first`: before additions.
    """
    rates = [o.lr for o in outcomes]
    scored = [o for o in outcomes if o.score < math.inf]
    if not scored:
        diverged = [o.lr for o in outcomes if o.status == "diverged"]
        return _added(min(diverged) / 2, first, edge) if diverged else None
    best = min(scored, key=lambda o: o.score).lr
    if best == max(rates) and (up := _added(best * 2, first, edge)):
        return up
    return _added(best / 2, first, edge) if best == min(rates) else None


def _added(lr: float, first: Sequence[float], edge: Edge) -> float | None:
    far = 2.0**EXTENSIONS * (1 + 1e-9)
    if lr > max(first) * far or lr < min(first) / far or (edge.lr is not None and lr > edge.lr):
        return None
    return lr


def mark_diverged(outcomes: Sequence[Outcome], unigram: float | None) -> None:
    """A run that ends above the unigram entropy has diverged if one at a lower rate, as long, ends below it;
    else it may only have been too short to learn anything."""
    if unigram is None:
        return
    learned = [o for o in outcomes if o.score <= unigram]
    for o in outcomes:
        if o.status == "ok" and o.score > unigram and any(x.lr < o.lr for x in learned):
            o.status = "diverged"
            o.cause = f"{o.heldout_loss:.4g} nats, above the unigram entropy {unigram:.4g}"


def ranked(rung: Rung) -> list[float]:
    """The rates of a rung that can be chosen, best first."""
    means = {lr: rung.mean(lr) for lr in {o.lr for o in rung.outcomes}}
    return sorted((lr for lr, mean in means.items() if mean < math.inf), key=lambda lr: (means[lr], lr))


def near(last: Rung) -> list[float]:
    """The finalists within BEHIND of the best mean, best first."""
    order = ranked(last)
    return [lr for lr in order if last.mean(lr) <= last.mean(order[0]) + BEHIND]


def beside(rungs: Sequence[Rung], last: Rung) -> float | None:
    """The rate of a shorter rung next to the best of the last, where the last has not had it: a longer run
    may like another rate than the short ones did. At least a factor of sqrt(2) away. None when the best has
    its neighbours, or they broke."""
    order = ranked(last)
    if not order:
        return None
    best = order[0]
    here = {o.lr for o in last.outcomes}
    tried = {lr for rung in rungs for lr in ranked(rung)} | here
    for sign in (1, -1):
        beyond = [lr for lr in tried if sign * math.log2(lr / best) > 0.49]
        nearest = min(beyond, key=lambda lr: abs(math.log(lr / best)), default=None)
        if nearest is not None and nearest not in here:
            return nearest
    return None


def open_side(rungs: Sequence[Rung], best: float) -> Side | None:
    """`high` or `low` when no worse rate was measured on that side of the best, else None.

    The nearest rate on each side counts, in the longest rung that has both.
    """
    measured = {o.lr for rung in rungs for o in rung.outcomes if o.status in ("ok", "diverged")}
    sides: tuple[tuple[Side, int], ...] = (("high", 1), ("low", -1))
    for side, sign in sides:
        beyond = [lr for lr in measured if sign * (lr - best) > 0]
        if not beyond:
            return side
        nearest = min(beyond, key=lambda lr: abs(math.log(lr / best)))
        pairs = [(r.mean(nearest), r.mean(best)) for r in rungs]
        common = [(theirs, ours) for theirs, ours in pairs if not math.isnan(theirs) and not math.isnan(ours)]
        if not common or common[-1][0] <= common[-1][1]:
            return side
    return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The rate with the lowest mean over the seeds of the last rung; losses in nats."""

    lr: float
    heldout_loss: float
    band: list[float]
    """Least and greatest of the seeds."""
    sd: float | None
    """Standard deviation of a seed, pooled over the finalists; None of one seed."""
    seeds: int
    edge_side: Side | None
    """Where no worse rate was measured."""
    tied: list[float]
    why: str


def choose(rungs: Sequence[Rung]) -> Choice | None:
    """The choice from the last rung; None when no rate is left.

    Tied with it is a finalist whose mean difference, paired by seed, has a 95 % interval (Student's t) that
    reaches zero; or one with fewer seeds that is not BEHIND.
    """
    last = rungs[-1] if rungs and rungs[-1].last else None
    order = ranked(last) if last is not None else []
    if last is None or not order:
        return None
    losses = {lr: {o.seed: o.score for o in last.outcomes if o.lr == lr} for lr in order}
    best = order[0]
    mine = losses[best]
    count = len(mine)
    deviations = [statistics.variance(each.values()) for each in losses.values() if len(each) > 1]
    close = near(last)
    tied = [lr for lr in order[1:] if (_tied(mine, losses[lr]) if len(losses[lr]) == count else lr in close)]
    side = open_side(rungs, best)
    mean = last.mean(best)
    why = f"the lowest mean of {count} seeds" if count > 1 else "the lowest loss, of one seed"
    if len(order) > 1:
        shared = [seed for seed in losses[order[1]] if seed in mine]
        apart = statistics.fmean(losses[order[1]][seed] - mine[seed] for seed in shared)
        over = "" if len(shared) == count else f" over {len(shared)} of them"
        why += f", {apart:.4f} nats below {order[1]:g}{over}"
    if tied:
        reason = "" if count > 1 else ": one seed has no interval"
        why += f"; not to be told apart from {', '.join(f'{lr:g}' for lr in tied)}{reason}"
    if side:
        why += f"; edge of the grid: no worse rate was measured on the {side} side"
    return Choice(
        lr=best,
        heldout_loss=mean,
        band=[min(mine.values()), max(mine.values())],
        sd=math.sqrt(statistics.fmean(deviations)) if deviations else None,
        seeds=count,
        edge_side=side,
        tied=tied,
        why=why,
    )


def _tied(mine: dict[int, float], theirs: dict[int, float]) -> bool:
    differences = [theirs[seed] - mine[seed] for seed in mine if seed in theirs]
    if len(differences) < 2:
        return True
    half = student(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) <= half
