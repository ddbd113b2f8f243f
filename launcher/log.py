"""What a verb prints: its lines on the console or on stderr, safe for a terminal and without secrets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bert_dp import record
from launcher.redact import ordinary_secrets, secrets

if TYPE_CHECKING:
    from rich.console import Console

Log = Callable[[str], None]
PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}


def show(console: Console, what: Any, **options: Any) -> None:
    """Print; a reader that has gone away must not end the run."""
    try:
        console.print(printable(what) if isinstance(what, str) else what, **options)
        console.file.flush()
    except (OSError, ValueError, SystemExit):  # rich answers a broken pipe with SystemExit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Foreign text for a terminal: without control characters, and without the secrets that we were given."""
    return record.safe(record.hide(text, secrets(sys.argv)))


def complain(text: str) -> None:
    """Write lines to stderr."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def warn_of_ordinary_secrets() -> None:
    """Say which secrets of the environment cannot be hidden; once, at the start of a verb that runs ranks."""
    for line in ordinary_secrets():
        complain(f"warning: {line}")


def logger(console: Console, as_json: bool) -> Log:
    """What a verb says its lines with: on the console, or on stderr where stdout takes JSON."""

    def log(line: str) -> None:
        if as_json:
            complain(line)
        else:
            show(console, line, **PLAIN)

    return log
