"""The files that only verbs write, as models: the only schema, the only reader and the only writer of them.

A key that is not known is ignored and one that is missing has its default, so older files open; null is what
was not measured. Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares
and efficiencies are fractions, unless a name says otherwise. An interval is [low, high], of 95 %.
"""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from bert_dp import record
from bert_dp.config import ConfigError, plain_message
from bert_dp.config.stored import read_regular
from bert_dp.record.models import StoredFile, StoredModel

SCHEMA_VERSION = record.SCHEMA_VERSION

Count = Annotated[int, Field(gt=0, le=10**9)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Point = Annotated[tuple[int | float, float | None], Field(strict=False)]
T = TypeVar("T")
OrNone = BeforeValidator(lambda value: [] if value is None else value)
Listed = Annotated[list[T], OrNone]
"""A list; null is an empty one."""


F = TypeVar("F", bound=StoredFile)


def read(path: Path, model: type[F]) -> F:
    """The file at `path`. Raises ConfigError, one line, when it is absent, foreign, damaged, too large or too
    deep."""
    return parse(load(path, model.remedy), model, str(path))


def load(path: Path, remedy: str) -> Any:
    """The JSON value at `path`. Raises ConfigError, one line."""
    try:
        return record.parse_json(read_regular(path, record.MAX_JSON_BYTES))
    except OSError as error:
        raise ConfigError([f"{path} cannot be read ({error.strerror}); {remedy}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON ({error}); {remedy}"]) from None


def find(path: Path, model: type[F]) -> F | None:
    """The same; None when it is absent or damaged, where both mean that it is to be written anew."""
    try:
        return read(path, model)
    except ConfigError:
        return None


def parse(data: Any, model: type[F], name: str) -> F:
    """What a file called `name` holds. Raises ConfigError, one line: the file, the key, what is wrong, what
    to do."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise ConfigError([f"{name} is damaged: {_problem(dict(problems[0]))}{more}; {model.remedy}"]) from None


def _problem(error: dict[str, Any]) -> str:
    """Where, what, and the value; a check of several fields names its own in the message."""
    place = ".".join(str(part) for part in error["loc"])
    text = plain_message(str(error["msg"]))
    if error["type"] not in ("missing", "value_error"):
        text += f", not {reprlib.repr(error['input'])}"
    return f"{place}: {text}" if place else text


def plain(part: StoredModel) -> dict[str, Any]:
    """As JSON values, in the order of the fields."""
    return part.model_dump(mode="json")


def write(path: Path, file: StoredFile) -> None:
    """Atomic: a reader sees the old file or the whole new one. Raises OSError."""
    record.write_json(path, plain(file))


def to_json(file: StoredFile) -> str:
    """What `--json` prints."""
    return json.dumps(plain(file), indent=1) + "\n"


# --- doctor


class MatmulRatio(StoredFile):
    """matmul_ratio.json in the cache: how fast a CPU multiplies bf16 beside fp32, by `bert-dp doctor`."""

    remedy: ClassVar[str] = "remove it, and `bert-dp doctor` measures it again"
    date: str
    cpu: list[str]
    """Its model and its bf16 units."""
    torch: str
    shape: Annotated[list[int], Field(min_length=3, max_length=3)]
    """M, N, K of [M, K] x [K, N]."""
    fp32_flops: Positive
    """FLOP/s, all cores."""
    bf16_flops: Positive

    @property
    def ratio(self) -> float:
        return self.bf16_flops / self.fp32_flops


# --- what a measurement of several runs tells, whatever it is of

MeasureStatus = Literal["complete", "partial", "failed"]


class Measurement(StoredFile):
    """What every verb tells that measures by several runs in one directory."""

    schema_version: Literal[1] = 1
    status: MeasureStatus = "complete"
    why: str | None = None
    """Why it failed."""
    date: str | None = None
    seconds: float | None = None
    """All trials took, in every call."""
    environment: dict[str, Any] = {}
    """The machine, as environment.json has it."""
    config_hash: str | None = None
    config: dict[str, Any] = {}
    """The resolved configuration of what was measured."""
    data_hash: str | None = None
    command: Listed[str] = []
    ranks: int | None = None
    """Of a trial."""


# --- tune.json


class TuneFile(Measurement):
    """What both searches tell."""

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


# --- what an --out directory was begun with


class PlanFile(StoredFile):
    """What a directory that is gone on with was begun with."""

    remedy: ClassVar[str] = "choose another directory"
    schema_version: int = SCHEMA_VERSION
    config_hash: str
    config: dict[str, Any] = {}
    machine: dict[str, Any] | None = None
    """What must be the same for figures to compare."""


class TimedPlanFile(PlanFile):
    seconds: float = 0.0
    """Of every call so far."""


class TrialFile(StoredFile):
    """trial.json: that a trial has ended, and how long it took."""

    remedy: ClassVar[str] = "remove its directory, and the trial runs again"
    seconds: float = 0.0
