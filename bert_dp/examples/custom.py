"""Read a user's own examples: CSV, TSV, JSONL, JSON, Parquet, or a data set of the hub. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_dp.config.manifest import TRAIN, Metric
from bert_dp.config.schema import LabelKind
from bert_dp.data import readers
from bert_dp.examples.table import (
    COLUMN_FIX,
    Columns,
    LabelledData,
    LabelledTable,
    Row,
    data_error,
    label_names,
    make_row,
    read_delimited,
)

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    **{suffix: format for suffix, format in readers.FORMATS.items() if format != "text"},
}
PAIR = "text_pair"
HUB_SPLITS = {TRAIN: "train", "dev": "validation", "test": "test"}
METRICS: dict[LabelKind, tuple[Metric, ...]] = {
    "single_label": ("accuracy", "f1"),
    "multi_label": ("f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}


@dataclasses.dataclass(frozen=True)
class CustomData:
    """Name a user's files by split ("train", "dev", "test"), and their columns. A file may be
    `hub:NAME[:CONFIG]`."""

    files: dict[str, str]
    columns: Columns
    kind: LabelKind | None
    """None: single_label, but scores are refused."""
    finds_pair: bool = False
    """Take a column PAIR of train, if there is one, as the second text."""

    def identity(self) -> dict[str, Any]:
        """Return values that change when a file does, without reading it. Raises ConfigError."""
        return dataclasses.asdict(self) | {
            "files": {split: readers.identity(_source(name)) for split, name in self.files.items()}
        }

    def read(self, *, train_only: bool) -> LabelledData:
        """Read and check every file. Raises ConfigError."""
        columns, kind = self.columns, self.kind or "single_label"
        train = read_table(self.files[TRAIN], columns, TRAIN, kind, finds_pair=self.finds_pair)
        if len(train.rows[0].texts) > len(columns.texts):
            columns = dataclasses.replace(columns, texts=(*columns.texts, PAIR))
        names = label_names(self.kind, train)
        others = [] if train_only else [split for split in self.files if split != TRAIN]
        tables = {split: read_table(self.files[split], columns, split, kind) for split in others}
        # data sets of the hub mark a test set whose labels are not public by -1 in every row
        if "test" in tables and "-1" not in names:
            rows = tables["test"].rows
            if all(row.label in (("-1",), -1.0) for row in rows):
                rows[:] = [dataclasses.replace(row, label=None) for row in rows]
        return LabelledData("own", kind, names, METRICS[kind], {TRAIN: train, **tables}, {}, None)


def read_table(
    name: str, columns: Columns, split: str, kind: LabelKind = "single_label", *, finds_pair: bool = False
) -> LabelledTable:
    """Read the rows of a file. Those of test may have no labels, but then none of them has one.
    `finds_pair`: a column PAIR is the second text. Raises ConfigError."""
    source, is_test = _source(name), split == "test"
    rows: list[Row] = []
    digest = hashlib.sha256()
    for place, record in _records(source, columns, split):
        if finds_pair and not rows and isinstance(record, dict) and PAIR in record:
            columns = dataclasses.replace(columns, texts=(*columns.texts, PAIR))
        row = make_row(name, place, record, columns, kind, is_test=is_test)
        if not all(text.strip() for text in row.texts):
            raise data_error(name, "missing", f"{place}: a text is empty", "drop the row")
        digest.update(repr((row.texts, row.label)).encode())
        rows.append(row)
    if not rows:
        raise data_error(name, "missing", "holds no example")
    if is_test and all(row.label in (None, ()) for row in rows):
        rows = [dataclasses.replace(row, label=None) for row in rows]
    elif bare := next((row.place for row in rows if row.label is None), None):
        message = f"{bare} has no label, but others have one"
        raise data_error(name, "missing", message, "label all rows or none")
    if source.path is None:
        return LabelledTable(name, digest.hexdigest(), rows)
    return LabelledTable(source.path.name, readers.file_hash(source.path), rows)


def _source(name: str) -> readers.Source:
    if name.startswith("hub:"):
        return readers.Source(name)
    path = Path(os.path.expanduser(name))
    if path.exists() and not path.is_file():
        raise data_error(name, "wrong_type", "is not a regular file", "name a file of examples")
    return readers.Source(name, path, FORMATS.get(readers.suffixes(path)[0], "text"))


def _records(source: readers.Source, columns: Columns, split: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and record of every row. Raises ConfigError."""
    if source.path is None or source.format in ("jsonl", "parquet"):
        needed = columns.texts if split == "test" else (*columns.texts, columns.label)
        yield from readers.records(
            source, needed, [columns.label, PAIR], split=HUB_SPLITS[split], fix=COLUMN_FIX
        )
        return
    if source.format == "text":
        message = f"is no table; known suffixes are {', '.join(FORMATS)}"
        raise data_error(source.name, "unsupported", message, "convert it")
    lines = (line + "\n" for _, line in readers.lines(source.path))
    for place, record, surplus in read_delimited(source.name, lines, source.format, columns):
        if surplus:
            message = f"{place} has {abs(surplus)} fields {'more' if surplus > 0 else 'less'} than the header"
            raise data_error(source.name, "damaged", message, "correct it")
        yield place, record
