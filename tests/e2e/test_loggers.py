"""A run that is sent to a service, when it is stopped and when its launcher is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.e2e.cli import assert_none_left, begin, processes_of, step_reached, wait_for
from tests.helpers import read_json

ENDLESS = ("schedule.steps=100000", "log.to=[tensorboard]", "compile=off")


def is_sent(run_dir: Path) -> bool:
    """Once it is, the launcher's signals are the only ones that reach the child."""
    return step_reached(run_dir, 2)() and any((run_dir / "tensorboard").rglob("events*"))


def test_a_stop_signal_to_every_process_keeps_the_summary(run_dir: Path, shards: Path) -> None:
    process = begin(shards, run_dir, *ENDLESS)
    wait_for(lambda: is_sent(run_dir))
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("launcher.run.loggers" in member.cmdline() for member in family)
    for member in (process, *family):
        member.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 143, said + errors
    assert "warning" not in said + errors
    summary = read_json(run_dir / "summary.json")
    events = b"".join(path.read_bytes() for path in (run_dir / "tensorboard").rglob("events*"))
    assert f"| summary/step | {summary['step']} |".encode() in events
    assert processes_of(run_dir) == []


def test_no_process_outlives_a_killed_launcher(run_dir: Path, shards: Path) -> None:
    process = begin(shards, run_dir, *ENDLESS, nproc=1)
    wait_for(lambda: is_sent(run_dir))
    process.kill()
    process.communicate()
    assert_none_left(run_dir)
