"""The figures of benchmarks/finetune_claim.py, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.finetune_claim import Paired, flips, judge, paired_difference, pooled_accuracy


def right(*examples: int) -> Any:
    return {("dev", i): (float(right), 1.0) for i, right in enumerate(examples)}


def test_flips_and_pooled_accuracy_are_over_the_same_seeds_and_examples() -> None:
    one = {0: right(1, 1, 0), 1: right(0, 0, 0), 2: right(1, 1, 1)}
    other = {0: right(1, 0), 1: right(1, 0, 0, 1)}
    found = flips(one, other)
    assert (found.flipped, found.of, found.share) == (2, 5, 0.4)
    assert flips(one, {}).share is None
    # seeds 0 and 1 are those of both tasks: 3 of 5 and 1 of 5
    assert pooled_accuracy([one, {0: right(1, 0), 1: right(1, 0)}]) == 0.4
    assert pooled_accuracy([]) is None


def test_the_paired_standard_error_by_hand() -> None:
    # two seeds, three examples of one task and one of another: gains 1/2, 0, -1 and 1
    one = [{0: right(0, 1, 1), 1: right(0, 0, 1)}, {0: right(0), 1: right(0), 2: right(1)}]
    other = [{0: right(1, 0, 0), 1: right(0, 1, 0), 2: right(1, 1, 1)}, {0: right(1), 1: right(1)}]
    found = paired_difference(one, other)
    assert found is not None
    assert (found.examples, found.seeds) == (4, 2)
    assert found.difference == 0.125  # (0.5 + 0 - 1 + 1) / 4
    squares = 0.375**2 + 0.125**2 + 1.125**2 + 0.875**2
    assert found.standard_error == pytest.approx(math.sqrt(squares / (4 * 3)))
    swapped = paired_difference(other, one)
    assert swapped is not None
    assert (swapped.difference, swapped.standard_error) == (-0.125, found.standard_error)
    assert paired_difference([{0: right(0)}], [{0: right(1)}]) == Paired(1.0, None, 1, 1)
    assert paired_difference([{0: right(0)}], [{1: right(1)}]) is None
    assert paired_difference([], []) is None


def against(gap: float, error: float, control: float, flipped: int = 0) -> dict[str, Any]:
    def arm(share: float) -> dict[str, Any]:
        flips = {"all": {"flipped": flipped, "of": 1000, "share": share}}
        by_pretraining = {0: gap, 1: gap} if share == 0.02 else {0: 0.0}
        pooled = {"difference": gap, "standard_error": error}
        return {"pooled": pooled, "flips": flips, "pooled_by_pretraining": by_pretraining}

    return {"four": arm(0.02), "control": arm(control), "bert-gpu": arm(0.5)}


@pytest.mark.parametrize(
    ("gap", "control", "holds"),
    [  # 0.1 points, or twice the paired standard error where rounding alone flips as much
        (-0.0009, 0.005, True),
        (0.0011, 0.005, False),
        (0.0059, 0.02, True),
        (-0.0061, 0.02, False),
    ],
)
def test_what_is_asked_of_four_ranks(gap: float, control: float, holds: bool) -> None:
    assert judge(against(gap, 0.003, control), "fp32")["holds"] is holds


def test_in_double_precision_nothing_may_flip() -> None:
    assert judge(against(0.0, 0.0, 0.0), "fp64")["holds"] is True
    assert judge(against(0.0, 0.0, 0.0, flipped=1), "fp64")["holds"] is False
    assert judge({}, "fp32")["holds"] is None
