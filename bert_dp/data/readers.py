"""Read documents from files, globs, directories, Hugging Face's hub and CPython's documentation. Torch-free.

In a text file, a document is a non-blank line or, with documents=blank_line, a block of lines between blank
lines. In a JSON file, a Parquet file or a hub data set, a document is the text of one record. In CPython's
documentation, it is a docstring or a help topic. The files of a glob or directory are sorted by path. At most
one document, JSON array, chunk or Parquet row group of a file is in memory at a time.
"""

import ast
import codecs
import dataclasses
import functools
import glob
import hashlib
import json
import lzma
import os
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bert_dp.config import BuildConfig, ConfigError, Issue, IssueKind
from bert_dp.config.errors import refusing, require, sha256

MAX_DOCUMENT_BYTES = 16 * 2**20
MAX_ARRAY_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
ZSTD_WINDOW_BYTES = 2**31  # zstd's largest window, which zstd --long=31 uses
PACKED_BYTES = 512  # bytes read at a time from a compressed file; they may decompress to 32,768 times as many
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = dict.fromkeys(("", ".txt", ".text", ".md"), "text")
FORMATS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl") | {".parquet": "parquet"}
"""File formats by suffix."""
# these directories are skipped: tests are not documentation, and site-packages differs between machines
NOT_DOCUMENTATION = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "__pycache__")
)


def suffixes(path: Path) -> tuple[str, str]:
    """Return a file's format and compression suffixes: (".jsonl", ".gz") for corpus.jsonl.gz."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return (Path(path.stem).suffix if compression else path.suffix).lower(), compression


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON records of a file, each with its position, such as "line 7". Raises ConfigError."""
    begin = next((text for chunk in _chunks(path) if (text := chunk.lstrip(b"\xef\xbb\xbf \t\r\n"))), b"")
    if begin.startswith(b"["):
        yield from _array(path)
        return
    for number, line in lines(path):
        if not line or line.isspace():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            message = f"line {number} is not JSON ({error})"
            raise _refused(path, "damaged", message, "write one object per line") from None


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSON array, each with its position, such as "record 7". Raises ConfigError."""
    data = bytearray()
    for chunk in _chunks(path):
        data += chunk
        if len(data) > MAX_ARRAY_BYTES:
            message = f"a JSON array may not exceed {MAX_ARRAY_BYTES // 2**20} MiB"
            hint = "write one object per line (JSONL): jq -c '.[]' OLD > NEW.jsonl"
            raise _refused(path, "out_of_range", message, hint)
    try:
        records = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, f"byte {error.start + 1}", data[error.start]) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, "damaged", f"not a JSON array ({error})") from None
    for number, record in enumerate(records, 1):
        yield f"record {number}", record


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (counted from 1) and text (without LF or CRLF) of each line. Raises ConfigError."""
    number, rest = 0, b""
    for chunk in _chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            yield number, _decode(path, number, line)
        if len(rest) > MAX_DOCUMENT_BYTES:
            message = f"line {number + 1} is longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"
            raise _refused(path, "out_of_range", message, "split its text into several lines or records")
    if rest:
        yield number + 1, _decode(path, number + 1, rest)


def _decode(path: Path, number: int, line: bytes) -> str:
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        text = line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, f"line {number}, byte {error.start + 1}", line[error.start]) from None
    if "\0" in text:
        raise _not_utf8(path, f"line {number}", 0)
    return text


def _not_utf8(path: Path, place: str, byte: int) -> ConfigError:
    hint = "convert the file: iconv -f UTF-16 (or LATIN1, CP1251, GB18030, ...) -t UTF-8 OLD > NEW"
    return _refused(path, "unsupported", f"{place} is not UTF-8 text (0x{byte:02x})", hint)


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed content of a file in non-empty chunks. Raises ConfigError."""
    compression = suffixes(path)[1]
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError)
    make_stream: Callable[[], Any] = lzma.LZMADecompressor
    if compression == ".gz":
        make_stream = functools.partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
    elif compression == ".zst":
        zstandard = require("zstandard", "zstd", f"{path}: reading .zst")
        damage = (EOFError, zstandard.ZstdError)
        make_stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj
    padding = b"" if compression == ".zst" else b"\0"
    chunk = bytearray()  # filled to CHUNK_BYTES, because joining a long line from many small chunks is slow
    try:
        with path.open("rb") as raw:
            whole = iter(lambda: raw.read(CHUNK_BYTES), b"")
            for piece in _unpacked(raw, make_stream, padding) if compression else whole:
                chunk += piece
                if len(chunk) >= CHUNK_BYTES:
                    yield bytes(chunk)
                    chunk.clear()
        if chunk:
            yield bytes(chunk)
    except damage as error:
        raise _refused(path, "damaged", f"corrupt or truncated {compression} file ({error})") from None
    except OSError as error:
        raise _refused(path, "not_found", f"cannot be read ({error.strerror})", None) from None


def _unpacked(raw: BinaryIO, make_stream: Callable[[], Any], padding: bytes) -> Iterator[bytes]:
    """Decompress a file's streams; skip `padding` between them. Raises EOFError if the last is truncated."""
    # lzma's and zstandard's own readers stop silently at a damaged second stream or at a truncated last one
    stream: Any = None
    while data := raw.read(PACKED_BYTES):
        while stream is not None or (data := data.lstrip(padding) if padding else data):
            stream = stream or make_stream()
            yield stream.decompress(data)
            if not stream.eof:
                break
            data, stream = stream.unused_data, None
    if stream is not None:
        raise EOFError("the last stream is incomplete")


def _refused(path: Path, kind: IssueKind, message: str, hint: str | None = "get a new copy") -> ConfigError:
    return ConfigError([Issue(str(path), kind, message, hint=hint)])


def parquet_records(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its position, such as "row 7". A row contains the existing columns among
    `keys`. If the first key has no column, a row contains all columns, so that error messages can list them.
    The key a.b selects column a if no column is called a.b. Raises ConfigError for a damaged file."""
    parquet = require("pyarrow.parquet", "parquet", f"{path}: reading Parquet")
    arrow = require("pyarrow", "parquet", f"{path}: reading Parquet")
    row = 0
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        columns = [key if key in names else key.partition(".")[0] for key in keys]
        known = [*dict.fromkeys(column for column in columns if column in names)]
        for batch in table.iter_batches(batch_size=1000, columns=known if columns[0] in names else None):
            for record in batch.to_pylist():
                row += 1
                yield f"row {row}", record
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"cannot be read as Parquet after row {row}: corrupt or compressed as a whole ({reason})"
        raise _refused(path, "damaged", message) from None


def hub_records(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of the data set hub:NAME[:CONFIG], each with its position, such as "row 7".
    Class numbers are replaced with class names, and missing labels with None. Raises ConfigError."""
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
    except Exception as error:  # the hub, the network and every data format raise different exceptions
        message = f"{type(error).__name__} after row {row}: {' '.join(str(error).split())[:300]}"
        raise ConfigError([Issue(name, "not_found", message, hint="check the name and connection")]) from None


@functools.cache
def builtin_documents() -> tuple[str, ...]:
    """Return the standard library's docstrings and help topics, about 2 MB, without executing its files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the library contains invalid escape sequences
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
            elif isinstance(node, ast.Dict) and path.name == "topics.py":
                values = [value.value for value in node.values if isinstance(value, ast.Constant)]
                texts += [value for value in values if isinstance(value, str)]
    if sum(map(len, texts)) < 100_000:
        message = f"builtin: {root} does not contain the standard library's sources"
        raise ConfigError([Issue("data.sources", "not_found", message, hint="pass a text file instead")])
    return tuple(texts)


ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Source:
    """Text source: a file (at `path`), hub:NAME[:CONFIG] or builtin:VERSION."""

    name: str
    path: Path | None = None
    format: str = "text"
    """Format of a file: text, jsonl or parquet."""
    text_field: str = "text"
    """Key of the text in a record or row, or a path of nested keys such as a.b."""
    documents: str = "line"
    """Document separator in a text file: line = the end of each line; blank_line = a blank line."""


def resolve(sources: Sequence[str], options: BuildConfig, out: Path | None = None) -> list[Source]:
    """Expand globs and directories; in a directory, skip `out`, which may contain an earlier build. Raises
    one ConfigError for all sources that match no file, are not regular files or have an unknown suffix."""
    of_format = None if options.source_format == "auto" else options.source_format
    resolved: list[Source] = []
    issues: list[Issue] = []
    for item in sources:
        if item == "builtin" or item.startswith("hub:"):
            name = f"builtin:cpython-{platform.python_version()}" if item == "builtin" else item
            resolved.append(Source(name, text_field=options.text_field))
            continue
        paths = _expand(item, out, every_suffix=of_format is not None)
        if not paths:
            hint = f"check the path (relative to {Path.cwd()})"
            issues.append(Issue("data.sources", "not_found", f"{item!r} matches no file", item, hint=hint))
        for path in paths:
            format = of_format or FORMATS.get(suffixes(path)[0])
            if not path.is_file():
                message = f"{path} is not a regular file"
                issues.append(Issue("data.sources", "unsupported", message, str(path)))
            elif format is None:
                message = f"{path} has the unknown suffix {suffixes(path)[0]}"
                hint = (
                    f"convert it to one of {', '.join(filter(None, FORMATS))}, or set the format: --format "
                    "text (data.build.source_format) reads raw lines, including headers, ids and quotes"
                )
                other = "data.build.source_format"
                issues.append(Issue("data.sources", "unknown", message, str(path), other, hint))
            else:
                resolved.append(Source(str(path), path, format, options.text_field, options.documents))
    if issues:
        raise ConfigError(issues)
    return resolved


def _expand(item: str, out: Path | None, *, every_suffix: bool) -> list[Path]:
    """Return the files matched by `item`, a path, glob or directory. In a directory, skip hidden files, files
    in `out` unless the directory is `out`, and files with an unknown suffix unless `every_suffix` is set."""
    path = Path(os.path.expanduser(item))
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(path)}"]
        known = [p for p in files if every_suffix or suffixes(p)[0] in FORMATS]
        if out is not None and out != path.resolve():
            known = [p for p in known if not p.resolve().is_relative_to(out)]
        return sorted(known)
    if path.exists():
        return [path]
    return sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())


def identity(source: Source) -> dict[str, Any]:
    """Return the name of a source and, for a file, its size and modification time. Raises ConfigError."""
    return {"name": source.name} if source.path is None else file_identity(source.path)


def file_identity(path: Path) -> dict[str, Any]:
    """Return the path, size and modification time of a file. Raises ConfigError."""
    with refusing(str(path)):
        stat = path.stat()
    return {"name": str(path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def file_hash(path: Path) -> str:
    """Return the hex SHA-256 of a regular file. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError([Issue(str(path), "unsupported", "not a regular file", hint="pass a regular file")])
    with refusing(str(path)):
        return sha256(path)


def documents(source: Source) -> Iterator[str]:
    """Yield the non-blank documents of a source, in order. Raises ConfigError for corrupt, empty, binary or
    non-UTF-8 input. The error names the file and the line or row, and suggests a fix."""
    name, key = source.name, source.text_field
    texts: Iterable[str]
    if name.startswith("builtin:"):
        texts = builtin_documents()
    elif source.path is None or source.format != "text":
        texts = (text_of(record, key, name, place) for place, record in records(source, [key]))
    elif source.documents == "blank_line":
        texts = _blocks(source.path)
    else:
        texts = (line for _, line in lines(source.path))
    empty = True
    for text in texts:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise ConfigError([Issue(name, "missing", "contains no text", hint="omit it")])


def records(source: Source, keys: Sequence[str], split: str = "train") -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSON file, a Parquet file (columns `keys`) or a split of a hub data set, each
    with its position, such as "line 7". Raises ConfigError."""
    if source.path is None:
        return hub_records(source.name, split)
    return parquet_records(source.path, keys) if source.format == "parquet" else json_records(source.path)


def value_of(record: Any, key: str) -> Any:
    """Return a record's value for a key or a path of keys such as a.b. Return ABSENT if there is none."""
    if not isinstance(record, dict):
        return ABSENT
    if key in record:
        return record[key]
    outer, _, inner = key.partition(".")
    return value_of(record.get(outer), inner)


def text_of(record: Any, key: str, name: str, place: str, fix: str = "") -> str:
    """Return a record's text. Raises ConfigError (with `name`, `place` and hint `fix`) if there is none."""
    text = value_of(record, key)
    if not isinstance(text, str):
        kind: IssueKind = "missing" if text is ABSENT else "wrong_type"
        got = type(record if text is ABSENT else text).__name__
        if text is ABSENT and isinstance(record, dict):
            got = f"keys {sorted(record)[:8]}"
        message = f"{place} has no string for the key {key!r} (got {got})"
        fix = fix or "set --text-key (data.build.text_field) to the key of the text"
        raise ConfigError([Issue(name, kind, message, key, hint=f"{fix}, or drop the record")])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{place} contains a lone surrogate {text[error.start]!a}, which is not text"
        raise ConfigError([Issue(name, "damaged", message, hint="remove it")]) from None
    return text


def _blocks(path: Path) -> Iterator[str]:
    """Yield each block of lines between blank lines as one text."""
    block: list[str] = []
    size = 0  # in characters
    for number, line in lines(path):
        if line and not line.isspace():
            block.append(line)
            size += len(line)
        elif block:
            yield "\n".join(block)
            block, size = [], 0
        if size > MAX_DOCUMENT_BYTES:
            message = f"no blank line in the {MAX_DOCUMENT_BYTES} characters before the end of line {number}"
            raise _refused(path, "out_of_range", message, "use documents=line (data.build.documents)")
    if block:
        yield "\n".join(block)


def document_key(text: str) -> int:
    """Return a 64-bit hash of a document, ignoring letter case and the kind and amount of white space."""
    return content_key(" ".join(text.lower().split()).encode())


def content_key(data: bytes) -> int:
    """Return a 64-bit hash of bytes, such as the token ids of a document."""
    digest = hashlib.blake2b(data, digest_size=8, key=bytes(8))
    return int.from_bytes(digest.digest(), "little")
