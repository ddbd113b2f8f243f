"""A user's own files: CSV, TSV, JSONL, JSON, Parquet, or a data set of the hub. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError
from bert_dp.config.examples import TRAIN, Metric
from bert_dp.config.schema import LabelKind
from bert_dp.corpus import readers, sources
from bert_dp.examples.labels import label_names
from bert_dp.examples.table import COLUMN_FIX, Columns, Labelled, Row, Table, delimited, make_row

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
class OwnData:
    """Files by split ("train", "dev", "test"), and their columns. A name may be `hub:NAME[:CONFIG]`."""

    files: dict[str, str]
    columns: Columns
    kind: LabelKind | None
    """None: single_label, but scores are refused."""
    finds_pair: bool = False
    """A column PAIR of train is the second text."""

    def identity(self) -> dict[str, Any]:
        """What changes when a file does, without reading it. Raises ConfigError."""
        stamps = {split: sources.identity(_source(name)) for split, name in self.files.items()}
        columns = dataclasses.asdict(self.columns)
        return {"files": stamps, "columns": columns, "kind": self.kind, "finds_pair": self.finds_pair}

    def read(self, *, train_only: bool) -> Labelled:
        """Raises ConfigError naming the file and the row for what is no example."""
        tables = {TRAIN: read_table(self.files[TRAIN], self.columns, TRAIN, finds_pair=self.finds_pair)}
        has_pair = len(tables[TRAIN].rows[0].texts) > 1
        columns = _paired(self.columns) if self.finds_pair and has_pair else self.columns
        for split in [] if train_only else [name for name in self.files if name != TRAIN]:
            tables[split] = read_table(self.files[split], columns, split)
        names = label_names(self.kind, tables[TRAIN])
        kind = self.kind or "single_label"
        if "test" in tables and "-1" not in names:
            tables["test"] = _unlabelled(tables["test"])
        return Labelled("own", kind, names, METRICS[kind], tables, {}, None)


def _source(name: str) -> sources.Source:
    if name.startswith("hub:"):
        return sources.Source(name)
    path = Path(os.path.expanduser(name))
    if path.exists() and not path.is_file():
        raise ConfigError([f"{name} is not a regular file; name a file of examples"])
    return sources.Source(name, path, FORMATS.get(readers.suffixes(path)[0], "text"))


def _paired(columns: Columns) -> Columns:
    return dataclasses.replace(columns, texts=(*columns.texts, PAIR))


def read_table(name: str, columns: Columns, split: str, *, finds_pair: bool = False) -> Table:
    """The rows of a file. Those of test may have no labels, but then none of them has one. `finds_pair`: a
    column PAIR is the second text. Raises ConfigError."""
    source = _source(name)
    is_test = split == "test"
    rows: list[Row] = []
    for place, record in _records(source, columns, split):
        if finds_pair and not rows and isinstance(record, dict) and PAIR in record:
            columns = _paired(columns)
        row = make_row(name, place, record, columns, needs_label=not is_test)
        if not all(text.strip() for text in row.texts):
            raise ConfigError([f"{name}: {place}: a text is empty; drop the row"])
        rows.append(row)
    if not rows:
        raise ConfigError([f"{name}: holds no example"])
    if is_test and not any(_is_label(row.label) for row in rows):
        rows = [dataclasses.replace(row, label=None) for row in rows]
    if is_test and len({row.label is None for row in rows}) == 2:
        place = next(row.place for row in rows if row.label is None)
        raise ConfigError([f"{name}: {place} has no label, but others have; label all rows or none"])
    if source.path is None:
        return Table(name, _rows_hash(rows), rows)
    return Table(source.path.name, sources.file_hash(source.path), rows)


def _unlabelled(table: Table) -> Table:
    """Without labels where each of them is -1, as data sets of the hub mark a test set whose labels are not
    public."""
    if any(str(row.label).strip() not in ("-1", "-1.0") for row in table.rows):
        return table
    return dataclasses.replace(table, rows=[dataclasses.replace(row, label=None) for row in table.rows])


def _is_label(label: Any) -> bool:
    """Whether the cell of a label holds anything."""
    return label is not None and not (isinstance(label, str) and not label.strip())


def _rows_hash(rows: list[Row]) -> str:
    """Hex SHA-256 of rows that come from no file."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.texts, row.label], default=str).encode() + b"\n")
    return digest.hexdigest()


def _records(source: sources.Source, columns: Columns, split: str) -> Iterator[tuple[str, Any]]:
    """(place, record) of every row. Raises ConfigError."""
    if source.path is None or source.format in ("jsonl", "parquet"):
        needed = columns.texts if split == "test" else (*columns.texts, columns.label)
        yield from sources.records(
            source, needed, [columns.label, PAIR], split=HUB_SPLITS[split], fix=COLUMN_FIX
        )
        return
    if source.format == "text":
        raise ConfigError([f"{source.name}: not a table of a known suffix: {', '.join(FORMATS)}; convert it"])
    lines = (line + "\n" for _, line in readers.lines(source.path))
    header, rows = delimited(source.name, lines, source.format, columns)
    for column in filter(None, (*columns.texts, columns.label)):
        if header.count(column) > 1:
            raise ConfigError([f"{source.name}: the header names {column!r} twice; rename one"])
    for place, fields in rows:
        if len(fields) != len(header):
            raise ConfigError(
                [f"{source.name}: {place} has {len(fields)} fields, the header {len(header)}; correct it"]
            )
        yield place, dict(zip(header, fields, strict=True))
