"""A rank's heartbeat: what is written is what a reader reads, cheaply, and never at the run's cost."""

from __future__ import annotations

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

from bert_dp.files import BEAT_BYTES, PHASES, Heartbeat, heartbeat_path, read_heartbeat
from bert_dp.training import process as heartbeat
from bert_dp.training.process import HeartbeatWriter
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
    monkeypatch.setattr(heartbeat, "ALIVE_EVERY_S", 0.02)
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
        links = Path("/proc/self/fd").iterdir()
        return sum(link.exists() and link.samefile(path) for link in links)

    before = set(threading.enumerate())
    beat = HeartbeatWriter(path)
    (thread,) = set(threading.enumerate()) - before
    assert descriptors() == 1, "of the mapping alone"
    beat.close()
    thread.join(30)
    assert not thread.is_alive()
    assert path.exists(), "the launcher still reads it"


@pytest.mark.parametrize("how", ["a full disk", "a file in the place of the directory"])
def test_a_run_goes_on_where_no_file_can_be(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as disk:
        if how == "a full disk":
            disk.setattr(Path, "write_bytes", full)
        else:
            path.parent.write_text("")
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
    process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        written = tmp_path / "rank-2.stack"
        time.sleep(0.2)
        process.send_signal(signal.SIGUSR2)
        whole = [("<string>", "held"), ("<string>", "<module>")]  # faulthandler writes it frame by frame
        wait_for(lambda: [(f.path, f.function) for f in parse_stack(written.read_text())] == whole, 30)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
