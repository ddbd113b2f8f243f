"""Tests of the rules of `tune lr` at their bounds, with values computed by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from launcher.tune import lr_search
from launcher.tune.lr_search import LrChoice, LrTrial, RangeTest, Rung


def outcome(lr: float, loss: float | None, seed: int = 0, status: str = "ok") -> LrTrial:
    return LrTrial(name=f"t{lr}", lr=lr, seed=seed, status=status, heldout_loss=loss, tokens=1)


def rung(losses: dict[float, Sequence[float | None]]) -> Rung:
    made = [outcome(lr, x, seed) for lr, each in losses.items() for seed, x in enumerate(each)]
    return Rung(tokens=8, seeds=[0, 1, 2], trials=made)


def steps(losses: Sequence[float | None]) -> list[tuple[float, float | None, int]]:
    return [(0.5 + k, loss, 0) for k, loss in enumerate(losses)]


FALL = [10.0] * 5 + [0.0] * 7


@pytest.mark.parametrize(
    ("losses", "edge"),
    [
        ([*FALL, 5.5], 12.5),  # the mean of five rises by more than a tenth of the fall
        ([*FALL, 5.0], None),
        ([*FALL, 5.0, 0.6], 13.5),
        ([*(x + 2 for x in FALL), 7.5], 12.5),  # a tenth of the fall, not of the height
        ([*FALL, *[1.0] * 5, 1.6], 17.5),  # the rise is counted from the minimum, not from the last mean
        ([*[0.0, 1.0] * 10, 8 * 1.4826 * math.sqrt(5 / 2) - 0.01], None),  # 8 standard deviations
        ([*[0.0, 1.0] * 10, 8 * 1.4826 * math.sqrt(5 / 2) + 0.01], 20.5),
        ([0.0, 0.0, 0.0, 9.0], None),  # five losses are needed to detect a rise
        ([1.0, None, 1.0], 1.5),
        ([1.0, math.inf, 1.0], 1.5),
        ([1.0, math.nan, 1.0], 1.5),
    ],
)
def test_the_edge_is_where_the_smoothed_loss_rises_or_is_not_finite(losses, edge) -> None:
    assert lr_search.find_edge(steps(losses))[0] == edge


@pytest.mark.parametrize(
    ("skipped", "edge"),
    [
        ([0, 0, 0, 0], None),
        ([0, 0, 1, 1], 3.0),
        ([1, 2, 2, 2], None),  # fp16's loss scale is still falling
        ([1, 2, 2, 3], 4.0),
        ([1, 1, 2, 2], 3.0),
        ([1, 2, 3, 4], None),
    ],
)
def test_a_skipped_step_is_the_edge_except_at_the_start(skipped: list[int], edge: float | None) -> None:
    assert lr_search.find_edge([(1.0 + k, 5.0, n) for k, n in enumerate(skipped)])[0] == edge


@pytest.mark.parametrize(
    ("edge", "last", "rates"),
    [
        (4.0, 64.0, [1.0, 0.5, 0.25]),
        (None, 4.0, [1.0, 0.5, 0.25]),
        (0.0517, 9.0, [0.012, 0.006, 0.003]),
        (0.5196, 9.0, [0.12, 0.06, 0.03]),
        (0.00396, 9.0, [0.00099, 0.000495, 0.0002475]),
        (396.0, 9.0, [99.0, 49.5, 24.75]),
    ],
)
def test_the_first_ladder_starts_below_the_edge(edge: float | None, last: float, rates: list[float]) -> None:
    test = RangeTest(points=[(last, 1.0)], edge=edge, reason="")
    assert lr_search.first_ladder(test, 3) == pytest.approx(rates, rel=1e-12)


ENDS = [outcome(lr, 1 + abs(math.log2(lr / 32))) for lr in (1, 2, 4, 8, 16)]
DIVERGED = [outcome(lr, None, status="diverged") for lr in (2, 1, 4)]


@pytest.mark.parametrize(
    ("outcomes", "edge", "rates"),
    [
        ([], 100.0, [4.0, 2.0, 1.0]),
        ([outcome(1, 3), outcome(2, 2), outcome(4, 3)], 100.0, []),
        ([outcome(1, 3), outcome(2, 2), outcome(4, 1)], 100.0, [8]),
        ([outcome(1, 1), outcome(2, 2), outcome(4, 3)], 100.0, [0.5]),
        ([outcome(1, 3), outcome(4, 1)], 8.0, [8]),
        ([outcome(1, 3), outcome(4, 1)], 7.9, []),
        ([outcome(4, 1)], 7.9, [2]),  # twice the only rate is above the edge
        ([outcome(1, 3), outcome(4, 1)], None, [8]),
        (ENDS, 100.0, [32]),  # at most 4 x 2^3
        ([*ENDS, outcome(32, 0.5)], 100.0, []),
        (DIVERGED, 100.0, [0.5]),
        ([*DIVERGED, outcome(0.5, None, status="failed")], 100.0, []),  # not the same rate again
        ([outcome(1, None, status="failed")], 100.0, []),
    ],
)
def test_a_rate_is_added_beyond_the_best_end_or_below_diverged_rates(outcomes, edge, rates) -> None:
    rung = Rung(tokens=1, seeds=[0], trials=outcomes)
    assert lr_search.next_short_rates(rung, [4.0, 2.0, 1.0], edge) == rates


def test_a_rate_that_ends_above_the_unigram_entropy_has_diverged_if_a_lower_one_learned() -> None:
    trials = [outcome(1, 4.0), outcome(2, 4.0), outcome(4, 4.1), outcome(8, 3.0), outcome(0.5, 9.0)]
    trials.append(outcome(16, 9.0, status="oom"))
    assert lr_search.mark_diverged(trials, None) == trials
    marked = lr_search.mark_diverged(trials, 4.0)
    assert marked[:2] + marked[3:] == trials[:2] + trials[3:]
    assert marked[2].status == "diverged"
    assert "4.1" in (marked[2].reason or "")
    alone = [outcome(1, 4.1), outcome(1, 3.9, seed=1), outcome(2, 4.0)]
    assert lr_search.mark_diverged(alone, 4.0) == alone


SHORT = rung({lr: [3.0 + 0.1 * abs(math.log2(lr))] for lr in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)})


def following(losses: dict[float, Sequence[float | None]], *lost: float) -> list[tuple[float, int]]:
    last = rung(losses)
    last.trials.extend(outcome(lr, None, status="diverged") for lr in lost)
    return lr_search.next_whole_runs(SHORT, last)


def test_whole_runs_start_with_the_two_best_rates_then_train_the_neighbours_of_the_best() -> None:
    assert following({}) == [(1.0, 0), (0.5, 0)]
    assert following({1.0: [2.0], 0.5: [3.0]}) == [(2.0, 0)]
    assert following({1.0: [3.0], 0.5: [2.0]}) == [(0.25, 0)]
    assert following({1.0: [3.0], 0.5: [2.0]}, 0.25) == [(0.5, 1), (0.5, 2)]  # 0.25 diverged, so it is worse
    assert following({8.0: [2.0]}) == [(4.0, 0)]


def test_close_rates_train_the_other_seeds() -> None:
    near = {1.0: [2.0], 0.5: [2.03], 2.0: [2.02], 4.0: [2.1]}
    assert following(near) == [(1.0, 1), (2.0, 1), (1.0, 2), (2.0, 2)]
    far = {1.0: [2.0], 0.5: [2.0301], 2.0: [2.04]}
    assert following(far) == [(1.0, 1), (1.0, 2)]
    assert following({**far, 1.0: [2.0, 2.0, 2.0]}) == []
    worse = {**far, 1.0: [2.0, 2.2, 2.2]}  # the mean of the best is above a rate left out before
    assert following(worse) == [(0.25, 0)]
    assert following({**worse, 0.25: [3.0]}) == [(0.5, 1), (0.5, 2)]


def test_the_next_rate_trains_if_all_finalists_diverged() -> None:
    assert following({}, 1.0, 0.5) == [(2.0, 0)]
    assert following({}, 1.0, 0.5, 2.0, 0.25, 4.0, 8.0) == []


WIDE = rung({lr: [9.0 if lr != 2 else 8.0] for lr in (1, 2, 4, 8)})


def chosen(losses: dict[float, Sequence[float]], before: Rung = WIDE) -> LrChoice:
    choice = lr_search.choose_rate([before, rung(losses)])
    assert choice is not None
    return choice


def test_a_side_is_open_if_no_rate_was_tried_on_it() -> None:
    def side(losses: Any, before: Any = None, lost: str = "") -> str | None:
        last = rung(losses)
        last.trials.extend([outcome(4.0, None, status=lost)] if lost else [])
        return lr_search.choose_rate([rung(before or {}), last]).edge_side

    below, above = {1.0: [3.0], 2.0: [2.0]}, {2.0: [2.0], 4.0: [3.0]}
    assert side(below | above) is None
    assert side({2.0: [2.0]}) == side(below) == "high"
    assert side(above) == "low"
    assert side(below, {4.0: [3.0]}) is None, "a rate of any rung closes the side"
    assert side(below, lost="failed") == "high"
    assert side(below, lost="diverged") is None


def test_the_choice_is_the_lowest_mean_with_its_lead_and_its_open_side() -> None:
    choice = chosen({2.0: [3.0, 3.25, 3.5], 4.0: [4.0, 4.25, 4.5]})
    assert (choice.lr, choice.heldout_loss, choice.seeds, choice.lead) == (2.0, 3.25, 3, 1.0)
    assert (choice.edge_side, choice.tied) == (None, [])
    assert chosen({8.0: [3.0, 3.0], 4.0: [4.0, 4.0]}, Rung(tokens=1, seeds=[0])).edge_side == "high"
    one = chosen({2.0: [3.0], 4.0: [3.01], 8.0: [3.5]})
    assert (one.seeds, one.tied) == (1, [4.0, 8.0]), "one seed cannot separate rates"
    assert chosen({2.0: [3.0]}).lead is None


@pytest.mark.parametrize(("count", "student"), [(2, 12.706), (3, 4.303), (10, 2.262), (12, 2.201)])
def test_rates_are_tied_if_their_paired_difference_may_be_zero(count: int, student: float) -> None:
    """Differences d - 1 and d + 1 alternate. Tied: d <= t x s / sqrt(n), t with n - 1 degrees of freedom."""
    signs = [1.0 if k % 2 else -1.0 for k in range(count)]
    mean = sum(signs) / count
    s = math.sqrt(sum((x - mean) ** 2 for x in signs) / (count - 1))
    half = student * s / math.sqrt(count)
    mine = [float(k) for k in range(count)]
    for apart, tied in ((0.999 * half, True), (1.001 * half, False)):
        other = [m + x - mean + apart for m, x in zip(mine, signs, strict=True)]
        assert bool(chosen({2.0: mine, 4.0: other}).tied) == tied
    assert chosen({2.0: mine, 4.0: [m + 1 for m in mine]}).tied == []
    assert chosen({2.0: mine, 4.0: mine}).tied


def test_rates_are_compared_over_their_common_seeds() -> None:
    choice = chosen({2.0: [3.0, 3.5, 2.5], 4.0: [3.02], 8.0: [3.04]})
    assert choice.tied == [4.0]  # 4.0 is within 0.03 of the best rate, 8.0 is not
    assert choice.lead == pytest.approx(0.02)


def test_a_rate_with_a_diverged_seed_is_not_chosen() -> None:
    made = rung({2.0: [3.0, 3.2, 3.4], 4.0: [3.0, 3.4, 3.8]})
    made.trials[0] = outcome(2.0, 3.0, status="diverged")
    assert getattr(lr_search.choose_rate([WIDE, made]), "lr", None) == 4.0
