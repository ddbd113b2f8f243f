"""Read and write result files, and define the pydantic models that several verbs share.

Times are in seconds, rates per second, memory in GiB (2^30 bytes), losses in nats; shares and efficiencies
are fractions. Intervals are 95 % confidence intervals, [low, high]. null means not measured.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import problem_lines, read_regular, refusing
from bert_dp.files.models import StoredFile, StoredModel

Count = Annotated[int, Field(gt=0, le=10**9)]
Positive = Annotated[float, Field(gt=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Point = Annotated[tuple[int | float, float | None], Field(strict=False)]
F = TypeVar("F", bound=StoredFile)


def read(path: Path, model: type[F]) -> F:
    """Read a result file. Raise ConfigError if it is missing or damaged."""
    return parse(load(path, model.hint), model, str(path))


def load(path: Path, hint: str) -> Any:
    """Read a JSON file. Raise ConfigError with `hint` if it is missing or damaged."""
    with refusing(str(path), hint=hint):
        return files.parse_json(read_regular(path, files.MAX_JSON_BYTES))


def find(path: Path, model: type[F]) -> F | None:
    """Read a result file; return None if it is absent or damaged."""
    with contextlib.suppress(ConfigError):
        return read(path, model)
    return None


def parse(data: Any, model: type[F], name: str) -> F:
    """Validate the contents of the file `name`. Raise ConfigError with the first problem found."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError([Issue(name, "damaged", problem_lines(error)[0], hint=model.hint)]) from None


def plain(part: StoredModel) -> dict[str, Any]:
    """Convert a pydantic model to a dict of JSON values, in field order."""
    return part.model_dump(mode="json")


def write(path: Path, file: StoredFile) -> None:
    """Write a result file atomically. Raise OSError if writing fails."""
    files.write_json(path, plain(file))


def to_json(found: object) -> str:
    """Format a result as JSON text for `--json`. Non-finite numbers become null."""
    return (
        json.dumps(files.finite(plain(found) if isinstance(found, StoredModel) else found), indent=1) + "\n"
    )


MeasureStatus = Literal["complete", "partial", "failed"]


class Measurement(StoredFile):
    """Result of a verb that measures several trials in one directory."""

    schema_version: Literal[1] = 1
    status: MeasureStatus = "complete"
    reason: str | None = None  # cause of status `failed`
    date: str | None = None
    seconds: float | None = None  # total duration of all trials, including those that earlier commands ran
    environment: dict[str, Any] = {}  # contents of environment.json
    config_hash: str | None = None
    config: dict[str, Any] = {}  # resolved configuration
    data_hash: str | None = None
    command: list[str] = []
    ranks: int | None = None  # ranks per trial


class TuneFile(Measurement):
    """Fields of tune.json that `tune batch` and `tune lr` share."""

    hint: ClassVar[str] = "repeat the `bert-dp tune` command with the same --out to rewrite it"


class PlanFile(StoredFile):
    """Plan that a measuring verb stores in its directory: the configuration and the options last used."""

    hint: ClassVar[str] = "choose another directory"
    schema_version: Literal[1] = 1
    config_hash: str
    config: dict[str, Any] = {}
    machine: dict[str, Any] | None = None  # hardware, versions and data; see job.identity
