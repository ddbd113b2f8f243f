"""Read documents from files, globs, directories, the hub and the documentation in CPython. Torch-free.

A document is one non-empty line of a text file (or the lines between two blank ones), the text of one JSON
record, Parquet row or row of a hub data set, one docstring or one help topic of CPython. The order is that of
the arguments; a glob or directory is read sorted by path.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import BuildConfig, ConfigError, Issue, IssueKind
from bert_dp.config.stored import refusing, sha256
from bert_dp.corpus import builtin, readers
from bert_dp.corpus.readers import FORMATS, MAX_DOCUMENT_BYTES, suffixes

ABSENT = object()
KEY_FIX = "name the key that holds the text with --text-key (data.build.text_field)"


@dataclasses.dataclass(frozen=True)
class Source:
    """Name one file (path set), `hub:NAME[:CONFIG]`, or `builtin:VERSION`."""

    name: str
    path: Path | None = None
    format: str = "text"
    """Of a file: text, jsonl or parquet."""
    text_field: str = "text"
    """Of a record or row: the key of its text, or a path of nested keys such as a.b."""
    documents: str = "line"
    """What ends a document of a text file: line or blank_line."""


def resolve(
    sources: Sequence[str], options: BuildConfig | None = None, out: Path | None = None
) -> list[Source]:
    """Expand globs and directories; what a directory holds in `out`, an earlier build, is no source.

    Raises ConfigError with every source that matches nothing, is no regular file or has a format that is not
    known.
    """
    options = options or BuildConfig()
    of_format = None if options.source_format == "auto" else options.source_format
    resolved: list[Source] = []
    issues: list[Issue] = []
    for item in sources:
        if item == "builtin":
            resolved.append(Source(f"builtin:cpython-{platform.python_version()}"))
            continue
        if item.startswith("hub:"):
            resolved.append(Source(item, text_field=options.text_field))
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
                issues.append(_unknown_suffix(path))
            else:
                resolved.append(Source(str(path), path, format, options.text_field, options.documents))
    if not sources:
        hint = "name a file, a glob or `builtin`"
        issues.append(Issue("data.sources", "missing", "is empty", hint=hint))
    if issues:
        raise ConfigError(issues)
    return resolved


def _unknown_suffix(path: Path) -> Issue:
    message = f"{path} has the suffix {suffixes(path)[0]}, which is none of a known format"
    hint = (
        f"convert it to one of {', '.join(filter(None, FORMATS))}, or name its format: --format text "
        "(data.build.source_format) reads its lines as they are, header, ids and quotes too"
    )
    return Issue("data.sources", "unknown", message, str(path), "data.build.source_format", hint)


def _expand(item: str, out: Path | None, *, every_suffix: bool) -> list[Path]:
    """Find the files of a name, of a glob or of a directory: of a directory those with a known suffix, or
    all, but none in `out`."""
    path = Path(os.path.expanduser(item))
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
        known = [p for p in inside if every_suffix or suffixes(p)[0] in FORMATS]
        if out is not None and out != path.resolve():
            known = [p for p in known if not p.resolve().is_relative_to(out)]
        return sorted(known)
    if path.exists():
        return [path]
    return sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())


def _is_hidden(path: Path) -> bool:
    """Return True if the file or a folder above it has a name such as .git."""
    return any(part.startswith(".") for part in path.parts)


def identity(source: Source) -> dict[str, Any]:
    """Return what changes when the source changes, without reading it. Raises ConfigError."""
    return {"name": source.name} if source.path is None else file_identity(source.path)


def file_identity(path: Path) -> dict[str, Any]:
    """Return name, bytes and time of the last change of a file. Raises ConfigError."""
    with refusing(str(path)):
        stat = path.stat()
    return {"name": str(path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def file_hash(path: Path) -> str:
    """Return the hex SHA-256 of a regular file. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError([Issue(str(path), "unsupported", "not a regular file", hint="name one")])
    with refusing(str(path)):
        return sha256(path)


def documents(source: Source) -> Iterator[str]:
    """Yield the documents of a source, in order, without blank ones.

    Raises ConfigError naming file, line (or row) and a fix for corrupt, empty, binary or non-UTF-8 input.
    """
    empty = True
    for text in _texts(source):
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise ConfigError([Issue(source.name, "missing", "holds no text", hint="leave it out")])


def _texts(source: Source) -> Iterator[str]:
    if source.name.startswith("builtin:"):
        yield from builtin.documents()
    elif source.path is None or source.format != "text":
        for place, record in records(source, [source.text_field]):
            yield text_of(record, source.text_field, source.name, place)
    elif source.documents == "blank_line":
        yield from _blocks(source.path)
    else:
        yield from (line for _, line in readers.lines(source.path))


def records(
    source: Source,
    columns: Sequence[str],
    optional: Sequence[str] = (),
    *,
    split: str = "train",
    fix: str = KEY_FIX,
) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of a JSON or Parquet file or of a split of a hub data set. Raises ConfigError.

    Of Parquet only `columns` are read, and those of `optional` that it has; `fix`: what to do where it lacks
    one of `columns`.
    """
    if source.path is None:
        return readers.hub_records(source.name, split)
    if source.format == "parquet":
        return readers.parquet_records(source.path, columns, optional, fix)
    return readers.json_records(source.path)


def value_of(record: Any, key: str) -> Any:
    """Look up a key of a record, or a path of nested keys such as a.b; ABSENT where there is none. A key that
    holds dots itself goes first."""
    if not isinstance(record, dict):
        return ABSENT
    if key in record:
        return record[key]
    outer, _, inner = key.partition(".")
    return value_of(record.get(outer), inner)


def text_of(record: Any, key: str, name: str, place: str, fix: str = KEY_FIX) -> str:
    """Return the text of a record of the source `name`. Raises ConfigError for one that has none."""
    text = value_of(record, key)
    if not isinstance(text, str):
        kind: IssueKind = "missing" if text is ABSENT else "wrong_type"
        got = type(record if text is ABSENT else text).__name__
        if text is ABSENT and isinstance(record, dict):
            got = f"keys {sorted(record)[:8]}"
        message = f"{place} has no string {key!r} (got {got})"
        raise ConfigError([Issue(name, kind, message, key, hint=f"{fix}, or drop the record")])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{place} holds a lone surrogate {text[error.start]!a}, which is not text"
        raise ConfigError([Issue(name, "damaged", message, hint="remove it")]) from None
    return text


def _blocks(path: Path) -> Iterator[str]:
    """Yield the lines between two blank ones as one text."""
    block: list[str] = []
    size = 0  # characters
    for number, line in readers.lines(path):
        if line and not line.isspace():
            block.append(line)
            size += len(line)
        elif block:
            yield "\n".join(block)
            block, size = [], 0
        if size > MAX_DOCUMENT_BYTES:
            limit = f"{MAX_DOCUMENT_BYTES // 2**20} M characters"
            message = (
                f"more than {limit} up to line {number} without a blank line, which would end a document"
            )
            hint = "use documents=line (data.build.documents)"
            raise ConfigError([Issue(str(path), "out_of_range", message, hint=hint)])
    if block:
        yield "\n".join(block)
