"""export.json of an exported directory: what it was made from and what it computes. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ValidationError

from bert_dp.config import ConfigError, FinetuneConfig
from bert_dp.config.native import Kind
from bert_dp.config.stored import Count, Sha256, problem_lines, read_regular
from bert_dp.record.lines import MAX_JSON_BYTES
from bert_dp.record.models import StoredFile

EXPORTED = "export.json"
ExportFormat = Literal["hf", "onnx", "aoti"]


class Exported(StoredFile):
    """export.json."""

    remedy: ClassVar[str] = "export the run again"
    version: Literal[1] = 1
    format: ExportFormat
    kind: Kind
    architecture: str | None = None
    """Class of transformers, of the format hf."""
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    checkpoint: str
    """Where it was; of the run alone its name would not tell which."""
    weights_sha256: Sha256
    step: Count
    sequence_length: Count
    vocab_size: Count
    parameters: Count
    """Of the run's model."""
    pad: Count
    """Id of the padding token."""
    finetune: FinetuneConfig | None = None
    """Of a classifier: its kind, labels and pooling."""


def is_exported(directory: Path) -> bool:
    """Whether `bert-dp export` made it."""
    return (directory / EXPORTED).is_file()


def read_exported(directory: Path) -> Exported:
    """export.json of a directory. Raises ConfigError, one line."""
    path = directory / EXPORTED
    try:
        return Exported.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    except OSError as error:
        why = error.strerror
    except ValidationError as error:
        why = "; ".join(problem_lines(error))
    raise ConfigError([f"DIR: {path} cannot be read ({why}); {Exported.remedy}"])
