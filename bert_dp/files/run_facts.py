"""Find checkpoints, and read their state.json and the export.json of exported models. Torch-free."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from bert_dp.config import ConfigError, FinetuneConfig, Issue, errors
from bert_dp.config.checks import Kind
from bert_dp.config.errors import Count, Sha256, StoredModel
from bert_dp.config.hf import EXPORTED, TOKENIZER
from bert_dp.files.models import InitFrom, StoredFile

SCHEMA_VERSION = 1
PAGE = "report.html"
PREDICTIONS = "predictions.jsonl"
"""File in which a finetuning run stores the logits of every dev and test example."""
SEQUENCE_LOSSES = "heldout_losses.json"
"""File in which a pretraining run stores the loss of every held-out sequence."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, newest first."""
    if not folder.is_dir():
        return []
    # incomplete checkpoints have other names
    found = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.iterdir())
    steps = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


class CheckpointFacts(StoredModel):
    """Contents of a checkpoint's state.json: progress and configuration of the run."""

    step: Count
    samples: Count
    elapsed_s: float = Field(ge=0)
    skipped_steps: Count = 0
    loss_spikes: Count = 0
    recent_losses: list[float] = []  # noqa: RUF012 (pydantic copies mutable defaults)
    config: dict[str, Any]
    code: dict[str, Sha256] = {}  # noqa: RUF012
    """Setting -> SHA-256 of the custom code file that it names."""
    data_hash: Sha256
    tokenizer: Sha256 | None = None
    """SHA-256 of the tokenizer file."""
    compiled: bool
    device: Literal["cpu", "cuda"]
    precision: Literal["fp64", "fp32", "bf16", "fp16"]
    scaler: dict[str, float]
    init_from: InitFrom | None = None
    """Source of the run's initial weights."""


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read state.json of the checkpoint `path`. Raises OSError or ValueError."""
    file = path / "state.json"
    try:
        return CheckpointFacts.model_validate_json(errors.read_regular(file, errors.MAX_JSON_BYTES))
    except ValidationError as error:
        raise ValueError("; ".join(f"{file.name}: {line}" for line in errors.problem_lines(error))) from None


def weights_hash(checkpoint: Path) -> str:
    """Read the SHA-256 of the weights from a checkpoint's manifest. Raises OSError, ValueError, KeyError."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return str(manifest["files"]["model.safetensors"]["sha256"])


def tokenizer_of(checkpoint: Path) -> Path:
    """Return the path of tokenizer.json in a checkpoint, or else in its run directory. Raises ConfigError."""
    places = (checkpoint / TOKENIZER, checkpoint.parent.parent / TOKENIZER)
    for place in places:
        if place.is_file():
            return place
    hint = f"copy the {TOKENIZER} of the run's shards to {places[1]}"
    raise ConfigError([Issue(str(checkpoint), "not_found", "has no tokenizer", hint=hint)])


def newest_checkpoint_facts(directory: Path) -> tuple[Path, CheckpointFacts] | None:
    """Return the path and state.json of a checkpoint; None if none is readable. `directory`: a checkpoint,
    or a run or folder of checkpoints, whose newest readable one is used. Hashes are not verified."""
    folder = directory / "checkpoints"
    for path in [directory, *list_checkpoints(folder if folder.is_dir() else directory)]:
        with contextlib.suppress(OSError, ValueError):
            return path, read_checkpoint_facts(path)
    return None


ExportFormat = Literal["hf", "onnx", "aoti"]
ExportPrecision = Literal["fp32", "bf16", "int8"]
MODEL_FILES: dict[ExportFormat, str] = {"hf": "model.safetensors", "onnx": "model.onnx", "aoti": "model.pt2"}
LOADERS = {"hf": ("transformers",), "onnx": ("onnx", "onnxruntime"), "aoti": ()}
"""Export format -> packages that load it. The extra `export` installs them."""
INPUTS, TYPES = ("input_ids", "attention_mask"), "token_type_ids"


class Exported(StoredFile):
    """Contents of export.json: source and properties of an exported model."""

    hint: ClassVar[str] = "export the run again"
    schema_version: Literal[1] = 1
    format: ExportFormat
    kind: Kind
    architecture: str | None = None
    """Name of the architecture in transformers; null unless the format is hf."""
    precision: ExportPrecision = "fp32"
    run: str
    """Name of the run's directory."""
    step: Count
    """Step of the exported checkpoint."""
    weights_sha256: Sha256
    """SHA-256 of the checkpoint's model.safetensors."""
    tokenizer_sha256: Sha256
    """SHA-256 of the run's tokenizer.json. The exported copy differs if the run's file turns on padding
    or truncation, or does not add the special tokens that finetuning uses."""
    sequence_length: Count
    vocab_size: Count
    parameters: Count
    """Number of parameters in the run's model."""
    pad: Count
    """Id of the padding token."""
    inputs: tuple[str, ...] = INPUTS
    """Names of the model's inputs, in order; each has the shape [batch, length]."""
    finetune: FinetuneConfig | None = None
    """Kind, labels and pooling of a classifier."""
    files: dict[str, Sha256] = Field(default_factory=dict)
    """File name -> SHA-256, for each file that is needed to load the model."""


def read_exported(directory: Path) -> Exported:
    """Read export.json, and check the hashes of the files needed for loading. Raises ConfigError."""
    path = directory / EXPORTED
    with errors.refusing("DIR", str(path), Exported.hint):
        exported = Exported.model_validate_json(errors.read_regular(path, errors.MAX_JSON_BYTES))
    for name in loaded_files(exported.format):
        file = directory / name
        if not file.is_file():
            message = f"{directory} has no {name}"
        elif errors.sha256(file) != exported.files.get(name):
            message = f"{file} is not the exported file (its SHA-256 differs)"
        else:
            continue
        raise ConfigError([Issue("DIR", "damaged", message, str(directory), hint=Exported.hint)])
    return exported


def loaded_files(form: ExportFormat) -> list[str]:
    """Return the names of the files that are needed to load a model in this format."""
    return [MODEL_FILES[form], TOKENIZER, *(["config.json"] if form == "hf" else [])]


def require_loaders(exported: Exported, use: str) -> None:
    """Import the packages that load an exported model. `use`: command that needs them. Raises ConfigError."""
    for package in LOADERS[exported.format]:
        errors.require(package, "export", use)
