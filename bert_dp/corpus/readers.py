"""What is in a file, compressed or not, or in a hub data set: lines of text, or records. Torch-free.

Nothing larger than one line, one record, one chunk or one Parquet row group is held.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import lzma
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bert_dp.config import ConfigError
from bert_dp.config.extras import require

ARRAY_MOVES = {("begin", "["): "first", ("first", "]"): "end", ("next", ","): "value", ("next", "]"): "end"}
"""What has been read of a JSON array, and a symbol that leads on; `first` and `value` await a record."""
BESIDE_SPACE = re.compile(r"[^ \t\r\n]")
MAX_DOCUMENT_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
HEAD_BYTES = 2**20  # of a text file, that decide what ends its lines
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
ENCODING_FIX = "convert it from its encoding: iconv -f LATIN1 (or CP1251, GB18030, ...) -t UTF-8 OLD > NEW"
ZSTD_WINDOW_BYTES = 2**31  # the largest that zstd --long=31 makes
ZSTD_HEADER_BYTES = 18  # the longest header of a frame
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # of its magic number; the first byte is 0x50 to 0x5f
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = {
    "": "text",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
"""Suffix -> what a file holds."""


def suffixes(path: Path) -> tuple[str, str]:
    """(format, compression) suffixes: corpus.jsonl.gz -> (".jsonl", ".gz")."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return (Path(path.stem).suffix if compression else path.suffix).lower(), compression


def encoding_hint(first_bytes: bytes) -> str:
    """Name UTF-16 or UTF-32 by the beginning of a file, with the command that converts it; else empty."""
    first_bytes = first_bytes[:4096]
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if first_bytes.startswith(mark)), "")
    zeros = {at % 2 for at, byte in enumerate(first_bytes) if byte == 0}
    # without a mark; both halves of a character may be zero, as U+4E00 is the Chinese one, but a few bytes
    # of binary data may be characters then
    orders = {(1,): ["LE"], (0,): ["BE"], (0, 1): ["LE", "BE"] if len(first_bytes) >= 32 else []}
    for order in [] if encoding else orders.get(tuple(sorted(zeros)), []):
        text = first_bytes[: len(first_bytes) // 2 * 2].decode(f"UTF-16{order}", "replace").rstrip("\ufffd")
        if "\ufffd" not in text and all(char.isprintable() or char.isspace() for char in text):
            encoding = f"UTF-16{order}"
            break
    return encoding and f"{encoding}, not UTF-8; convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) of JSON records: one on each line, or all in one array. Raises ConfigError."""
    begin = next((text for chunk in _chunks(path) if (text := chunk.lstrip(b"\xef\xbb\xbf \t\r\n"))), b"")
    is_array = begin.startswith(b"[")
    if is_array and (hint := encoding_hint(begin)):
        raise ConfigError([f"{path}: is {hint}"])
    yield from _array(path) if is_array else _records(path)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(which line, its record)."""
    for number, line in lines(path):
        if not line or line.isspace():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"{path}: line {number} is not JSON ({error}); one object a line"]) from None


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """(which record, itself) of an array of any length; about one chunk and one record are held."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    parse = json.JSONDecoder().raw_decode
    text, at, count, state = "", 0, 0, "begin"
    for chunk in itertools.chain(_chunks(path), [b""]):
        try:
            text, at = text[at:] + decode(chunk, final=not chunk), 0
        except UnicodeDecodeError as error:
            bad = f"0x{error.object[error.start]:02x}"
            raise ConfigError([f"{path}: not UTF-8 after record {count} ({bad}); {ENCODING_FIX}"]) from None
        while symbol := BESIDE_SPACE.search(text, at):
            at = symbol.start()
            if moved := ARRAY_MOVES.get((state, symbol[0])):
                state, at = moved, at + 1
                continue
            if state in ("next", "end"):
                raise ConfigError([f"{path}: no JSON after record {count}: got {text[at : at + 20]!r}"])
            try:
                record, at = parse(text, at)
            except RecursionError:
                raise ConfigError([f"{path}: record {count + 1} is nested too deep"]) from None
            except ValueError as error:
                if not chunk or len(text) - at > MAX_DOCUMENT_BYTES:
                    reason = f"record {count + 1} is not JSON, or cut ({error.args[0].split(':')[0]})"
                    raise ConfigError([f"{path}: {reason}"]) from None
                break  # the rest of the record is in the next chunk
            state, count = "next", count + 1
            yield f"record {count}", record
    if state != "end":
        raise ConfigError([f"{path}: the array does not end after record {count}; fetch it again"])


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without its end) of a text file, compressed or not. Raises ConfigError.

    A line ends with LF or CRLF; where the first HEAD_BYTES hold no LF, with a lone CR too.
    """
    number, rest = 0, b""
    for chunk in _with_line_feeds(_chunks(path)):
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


def _with_line_feeds(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Chunks of a file as they are; where its first HEAD_BYTES hold no LF, every CR and CRLF becomes LF."""
    head = b""
    while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    if b"\n" in head[:HEAD_BYTES]:
        yield head
        yield from chunks
        return
    rest = b""  # a CR whose LF may begin the next chunk
    for chunk in itertools.chain([head], chunks):
        data = rest + chunk
        rest = b"\r" if data.endswith(b"\r") else b""
        yield data.removesuffix(rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    yield b"\n" if rest else b""


def _decode(path: Path, number: int, line: bytes) -> str:
    if number == 1:
        if hint := encoding_hint(line):
            raise ConfigError([f"{path}: is {hint}"])
        line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
    if b"\0" in line:
        at = line.index(b"\0") + 1
        read = ", ".join((*filter(None, FORMATS), *COMPRESSIONS))
        raise ConfigError(
            [f"{path}: line {number}, byte {at} is zero: binary data, not text; known suffixes: {read}"]
        )
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        at = error.start + 1
        raise ConfigError(
            [f"{path}: line {number}, byte {at} is not UTF-8 (0x{line[error.start]:02x}); {ENCODING_FIX}"]
        ) from None


def _chunks(path: Path) -> Iterator[bytes]:
    compression = suffixes(path)[1]
    try:
        with path.open("rb") as raw:
            if compression == ".zst":
                yield from filter(None, _zstd_chunks(path, raw))
                return
            if compression == ".xz":
                yield from filter(None, _xz_chunks(raw))  # an empty chunk would end the file for a reader
                return
            file: Any = gzip.GzipFile(fileobj=raw) if compression == ".gz" else raw
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError([f"{path}: corrupt or cut {compression} file ({error}); fetch it again"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None


def _xz_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all streams of an .xz file.

    lzma.LZMAFile ends without an error at a second stream that is damaged, which would lose the rest.
    """
    stream: lzma.LZMADecompressor | None = None
    while data := raw.read(CHUNK_BYTES):
        while stream is not None or (data := data.lstrip(b"\0")):  # zeros may stand after a stream
            stream = stream or lzma.LZMADecompressor()
            yield stream.decompress(data, CHUNK_BYTES)
            data = b""
            if stream.eof:
                data, stream = stream.unused_data, None
            elif stream.needs_input:
                break
    if stream is not None:
        raise EOFError("the last stream does not end")


def _zstd_chunks(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    zstandard = require("zstandard", "zstd", f"{path}: reading .zst")
    try:
        while head := raw.read(ZSTD_HEADER_BYTES):  # a file is one or more frames
            if head[1:4] == ZSTD_SKIPPABLE and head[0] >> 4 == 5:
                raw.seek(8 + int.from_bytes(head[4:8], "little") - len(head), os.SEEK_CUR)
                continue
            size = zstandard.frame_header_size(head)
            raw.seek(size - len(head), os.SEEK_CUR)
            frame = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
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


def parquet_records(
    path: Path, keys: Sequence[str], optional: Sequence[str], fix: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) with the columns `keys`, and those of `optional` that the file has. The key a.b, where no
    column has that name, stands for the column a.

    Raises ConfigError for a column of `keys` that is not there (`fix`: what to do about it) and for a damaged
    file.
    """
    parquet = require("pyarrow.parquet", "parquet", f"{path}: reading Parquet")
    arrow = require("pyarrow", "parquet", f"{path}: reading Parquet")
    # Parquet is read from its end, so a compressed one is unpacked first
    with tempfile.TemporaryFile() as plain:
        file: Any = path
        if suffixes(path)[1]:
            for chunk in _chunks(path):
                plain.write(chunk)
            plain.seek(0)
            file = plain
        row = 0
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            column_of = {key: key if key in names else key.partition(".")[0] for key in (*keys, *optional)}
            if missing := [key for key in keys if column_of[key] not in names]:
                raise ConfigError([f"{path}: no column {missing[0]!r} (got {names[:8]}); {fix}"])
            columns = dict.fromkeys(column for column in column_of.values() if column in names)
            for batch in table.iter_batches(batch_size=1000, columns=[*columns]):
                for record in batch.to_pylist():
                    row += 1
                    yield f"row {row}", record
        except ConfigError:
            raise
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError([f"{path}: corrupt Parquet after row {row} ({why}); fetch it again"]) from None


def hub_records(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of `hub:NAME[:CONFIG]`, streamed through `datasets`; a class has its name, or null where
    it is not told. Raises ConfigError."""
    datasets = require("datasets", "hub", name)
    _, _, rest = name.partition(":")
    repository, _, config = rest.partition(":")
    row = 0
    try:
        rows = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        features = getattr(rows, "features", None) or {}
        classes = {key: feature.names for key, feature in features.items() if hasattr(feature, "names")}
        for record in rows:
            row += 1
            for key, names in classes.items():
                record[key] = None if record[key] in (None, -1) else names[record[key]]
            yield f"row {row}", record
    except Exception as error:  # the hub, the network and every data format raise their own
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            [f"{name}: {type(error).__name__} after row {row}: {why}; check the name and network"]
        ) from None
