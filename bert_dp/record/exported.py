"""Model and read export.json of an exported directory. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from bert_dp.config import ConfigError, FinetuneConfig, Issue
from bert_dp.config.checks import Kind
from bert_dp.config.error import require
from bert_dp.config.stored import Count, Sha256, read_regular, refusing
from bert_dp.record.lines import MAX_JSON_BYTES
from bert_dp.record.models import StoredFile

EXPORTED = "export.json"
ExportFormat = Literal["hf", "onnx", "aoti"]
ExportPrecision = Literal["fp32", "bf16", "int8"]
MODEL_FILES: dict[ExportFormat, str] = {"hf": "model.safetensors", "onnx": "model.onnx", "aoti": "model.pt2"}
LOADERS: dict[ExportFormat, tuple[str, ...]] = {
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxruntime"),
    "aoti": (),
}
"""Packages of the extra `export` that load a format."""


class Exported(StoredFile):
    """Describe the run that a directory was exported from, and what it computes."""

    remedy: ClassVar[str] = "export the run again"
    schema_version: Literal[1] = 1
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
    tokenizer_sha256: Sha256
    """Of the run's tokenizer.json, whose frame may be another one."""
    sequence_length: Count
    vocab_size: Count
    parameters: Count
    """Of the run's model."""
    pad: Count
    """Id of the padding token."""
    finetune: FinetuneConfig | None = None
    """Of a classifier: its kind, labels and pooling."""


def is_exported(directory: Path) -> bool:
    """Return True if `bert-dp export` made the directory."""
    return (directory / EXPORTED).is_file()


def read_exported(directory: Path) -> Exported:
    """Read export.json of a directory that has all files of its format. Raises ConfigError."""
    path = directory / EXPORTED
    with refusing("DIR", str(path), Exported.remedy):
        exported = Exported.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    needed = [MODEL_FILES[exported.format], "tokenizer.json"]
    needed += ["config.json"] if exported.format == "hf" else []
    if absent := [name for name in needed if not (directory / name).is_file()]:
        message = f"{directory} has no {' and no '.join(absent)}"
        raise ConfigError([Issue("DIR", "damaged", message, str(directory), hint=Exported.remedy)])
    return exported


def require_loaders(exported: Exported, use: str) -> None:
    """Import the packages that load a directory. `use`: the verb that needs them. Raises ConfigError."""
    for package in LOADERS[exported.format]:
        require(package, "export", use)
