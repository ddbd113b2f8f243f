"""Packed shards on disk: written, mapped, ordered, verified, looked into. Torch-free.

Flat uint16 files of whole sequences [sequences, S], and a manifest.json with their sizes and hashes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bert_dp.config import ConfigError, Manifest, read_manifest
from bert_dp.config.manifest import beyond
from bert_dp.corpus import tokenizer as tokens

SHARD_BYTES = 2**30
BLOCK_BYTES = 4 * 2**20  # of a shard file under one short hash in the manifest: about 20 KB for 4 GB
SAMPLED_BLOCKS = 16  # read at the start of a run: 64 MiB however large the corpus
TOKEN = np.dtype("<u2")
CHUNK_SEQUENCES = 8192  # that a reader of all holds at once
OWN_FILES = re.compile(r"(train|held_out)-\d{5,}\.bin|manifest\.json|tokenizer\.json")
FREQUENT_TOKENS, SAMPLE_SEQUENCES = 20, 3  # that `inspect` shows


def measure(file: Path, block_bytes: int) -> dict[str, Any]:
    """What the manifest says of the content of a shard: its largest token id, bytes and hashes. One block is
    held. Raises OSError."""
    whole, blocks, greatest, size = hashlib.sha256(), [], 0, 0
    with file.open("rb") as opened:
        while block := opened.read(block_bytes):
            whole.update(block)
            blocks.append(hashlib.sha256(block).hexdigest()[:16])
            greatest = max(greatest, int(np.frombuffer(block, TOKEN).max()))
            size += len(block)
    hashes = {"sha256": whole.hexdigest(), "block_bytes": block_bytes, "blocks": blocks}
    return {"greatest_id": greatest, "bytes": size, **hashes}


class ShardWriter:
    """Packs a stream of tokens into sequences of S and those into files of at most SHARD_BYTES."""

    def __init__(self, directory: Path, name: str, sequence_length: int, vocab_size: int):
        self.directory, self.name, self.length = directory, name, sequence_length
        self.counts = np.zeros(vocab_size, np.int64)  # of the tokens written
        self.documents = self.longest = 0  # their number, and the tokens of the longest
        self.sequences = 0
        self.shards: list[dict[str, Any]] = []
        self._rest = np.empty(0, TOKEN)  # fewer than S tokens
        self._file: BinaryIO | None = None

    def write(self, ids: np.ndarray) -> None:
        """Append tokens [T]; whole sequences go to disk."""
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
            shard = self.shards[-1]
            part, rows = np.split(rows, [capacity - shard["sequences"]])
            self._file.write(part.tobytes())
            shard["sequences"] += len(part)
            if shard["sequences"] == capacity:
                self.close()

    def close(self) -> None:
        """End the open file; the tokens that fill no sequence are dropped."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self.shards[-1] |= measure(self.directory / self.shards[-1]["file"], BLOCK_BYTES)

    def record(self) -> dict[str, Any]:
        """The split's part of the manifest."""
        size = {"sequences": self.sequences, "tokens": self.sequences * self.length}
        return {**size, "documents": self.documents, "shards": self.shards}


class MappedShards:
    """The sequences of several files, memory-mapped as one: [n, S] uint16."""

    def __init__(self, files: Sequence[Path], length: int, vocab_size: int | None = None):
        """`vocab_size`: `rows` refuses token ids beyond it."""
        self.length, self._files, self._vocab_size = length, files, vocab_size
        self._maps = [np.memmap(file, TOKEN, "r").reshape(-1, length) for file in files]
        self._starts = np.cumsum([0, *(len(m) for m in self._maps)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, index_B: NDArray[np.int64]) -> NDArray[np.uint16]:
        """The sequences at `index_B`, [B, S], in that order.

        Raises ConfigError for a token id beyond the vocabulary, which no embedding has a row for.
        """
        out_BS = np.empty((len(index_B), self.length), TOKEN)
        shard_B = np.searchsorted(self._starts, index_B, side="right") - 1
        for shard in np.unique(shard_B):
            here = shard_B == shard
            rows = self._maps[shard][index_B[here] - self._starts[shard]]
            if self._vocab_size is not None and (greatest := int(rows.max())) >= self._vocab_size:
                raise ConfigError(
                    [f"{self._files[shard]}: {beyond(greatest, self._vocab_size)}; {Manifest.remedy}"]
                )
            out_BS[here] = rows
        return out_BS

    def chunks(self) -> Iterator[NDArray[np.uint16]]:
        """All sequences in order, some at a time."""
        for mapped in self._maps:
            for start in range(0, len(mapped), CHUNK_SEQUENCES):
                yield np.asarray(mapped[start : start + CHUNK_SEQUENCES])


def check_blocks(directory: Path, manifest: Manifest) -> list[str]:
    """Damage and ids beyond the vocabulary found in SAMPLED_BLOCKS blocks of the shards, other ones at every
    start.

    Time and bytes read do not grow with the corpus; a small one is read whole. A shard whose manifest has no
    block hashes has them compared only when it is no larger than a block.
    """
    blocks: list[tuple[Path, int, int, str | None]] = []  # file, offset, bytes, hash
    for shard in manifest.shards:
        file, size = directory / shard.file, shard.block_bytes or BLOCK_BYTES
        starts = range(0, shard.bytes, size)
        hashes: Sequence[str | None] = [None] * len(starts)
        if shard.blocks is not None:
            hashes = shard.blocks
        elif len(starts) == 1:
            hashes = [shard.sha256[:16]]
        blocks += [(file, start, size, expected) for start, expected in zip(starts, hashes, strict=True)]
    chosen = np.random.default_rng().permutation(len(blocks))[:SAMPLED_BLOCKS]
    problems = []
    for file, offset, size, expected in [blocks[i] for i in sorted(chosen)]:
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(size)
        except OSError as error:
            problems.append(f"{file}: cannot be read at byte {offset} ({error.strerror})")
            continue
        actual = hashlib.sha256(data).hexdigest()[:16]
        if expected not in (None, actual):
            problems.append(
                f"{file}: the block at byte {offset} has SHA-256 {actual}, expected {expected}: damaged or "
                f"changed; see `bert-dp data inspect`, {Manifest.remedy}"
            )
        elif (greatest := int(np.frombuffer(data, TOKEN).max())) >= manifest.vocab_size:
            problems.append(f"{file}: {beyond(greatest, manifest.vocab_size)}; {Manifest.remedy}")
    return problems


def are_alone(directory: Path) -> bool:
    """Whether it is a directory that holds nothing but what a build writes, by the names."""
    return directory.is_dir() and all(OWN_FILES.fullmatch(path.name) for path in directory.iterdir())


def verify(directory: Path) -> list[str]:
    """Every problem found by reading all shards: sizes, SHA-256, block hashes, token ids. Empty = sound."""
    try:
        manifest = read_manifest(directory)
    except ConfigError as error:
        return list(map(str, error.issues))
    problems = []
    for shard in manifest.shards:
        file = directory / shard.file
        actual = measure(file, shard.block_bytes or BLOCK_BYTES)
        greatest = actual["greatest_id"]
        if actual["sha256"] != shard.sha256:
            problems.append(f"{file}: expected SHA-256 {shard.sha256[:16]}, found {actual['sha256'][:16]}")
        elif shard.blocks not in (None, actual["blocks"]):
            problems.append(f"{file}: the block hashes of the manifest are not those of the file")
        if greatest >= manifest.vocab_size:
            problems.append(f"{file}: {beyond(greatest, manifest.vocab_size)}")
        elif shard.greatest_id not in (None, greatest):
            problems.append(f"{file}: expected greatest token id {shard.greatest_id}, found {greatest}")
    return problems


def inspect(directory: Path) -> dict[str, Any]:
    """What is in the shards: the manifest, tokens per document, frequent tokens, decoded sequences, problems.

    Token frequencies are over the whole training set. Raises ConfigError.
    """
    manifest = read_manifest(directory)
    tokenizer = tokens.load(directory / manifest.tokenizer.file)
    mapped = MappedShards([directory / s.file for s in manifest.train.shards], manifest.sequence_length)
    counts = np.zeros(manifest.vocab_size, np.int64)
    for part in mapped.chunks():  # an id beyond the vocabulary is among the problems
        counts += np.bincount(part.ravel(), minlength=len(counts))[: len(counts)]
    top = np.argsort(-counts, kind="stable")[:FREQUENT_TOKENS]
    total = manifest.train.sequences
    samples = mapped.rows(np.linspace(0, total - 1, min(SAMPLE_SEQUENCES, total)).astype(np.int64))
    return {
        "manifest": manifest.model_dump(),
        "tokens_per_document": manifest.train.tokens / manifest.train.documents,
        "frequent_tokens": [
            {
                "token": tokens.readable(tokenizer, int(i)),
                "id": int(i),
                "share": float(counts[i] / counts.sum()),
            }
            for i in top
        ],
        "samples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in samples],
        "problems": verify(directory),
    }


def order_shards(
    work: Path,
    unordered: ShardWriter,
    order: str,
    tokenizer: Tokenizer,
    tell: Callable[[str, int, int | None], None],
) -> ShardWriter:
    """Rewrite the shards: most "." tokens first (sentence_length), or most likely tokens first (unigram)."""
    mapped = MappedShards([work / s["file"] for s in unordered.shards], unordered.length)
    stop = tokenizer.token_to_id(".")
    if order == "sentence_length" and stop is None:
        raise ConfigError(["data.build.order: sentence_length needs a token '.' in the tokenizer; use none"])
    log_p = np.log((unordered.counts + 1) / (unordered.counts.sum() + len(unordered.counts)))
    keys = []
    for part in mapped.chunks():
        score = (part == stop).sum(axis=1) if order == "sentence_length" else log_p[part].sum(axis=1)
        keys.append(-score.astype(np.float32))
    ranks = np.argsort(np.concatenate(keys), kind="stable")
    ordered = ShardWriter(work, "train", unordered.length, len(unordered.counts))
    ordered.documents = unordered.documents
    for start in range(0, len(ranks), CHUNK_SEQUENCES):
        tell("order", start, len(ranks))
        ordered.write(mapped.rows(ranks[start : start + CHUNK_SEQUENCES]).ravel())
    ordered.close()
    for shard in unordered.shards:
        (work / shard["file"]).unlink()
    return ordered


def cross_entropy(train: np.ndarray, held_out: np.ndarray) -> float | None:
    """Nats per held-out token under add-one smoothed training frequencies; counts [V]. None if empty."""
    if not held_out.sum():
        return None
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_p).sum() / held_out.sum())
