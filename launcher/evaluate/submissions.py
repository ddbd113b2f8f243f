"""Files for GLUE's server, from the predictions of a trial."""

from __future__ import annotations

from pathlib import Path

from bert_dp import record
from bert_dp.config import ExamplesManifest
from launcher.evaluate.glue_scores import PREDICTIONS, answers

FOLDER = "submission"
NAMES = {("MNLI", "test_matched"): "MNLI-m", ("MNLI", "test_mismatched"): "MNLI-mm"}
LOWEST, HIGHEST = 0.0, 5.0  # a similarity of STS-B


def write_submissions(out: Path, trial: Path, manifest: ExamplesManifest) -> tuple[list[str], str | None]:
    """The files written, relative to `out`, and why there is none. Of each test set of the task: `index` and
    `prediction`, a label by GLUE's name or a similarity, clipped here alone."""
    tests = [split for split in manifest.splits if split.startswith("test")]
    if not tests:
        return [], "no test file in --data"
    predicted = answers(trial / PREDICTIONS)
    written = []
    for split in tests:
        found = predicted.get(split, [])
        if len(found) != manifest.splits[split].examples or None in found:
            return [], f"the predictions of {split} are not whole, or not finite"
        name = f"{FOLDER}/{NAMES.get((manifest.task, split), manifest.task)}.tsv"
        lines = [f"{i}\t{_text(answer, manifest)}" for i, answer in enumerate(found) if answer is not None]
        (out / FOLDER).mkdir(exist_ok=True)
        record.write_text(out / name, "\n".join(["index\tprediction", *lines, ""]))
        written.append(name)
    return written, None


def _text(answer: float, manifest: ExamplesManifest) -> str:
    if manifest.kind == "regression":
        return f"{min(max(answer, LOWEST), HIGHEST):.3f}"
    return manifest.labels[int(answer)]
