"""Where text comes from: files, globs, directories, the hub and the documentation in CPython. Torch-free.

A document is one non-empty line of a text file, one JSONL record's or Parquet row's `text`, one row of a hub
data set, one docstring or one help topic of CPython. Nothing larger than one document, one chunk or one
Parquet row group is held. The order is that of the arguments; a glob or directory is read sorted by path.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import importlib
import json
import lzma
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bert_dp.config import ConfigError, install_command
from bert_dp.config.stored import sha256
from bert_dp.corpus import builtin

TEXT_KEY = "text"  # field of a JSONL record, column of a Parquet file or hub data set
MAX_DOCUMENT_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
ZSTD_HEADER_BYTES = 18  # the longest header of a frame
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # of its magic number; the first byte is 0x50 to 0x5f
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


@dataclasses.dataclass(frozen=True)
class Source:
    """One file (path set), `hub:NAME[:CONFIG]`, or `builtin:VERSION`."""

    name: str
    path: Path | None = None


def resolve(sources: Sequence[str]) -> list[Source]:
    """Expand globs and directories. Raises ConfigError with every source that matches nothing."""
    found: list[Source] = []
    issues: list[str] = []
    for item in sources:
        if item == "builtin":
            found.append(Source(f"builtin:cpython-{platform.python_version()}"))
        elif item.startswith("hub:"):
            found.append(Source(item))
        else:
            paths = _expand(item)
            found += [Source(str(path), path) for path in paths]
            issues += [f"data.sources: {path} is not a regular file" for path in paths if not path.is_file()]
            if not paths:
                issues.append(
                    f"data.sources: {item!r} matches no file; check the path (relative to {Path.cwd()})"
                )
    if not sources:
        issues.append("data.sources: is empty; name a file, a glob or `builtin`")
    if issues:
        raise ConfigError(issues)
    return found


def _expand(item: str) -> list[Path]:
    path = Path(item).expanduser()
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        return sorted(p for p in inside if _suffixes(p)[0] in FORMATS)
    if path.exists():
        return [path]
    return sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())


def identity(source: Source) -> dict[str, Any]:
    """What changes when the source changes, without reading it: name, bytes, mtime. Raises ConfigError."""
    if source.path is None:
        return {"name": source.name}
    try:
        stat = source.path.stat()
    except OSError as error:
        raise ConfigError([f"{source.path}: cannot be read ({error.strerror})"]) from None
    return {"name": str(source.path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def file_hash(path: Path) -> str:
    """Hex SHA-256 of a file's bytes. Raises ConfigError when it cannot be read."""
    if path.exists() and not path.is_file():
        raise ConfigError([f"{path}: not a regular file; name one"])
    try:
        return sha256(path)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None


def documents(source: Source) -> Iterator[str]:
    """The documents of a source, in order; blank ones are left out.

    Raises ConfigError naming file, line (or row) and a fix for corrupt, empty, binary or non-UTF-8 input.
    """
    if source.path is None:
        texts = builtin.documents() if source.name.startswith("builtin:") else _hub(source.name)
    else:
        reader = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}[
            FORMATS.get(_suffixes(source.path)[0], "text")
        ]
        texts = reader(source.path)
    empty = True
    for text in texts:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise ConfigError([f"{source.name}: holds no text; remove it from data.sources"])


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional package. Raises ConfigError naming the extra when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError([f"{what} needs {package}; {install_command(extra)}"]) from None


def _suffixes(path: Path) -> tuple[str, str]:
    """(format, compression) suffixes: corpus.jsonl.gz -> (".jsonl", ".gz")."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return (Path(path.stem).suffix if compression else path.suffix).lower(), compression


def _text(path: Path) -> Iterator[str]:
    return (line for _, line in _lines(path))


def _jsonl(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"{path}: line {number} is not JSON ({error}); one object a line"]) from None
        text = record.get(TEXT_KEY) if isinstance(record, dict) else None
        if not isinstance(text, str):
            got = f"keys {sorted(record)[:8]}" if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                [f"{path}: line {number} has no string {TEXT_KEY!r} (got {got}); rename the key"]
            )
        if "\\u" in line:
            _check_surrogates(text, f"{path}: line {number}")
        yield text


def _check_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = ascii(text[error.start])
        raise ConfigError([f"{where} holds a lone surrogate {bad}, which is not text; remove it"]) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without its line end)."""
    number, rest = 0, b""
    for chunk in _chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            yield number, _decode(path, number, line)
        if len(rest) > MAX_DOCUMENT_BYTES:
            limit = f"{MAX_DOCUMENT_BYTES // 2**20} MiB"
            raise ConfigError(
                [f"{path}: line {number + 1} is longer than {limit}; a line is one document, split it"]
            )
    if rest:
        yield number + 1, _decode(path, number + 1, rest)


def _decode(path: Path, number: int, line: bytes) -> str:
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
    if b"\0" in line:
        at = line.index(b"\0") + 1
        known = ", ".join((*FORMATS, *COMPRESSIONS))
        raise ConfigError(
            [f"{path}: line {number}, byte {at} is zero: binary data, not text; known suffixes: {known}"]
        )
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        at, fix = error.start + 1, "convert it, for example with iconv -f latin1 -t utf-8"
        raise ConfigError(
            [f"{path}: line {number}, byte {at} is not UTF-8 (0x{line[error.start]:02x}); {fix}"]
        ) from None


def _chunks(path: Path) -> Iterator[bytes]:
    compression = _suffixes(path)[1]
    try:
        with path.open("rb") as raw:
            if compression == ".zst":
                yield from _zstd_chunks(path, raw)
                return
            file: Any = raw
            if compression == ".gz":
                file = gzip.GzipFile(fileobj=raw)
            elif compression == ".xz":
                file = lzma.LZMAFile(raw)  # noqa: SIM115 (closed with raw)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError([f"{path}: corrupt or cut {compression} file ({error}); fetch it again"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None


def _zstd_chunks(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    zstandard = require("zstandard", "zstd", f"{path}: reading .zst")
    try:
        while head := raw.read(ZSTD_HEADER_BYTES):  # a file is one or more frames
            if head[1:4] == ZSTD_SKIPPABLE and head[0] >> 4 == 5:
                raw.seek(8 + int.from_bytes(head[4:8], "little") - len(head), os.SEEK_CUR)
                continue
            size = zstandard.frame_header_size(head)
            raw.seek(size - len(head), os.SEEK_CUR)
            frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(head[:size])
            for block in _zstd_blocks(raw):
                yield frame.decompress(block)
            if zstandard.get_frame_parameters(head).has_checksum:
                yield frame.decompress(raw.read(4))
            if not frame.eof:
                raise zstandard.ZstdError("the last frame does not end")
    except zstandard.ZstdError as error:
        raise ConfigError([f"{path}: corrupt or cut .zst file ({error}); fetch it again"]) from None


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """The blocks of a frame after its header (RFC 8878, 3.1.1.2), up to the last or the end of the file.

    Each unpacks to 128 KiB at most, while a call of the decompressor returns all that its input holds, which
    may be 30 000 times as much.
    """
    last = False
    while not last and len(header := raw.read(3)) == 3:
        word = int.from_bytes(header, "little")
        last, is_repeated_byte, size = bool(word & 1), word >> 1 & 3 == 1, word >> 3
        yield header + raw.read(1 if is_repeated_byte else size)


def _parquet(path: Path) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "parquet", f"{path}: reading Parquet")
    arrow = require("pyarrow", "parquet", f"{path}: reading Parquet")
    with (
        tempfile.TemporaryFile() as plain
    ):  # Parquet is read from its end, so a compressed one is unpacked first
        file: Any = path
        if _suffixes(path)[1]:
            for chunk in _chunks(path):
                plain.write(chunk)
            plain.seek(0)
            file = plain
        row = 0
        try:
            table = parquet.ParquetFile(file)
            if TEXT_KEY not in table.schema_arrow.names:
                names = table.schema_arrow.names[:8]
                raise ConfigError([f"{path}: no column {TEXT_KEY!r} (got {names}); rename the column"])
            for batch in table.iter_batches(batch_size=1000, columns=[TEXT_KEY]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        got = type(text).__name__
                        raise ConfigError(
                            [f"{path}: row {row}: {TEXT_KEY!r} is {got}, not a string; drop the row"]
                        )
                    yield text
        except ConfigError:
            raise
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError([f"{path}: corrupt Parquet after row {row} ({why}); fetch it again"]) from None


def _hub(name: str) -> Iterator[str]:
    """`hub:NAME[:CONFIG]`: column `text` of split `train`, streamed through `datasets`."""
    datasets = require("datasets", "hub", name)
    _, _, rest = name.partition(":")
    repository, _, config = rest.partition(":")
    row = 0
    try:
        for record in datasets.load_dataset(repository, config or None, split="train", streaming=True):
            row += 1
            text = record.get(TEXT_KEY)
            if not isinstance(text, str):
                raise ConfigError(
                    [f"{name}: row {row} has no string {TEXT_KEY!r} (got keys {sorted(record)[:8]})"]
                )
            yield text
    except ConfigError:
        raise
    except Exception as error:  # the hub, the network and every data format raise their own
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            [f"{name}: {type(error).__name__} after row {row}: {why}; check the name and network"]
        ) from None
