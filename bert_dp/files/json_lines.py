"""Read JSON files and JSON lines, and write them atomically. Torch-free."""

import contextlib
import errno
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_dp.config.errors import MAX_JSON_BYTES, read_regular

READ_BYTES = 2**20  # maximum number of bytes that Tail reads at once
MAX_WHOLE = 2**64  # every valid count, size and time in ns is smaller


def append_line(path: Path, facts: Mapping[str, Any]) -> None:
    """Append one JSON line, completely or not at all. Non-finite numbers become null. Raises OSError."""
    line = (json.dumps(finite(dict(facts)), allow_nan=False) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)  # because readers stop at a truncated line
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a JSONL file's records up to the first line that is damaged or truncated, or lacks an integer
    `step`. Yield nothing if `path` is not a regular file. Raises OSError if the file cannot be read."""
    if not path.is_file():
        return
    with path.open("rb") as file, contextlib.suppress(ValueError):
        for line in file:
            facts = parse_json(line)
            if not (line.endswith(b"\n") and isinstance(facts, dict) and type(facts.get("step")) is int):
                return
            yield facts


class Tail:
    """Reader of the lines that are appended to a file. It splits lines longer than READ_BYTES, and reads
    a replaced file from the start. `skip_present`: skip the existing content."""

    def __init__(self, path: Path, *, skip_present: bool = False):
        self._path = path
        self._inode = self._offset = 0
        if skip_present and path.exists():
            status = path.stat()
            self._inode, self._offset = status.st_ino, status.st_size

    def lines(self) -> tuple[list[str], bool]:
        """Return the new lines and whether the file was replaced, or ([], False) if it is unreadable."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                replaced = self._inode not in (0, status.st_ino) or status.st_size < self._offset
                offset = 0 if replaced else self._offset
                file.seek(offset)
                data = file.read(READ_BYTES)
        except OSError:
            return [], False
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == READ_BYTES else 0)
        self._inode, self._offset = status.st_ino, offset + end
        text = data[:end].decode("utf-8", "replace").removesuffix("\n")
        return (text.split("\n") if end else []), replaced


def cut_back(path: Path, step: int) -> None:
    """Atomically remove the records after step `step`, and everything from the first damaged line on."""
    if path.exists():
        write_text(path, (json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step))


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically: readers see either the complete old file or the complete new file."""
    write_text(path, json.dumps(finite(data), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Write text (or its parts, in order) atomically: rename a temporary file in the same directory."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file `path`, or None if the file is missing or contains anything else."""
    try:
        data = parse_json(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def parse_json(text: bytes | str) -> Any:
    """Parse JSON in UTF-8. Raises ValueError for invalid JSON, for integers of MAX_WHOLE or more, and for
    32 or more levels of nesting."""
    try:
        data = json.loads(text if isinstance(text, str) else text.decode(), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    level = [data]
    for _ in range(32):
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        if not (level := [value for values in inside for value in values]):
            return data
    raise ValueError("nested too deeply")


def _whole_number(text: str) -> int:
    if len(text) > len(str(-MAX_WHOLE)) or abs(number := int(text)) >= MAX_WHOLE:
        raise ValueError(f"an integer of {len(text)} digits is too large")
    return number


def finite(value: Any) -> Any:
    """Return JSON values with every non-finite number replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
