"""Map the outcome of a command to an exit code: 0 success, 1 failure, 2 bad input, 128 + signal number.

A verb that trains returns its run's `Summary.exit_code` (bert_dp/files/models.py).
"""

import errno
import io
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import typer

from bert_dp.config import ConfigError, Issue
from bert_dp.files.reaper import ISSUES_FILE
from bert_dp.training.process import RunFailed
from launcher.log import print_error

BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a typer command line and return its exit code. Print each problem as one line on stderr; print
    an unexpected exception with its traceback."""
    code = 0
    try:
        if not_utf8 := [a for a in sys.argv[1:] if any("\ud800" <= c <= "\udfff" for c in a)]:
            # a UTF-8 file could not store such an argument
            raise ConfigError([Issue("", "wrong_type", f"argument {a!a} is not UTF-8") for a in not_utf8])
        code = command() or 0
        sys.stdout.flush()  # so that a closed pipe is detected here, not at interpreter exit
        return code
    except (BrokenPipeError, SystemExit) as end:  # click turns a BrokenPipeError into SystemExit(1)
        broken = end.__context__ if isinstance(end, SystemExit) and end.code == 1 else end
        if not isinstance(broken, BrokenPipeError):
            raise
        if not _has_no_reader(sys.stdout) or _has_no_reader(sys.stderr):  # the verb may not have finished
            print_error(f"error: {broken.strerror}")
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
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
        print_error("error: out of memory; free some memory, or raise `ulimit -v`")
        return 1
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        print_error(f"error: {path}{error.strerror or error}")
        return 2 if error.errno in BAD_PATH else 1
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's error for a bad command line
            print_error(_usage_error(error))
            return int(error.exit_code)
        print_error(traceback.format_exc().rstrip())
        return 1


def _has_no_reader(stream: TextIO) -> bool:
    """Return True if a stream is a pipe or a socket whose other end is closed."""
    poller = select.poll()
    poller.register(stream, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def _usage_error(error: Any) -> str:
    """Format a usage error as one line. If a verb is missing, return the help text instead."""
    shown = io.StringIO()
    error.show(shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue().rstrip()
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        return f"error: {error.param.opts[0]}: {error.message.removeprefix('Value error, ').rstrip('.')}"
    verb = error.ctx.command_path if error.ctx else "bert-dp"
    return f"error: {error.format_message().rstrip('.')}; see `{verb} --help`"
