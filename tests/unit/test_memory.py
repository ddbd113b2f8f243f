"""Tests of memory peaks and out-of-memory kills, with fake kernel files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bert_dp.cost import GIB
from launcher.watch import failure
from launcher.watch.failure import MemoryWatch, oom_kills
from tests.helpers import write_files

EVENTS = "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}\noom_group_kill 0\n"
V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/memory.events": EVENTS.format(2),
    "sys/fs/cgroup/user/memory.events": EVENTS.format(9),
}
V1 = {
    "proc/self/cgroup": "4:cpu:/\n3:memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
}
CONTAINER = {
    "proc/self/cgroup": "3:memory:/docker/abc\n",  # a host path; a container mounts its own group at the top
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5\n",
}
NO_GROUP = {"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 1\noom_kill 6\n"}


@pytest.mark.parametrize(("files", "kills"), [(V2, 2), (V1, 4), (CONTAINER, 5), (NO_GROUP, 6), ({}, None)])
def test_the_nearest_oom_counter_is_read(tmp_path: Path, files: dict, kills: int | None) -> None:
    counter = oom_kills(write_files(tmp_path, files))
    assert (counter[0] if counter else None) == kills


def test_kills_during_the_run_are_counted(tmp_path: Path) -> None:
    watch = MemoryWatch(write_files(tmp_path, V2))
    assert watch.facts().oom_kills == 0
    path = tmp_path / "sys/fs/cgroup/user/job/memory.events"
    path.write_text(EVENTS.format(3))
    assert (watch.facts().oom_kills, watch.facts().counter) == (1, str(path))
    path.unlink()  # the next reading would use another counter, so no difference is defined
    assert watch.facts().oom_kills is None


class Worker(SimpleNamespace):
    """A fake psutil.Process with the method that MemoryWatch uses."""

    def memory_info(self) -> SimpleNamespace:
        if self.gib is None:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(rss=int(self.gib * GIB))


def test_the_memory_peak_of_each_rank_is_kept_after_the_rank_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 100.0
    monkeypatch.setattr(failure.time, "monotonic", lambda: seconds)
    watch = MemoryWatch(write_files(tmp_path, V1))
    workers: Any = {0: Worker(gib=1.0), 10: Worker(gib=2.0)}
    watch.sample(workers)
    workers[0].gib = 9.0
    watch.sample(workers)  # ignored, because less than a second has passed
    assert watch.facts().peaks_gib == {"rank 0": 1.0, "rank 10": 2.0}
    for seconds, gib in ((101.0, 5.0), (102.0, 3.0)):  # noqa: B007 (the clock reads it)
        workers[0].gib, workers[10].gib = gib, None  # rank 10 has exited
        watch.sample(workers)
    assert watch.facts().peaks_gib == {"rank 0": 5.0, "rank 10": 2.0}
