"""Labels as a file has them -> the arrays that a loss is computed against. Torch-free."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_dp.config import ConfigError
from bert_dp.config.examples import MAX_LABELS
from bert_dp.config.schema import LabelKind
from bert_dp.corpus.sources import refuse_surrogates
from bert_dp.examples.store import LABEL_TYPES
from bert_dp.examples.table import Row, Table, shown

MAX_NAME = 1000  # characters of a label
WHOLE = re.compile(r"([+-]?[0-9]+)\.0+")
WITH_DECIMALS = re.compile(r"[+-]?([0-9]*\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE]-[0-9]+)")
SCORES_FIX = "--kind regression where the labels are scores"
MAX_SCORE = float(np.finfo(np.float32).max)


def label_names(kind: LabelKind | None, train: Table) -> tuple[str, ...]:
    """Every name in train: in the order of numbers where all are whole numbers, else in that of letters; none
    of a regression. `kind`: None where the user gave none, which is single_label.

    Raises ConfigError for a value that is no label, for too few or too many names or scores, and without a
    kind for a number with decimals, which is probably a score.
    """
    if kind == "regression":
        if len({_score(train, row) for row in train.rows}) < 2:
            raise ConfigError([f"{train.name}: every score is the same; add examples with others"])
        return ()
    names = set()
    for row in train.rows:
        of_row = _names(kind or "single_label", train, row)
        if kind is None and WITH_DECIMALS.fullmatch(of_row[0]):
            fix = f"give {SCORES_FIX}, or --kind single_label where they are names"
            raise _refused(train, row, f"label {of_row[0]!r} is a number with decimals; {fix}")
        names.update(of_row)
    least = 1 if kind == "multi_label" else 2
    if len(names) < least:
        raise ConfigError([f"{train.name}: {len(names)} different labels, {least} at least; add examples"])
    if len(names) > MAX_LABELS:
        raise ConfigError(
            [
                f"{train.name}: {len(names)} different labels, {MAX_LABELS} at most; name the column of "
                f"the labels, or give {SCORES_FIX}"
            ]
        )
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def to_array(kind: LabelKind, names: Sequence[str], table: Table) -> NDArray[Any]:
    """The labels of all rows: int64 [n], uint8 [n, L] of multi_label, float32 [n] of regression.

    Raises ConfigError, naming the row, for a label that is none of `names` and for a score that is no number.
    """
    if kind == "regression":
        return np.array([_score(table, row) for row in table.rows], LABEL_TYPES[kind])
    index = {name: i for i, name in enumerate(names)}
    indices = [[_index(index, name, table, row) for name in _names(kind, table, row)] for row in table.rows]
    if kind == "single_label":
        return np.array(indices, LABEL_TYPES[kind])[:, 0]
    labels = np.zeros((len(indices), len(names)), LABEL_TYPES[kind])
    for row, ones in zip(labels, indices, strict=True):
        row[ones] = 1
    return labels


def _index(index: dict[str, int], name: str, table: Table, row: Row) -> int:
    if name not in index:
        fix = (
            f"give {SCORES_FIX}"
            if WITH_DECIMALS.fullmatch(name)
            else "correct it, or add such examples to train"
        )
        raise _refused(table, row, f"label {name!r} is none of train's {shown(map(repr, index))}; {fix}")
    return index[name]


def _refused(table: Table, row: Row, why: str) -> ConfigError:
    return ConfigError([f"{table.name}: {row.place}: {why}"])


def _names(kind: LabelKind, table: Table, row: Row) -> list[str]:
    """One name, or those of a multi-label row: a list, JSON that is one, or a text with | between them."""
    if kind == "single_label":
        return [_name(row.label, table, row)]
    label = row.label
    if isinstance(label, str) and label.lstrip().startswith("["):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as error:
            raise _refused(table, row, f"{label!r:.40} is no JSON list ({error})") from None
    elif isinstance(label, str):
        label = [part for part in label.split("|") if part.strip()]
    if not isinstance(label, list):
        label = [label]
    return [_name(each, table, row) for each in label]


def _name(value: Any, table: Table, row: Row) -> str:
    """Convert a cell to the name of a label. A whole number has one name: that of 0.0 and "0.0" is 0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.strip():
        refuse_surrogates(value, f"{table.name}: {row.place}")
        if len(value) > MAX_NAME:
            raise _refused(
                table, row, f"a label of {len(value):,} characters, {MAX_NAME} at most; shorten it"
            )
        whole = WHOLE.fullmatch(value.strip())
        return str(int(whole[1])) if whole else value.strip()
    raise _refused(table, row, f"{value!r:.40} is no label; a label is a name or a whole number")


def _score(table: Table, row: Row) -> float:
    value = math.nan
    if isinstance(row.label, (int, float, str)) and not isinstance(row.label, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(row.label)
    if not abs(value) <= MAX_SCORE:
        raise _refused(table, row, f"{row.label!r:.40} is no number; a score is one")
    return value
