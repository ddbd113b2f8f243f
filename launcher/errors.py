"""How a command line ends that went wrong: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

from bert_dp.config import ConfigError, plain_message
from launcher.log import complain

DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# errors of the system -> exit code, and what to do
SYSTEM_ERRORS = (
    (
        (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
        (2, "; name another one, or mend its rights"),
    ),
    (DISK_FAILED, (1, "; make room, or name another place, and run the command again")),
    (
        (errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
        (1, ": a limit of this process; see `ulimit -a`"),
    ),
)


@contextlib.contextmanager
def told_by_option(options: Mapping[str, str]) -> Iterator[None]:
    """A ConfigError of a setting becomes one of the option that gave it. `options`: setting -> option."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [dataclasses.replace(i, setting=options.get(i.setting, i.setting)) for i in error.issues]
        ) from None


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command line of typer's. What goes wrong is told on stderr; a traceback only of what nobody
    foresaw."""
    try:
        if not_utf8 := [a for a in sys.argv[1:] if any("\ud800" <= c <= "\udfff" for c in a)]:
            raise ConfigError([f"argument {a!a} is not UTF-8" for a in not_utf8])  # no file could hold it
        return command() or 0
    except ConfigError as error:
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"issues": [issue.to_json() for issue in error.issues]}) + "\n")
        for issue in error.issues:
            complain(f"error: {' '.join(str(issue).splitlines())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _system_error(error)
    except MemoryError:
        complain("error: no memory is left for this process; free some, or raise `ulimit -v`")
        return 1
    except typer.BadParameter as error:
        complain(_bad_parameter(error))
        return 2
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's, of a wrong command line
            complain(_usage_error(error))
            return int(error.exit_code)
        complain(traceback.format_exc().rstrip())
        return 1


def _system_error(error: OSError) -> int:
    """One line for what the machine refuses; the exit code."""
    for numbers, (code, advice) in SYSTEM_ERRORS:
        if error.errno in numbers:
            path = f"{error.filename}: " if error.filename else ""
            complain(f"error: {path}{error.strerror}{advice}")
            return code
    complain(traceback.format_exc().rstrip())
    return 1


def _usage_error(error: Any) -> str:
    """One line of a wrong command line; the help where a group of verbs stands alone."""
    shown = io.StringIO()
    error.show(shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue().rstrip()
    return f"error: {error.format_message().rstrip('.')}; see `{_verb(error)} --help`"


def _bad_parameter(error: typer.BadParameter) -> str:
    """One line that names the option or argument; typer has no words for one that is missing."""
    option = error.param.opts[0] if error.param is not None else "bert-dp"
    shown, message = option if option.startswith("-") else option.upper(), plain_message(error.message)
    if not message:
        return f"error: {shown} is missing; see `{_verb(error)} --help`"
    value, words = _given(option), re.split(r"[\s,']+", message)
    if message.startswith("Input should be") and value is not None and value not in words:
        message += f", got {value}"
    return f"error: {shown}: {message}"


def _verb(error: Any) -> str:
    return getattr(getattr(error, "ctx", None), "command_path", "bert-dp")


def _given(option: str) -> str | None:
    """What stands behind the last such option on the command line, which is the one that counts."""
    value = None
    for word, after in itertools.zip_longest(sys.argv, sys.argv[1:]):
        if word == option:
            value = after
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
