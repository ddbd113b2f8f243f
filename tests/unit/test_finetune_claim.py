"""The figures of benchmarks/finetune_claim.py, by hand, from made evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.finetune_claim import (
    Evaluation,
    Measured,
    Paired,
    arms_of,
    compare,
    describe_arm,
    flips,
    judge,
    metrics_of,
    paired_difference,
    pooled_accuracy,
    read_dev_answers,
)
from bert_dp.config import find_config, load_config
from launcher.evaluate.glue_scores import Glue
from tests.glue_fixture import make_task, measured
from tests.helpers import write_lines

TASKS = {
    "RTE": make_task("RTE", examples=10),
    "MRPC": make_task("MRPC", examples=30),
    "STS-B": make_task("STS-B", examples=10),
}


def evaluation(folder: Path, answer: Any, score: Any) -> Evaluation:
    """Of one finetuning seed; every label is 0."""
    measured(folder, TASKS, answer, 0, score=score)
    return Evaluation(folder, Glue.model_validate(json.loads((folder / "glue.json").read_text())))


@pytest.fixture
def arms(tmp_path: Path) -> dict[str, Measured]:
    """`other` flips the first two examples of RTE in the second pretraining, and scores 0.1 more in it."""

    def arm(name: str) -> Measured:
        def one(number: int) -> Evaluation:
            differs = name == "other" and number == 1
            return evaluation(
                tmp_path / f"{name}-{number}",
                lambda task, seed, i: int(differs and task == "RTE" and i < 2),
                lambda task, seed: 0.5 + 0.2 * number + 0.1 * differs,
            )

        return Measured({number: one(number) for number in range(2)})

    return {name: arm(name) for name in ("one", "other")}


def test_an_arm_beside_another_by_hand(arms: dict[str, Measured]) -> None:
    one, other = arms["one"], arms["other"]
    metrics = metrics_of(one)
    assert metrics["STS-B"] == ["dev/pearson", "dev/spearman"]
    found = compare(one, other, metrics)
    assert found["flips"]["RTE"] == {"flipped": 2, "of": 20, "share": 0.1}
    assert found["flips"]["all"] == {"flipped": 2, "of": 80, "share": 0.025}
    assert "STS-B" not in found["flips"]
    assert found["differences"]["STS-B dev/pearson"] == pytest.approx(0.05)  # 0.1 in one of two
    pooled = found["pooled"]
    assert (pooled["examples"], pooled["seeds"]) == (40, 2)
    assert pooled["difference"] == -0.025  # of 40 examples two lose a half
    squares = 2 * 0.475**2 + 38 * 0.025**2
    assert pooled["standard_error"] == pytest.approx(math.sqrt(squares / (40 * 39)))
    assert found["pooled_accuracy"] == [1.0, 0.975]
    assert found["pooled_by_pretraining"] == {0: 0.0, 1: -0.05}
    described = describe_arm(other, metrics)
    assert (described["trials"], described["failed"]) == (6, [])
    assert described["one_class"] == [f"{task}-lr-4e-05-s0" for task in (*TASKS, "MRPC", "STS-B")]
    scores = described["scores"]["RTE dev/accuracy"]
    assert scores["runs"] == [[0, 0, 0.5], [1, 0, pytest.approx(0.8)]]
    assert (scores["mean"], scores["sd"]) == (pytest.approx(0.65), pytest.approx(0.3 / math.sqrt(2)))


def test_only_pretrainings_of_both_count(arms: dict[str, Measured]) -> None:
    first = Measured({0: arms["other"].evaluations[0]})
    found = compare(arms["one"], first, metrics_of(first))
    assert found["flips"]["all"] == {"flipped": 0, "of": 40, "share": 0.0}
    assert found["differences"]["RTE dev/accuracy"] == 0.0
    assert found["pooled_by_pretraining"] == {0: 0.0}


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


def test_only_labelled_dev_examples_are_compared(tmp_path: Path) -> None:
    """The test file of MRPC has labels too."""
    lines = [("dev", 0, 1), ("test", 0, 1), ("dev", 1, None)]
    write_lines(
        tmp_path / "predictions.jsonl",
        [{"split": s, "index": i, "label": label, "logits": [0.5, None, 1.0]} for s, i, label in lines],
    )
    assert read_dev_answers(tmp_path) == {("dev", 0): (None, 1)}


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
    ("gap", "control", "holds", "words"),
    [
        (-0.0009, 0.005, True, "-0.09 points of pooled accuracy, 0.1 allowed"),
        (0.0011, 0.005, False, "+0.11 points of pooled accuracy, 0.1 allowed"),
        (0.0059, 0.02, True, "0.60 allowed (twice the paired standard error): 0.1 points cannot be shown"),
        (-0.0061, 0.02, False, "rounding alone flips 2.00 % (control, 2 of 2 pretrainings)"),
        (0.0, 0.005, True, "rounding alone flips 0.50 % (control, 1 of 2 pretrainings)"),
    ],
)
def test_what_is_asked_of_four_ranks(gap: float, control: float, holds: bool, words: str) -> None:
    found = judge(against(gap, 0.003, control), "fp32")
    assert found["holds"] is holds
    assert words in found["text"]


def test_in_double_precision_nothing_may_flip() -> None:
    assert judge(against(0.0, 0.0, 0.0), "fp64")["holds"] is True
    found = judge(against(0.0, 0.0, 0.0, flipped=1), "fp64")
    assert found["holds"] is False
    assert "four 1, control 1" in found["text"]
    assert judge({}, "fp32")["holds"] is None


def test_the_arms_differ_as_they_say() -> None:
    config = load_config(find_config("small-text"))
    arms = arms_of(config)
    of_all = [(name, arm.ranks, arm.finetune_ranks, arm.times) for name, arm in arms.items()]
    assert of_all == [("one", 1, 1, 1), ("four", 4, 4, 1), ("control", 1, 1, 1), ("bert-gpu", 4, 1, 4)]
    (batch,) = arms["bert-gpu"].settings
    given = load_config(find_config("small-text"), [batch])
    assert given.batch.global_size == 4 * config.batch.global_size
    assert given.optim == config.optim
    (micro,) = arms["control"].settings
    other = load_config(find_config("small-text"), [micro]).batch
    assert other.micro_size != config.batch.micro_size
    assert other.global_size == config.batch.global_size
