"""The configurations that come with bert-dp, and how a name is found among them."""

from __future__ import annotations

import difflib
from pathlib import Path

from bert_dp.config.error import ConfigError


def shipped_configs() -> Path:
    """Their directory: in the wheel, or beside the source."""
    root = Path(__file__).parents[2]
    packaged = root / "launcher" / "configs"
    return packaged if packaged.is_dir() else root / "configs"


def find_config(name: str, folder: Path = Path()) -> Path:
    """A path (from `folder`), else the shipped configuration of that name. Raises ConfigError."""
    if not name:
        raise ConfigError(["CONFIG: is empty; name a file or a configuration that `bert-dp configs` lists"])
    path = folder / Path(name).expanduser()
    if path.exists() and not path.is_dir():  # a run directory may bear the name of its configuration
        return path
    names = [file.stem for file in sorted(shipped_configs().glob("*.yaml"))]
    plain = Path(name)
    if plain.parent.name in ("", "configs") and plain.stem in names:
        return shipped_configs() / f"{plain.stem}.yaml"
    if path.exists():  # a directory, which the reader refuses
        return path
    close = difflib.get_close_matches(plain.stem, names, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError([f"{name}: no such file or shipped configuration ({', '.join(names)}){hint}"])
