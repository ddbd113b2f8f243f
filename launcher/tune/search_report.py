"""What the reports of both searches share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.redact import redact
from launcher.report.model import Section, Table, Verdict
from launcher.report.numbers import count_of, format_word
from launcher.report.parts import environment_text, folded, machine_line, other_version, record_text, words
from launcher.report.quantities import Quantity, rows
from launcher.results import TuneFile
from launcher.tune import FILE


def subtitle(tune: TuneFile, method: Sequence[str], device: str | None = None) -> list[str]:
    """Where it ran, and `method`: what was searched."""
    trial = f"trials on {count_of(tune.ranks, 'rank')}{f' ({device})' if device else ''}"
    return [machine_line(tune.environment, trial), " \u00b7 ".join(method)]


def ends(tune: TuneFile) -> list[Verdict]:
    """What is wrong with the search or its record."""
    verdicts = []
    if tune.status == "failed":
        verdicts.append(Verdict("fail", f"Failed: {tune.why or 'cause not recorded'}"))
    elif tune.status != "complete":
        verdicts.append(Verdict("warn", "Partial: stopped before its end; the same command goes on."))
    return [*verdicts, *other_version(FILE, tune.schema_version)]


def use(choice: object, folder: Path) -> str:
    """The command of a run that takes the choice, if there is one."""
    return f"bert-dp train {shlex.quote(str(folder / 'tuned.yaml'))}" if choice is not None else ""


def settings_sections(
    tune: TuneFile, quantities: Sequence[Quantity], asked: Sequence[tuple[str, object]] = ()
) -> list[Section]:
    """What was asked for, the configuration, the machine."""
    settings = [
        *rows(tune, quantities),
        words("configuration hash", tune.config_hash),
        words("data hash", tune.data_hash),
        *[words(f"asked: {name}", format_word(value)) for name, value in asked],
        words("command", " ".join(tune.command)),
    ]
    texts = {
        "Configuration": record_text(redact(tune.config)),
        "Environment": environment_text(redact(tune.environment)),
    }
    return [
        Section("Settings", tables=[Table(settings)], console=False),
        *[folded(title, text) for title, text in texts.items()],
    ]
