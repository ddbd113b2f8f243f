"""Rules of `tune lr` at their bounds, by hand."""

import math
import random
from collections.abc import Sequence

import pytest

from launcher.tune import lr_search
from launcher.tune.lr_search import LrChoice, LrTrial, RangeTest, Rung


def outcome(lr: float, loss: float | None, seed: int = 0, status: str = "ok") -> LrTrial:
    return LrTrial(trial=f"t{lr}", lr=lr, seed=seed, status=status, heldout_loss=loss, tokens=1)


def rung(losses: dict[float, Sequence[float | None]]) -> Rung:
    made = [outcome(lr, x, seed) for lr, each in losses.items() for seed, x in enumerate(each)]
    return Rung(tokens=8, seeds=[0, 1, 2], trials=made)


# --- the range test


def steps(losses: Sequence[float | None]) -> list[tuple[float, float | None, int]]:
    return [(0.5 + k, loss, 0) for k, loss in enumerate(losses)]


def test_a_rise_of_a_tenth_of_the_fall_is_the_edge() -> None:
    """From 10 to 0 without noise: the mean of five must rise by more than 1."""
    losses = [10.0] * 5 + [0.0] * 7
    assert lr_search.find_edge(steps([*losses, 5.5])) == (12.5, "the loss rose 1.1 nats above its minimum")
    assert lr_search.find_edge(steps([*losses, 5.0])) == (None, "no divergence up to 12.5")
    assert lr_search.find_edge(steps([*losses, 5.0, 0.6]))[0] == 13.5
    assert (
        lr_search.find_edge(steps([*(x + 2 for x in losses), 7.5]))[0] == 12.5
    )  # of the fall, not the height
    # the minimum before counts, not the last mean
    assert lr_search.find_edge(steps([*losses, *[1.0] * 5, 1.6]))[0] == 17.5


def test_a_rise_must_be_eight_deviations_of_the_smoothed_noise() -> None:
    """Neighbours differ by 1: deviation 1.4826 / sqrt(2 x 5), so the mean must rise by 3.75."""
    losses = [0.0, 1.0] * 10
    bound = 5 * 8 * 1.4826 / math.sqrt(10)
    assert lr_search.find_edge(steps([*losses, bound - 0.01]))[0] is None
    assert lr_search.find_edge(steps([*losses, bound + 0.01]))[0] == 20.5


def test_noise_alone_is_no_edge() -> None:
    draws = random.Random(0)
    points = [(10 ** (-4 + k / 25), 7 - 0.01 * k + draws.gauss(0, 0.1), 0) for k in range(100)]
    assert lr_search.find_edge(points)[0] is None


def test_before_five_losses_nothing_has_risen() -> None:
    assert lr_search.find_edge(steps([0.0, 0.0, 0.0, 9.0]))[0] is None
    assert lr_search.find_edge(steps([0.0, 0.0, 0.0, 0.0, 0.0, 9.0]))[0] == 5.5


@pytest.mark.parametrize("loss", [None, math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_the_edge(loss: float | None) -> None:
    assert lr_search.find_edge(steps([1.0, loss, 1.0])) == (1.5, "the loss is not finite")


@pytest.mark.parametrize(
    ("skipped", "edge"),
    [
        ([0, 0, 0, 0], None),
        ([0, 0, 1, 1], 3.0),
        ([1, 2, 2, 2], None),  # while fp16's loss scale falls
        ([1, 2, 2, 3], 4.0),
        ([1, 1, 2, 2], 3.0),
        ([1, 2, 3, 4], None),
    ],
)
def test_a_skipped_step_is_the_edge_but_the_first_ones(skipped: list[int], edge: float | None) -> None:
    points = [(1.0 + k, 5.0, n) for k, n in enumerate(skipped)]
    why = "a step was skipped for a gradient that is not finite" if edge else "no divergence up to 4"
    assert lr_search.find_edge(points) == (edge, why)


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
def test_the_first_ladder(edge: float | None, last: float, rates: list[float]) -> None:
    test = RangeTest(trial="r", points=[(last, 1.0)], edge=edge, why="")
    assert lr_search.first_ladder(test, 3) == pytest.approx(rates, rel=1e-12)


# --- what trains next


def added(outcomes: list[LrTrial], edge: float | None = 100.0) -> list[float]:
    """Return the rates that follow a ladder of 4, 2 and 1."""
    rung = Rung(tokens=1, seeds=[0], trials=outcomes)
    return lr_search.next_short_rates(rung, [4.0, 2.0, 1.0], edge)


def test_the_ladder_trains_first() -> None:
    assert added([]) == [4.0, 2.0, 1.0]


def test_a_rate_is_added_at_the_end_that_is_best() -> None:
    assert added([outcome(1, 3), outcome(2, 2), outcome(4, 3)]) == []
    assert added([outcome(1, 3), outcome(2, 2), outcome(4, 1)]) == [8]
    assert added([outcome(1, 1), outcome(2, 2), outcome(4, 3)]) == [0.5]
    assert added([outcome(2, 1)]) == [4]  # both ends: upwards first
    assert added([outcome(1, 3), outcome(2, 2), outcome(4, 1)], edge=8.0) == [8]
    assert added([outcome(1, 3), outcome(2, 2), outcome(4, 1)], edge=7.9) == []
    assert added([outcome(4, 1)], edge=7.9) == [2]  # no room above the only one
    assert added([outcome(1, 3), outcome(4, 1)], edge=None) == [8]


def test_three_rates_are_added_at_most_at_either_end() -> None:
    ends = [outcome(lr, 1 + abs(math.log2(lr / 32))) for lr in (1, 2, 4, 8, 16)]
    assert added(ends) == [32]  # 4 x 2^3
    assert added([*ends, outcome(32, 0.5)]) == []
    ends = [outcome(lr, 1 + abs(math.log2(lr * 8))) for lr in (0.25, 0.5, 1, 2, 4)]
    assert added(ends) == [0.125]
    assert added([*ends, outcome(0.125, 0.5)]) == []


def test_where_all_diverged_a_lower_one_is_added() -> None:
    assert added([outcome(lr, None, status="diverged") for lr in (2, 1, 4)]) == [0.5]
    assert added([outcome(1, None, status="failed"), outcome(2, None, status="diverged")]) == [1]
    assert added([outcome(1, None, status="failed")]) == []
    assert added([outcome(1, None, status="diverged"), outcome(2, 5.0), outcome(4, 6.0)]) == []


def test_a_rate_that_ends_above_the_unigram_entropy_has_diverged_if_a_lower_one_learned() -> None:
    trials = [outcome(1, 4.0), outcome(2, 4.0), outcome(4, 4.1), outcome(8, 3.0), outcome(0.5, 9.0)]
    trials.append(outcome(16, 9.0, status="oom"))
    assert lr_search.mark_diverged(trials, None) == trials
    marked = lr_search.mark_diverged(trials, 4.0)
    assert marked[:2] + marked[3:] == trials[:2] + trials[3:]
    assert marked[2].status == "diverged"
    assert "4.1" in (marked[2].cause or "")
    alone = [outcome(1, 4.1), outcome(1, 3.9, seed=1), outcome(2, 4.0)]
    assert lr_search.mark_diverged(alone, 4.0) == alone


def test_means_and_ranks() -> None:
    made = rung({1.0: [3.0, 5.0], 2.0: [3.5], 4.0: [3.5]})
    made.trials.append(outcome(8, None, status="failed"))
    assert (made.mean(1.0), made.scores(1.0)) == (4.0, [3.0, 5.0])
    assert made.mean(8) == math.inf
    assert made.ranked() == [2.0, 4.0, 1.0]


SHORT = rung({lr: [3.0 + 0.1 * abs(math.log2(lr))] for lr in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)})


def following(losses: dict[float, Sequence[float | None]], *lost: float) -> list[tuple[float, int]]:
    last = rung(losses)
    last.trials.extend(outcome(lr, None, status="diverged") for lr in lost)
    return lr_search.next_whole_runs(SHORT, last)


def test_whole_runs_begin_with_the_two_best_and_find_the_neighbours_of_the_best() -> None:
    assert following({}) == [(1.0, 0), (0.5, 0)]
    assert following({1.0: [2.0], 0.5: [3.0]}) == [(2.0, 0)]
    assert following({1.0: [3.0], 0.5: [2.0]}) == [(0.25, 0)]
    assert following({1.0: [3.0], 0.5: [2.0]}, 0.25) == [(0.5, 1), (0.5, 2)]  # 0.25 broke, which is worse
    assert following({8.0: [2.0]}) == [(4.0, 0)]


def test_close_rates_train_the_other_seeds() -> None:
    near = {1.0: [2.0], 0.5: [2.03], 2.0: [2.02], 4.0: [2.1]}
    assert following(near) == [(1.0, 1), (2.0, 1), (1.0, 2), (2.0, 2)]
    far = {1.0: [2.0], 0.5: [2.0301], 2.0: [2.04]}
    assert following(far) == [(1.0, 1), (1.0, 2)]
    assert following({**far, 1.0: [2.0, 2.0, 2.0]}) == []
    worse = {**far, 1.0: [2.0, 2.2, 2.2]}  # the best turns out worse than one that had been left out
    assert following(worse) == [(0.25, 0)]
    assert following({**worse, 0.25: [3.0]}) == [(0.5, 1), (0.5, 2)]


def test_if_no_finalist_can_be_chosen_the_next_rate_trains() -> None:
    assert following({}, 1.0, 0.5) == [(2.0, 0)]
    assert following({}, 1.0, 0.5, 2.0, 0.25, 4.0, 8.0) == []


def test_rates_less_than_sqrt_2_apart_are_no_neighbours() -> None:
    short = rung({lr: [9.0] for lr in (1.0, 1.3, 2.0, 4.0)})

    def beside(best: float, *trained: float) -> float | None:
        return lr_search.untrained_neighbour(short, rung({lr: [2.0] for lr in trained}), best)

    assert beside(1.0, 1.0, 2.0) is None  # 1.3 is 0.38 octaves above
    assert beside(2.0, 2.0, 4.0) == 1.3  # 0.62 octaves below
    assert beside(4.0, 2.0, 4.0) is None


def test_a_side_is_open_without_a_worse_rate_on_it() -> None:
    def side(*rungs: Rung) -> str | None:
        return lr_search.open_side(rungs, 2.0)

    assert side(rung({1.0: [3.0], 2.0: [2.0], 4.0: [3.0]})) is None
    assert side(rung({1.0: [3.0], 2.0: [2.0]})) == "high"
    assert side(rung({2.0: [2.0], 4.0: [3.0]})) == "low"
    assert side(rung({1.0: [2.0], 2.0: [2.0], 4.0: [3.0]})) == "low"  # as good is not worse
    # the nearest rate counts, in the longest rung that has both
    assert side(rung({0.5: [1.0], 1.0: [3.0], 2.0: [2.0], 4.0: [3.0], 8.0: [1.0]})) is None
    short = rung({1.0: [1.0], 2.0: [2.0], 4.0: [3.0]})
    assert side(short) == "low"
    assert side(short, rung({1.0: [3.0], 2.0: [2.0]})) is None
    assert side(short, rung({2.0: [2.0]})) == "low"
    assert side(rung({1.0: [3.0]}), rung({2.0: [2.0], 4.0: [3.0]})) == "low"  # none has both
    lost = rung({1.0: [3.0], 2.0: [2.0]})
    lost.trials.append(outcome(4.0, None, status="failed"))
    assert side(lost) == "high"
    lost.trials.append(outcome(4.0, None, seed=1, status="diverged"))
    assert side(lost) is None


# --- the choice


WIDE = rung({lr: [9.0 if lr != 2 else 8.0] for lr in (1, 2, 4, 8)})


def chosen(losses: dict[float, Sequence[float]], before: Rung = WIDE) -> LrChoice:
    choice = lr_search.choose_rate([before, rung(losses)])
    assert choice is not None
    return choice


def test_the_choice_in_full() -> None:
    choice = chosen({2.0: [3.0, 3.25, 3.5], 4.0: [4.0, 4.25, 4.5]})
    assert choice.model_dump() == {
        "lr": 2.0,
        "heldout_loss": 3.25,
        "seeds": 3,
        "lead": 1.0,
        "edge_side": None,
        "tied": [],
    }


def test_one_seed_tells_no_rates_apart() -> None:
    choice = chosen({2.0: [3.0], 4.0: [3.01], 8.0: [3.5]})
    assert (choice.seeds, choice.tied) == (1, [4.0, 8.0])
    assert chosen({2.0: [3.0]}).lead is None


def test_an_open_side_is_told() -> None:
    choice = chosen({8.0: [3.0, 3.0], 4.0: [4.0, 4.0]}, Rung(tokens=1, seeds=[0]))
    assert (choice.edge_side, choice.tied) == ("high", [])


@pytest.mark.parametrize(("count", "student"), [(2, 12.706), (3, 4.303), (10, 2.262), (12, 2.201)])
def test_rates_are_tied_whose_paired_difference_may_be_zero(count: int, student: float) -> None:
    """Differences d - 1 and d + 1 in turn: tied while d <= t x s / sqrt(n), t at n - 1 degrees of freedom."""
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


def test_fewer_seeds_are_compared_over_those_that_both_have() -> None:
    choice = chosen({2.0: [3.0, 3.5, 2.5], 4.0: [3.02], 8.0: [3.04]})
    assert choice.tied == [4.0]  # within 0.03 of the mean, 8 is not
    assert choice.lead == pytest.approx(0.02)


def test_a_rate_with_a_diverged_seed_is_not_chosen() -> None:
    made = rung({2.0: [3.0, 3.2, 3.4], 4.0: [3.0, 3.4, 3.8]})
    made.trials[0] = outcome(2.0, 3.0, status="diverged")
    choice = lr_search.choose_rate([WIDE, made])
    assert choice is not None
    assert choice.lr == 4.0


def test_without_a_last_rung_or_a_finite_loss_nothing_is_chosen() -> None:
    assert lr_search.choose_rate([]) is None
    assert lr_search.choose_rate([rung({2.0: [3.0]})]) is None
    assert lr_search.choose_rate([WIDE, rung({2.0: [None]})]) is None
