"""Files of a folder or of a tar by their exact names, read into memory; nothing is unpacked. Torch-free."""

from __future__ import annotations

import contextlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_dp.config import ConfigError
from bert_dp.config.stored import read_regular

MAX_FILE_BYTES = 2**30  # GLUE's largest, MNLI's train.tsv, has some hundred MB, most of them parse trees
MAX_MEMBERS = 10_000  # that are looked at


def find_files(place: Path, names: Sequence[str]) -> list[str]:
    """Those of `names` ("RTE/train.tsv") that a folder or tar holds; in a tar below any folder.

    Raises ConfigError for what is neither, or is damaged.
    """
    with _told(place):
        if place.is_dir():
            return [name for name in names if (place / name).exists()]
        with tarfile.open(place) as archive:
            return [name for name, _ in _members(place, archive, names)]


def read_files(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes of those of `names` that `find_files` finds.

    Raises ConfigError as it does, and for one that is larger than MAX_FILE_BYTES.
    """
    with _told(place):
        if place.is_dir():
            return {name: read_regular(place / name, MAX_FILE_BYTES) for name in find_files(place, names)}
        with tarfile.open(place) as archive:
            members = _members(place, archive, names)
            return {name: _read(place, archive, member) for name, member in members}


@contextlib.contextmanager
def _told(place: Path) -> Iterator[None]:
    """What goes wrong with a folder or tar, as a ConfigError."""
    try:
        if not place.is_dir() and not place.is_file():
            raise ConfigError([f"--data {place}: there is no such folder or tar"])
        yield
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError):
        if zipfile.is_zipfile(place):
            raise ConfigError([f"--data {place}: is a zip; unpack it and name the folder"]) from None
        raise ConfigError([f"--data {place}: no tar, or a damaged one; fetch it again"]) from None
    except OSError as error:
        name = error.filename or place
        raise ConfigError([f"--data {name}: cannot be read ({error.strerror or error})"]) from None


def _members(
    place: Path, archive: tarfile.TarFile, names: Sequence[str]
) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The first regular file of each name."""
    left = set(names)
    for count, member in enumerate(archive):
        if count == MAX_MEMBERS:
            raise ConfigError([f"--data {place}: more than {MAX_MEMBERS} files; name GLUE's own tar"])
        name = next((n for n in left if f"/{member.name}".endswith(f"/{n}")), None)
        if name is not None and member.isreg():
            left.remove(name)
            yield name, member
        if not left:
            return


def _read(place: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_FILE_BYTES:
        raise ConfigError([f"--data {place}: {member.name} has {member.size} bytes; fetch it again"])
    file = archive.extractfile(member)
    assert file is not None
    return file.read()
