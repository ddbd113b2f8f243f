"""Packed shards on disk: written, mapped, ordered, verified, looked into. Torch-free.

Flat uint16 files of whole sequences [sequences, S], and a manifest.json with their sizes and hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert_dp import tokenizer as tokens
from bert_dp.config import ConfigError
from bert_dp.record import read_json
from bert_dp.sources import file_hash

FORMAT, VERSION = "bert-dp-shards", 1
SHARD_BYTES = 2**30
BLOCK_BYTES = 4 * 2**20  # of a shard file under one short hash in the manifest: about 20 KB for 4 GB
SAMPLED_BLOCKS = 16  # read at the start of a run: 64 MiB however large the corpus
TOKEN = np.dtype("<u2")


class BlockHash:
    """SHA-256 of a stream, and the first 16 digits of that of each of its blocks of BLOCK_BYTES."""

    def __init__(self) -> None:
        self._whole, self._block, self._filled = hashlib.sha256(), hashlib.sha256(), 0
        self._blocks: list[str] = []

    def update(self, data: bytes) -> None:
        """Append `data`."""
        self._whole.update(data)
        view = memoryview(data)
        while view:
            part, view = view[: BLOCK_BYTES - self._filled], view[BLOCK_BYTES - self._filled :]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def record(self) -> dict[str, Any]:
        """The hashes as a shard's entry in the manifest holds them."""
        if self._filled:
            self._end_block()
        return {"sha256": self._whole.hexdigest(), "block_bytes": BLOCK_BYTES, "blocks": self._blocks}

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest()[:16])
        self._block, self._filled = hashlib.sha256(), 0


class ShardWriter:
    """Packs a stream of tokens into sequences of S and those into files of at most SHARD_BYTES."""

    def __init__(self, directory: Path, name: str, sequence_length: int, vocab_size: int):
        self.directory, self.name, self.length = directory, name, sequence_length
        self.counts = np.zeros(vocab_size, np.int64)  # of the tokens written
        self.documents = 0
        self.sequences = 0
        self.shards: list[dict[str, Any]] = []
        self._rest = np.empty(0, TOKEN)  # fewer than S tokens
        self._file: Any = None

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
                shard: dict[str, Any] = {"file": f"{self.name}-{len(self.shards):05d}.bin", "sequences": 0}
                self.shards.append(shard)
                self._file, self._hash = (self.directory / shard["file"]).open("wb"), BlockHash()
            shard = self.shards[-1]
            part, rows = np.split(rows, [capacity - shard["sequences"]])
            self._file.write(data := part.tobytes())
            self._hash.update(data)
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
            size = self.shards[-1]["sequences"] * self.length * TOKEN.itemsize
            self.shards[-1] |= {"bytes": size, **self._hash.record()}

    def record(self) -> dict[str, Any]:
        """The split's part of the manifest."""
        size = {"sequences": self.sequences, "tokens": self.sequences * self.length}
        return {**size, "documents": self.documents, "shards": self.shards}


def read_manifest(directory: Path) -> dict[str, Any]:
    """manifest.json, checked: format, version, own hash, tokenizer hash, and every shard's size on disk.

    Raises ConfigError naming the file, what was expected and what was found.
    """
    path = directory / "manifest.json"
    again = "build it again with `bert-dp data build`"
    manifest = read_json(path)
    if manifest is None:
        raise ConfigError([f"{path}: no manifest; {again}"])
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        got = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise ConfigError([f"{path}: expected {FORMAT!r} version {VERSION}, found {got}; {again}"])
    expected, found = manifest.get("hash"), manifest_hash(manifest)
    if expected != found:
        raise ConfigError(
            [f"{path}: expected hash {str(expected)[:16]}, found {found[:16]}: edited or torn; {again}"]
        )
    issues = []
    for shard in (*manifest["train"]["shards"], *manifest["held_out"]["shards"]):
        file = directory / shard["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            shown = "no such file" if size is None else f"{size} bytes"
            issues.append(f"{file}: expected {shard['bytes']} bytes, found {shown}; {again}")
    file, wanted = directory / manifest["tokenizer"]["file"], manifest["tokenizer"]["sha256"]
    got = file_hash(file)[:16] if file.is_file() else "no such file"
    if got != wanted[:16]:
        issues.append(f"{file}: expected SHA-256 {wanted[:16]}, found {got}; {again}")
    if issues:
        raise ConfigError(issues)
    return manifest


def check_blocks(directory: Path, manifest: dict[str, Any], seed: int | None = None) -> list[str]:
    """Damage found in SAMPLED_BLOCKS blocks of the shards, other ones at every start (`seed`: the same ones).

    Time and bytes read do not grow with the corpus; a small one is read whole. A shard whose manifest has no
    block hashes is checked when it is no larger than a block.
    """
    blocks: list[tuple[Path, int, int, str]] = []  # file, offset, bytes, hash
    for shard in (*manifest["train"]["shards"], *manifest["held_out"]["shards"]):
        size = shard.get("block_bytes", BLOCK_BYTES)
        whole = [shard["sha256"][:16]] if shard["bytes"] <= BLOCK_BYTES else []
        for i, expected in enumerate(shard.get("blocks", whole)):
            blocks.append((directory / shard["file"], i * size, size, expected))
    chosen = np.random.default_rng(seed).permutation(len(blocks))[:SAMPLED_BLOCKS]
    problems = []
    for file, offset, size, expected in [blocks[i] for i in sorted(chosen)]:
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                found = hashlib.sha256(opened.read(size)).hexdigest()[:16]
        except OSError as error:
            problems.append(f"{file}: cannot be read at byte {offset} ({error.strerror})")
            continue
        if found != expected:
            problems.append(
                f"{file}: the block at byte {offset} has SHA-256 {found}, expected {expected}: damaged or "
                "changed; see `bert-dp data inspect`, build it again with `bert-dp data build`"
            )
    return problems


def verify(directory: Path) -> list[str]:
    """Every problem found by reading all shards: sizes, SHA-256, ids beyond the vocabulary. Empty = sound."""
    try:
        manifest = read_manifest(directory)
    except ConfigError as error:
        return list(error.issues)
    problems = []
    for shard in (*manifest["train"]["shards"], *manifest["held_out"]["shards"]):
        file = directory / shard["file"]
        if (found := file_hash(file)) != shard["sha256"]:
            problems.append(f"{file}: expected SHA-256 {shard['sha256'][:16]}, found {found[:16]}")
        largest = max(
            int(part.max()) for part in _chunks(_mapped(directory, [shard], manifest["sequence_length"]))
        )
        if largest >= manifest["vocab_size"]:
            problems.append(f"{file}: token id {largest}, but the vocabulary has {manifest['vocab_size']}")
    return problems


def inspect(directory: Path, *, samples: int = 3, most: int = 20) -> dict[str, Any]:
    """What is in the shards: the manifest, tokens per document, frequent tokens, decoded sequences, problems.

    Token frequencies are over the whole training set. Raises ConfigError.
    """
    manifest = read_manifest(directory)
    tokenizer = tokens.load(directory / manifest["tokenizer"]["file"])
    mapped = _mapped(directory, manifest["train"]["shards"], manifest["sequence_length"])
    counts = np.zeros(manifest["vocab_size"], np.int64)
    for part in _chunks(mapped):  # an id beyond the vocabulary is among the problems
        counts += np.bincount(part.ravel(), minlength=len(counts))[: len(counts)]
    top = np.argsort(-counts, kind="stable")[:most]
    total = manifest["train"]["sequences"]
    picked = _rows(mapped, np.linspace(0, total - 1, min(samples, total)).astype(np.int64))
    return {
        "manifest": manifest,
        "tokens_per_document": manifest["train"]["tokens"] / manifest["train"]["documents"],
        "frequent_tokens": [
            {"token": tokenizer.id_to_token(int(i)), "id": int(i), "share": float(counts[i] / counts.sum())}
            for i in top
        ],
        "samples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in picked],
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
    mapped = _mapped(work, unordered.shards, unordered.length)
    stop = tokenizer.token_to_id(".")
    if order == "sentence_length" and stop is None:
        raise ConfigError(["data.build.order: sentence_length needs a token '.' in the tokenizer; use none"])
    log_p = np.log((unordered.counts + 1) / (unordered.counts.sum() + len(unordered.counts)))
    keys = []
    for part in _chunks(mapped):
        score = (part == stop).sum(axis=1) if order == "sentence_length" else log_p[part].sum(axis=1)
        keys.append(-score.astype(np.float32))
    ranks = np.argsort(np.concatenate(keys), kind="stable")
    ordered = ShardWriter(work, "train", unordered.length, len(unordered.counts))
    ordered.documents = unordered.documents
    for start in range(0, len(ranks), 8192):
        tell("order", start, len(ranks))
        ordered.write(_rows(mapped, ranks[start : start + 8192]).ravel())
    ordered.close()
    for shard in unordered.shards:
        (work / shard["file"]).unlink()
    return ordered


def _mapped(directory: Path, shards: list[dict[str, Any]], length: int) -> list[np.ndarray]:
    """The shards as memory maps [sequences, S]."""
    return [np.memmap(directory / s["file"], TOKEN, "r").reshape(-1, length) for s in shards]


def _chunks(mapped: list[np.ndarray]) -> Iterator[np.ndarray]:
    for array in mapped:
        for start in range(0, len(array), 8192):
            yield np.asarray(array[start : start + 8192])


def _rows(mapped: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Sequences [len(wanted), S] by their number over all shards."""
    ends = np.cumsum([len(array) for array in mapped])
    out = np.empty((len(wanted), mapped[0].shape[1]), TOKEN)
    shard = np.searchsorted(ends, wanted, side="right")
    for i, array in enumerate(mapped):
        mine = shard == i
        out[mine] = array[wanted[mine] - (ends[i] - len(array))]
    return out


def cross_entropy(train: np.ndarray, held_out: np.ndarray) -> float | None:
    """Nats per held-out token under add-one smoothed training frequencies; counts [V]. None if empty."""
    if not held_out.sum():
        return None
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_p).sum() / held_out.sum())


def hash_json(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_hash(manifest: dict[str, Any]) -> str:
    return hash_json({k: v for k, v in manifest.items() if k != "hash"})
