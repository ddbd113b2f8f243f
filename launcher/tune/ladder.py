"""Decisions of the learning rate search as pure functions: the divergence edge, the ladder of rates, who goes
on to the next rung, and the choice."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from launcher.results import CandidateFacts, LrChoice, LrTrial, RangeTest, Rung, Side
from launcher.stats import half_width

SMOOTH = 5  # losses of a range test that are averaged
RISE = 0.1  # of what the loss had fallen by, that counts as risen
SIGMAS = 8.0  # of the smoothed noise, that counts as risen: the least of 100 means lies 2.5 below by itself
SAFETY = 4.0  # the ladder begins at the edge over this (Smith, arXiv 1506.01186, takes a third)
EXTENSIONS = 3  # rates that may be added at either end
FINALISTS = 2
BEHIND = 0.03  # nats after the first seed, the same for all, by which a finalist is out


def find_edge(points: Sequence[tuple[float, float | None, int]]) -> tuple[float | None, str]:
    """The divergence edge of a range test, None where training did not break; and how it was told.

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
            return lr, "a step was skipped for a gradient that is not finite"
        if loss is None or not math.isfinite(loss):
            return lr, "the loss is not finite"
        losses.append(loss)
        if len(losses) < SMOOTH:
            continue
        smoothed.append(statistics.fmean(losses[-SMOOTH:]))
        steps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        noise = 1.4826 * statistics.median(steps) / math.sqrt(2 * SMOOTH)  # median -> standard deviation
        low = min(smoothed)
        rise = smoothed[-1] - low
        if rise > max(RISE * (smoothed[0] - low), SIGMAS * noise):
            return lr, f"the loss rose {rise:.3g} nats above its minimum"
    return None, f"no divergence up to {points[-1][0]:.3g}"


def first_ladder(test: RangeTest, count: int) -> list[float]:
    """`count` rates spaced 2x downwards from edge / SAFETY (rounded down to two digits), highest first. Where
    there is no edge, the highest rate of the test takes its place."""
    top = (test.points[-1][0] if test.edge is None else test.edge) / SAFETY
    digit = math.floor(math.log10(top)) - 1
    rounded = float(f"{math.floor(top / 10.0**digit * (1 + 1e-9)) * 10.0**digit:.2g}")
    return [rounded / 2**k for k in range(count)]


def extension(trials: Sequence[LrTrial], edge: float | None, first: Sequence[float]) -> float | None:
    """The rate to add to the first rung because the best one is its highest or lowest, or, when all diverged,
    below the first ladder; None when there is a bracket, or no room. `first`: before additions.
    """
    rates = [t.lr for t in trials]
    scored = [t for t in trials if t.score < math.inf]
    if not scored:
        diverged = [t.lr for t in trials if t.status == "diverged"]
        return _added(min(diverged) / 2, first, edge) if diverged else None
    best = min(scored, key=lambda t: t.score).lr
    if best == max(rates) and (up := _added(best * 2, first, edge)):
        return up
    return _added(best / 2, first, edge) if best == min(rates) else None


def _added(lr: float, first: Sequence[float], edge: float | None) -> float | None:
    far = 2.0**EXTENSIONS * (1 + 1e-9)
    if lr > max(first) * far or lr < min(first) / far or (edge is not None and lr > edge):
        return None
    return lr


def marked_diverged(trials: Sequence[LrTrial], unigram: float | None) -> list[LrTrial]:
    """A run that ends above the unigram entropy has diverged if one at a lower rate, as long, ends below it;
    else it may only have been too short to learn anything."""
    if unigram is None:
        return list(trials)
    learned = min((t.lr for t in trials if t.score <= unigram), default=math.inf)
    return [
        t.model_copy(
            update={
                "status": "diverged",
                "cause": f"{t.heldout_loss:.4g} nats, above the unigram entropy {unigram:.4g}",
            }
        )
        if t.status == "ok" and t.score > unigram and learned < t.lr
        else t
        for t in trials
    ]


def candidates(rung: Rung, rates: Sequence[float]) -> list[CandidateFacts]:
    """As the files name them: the optimizer and the weight decay are the configuration's."""
    first = rung.trials[0]
    return [(first.optimizer, first.weight_decay, lr) for lr in rates]


def ranked(rung: Rung) -> list[float]:
    """The rates of a rung that can be chosen, best first."""
    return sorted((lr for lr in rung.rates if rung.mean(lr) < math.inf), key=rung.mean)


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
    tried = {lr for rung in rungs for lr in ranked(rung)}.union(last.rates)
    for sign in (1, -1):
        beyond = [lr for lr in tried if sign * math.log2(lr / best) > 0.49]
        nearest = min(beyond, key=lambda lr: abs(math.log(lr / best)), default=None)
        if nearest is not None and nearest not in last.rates:
            return nearest
    return None


def open_side(rungs: Sequence[Rung], best: float) -> Side | None:
    """`high` or `low` when no worse rate was measured on that side of the best, else None.

    The nearest rate on each side counts, in the longest rung that has both.
    """
    measured = {t.lr for rung in rungs for t in rung.trials if t.status in ("ok", "diverged")}
    sides: tuple[tuple[Side, int], ...] = (("high", 1), ("low", -1))
    for side, sign in sides:
        beyond = [lr for lr in measured if sign * (lr - best) > 0]
        if not beyond:
            return side
        nearest = min(beyond, key=lambda lr: abs(math.log(lr / best)))
        common = [rung for rung in rungs if {nearest, best} <= set(rung.rates)]
        if not common or common[-1].mean(nearest) <= common[-1].mean(best):
            return side
    return None


def choose(rungs: Sequence[Rung]) -> LrChoice | None:
    """The choice from the last rung; None when no rate is left."""
    last = rungs[-1] if rungs and rungs[-1].last else None
    order = ranked(last) if last is not None else []
    if last is None or not order:
        return None
    best = order[0]
    losses = last.scores(best)
    count = len(losses)
    tied = [lr for lr in order[1:] if _is_tied(last, lr, best)]
    deviations = [statistics.variance(scores) for scores in map(last.scores, order) if len(scores) > 1]
    side = open_side(rungs, best)
    why = f"the lowest mean of {count} seeds" if count > 1 else "the lowest loss, of one seed"
    if len(order) > 1:
        behind = _behind(last, order[1], best)
        over = "" if len(behind) == count else f" over {len(behind)} of them"
        why += f", {statistics.fmean(behind):.4f} nats below {order[1]:g}{over}"
    if tied:
        reason = "" if count > 1 else ": one seed has no interval"
        why += f"; not to be told apart from {', '.join(f'{lr:g}' for lr in tied)}{reason}"
    if side:
        why += f"; edge of the grid: no worse rate was measured on the {side} side"
    return LrChoice(
        optimizer=last.trials[0].optimizer,
        weight_decay=last.trials[0].weight_decay,
        lr=best,
        heldout_loss=last.mean(best),
        band=[min(losses), max(losses)],
        sd=math.sqrt(statistics.fmean(deviations)) if deviations else None,
        seeds=count,
        at_edge=side is not None,
        edge_side=side,
        tied=candidates(last, tied),
        why=why,
    )


def _behind(rung: Rung, lr: float, best: float) -> list[float]:
    """Nats by which a rate is worse than the best, of each seed that both have."""
    scores = {(trial.lr, trial.seed): trial.score for trial in rung.trials}
    return [
        score - scores[best, seed]
        for (rate, seed), score in scores.items()
        if rate == lr and (best, seed) in scores
    ]


def _is_tied(last: Rung, lr: float, best: float) -> bool:
    """Whether the mean difference, paired by seed, has a 95 % interval (Student's t) that reaches zero; of a
    rate with fewer seeds, whether it is not BEHIND."""
    if len(last.scores(lr)) != len(last.scores(best)):
        return lr in near(last)
    differences = _behind(last, lr, best)
    return len(differences) < 2 or statistics.fmean(differences) <= half_width(differences)
