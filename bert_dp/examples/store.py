"""The examples of one split on disk: written, and read by index. Torch-free.

A file holds `ids` uint16 [T], the tokens of all examples one after another; `offsets` int64 [n + 1], where
each begins and ends; and where they are known `labels`: int64 [n] (single_label), uint8 [n, L] (multi_label)
or float32 [n] (regression).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from bert_dp.config import ConfigError
from bert_dp.config.examples import ExamplesManifest, ExampleSplit
from bert_dp.config.manifest import beyond
from bert_dp.config.stored import read_regular

MAX_BYTES = 2**31  # of a split's file, which is held whole
LABEL_TYPES = {"single_label": np.int64, "multi_label": np.uint8, "regression": np.float32}


@dataclasses.dataclass(frozen=True)
class Examples:
    """The n examples of a split."""

    ids: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [n + 1]
    labels: NDArray[Any] | None  # as LABEL_TYPES says; None where the split has none

    @classmethod
    def open(cls, directory: Path, manifest: ExamplesManifest, split: str) -> Examples:
        """Read a split of a prepared directory.

        Raises ConfigError where the manifest has no such split and where its file is not the one that was
        written.
        """
        if split not in manifest.splits:
            raise ConfigError([f"{directory}: has no split {split!r}, only {', '.join(manifest.splits)}"])
        entry = manifest.splits[split]
        path = directory / entry.file
        try:
            data = read_regular(path, MAX_BYTES)
            if (actual := hashlib.sha256(data).hexdigest()) == entry.sha256:
                arrays = safetensors.numpy.load(data)
                examples = cls(arrays["ids"], arrays["offsets"], arrays.get("labels"))
                issues = _issues(examples, manifest, entry)
            else:
                issues = [f"expected SHA-256 {entry.sha256[:16]}, found {actual[:16]}"]
        except OSError as error:
            issues = [f"cannot be read ({error.strerror})"]
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            issues = [f"not a file of examples ({error})"]
        if issues:
            raise ConfigError([f"{path}: {issue}; {manifest.remedy}" for issue in issues])
        return examples

    def save(self, path: Path) -> str:
        """Write the file; returns its SHA-256."""
        arrays: dict[str, NDArray[Any]] = {"ids": self.ids, "offsets": self.offsets}
        if self.labels is not None:
            arrays["labels"] = self.labels
        data = safetensors.numpy.save(arrays)
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example, [n]."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> NDArray[np.uint16]:
        """Token ids of an example, <cls> first."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def _issues(examples: Examples, manifest: ExamplesManifest, entry: ExampleSplit) -> list[str]:
    """What in the arrays is not as the manifest says."""
    issues = []
    count, lengths = len(examples), examples.lengths
    first, last = examples.offsets[[0, -1]].tolist()
    if (examples.ids.dtype, examples.offsets.dtype) != (np.uint16, np.int64):
        return [f"ids {examples.ids.dtype} and offsets {examples.offsets.dtype}, not uint16 and int64"]
    if (
        count != entry.examples
        or (first, last) != (0, len(examples.ids))
        or len(examples.ids) != entry.tokens
    ):
        issues.append(f"expected {entry.examples} examples of {entry.tokens} tokens, found {count} of {last}")
    elif lengths.min() < 2 or lengths.max() > manifest.sequence_length:
        issues.append(f"lengths of {lengths.min()} to {lengths.max()}, not 2 to {manifest.sequence_length}")
    elif (greatest := int(examples.ids.max())) >= manifest.vocab_size:
        issues.append(beyond(greatest, manifest.vocab_size))
    if (examples.labels is not None) != entry.has_labels:
        issues.append(f"expected has_labels {entry.has_labels}, found {not entry.has_labels}")
    elif examples.labels is not None:
        issues += _label_issues(examples.labels, manifest, count)
    return issues


def _label_issues(labels: NDArray[Any], manifest: ExamplesManifest, count: int) -> list[str]:
    shape = (count, len(manifest.labels)) if manifest.kind == "multi_label" else (count,)
    most = {"single_label": len(manifest.labels) - 1, "multi_label": 1, "regression": np.inf}[manifest.kind]
    if labels.dtype != LABEL_TYPES[manifest.kind] or labels.shape != shape:
        return [f"labels {labels.dtype} {labels.shape} do not fit {manifest.kind} {shape}"]
    if not np.isfinite(labels).all() or labels.max() > most or (manifest.labels and labels.min() < 0):
        return ["a label that there is none of"]
    return []
