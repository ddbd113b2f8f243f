"""Texts -> token ids, framed by <cls> and <sep> and cut to a length. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bert_dp.corpus import tokenizer as tokens

BATCH_EXAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The token ids of n examples, one after another."""

    ids: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [n + 1]
    truncated: int
    """Examples that were longer than the encoder's length."""
    textless: NDArray[np.int64]
    """Indices of the examples with a text that has no token; of a pair one such text is enough."""
    letters: int
    """Of the texts, before they are cut."""
    lost_letters: int
    """Letters that the tokenizer drops, or that are part of unknown tokens."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Examples -> `<cls> A <sep>` or `<cls> A <sep> B <sep>`, as ids of at most `length` tokens."""

    tokenizer: Tokenizer
    special: dict[str, int]
    """Ids by role: pad, cls, sep and others."""
    length: int
    has_cls: bool = True
    """False: the examples are `A <sep>` or `A <sep> B <sep>`."""

    @classmethod
    def load(cls, path: Path, length: int) -> Encoder:
        """Raises ConfigError for what is no tokenizer, and for one that lacks a special token."""
        tokenizer = tokens.load(path)
        special = tokens.special_ids(tokenizer, str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "<sep>" in a text is text
        return cls(tokenizer, special, length)

    def encode(self, examples: Sequence[tuple[str, ...]]) -> Encoded:
        """Tokenize, truncate and frame the examples."""
        rows: list[list[int]] = []
        textless: list[int] = []
        truncated = 0
        head = [self.special["cls"]] if self.has_cls else []
        count_letters = tokens.loss_counter(self.tokenizer, self.special["unk"])
        letters = lost_letters = 0
        for index, (texts, parts) in enumerate(zip(examples, self._parts(examples), strict=True)):
            for text, ids in zip(texts, parts, strict=True):
                counted, lost = count_letters(text, ids)
                letters += counted
                lost_letters += lost
            kept = truncate(parts, self.length - len(head) - len(parts))
            truncated += kept != parts
            if not all(parts):
                textless.append(index)
            row = [*head]
            for part in kept:
                row += [*part, self.special["sep"]]
            rows.append(row)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids_T = np.fromiter(chain.from_iterable(rows), np.uint16, int(offsets[-1]))
        return Encoded(ids_T, offsets, truncated, np.array(textless, np.int64), letters, lost_letters)

    def has_tokens(self, examples: Sequence[tuple[str, ...]]) -> bool:
        """Return True if there is an example whose every text has a token. Reads up to its batch."""
        return any(all(parts) for parts in self._parts(examples))

    def _parts(self, examples: Sequence[tuple[str, ...]]) -> Iterator[list[list[int]]]:
        """The ids of each text of each example, whole and bare."""
        for start in range(0, len(examples), BATCH_EXAMPLES):
            batch = examples[start : start + BATCH_EXAMPLES]
            texts = list(chain.from_iterable(batch))
            encoded = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for example in batch:
                yield [e.ids for e in islice(encoded, len(example))]


def truncate(parts: list[list[int]], room: int) -> list[list[int]]:
    """One or two parts cut to `room` tokens together: token by token from the end of the longer one, of the
    second where both are as long."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    keep_second = min(len(second), max(room // 2, room - len(first)))
    return [first[: room - keep_second], second[:keep_second]]
