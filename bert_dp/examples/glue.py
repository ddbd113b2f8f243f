"""Define the GLUE tasks, and read their files from folders and tar archives. Torch-free.

Row counts, columns and label order match the published data set (https://gluebenchmark.com/tasks, and
`nyu-mll/glue` on the Hugging Face Hub).
"""

import dataclasses
import io
import lzma
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import read_regular
from bert_dp.config.manifest import TRAIN, Metric
from bert_dp.config.schema import LabelKind
from bert_dp.data import readers
from bert_dp.examples.table import Columns, LabelledData, LabelledTable, data_error, make_row, read_delimited

MAX_FILE_BYTES = 2**30  # MNLI's train.tsv, the largest GLUE file, is a few hundred MB in size
MAX_MEMBERS = 10_000  # largest accepted number of entries in a tar
ZERO_ONE = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = ("sentence1", "sentence2")
NLI = ("entailment", "neutral", "contradiction")
MNLI = (TRAIN, "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
COLA = ("source", "label", "star", "sentence")


def _rows(*counts: int) -> dict[str, int]:
    return dict(zip(MNLI if len(counts) == 5 else (TRAIN, "dev", "test"), counts, strict=True))


@dataclasses.dataclass(frozen=True)
class GlueDefinition:
    """Columns, labels and metrics of a GLUE task, and the number of rows in each SPLIT.tsv."""

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    """Labels as spelled in the files, in the order of the model's outputs; empty for regression."""
    metrics: tuple[Metric, ...]
    rows: Mapping[str, int]
    header: tuple[str, ...] = ()
    """Columns of the train and dev files if they lack a header; empty = they have one."""
    other_train_rows: int = 0
    """Alternative number of rows of a complete train.tsv; 0 = none."""

    @property
    def kind(self) -> LabelKind:
        return "single_label" if self.labels else "regression"

    @property
    def required(self) -> list[str]:
        """Return the splits that must exist: train and dev, which have labels."""
        return [split for split in self.rows if not split.startswith("test")]


TASKS = {
    "CoLA": GlueDefinition(("sentence",), "label", ZERO_ONE, ("mcc",), _rows(8_551, 1_043, 1_063), COLA),
    "SST-2": GlueDefinition(("sentence",), "label", ZERO_ONE, ("accuracy",), _rows(67_349, 872, 1_821)),
    "MRPC": GlueDefinition(
        ("#1 String", "#2 String"), "Quality", ZERO_ONE, ("accuracy", "f1"), _rows(3_668, 408, 1_725)
    ),
    "STS-B": GlueDefinition(SENTENCES, "score", (), ("pearson", "spearman"), _rows(5_749, 1_500, 1_379)),
    "QQP": GlueDefinition(
        ("question1", "question2"),
        "is_duplicate",
        ZERO_ONE,
        ("accuracy", "f1", "auc"),
        _rows(363_846, 40_430, 390_965),
        # some rows of train.tsv contain line breaks, so parsers disagree by three on the number of rows
        other_train_rows=363_849,
    ),
    "MNLI": GlueDefinition(
        SENTENCES, "gold_label", NLI, ("accuracy",), _rows(392_702, 9_815, 9_832, 9_796, 9_847)
    ),
    "QNLI": GlueDefinition(
        ("question", "sentence"), "label", ENTAILMENT, ("accuracy",), _rows(104_743, 5_463, 5_463)
    ),
    "RTE": GlueDefinition(SENTENCES, "label", ENTAILMENT, ("accuracy",), _rows(2_490, 277, 3_000)),
    "WNLI": GlueDefinition(SENTENCES, "label", ZERO_ONE, ("accuracy",), _rows(635, 71, 146)),
}


@dataclasses.dataclass(frozen=True)
class GlueData:
    """GLUE task, and the folders and tars in the order in which they are searched for its files."""

    task: str
    places: tuple[Path, ...]

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            hint = f"choose from {', '.join(TASKS)}"
            raise data_error("--task", "unknown", f"{self.task} is not a GLUE task", hint, self.task)

    def identity(self) -> dict[str, Any]:
        """Return the task, and the path, size and modification time of each file. Raises ConfigError."""
        files: list[Path] = []
        for place in self.places:
            named = [place / name for name in self._names() if (place / name).exists()]
            files += named if place.is_dir() else [place]
        return {"task": self.task, "files": list(map(readers.file_identity, files))}

    def read(self, *, train_only: bool) -> LabelledData:
        """Read and check every file, or only train.tsv if `train_only` is true. Raises ConfigError."""
        task, names = TASKS[self.task], self._names()[: 1 if train_only else None]
        files: dict[str, bytes] = {}
        for place in self.places:
            files |= read_files(place, [name for name in names if name not in files])
        looked, fix = ", ".join(map(str, self.places)), "pass --data with the folder or tar that contains it"
        if absent := [name for name in names if name not in files and Path(name).stem in task.required]:
            issues = [Issue("--data", "missing", f"no {name} in {looked}", name, hint=fix) for name in absent]
            raise ConfigError(issues)
        tables = {Path(name).stem: _table(name, files[name], task) for name in names if name in files}
        counts = {split: len(table.rows) for split, table in tables.items()}
        if counts[TRAIN] == task.other_train_rows:
            counts[TRAIN] = task.rows[TRAIN]
        official = counts.items() <= task.rows.items()
        return LabelledData(self.task, task.kind, task.labels, task.metrics, tables, official)

    def _names(self) -> list[str]:
        return [f"{self.task}/{split}.tsv" for split in TASKS[self.task].rows]


def missing(places: Sequence[Path]) -> dict[str, list[str]]:
    """For each task, return the train and dev files that none of `places` contains. Raises ConfigError."""
    absent = {name: [f"{name}/{split}.tsv" for split in task.required] for name, task in TASKS.items()}
    for place in places:
        present = read_files(place, [file for files in absent.values() for file in files], content=False)
        absent = {name: [file for file in files if file not in present] for name, files in absent.items()}
    return absent


def read_files(place: Path, names: Sequence[str], *, content: bool = True) -> dict[str, bytes]:
    """Read the files in `names`, such as "RTE/train.tsv", that exist in `place`, a folder or a tar. In a tar,
    they may be in any folder. Return {name: bytes}; without `content`, the bytes are empty. Nothing is
    extracted to disk. Raises ConfigError."""
    found: dict[str, bytes] = {}
    try:
        if place.is_dir():
            for name in names:
                if (place / name).exists():
                    found[name] = read_regular(place / name, MAX_FILE_BYTES) if content else b""
            return found
        if not place.is_file():
            raise data_error(str(place), "not_found", "no such folder or tar", "check the path")
        with tarfile.open(place) as archive:
            for count, member in enumerate(archive):
                if count == MAX_MEMBERS:
                    raise data_error(str(place), "damaged", f"over {count} entries", "pass a GLUE archive")
                wanted = [name for name in names if f"/{member.name}".endswith(f"/{name}")]
                if wanted and wanted[0] not in found and member.isreg():  # links are not followed
                    if content and member.size > MAX_FILE_BYTES:
                        size = f"{member.name} has {member.size} bytes, more than any GLUE file"
                        raise data_error(str(place), "damaged", size, "download it again")
                    file = archive.extractfile(member) if content else None
                    found[wanted[0]] = file.read() if file else b""
                if len(found) == len(names):
                    break
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError):
        fix = "download it again; if it is a zip, unpack it and pass the folder"
        raise data_error(str(place), "damaged", "not a tar, or a damaged tar", fix) from None
    except OSError as error:
        message = f"cannot be read ({error.strerror or error})"
        raise data_error(str(error.filename or place), "not_found", message, "check the file") from None
    return found


def _table(name: str, data: bytes, task: GlueDefinition) -> LabelledTable:
    """Read the rows of a file. A row that lacks fields is skipped in the train split, but refused in dev
    and test, where every example must be scored. Rows with an empty text are kept. Raises ConfigError."""
    split, rows, left_out = Path(name).stem, [], 0
    is_test = split.startswith("test")
    columns = Columns(task.texts, task.label)
    lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig")
    records = read_delimited(name, lines, "tsv", columns, () if is_test else task.header)
    try:
        for place, record, surplus in records:
            if surplus >= 0:
                rows.append(make_row(name, place, record, columns, task.kind, is_test=is_test))
            elif split == TRAIN:
                left_out += 1
            else:
                message = f"{place} has fewer fields than the table has columns"
                raise data_error(name, "damaged", message, "download the file again")
    except UnicodeDecodeError as error:
        raise data_error(name, "damaged", f"not UTF-8 ({error.reason})", "download the file again") from None
    if not rows:
        raise data_error(name, "missing", "contains no examples", "download the file again")
    return LabelledTable(name, rows, left_out)
