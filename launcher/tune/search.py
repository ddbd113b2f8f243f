"""What both searches share: the configuration of a trial and the files that are written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config, dump_config
from launcher import results
from launcher.results import TuneFile
from launcher.tune import FILE

TUNED = "tuned.yaml"


def with_settings(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The configuration with these settings of its sections; they are not checked."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def write(tune: TuneFile, tuned: Config | None, out: Path) -> None:
    """tune.json, and tuned.yaml of what was chosen. Raises OSError."""
    results.write(out / FILE, tune)
    if tuned is not None:
        record.write_text(out / TUNED, dump_config(tuned))


def train_command(out: Path) -> str:
    """Of a run that takes the choice."""
    return f"bert-dp train {shlex.quote(str(out / TUNED))}"
