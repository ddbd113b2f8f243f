"""Files of a folder or of a tar by their exact names, read into memory; nothing is unpacked. Torch-free."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from bert_dp.config import ConfigError
from bert_dp.config.stored import read_regular

MAX_FILE_BYTES = 2**28  # GLUE's largest has 79 MB
MAX_MEMBERS = 10_000  # that are looked at


def read_files(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes of those of `names` ("RTE/train.tsv") that a folder or tar holds; in a tar below any folder.

    Raises ConfigError for what is neither, is damaged, or is larger than MAX_FILE_BYTES.
    """
    try:
        if place.is_dir():
            existing = [name for name in names if (place / name).exists()]
            return {name: read_regular(place / name, MAX_FILE_BYTES) for name in existing}
        if place.is_file():
            return _members(place, names)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError):
        raise ConfigError([f"--data {place}: no tar, or a damaged one; fetch it again"]) from None
    except OSError as error:
        raise ConfigError([f"--data {place}: cannot be read ({error.strerror or error})"]) from None
    raise ConfigError([f"--data {place}: there is no such folder or tar"])


def _members(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    with tarfile.open(place) as archive:
        for count, member in enumerate(archive):
            if count == MAX_MEMBERS:
                raise ConfigError([f"--data {place}: more than {MAX_MEMBERS} files; name GLUE's own tar"])
            name = next((n for n in names if f"/{member.name}".endswith(f"/{n}")), None)
            if name is None or name in members or not member.isreg():
                continue
            if member.size > MAX_FILE_BYTES:
                raise ConfigError([f"--data {place}: {member.name} has {member.size} bytes; fetch it again"])
            file = archive.extractfile(member)
            assert file is not None
            members[name] = file.read()
            if len(members) == len(names):
                break
    return members
