"""Settings, command lines and whole run directories without their secrets."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.record import MIN_SECRET, REDACTED, hide, is_secret, secret_values

CHUNK = 2**20  # bytes of a log looked at together
# numbers alone, or checked before the run started (`setting_issues`): a changed byte would break a checkpoint
NEVER = ("checkpoints", "tensorboard", "metrics.jsonl", "evals.jsonl", "noise.jsonl", "steps", "config.yaml")


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values whose key holds TOKEN, KEY, SECRET or PASS, in any case; nested too."""
    return {key: _redact_value(key, value) for key, value in mapping.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token=abc`, `TOKEN=abc` and `--api-key abc` lose their values."""
    return _split_argv(argv)[0]


def secrets(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Value -> name of whatever no file of a run may hold: of the environment and of the command line."""
    given = {value: name for name, value in _split_argv(argv)[1] if len(value) >= MIN_SECRET}
    return secret_values(environ) | given


def setting_issues(settings: Mapping[str, str | None], hidden: Mapping[str, str]) -> list[str]:
    """Settings that hold a secret and would be written to config.yaml; one line each, without the secret."""
    return [
        f"{setting}: holds the value of {name}, by its name a secret, and the run directory would keep it; "
        f"use a path without it, or unset {name}"
        for setting, text in settings.items()
        for value, name in hidden.items()
        if text and value in text
    ]


def scrub(run_dir: Path, hidden: Iterable[str]) -> list[str]:
    """Overwrite the secrets in every file of `run_dir` but NEVER; returns what could not be, a line each.

    Once the ranks have ended: an error or a log may hold what a library printed. In a log every byte keeps
    its place, so no space is needed and no reader loses its own; JSON is written anew, its strings alone.
    """
    hidden = set(hidden)
    if not hidden:
        return []
    forms = {form for s in hidden for form in (s, json.dumps(s)[1:-1], html.escape(s))}
    ordered = sorted((form.encode("utf-8", "surrogateescape") for form in forms), key=len, reverse=True)
    failed = []
    for path in sorted(run_dir.rglob("*")):
        if path.relative_to(run_dir).parts[0] in NEVER:
            continue
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            if path.suffix == ".json" and (facts := record.read_json(path)) is not None:
                if (clean := _hide_all(facts, hidden)) != facts:
                    record.write_json(path, clean)
            else:
                _overwrite(path, ordered)
        except OSError as error:
            failed.append(f"{path}: may hold a secret ({error.strerror})")
    return failed


def _overwrite(path: Path, forms: Sequence[bytes]) -> None:
    """Every occurrence of `forms` (longest first), also across chunks."""
    pattern = re.compile(b"|".join(map(re.escape, forms)))
    rest, start, more, out = b"", 0, True, None  # `rest` begins at byte `start`
    with contextlib.ExitStack() as files:
        file = files.enter_context(path.open("rb"))
        while more:
            chunk = file.read(CHUNK)
            more, rest = bool(chunk), rest + chunk
            whole = len(rest) - len(forms[0]) + 1 if more else len(rest)  # what begins before it is not cut
            last = 0
            for match in pattern.finditer(rest) if any(form in rest for form in forms) else ():
                if match.start() >= whole:
                    break
                out = out or files.enter_context(path.open("r+b"))
                out.seek(start + match.start())
                last, length = match.end(), match.end() - match.start()
                out.write(REDACTED.encode()[:length].ljust(length, b"*"))
            keep = max(last, whole, 0)
            rest, start = rest[keep:], start + keep


def _hide_all(value: Any, hidden: Iterable[str]) -> Any:
    if isinstance(value, str):
        return hide(value, hidden)
    if isinstance(value, dict):
        return {hide(key, hidden): _hide_all(item, hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_all(item, hidden) for item in value]
    return value


def _split_argv(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The command line without its secrets, and these by name."""
    shown: list[str] = []
    values: list[tuple[str, str]] = []
    for item in argv:
        name, equals, value = item.partition("=")
        before = shown[-1] if shown else ""
        if equals and is_secret(name, value):
            values.append((name, value))
            item = f"{name}={REDACTED}"
        elif re.match(r"-[^=]*$", before) and is_secret(before, item) and not item.startswith("--"):
            values.append((before, item))
            item = REDACTED
        shown.append(item)
    return shown, values


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if is_secret(key, value):
        return REDACTED
    if isinstance(value, (list, tuple)):
        return [_redact_value("", v) for v in value]
    return value
