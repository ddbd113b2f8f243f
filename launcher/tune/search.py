"""What both searches share: the configuration of a trial, how a search ends, and the files that it writes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config, dump_config
from launcher import results
from launcher.log import Log
from launcher.results import MeasureStatus, TuneFile
from launcher.run.trials import Stopped
from launcher.tune import FILE

TUNED = "tuned.yaml"


class SearchFailed(Exception):
    """Nothing could be measured; the text says why."""


@dataclasses.dataclass(frozen=True)
class Ending:
    status: MeasureStatus
    why: str | None = None
    exit_code: int = 0


def run_to_end(run: Callable[[], None], out: Path, log: Log) -> Ending:
    """How a search in `out` has ended."""
    try:
        run()
    except Stopped as stop:
        log(f"stopped: {out} holds what was measured; the same command goes on")
        return Ending("partial", exit_code=128 + stop.number)
    except SearchFailed as failed:
        return Ending("failed", str(failed), 1)
    return Ending("complete")


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
