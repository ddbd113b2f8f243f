"""Read and check rows of labelled texts, and store encoded examples. Torch-free.

A file of n examples contains `ids` uint16 [T], the tokens of all examples, and `offsets` int64 [n + 1], the
bounds of each example in `ids`. If the labels are known, it also contains `labels`: int64 [n] for
single_label, uint8 [n, L] for multi_label or float32 [n] for regression.
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import IssueKind, read_regular, refusing
from bert_dp.config.manifest import MAX_LABELS, TRAIN, ExamplesManifest, ExampleSplit, Metric
from bert_dp.config.schema import LabelKind
from bert_dp.data import readers
from bert_dp.data.readers import ABSENT, MAX_DOCUMENT_BYTES, text_of, value_of

DIALECTS: dict[str, dict[str, Any]] = {
    "csv": {"delimiter": ",", "strict": True},
    "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # as in GLUE: quotes are ordinary characters
}
SEPARATOR_FIX = "fields are separated by commas in .csv and by tabs in .tsv"
COLUMN_FIX = f"choose a column with --text, --text-pair or --label; {SEPARATOR_FIX}"
SCORES_FIX = "pass --kind regression if the labels are scores"
MAX_BYTES = 2**31  # limit on the size of a file, because the whole file is read into memory
LABEL_TYPES = {"single_label": np.int64, "multi_label": np.uint8, "regression": np.float32}
MAX_NAME = 1000  # maximum number of characters in a label name
WHOLE = re.compile(r"([+-]?[0-9]+)\.0+")
WITH_DECIMALS = re.compile(r"[+-]?([0-9]*\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE]-[0-9]+)")
FORMATS = {suffix: format for suffix, format in readers.FORMATS.items() if format != "text"}
FORMATS |= {".csv": "csv", ".tsv": "tsv"}
PAIR = "text_pair"
METRICS: dict[LabelKind, tuple[Metric, ...]] = {
    "single_label": ("accuracy", "f1"),
    "multi_label": ("f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
csv.field_size_limit(MAX_DOCUMENT_BYTES)

Label = tuple[str, ...] | float | None
"""Label names (one, or any number for multi_label), a regression score, or None if there is no label."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns that hold the label and the one or two texts."""

    texts: tuple[str, ...]
    label: str = ""
    """Empty = no label is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One example in a file."""

    place: str
    """Position in the file, such as "line 7"."""
    texts: tuple[str, ...]
    label: Label


@dataclasses.dataclass(frozen=True)
class LabelledTable:
    """Rows of one file."""

    name: str
    rows: list[Row]
    left_out: int = 0
    """Number of broken rows that were skipped."""
    copies: int = 0
    """Number of rows, at the end of `rows`, that are augmented copies of other rows."""


@dataclasses.dataclass(frozen=True)
class LabelledData:
    """Tables of a task, one per split, and the meaning of their labels."""

    task: str
    kind: LabelKind
    labels: tuple[str, ...]
    """Label names, in the order of the model's outputs; empty for regression."""
    metrics: tuple[Metric, ...]
    tables: dict[str, LabelledTable]
    official: bool | None
    """True if the tables have GLUE's official row counts; None if the task is not from GLUE."""
    logits: NDArray[np.float32] | None = None
    """Teacher's logits [n, L] for the rows of the train split, which then have no labels."""


@dataclasses.dataclass(frozen=True)
class CustomData:
    """A user's data: a file or `hub:NAME[:CONFIG]` for each of "train", "dev" and "test", and the columns."""

    files: dict[str, str]
    columns: Columns
    kind: LabelKind | None
    """None = single_label, but labels that are numbers with decimals are refused."""
    finds_pair: bool = False
    """True = use the column PAIR as the second text if the train split has this column."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, and the identity of each source (see readers.identity). Raises ConfigError."""
        files = {split: readers.identity(_source(name)) for split, name in self.files.items()}
        return dataclasses.asdict(self) | {"files": files}

    def read(self, *, train_only: bool) -> LabelledData:
        """Read and check every file, or only the train file if `train_only` is true. Raises ConfigError."""
        columns, kind = self.columns, self.kind or "single_label"
        train = read_table(self.files[TRAIN], columns, TRAIN, kind, finds_pair=self.finds_pair)
        if len(train.rows[0].texts) > len(columns.texts):
            columns = dataclasses.replace(columns, texts=(*columns.texts, PAIR))
        names = label_names(self.kind, train)
        others = [] if train_only else [split for split in self.files if split != TRAIN]
        tables = {split: read_table(self.files[split], columns, split, kind) for split in others}
        return LabelledData("own", kind, names, METRICS[kind], {TRAIN: train, **tables}, None)


def read_table(
    name: str, columns: Columns, split: str, kind: LabelKind = "single_label", *, finds_pair: bool = False
) -> LabelledTable:
    """Read the rows of a file. In the test split, either all rows or no rows may have labels.
    `finds_pair`: use the column PAIR, if it exists, as the second text. Raises ConfigError."""
    source, is_test = _source(name), split == "test"
    rows: list[Row] = []
    for place, record in _records(source, columns, split):
        if finds_pair and not rows and isinstance(record, dict) and PAIR in record:
            columns = dataclasses.replace(columns, texts=(*columns.texts, PAIR))
        row = make_row(name, place, record, columns, kind, is_test=is_test)
        if not all(text.strip() for text in row.texts):
            raise data_error(name, "missing", f"{place}: a text is empty", "drop the row")
        rows.append(row)
    if not rows:
        raise data_error(name, "missing", "contains no examples")
    if is_test and all(row.label in (None, ()) for row in rows):
        rows = [dataclasses.replace(row, label=None) for row in rows]
    elif bare := next((row.place for row in rows if row.label is None), None):
        message = f"{bare} has no label, but other rows have one"
        raise data_error(name, "missing", message, "label all rows or none")
    return LabelledTable(source.path.name if source.path else name, rows)


def _source(name: str) -> readers.Source:
    if name.startswith("hub:"):
        return readers.Source(name)
    path = Path(os.path.expanduser(name))
    if path.exists() and not path.is_file():
        raise data_error(name, "wrong_type", "is not a regular file", "pass a file of examples")
    if (suffix := readers.suffixes(path)[0]) not in FORMATS:
        message = f"is not a table; known suffixes are {', '.join(FORMATS)}"
        raise data_error(name, "unsupported", message, "convert it")
    return readers.Source(name, path, FORMATS[suffix])


def _records(source: readers.Source, columns: Columns, split: str) -> Iterator[tuple[str, Any]]:
    """Yield the position, such as "line 7", and the record of every row. Raises ConfigError."""
    if source.path is None or source.format not in DIALECTS:
        keys = [*columns.texts, columns.label, PAIR]
        yield from readers.records(source, keys, "validation" if split == "dev" else split)
        return
    lines = (line + "\n" for _, line in readers.lines(source.path))
    for place, record, surplus in read_delimited(source.name, lines, source.format, columns):
        if surplus:
            message = f"{place}: {abs(surplus)} {'more' if surplus > 0 else 'fewer'} fields than the header"
            raise data_error(source.name, "damaged", message, "correct it")
        yield place, record


def data_error(
    name: str, kind: IssueKind, message: str, hint: str | None = None, value: Any = None
) -> ConfigError:
    """Return a ConfigError for one problem with the file or option `name`."""
    return ConfigError([Issue(name, kind, message, value, hint=hint)])


def read_delimited(
    name: str, lines: Iterator[str], format: str, columns: Columns, header: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str], int]]:
    """Yield the position of each row in a csv or tsv file, its fields by column, and its number of surplus
    fields (negative if fields are missing). `header`: columns of a file without a header. A blank line is an
    empty text in a table with one column, and is skipped in a wider table. Raises ConfigError."""
    reader = csv.reader(lines, **DIALECTS[format])
    end = 0  # number of the previous row's last line
    try:
        for fields in reader:
            place, end = f"line {end + 1}", reader.line_num
            if not header:
                header = fields
                if twice := [c for c in (*columns.texts, columns.label) if header.count(c) > 1]:
                    message = f"column {twice[0]!r} occurs twice in the header"
                    raise data_error(name, "conflict", message, "rename one", twice[0])
            elif len(header) == 1 or len(fields) > 1 or "".join(fields).strip():
                fields = fields or [""]
                yield place, dict(zip(header, fields, strict=False)), len(fields) - len(header)
    except csv.Error as error:
        fix = f"end each line with LF and close each quote; {SEPARATOR_FIX}"
        raise data_error(
            name, "damaged", f"line {end + 1} is not valid {format.upper()} ({error})", fix
        ) from None


def make_row(name: str, place: str, record: Any, columns: Columns, kind: LabelKind, *, is_test: bool) -> Row:
    """Convert a record to a row. If `is_test`, it may lack a label. Raises ConfigError if it is invalid."""
    texts = tuple(text_of(record, column, name, place, COLUMN_FIX) for column in columns.texts)
    cell = value_of(record, columns.label) if columns.label else None
    if cell is ABSENT and not is_test:
        message = f"{place} has no label column {columns.label!r} (got keys {sorted(record)[:8]})"
        raise data_error(name, "missing", message, COLUMN_FIX, columns.label)
    is_blank = isinstance(cell, str) and not cell.strip() and kind != "multi_label"
    if not columns.label or (is_test and (cell is ABSENT or cell is None or is_blank)):
        return Row(place, texts, None)
    try:
        label = parse_label(cell, kind)
        "".join(label if isinstance(label, tuple) else ()).encode()
    except (ValueError, RecursionError) as error:
        message = f"{place}: label {cell!r:.40}: {error}"
        raise data_error(name, "wrong_type", message, "correct the row or drop it", f"{cell!s:.40}") from None
    return Row(place, texts, label)


def parse_label(cell: Any, kind: LabelKind) -> tuple[str, ...] | float:
    """Convert the value of a label column to label names, or to a score for regression. For multi_label, the
    value is a list, a JSON list or names separated by |. Raises ValueError."""
    if kind == "regression":
        return _score(cell)
    if kind == "single_label":
        return (_name(cell),)
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = json.loads(cell)
    elif isinstance(cell, str):
        cell = [part for part in cell.split("|") if part.strip()]
    return tuple(map(_name, cell if isinstance(cell, list) else [cell]))


def _name(value: Any) -> str:
    """Convert a value to a label name. Equal whole numbers get the same name: 0, 0.0 and "0.0" become "0"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else repr(value)
    name = str(value).strip() if isinstance(value, (int, str)) else ""
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"expected a whole number or a name of up to {MAX_NAME} characters")
    whole = WHOLE.fullmatch(name)
    return str(int(whole[1])) if whole else name


def _score(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and abs(score := float(value)) <= np.finfo(np.float32).max:
            return score
    raise ValueError("expected a number")


def label_names(kind: LabelKind | None, train: LabelledTable) -> tuple[str, ...]:
    """Return the label names in the train split, sorted as numbers if all are integers, otherwise as text.
    Return () for regression. Raises ConfigError for too few or too many different labels and, if `kind` is
    None, for numbers with decimals, because they are probably scores."""
    found: set[Any] = set()
    for row in train.rows:
        found.update(row.label if isinstance(row.label, tuple) else [row.label])
        if kind is None and isinstance(row.label, tuple) and WITH_DECIMALS.fullmatch(row.label[0]):
            message = f"{row.place}: label {row.label[0]!r} is a number with decimals"
            fix = f"{SCORES_FIX}, or --kind single_label if they are names"
            raise data_error(train.name, "wrong_type", message, fix, row.label[0])
    least = 1 if kind == "multi_label" else 2
    if len(found) < least or (kind != "regression" and len(found) > MAX_LABELS):
        message = f"the number of different labels is {len(found)}, expected {least} to {MAX_LABELS}"
        fix = "add examples" if len(found) < least else f"set --label to the label column, or {SCORES_FIX}"
        raise data_error(train.name, "out_of_range", message, fix, len(found))
    if kind == "regression":
        return ()
    if all(name.removeprefix("-").isdecimal() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def to_array(kind: LabelKind, names: Sequence[str], table: LabelledTable) -> NDArray[Any]:
    """Return the labels of all rows: int64 [n] for single_label, uint8 [n, L] for multi_label or float32 [n]
    for regression. Raises ConfigError for a label that is not in `names`."""
    if kind == "regression":
        return np.array([row.label for row in table.rows], LABEL_TYPES[kind])
    index = {name: i for i, name in enumerate(names)}
    indices = []
    for row in table.rows:
        assert isinstance(row.label, tuple)
        if unknown := [name for name in row.label if name not in index]:
            message = f"{row.place}: label {unknown[0]!r} is not one of train's labels {[*names[:8]]}"
            is_score = WITH_DECIMALS.fullmatch(unknown[0])
            fix = SCORES_FIX if is_score else "correct it, or add examples with this label to train"
            raise data_error(table.name, "unknown", message, fix, unknown[0])
        indices.append([index[name] for name in row.label])
    if kind == "single_label":
        return np.array(indices, LABEL_TYPES[kind])[:, 0]
    labels = np.zeros((len(indices), len(names)), LABEL_TYPES[kind])
    for row_index, of_row in enumerate(indices):
        labels[row_index, of_row] = 1
    return labels


def answers(logits_NL: NDArray[np.float32], kind: LabelKind) -> NDArray[Any]:
    """Convert logits [n, L] to predicted labels, whose dtype is LABEL_TYPES[kind]."""
    if kind == "single_label":
        return logits_NL.argmax(1)
    return (logits_NL > 0 if kind == "multi_label" else logits_NL[:, 0]).astype(LABEL_TYPES[kind])


LOGITS = "logits-{:05d}.safetensors"  # file of a teacher's logits for one part of the train split


def read_logits(directory: Path, examples: int, outputs: int) -> NDArray[np.float32]:
    """Read the teacher's logits [examples, outputs] for all examples. Raises ConfigError if logits are
    missing or not finite, or have the wrong shape."""
    with refusing("distill.logits", str(directory), hint="run `bert-dp distill` again"):
        try:
            contents = (read_regular(path, MAX_BYTES) for path in sorted(directory.glob("logits-*")))
            logits_NL = np.concatenate([safetensors.numpy.load(each)["logits"] for each in contents])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"contains no logits ({error})") from None
        if logits_NL.shape != (examples, outputs):
            raise ValueError(f"has logits of shape {logits_NL.shape}, expected {(examples, outputs)}")
        if not np.isfinite(logits_NL).all():
            raise ValueError("has logits that are not finite")
    return logits_NL


@dataclasses.dataclass(frozen=True)
class Examples:
    """The n examples of a split."""

    ids: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [n + 1]
    labels: NDArray[Any] | None  # see LABEL_TYPES; None if the split has no labels

    @classmethod
    def open(cls, directory: Path, manifest: ExamplesManifest, split: str) -> Self:
        """Read a split of prepared examples. Raises ConfigError unless the split matches the manifest."""
        if split not in manifest.splits:
            message = f"no split {split!r}; available: {', '.join(manifest.splits)}"
            raise ConfigError([Issue(str(directory), "unknown", message, split)])
        entry = manifest.splits[split]
        path = directory / entry.file
        with refusing(str(path), hint=manifest.hint):
            data = read_regular(path, MAX_BYTES)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ValueError("its SHA-256 does not match the manifest")
            try:
                arrays = safetensors.numpy.load(data)
                examples = cls(arrays["ids"], arrays["offsets"], arrays.get("labels"))
            except (SafetensorError, KeyError) as error:
                raise ValueError(f"contains no examples ({error})") from None
            if not examples._fits(manifest, entry):
                raise ValueError(f"its arrays do not match {manifest.file_name}")
        return examples

    def _fits(self, manifest: ExamplesManifest, entry: ExampleSplit) -> bool:
        """Return True if the types, shapes and value ranges of the arrays match the manifest."""
        ids, offsets, labels = self.ids, self.offsets, self.labels
        count, names = entry.examples, len(manifest.labels)
        if (ids.dtype, ids.shape) != (np.uint16, (entry.tokens,)) or ids.max() >= manifest.vocab_size:
            return False
        if (offsets.dtype, offsets.shape) != (np.int64, (count + 1,)) or offsets[-1] != entry.tokens:
            return False
        if offsets[0] or not 2 <= self.lengths.min() <= self.lengths.max() <= manifest.sequence_length:
            return False
        if labels is None or not entry.has_labels:
            return labels is None and not entry.has_labels
        shape = (count, names) if manifest.kind == "multi_label" else (count,)
        if (labels.dtype, labels.shape) != (LABEL_TYPES[manifest.kind], shape):
            return False
        if manifest.kind == "regression":
            return bool(np.isfinite(labels).all())
        most = 1 if manifest.kind == "multi_label" else names - 1
        return bool(0 <= labels.min() <= labels.max() <= most)

    def save(self, path: Path) -> str:
        """Write the examples to a file and return its SHA-256."""
        arrays: dict[str, NDArray[Any]] = {"ids": self.ids, "offsets": self.offsets}
        if self.labels is not None:
            arrays["labels"] = self.labels
        data = safetensors.numpy.save(arrays)
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property  # cached, because it is read for every micro batch
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each example, [n]."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> NDArray[np.uint16]:
        """Return the token ids of an example, starting with <cls>."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]
