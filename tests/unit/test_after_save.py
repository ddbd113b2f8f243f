"""Test that `--after-save` runs a command on new checkpoints and that its failure does not end a run."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from launcher.run import after_save
from launcher.run.after_save import LOG, AfterSave
from tests.e2e.cli import wait_for

# records its last argument when it starts and when it ends, and ends once the file `go` exists
NOTE = """
import pathlib, sys, time
folder, checkpoint = map(pathlib.Path, sys.argv[-2:])
with (folder / "ran").open("a") as out:
    print("start", checkpoint.name[-1], file=out, flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    print("end", checkpoint.name[-1], file=out)
sys.exit("disk full" if checkpoint.name[-1] == "4" else 0)
"""


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_one_command_at_a_time_gets_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_save, "POLL_S", 0.02)
    (tmp_path / "logs").mkdir()
    save(tmp_path, 0)  # already present, so it is not a new checkpoint
    command, warnings, ran = [sys.executable, "-c", NOTE, str(tmp_path)], list[str](), tmp_path / "ran"

    with AfterSave(command, tmp_path, warnings.append) as saved:
        for step in (1, 2, 3):
            save(tmp_path, step)
            saved.poll()
        wait_for(lambda: ran.exists() and ran.read_text())
        assert ran.read_text() == "start 1\n"
        (tmp_path / "go").touch()
    assert ran.read_text().splitlines() == ["start 1", "end 1", "start 3", "end 3"]
    assert warnings == []
    with AfterSave(command, tmp_path, warnings.append):
        save(tmp_path, 4)
    with AfterSave(["/nowhere/program"], tmp_path, warnings.append):
        save(tmp_path, 5)
    (tmp_path / "go").unlink()
    with AfterSave(command, tmp_path, warnings.append) as saved:
        save(tmp_path, 6)
        saved.poll()
        wait_for(lambda: "start 6" in ran.read_text())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()  # kills the command
    failed, missing, stopped = warnings
    assert failed.startswith(
        "warning: the --after-save command failed for step-00000004: exited with code 1; see "
    )
    assert (tmp_path / LOG).read_text() == "disk full\n"
    assert "/nowhere/program" in missing
    assert stopped.startswith(
        "warning: the --after-save command failed for step-00000006: killed by signal 9"
    )
