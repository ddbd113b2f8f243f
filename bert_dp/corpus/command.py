"""Run a process that prints one answer for the launcher. Torch-free."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable

from bert_dp import record
from bert_dp.config import ConfigError
from bert_dp.rank_process import follow_launcher

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(answer: Callable[[], str], hint: str = "") -> int:
    """Print the answer and return 0; for bad input print its issues as JSON and return 2.

    Return 1 for a failure, with its line and `hint` on stderr, and 128 + signal when stopped.
    """
    for number in record.heeded(STOPS):
        signal.signal(number, _stop)
    follow_launcher()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which a launcher lets wait until here
        sys.stdout.write(f"{answer()}\n")
    except ConfigError as error:
        sys.stdout.write(json.dumps([issue.to_json() for issue in error.issues]))
        return 2
    except KeyboardInterrupt as stop:
        return 128 + int(stop.args[0])
    except (OSError, RuntimeError) as error:
        sys.stderr.write(record.printable(f"error: {error}{hint and '; '}{hint}\n"))
        return 1
    return 0


def _stop(number: int, frame: object) -> None:
    """Leave once: another signal must not disturb the removal of what is unfinished."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt(number)
