"""Make the transfer set for distillation. Torch-free.

The set consists either of labelled examples and their augmented copies, as in Tang et al. 2019 (arXiv
1903.12136), or of texts and a teacher's logits, read from a file. All random numbers
for a copy depend only on the seed, the example and its number, and the copy's number.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bert_dp import files
from bert_dp.config.errors import require
from bert_dp.config.manifest import TRAIN
from bert_dp.data import readers
from bert_dp.examples.glue import GlueData
from bert_dp.examples.table import CustomData, LabelledData, LabelledTable, Row, data_error

MASK_RATE = REPLACE_RATE = 0.1  # share of words that are masked, and share that are replaced
CUT_RATE = 0.25  # share of texts that are cut to one n-gram
LONGEST_CUT = 5  # words in the longest n-gram
MASK, HOLE = "\0", "\1"  # placeholders for a mask token, and for a token that a language model samples
HOLE_ID = 2**16 - 1  # id of HOLE before sampling; larger than any token id

Substitute = Callable[[str, int, Random], str]
"""Function that takes a text, a word's index and a random generator, and returns the word's replacement."""


def changed(text: str, substitute: Substitute, draw: Random) -> str:
    """Return the text with some words masked or replaced, and sometimes cut to one n-gram."""
    words = text.split()
    for index in range(len(words)):
        x = draw.random()
        if x < MASK_RATE:
            words[index] = MASK
        elif x < MASK_RATE + REPLACE_RATE:
            words[index] = substitute(text, index, draw)
    if draw.random() < CUT_RATE:
        count = min(len(words), 1 + int(draw.random() * LONGEST_CUT))
        first = int(draw.random() * (len(words) - count + 1))
        words = words[first : first + count]
    return " ".join(words)


def copy_of(
    texts: tuple[str, ...], substitute: Substitute, *, seed: int, example: int, copy: int
) -> tuple[str, ...]:
    """Return an augmented copy of an example. In a copied pair, the first text, the second or both change."""
    draw = Random(f"{seed}/{example}/{copy}")  # noqa: S311 (not a secret)
    sides = (0, 1) if len(texts) == 1 or copy % 3 == 2 else (copy % 3,)
    return tuple(
        changed(text, substitute, draw) if side in sides else text for side, text in enumerate(texts)
    )


class SameTagWords:
    """Substitute that samples a word of the same part of speech, weighted by word frequency in the texts."""

    def __init__(self, texts: Iterable[str], tag: Callable[[list[str]], list[str]]):
        self._tags = {text: tag(text.split()) for text in texts}
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for text, tags in self._tags.items():
            for word, word_tag in zip(text.split(), tags, strict=True):
                counts[word_tag][word] += 1
        self._words = {each: [*count] for each, count in counts.items()}
        self._sums = {each: [*itertools.accumulate(count.values())] for each, count in counts.items()}

    def __call__(self, text: str, index: int, draw: Random) -> str:
        tag = self._tags[text][index]
        return draw.choices(self._words[tag], cum_weights=self._sums[tag])[0]


def load_tagger() -> Callable[[list[str]], list[str]]:
    """Return HanTa's English part-of-speech tagger. Raises ConfigError if the extra `pos` is missing."""
    hanover = require("HanTa.HanoverTagger", "pos", "--replace: pos (the default)")
    tagger = hanover.HanoverTagger("morphmodel_en.pgz")
    return lambda words: [tag for _, _, tag in tagger.tag_sent(words)]


@dataclasses.dataclass(frozen=True)
class AugmentedData:
    """Data set whose training examples include augmented copies."""

    data: GlueData | CustomData
    seed: int
    copies: int
    """Copies per example, before duplicates are dropped."""
    replace: Literal["pos", "mlm", "none"]
    model: Path | None = None
    """Checkpoint of the masked language model that samples words, for `replace` = mlm."""

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the data, the settings and the model. Raises ConfigError."""
        weights = None if self.model is None else files.weights_hash(self.model)
        own = {"seed": self.seed, "copies": self.copies, "replace": self.replace, "model": weights}
        return {**self.data.identity(), **own}

    def read(self, *, train_only: bool) -> LabelledData:
        """Read the data; add augmented copies to the train split, skipping duplicates. Raises ConfigError."""
        labelled = self.data.read(train_only=train_only)
        table = labelled.tables[TRAIN]
        substitute: Substitute = lambda *_: HOLE  # noqa: E731
        if self.replace == "none":
            substitute = lambda text, index, _: text.split()[index]  # noqa: E731
        elif self.copies and self.replace == "pos":
            texts = dict.fromkeys(itertools.chain.from_iterable(row.texts for row in table.rows))
            substitute = SameTagWords(texts, load_tagger())
        copies = [
            dataclasses.replace(row, texts=copy_of(row.texts, substitute, seed=self.seed, example=i, copy=k))
            for i, row in enumerate(table.rows)
            for k in range(self.copies)
        ]
        seen = {row.texts for row in table.rows}
        new = {row.texts: row for row in copies if row.texts not in seen}
        whole = dataclasses.replace(table, rows=[*table.rows, *new.values()], copies=len(new))
        return dataclasses.replace(labelled, tables={**labelled.tables, TRAIN: whole})

    def fill_holes(self, ids: NDArray[np.uint16], offsets: NDArray[np.int64]) -> None:
        """Replace each HOLE_ID in encoded examples, in place, with a token sampled from the model."""
        if self.model is not None and (ids == HOLE_ID).any():
            from bert_dp.evaluation import teacher  # imports torch

            teacher.fill_holes(self.model, ids, offsets, self.seed)


@dataclasses.dataclass(frozen=True)
class LogitsData:
    """Data set whose training texts, each with a teacher's logits, come from a JSONL file."""

    data: GlueData | CustomData
    file: str

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the data and the file of logits. Raises ConfigError."""
        return {**self.data.identity(), "logits": readers.file_identity(Path(self.file))}

    def read(self, *, train_only: bool) -> LabelledData:
        """Read the data; replace the train split with the texts and logits in `file`. Raises ConfigError."""
        labelled = self.data.read(train_only=train_only)
        outputs = max(1, len(labelled.labels))
        columns = ("text", "text_pair")[: len(labelled.tables[TRAIN].rows[0].texts)]
        rows, logits = [], []
        source = readers.Source(self.file, Path(self.file), "jsonl")
        for place, record in readers.records(source, [], TRAIN):
            texts = tuple(readers.text_of(record, column, self.file, place) for column in columns)
            values = record.get("logits")
            numbers = values if isinstance(values, list) else []
            if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers) or not numbers:
                raise data_error(self.file, "damaged", f"{place}: logits are not a list of finite numbers")
            if len(numbers) != outputs:
                message = f"{place}: {len(numbers)} logits instead of {outputs}, one per model output"
                raise data_error(self.file, "conflict", message)
            if len(columns) == 1 and "text_pair" in record:
                raise data_error(self.file, "conflict", f"{place} is a pair, but train contains no pairs")
            rows.append(Row(place, texts, None))
            logits.append(numbers)
        if not rows:
            raise data_error(self.file, "missing", "contains no examples")
        tables = {**labelled.tables, TRAIN: LabelledTable(self.file, rows)}
        return dataclasses.replace(labelled, tables=tables, logits=np.array(logits, np.float32))
