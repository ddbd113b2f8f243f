"""Encode batches of documents in one process or a pool of spawned ones. Torch-free."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert_dp.config.manifest import TOKEN_BYTES
from bert_dp.corpus.dedup import content_key, document_key, sketcher
from bert_dp.corpus.tokenizer import loss_counter, normalize, normalizer_json
from bert_dp.rank_process import RunFailed

COUNTS = ("letters", "lost_letters", "tokens", "unknown_tokens")  # of a source, as its manifest has them
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**20


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Hold the settings of encoding, which travel to every process."""

    tokenizer_json: str
    sep: int
    """Id put after every document."""
    unk: int
    max_tokens_per_char: float
    near: bool
    """Also make the MinHash sketches for near dedup."""
    seed: int


@dataclasses.dataclass(frozen=True)
class EncodedDocuments:
    """Hold the D kept documents of the N of a batch, in order."""

    ids: np.ndarray  # [T] uint16, each document followed by sep
    lengths: np.ndarray  # [D] int64, tokens with sep
    keys: np.ndarray  # [D] uint64, hash of the text, which decides the split
    contents: np.ndarray  # [D] uint64, hash of the token ids, which duplicates share
    sketches: list[Any]  # [D] rensa.RMinHash, or empty
    counts: np.ndarray  # [N, len(COUNTS)] int64, of all documents
    read: int
    empty: int
    filtered: int


def in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of at most BATCH_DOCUMENTS documents and, but for a last one, BATCH_CHARS characters."""
    batch: list[str] = []
    chars = 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if len(batch) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def make_encoder(settings: Encoding) -> Callable[[list[str]], EncodedDocuments]:
    """Return a function that encodes a list of texts in this process."""
    whole = Tokenizer.from_str(settings.tokenizer_json)
    count_letters = loss_counter(whole, settings.unk)
    tree = json.loads(settings.tokenizer_json)
    has_our_normalizer = tree.get("normalizer") == json.loads(normalizer_json())
    if has_our_normalizer:  # `normalize` does the same, and is faster
        tree["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    for each in (whole, tokenizer):
        each.no_padding()
        each.no_truncation()
        each.encode_special_tokens = True  # "<mask>" in a text is text
    sketch = sketcher(settings.seed) if settings.near else None
    rate = settings.max_tokens_per_char

    def encode(texts: list[str]) -> EncodedDocuments:
        normalized = [normalize(text) for text in texts] if has_our_normalizer else texts
        rows = [e.ids for e in tokenizer.encode_batch_fast(normalized, add_special_tokens=False)]
        counts = [
            (*count_letters(text, row), len(row), row.count(settings.unk))
            for text, row in zip(texts, rows, strict=True)
        ]
        full = [i for i, row in enumerate(rows) if row]
        kept = [i for i in full if not rate or len(rows[i]) < rate * len(texts[i])]
        for i in kept:
            rows[i].append(settings.sep)
        lengths = np.fromiter((len(rows[i]) for i in kept), np.int64, len(kept))
        ids = np.fromiter(chain.from_iterable(rows[i] for i in kept), np.uint16, int(lengths.sum()))
        ends = TOKEN_BYTES * np.cumsum(lengths)
        data = ids.tobytes()
        contents = [
            content_key(data[end - TOKEN_BYTES * n : end], settings.seed)
            for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
        sketches = sketch([normalized[i] for i in kept]) if sketch else []
        return EncodedDocuments(
            ids,
            lengths,
            keys=np.array([document_key(texts[i], settings.seed) for i in kept], np.uint64),
            contents=np.array(contents, np.uint64),
            sketches=sketches,
            counts=np.array(counts, np.int64),
            read=len(texts),
            empty=len(texts) - len(full),
            filtered=len(full) - len(kept),
        )

    return encode


def encode_all(
    batches: Iterable[list[str]], settings: Encoding, processes: int
) -> Generator[EncodedDocuments, None, None]:
    """Encode batches in `processes` spawned processes (1 = in this one); results in the order of the batches.

    At most three batches per process are held. The processes end with this one, however it ends.
    """
    if processes == 1:
        encode = make_encoder(settings)
        for batch in batches:
            with single_threaded():
                encoded = encode(batch)
            yield encoded
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    )
    pending: collections.deque[Future[EncodedDocuments]] = collections.deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) == 3 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RunFailed("a tokenising process died (memory full?); try fewer processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Switch off the Rust threads of `tokenizers`: many processes or many threads, never both."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _start(settings: Encoding) -> None:
    """Set up a spawned process: end with the parent, leave Ctrl-C to it, load the tokenizer once."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = make_encoder(settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


_encoder: Callable[[list[str]], EncodedDocuments] | None = None  # of a spawned process


def _encode(texts: list[str]) -> EncodedDocuments:
    assert _encoder is not None
    return _encoder(texts)
