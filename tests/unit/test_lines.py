"""Logs and records on a disk that is full: lines are lost and counted, and nothing else happens."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.training.record_files import Records, TolerantFile, WriteErrors

FULL = "[Errno 28] No space left on device"


@pytest.mark.parametrize("place", [".", "gone"])
def test_a_full_disk_or_a_log_that_cannot_be_made_does_not_end_a_process(tmp_path: Path, place: str) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    script = (
        "import sys, warnings\n"
        "from bert_dp.training.record_files import WriteErrors\n"
        "from bert_dp.training.process import redirect_output, show_stacks_on_signal\n"
        "redirect_output(0, WriteErrors())\n"
        "show_stacks_on_signal(0)\n"
        "for i in range(100): print('a line of a log ' * 100)\n"
        "sys.stderr.write('another')\n"
        "warnings.warn('a third')\n"
        "sys.stdout.flush()\n"
        "open(sys.argv[1], 'w').write('reached')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "end")],
        env={**os.environ, files.LOG_DIR: str(tmp_path / place)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0  # 120 is a flush that failed at the interpreter's end
    assert (tmp_path / "end").read_text() == "reached"
    assert not (tmp_path / "gone").exists()


def test_a_log_goes_on_where_an_earlier_process_of_the_rank_has_left_it(tmp_path: Path) -> None:
    """And no other user can read it."""
    script = (
        "import os, sys\n"
        "from bert_dp.training.record_files import WriteErrors\n"
        "from bert_dp.training.process import redirect_output\n"
        "for word in ('first', 'second', 'third'):\n"
        "    if not os.fork():\n"
        "        redirect_output(1, WriteErrors()); print(word); sys.stderr.write('.\\n'); os._exit(0)\n"
        "    os.wait()\n"
    )
    environ = {**os.environ, files.LOG_DIR: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True)
    assert done.stdout + done.stderr == b""
    again = f"{files.STARTED_AGAIN}\n"
    log = tmp_path / "rank-1.log"
    assert log.read_text() == f"first\n.\n{again}second\n.\n{again}third\n.\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_process_follows_its_own_launcher_alone() -> None:
    """A launcher that has gone before, or whose pid is another process's by now, is gone."""
    script = (
        "import os\n"
        "from bert_dp.training.process import follow_launcher\n"
        "from bert_dp.files import LAUNCHER_PID, LAUNCHER_START, start_ticks\n"
        "gone = os.fork()\n"
        "if not gone: os._exit(0)\n"
        "os.waitpid(gone, 0)\n"
        "mine = os.getpid()\n"
        "for pid, start in ((mine, start_ticks(mine)), (mine, '1'), (gone, '1'), (0, '')):\n"
        "    os.environ[LAUNCHER_PID], os.environ[LAUNCHER_START] = str(pid), start\n"
        "    child = os.fork()\n"
        "    if not child: follow_launcher(); os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "1", "0"]


def test_failed_writes_are_counted_and_dropped() -> None:
    errors = WriteErrors()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    file = TolerantFile(descriptor, errors)
    assert [file.write(b"first\n"), file.write(b"second\n")] == [6, 7]
    os.close(descriptor)
    assert errors.count == 2


def test_the_first_missing_line_of_a_record_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    errors = WriteErrors()
    records, real, full = Records(tmp_path, said.append, errors), files.append_line, {"metrics.jsonl"}

    def append(path: Path, line: dict[str, int]) -> None:
        if path.name in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, line)

    monkeypatch.setattr(files, "append_line", append)
    for step in range(10, 60, 10):
        records.append("metrics.jsonl", {"step": step})
        records.append("evals.jsonl", {"step": step})
    assert said == [f"warning: step 10 is missing in metrics.jsonl: {FULL}"]
    assert errors.count == 5
    full.clear()
    records.append("metrics.jsonl", {"step": 60})
    assert [line["step"] for line in files.read_lines(tmp_path / "metrics.jsonl")] == [60]
    assert [line["step"] for line in files.read_lines(tmp_path / "evals.jsonl")] == [10, 20, 30, 40, 50]
