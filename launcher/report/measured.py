"""What the reports of verbs share that measure by several runs in one directory."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.model import Section, Table, Verdict
from launcher.report.numbers import count_of, format_word
from launcher.report.parts import environment_text, folded, machine_line, other_version, record_text, words
from launcher.report.quantities import Quantity, rows
from launcher.results import Measurement


def subtitle(result: Measurement, method: Sequence[str], device: str | None = None) -> list[str]:
    """Where it ran, and `method`: what was measured, and how."""
    trial = f"trials on {count_of(result.ranks, 'rank')}{f' ({device})' if device else ''}"
    return [machine_line(result.environment, trial), " \u00b7 ".join(method)]


def status_verdicts(result: Measurement, file: str) -> list[Verdict]:
    """What is wrong with the measurement or its record, which is called `file`."""
    verdicts = []
    if result.status == "failed":
        verdicts.append(Verdict("fail", f"Failed: {result.why or 'cause not recorded'}"))
    elif result.status != "complete":
        verdicts.append(Verdict("warn", "Partial: stopped before its end; the same command goes on."))
    return [*verdicts, *other_version(file, result.schema_version)]


def settings_sections(
    result: Measurement, quantities: Sequence[Quantity], options: Sequence[tuple[str, object]] = ()
) -> list[Section]:
    """What was asked for, the configuration, the machine."""
    settings = [
        *rows(result, quantities),
        words("configuration hash", result.config_hash),
        words("data hash", result.data_hash),
        *[words(f"asked: {name}", format_word(value)) for name, value in options],
        words("command", " ".join(result.command)),
    ]
    texts = {"Configuration": record_text(result.config), "Environment": environment_text(result.environment)}
    return [
        Section("Settings", tables=[Table(settings)], console=False),
        *[folded(title, text) for title, text in texts.items()],
    ]
