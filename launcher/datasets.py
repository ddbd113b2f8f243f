"""`bert-dp data`: options checked here, the work in `python -m bert_dp.corpus`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import ConfigError, resolve
from launcher import processes, report
from launcher.redact import secrets, setting_issues

MAX_PROCESSES = 4096

if TYPE_CHECKING:
    from rich.console import Console


def build(
    sources: Sequence[str],
    out: Path,
    *,
    vocab_size: int,
    sequence_length: int,
    tokenizer: str | None,
    overrides: Sequence[str],
    processes_: int | None,
    force: bool,
) -> int:
    """Returns the exit code. Raises ConfigError for an option that a run could not use."""
    from bert_dp.config import parse_overrides

    if processes_ is not None and not 1 <= processes_ <= MAX_PROCESSES:
        raise ConfigError([f"--processes: {processes_} is not a whole number of 1 to {MAX_PROCESSES}"])
    texts = {"SOURCES": " ".join(sources), "--out": str(out), "--tokenizer": tokenizer}
    if issues := setting_issues(texts, secrets(sys.argv)):  # the manifest names them
        raise ConfigError(issues)
    config = resolve(
        [
            {
                "data": {
                    "sources": list(sources),
                    "tokenizer": tokenizer,
                    "sequence_length": sequence_length,
                    "build": parse_overrides(overrides),
                },
                "model": {"vocab_size": vocab_size},
                "schedule": {"steps": 1},
            }
        ]
    )
    options = {
        "sources": list(sources),
        "out": str(out),
        "options": config.data.build.model_dump(mode="json"),
        "vocab_size": vocab_size,
        "sequence_length": sequence_length,
        "tokenizer": tokenizer,
        "processes": processes_,
        "force": force,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(options, file)
        file.flush()
        return processes.run_module(
            "bert_dp.corpus", ["build", file.name], stdout=processes.DEVNULL
        ).returncode


def inspect(directory: Path, *, as_json: bool, console: Console) -> int:
    """Returns 0, 1 when a hash differs, 2 when `directory` holds no shards."""
    code, facts = processes.capture_json("bert_dp.corpus", ["inspect", str(directory)])
    if facts is None:
        return code or 1
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        console.print(report.shards_table(facts))
    return code
