"""Write small directories of prepared, labelled examples."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_dp.config.manifest import ExamplesManifest, with_hash
from bert_dp.examples.table import LABEL_TYPES, Examples
from bert_dp.files import write_json
from tests.shards import SPECIAL

METRICS = {"single_label": ["accuracy"], "multi_label": ["f1"], "regression": ["pearson", "spearman"]}


def write_examples(
    directory: Path,
    *,
    kind: str = "single_label",
    train: int = 40,
    dev: int = 11,
    test: int = 0,
    vocab_size: int = 64,
    length: int = 32,
    seed: int = 0,
    metrics: Sequence[str] | None = None,
    num_labels: int = 3,
) -> Path:
    """Write examples whose label depends on their first token; `test` examples have no label.
    `num_labels` is used for kind single_label only."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text("{}")
    splits: dict[str, Any] = {}
    for name, count in (("train", train), ("dev", dev), ("test", test)):
        if not count:
            continue
        rows = [
            [SPECIAL["cls"], *rng.integers(7, vocab_size, rng.integers(1, length - 1)), SPECIAL["sep"]]
            for _ in range(count)
        ]
        first = np.array([row[1] for row in rows])
        labels = {
            "single_label": first % num_labels,
            "multi_label": np.stack([first % 2, first % 3 == 0], axis=1),
            "regression": first / vocab_size,
        }[kind].astype(LABEL_TYPES[kind])
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        ids = np.concatenate(rows).astype(np.uint16)
        file = f"{name}.safetensors"
        sha = Examples(ids, offsets, None if name == "test" else labels).save(directory / file)
        splits[name] = split_facts(
            file,
            sha256=sha,
            examples=count,
            tokens=len(ids),
            has_labels=name != "test",
            in_train=None if name == "train" else 0,
            baseline=dict.fromkeys(METRICS[kind], 0.25) if name == "dev" else None,
        )
    manifest: dict[str, Any] = {
        "task": "own",
        "kind": kind,
        "labels": label_names(kind, num_labels),
        "metrics": METRICS[kind] if metrics is None else [*metrics],
        "sequence_length": length,
        "vocab_size": vocab_size,
        "special_tokens": {name: SPECIAL[name] for name in ("pad", "cls", "sep")},
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256(b"{}").hexdigest()},
        "splits": splits,
        "official": None,
        "dev_share": 0.0,
    }
    write_json(directory / "examples.json", with_hash(ExamplesManifest, manifest))
    return directory


def split_facts(file: str, **facts: Any) -> dict[str, Any]:
    """Return a split of examples.json. Counts that are not given are 0."""
    counts = dict.fromkeys(("truncated", "letters", "lost_letters", "left_out", "without_tokens"), 0)
    return {"source": "own.csv", "file": file, **counts, **facts}


def label_names(kind: str, num_labels: int = 3) -> list[str]:
    return {"single_label": [*"abcdef"][:num_labels], "multi_label": ["x", "y"], "regression": []}[kind]
