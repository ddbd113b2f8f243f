"""A rank before it imports torch: its heartbeat, and logs and records on a disk that is full."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.files import BEAT_BYTES, PHASES, Heartbeat, heartbeat_path, read_heartbeat
from bert_dp.training import process
from bert_dp.training.process import HeartbeatWriter, LogStream, Records, TolerantFile
from launcher.watch.hangs import parse_stack
from tests.e2e.cli import wait_for
from tests.faults.harness import observe


def read(path: Path) -> Heartbeat:
    beat = read_heartbeat(path)
    assert beat is not None
    return beat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return heartbeat_path(tmp_path, 3)


def test_a_reader_sees_every_field(path: Path) -> None:
    beat = HeartbeatWriter(path)
    first = read(path)
    assert (first.pid, PHASES[first.phase], first.step, first.done) == (os.getpid(), "setup", 0, 0)
    beat.enter("step", 7)
    beat.progress()
    beat.progress()
    now = read(path)
    assert (now.step, PHASES[now.phase], now.done) == (7, "step", 2)
    assert now.progress == first.progress + 3
    assert first.progress_ns <= now.progress_ns <= time.monotonic_ns()
    beat.enter("log")
    now = read(path)
    assert (now.step, PHASES[now.phase], now.done) == (7, "log", 0)
    beat.close()


def test_places_rise_through_a_step(path: Path) -> None:
    """Who waits for the data of a micro batch is behind who has it, and ahead of who is in the one before."""
    beat, places = HeartbeatWriter(path), []
    for step in (7, 8):
        beat.enter("data", step)
        for _ in range(3):
            for phase in ("data", "step"):
                beat.enter(phase)
                places.append(read(path).place)
            beat.progress()
        for phase in ("log", "evaluate", "save"):
            beat.enter(phase, step)
            places.append(read(path).place)
    assert places == sorted(set(places))
    beat.close()


def test_a_silent_rank_is_reported_once_for_each_silence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a report that failed; an error there must not end the thread."""
    monkeypatch.setattr(process, "ALIVE_EVERY_S", 0.02)
    beat, reports = HeartbeatWriter(path), list[tuple[int, float]]()
    before = read(path)

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
    beat.close()


def test_a_closed_heartbeat_is_still_and_holds_its_file_once(path: Path) -> None:
    def descriptors() -> int:
        return sum(link.exists() and link.samefile(path) for link in Path("/proc/self/fd").iterdir())

    before = set(threading.enumerate())
    beat = HeartbeatWriter(path)
    (thread,) = set(threading.enumerate()) - before
    assert descriptors() == 1, "of the mapping alone"
    beat.close()
    thread.join(30)
    assert not thread.is_alive()
    assert path.exists(), "the launcher still reads it"


def test_a_run_goes_on_where_no_file_can_be(path: Path) -> None:
    path.parent.write_text("in the place of the directory")
    beat = HeartbeatWriter(path)
    beat.enter("step", 1)
    beat.close()
    assert read_heartbeat(path) is None


def test_an_earlier_file_is_replaced_and_a_torn_one_is_none(path: Path) -> None:
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


def test_a_beat_is_no_system_call(path: Path) -> None:
    """Goal 2 microseconds, observed; what makes it cheap is that it only stores to memory."""

    def writes() -> int:
        return int(re.search(r"syscw: (\d+)", Path("/proc/thread-self/io").read_text())[1])

    beat, before, start = HeartbeatWriter(path), writes(), time.perf_counter()
    for number in range(2000):
        beat.enter("step", number)
    observe(7, beat_us=(time.perf_counter() - start) / 2000 * 1e6)
    assert writes() == before
    beat.close()


def test_the_stack_of_a_process_that_holds_the_lock(tmp_path: Path) -> None:
    code = (
        "import ctypes, sys\n"
        "from bert_dp.training.process import show_stacks_on_signal\n"
        "show_stacks_on_signal(2)\n"
        "print('ready', flush=True)\n"
        "def held():\n"
        "    while True: ctypes.PyDLL(None).sleep(60)\n"
        "held()\n"
    )
    environ = {**os.environ, "BERT_DP_LOG_DIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        written = tmp_path / "rank-2.stack"
        time.sleep(0.2)
        child.send_signal(signal.SIGUSR2)
        whole = [("<string>", "held"), ("<string>", "<module>")]  # faulthandler writes it frame by frame
        wait_for(lambda: [(f.path, f.function) for f in parse_stack(written.read_text())] == whole, 30)
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


FULL = "[Errno 28] No space left on device"


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
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "end")],
        env={**os.environ, files.LOG_DIR: str(tmp_path / folder)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0  # 120 is a flush that failed at the interpreter's end
    assert (tmp_path / "end").read_text() == "reached"
    assert not (tmp_path / "gone").exists()


def test_a_log_goes_on_where_an_earlier_process_of_the_rank_has_left_it(tmp_path: Path) -> None:
    """And no other user can read it."""
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


def test_failed_writes_are_counted_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a full pipe that does not block."""
    monkeypatch.setattr(TolerantFile, "failed_writes", 0)
    with open("/dev/full", "wb", buffering=0) as full:
        file = TolerantFile(full.fileno())
        assert [file.write(b"first\n"), file.write(b"second\n")] == [6, 7]
    assert TolerantFile.failed_writes == 2
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = LogStream(writer)
    for _ in range(4):
        stream.write("x" * 2**16 + "\n")
    os.close(reader)
    os.close(writer)
    assert TolerantFile.failed_writes > 2


def test_the_first_missing_line_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    records, real, full = Records(tmp_path, said.append), files.append_line, {"metrics.jsonl"}

    def append(path: Path, line: dict[str, int]) -> None:
        if path.name in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, line)

    monkeypatch.setattr(files, "append_line", append)
    for step in range(10, 60, 10):
        records.append("metrics.jsonl", {"step": step})
        records.append("evals.jsonl", {"step": step})
    assert said == [f"warning: could not write step 10 to metrics.jsonl: {FULL}"]
    assert records.failed_writes == 5
    full.clear()
    records.append("metrics.jsonl", {"step": 60})
    assert [line["step"] for line in files.read_lines(tmp_path / "metrics.jsonl")] == [60]
    assert [line["step"] for line in files.read_lines(tmp_path / "evals.jsonl")] == [10, 20, 30, 40, 50]
