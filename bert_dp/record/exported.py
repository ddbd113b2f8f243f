"""export.json of an exported directory: what it was made from and what it computes. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ValidationError

from bert_dp.config import ConfigError, FinetuneConfig
from bert_dp.config.checks import Kind
from bert_dp.config.stored import Count, Sha256, problem_lines, read_regular
from bert_dp.record.lines import MAX_JSON_BYTES
from bert_dp.record.models import StoredFile

EXPORTED = "export.json"
ExportFormat = Literal["hf", "onnx", "aoti"]
ExportPrecision = Literal["fp32", "bf16", "int8"]
MODEL_FILES: dict[ExportFormat, str] = {"hf": "model.safetensors", "onnx": "model.onnx", "aoti": "model.pt2"}


class Exported(StoredFile):
    """export.json."""

    remedy: ClassVar[str] = "export the run again"
    version: Literal[1] = 1
    format: ExportFormat
    kind: Kind
    architecture: str | None = None
    """Class of transformers, of the format hf."""
    precision: ExportPrecision = "fp32"
    run: str
    """Name of the run's directory."""
    step: Count
    """Of its checkpoint."""
    weights_sha256: Sha256
    """Of the checkpoint's model.safetensors."""
    tokenizer_sha256: Sha256 | None = None
    """Of the run's tokenizer.json, whose frame may be another one; null in older files."""
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
    """export.json of a directory, which has the files that it speaks of. Raises ConfigError, one line."""
    path = directory / EXPORTED
    try:
        exported = Exported.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    except OSError as error:
        raise _unusable(f"{path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise _unusable(f"{path} cannot be read ({'; '.join(problem_lines(error))})") from None
    needed = [MODEL_FILES[exported.format], "tokenizer.json", *(["config.json"] * (exported.format == "hf"))]
    if absent := [name for name in needed if not (directory / name).is_file()]:
        raise _unusable(f"{directory} has no {' and no '.join(absent)}")
    return exported


def _unusable(why: str) -> ConfigError:
    return ConfigError([f"DIR: {why}; {Exported.remedy}"])
