"""What a trial has predicted of its dev and test sets, and the files of it for GLUE's server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_dp import record
from bert_dp.config import ExamplesManifest

FOLDER = "submission"
NAMES = {("MNLI", "test_matched"): "MNLI-m", ("MNLI", "test_mismatched"): "MNLI-mm"}
LOWEST, HIGHEST = 0.0, 5.0  # a similarity of STS-B


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What was predicted of an example."""

    split: str
    index: int
    label: float | None
    """null: not known."""
    answer: float | None
    """The index of the greatest logit, or the score of a regression; None where a logit is not finite."""


def read_predictions(trial: Path) -> Iterator[Prediction]:
    """Every line of its predictions.jsonl; none where there is no such file."""
    path = trial / record.PREDICTIONS
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        line = record.parse_json(text)
        yield Prediction(line["split"], line["index"], line["label"], _answer(line["logits"]))


def _answer(logits: Sequence[float | None]) -> float | None:
    finite = [logit for logit in logits if logit is not None]
    if len(finite) < len(logits):
        return None
    return finite[0] if len(finite) == 1 else float(finite.index(max(finite)))


def answers(trial: Path) -> dict[str, list[float | None]]:
    """Split -> the answer of each of its examples, in their order."""
    by_split: dict[str, list[float | None]] = {}
    for line in sorted(read_predictions(trial), key=lambda line: line.index):
        by_split.setdefault(line.split, []).append(line.answer)
    return by_split


def write_submissions(out: Path, trial: Path, manifest: ExamplesManifest) -> tuple[list[str], str | None]:
    """The files written, relative to `out`, and why there is none. Of each test set of the task: `index` and
    `prediction`, a label by GLUE's name or a similarity, clipped here alone."""
    tests = [split for split in manifest.splits if split.startswith("test")]
    if not tests:
        return [], "no test file in --data"
    predicted = answers(trial)
    written = []
    for split in tests:
        whole = [answer for answer in predicted.get(split, ()) if answer is not None]
        if len(whole) != manifest.splits[split].examples:
            return [], f"the predictions of {split} are not whole, or not finite"
        name = f"{FOLDER}/{NAMES.get((manifest.task, split), manifest.task)}.tsv"
        lines = [f"{i}\t{_text(answer, manifest)}" for i, answer in enumerate(whole)]
        (out / FOLDER).mkdir(exist_ok=True)
        record.write_text(out / name, "\n".join(["index\tprediction", *lines, ""]))
        written.append(name)
    return written, None


def _text(answer: float, manifest: ExamplesManifest) -> str:
    if manifest.kind == "regression":
        return f"{min(max(answer, LOWEST), HIGHEST):.3f}"
    return manifest.labels[int(answer)]
