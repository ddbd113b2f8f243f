"""Settings and command lines without their secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"
# The setting names `tokenizer*` and a numeric `tokens*` are no secrets.
SECRET = re.compile(r"token(?!iz)|key|secret|pass", re.IGNORECASE)


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values whose key holds TOKEN, KEY, SECRET or PASS, in any case; nested too."""
    return {key: _redact_value(key, value) for key, value in mapping.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token=abc`, `TOKEN=abc` and `--api-key abc` lose their values."""
    shown: list[str] = []
    for item in argv:
        name, equals, value = item.partition("=")
        before = shown[-1] if shown else ""
        if equals and _is_secret(name, value):
            item = f"{name}={REDACTED}"
        elif re.match(r"-[^=]*$", before) and _is_secret(before, item) and not item.startswith("--"):
            item = REDACTED
        shown.append(item)
    return shown


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if _is_secret(key, value):
        return REDACTED
    if isinstance(value, (list, tuple)):
        return [_redact_value("", v) for v in value]
    return value


def _is_secret(key: str, value: Any) -> bool:
    if not SECRET.search(key):
        return False
    count = isinstance(value, (int, float, type(None))) or re.fullmatch(r"[\d.e+_]+|null", str(value))
    return not ("tokens" in key.lower() and count)
