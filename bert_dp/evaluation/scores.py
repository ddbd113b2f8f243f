"""Score predictions with scikit-learn and scipy (extra `glue`), without importing torch.

For single_label, f1 is that of the second label if there are two labels, else the mean over the labels. auc
is defined only for two labels. For multi_label, a label is predicted if its logit is above 0, f1 is computed
over all (example, label) pairs, and accuracy is the share of examples without a wrong prediction.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_dp.config.errors import require
from bert_dp.config.manifest import Metric
from bert_dp.config.schema import LabelKind

Measure = Callable[[NDArray[Any], NDArray[Any]], Any]


def score(
    metrics: Sequence[Metric], kind: LabelKind, logits: NDArray[Any], labels: NDArray[Any]
) -> dict[str, float]:
    """Return the value of each metric. `logits`: outputs of the model, [n, L] or, for regression, [n, 1].
    `labels`: [n] integers, [n, L] zeros and ones, or [n] scores. Predictions are neither clipped nor rounded.

    An undefined metric has the value NaN: for example, a correlation with a constant, or auc if only one
    label is present. Raise ValueError if logits are not finite, KeyError for a metric that is not defined for
    `kind`, and ConfigError if the extra is not installed.
    """
    if not np.isfinite(logits).all():
        raise ValueError("a logit is not finite, so the predictions cannot be scored")
    measures = _measures(kind, logits.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide warnings about undefined metrics
        return {name: float(measures[name](labels, logits.astype(np.float64))) for name in metrics}


def majority(
    metrics: Sequence[Metric], kind: LabelKind, train_labels: NDArray[Any], dev_labels: NDArray[Any]
) -> dict[str, float]:
    """Score a constant prediction on `dev_labels`. It is derived from `train_labels`: the majority label
    (single_label), the majority value of each label (multi_label) or the mean score (regression)."""
    if kind == "regression":
        logits = np.full((len(dev_labels), 1), train_labels.mean())
    elif kind == "multi_label":
        logits = np.tile(train_labels.mean(axis=0) - 0.5, (len(dev_labels), 1))
    else:
        counts = np.bincount(train_labels, minlength=max(2, dev_labels.max() + 1))
        logits = np.tile(counts == counts.max(), (len(dev_labels), 1)).astype(np.float64)
    return score(metrics, kind, logits, dev_labels)


def _measures(kind: LabelKind, num_labels: int) -> Mapping[Metric, Measure]:
    """Return, for each metric that `kind` allows, a function that computes it from labels and logits."""
    if kind == "regression":
        stats = require("scipy.stats", "glue", "scoring")

        def correlation(measure: Callable[..., Any], labels: NDArray[Any], logits: NDArray[Any]) -> float:
            return float(measure(labels, logits[:, 0]).statistic) if len(labels) > 1 else np.nan

        return {
            "pearson": functools.partial(correlation, stats.pearsonr),
            "spearman": functools.partial(correlation, stats.spearmanr),
        }
    sklearn = require("sklearn.metrics", "glue", "scoring")
    if kind == "multi_label":
        return {
            "accuracy": lambda labels, logits: sklearn.accuracy_score(labels, logits > 0),
            "f1": lambda labels, logits: sklearn.f1_score(labels.ravel(), (logits > 0).ravel()),
        }
    average = "binary" if num_labels == 2 else "macro"
    measures: dict[Metric, Measure] = {
        "accuracy": lambda labels, logits: sklearn.accuracy_score(labels, logits.argmax(axis=1)),
        "mcc": lambda labels, logits: sklearn.matthews_corrcoef(labels, logits.argmax(axis=1)),
        "f1": lambda labels, logits: sklearn.f1_score(labels, logits.argmax(axis=1), average=average),
    }
    if num_labels == 2:
        measures["auc"] = lambda labels, logits: sklearn.roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    return measures
