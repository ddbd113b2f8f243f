"""GLUE's tasks, and their files in folders and tars. Torch-free.

Row counts, columns and the order of the labels are those of the published data set
(https://gluebenchmark.com/tasks, and `nyu-mll/glue` on the hub).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError
from bert_dp.config.examples import TRAIN, Metric
from bert_dp.config.schema import LabelKind
from bert_dp.corpus import readers, sources
from bert_dp.examples.archive import find_files, read_files
from bert_dp.examples.table import Columns, Labelled, Row, Table, delimited, make_row

ZERO_ONE = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class Task:
    """How GLUE writes a task down: a file of each split, SPLIT.tsv."""

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    """As the files have them, in the order of the model's outputs; empty of a regression."""
    metrics: tuple[Metric, ...]
    rows: Mapping[str, int]
    also: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Another number of rows that counts as complete."""
    header: tuple[str, ...] | None = None
    """Of train and dev, whose files have none."""

    @property
    def kind(self) -> LabelKind:
        return "single_label" if self.labels else "regression"

    @property
    def required(self) -> list[str]:
        """Splits that must be there: all but those of the test."""
        return [split for split in self.rows if not split.startswith("test")]


def _rows(train: int, dev: int, test: int) -> dict[str, int]:
    return {TRAIN: train, "dev": dev, "test": test}


TASKS = {
    "CoLA": Task(
        ("sentence",),
        "label",
        ZERO_ONE,
        ("mcc",),
        _rows(8_551, 1_043, 1_063),
        header=("source", "label", "star", "sentence"),
    ),
    "SST-2": Task(("sentence",), "label", ZERO_ONE, ("accuracy",), _rows(67_349, 872, 1_821)),
    "MRPC": Task(
        ("#1 String", "#2 String"), "Quality", ZERO_ONE, ("accuracy", "f1"), _rows(3_668, 408, 1_725)
    ),
    "STS-B": Task(
        ("sentence1", "sentence2"), "score", (), ("pearson", "spearman"), _rows(5_749, 1_500, 1_379)
    ),
    "QQP": Task(
        ("question1", "question2"),
        "is_duplicate",
        ZERO_ONE,
        ("accuracy", "f1", "auc"),
        _rows(363_846, 40_430, 390_965),
        # train.tsv has rows that line ends cut in pieces; loaders differ by three in what they keep
        also={TRAIN: 363_849},
    ),
    "MNLI": Task(
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
        {
            TRAIN: 392_702,
            "dev_matched": 9_815,
            "dev_mismatched": 9_832,
            "test_matched": 9_796,
            "test_mismatched": 9_847,
        },
    ),
    "QNLI": Task(("question", "sentence"), "label", ENTAILMENT, ("accuracy",), _rows(104_743, 5_463, 5_463)),
    "RTE": Task(("sentence1", "sentence2"), "label", ENTAILMENT, ("accuracy",), _rows(2_490, 277, 3_000)),
    "WNLI": Task(("sentence1", "sentence2"), "label", ZERO_ONE, ("accuracy",), _rows(635, 71, 146)),
}


@dataclasses.dataclass(frozen=True)
class GlueData:
    """A task of GLUE and where its files are: each is taken from the first of `places` that has it."""

    task: str
    places: tuple[Path, ...]

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError([f"--task {self.task}: GLUE's tasks are {', '.join(TASKS)}"])
        if not self.places:
            raise ConfigError([f"--task {self.task}: needs --data, the folder or tar that holds its files"])

    def identity(self) -> dict[str, Any]:
        """What changes when a file does, without reading it. Raises ConfigError."""
        return {"task": self.task, "places": [self._stamps(place) for place in self.places]}

    def read(self, *, train_only: bool) -> Labelled:
        """Raises ConfigError for a file that is missing or is not as GLUE has it."""
        task = TASKS[self.task]
        splits = [TRAIN] if train_only else list(task.rows)
        files = self._files(splits)
        if missing := [split for split in task.required if split in splits and split not in files]:
            looked = ", ".join(map(str, self.places))
            raise ConfigError(
                [
                    f"--task {self.task}: no {self.task}/{split}.tsv in {looked}; add --data with the folder "
                    "or tar that has it"
                    for split in missing
                ]
            )
        tables = {
            split: _table(f"{self.task}/{split}.tsv", files[split], task, split)
            for split in splits
            if split in files
        }
        official = all(
            len(table.rows) in (task.rows[split], task.also.get(split)) for split, table in tables.items()
        )
        return Labelled(self.task, task.kind, task.labels, task.metrics, tables, dict(task.rows), official)

    def _files(self, splits: Sequence[str]) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for place in self.places:
            names = {f"{self.task}/{split}.tsv": split for split in splits if split not in files}
            files |= {names[name]: data for name, data in read_files(place, list(names)).items()}
        return files

    def _stamps(self, place: Path) -> list[dict[str, Any]]:
        if not place.is_dir():
            return [sources.file_identity(place)]
        files = [place / self.task / f"{split}.tsv" for split in TASKS[self.task].rows]
        return [sources.file_identity(file) for file in files if file.exists()]


def missing(places: Sequence[Path]) -> dict[str, list[str]]:
    """Task, in GLUE's order -> its train and dev files that none of `places` has. Raises ConfigError."""
    absent = {name: [f"{name}/{split}.tsv" for split in task.required] for name, task in TASKS.items()}
    for place in places:
        present = find_files(place, [file for files in absent.values() for file in files])
        absent = {name: [file for file in files if file not in present] for name, files in absent.items()}
    return absent


def _table(name: str, data: bytes, task: Task, split: str) -> Table:
    """The rows of a file. Of train those are left out that lack columns; elsewhere they are refused, as every
    example of dev and test has to be scored. For the same reason one with an empty text is kept."""
    rows: list[Row] = []
    left_out = 0
    is_train, is_test = split == TRAIN, split.startswith("test")
    columns = Columns(task.texts, task.label)
    for place, record in _records(name, data, None if is_test else task.header, columns):
        if record is not None:
            rows.append(make_row(name, place, record, columns, needs_label=not is_test))
        elif is_train:
            left_out += 1
        else:
            raise ConfigError([f"{name}: {place} has fewer fields than the header; fetch the file again"])
    if not rows:
        raise ConfigError([f"{name}: holds no example; fetch the file again"])
    return Table(name, hashlib.sha256(data).hexdigest(), rows, left_out)


def _records(
    name: str, data: bytes, header: tuple[str, ...] | None, columns: Columns
) -> Iterator[tuple[str, dict[str, str] | None]]:
    """(place, record); None of a row that lacks fields."""
    if hint := readers.encoding_hint(data):
        raise ConfigError([f"{name}: is {hint}"])
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig")
    try:
        names, rows = delimited(name, text, "tsv", columns, header)
        for place, fields in rows:
            yield place, dict(zip(names, fields, strict=False)) if len(fields) >= len(names) else None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{name}: not UTF-8 ({error.reason}); fetch the file again"]) from None
