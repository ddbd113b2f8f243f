"""Write and read the examples of one split. Torch-free.

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

from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import read_regular, refusing
from bert_dp.config.examples import ExamplesManifest, ExampleSplit

MAX_BYTES = 2**31  # of a split's file, which is held whole
LABEL_TYPES = {"single_label": np.int64, "multi_label": np.uint8, "regression": np.float32}


@dataclasses.dataclass(frozen=True)
class Examples:
    """Hold the n examples of a split."""

    ids: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [n + 1]
    labels: NDArray[Any] | None  # as LABEL_TYPES says; None where the split has none

    @classmethod
    def open(cls, directory: Path, manifest: ExamplesManifest, split: str) -> Examples:
        """Read a split of a prepared directory.

        Raises ConfigError for a split that the manifest lacks and for a file that is not as it says.
        """
        if split not in manifest.splits:
            message = f"no split {split!r}, only {', '.join(manifest.splits)}"
            raise ConfigError([Issue(str(directory), "unknown", message, split)])
        entry = manifest.splits[split]
        path = directory / entry.file
        with refusing(str(path), hint=manifest.hint):
            data = read_regular(path, MAX_BYTES)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ValueError("its SHA-256 is another one")
            try:
                arrays = safetensors.numpy.load(data)
                examples = cls(arrays["ids"], arrays["offsets"], arrays.get("labels"))
            except (SafetensorError, KeyError) as error:
                raise ValueError(f"holds no examples ({error})") from None
            if wrong := examples._misfits(manifest, entry):
                raise ValueError(f"its {' and '.join(wrong)} are not as {manifest.file_name} says")
        return examples

    def _misfits(self, manifest: ExamplesManifest, entry: ExampleSplit) -> list[str]:
        """Return the names of the arrays that do not fit the manifest."""
        ids, offsets, labels = self.ids, self.offsets, self.labels
        count, names = entry.examples, len(manifest.labels)
        shape = (count, names) if manifest.kind == "multi_label" else (count,)
        most = {"single_label": names - 1, "multi_label": 1, "regression": np.inf}[manifest.kind]
        fits = {
            "ids": ids.dtype == np.uint16
            and ids.shape == (entry.tokens,)
            and ids.max() < manifest.vocab_size,
            "offsets": offsets.dtype == np.int64
            and offsets.shape == (count + 1,)
            and (offsets[0], offsets[-1]) == (0, entry.tokens)
            and 2 <= self.lengths.min() <= self.lengths.max() <= manifest.sequence_length,
            "labels": labels is None
            if not entry.has_labels
            else labels is not None
            and labels.dtype == LABEL_TYPES[manifest.kind]
            and labels.shape == shape
            and np.isfinite(labels).all()
            and labels.max() <= most
            and (manifest.kind == "regression" or labels.min() >= 0),
        }
        return [name for name, fit in fits.items() if not fit]

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
        """Return the number of tokens of each example, [n]."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> NDArray[np.uint16]:
        """Return the token ids of an example, <cls> first."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]
