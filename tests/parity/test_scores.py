"""Compare scores of predictions that several ranks made with scikit-learn and scipy, and test scores of a
constant answer and undefined scores."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bert_dp.config import read_examples, resolve
from bert_dp.config.manifest import Metric
from bert_dp.evaluation.scores import majority, score
from bert_dp.examples.table import Examples
from bert_dp.files import PREDICTIONS
from bert_dp.tasks import Context
from bert_dp.tasks.finetune import Finetuning
from bert_dp.training import distributed
from bert_dp.training.devices import choose_precision
from bert_dp.training.process import read_world
from tests.example_files import label_names, write_examples
from tests.helpers import read_json, read_lines
from tests.parity.runs import settings
from tests.ranks import run_ranks

sklearn = pytest.importorskip("sklearn.metrics", reason="needs the extra glue")
stats = pytest.importorskip("scipy.stats", reason="needs the extra glue")

pytestmark = pytest.mark.quick
VOCAB, DEV, MICRO = 64, 31, 3  # 31 examples do not fill the last micro batch
Measure = Callable[[NDArray[Any], NDArray[Any]], float]
OF_CLASSES: dict[str, Measure] = {
    "accuracy": lambda y, x: sklearn.accuracy_score(y, x.argmax(1)),
    "mcc": lambda y, x: sklearn.matthews_corrcoef(y, x.argmax(1)),
}
OF_TWO: dict[str, Measure] = {
    "f1": lambda y, x: sklearn.f1_score(y, x.argmax(1)),
    "auc": lambda y, x: sklearn.roc_auc_score(y, x[:, 1] - x[:, 0]),
}
OF_THREE: dict[str, Measure] = {"f1": lambda y, x: sklearn.f1_score(y, x.argmax(1), average="macro")}
OF_SEVERAL: dict[str, Measure] = {
    "accuracy": lambda y, x: sklearn.accuracy_score(y, x > 0),
    "f1": lambda y, x: sklearn.f1_score(y, x > 0, average="micro"),
}
OF_A_SCORE: dict[str, Measure] = {
    "pearson": lambda y, x: stats.pearsonr(y, x[:, 0]).statistic,
    "spearman": lambda y, x: stats.spearmanr(y, x[:, 0]).statistic,
}
KINDS: dict[str, tuple[str, int, Mapping[str, Measure]]] = {
    "two labels": ("single_label", 2, OF_CLASSES | OF_TWO),
    "three labels": ("single_label", 3, OF_CLASSES | OF_THREE),
    "independent labels": ("multi_label", 2, OF_SEVERAL),
    "regression": ("regression", 1, OF_A_SCORE),
}


class SumOfTokens(torch.nn.Module):
    """Model whose logits [B, L] depend on an example's tokens only."""

    def __init__(self, outputs: int):
        super().__init__()
        table = torch.randn(VOCAB, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.table_VL = torch.nn.Parameter(table)

    def forward(self, ids_BS: torch.Tensor, real_BS: torch.Tensor | None = None) -> torch.Tensor:
        of_tokens_BSL = self.table_VL[ids_BS]
        if real_BS is not None:
            of_tokens_BSL = of_tokens_BSL * real_BS[..., None]
        return of_tokens_BSL.sum(1)


def evaluate_all(folder: str) -> None:
    """Evaluate the prepared directory of each kind in this rank."""
    comm = distributed.connect(read_world(os.environ), torch.device("cpu"))
    for name, (kind, outputs, _) in KINDS.items():
        evaluate(Path(folder, name), kind, outputs, comm)
    distributed.disconnect()


def evaluate(out: Path, kind: str, outputs: int, comm: Any) -> None:
    """Evaluate a prepared directory and write scores-RANK.json."""
    world, device = comm.world, torch.device("cpu")
    own: dict[str, Any] = {
        "data": {"sequence_length": 32},
        "objective": {"name": "finetune"},
        "finetune": {"kind": kind, "labels": label_names(kind, outputs)},
        "batch": {"global_size": 2 * MICRO, "micro_size": MICRO},
        "precision": "fp64",
    }
    task = Finetuning(resolve([settings(out, **own)]), device)
    task.open_data()
    calls: dict[str, Any] = {"progress": lambda: None, "stopped": lambda: False}
    replica = {"dp_rank": world.rank, "dp_size": world.size, "tensor": 1, **calls}
    run_dir = out if world.rank == 0 else None
    context = Context(comm, device, choose_precision("fp64", device), run_dir=run_dir, **replica)
    measured = task.evaluate(SumOfTokens(outputs), context)
    (out / f"scores-{world.rank}.json").write_text(json.dumps(measured))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scores_of_gathered_predictions_equal_those_of_scikit_learn(ranks: int, tmp_path: Path) -> None:
    for name, (kind, outputs, measures) in KINDS.items():
        write_examples(tmp_path / name, kind=kind, dev=DEV, metrics=list(measures), num_labels=outputs)
    run_ranks(ranks, evaluate_all, str(tmp_path))
    for name, (kind, outputs, measures) in KINDS.items():
        assert_scores(tmp_path / name, SumOfTokens(outputs), kind, measures, ranks)


def mean_loss(kind: str, logits_NL: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the mean loss over the examples, or over every decision of independent labels."""
    if kind == "regression":
        return float(np.square(logits_NL[:, 0] - labels).mean())
    if kind == "multi_label":
        return float((np.logaddexp(0, logits_NL) - labels * logits_NL).mean())
    chosen_N = np.take_along_axis(logits_NL, labels[:, None], 1)[:, 0]
    return float((np.logaddexp.reduce(logits_NL, axis=1) - chosen_N).mean())


def assert_scores(
    folder: Path, model: torch.nn.Module, kind: str, measures: Mapping[str, Measure], ranks: int
) -> None:
    """Check that scores, loss and predictions of every rank equal those of examples evaluated one by one."""
    dev = Examples.open(folder, read_examples(folder), "dev")
    with torch.no_grad():
        alone = [model(torch.from_numpy(dev.tokens(i).astype(np.int64))[None])[0].numpy() for i in range(DEV)]
    logits_NL, labels = np.stack(alone), np.asarray(dev.labels)
    predicted = [line["logits"] for line in read_lines(folder / PREDICTIONS)]
    np.testing.assert_allclose(predicted, logits_NL, rtol=1e-12, atol=1e-12)
    order = np.random.default_rng(2).permutation(DEV)
    expected = {f"dev/{name}": measure(labels[order], logits_NL[order]) for name, measure in measures.items()}
    moved = {f"dev/{name}": measure(labels, logits_NL[order]) for name, measure in measures.items()}
    assert any(abs(moved[metric] - score) > 1e-3 for metric, score in expected.items()), "order has no effect"
    for rank in range(ranks):
        measured = read_json(folder / f"scores-{rank}.json")
        assert measured["examples"] == DEV
        assert measured["loss"] == pytest.approx(mean_loss(kind, logits_NL, labels), rel=1e-9)
        assert measured["scores"] == pytest.approx(expected, abs=1e-12)


# --- scores in one process


BINARY: tuple[Metric, ...] = ("accuracy", "f1", "mcc", "auc")
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 60)
LOGITS = RNG.normal(size=(60, 2)) + 0.7 * np.eye(2)[LABELS]


def test_the_area_under_the_curve_is_the_share_of_pairs_in_the_right_order() -> None:
    margin = LOGITS[:, 1] - LOGITS[:, 0]
    ahead = np.sign(margin[LABELS == 1][:, None] - margin[LABELS == 0]) / 2 + 0.5  # Mann and Whitney's U
    assert score(["auc"], "single_label", LOGITS, LABELS)["auc"] == pytest.approx(ahead.mean(), abs=1e-12)


def test_undefined_scores_are_nan_and_logits_that_are_not_finite_are_refused() -> None:
    flat = np.zeros((4, 1))
    found = score(["pearson", "spearman"], "regression", flat, np.arange(4.0))
    assert all(math.isnan(value) for value in found.values())
    assert math.isnan(score(["pearson"], "regression", flat[:1], np.zeros(1))["pearson"])
    assert math.isnan(score(["auc"], "single_label", LOGITS[:4], np.ones(4, np.int64))["auc"])
    with pytest.raises(KeyError):  # three labels
        score(["auc"], "single_label", np.eye(3), np.arange(3))
    broken = LOGITS.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        score(["accuracy"], "single_label", broken, LABELS)


def test_the_majority_of_train_is_scored_on_dev() -> None:
    train, dev = np.array([1] * 7 + [0] * 3), np.array([1] * 279 + [0] * 129)  # the counts of MRPC's dev set
    found = majority(BINARY, "single_label", train, dev)
    assert found == pytest.approx({"accuracy": 0.68382, "f1": 0.81223, "mcc": 0, "auc": 0.5}, abs=1e-5)
    assert majority(["accuracy"], "single_label", 1 - train, dev)["accuracy"] == pytest.approx(129 / 408)
    scores = majority(["pearson"], "regression", np.arange(5.0), np.arange(3.0))
    assert math.isnan(scores["pearson"])
    several = np.array([[1, 0], [1, 1], [1, 0]], np.uint8)
    assert majority(["accuracy"], "multi_label", several, several)["accuracy"] == pytest.approx(2 / 3)
