"""Scores of a constant answer and those that are not defined; the rest: tests/parity/test_scores.py."""

import math

import numpy as np
import pytest

from bert_dp.config.manifest import Metric
from bert_dp.evaluation.scores import majority, score

pytest.importorskip("sklearn", reason="needs the extra glue")

BINARY: tuple[Metric, ...] = ("accuracy", "f1", "mcc", "auc")
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 60)
LOGITS = RNG.normal(size=(60, 2)) + 0.7 * np.eye(2)[LABELS]


def test_the_area_under_the_curve_is_the_share_of_pairs_in_the_right_order() -> None:
    margin = LOGITS[:, 1] - LOGITS[:, 0]
    ahead = np.sign(margin[LABELS == 1][:, None] - margin[LABELS == 0]) / 2 + 0.5  # Mann and Whitney's U
    assert score(["auc"], "single_label", LOGITS, LABELS)["auc"] == pytest.approx(ahead.mean(), abs=1e-12)


def test_what_is_not_defined_is_nan_and_what_is_not_finite_is_refused() -> None:
    flat = np.zeros((4, 1))
    found = score(["pearson", "spearman"], "regression", flat, np.arange(4.0))
    assert all(math.isnan(value) for value in found.values())
    assert math.isnan(score(["pearson"], "regression", flat[:1], np.zeros(1))["pearson"])
    assert math.isnan(score(["auc"], "single_label", LOGITS[:4], np.ones(4, np.int64))["auc"])
    with pytest.raises(KeyError):  # of more labels than two
        score(["auc"], "single_label", np.eye(3), np.arange(3))
    broken = LOGITS.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        score(["accuracy"], "single_label", broken, LABELS)


def test_the_majority_of_train_is_scored_on_dev() -> None:
    train, dev = np.array([1] * 7 + [0] * 3), np.array([1] * 279 + [0] * 129)  # dev as MRPC's
    found = majority(BINARY, "single_label", train, dev)
    assert found == pytest.approx({"accuracy": 0.68382, "f1": 0.81223, "mcc": 0, "auc": 0.5}, abs=1e-5)
    assert majority(["accuracy"], "single_label", 1 - train, dev)["accuracy"] == pytest.approx(129 / 408)
    scores = majority(["pearson"], "regression", np.arange(5.0), np.arange(3.0))
    assert math.isnan(scores["pearson"])
    several = np.array([[1, 0], [1, 1], [1, 0]], np.uint8)
    assert majority(["accuracy"], "multi_label", several, several)["accuracy"] == pytest.approx(2 / 3)
