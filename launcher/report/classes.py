"""Report a finetuned classifier by class: precision, recall and f1, and the confusion matrix."""

import collections
import json
from collections.abc import Sequence
from pathlib import Path

from bert_dp import files
from bert_dp.cost import GIB
from launcher.report.page import Column, ReportSection, Table, TableRow, cell

MAX_CLASSES = 50  # of a readable matrix


def class_section(run_dir: Path, labels: Sequence[str]) -> list[ReportSection]:
    """Return tables of the dev examples in predictions.jsonl; [] if they cannot be read."""
    path, count = run_dir / files.PREDICTIONS, len(labels)
    if not 2 <= count <= MAX_CLASSES or not path.is_file() or path.stat().st_size > GIB:
        return []
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    try:
        with path.open() as lines:
            for line in map(json.loads, lines):
                if line["split"].startswith("dev") and line["label"] is not None:
                    logits = line["logits"]
                    seen[int(line["label"]), max(range(count), key=logits.__getitem__)] += 1
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return []
    scores, matrix = [], []
    for i, name in enumerate(labels):
        hits, real = seen[i, i], sum(seen[i, j] for j in range(count))
        guessed = sum(seen[j, i] for j in range(count))
        ratios = [hits / n if n else None for n in (guessed, real)]
        f1 = 2 * hits / (guessed + real) if guessed + real else None
        scores.append(TableRow(name, [*(cell(x, "decimals") for x in (*ratios, f1)), cell(real, "count")]))
        matrix.append(TableRow(name, [cell(seen[i, j], "count") for j in range(count)]))
    heads = [*map(Column, ("precision", "recall", "f1", "examples"))]
    tables = [
        Table(scores, heads, "Dev examples by class", "class"),
        Table(matrix, [*map(Column, labels)], "Confusion matrix", "label, by predicted class"),
    ]
    return [ReportSection("Classes", tables=tables, console=False)]
