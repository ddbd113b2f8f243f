"""What a constant answer scores: `python -m bert_dp.measure.majority DIR...` prints, of prepared directories,
{directory: {split: {metric: score}}} for every labelled split but train."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bert_dp.config import ExamplesManifest, read_examples
from bert_dp.corpus.command import run_command
from bert_dp.examples.store import Examples
from bert_dp.scores import majority


def majority_scores(directory: Path) -> dict[str, dict[str, float | None]]:
    """Split -> metric -> the score of the most frequent label of train, or of the mean of its scores; null
    where the metric of a constant is not defined. Raises ConfigError."""
    manifest = read_examples(directory)
    train = _labels(directory, manifest, "train")
    table: dict[str, dict[str, float | None]] = {}
    for name, split in manifest.splits.items():
        if name == "train" or not split.has_labels:
            continue
        scores = majority(manifest.metrics, manifest.kind, train, _labels(directory, manifest, name))
        table[name] = {metric: score if math.isfinite(score) else None for metric, score in scores.items()}
    return table


def _labels(directory: Path, manifest: ExamplesManifest, split: str) -> NDArray[Any]:
    labels = Examples.open(directory, manifest, split).labels
    assert labels is not None
    return labels


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a directory that is none of ours, 1 for a failure, 128 + signal."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.measure.majority")
    parser.add_argument("directories", type=Path, nargs="+")
    return run_command(functools.partial(_answer, parser.parse_args(argv).directories))


def _answer(directories: Sequence[Path]) -> tuple[str, int]:
    return json.dumps({str(directory): majority_scores(directory) for directory in directories}), 0


if __name__ == "__main__":
    sys.exit(main())
