"""Find documents seen before: exact by a hash of their tokens, near by MinHash sketches. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bert_dp.config.errors import require

NUM_PERMUTATIONS = 128  # of a MinHash sketch
SHINGLE_WORDS = 5


def document_key(text: str, seed: int) -> int:
    """Return a 64-bit hash of a document, regardless of case and white space."""
    lower = text.lower()
    # a white space other than one blank; the test is cheaper than what it spares
    if not lower.isprintable() or "  " in lower:
        lower = " ".join(lower.split())
    return content_key(lower.strip().encode(), seed)


def content_key(data: bytes, seed: int) -> int:
    """Return a 64-bit hash of bytes, such as the token ids of a document."""
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def exact_filter() -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that marks the keys [D] uint64 that are seen for the first time, over all calls.

    Sorted arrays of doubling size hold 8 bytes per key. Two different documents share a key with probability
    n^2 / 2^65: 3e-4 for any pair among 1e8 documents.
    """
    levels: list[np.ndarray] = []

    def is_new(keys: np.ndarray) -> np.ndarray:
        new = np.zeros(len(keys), bool)
        new[np.unique(keys, return_index=True)[1]] = True
        for level in levels:
            nearest = np.minimum(np.searchsorted(level, keys), len(level) - 1)
            new &= level[nearest] != keys
        added = np.sort(keys[new])
        while levels and len(levels[-1]) <= len(added):
            added = np.sort(np.concatenate([levels.pop(), added]), kind="stable")
        if len(added):
            levels.append(added)
        return new

    return is_new


def sketcher(seed: int) -> Callable[[list[str]], list[Any]]:
    """Return a function that makes MinHash sketches of texts. Raises ConfigError without the package
    rensa."""
    package = rensa()

    def sketch(texts: list[str]) -> list[Any]:
        sketches: list[Any] = package.RMinHash.from_token_sets(
            [_shingles(t) for t in texts], NUM_PERMUTATIONS, seed
        )
        return sketches

    return sketch


def near_filter(threshold: float, seed: int) -> Callable[[Any], bool]:
    """Return a function that is true of a MinHash sketch if no earlier one is as similar as the threshold."""
    index = rensa().RMinHashDeduplicator(threshold, NUM_PERMUTATIONS, True, None, seed)

    def is_unlike(sketch: Any) -> bool:
        added: bool = index.add(str(index.len()), sketch)
        return added

    return is_unlike


def rensa() -> Any:
    """Import the package rensa. Raises ConfigError where it is not installed."""
    return require("rensa", "dedup", "data.build.dedup: near")


def _shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))]
