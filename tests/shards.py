"""Write small shards of a text-like Markov chain, from which a model can learn."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_dp.config.manifest import manifest_hash

SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "cls": 4, "sep": 5, "mask": 6}


def write_shards(
    directory: Path,
    *,
    vocab_size: int = 64,
    length: int = 16,
    train: int = 96,
    held_out: int = 20,
    seed: int = 0,
    files: tuple[int, ...] = (),
) -> Path:
    """Write a directory like `data build`, but without text and a usable tokenizer. `files` are the numbers
    of training sequences in each file; by default there is one file."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    sizes = files or (train,)
    assert sum(sizes) == train
    (directory / "tokenizer.json").write_text("{}")
    manifest: dict = {
        "format": "bert-dp-shards",
        "version": 3,
        "sequence_length": length,
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "special_tokens": SPECIAL,
        "num_special": 7,
        "unigram_entropy_nats": 3.9,
        "uniform_entropy_nats": math.log(vocab_size),
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256(b"{}").hexdigest()},
        "sources": [],
        "build": {},
    }
    successor = rng.permutation(np.arange(7, vocab_size))
    for split, count in (("train", train), ("held_out", held_out)):
        tokens = np.empty(count * length, np.uint16)
        tokens[0] = 7
        for i in range(1, len(tokens)):
            follow = rng.random() < 0.8
            tokens[i] = successor[tokens[i - 1] - 7] if follow else rng.integers(7, vocab_size)
        ends = np.cumsum(sizes if split == "train" else (count,))
        shards = []
        for i, rows in enumerate(np.split(tokens.astype("<u2").reshape(count, length), ends[:-1])):
            name, data = f"{split}-{i:05d}.bin", rows.tobytes()
            (directory / name).write_bytes(data)
            facts = {"sequences": len(rows), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            shards.append({"file": name, **facts})
        manifest[split] = {"sequences": count, "tokens": count * length, "documents": count, "shards": shards}
    write_manifest(directory, manifest)
    return directory


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, valid or not, with its correct hash."""
    (directory / "manifest.json").write_text(json.dumps({**manifest, "hash": manifest_hash(manifest)}))


@contextlib.contextmanager
def edited_manifest(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest for changes, and write it with the correct hash on exit."""
    manifest = json.loads((directory / "manifest.json").read_text())
    yield manifest
    write_manifest(directory, manifest)
