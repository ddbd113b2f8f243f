"""The HTML page of a search, from tune.json: self-contained, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import ConfigError
from launcher import builder
from launcher.builder import card
from launcher.redact import redact
from launcher.report.numbers import NA, format_count
from launcher.scaling import view
from launcher.scaling.view import Column
from launcher.tune import FILE, page_batch, page_lr

KINDS = {"batch": "micro batch", "lr": "learning rate"}
HASHES = (
    Column("config_hash", "configuration hash", view.format_word),
    Column("data_hash", "data hash", view.format_word),
)


def read(folder: Path) -> dict[str, Any]:
    """tune.json of `folder`. Raises ConfigError when it is not whole."""
    tune = record.read_json(folder / FILE)
    if tune is None:
        raise ConfigError([f"{folder / FILE}: not a JSON object; run `bert-dp tune` again to write it anew"])
    return tune


def html(tune: Mapping[str, Any]) -> str:
    """One self-contained page of tune.json of kind batch or lr, partial or whole."""
    of_kind = page_lr if tune.get("kind") == "lr" else page_batch
    body = [
        builder.sub(_machine(tune)),
        builder.sub(of_kind.method(tune)),
        *_ends(tune),
        *of_kind.body(tune),
        _settings(tune, of_kind.SETTINGS),
        builder.details("Configuration", builder.record_text(redact(view.mapped(tune.get("config"))))),
        builder.details(
            "Environment", builder.environment_text(redact(view.mapped(tune.get("environment"))))
        ),
    ]
    return builder.document(f"bert-dp: tuned {KINDS.get(str(tune.get('kind')), 'settings')}", body)


def write(tune: Mapping[str, Any], out: Path) -> None:
    """Write `html(tune)` to `out`, atomically. Raises OSError when `out` cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(out, html(tune))


def _machine(tune: Mapping[str, Any]) -> str:
    ranks, device = format_count(tune.get("ranks")), tune.get("device")
    trial = f"trials on {ranks} {'rank' if ranks == '1' else 'ranks'}{f' ({device})' if device else ''}"
    return builder.machine_line(view.mapped(tune.get("environment")), trial)


def _ends(tune: Mapping[str, Any]) -> list[str]:
    """What is wrong with the search or its record, a card each."""
    cards, status, kind = [], tune.get("status"), tune.get("kind")
    if status == "failed":
        cards.append(("fail", f"Failed: {tune.get('why') or 'cause not recorded'}"))
    elif status != "complete":
        cards.append(("warn", "Partial: stopped before its end; the same command goes on."))
    if str(kind) not in KINDS:
        cards.append(
            (
                "warn",
                f"tune.json is of kind {kind if kind is not None else NA}; this page reads batch and lr.",
            )
        )
    if (version := tune.get("schema_version", NA)) != 1:
        cards.append(("warn", f"tune.json has schema version {version}; this page reads version 1."))
    return [builder.verdict_card(level, text) for level, text in cards]


def _settings(tune: Mapping[str, Any], columns: tuple[Column, ...]) -> str:
    command = tune.get("command")
    rows = [(column.head, column.text(view.at(tune, column.path))) for column in (*columns, *HASHES)]
    asked = view.mapped(tune.get("settings"))
    rows += [(f"asked: {key}", view.format_word(value)) for key, value in asked.items() if value is not None]
    rows.append(("command", " ".join(map(str, view.listed(command))) or str(command or NA)))
    return card("Settings", builder.table([builder.row(name, [text]) for name, text in rows], "pairs"))
