"""Print to the console or to stderr, without control characters and without the values of secrets."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import files

if TYPE_CHECKING:
    from rich.console import Console

Log = Callable[[str], None]
PIPE_COLUMNS = 1000  # width of output to a file or a pipe
PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}  # options of `show` for plain text


def console() -> Console:
    """Create a console for stdout. Characters that stdout cannot encode become question marks. Output to a
    file or a pipe is not wrapped unless COLUMNS is set."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    wraps = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if wraps else PIPE_COLUMNS)


def show(console: Console, item: Any, **options: Any) -> None:
    """Print text or a rich object. If stdout is closed, discard all output, so that the run continues."""
    try:
        console.print(files.printable(item) if isinstance(item, str) else item, **options)
        console.file.flush()
    except (OSError, ValueError, SystemExit):  # rich raises SystemExit on a broken pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(text: str) -> None:
    """Write text to stderr, unless stderr is closed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{files.printable(text)}\n")
        sys.stderr.flush()


def logger(console: Console, as_json: bool) -> Log:
    """Return a function that prints a line to stderr if stdout carries JSON, else to the console."""

    def log(line: str) -> None:
        if as_json:
            print_error(line)
        else:
            show(console, line, **PLAIN)

    return log


def runnable(command: str) -> str:
    """Replace `bert-dp` in a command with its absolute path, unless the shell would find the same program."""
    own, found = Path(sys.executable).with_name("bert-dp"), shutil.which("bert-dp")
    if not command.startswith("bert-dp ") or (found and own.exists() and os.path.samefile(found, own)):
        return command
    program = [str(own)] if own.exists() else [sys.executable, "-P", "-m", "launcher"]
    return shlex.join(program) + command.removeprefix("bert-dp")


def masked_command(argv: Sequence[str]) -> list[str]:
    """Mask secrets in `argv`, such as abc in `--token=abc`, `TOKEN=abc`, `--api-key abc` or `Token: abc`."""
    secrets = files.secret_values(os.environ)
    shown = []
    for before, item in zip(("", *argv), argv, strict=False):
        named = re.match(r"([^=:\s]+)(=|:\s*)(.+)", item, re.DOTALL)
        if named and files.is_secret(named[1]):
            item = f"{named[1]}{named[2]}{files.REDACTED}"
        elif re.fullmatch(r"-[^=]*", before) and files.is_secret(before) and item[:2] != "--":
            item = files.REDACTED
        shown.append(files.hide(item, secrets))
    return shown
