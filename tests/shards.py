"""Small shards written directly: a text-like Markov stream, so that there is something to learn."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np

SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "cls": 4, "sep": 5, "mask": 6}


def write_shards(
    directory: Path,
    *,
    vocab_size: int = 64,
    length: int = 16,
    train: int = 96,
    held_out: int = 20,
    seed: int = 0,
) -> Path:
    """A directory as `data build` leaves it, without text or a usable tokenizer."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    manifest: dict = {
        "format": "bert-dp-shards",
        "version": 1,
        "sequence_length": length,
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "special_tokens": SPECIAL,
        "num_special": 7,
        "unigram_entropy_nats": 3.9,
        "uniform_entropy_nats": math.log(vocab_size),
    }
    successor = rng.permutation(np.arange(7, vocab_size))
    for split, count in (("train", train), ("held_out", held_out)):
        tokens = np.empty(count * length, np.uint16)
        tokens[0] = 7
        for i in range(1, len(tokens)):
            follow = rng.random() < 0.8
            tokens[i] = successor[tokens[i - 1] - 7] if follow else rng.integers(7, vocab_size)
        data = tokens.astype("<u2").tobytes()
        file = f"{split}-00000.bin"
        (directory / file).write_bytes(data)
        shard = {
            "file": file,
            "sequences": count,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        manifest[split] = {
            "sequences": count,
            "tokens": count * length,
            "documents": count,
            "shards": [shard],
        }
    (directory / "tokenizer.json").write_text("{}")
    sha = hashlib.sha256(b"{}").hexdigest()
    manifest["tokenizer"] = {"file": "tokenizer.json", "sha256": sha}
    manifest["sources"] = []
    manifest["build"] = {}
    manifest["hash"] = hashlib.sha256(
        json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory
