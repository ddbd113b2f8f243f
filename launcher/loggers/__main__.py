"""`python -m launcher.loggers RUN SECONDS NAME...`: the child that sends a run's records to services.

It works until its standard input ends, which is when the launcher says so or is gone, and has SECONDS from
then on. Standard output takes its warnings, a line each; what the services print goes to logs/loggers.log.
Exit code: 0 when all was sent, INCOMPLETE when a warning says what was not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from bert_dp import record
from launcher.loggers import INCOMPLETE
from launcher.loggers.follow import send

LOG = "logs/loggers.log"


def main(run_dir: Path, grace_s: float, names: list[str]) -> None:
    """Every service in a thread of its own: one that does not answer keeps no other waiting."""
    for number in record.STOP_SIGNALS:  # the launcher decides when to end
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)  # the ranks' time is not ours
    warnings = take_output(run_dir / LOG)
    over, incomplete = threading.Event(), set[str]()
    threads = [
        threading.Thread(target=send_or_warn, args=(run_dir, name, over, warnings, incomplete), name=name)
        for name in names
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    sys.stdin.buffer.read()
    over.set()
    end = time.monotonic() + grace_s
    for thread in threads:
        thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
    late = [thread.name for thread in threads if thread.is_alive()]
    for name in late:
        warn(warnings, run_dir, name, f"not done {grace_s:.0f} s after the end of the run")
    if late:
        os._exit(INCOMPLETE)  # what hangs would keep us
    sys.exit(INCOMPLETE if incomplete else 0)


def take_output(log: Path) -> IO[str]:
    """Where our warnings go; all that this process and its children print goes to `log` from now on."""
    log.parent.mkdir(exist_ok=True)
    warnings = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return warnings


def send_or_warn(
    run_dir: Path, name: str, over: threading.Event, warnings: IO[str], incomplete: set[str]
) -> None:
    """`send`; a failure of any kind is one warning, and the service is given up."""
    try:
        send(run_dir, name, over)
    except Exception as error:
        incomplete.add(name)
        first = (str(error).strip() or "no message").splitlines()[0]
        warn(warnings, run_dir, name, f"{type(error).__name__}: {first}")
        with contextlib.suppress(OSError):  # of a log on a full disk
            traceback.print_exc()


def warn(warnings: IO[str], run_dir: Path, name: str, problem: str) -> None:
    warnings.write(
        f"{name} gets no more of this run ({problem}; see {run_dir / LOG}); "
        f"`bert-dp report {run_dir} --log-to {name}` sends the rest\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
