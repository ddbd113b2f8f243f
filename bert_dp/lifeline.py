"""What a rank sets up before it imports torch: signals, log, the launcher's life, error file. Torch-free."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from bert_dp.config import ConfigError
from bert_dp.record import LAUNCHER_PID, LAUNCHER_START, LOG_DIR, hide, secret_values, start_ticks

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Remembers the first stop signal; the loop looks at it once per step."""

    def __init__(self) -> None:
        self.received = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


def redirect_output(rank: int) -> None:
    """Append everything this process prints to $BERT_DP_LOG_DIR/rank-N.log, when the launcher set it."""
    folder = os.environ.get(LOG_DIR)
    if folder:
        log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def follow_launcher() -> None:
    """End this process at once when the launcher is gone, however it went.

    torchrun puts every worker into a session of its own, so nothing else would.
    """
    pid = int(os.environ.get(LAUNCHER_PID, "0"))
    if not pid:
        return
    try:
        descriptor = os.pidfd_open(pid)
        same = start_ticks(pid) == os.environ.get(LAUNCHER_START)
    except OSError:
        same = False
    if not same:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)  # readable once the process has ended
        while not poller.poll():
            pass
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def record_error(rank: int, error: BaseException) -> None:
    """Leave the cause where the launcher looks first: $BERT_DP_LOG_DIR/rank-N.error.json."""
    secrets = secret_values(os.environ)  # a library may have put one into its message
    if isinstance(error, ConfigError):
        text = "".join(f"error: {issue}\n" for issue in error.issues)
    else:
        text = "".join(traceback.format_exception(error))
    sys.stderr.write(hide(text, secrets))
    folder = os.environ.get(LOG_DIR)
    if not folder:
        return
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/torch/" not in f.filename] or frames
    facts = {
        "rank": rank,
        "time_ns": time.monotonic_ns(),  # since boot: one clock for all processes, and it never jumps
        "type": type(error).__name__,
        "message": hide(str(error), secrets),
        "where": f"{own[-1].filename}:{own[-1].lineno}" if own else None,
        "bad_input": [hide(i, secrets) for i in error.issues] if isinstance(error, ConfigError) else None,
    }
    path = Path(folder) / f"rank-{rank}.error.json"
    with contextlib.suppress(OSError):  # a full disk must not hide the cause: the log has it too
        path.write_text(json.dumps(facts, indent=1))
