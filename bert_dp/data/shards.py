"""Write, memory-map, verify and inspect packed shards. Torch-free.

A shard is a headerless file of n sequences of S uint16 token ids. manifest.json contains its size and hash.
"""

import dataclasses
import hashlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from bert_dp.config import ConfigError, Issue, Manifest, read_manifest
from bert_dp.config.manifest import Shard, beyond
from bert_dp.data import tokenizer as tokens

SHARD_BYTES = 2**30
SAMPLED_BYTES = 2**30  # bytes to verify when a run starts: about a second's work for a corpus of any size
CHUNK_BYTES = 4 * 2**20
TOKEN = np.dtype("<u2")
OWN_FILES = re.compile(r"(train|held_out)-\d{5,}\.bin|manifest\.json|tokenizer\.json")


class ShardWriter:
    """Writer that packs tokens into sequences of length S, in files of at most SHARD_BYTES each."""

    def __init__(self, directory: Path, name: str, sequence_length: int, vocab_size: int):
        self.directory, self.name, self.length = directory, name, sequence_length
        self.counts = np.zeros(vocab_size, np.int64)  # number of occurrences of each token id
        self.documents = self.sequences = 0
        self.shards: list[dict[str, Any]] = []
        self._rest = np.empty(0, TOKEN)  # tokens that do not fill a sequence yet
        self._file: BinaryIO | None = None

    def write(self, ids: np.ndarray) -> None:
        """Append tokens [T], and write all complete sequences to disk."""
        ids = np.concatenate([self._rest, ids.astype(TOKEN, copy=False)])
        whole = len(ids) // self.length
        self._rest = ids[whole * self.length :]
        rows = ids[: whole * self.length].reshape(whole, self.length)
        self.counts += np.bincount(rows.ravel(), minlength=len(self.counts))
        self.sequences += whole
        capacity = max(1, SHARD_BYTES // (self.length * TOKEN.itemsize))
        while len(rows):
            if self._file is None:
                self.shards.append({"file": f"{self.name}-{len(self.shards):05d}.bin", "sequences": 0})
                self._file = (self.directory / self.shards[-1]["file"]).open("wb")
                self._digest = hashlib.sha256()
            shard = self.shards[-1]
            part, rows = np.split(rows, [capacity - shard["sequences"]])
            self._file.write(data := part.tobytes())
            self._digest.update(data)
            shard["sequences"] += len(part)
            if shard["sequences"] == capacity:
                self.close()

    def close(self) -> None:
        """Close the open file. The tokens of an incomplete last sequence are not written."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            size = self.shards[-1]["sequences"] * self.length * TOKEN.itemsize
            self.shards[-1] |= {"bytes": size, "sha256": self._digest.hexdigest()}

    def record(self) -> dict[str, Any]:
        """Return the section of the manifest that describes this split."""
        size = {"sequences": self.sequences, "tokens": self.sequences * self.length}
        return {**size, "documents": self.documents, "shards": self.shards}


@dataclasses.dataclass(frozen=True)
class MaskVocabulary:
    size: int
    num_special: int
    mask_id: int


class Shards:
    """Memory-mapped sequences of one split, as one array [n, S] uint16."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        split: Literal["train", "held_out"],
        *,
        checked: bool = True,
    ):
        """Open the files. If `checked`, `rows` refuses token ids outside the vocabulary."""
        self.length, self._checked = manifest.sequence_length, checked
        mask_id = manifest.special_tokens["mask"]
        self.vocabulary = MaskVocabulary(manifest.vocab_size, manifest.num_special, mask_id)
        self._files = [directory / shard.file for shard in getattr(manifest, split).shards]
        self._maps = [np.memmap(file, TOKEN, "r").reshape(-1, self.length) for file in self._files]
        self._starts = np.cumsum([0, *(len(m) for m in self._maps)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, index_B: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the sequences at `index_B`, in the order of the indices, as [B, S]. If `checked`, raises
        ConfigError for a token id outside the vocabulary, because the embedding has no row for it."""
        out_BS = np.empty((len(index_B), self.length), TOKEN)
        shard_B = np.searchsorted(self._starts, index_B, side="right") - 1
        for shard in np.unique(shard_B):
            in_shard_B = shard_B == shard
            rows = self._maps[shard][index_B[in_shard_B] - self._starts[shard]]
            if self._checked and (greatest := int(rows.max())) >= self.vocabulary.size:
                raise ConfigError([_id_beyond(self._files[shard], greatest, self.vocabulary.size)])
            out_BS[in_shard_B] = rows
        return out_BS


def check_sample(directory: Path, manifest: Manifest) -> list[Issue]:
    """Verify randomly chosen shards until SAMPLED_BYTES have been read; return the issues."""
    files, issues, read = [*manifest.shards], [], 0
    for i in np.random.default_rng().permutation(len(files)):
        if read < SAMPLED_BYTES:
            read += files[i].bytes
            issues += _shard_issues(directory / files[i].file, files[i], manifest.vocab_size)
    return issues


def _shard_issues(file: Path, shard: Shard, vocab_size: int) -> list[Issue]:
    """Check a shard's SHA-256 and its largest token id against the manifest; return the issues."""
    digest, greatest = hashlib.sha256(), 0
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
                greatest = max(greatest, int(np.frombuffer(chunk, TOKEN).max()))
    except (OSError, ValueError) as error:  # ValueError: odd number of bytes
        message = f"cannot be read ({getattr(error, 'strerror', error)})"
        return [Issue(str(file), "damaged", message, hint=Manifest.hint)]
    issues, actual = [], digest.hexdigest()
    if actual != shard.sha256:
        message = f"expected SHA-256 {shard.sha256[:16]}, found {actual[:16]}"
        issues.append(Issue(str(file), "damaged", message, actual, hint=Manifest.hint))
    if greatest >= vocab_size:
        issues.append(_id_beyond(file, greatest, vocab_size))
    return issues


def _id_beyond(file: Path, token: int, vocab_size: int) -> Issue:
    """Return the issue for a token id outside the vocabulary."""
    return Issue(str(file), "damaged", beyond(token, vocab_size), token, hint=Manifest.hint)


def verify(directory: Path) -> list[Issue]:
    """Check the manifest and, if it is correct, each shard's SHA-256 and token ids; return the issues."""
    try:
        manifest = read_manifest(directory)
    except ConfigError as error:
        return [*error.issues]
    found = (_shard_issues(directory / s.file, s, manifest.vocab_size) for s in manifest.shards)
    return [issue for issues in found for issue in issues]


def inspect(directory: Path) -> dict[str, Any]:
    """Return the manifest, a few training sequences and all problems as a JSON object. Raises ConfigError."""
    manifest = read_manifest(directory)
    tokenizer = tokens.load(directory / manifest.tokenizer.file)
    total = manifest.train.sequences
    samples = Shards(directory, manifest, "train", checked=False).rows(
        np.linspace(0, total - 1, min(3, total)).astype(np.int64)
    )
    return {
        "manifest": manifest.model_dump(),
        "samples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in samples],
        "problems": [str(issue) for issue in verify(directory)],
    }


def cross_entropy(train: np.ndarray, held_out: np.ndarray) -> float | None:
    """Return the cross entropy of a unigram model with add-one smoothing, in nats per held-out token, or None
    if there are no held-out tokens. `train`, `held_out`: token counts [V]."""
    if not held_out.sum():
        return None
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_p).sum() / held_out.sum())
