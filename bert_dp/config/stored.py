"""What the models and readers of stored files share: a base, types, a regular file, and how errors read."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bert_dp.config.error import plain_message

CHUNK = 2**20  # bytes
MAX_JSON_BYTES = 2**28  # of a file: a manifest takes 20 KB for 4 GB of shards
MAX_PROBLEMS = 8  # that are told of one file
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredModel(BaseModel):
    """A part of a file: its numbers are finite and of the type they say, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)


def problem_lines(error: ValidationError) -> list[str]:
    """One line for each of the first problems of a file: where, what is wrong, and a value that is short."""
    lines = []
    for problem in error.errors()[:MAX_PROBLEMS]:
        path = ascii(".".join(map(str, problem["loc"])))[1:-1][:80]
        line = plain_message(problem["msg"])
        if isinstance(problem["input"], (str, int, float, type(None))):
            line += f", got {ascii(problem['input'])[:80]}"
        lines.append(f"{path}: {line}" if path else line)
    return lines


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else, because a pipe or a device may never
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
    """Hex digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
