"""Run a process that prints one answer: its signals, its errors and its exit code. Torch-free."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from bert_dp import record
from bert_dp.config import ConfigError
from bert_dp.rank_process import follow_launcher

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(
    answer: Callable[[], tuple[str, int]], hint: str = "", *, stopped: str = "nothing was written"
) -> int:
    """Print what `answer` gives first, if anything, and return the exit code that it gives second; 2 for bad
    input, 1 for a failure (`hint` is added to its line), 128 + signal (`stopped` says what is left).

    Errors go to stderr, a line each.
    """
    for number in record.heeded(STOPS):
        signal.signal(number, _stop)
    follow_launcher()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which a launcher lets wait until here
        text, code = answer()
    except ConfigError as error:
        sys.stderr.writelines(record.printable(f"error: {issue}\n") for issue in error.issues)
        return 2
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"stopped; {stopped}\n")
        return 128 + int(stop.args[0])
    except (OSError, RuntimeError) as error:
        sys.stderr.write(record.printable(f"error: {error}{hint and '; '}{hint}\n"))
        return 1
    sys.stdout.write(text and f"{text}\n")
    return code


def _stop(number: int, frame: object) -> None:
    """Leave once: another signal must not disturb the removal of what is unfinished."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt(number)
