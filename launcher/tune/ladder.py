"""Decisions of the learning rate search as pure functions: the divergence edge, the ladder of rates, who goes
on to the next rung, and the choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bert_dp.record_models import FailureKind
from launcher.results import LrChoice, TrialStatus
from launcher.scaling.stats import STUDENT

SMOOTH = 5  # losses of a range test that are averaged
RISE = 0.1  # of what the loss had fallen by, that counts as risen
SIGMAS = 8.0  # of the smoothed noise, that counts as risen: the least of 100 means lies 2.5 below by itself
SAFETY = 4.0  # the ladder begins at the edge over this (Smith, arXiv 1506.01186, takes a third)
EXTENSIONS = 3  # rates that may be added at either end
FINALISTS = 2
BEHIND = 0.03  # nats after the first seed, the same for all, by which a finalist is out


Side = Literal["high", "low"]


class Candidate(NamedTuple):
    optimizer: str
    weight_decay: float
    lr: float

    @property
    def ladder(self) -> tuple[str, float]:
        """What its neighbours share with it."""
        return self.optimizer, self.weight_decay


@dataclasses.dataclass
class Outcome:
    """One trial."""

    trial: str
    candidate: Candidate
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
    kept: list[Candidate] = dataclasses.field(default_factory=list)

    def mean(self, candidate: Candidate) -> float:
        """Mean score over its trials here: infinite when one of them is, not a number when there is none."""
        scores = [o.score for o in self.outcomes if o.candidate == candidate]
        return statistics.fmean(scores) if scores else math.nan

    def num_seeds(self, candidate: Candidate) -> int:
        """Of its trials here."""
        return sum(o.candidate == candidate for o in self.outcomes)


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


def extension(
    outcomes: Sequence[Outcome], edges: dict[str, Edge], first: Sequence[Candidate]
) -> Candidate | None:
    """The rate to add to the first rung because the best one is the highest or lowest of its ladder, or, when
    all diverged, below the first ladder; None when there is a bracket, or no room. `first`: before additions.
    """
    scored = [o for o in outcomes if o.score < math.inf]
    if not scored:
        diverged = [o for o in outcomes if o.status == "diverged"]
        if not diverged:
            return None
        lowest = min(diverged, key=lambda o: o.candidate.lr).candidate
        return _added(lowest, lowest.lr / 2, first, edges)
    best = min(scored, key=lambda o: o.score).candidate
    rates = [o.candidate.lr for o in outcomes if o.candidate.ladder == best.ladder]
    if best.lr == max(rates) and (up := _added(best, best.lr * 2, first, edges)):
        return up
    return _added(best, best.lr / 2, first, edges) if best.lr == min(rates) else None


def _added(of: Candidate, lr: float, first: Sequence[Candidate], edges: dict[str, Edge]) -> Candidate | None:
    start = [c.lr for c in first if c.ladder == of.ladder]
    far = 2.0**EXTENSIONS * (1 + 1e-9)
    edge = edges[of.optimizer].lr
    if lr > max(start) * far or lr < min(start) / far or (edge is not None and lr > edge):
        return None
    return of._replace(lr=lr)


def mark_diverged(outcomes: Sequence[Outcome], unigram: float | None) -> None:
    """A run that ends above the unigram entropy has diverged if one at a lower rate, as long, ends below it;
    else it may only have been too short to learn anything."""
    if unigram is None:
        return
    learned = [o for o in outcomes if o.score <= unigram]
    for o in outcomes:
        lower = [
            x for x in learned if x.candidate.ladder == o.candidate.ladder and x.candidate.lr < o.candidate.lr
        ]
        if o.status == "ok" and o.score > unigram and lower:
            o.status = "diverged"
            o.cause = f"{o.heldout_loss:.4g} nats, above the unigram entropy {unigram:.4g}"


def ranked(rung: Rung) -> list[Candidate]:
    """The candidates of a rung that can be chosen, best first."""
    means = {
        candidate: rung.mean(candidate) for candidate in dict.fromkeys(o.candidate for o in rung.outcomes)
    }
    finite = [candidate for candidate, mean in means.items() if mean < math.inf]
    return sorted(finite, key=lambda candidate: (means[candidate], candidate))


def near(last: Rung) -> list[Candidate]:
    """The finalists within BEHIND of the best mean, best first."""
    order = ranked(last)
    return [c for c in order if last.mean(c) <= last.mean(order[0]) + BEHIND]


def beside(rungs: Sequence[Rung], last: Rung) -> Candidate | None:
    """The rate of a shorter rung next to the best of the last, where the last has not had it: a longer run
    may like another rate than the short ones did. At least a factor of sqrt(2) away. None when the best has
    its neighbours, or they broke."""
    order = ranked(last)
    if not order:
        return None
    best = order[0]
    here = {o.candidate for o in last.outcomes}
    tried = {c for rung in rungs for c in ranked(rung) if c.ladder == best.ladder} | here
    for sign in (1, -1):
        beyond = [c for c in tried if c.ladder == best.ladder and sign * math.log2(c.lr / best.lr) > 0.49]
        nearest = min(beyond, key=lambda c: abs(math.log(c.lr / best.lr)), default=None)
        if nearest is not None and nearest not in here:
            return nearest
    return None


def num_second(count: int, *, drawn: bool) -> int:
    """How many of `count` candidates of the first rung the second trains: the better half, of drawn ones a
    quarter; 0 = there is no second rung, which would cost more than it can save."""
    kept = math.ceil(count / (4 if drawn else 2))
    return kept if kept > FINALISTS + 1 else 0


def open_side(rungs: Sequence[Rung], best: Candidate, *, any_decay: bool) -> Side | None:
    """`high` or `low` when no worse rate was measured on that side of the best, else None.

    The nearest rate on each side counts, in the longest rung that has both. `any_decay`: neighbours may have
    another weight decay (where it was drawn).
    """
    sides: tuple[tuple[Side, int], ...] = (("high", 1), ("low", -1))
    for side, sign in sides:
        near = [
            o.candidate
            for rung in rungs
            for o in rung.outcomes
            if o.candidate.optimizer == best.optimizer
            and sign * (o.candidate.lr - best.lr) > 0
            and (any_decay or o.candidate.ladder == best.ladder)
            and o.status in ("ok", "diverged")
        ]
        if not near:
            return side
        nearest = min(near, key=lambda c: abs(math.log(c.lr / best.lr)))
        pairs = [(r.mean(nearest), r.mean(best)) for r in rungs]
        common = [(theirs, ours) for theirs, ours in pairs if not math.isnan(theirs) and not math.isnan(ours)]
        if not common or common[-1][0] <= common[-1][1]:
            return side
    return None


def choose(rungs: Sequence[Rung], *, any_decay: bool) -> LrChoice | None:
    """`choice` of tune.json from the last rung: the lowest mean over the seeds; None when no rate is left.

    Tied with it is a finalist whose mean difference, paired by seed, has a 95 % interval (Student's t) that
    reaches zero; or one with fewer seeds that is not BEHIND.
    """
    last = rungs[-1] if rungs and rungs[-1].last else None
    order = ranked(last) if last is not None else []
    if last is None or not order:
        return None
    losses = {c: {o.seed: o.score for o in last.outcomes if o.candidate == c} for c in order}
    best = order[0]
    mine = losses[best]
    count = len(mine)
    deviations = [statistics.variance(each.values()) for each in losses.values() if len(each) > 1]
    close = near(last)
    tied = [c for c in order[1:] if (_tied(mine, losses[c]) if len(losses[c]) == count else c in close)]
    side = open_side(rungs, best, any_decay=any_decay)
    mean = last.mean(best)
    why = f"the lowest mean of {count} seeds" if count > 1 else "the lowest loss, of one seed"
    if len(order) > 1:
        shared = [seed for seed in losses[order[1]] if seed in mine]
        apart = statistics.fmean(losses[order[1]][seed] - mine[seed] for seed in shared)
        over = "" if len(shared) == count else f" over {len(shared)} of them"
        why += f", {apart:.4f} nats below {told(order[1], best)}{over}"
    if tied:
        reason = "" if count > 1 else ": one seed has no interval"
        why += f"; not to be told apart from {', '.join(told(c, best) for c in tied)}{reason}"
    if side:
        why += f"; edge of the grid: no worse rate was measured on the {side} side"
    return LrChoice(
        **best._asdict(),
        heldout_loss=mean,
        band=[min(mine.values()), max(mine.values())],
        sd=math.sqrt(statistics.fmean(deviations)) if deviations else None,
        seeds=count,
        at_edge=side is not None,
        edge_side=side,
        tied=list(tied),
        why=why,
    )


def told(candidate: Candidate, beside: Candidate | None = None) -> str:
    """Its rate, and what else is not as in `beside`."""
    words = [f"{candidate.lr:g}"]
    if beside is None or candidate.weight_decay != beside.weight_decay:
        words.append(f"weight decay {candidate.weight_decay:g}")
    if beside is None or candidate.optimizer != beside.optimizer:
        words.insert(0, candidate.optimizer)
    return " ".join(words)


def _tied(mine: dict[int, float], theirs: dict[int, float]) -> bool:
    differences = [theirs[seed] - mine[seed] for seed in mine if seed in theirs]
    if len(differences) < 2:
        return True
    degrees = max(d for d in STUDENT if d <= len(differences) - 1)
    half = STUDENT[degrees] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) <= half
