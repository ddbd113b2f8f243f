"""Read files that others made: regular, of limited size, one line for each problem. Base of their models."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bert_dp.config.errors import ConfigError, Issue, IssueKind, plain_message

CHUNK = 2**20  # bytes
MAX_JSON_BYTES = 2**28  # of a file: a manifest takes 20 KB for 4 GB of shards
MAX_PROBLEMS = 8  # listed of one file
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredModel(BaseModel):
    """Model a part of a file: numbers are finite and of their declared type, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)


def problem_lines(error: ValidationError) -> list[str]:
    """Describe the first problems of a file in a line each: place, problem, and a value that is short."""
    lines = []
    for problem in error.errors()[:MAX_PROBLEMS]:
        path = ascii(".".join(map(str, problem["loc"])))[1:-1][:80]
        line = plain_message(problem["msg"])
        if isinstance(problem["input"], (str, int, float, type(None))):
            line += f", got {ascii(problem['input'])[:80]}"
        lines.append(f"{path}: {line}" if path else line)
    return lines


@contextlib.contextmanager
def refusing(setting: str, what: str = "", hint: str | None = None) -> Iterator[None]:
    """Raise ConfigError for an OSError, ValueError or RecursionError of reading a file. `setting`: option or
    file; `what`: the file or its part, where `setting` does not name it."""
    problems: list[str]
    kind: IssueKind = "damaged"
    try:
        yield
        return
    except ConfigError:
        raise
    except OSError as error:
        kind, problems = "not_found", [f"cannot be read ({error.strerror or error})"]
    except ValidationError as error:
        problems = problem_lines(error)
    except RecursionError:
        problems = ["is nested too deep"]
    except ValueError as error:
        problems = [str(error)]
    prefix = f"{what}: " if what else ""
    raise ConfigError([Issue(setting, kind, prefix + problem, hint=hint) for problem in problems])


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file. Raises OSError for anything else, because a pipe or a device may never
    end, for one larger than `most_bytes`, and where the path is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or what is not UTF-8
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data, size = bytearray(), status.st_size
        while size <= most_bytes and (part := os.read(descriptor, CHUNK)):  # one read would allocate them all
            data += part
            size = max(size, len(data))  # it may grow meanwhile
    finally:
        os.close(descriptor)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return bytes(data)


def sha256(path: Path) -> str:
    """Return the hex digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
