"""Exit codes and error lines of a command line that failed."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from bert_dp.config import ConfigError, Issue
from bert_dp.training.process import RunFailed
from launcher.job import ISSUES_FILE
from launcher.log import print_error

DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
LIMITS = (errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a typer command line and return its exit code.

    A failure is one line on stderr; an unexpected exception is shown with its traceback.
    """
    try:
        if not_utf8 := [a for a in sys.argv[1:] if any("\ud800" <= c <= "\udfff" for c in a)]:
            # no file could hold it
            raise ConfigError([Issue("", "wrong_type", f"argument {a!a} is not UTF-8") for a in not_utf8])
        return command() or 0
    except ConfigError as error:
        issues = json.dumps({"issues": [issue.to_json() for issue in error.issues]}) + "\n"
        if "--json" in sys.argv:
            sys.stdout.write(issues)
        if path := os.environ.get(ISSUES_FILE):
            Path(path).write_text(issues)
        for issue in error.issues:
            print_error(f"error: {' '.join(str(issue).splitlines())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except RunFailed as error:
        print_error(f"error: {error}")
        return 1
    except MemoryError:
        print_error("error: out of memory; free some, or raise `ulimit -v`")
        return 1
    except OSError as error:
        if error.errno not in (*DISK_FAILED, *LIMITS, *BAD_PATH):
            print_error(traceback.format_exc().rstrip())
            return 1
        path = f"{error.filename}: " if error.filename else ""
        print_error(f"error: {path}{error.strerror}{'; see `ulimit -a`' if error.errno in LIMITS else ''}")
        return 2 if error.errno in BAD_PATH else 1
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's, of a wrong command line
            print_error(_usage_error(error))
            return int(error.exit_code)
        print_error(traceback.format_exc().rstrip())
        return 1


def _usage_error(error: Any) -> str:
    """Return typer's message as one line with the option first, or the help of a group without its verb."""
    shown = io.StringIO()
    error.show(shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue().rstrip()
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        return f"error: {error.param.opts[0]}: {error.message.removeprefix('Value error, ').rstrip('.')}"
    verb = error.ctx.command_path if error.ctx else "bert-dp"
    return f"error: {error.format_message().rstrip('.')}; see `{verb} --help`"
