"""Tests of a rank before it imports torch: the heartbeat, and logs and records on a full disk."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.files import BEAT_BYTES, PHASES, Heartbeat, heartbeat_path, read_heartbeat
from bert_dp.training import process
from bert_dp.training.process import HeartbeatWriter, LogStream, Records, TolerantFile
from tests.e2e.cli import wait_for
from tests.faults.harness import observe


def read(path: Path) -> Heartbeat:
    beat = read_heartbeat(path)
    assert beat is not None
    return beat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return heartbeat_path(tmp_path, 3)


@pytest.fixture
def beat(path: Path) -> Iterator[HeartbeatWriter]:
    writer = HeartbeatWriter(path)
    yield writer
    writer.close()


def test_a_reader_sees_every_field_and_progress_within_a_step(path: Path, beat: HeartbeatWriter) -> None:
    """A rank that waits for a micro batch is behind one that has it and ahead of one in the previous one."""
    first, places = read(path), []
    assert (first.pid, PHASES[first.phase], first.step, first.done) == (os.getpid(), "setup", 0, 0)
    beat.enter("step", 6)
    beat.progress()
    beat.progress()
    now = read(path)
    assert (now.step, PHASES[now.phase], now.done, now.progress) == (6, "step", 2, first.progress + 3)
    assert first.progress_ns <= now.progress_ns <= time.monotonic_ns()
    for step in (7, 8):
        beat.enter("data", step)
        for _ in range(3):
            for phase in ("data", "step"):
                beat.enter(phase)
                places.append(read(path).place)
            beat.progress()
        for phase in ("log", "evaluate", "save"):
            beat.enter(phase)
            now = read(path)
            assert (now.step, PHASES[now.phase], now.done) == (step, phase, 0)
            places.append(now.place)
    assert places == sorted(set(places))


def test_a_silent_rank_is_reported_once_for_each_silence(
    path: Path, monkeypatch: pytest.MonkeyPatch, beat: HeartbeatWriter
) -> None:
    """A failed report must not end the thread."""
    monkeypatch.setattr(process, "ALIVE_EVERY_S", 0.02)
    before, reports = read(path), list[tuple[int, float]]()

    def report(progress: int) -> None:
        reports.append((progress, time.monotonic() - start))
        raise OSError

    start = time.monotonic()
    beat.on_silence(0.2, report)
    wait_for(lambda: len(reports) == 1, 30)
    seen = read(path).alive
    assert reports[0][1] >= 0.15
    wait_for(lambda: read(path).alive > seen + 20, 30)
    assert read(path).progress == before.progress, "being alive is not progress"
    beat.progress()
    wait_for(lambda: len(reports) == 2, 30)
    assert [progress for progress, _ in reports] == [before.progress, before.progress + 1]


def test_a_closed_heartbeat_ends_its_thread_and_keeps_its_file(path: Path) -> None:
    def descriptors() -> int:
        return sum(link.exists() and link.samefile(path) for link in Path("/proc/self/fd").iterdir())

    before = set(threading.enumerate())
    beat = HeartbeatWriter(path)
    (thread,) = set(threading.enumerate()) - before
    assert descriptors() == 1, "only the mapping has a descriptor"
    beat.close()
    thread.join(30)
    assert not thread.is_alive()
    assert path.exists(), "the launcher still reads it"


def test_an_earlier_heartbeat_is_replaced_and_an_unreadable_one_is_none(path: Path) -> None:
    path.parent.write_text("not a directory")
    beat = HeartbeatWriter(path)
    beat.enter("step", 1)
    beat.close()
    assert read_heartbeat(path) is None
    path.parent.unlink()
    path.parent.mkdir()
    path.write_bytes(b"\xff" * BEAT_BYTES)
    old = path.stat().st_ino
    with path.open("rb") as held:
        beat = HeartbeatWriter(path)
        assert path.stat().st_ino != old
        assert held.read() == b"\xff" * BEAT_BYTES
    assert read(path).pid == os.getpid()
    beat.close()
    path.write_bytes(b"short")
    assert read_heartbeat(path) is None


def test_a_heartbeat_makes_no_system_call(beat: HeartbeatWriter) -> None:
    """Only memory is written. The time (goal: 2 microseconds) is recorded but not checked."""

    def writes() -> int:
        return int(re.search(r"syscw: (\d+)", Path("/proc/thread-self/io").read_text())[1])

    before, start = writes(), time.perf_counter()
    for number in range(2000):
        beat.enter("step", number)
    observe(7, beat_us=(time.perf_counter() - start) / 2000 * 1e6)
    assert writes() == before


@pytest.mark.parametrize("folder", ["full", "gone"])
def test_a_log_that_cannot_be_written_does_not_end_a_process(tmp_path: Path, folder: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank-0.log").symlink_to("/dev/full")
    script = (
        "import sys, warnings\n"
        "from bert_dp.training.process import redirect_output, show_stacks_on_signal\n"
        "redirect_output(0); show_stacks_on_signal(0)\n"
        "for i in range(100): print('a line of a log ' * 100)\n"
        "sys.stderr.write('another')\n"
        "warnings.warn('a third')\n"
        "sys.stdout.flush()\n"
        "open(sys.argv[1], 'w').write('reached')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "end")]
    environ = {**os.environ, files.LOG_DIR: str(tmp_path / folder)}
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.returncode == 0  # 120 would be a failed flush at interpreter exit
    assert (tmp_path / "end").read_text() == "reached"
    assert not (tmp_path / "gone").exists()


def test_a_restarted_rank_appends_to_its_log(tmp_path: Path) -> None:
    """No other user can read the log."""
    script = (
        "import os, sys\n"
        "from bert_dp.training.process import redirect_output\n"
        "for word in ('first', 'second', 'third'):\n"
        "    if not os.fork():\n"
        "        redirect_output(1); print(word); sys.stderr.write('.\\n'); os._exit(0)\n"
        "    os.wait()\n"
    )
    environ = {**os.environ, files.LOG_DIR: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True)
    assert done.stdout + done.stderr == b""
    again = f"{files.STARTED_AGAIN}\n"
    log = tmp_path / "rank-1.log"
    assert log.read_text() == f"first\n.\n{again}second\n.\n{again}third\n.\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_rank_exits_without_finalizing_the_interpreter() -> None:
    """Its exit handlers run and its output is flushed."""
    script = (
        "import atexit\n"
        "from bert_dp.training.process import exit_process\n"
        "class Kept:\n"
        "    def __del__(self): print('finalized', flush=True)\n"
        "kept = Kept()\n"
        "atexit.register(print, 'handler')\n"
        "print('output')\n"
        "exit_process(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (3, ["output", "handler"])


def test_a_rank_exits_if_its_own_launcher_is_gone() -> None:
    """A launcher is also gone if its pid now belongs to another process."""
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


def test_failed_writes_are_counted_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes fail on a full disk and on a full non-blocking pipe."""
    monkeypatch.setattr(TolerantFile, "failed_writes", 0)
    descriptor, (reader, writer) = os.open("/dev/full", os.O_WRONLY), os.pipe()
    file = TolerantFile(descriptor)
    assert [file.write(b"first\n"), file.write(b"second\n"), TolerantFile.failed_writes] == [6, 7, 2]
    os.set_blocking(writer, False)
    stream = LogStream(writer)
    for _ in range(4):
        stream.write("x" * 2**16 + "\n")
    for each in (descriptor, reader, writer):
        os.close(each)
    assert TolerantFile.failed_writes > 2


def test_only_the_first_missing_line_is_reported(tmp_path: Path) -> None:
    seen, lost = list[str](), tmp_path / "metrics.jsonl"
    records = Records(tmp_path, seen.append)
    lost.mkdir()  # so that it cannot be written
    for step in range(10, 60, 10):
        records.append("metrics.jsonl", {"step": step})
        records.append("evals.jsonl", {"step": step})
    assert seen == [f"warning: could not write step 10 to metrics.jsonl: [Errno 21] Is a directory: '{lost}'"]
    assert records.failed_writes == 5
    lost.rmdir()
    records.append("metrics.jsonl", {"step": 60})
    assert [line["step"] for line in files.read_lines(lost)] == [60]
    assert [line["step"] for line in files.read_lines(tmp_path / "evals.jsonl")] == [10, 20, 30, 40, 50]
