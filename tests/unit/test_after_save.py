"""`--after-save`: a command gets the path of each new checkpoint; its failure ends no run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from launcher.run import after_save
from launcher.run.after_save import LOG, AfterSave
from tests.e2e.cli import wait_for

# notes its last argument when it starts and when it ends, which it may do once a file `go` is there
NOTE = """
import pathlib, sys, time
folder, checkpoint = map(pathlib.Path, sys.argv[-2:])
with (folder / "ran").open("a") as out:
    print("start", checkpoint.name, file=out, flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    print("end", checkpoint.name, file=out)
sys.exit("disk full" if "fail" in sys.argv else 0)
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(after_save, "POLL_S", 0.02)
    (tmp_path / "logs").mkdir()
    save(tmp_path, 0)
    return tmp_path


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def ran(run_dir: Path) -> list[str]:
    return (run_dir / "ran").read_text().split() if (run_dir / "ran").exists() else []


def command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-c", NOTE, *words, str(run_dir)]


def test_one_command_at_a_time_gets_the_newest_checkpoint(run_dir: Path) -> None:
    said: list[str] = []
    with AfterSave(command(run_dir), run_dir, said.append) as saved:
        saved.poll()
        assert ran(run_dir) == [], "the one that was there is no new one"
        for step in (1, 2, 3):
            save(run_dir, step)
            saved.poll()
        wait_for(lambda: ran(run_dir))
        assert ran(run_dir) == ["start", "step-00000001"]
        (run_dir / "go").touch()
    first, last = "step-00000001", "step-00000003"
    assert ran(run_dir) == ["start", first, "end", first, "start", last, "end", last]
    assert said == []


def test_a_failure_is_a_line_and_its_output_in_the_log(run_dir: Path) -> None:
    said: list[str] = []
    (run_dir / "go").touch()
    with AfterSave(command(run_dir, "fail"), run_dir, said.append):
        save(run_dir, 1)
    with AfterSave(["/nowhere/program"], run_dir, said.append):
        save(run_dir, 2)
    ended, missing = said
    assert ended.startswith("warning: --after-save of step-00000001: ended with exit code 1; see ")
    assert "/nowhere/program" in missing
    assert (run_dir / LOG).read_text() == "disk full\n"


def test_a_signal_ends_the_wait_and_the_command(run_dir: Path) -> None:
    said: list[str] = []
    with AfterSave(command(run_dir), run_dir, said.append) as saved:
        save(run_dir, 1)
        saved.poll()
        wait_for(lambda: ran(run_dir))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert ran(run_dir) == ["start", "step-00000001"]
    assert said[0].startswith("warning: --after-save of step-00000001: killed by signal 9")
