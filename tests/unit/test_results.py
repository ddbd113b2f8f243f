"""What the launcher makes of a failure and of a stop signal that came as well."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from launcher.run import processes
from launcher.watch.failure import Failure

UNKNOWN = Failure(None, "torchrun: ended with exit code 1 and no summary")
RAISED = Failure(1, "ValueError: no", where="a.py:1")
STOPPED = "SIGTERM: stopped before this run's next checkpoint"


def result(run_dir: Path, cause: Failure | None) -> tuple[processes.RunResult, dict]:
    found = processes._result(run_dir, cause, UNKNOWN, [signal.SIGTERM])
    return found, json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    "cause", [RAISED, Failure(0, "killed by signal 9 (SIGKILL)", killed_by=9), Failure(1, "hang in step 3")]
)
def test_a_stop_signal_does_not_hide_a_failure(tmp_path: Path, cause: Failure) -> None:
    found, summary = result(tmp_path, cause)
    assert (found.exit_code, found.failure, found.signal) == (1, cause, signal.SIGTERM)
    assert (summary["exit_code"], summary["cause"]) == (1, cause.headline())
    assert summary["signal"] == signal.SIGTERM


@pytest.mark.parametrize(
    "cause",
    [
        None,
        Failure(1, "killed by signal 15 (SIGTERM)", killed_by=15),
        Failure(1, "ended with exit code 1 without recording an error", kind="no_cause"),
        dataclasses.replace(RAISED, message="RuntimeError: Connection closed by peer", kind="peer_gone"),
    ],
)
def test_what_a_stop_signal_leaves_behind_is_no_failure(tmp_path: Path, cause: Failure | None) -> None:
    found, summary = result(tmp_path, cause)
    assert (found.exit_code, summary["exit_code"], summary["cause"]) == (143, 143, STOPPED)


def test_a_run_that_told_its_failure_while_it_was_to_stop_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "exit_code": 1}))
    found, summary = result(tmp_path, Failure(0, "RunFailed: step-00000066 could not be saved"))
    assert (found.exit_code, summary["exit_code"], found.signal) == (1, 1, signal.SIGTERM)


def test_bad_input_that_only_the_ranks_saw_stands_in_the_summary(tmp_path: Path) -> None:
    found, summary = result(tmp_path, Failure(0, "ConfigError: optim.lr: no", bad_input=("optim.lr: no",)))
    assert (found.exit_code, summary["status"], summary["exit_code"]) == (2, "failed", 2)
    assert "optim.lr: no" in summary["cause"]
