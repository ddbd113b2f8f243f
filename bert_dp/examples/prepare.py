"""Convert labelled texts to token ids and labels for finetuning, and cache them on disk. Torch-free.

The launcher runs `python -m bert_dp.examples.prepare` with options from the user's command.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Encoding, Tokenizer

from bert_dp import files as record
from bert_dp.config import ConfigError
from bert_dp.config.manifest import TRAIN, ExamplesManifest, format_of, hash_json, read_examples, with_hash
from bert_dp.data import readers
from bert_dp.data import tokenizer as tokens
from bert_dp.data.build import locked, replaced, run_command
from bert_dp.evaluation.scores import majority
from bert_dp.examples import table as tables
from bert_dp.examples.augment import HOLE, HOLE_ID, MASK, AugmentedData, LogitsData
from bert_dp.examples.glue import GlueData, missing
from bert_dp.examples.table import CustomData, Examples, LabelledData, Row

BATCH_EXAMPLES = 1000
AnyData = GlueData | CustomData | AugmentedData | LogitsData


@dataclasses.dataclass(frozen=True)
class EncodedExamples:
    """Concatenated token ids of n examples."""

    ids: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [n + 1]
    truncated: int
    """Number of examples longer than the encoder's `length`."""
    textless: NDArray[np.int64]
    """Indices of examples in which at least one text has no tokens."""
    letters: int
    """Number of letters in the texts before truncation."""
    lost_letters: int
    """Number of letters that the tokenizer drops or maps to unknown tokens."""


@dataclasses.dataclass(frozen=True)
class ExampleEncoder:
    """Encoder that converts examples to `<cls> A <sep>` or `<cls> A <sep> B <sep>`, up to `length` tokens.
    RoBERTa's tokenizers put two separators between the texts."""

    tokenizer: Tokenizer
    special: dict[str, int]
    """Map from role (pad, unk, cls, sep or mask) to token id."""
    length: int
    has_cls: bool = True
    """False = omit <cls>: encode as `A <sep>` or `A <sep> B <sep>`."""
    separators: int = 1
    """Number of separators between two texts."""
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Token ids of the placeholder characters that bert_dp.examples.augment puts into texts."""
    fill_holes: Callable[[NDArray[np.uint16], NDArray[np.int64]], None] | None = None
    """Callback that receives `ids` and `offsets` and replaces each HOLE_ID in place."""

    @classmethod
    def load(cls, path: Path, length: int) -> Self:
        """Load a tokenizer.json. Raises ConfigError if it is invalid or lacks a special token."""
        tokenizer = tokens.load(path)
        special = tokens.special_ids(tokenizer, str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        separators = tokens.separators_between(tokenizer, special) or 1
        tokenizer.encode_special_tokens = True  # "<sep>" in a text is not a special token
        return cls(tokenizer, special, length, separators=separators)

    def encode(self, examples: Sequence[tuple[str, ...]]) -> EncodedExamples:
        """Tokenize and truncate the examples, and add the special tokens."""
        rows, textless = list[list[int]](), list[int]()
        truncated = letters = lost_letters = 0
        head = [self.special["cls"]] if self.has_cls else []
        between = [self.special["sep"]] * (self.separators - 1)
        count_letters = tokens.loss_counter(self.tokenizer, self.special["unk"])
        for index, (texts, parts) in enumerate(zip(examples, self._parts(examples), strict=True)):
            for text, ids in zip(texts, parts, strict=True):
                counted, lost = count_letters(text, ids)
                letters += counted
                lost_letters += lost
            frame = len(head) + len(parts) + len(between) * (len(parts) - 1)
            kept = truncate(parts, self.length - frame)
            truncated += kept != parts
            if not all(parts):
                textless.append(index)
            row = [*head]
            for number, part in enumerate(kept):
                row += [*(between if number else []), *part, self.special["sep"]]
            rows.append(row)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids_T = np.fromiter(chain.from_iterable(rows), np.uint16, int(offsets[-1]))
        if self.fill_holes is not None:
            self.fill_holes(ids_T, offsets)
        return EncodedExamples(ids_T, offsets, truncated, np.array(textless, np.int64), letters, lost_letters)

    def has_tokens(self, examples: Sequence[tuple[str, ...]]) -> bool:
        """Return True if at least one example has tokens in all its texts."""
        return any(all(parts) for parts in self._parts(examples))

    def _parts(self, examples: Sequence[tuple[str, ...]]) -> Iterator[list[list[int]]]:
        """For each example, yield the token ids of each of its texts, without special tokens."""
        for start in range(0, len(examples), BATCH_EXAMPLES):
            batch = examples[start : start + BATCH_EXAMPLES]
            pieces = [*chain.from_iterable(batch)]
            if self.marks:  # encode the pieces between the marks
                split = re.compile(f"[{''.join(self.marks)}]").split
                pieces = [piece.rstrip() for text in pieces for piece in split(text)]
            encoded = iter(self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
            for example in batch:
                yield [self._joined(text, encoded) for text in example]

    def _joined(self, text: str, pieces: Iterator[Encoding]) -> list[int]:
        """Join the next encodings in `pieces`, with the ids of the marks in `text` between them."""
        ids = list(next(pieces).ids)
        for mark in filter(self.marks.__contains__, text):
            ids += [self.marks[mark], *next(pieces).ids]
        return ids


def truncate(parts: list[list[int]], limit: int) -> list[list[int]]:
    """Truncate one or two parts to `limit` tokens in total. Tokens are dropped from the end of the longer
    part, or of the second part if both have the same length."""
    if len(parts) == 1:
        return [parts[0][:limit]]
    first, second = parts
    keep_second = min(len(second), max(limit // 2, limit - len(first)))
    return [first[: limit - keep_second], second[:keep_second]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `missing` or `prepare` with the given options, print the answer and return the exit code."""
    return run_command(lambda: answer(argv))


def answer(argv: Sequence[str] | None) -> str:
    """Return the prepared directory or, for `missing`, the missing GLUE files as JSON. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.examples.prepare")
    parser.add_argument("verb", choices=["missing", "prepare"])
    parser.add_argument("--dev-share", type=float, default=0.0)
    parser.add_argument("--data", type=Path, action="append", default=[])
    for name in ("--task", "--train", "--dev", "--test", "--text", "--text-pair", "--label", "--kind"):
        parser.add_argument(name)
    parser.add_argument("--teacher-logits")
    for name in ("--tokenizer", "--replacing-model"):
        parser.add_argument(name, type=Path)
    for name in ("--length", "--copies"):
        parser.add_argument(name, type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replace", default="none")
    options = parser.parse_args(argv)
    if options.verb == "missing":
        return json.dumps(missing(options.data))
    record.set_private_umask()
    share, seed = options.dev_share, options.seed
    directory, manifest = prepare(_data(options), options.tokenizer, options.length, share, seed)
    sys.stderr.write(record.printable(f"{summary(manifest)}\n"))
    return str(directory)


def _data(options: argparse.Namespace) -> AnyData:
    data: GlueData | CustomData
    if options.task is not None:
        data = GlueData(options.task, tuple(options.data))
    else:
        files = {name: path for name in ("train", "dev", "test") if (path := getattr(options, name))}
        texts = tuple(filter(None, (options.text or "text", options.text_pair)))
        columns = tables.Columns(texts, options.label or "label")
        finds_pair = options.text is None and options.text_pair is None
        data = CustomData(files, columns, options.kind, finds_pair)
    if options.teacher_logits is not None:
        return LogitsData(data, options.teacher_logits)
    if options.copies is not None:
        return AugmentedData(data, options.seed, options.copies, options.replace, options.replacing_model)
    return data


def prepare(
    data: AnyData, tokenizer: Path, length: int, dev_share: float = 0.0, seed: int = 0
) -> tuple[Path, ExamplesManifest]:
    """Return the prepared directory and its manifest. The first call builds the directory in the cache, and
    concurrent calls wait for it. Raises ConfigError.

    `length`: maximum number of tokens per example. `dev_share`: share of the train split to move to dev;
    0 = dev comes from a separate file. `seed` determines which examples are moved.
    """
    if issues := record.cache_issues():
        raise ConfigError(issues)
    facts = {
        "format": format_of(ExamplesManifest),
        "data": data.identity(),
        "tokenizer": readers.file_hash(tokenizer),
        "length": length,
        "dev_share": [dev_share, seed] if dev_share else 0.0,
    }
    directory = record.cache_root() / f"examples-{hash_json(facts)[:20]}"
    with locked(directory):
        with contextlib.suppress(ConfigError):
            manifest = read_examples(directory)
            for split in manifest.splits:
                Examples.open(directory, manifest, split)
            if readers.file_hash(directory / manifest.tokenizer.file) == manifest.tokenizer.sha256:
                return directory, manifest
        with replaced(directory) as work:
            labelled = data.read(train_only=dev_share > 0)
            encoder = ExampleEncoder.load(tokenizer, length)
            if isinstance(data, AugmentedData):
                marks = {MASK: encoder.special["mask"], HOLE: HOLE_ID}
                encoder = dataclasses.replace(encoder, marks=marks, fill_holes=data.fill_holes)
            _build(labelled, encoder, tokenizer, dev_share, seed, work)
        return directory, read_examples(directory)


def _build(
    labelled: LabelledData, encoder: ExampleEncoder, tokenizer: Path, dev_share: float, seed: int, work: Path
) -> None:
    """Write the splits, tokenizer.json and examples.json to the directory `work`."""
    if dev_share:
        labelled = _with_drawn_dev(labelled, dev_share, seed)
    train_keys = {_key(row) for row in labelled.tables[TRAIN].rows}
    labels = {
        split: tables.to_array(labelled.kind, labelled.labels, table)
        for split, table in labelled.tables.items()
        if table.rows[0].label is not None
    }
    if labelled.logits is not None:
        labels[TRAIN] = tables.answers(labelled.logits, labelled.kind)
        save_file({"logits": labelled.logits}, work / tables.LOGITS.format(0))
    splits: dict[str, Any] = {}
    for split, table in labelled.tables.items():
        encoded = encoder.encode([row.texts for row in table.rows])
        if len(encoded.textless) == len(table.rows):
            message = f"the tokenizer {tokenizer} produces no tokens for these texts"
            raise tables.data_error(table.name, "unsupported", message, "choose a run with another tokenizer")
        arrays = Examples(encoded.ids, encoded.offsets, labels.get(split))
        splits[split] = {
            "source": table.name,
            "file": f"{split}.safetensors",
            "sha256": arrays.save(work / f"{split}.safetensors"),
            "examples": len(table.rows),
            "tokens": len(encoded.ids),
            "truncated": encoded.truncated,
            "has_labels": split in labels,
            "baseline": _baseline(labelled, labels, split),
            "in_train": None if split == TRAIN else sum(_key(row) in train_keys for row in table.rows),
            "left_out": table.left_out,
            "letters": encoded.letters,
            "lost_letters": encoded.lost_letters,
            "without_tokens": len(encoded.textless),
            "copies": table.copies,
        }
    shutil.copyfile(tokenizer, work / "tokenizer.json")
    content = {
        "task": labelled.task,
        "kind": labelled.kind,
        "labels": list(labelled.labels),
        "pair": len(labelled.tables[TRAIN].rows[0].texts) == 2,
        "metrics": list(labelled.metrics),
        "sequence_length": encoder.length,
        "vocab_size": tokens.size(encoder.tokenizer),
        "special_tokens": {role: encoder.special[role] for role in ("pad", "cls", "sep")},
        "tokenizer": {"file": "tokenizer.json", "sha256": readers.file_hash(work / "tokenizer.json")},
        "splits": splits,
        "official": labelled.official,
        "dev_share": dev_share,
    }
    record.write_json(work / ExamplesManifest.file_name, with_hash(ExamplesManifest, content))


def _baseline(
    labelled: LabelledData, labels: Mapping[str, NDArray[Any]], split: str
) -> dict[str, float | None] | None:
    """Return the scores that `majority` computes for a split, or None for the train split and for splits
    without labels."""
    if split == TRAIN or split not in labels:
        return None
    scores = majority(labelled.metrics, labelled.kind, labels[TRAIN], labels[split])
    return {metric: score if math.isfinite(score) else None for metric, score in scores.items()}


def _key(row: Row) -> int:
    """Return a 64-bit hash of an example's texts, ignoring their case and white space."""
    return readers.document_key("\0".join(" ".join(text.split()) for text in row.texts))


def _with_drawn_dev(labelled: LabelledData, share: float, seed: int) -> LabelledData:
    """Move a share of the train split to dev. For single_label, move the same share of each class. A hash of
    the seed and the texts selects the examples. Raises ConfigError if train or dev would be empty."""
    whole = labelled.tables[TRAIN]
    strata: dict[str, set[int]] = {}
    for row in whole.rows:
        strata.setdefault(str(row.label) if labelled.kind == "single_label" else "", set()).add(_key(row))
    drawn: set[int] = set()
    for keys in strata.values():
        ordered = sorted(keys, key=lambda key: readers.document_key(f"{seed} {key}"))
        drawn.update(ordered[: round(share * len(keys))])
    rows: dict[str, list[Row]] = {TRAIN: [], "dev": []}
    for row in whole.rows:
        rows["dev" if _key(row) in drawn else TRAIN].append(row)
    if empty := [split for split, part in rows.items() if not part]:
        message = f"with a dev share of {share:g}, {empty[0]} gets none of the {len(whole.rows)} examples"
        raise tables.data_error(whole.name, "out_of_range", message, "add examples")
    parts = {split: dataclasses.replace(whole, rows=part) for split, part in rows.items()}
    official = None if labelled.official is None else False
    return dataclasses.replace(labelled, tables=parts, official=official)


def summary(manifest: ExamplesManifest) -> str:
    """Describe a prepared directory in one line."""
    parts = []
    for name, split in manifest.splits.items():
        counts = {
            "tokens": split.tokens,
            f"truncated to {manifest.sequence_length}": split.truncated,
            "augmented copies": split.copies,
            "also in train": split.in_train,
            "broken rows skipped": split.left_out,
            "with a text that has no tokens": split.without_tokens,
        }
        notes = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        parts.append(f"{name} {split.examples:,} examples ({notes})")
    official = {None: "", True: "; row counts match GLUE", False: "; row counts do not match GLUE"}
    return f"{manifest.task}: {', '.join(parts)}{official[manifest.official]}"


if __name__ == "__main__":
    sys.exit(main())
