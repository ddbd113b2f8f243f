"""Draw the tokens and the whole words of a text that a masked language model predicts.

The predicted tokens are a function of (document, position), the hidden words one of (document, word index):
of the document's text alone, not of the other documents, their order or the cutting of sequences, and the
words not of the vocabulary either.

Axes: D documents, T tokens of all, W words of a document.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bert_dp.corpus import encode
from bert_dp.corpus import tokenizer as tokens
from bert_dp.corpus.dedup import document_key
from bert_dp.data import GOLDEN, U64, hash64, mix64
from bert_dp.tasks.mlm import EVAL_MASK_RATE

MASK_RATE = EVAL_MASK_RATE  # of the tokens, and of the words
WORD = re.compile(r"\S+")
TOKENS, WORDS = 6, 7  # streams of draws, apart from those of training


@dataclasses.dataclass(frozen=True)
class Words:
    """The hidden words of one document and their tokens."""

    hidden_T: NDArray[np.bool_]
    """Tokens that share a character with a hidden word."""
    words: int
    hidden: int
    hidden_bytes: int
    """UTF-8 bytes of the hidden words, without the white space around them."""
    silent: int
    """Hidden words of which the tokenizer keeps nothing."""


@dataclasses.dataclass(frozen=True)
class Text:
    """D documents one after another, each followed by a <sep>."""

    ids_T: NDArray[np.uint16]
    seen_T: NDArray[np.uint16]
    """The tokens as the model sees them when it predicts those of `kind_T`."""
    kind_T: NDArray[np.uint8]
    """0: not predicted; 1, 2, 3: seen as <mask>, as a random token, as it is (80, 10 and 10 %)."""
    hidden_T: NDArray[np.bool_]
    """Tokens of hidden words."""
    document_T: NDArray[np.int32]
    bytes: int
    """UTF-8 bytes of all documents."""
    words: int
    hidden_words: int
    silent_words: int
    hidden_bytes_D: NDArray[np.int64]
    textless_documents: NDArray[np.int64]
    """Indices of the documents of which no token is left but their <sep>."""


def read(documents: Iterable[str], tokenizer: Tokenizer, special: dict[str, int]) -> Text:
    """Tokenize all documents and draw. `special`: ids by role."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # "<mask>" in a text is text
    ordinary = (tokens.first_ordinary(tokenizer, special), tokens.size(tokenizer))
    ids, seen, kinds, words, size = [], [], [], [], 0
    for batch in encode.in_batches(documents):
        for text, encoded in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            key = document_key(text, 0)
            ids_T = np.array([*encoded.ids, special["sep"]], np.uint16)
            keys_T = np.full(len(ids_T), key, np.uint64)
            seen_T, kind_T = draw_tokens(ids_T, keys_T, np.arange(len(ids_T)), special["mask"], ordinary)
            ids.append(ids_T)
            seen.append(seen_T)
            kinds.append(kind_T)
            words.append(hide_words(text, encoded.offsets, key))
            size += len(text.encode())
    lengths_D = np.array([len(ids_T) for ids_T in ids], np.int64)
    return Text(
        ids_T=np.concatenate(ids),
        seen_T=np.concatenate(seen),
        kind_T=np.concatenate(kinds),
        hidden_T=np.concatenate([np.append(each.hidden_T, False) for each in words]),
        document_T=np.repeat(np.arange(len(lengths_D), dtype=np.int32), lengths_D),
        bytes=size,
        words=sum(each.words for each in words),
        hidden_words=sum(each.hidden for each in words),
        silent_words=sum(each.silent for each in words),
        hidden_bytes_D=np.array([each.hidden_bytes for each in words], np.int64),
        textless_documents=np.flatnonzero(lengths_D == 1),
    )


def draw_tokens(
    ids_T: NDArray[np.uint16],
    keys_T: NDArray[np.uint64],
    positions_T: NDArray[np.int64],
    mask_id: int,
    ordinary: tuple[int, int],
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the tokens that the model sees, and the kind of each: a token is predicted with probability
    MASK_RATE, and then seen as <mask>, as a random token of `range(*ordinary)`, or as it is."""
    random_T = hash64(keys_T, TOKENS, positions_T)
    share_T = mix64(random_T + GOLDEN)
    kind_T = np.select([share_T % U64(10) == 0, share_T % U64(10) == 1], [2, 3], 1)
    kind_T[random_T >= U64(int(MASK_RATE * 2.0**64))] = 0
    first, end = ordinary
    others_T = (mix64(share_T + GOLDEN) % U64(end - first)).astype(np.uint16) + np.uint16(first)
    seen_T = np.where(kind_T == 1, np.uint16(mask_id), np.where(kind_T == 2, others_T, ids_T))
    return seen_T, kind_T.astype(np.uint8)


def hide_words(text: str, offsets: Sequence[tuple[int, int]], key: int) -> Words:
    """Hide words of a document, with probability MASK_RATE each, and their tokens. `offsets`: of each token
    its first character and the one after its last."""
    spans_W2 = np.array([word.span() for word in WORD.finditer(text)], np.int64).reshape(-1, 2)
    starts_W, ends_W = spans_W2.T
    drawn_W = hash64(key, WORDS, np.arange(len(spans_W2))) < U64(int(MASK_RATE * 2.0**64))
    begin_T, end_T = np.array(offsets, np.int64).reshape(-1, 2).T
    first_T = np.searchsorted(ends_W, begin_T, side="right")  # the words that a token shares characters with
    last_T = np.maximum(np.searchsorted(starts_W, end_T, side="left"), first_T)
    drawn_before_W = np.concatenate([[0], np.cumsum(drawn_W)])
    has_token_W = np.zeros(len(spans_W2) + 1, np.int64)
    np.add.at(has_token_W, first_T, 1)
    np.add.at(has_token_W, last_T, -1)
    silent_W = drawn_W & (np.cumsum(has_token_W)[:-1] == 0)
    return Words(
        hidden_T=drawn_before_W[last_T] > drawn_before_W[first_T],
        words=len(spans_W2),
        hidden=int(drawn_W.sum()),
        hidden_bytes=sum(len(text[a:b].encode()) for a, b in spans_W2[drawn_W].tolist()),
        silent=int(silent_W.sum()),
    )
