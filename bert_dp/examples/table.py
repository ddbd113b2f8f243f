"""Labelled texts as they stand in a file, before a tokenizer. Torch-free."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bert_dp.config import ConfigError
from bert_dp.config.examples import Metric
from bert_dp.config.schema import LabelKind
from bert_dp.corpus.readers import MAX_DOCUMENT_BYTES
from bert_dp.corpus.sources import ABSENT, refuse_surrogates, value_of

DIALECTS: dict[str, dict[str, Any]] = {
    "csv": {"strict": True},
    "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # as GLUE: a quote is a character like others
}
SEPARATORS = {"csv": ",", "tsv": "\t"}
SEPARATOR_FIXES = {
    ",": "its fields are separated by commas: name it .csv",
    "\t": "its fields are separated by tabs: name it .tsv",
    ";": "its fields are separated by semicolons: save it with commas (.csv) or tabs (.tsv)",
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
    if not isinstance(record, dict):
        raise ConfigError([f"{name}: {place} is {type(record).__name__}, not named columns"])
    values = {column: value_of(record, column) for column in (*columns.texts, columns.label) if column}
    if missing := [column for column in needed if values[column] is ABSENT]:
        raise ConfigError([f"{name}: {place}: {no_column(missing[0], record)}"])
    for column in columns.texts:
        text = values[column]
        if not isinstance(text, str):
            raise ConfigError(
                [f"{name}: {place}: {column!r} is {type(text).__name__}, not a text; drop the row"]
            )
        refuse_surrogates(text, f"{name}: {place}")
    label = values.get(columns.label)
    if label is ABSENT:
        label = None
    if needs_label and label is None:
        raise ConfigError([f"{name}: {place}: {columns.label!r} is null; label the row or drop it"])
    return Row(place, tuple(values[column] for column in columns.texts), label)


def no_column(column: str, names: Iterable[str], fix: str = "") -> str:
    """Describe a file that lacks a column."""
    return f"no column {column!r} (got {shown(map(repr, names))}); {fix or COLUMN_FIX}"


def shown(names: Iterable[str]) -> str:
    """Names for a message, the first few of them."""
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def delimited(
    name: str, lines: Iterable[str], format: str, columns: Columns, header: Sequence[str] | None = None
) -> tuple[Sequence[str], Iterator[tuple[str, list[str]]]]:
    """Read a csv or tsv: its header, by default the first line, and (place, fields) of the other rows.

    A blank line is a row with an empty text in a table of one column. In a wider table, those at the end are
    skipped, and others between rows are one row without fields.
    Raises ConfigError, also where the header lacks a column of texts.
    """
    lines = iter(lines)
    first = next(lines, "")
    rows = _fields(name, itertools.chain([first], lines), format, _separator_hint(first, format))
    if header is None:
        _, header = next(rows, ("", []))
        if not "".join(header).strip():
            what = "line 1 is blank" if first else "is empty"
            raise ConfigError([f"{name}: {what}; begin the file with the names of its columns"])
    if missing := [column for column in columns.texts if column not in header]:
        raise ConfigError([f"{name}: {no_column(missing[0], header, _separator_hint(first, format))}"])
    return header, rows


def _separator_hint(line: str, format: str) -> str:
    """Say what to do with a header whose fields have another separator than the format; else empty."""
    separator = next((each for each in SEPARATOR_FIXES if each in line), "")
    return "" if SEPARATORS[format] in line else SEPARATOR_FIXES.get(separator, "")


def _fields(name: str, lines: Iterable[str], format: str, hint: str) -> Iterator[tuple[str, list[str]]]:
    """(place of the row's first line, fields) of every row. `hint`: added to an error in the first row."""
    reader = csv.reader(lines, **DIALECTS[format])
    width = start = 0
    blank: tuple[str, list[str]] | None = None  # the first of the blank lines that were read last
    try:
        for fields in reader:
            row = (f"line {start + 1}", fields or [""])
            start = reader.line_num
            width = width or len(row[1])
            if width > 1 and not "".join(fields).strip() and len(fields) < 2:
                blank = blank or (row[0], [])
                continue
            if blank is not None:
                yield blank
                blank = None
            yield row
    except csv.Error as error:
        why = "a line ends with CR; make it LF" if "new-line" in str(error) else str(error)
        if reader.line_num > start + 1:
            why = (
                f"the row that begins there goes on to line {reader.line_num}, as a quote in it is not closed"
            )
        fix = f"; {hint}" if hint and not start else ""
        raise ConfigError([f"{name}: line {start + 1} is not {format.upper()} ({why}){fix}"]) from None
