"""The workers of a run's workers, without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.run import workers
from launcher.run.starters import start_environment


def test_a_wait_for_workers_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll(2) takes milliseconds; without them the launcher would look 5,000 times a second."""
    waited: list[float] = []

    class Poller:
        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waited.append(milliseconds)
            return []

    monkeypatch.setattr(workers.select, "poll", Poller)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        workers.Workers(process, 0).wait(0.2)
    assert waited == [200.0]


def test_ranks_share_the_cores_meet_on_loopback_and_have_their_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an interface, a launcher around us or a limit of threads says in our own environment."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PET_NNODES", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "eth0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for ranks, threads in ((1, "8"), (3, "2"), (16, "1")):
        environ = start_environment("deepspeed", tmp_path, tmp_path, ranks, on_gpu=False, grace_s=299.7)
        assert environ["OMP_NUM_THREADS"] == threads
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert (environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], environ["DS_ACCELERATOR"]) == ("300", "cpu")
    assert not {"PET_NNODES", "LOCAL_SIZE"} & environ.keys()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    on_gpu = start_environment("deepspeed", tmp_path, tmp_path, 3, on_gpu=True, grace_s=1.0)
    assert (on_gpu["OMP_NUM_THREADS"], "DS_ACCELERATOR" in on_gpu) == ("5", False)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "-m", "bert_dp.worker"], stdin=subprocess.PIPE)
sys.stdin.readline()
child.stdin.close()
sys.stdin.readline()
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_a_worker_that_ends_leaves_its_exit_code_or_signal(end: str, code: int) -> None:
    # it says itself that it runs: right after its start a process has no command line yet
    worker = f"import os, sys; print('started', flush=True); sys.stdin.read(); {end}"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "2"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout.readline() == b"started\n"
        seen = workers.Workers(process, 1)
        seen.wait(0.0)
        assert list(seen.by_rank()) == [2]
        process.stdin.write(b"\n")
        process.stdin.flush()
        seen.wait(60.0)
        assert seen.by_rank() == {}
        assert [(gone.rank, gone.code) for gone in seen.departures] == [(2, code)]
        seen.close()
