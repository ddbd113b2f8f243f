"""Result files: reading and writing them, and the models that several verbs share.

Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares and efficiencies
are fractions. An interval is [low, high], of 95 %. null: not measured.
"""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError

from bert_dp import record
from bert_dp.config import ConfigError, Issue
from bert_dp.config.stored import problem_lines, read_regular
from bert_dp.record.models import StoredFile, StoredModel

SCHEMA_VERSION = record.SCHEMA_VERSION

Count = Annotated[int, Field(gt=0, le=10**9)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Point = Annotated[tuple[int | float, float | None], Field(strict=False)]
F = TypeVar("F", bound=StoredFile)


def read(path: Path, model: type[F]) -> F:
    """Read a result file. Raises ConfigError with one issue."""
    return parse(load(path, model.remedy), model, str(path))


def load(path: Path, remedy: str) -> Any:
    """Read a JSON file. Raises ConfigError with one issue."""
    try:
        return record.parse_json(read_regular(path, record.MAX_JSON_BYTES))
    except OSError as error:
        message = f"cannot be read ({error.strerror})"
        raise ConfigError([Issue(str(path), "not_found", message, hint=remedy)]) from None
    except ValueError as error:
        raise ConfigError([Issue(str(path), "damaged", f"is not JSON ({error})", hint=remedy)]) from None


def find(path: Path, model: type[F]) -> F | None:
    """Read a result file; None if it is absent or damaged."""
    try:
        return read(path, model)
    except ConfigError:
        return None


def parse(data: Any, model: type[F], name: str) -> F:
    """Validate the contents of a file called `name`. Raises ConfigError with one issue."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        message = f"{problem_lines(error)[0]}{more}"
        raise ConfigError([Issue(name, "damaged", message, hint=model.remedy)]) from None


def plain(part: StoredModel) -> dict[str, Any]:
    """Convert a model to JSON values, in the order of its fields."""
    return part.model_dump(mode="json")


def write(path: Path, file: StoredFile) -> None:
    """Write a result file atomically. Raises OSError."""
    record.write_json(path, plain(file))


def to_json(file: StoredFile) -> str:
    """Format a result file for `--json`."""
    return json.dumps(plain(file), indent=1) + "\n"


MeasureStatus = Literal["complete", "partial", "failed"]


class Measurement(StoredFile):
    """The result of a verb that measures by several runs in one directory."""

    schema_version: Literal[1] = 1
    status: MeasureStatus = "complete"
    why: str | None = None
    """Cause of the failure."""
    date: str | None = None
    seconds: float | None = None
    """Time of all trials, in every call."""
    environment: dict[str, Any] = {}
    """environment.json"""
    config_hash: str | None = None
    config: dict[str, Any] = {}
    """The resolved configuration."""
    data_hash: str | None = None
    command: list[str] = []
    ranks: int | None = None
    """Ranks of a trial."""


class TuneFile(Measurement):
    """tune.json of either search."""

    remedy: ClassVar[str] = "the same `bert-dp tune` command with the same --out writes it anew"


# --- what is measured of a run after training


class PredictedTokens(StoredModel):
    """Tokens of a text that a run predicted, of all or of those that it saw in one way."""

    seen: Literal["all", "mask", "random", "original"]
    """As what: <mask>, a random token, or what it is."""
    tokens: Tokens
    documents: Tokens
    loss: float | None
    """Mean cross entropy, nats per predicted token."""
    loss_se: float | None
    """Standard error over documents, each drawn as a whole; null of one document."""
    accuracy: float | None
    """Share whose likeliest token is right."""


class HiddenWords(StoredModel):
    """Whole words that a run predicted, every token of a word hidden at once."""

    rate: float
    """Of the words, each drawn by (document, word): the same words for every vocabulary."""
    words: Tokens
    words_without_token: Tokens
    """Among them, of which the tokenizer keeps nothing: their bytes cost no bit."""
    bytes: Tokens
    """UTF-8, of the words as they stand in the text."""
    documents: Tokens
    tokens: Tokens
    unknown_tokens: Tokens
    nats: float
    bits_per_byte: float | None
    bits_per_byte_se: float | None


class TextLoss(StoredFile):
    """What `eval mlm --json` prints."""

    remedy: ClassVar[str] = "run `bert-dp eval mlm` again"
    schema_version: int = SCHEMA_VERSION
    run: str
    step: int
    """Of the checkpoint, optimizer steps."""
    tokenizer: str | None
    """SHA-256 of tokenizer.json."""
    vocab_size: int
    sequence_length: int
    device: str
    precision: str
    sources: list[dict[str, Any]]
    """name, bytes, sha256 (null with --max-bytes: no file is read whole) and documents read of each."""
    documents: Tokens
    documents_without_tokens: Tokens
    """Documents of which the tokenizer keeps nothing; only their separators are evaluated."""
    first_without_tokens: int | None
    """Index of the first of them, from 0 over all sources; null where there is none."""
    tokens: Tokens
    """With a separator after each document."""
    words: Tokens
    """Runs of characters between white space."""
    bytes: Tokens
    """UTF-8, of the documents."""
    mask_rate: float
    predicted: list[PredictedTokens]
    hidden: HiddenWords


# --- export check


class ExportBatch(StoredModel):
    """One batch, computed by a run and by what was exported of it."""

    batch: int
    length: int
    outputs: int
    """Numbers that were compared, of real tokens."""
    difference: float
    """The largest, over the largest output of the run where that is above 1."""
    top1: float | None
    """Share of the positions or examples with the same largest output; null of hidden states."""


class ExportCheck(StoredFile):
    """What `export check --json` prints."""

    remedy: ClassVar[str] = "run `bert-dp export check` again"
    schema_version: int = SCHEMA_VERSION
    ok: bool
    format: str
    kind: str
    precision: str
    architecture: str | None
    checkpoint: str
    tolerance: float | None
    """Of `difference`; null where another precision is measured and not judged."""
    rows: list[ExportBatch]
    parameters: int | None
    """Of the model as it was loaded; null where the format does not tell."""
    stored_parameters: int | None
    """In model.safetensors."""
    run_parameters: int
    not_loaded: list[str]
    """Parameters of the class that are not in the file, and the other way round."""
    again: float
    """Largest difference after it was saved and loaded again."""
    versions: dict[str, str]
    """Of Python and the packages that loaded it."""


class PlanFile(StoredFile):
    """The options and the configuration with which an output directory was begun."""

    remedy: ClassVar[str] = "choose another directory"
    schema_version: Literal[1] = 1
    config_hash: str
    config: dict[str, Any] = {}
    machine: dict[str, Any] | None = None
    """Facts that must be equal for figures to compare."""


class TimedPlanFile(PlanFile):
    """A plan with the time that was spent on it."""

    seconds: float = 0.0
    """Time of all calls so far."""
