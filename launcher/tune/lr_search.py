"""Define the rules of `tune lr` (divergence edge, rates, runs, choice) and the data models of tune.json."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from bert_dp.files.models import HeldOut, StoredModel
from launcher.results import Point, Positive, TuneFile
from launcher.stats import half_width

SMOOTHING = 5  # number of consecutive range-test losses that are averaged
RISE_SHARE = 0.1  # at divergence, the loss exceeds its minimum by more than this share of its earlier fall
# 8, because the minimum is low by chance: the lowest of 100 values lies 2.5 standard deviations below average
RISE_SIGMAS = 8.0  # at divergence, also by more than this many standard deviations of the mean's noise
EDGE_RATIO = 4.0  # divergence edge divided by the highest rate of the first ladder (arXiv 1506.01186: 3 or 4)
EXTENSIONS = 3  # maximum number of rates added at each end of the ladder
FINALISTS = 2
CLOSE_NATS = 0.03  # a rate is close to the best if its loss is at most this much higher

LrTrialStatus = Literal["ok", "diverged", "oom", "failed"]
Side = Literal["high", "low"]


class LrOptions(StoredModel):
    """Options of `tune lr`."""

    ranks: int | None = None  # ranks per trial; null: as many as one replica has
    rates: int = 5
    seeds: int = 3
    tokens: int | None = None  # number of tokens in a whole run; null: as configured
    budget_s: float | None = None
    launcher: str = "torchrun"


class RangeTest(StoredModel):
    """Result of the range test, a run with a rising learning rate."""

    points: list[Point]  # [rate, training loss or null]
    edge: float | None  # lowest rate at which training diverged; null: it did not diverge
    reason: str


class LrTrial(StoredModel):
    """Result of a trial, a run that is planned to complete its learning-rate schedule."""

    name: str
    lr: float
    seed: int
    status: LrTrialStatus
    reason: str | None = None
    heldout_loss: float | None = None
    heldout: HeldOut | None = None  # results of the evaluation on held-out data
    tokens: int
    seconds: float = 0.0

    @property
    def score(self) -> float:
        """Return the held-out loss in nats, or infinity if the trial did not succeed."""
        return self.heldout_loss if self.status == "ok" and self.heldout_loss is not None else math.inf


class Rung(StoredModel):
    """Trials with the same number of tokens."""

    tokens: int
    seeds: list[int]
    trials: list[LrTrial] = []

    @property
    def rates(self) -> list[float]:
        """Return the rates in ascending order."""
        return sorted({trial.lr for trial in self.trials})

    def scores(self, lr: float) -> list[float]:
        """Return the scores of a rate, in the order of its trials."""
        return [trial.score for trial in self.trials if trial.lr == lr]

    def mean(self, lr: float) -> float:
        """Return the mean score of a rate, or infinity if any of its trials did not succeed."""
        return statistics.fmean(self.scores(lr))

    def ranked(self) -> list[float]:
        """Return the eligible rates (those whose trials all succeeded), lowest mean score first."""
        return sorted((lr for lr in self.rates if self.mean(lr) < math.inf), key=self.mean)


class LrChoice(StoredModel):
    """The chosen rate."""

    lr: Positive
    heldout_loss: float  # mean over the seeds
    seeds: int
    # mean of (loss of the next best rate - loss of `lr`) over shared seeds, in nats; null: no other rate
    lead: float | None
    edge_side: Side | None  # side of `lr` on which no rate was measured; null: both sides were measured
    tied: list[float]  # rates that are not significantly worse than `lr`


class TuneLr(TuneFile):
    """Contents of the tune.json that `tune lr` writes."""

    schema_version: Literal[1] = 1
    kind: Literal["lr"] = "lr"
    settings: LrOptions
    tokens: int | None  # number of tokens in a whole run; null: the range test has not ended
    at_a_time: int  # number of concurrent trials
    range_test: RangeTest | None = None
    rungs: list[Rung] = []  # first: short runs; last: whole runs
    choice: LrChoice | None = None

    @property
    def trials(self) -> list[LrTrial]:
        """Return the trials of both rungs."""
        return [trial for rung in self.rungs for trial in rung.trials]


# --- the range test


def find_edge(points: Sequence[tuple[float, float | None, int]]) -> tuple[float | None, str]:
    """Return the divergence edge of a range test (None if training did not diverge) and the reason.

    `points`: (rate, loss or None, number of steps skipped so far) of each step, in order of rising rate.
    The edge is the lowest rate at which one of these happens:
    - The loss is not finite.
    - A step is skipped. Skipped steps at the start do not count: fp16's loss scale may still be falling.
    - The mean of the last SMOOTHING losses exceeds its minimum by more than RISE_SHARE of its earlier fall
      and by more than RISE_SIGMAS standard deviations of its noise, estimated from successive differences.
    """
    losses: list[float] = []
    smoothed: list[float] = []
    falling = next((k for k, point in enumerate(points) if point[2] <= k), len(points))
    for lr, loss, skipped in points:
        if skipped > falling:
            return lr, "a step was skipped because of a non-finite gradient"
        if loss is None or not math.isfinite(loss):
            return lr, "the loss is not finite"
        losses.append(loss)
        if len(losses) < SMOOTHING:
            continue
        smoothed.append(statistics.fmean(losses[-SMOOTHING:]))
        steps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        noise = 1.4826 * statistics.median(steps) / math.sqrt(2 * SMOOTHING)  # median -> standard deviation
        low = min(smoothed)
        rise = smoothed[-1] - low
        if rise > max(RISE_SHARE * (smoothed[0] - low), RISE_SIGMAS * noise):
            return lr, f"the loss rose {rise:.3g} nats above its minimum"
    return None, f"no divergence up to {points[-1][0]:.3g}"


def first_ladder(test: RangeTest, count: int) -> list[float]:
    """Return `count` rates, each half the one before. The first is the divergence edge divided by EDGE_RATIO,
    rounded down to two significant digits. If the test found no edge, its highest rate is used instead."""
    top = (test.points[-1][0] if test.edge is None else test.edge) / EDGE_RATIO
    digit = 10.0 ** (math.floor(math.log10(top)) - 1)
    rounded = float(f"{math.floor(top / digit * (1 + 1e-9)) * digit:.2g}")
    return [rounded / 2**k for k in range(count)]


# --- next trials


def mark_diverged(trials: Sequence[LrTrial], unigram: float | None) -> list[LrTrial]:
    """Mark a trial as diverged if its loss exceeds the unigram entropy but the loss of a lower rate does not.

    Without such a lower rate, no trial is marked: all of them may just be too short to learn.
    """
    if unigram is None:
        return list(trials)
    lowest = min((t.lr for t in trials if t.score <= unigram), default=math.inf)

    def marked(trial: LrTrial) -> LrTrial:
        if trial.status != "ok" or trial.score <= unigram or trial.lr <= lowest:
            return trial
        reason = f"{trial.heldout_loss:.4g} nats, more than the unigram entropy of {unigram:.4g}"
        return trial.model_copy(update={"status": "diverged", "reason": reason})

    return [marked(trial) for trial in trials]


def next_short_rates(first: Rung, ladder: Sequence[float], edge: float | None) -> list[float]:
    """Return the rates to try next in the first rung, or [] if the rung is complete.

    The ladder comes first. It is then extended, one rate at a time: upwards while the highest rate is the
    best, downwards while the lowest rate is the best. If no rate succeeds but some diverge, the ladder
    is extended downwards too. At most EXTENSIONS rates are added at each end, none of them above the edge.
    """
    if not first.trials:
        return list(ladder)
    rates, order = first.rates, first.ranked()
    wanted = []
    if order:
        wanted += [2 * rates[-1]] if order[0] == rates[-1] else []
        wanted += [rates[0] / 2] if order[0] == rates[0] else []
    elif diverged := [trial.lr for trial in first.trials if trial.status == "diverged"]:
        wanted = [min(diverged) / 2]
    far = 2.0**EXTENSIONS * (1 + 1e-9)
    most = min(max(ladder) * far, math.inf if edge is None else edge)
    return [lr for lr in wanted if lr not in rates and min(ladder) / far <= lr <= most][:1]


def next_whole_runs(first: Rung, last: Rung) -> list[tuple[float, int]]:
    """Return the (rate, seed) pairs to run next in the last rung, or [] if the rung is complete.

    The best FINALISTS rates of the first rung come first, with one seed. If all fail, the next best rates
    follow, one at a time. Then come the rates on both sides of the best one, with one seed, and then the
    other seeds of the best rate and of up to FINALISTS rates with close losses.
    """
    trained = {(trial.lr, trial.seed) for trial in last.trials}
    order, seeds = last.ranked(), last.seeds
    if not order:
        new = [lr for lr in first.ranked() if lr not in last.rates]
        return [(lr, seeds[0]) for lr in new[: 1 if last.trials else FINALISTS]]
    tried = {*first.ranked(), *last.rates}
    above = min((lr for lr in tried if lr > order[0]), default=order[0])
    below = max((lr for lr in tried if lr < order[0]), default=order[0])
    if neighbours := [lr for lr in (above, below) if lr not in last.rates]:
        return [(neighbours[0], seeds[0])]
    start = {lr: last.scores(lr)[0] for lr in order}  # compare the first seed of every rate
    close = [
        lr for lr in sorted(start, key=start.__getitem__) if start[lr] <= min(start.values()) + CLOSE_NATS
    ]
    finalists = dict.fromkeys([*close[:FINALISTS], order[0]])
    return [(lr, seed) for seed in seeds for lr in finalists if (lr, seed) not in trained]


# --- the choice


def choose_rate(rungs: Sequence[Rung]) -> LrChoice | None:
    """Choose the rate with the lowest mean loss in the last rung. Return None if no rate is eligible."""
    order = rungs[1].ranked() if len(rungs) > 1 else []
    if not order:
        return None
    last, best = rungs[1], order[0]
    measured = [t.lr for rung in rungs for t in rung.trials if t.status in ("ok", "diverged")]
    open_sides: dict[float, Side] = {min(measured): "low", max(measured): "high"}
    return LrChoice(
        lr=best,
        heldout_loss=last.mean(best),
        seeds=len(last.scores(best)),
        lead=statistics.fmean(differences(last, order[1], best)) if len(order) > 1 else None,
        edge_side=open_sides.get(best),
        tied=[lr for lr in order[1:] if is_tied(last, lr, best)],
    )


def differences(rung: Rung, lr: float, best: float) -> list[float]:
    """Return the loss of a rate minus the loss of the best rate, in nats, for each seed that both have."""
    scores = {(trial.lr, trial.seed): trial.score for trial in rung.trials}
    both = [seed for rate, seed in scores if rate == lr and (best, seed) in scores]
    return [scores[lr, seed] - scores[best, seed] for seed in both]


def is_tied(rung: Rung, lr: float, best: float) -> bool:
    """Return True if the loss of a rate is not significantly higher than that of the best rate.

    With equal numbers of seeds, the rates are tied if the 95 % interval of their mean difference, paired by
    seed, includes zero, or if there is only one seed. With unequal numbers, they are tied if the mean loss of
    `lr` is at most CLOSE_NATS higher.
    """
    if len(rung.scores(lr)) != len(rung.scores(best)):
        return rung.mean(lr) <= rung.mean(best) + CLOSE_NATS
    apart = differences(rung, lr, best)
    return len(apart) < 2 or statistics.fmean(apart) <= half_width(apart)
