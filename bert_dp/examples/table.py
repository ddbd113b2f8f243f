"""Labelled texts as they stand in a file, before a tokenizer. Torch-free."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bert_dp.config import ConfigError
from bert_dp.config.examples import Metric
from bert_dp.config.schema import LabelKind
from bert_dp.corpus.readers import MAX_DOCUMENT_BYTES
from bert_dp.corpus.sources import refuse_surrogates

DIALECTS: dict[str, dict[str, Any]] = {
    "csv": {"strict": True},
    "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # as GLUE: a quote is a character like others
}
csv.field_size_limit(MAX_DOCUMENT_BYTES)
SHOWN = 8  # names in a message
COLUMN_FIX = "name it with --text, --text-pair or --label"


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where a row has its one or two texts and its label."""

    texts: tuple[str, ...]
    label: str = ""
    """Empty: none is looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An example as a file has it."""

    place: str
    """Of the file, as in "line 7"."""
    texts: tuple[str, ...]
    label: Any
    """None where the file has none."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one file."""

    name: str
    sha256: str
    rows: list[Row]
    left_out: int = 0
    """Rows that are broken, and so no examples."""


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The tables of a task, by split, and what their labels mean."""

    task: str
    kind: LabelKind
    labels: tuple[str, ...]
    """Names in the order of the model's outputs; empty of a regression."""
    metrics: tuple[Metric, ...]
    tables: dict[str, Table]
    rows: dict[str, int]
    """GLUE's own number of rows by split; empty where the task is none of GLUE's."""
    official: bool | None
    """Whether the tables have these; None where the task is none of GLUE's."""


def make_row(name: str, place: str, record: Any, columns: Columns, *, needs_label: bool) -> Row:
    """The row of a record. Raises ConfigError for a column that it lacks and for what is no text."""
    needed = [*columns.texts, *([columns.label] if needs_label else [])]
    if not isinstance(record, Mapping):
        raise ConfigError([f"{name}: {place} is {type(record).__name__}, not named columns"])
    if missing := [column for column in needed if column not in record]:
        raise ConfigError([f"{name}: {place}: {no_column(missing[0], record)}"])
    for column in columns.texts:
        text = record[column]
        if not isinstance(text, str):
            raise ConfigError(
                [f"{name}: {place}: {column!r} is {type(text).__name__}, not a text; drop the row"]
            )
        refuse_surrogates(text, f"{name}: {place}")
    label = record.get(columns.label)
    if needs_label and label is None:
        raise ConfigError([f"{name}: {place}: {columns.label!r} is null; label the row or drop it"])
    return Row(place, tuple(record[column] for column in columns.texts), label)


def no_column(column: str, names: Iterable[str]) -> str:
    """What is wrong with a file that has other columns."""
    return f"no column {column!r} (got {shown(names)}); {COLUMN_FIX}"


def shown(names: Iterable[str]) -> str:
    """Names for a message, the first few of them."""
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def delimited(
    name: str, lines: Iterable[str], format: str, columns: Columns, header: Sequence[str] | None = None
) -> tuple[Sequence[str], Iterator[tuple[str, list[str]]]]:
    """The header of a csv or tsv, by default its first line, and (place, fields) of every other line that is
    not empty. Raises ConfigError, also where the header lacks a column of texts."""
    rows = _fields(name, lines, format)
    if header is None:
        _, header = next(rows, ("", []))
        if not header:
            raise ConfigError([f"{name}: is empty; name a file with a header and rows"])
    if missing := [column for column in columns.texts if column not in header]:
        raise ConfigError([f"{name}: {no_column(missing[0], header)}"])
    return header, rows


def _fields(name: str, lines: Iterable[str], format: str) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(lines, **DIALECTS[format])
    try:
        for fields in reader:
            if fields:
                yield f"line {reader.line_num}", fields
    except csv.Error as error:
        why = "a line ends with CR; make it LF" if "new-line" in str(error) else error
        raise ConfigError([f"{name}: line {reader.line_num} is not {format.upper()} ({why})"]) from None
