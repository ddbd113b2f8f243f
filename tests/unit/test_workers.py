"""The workers of a run's workers, without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.run import processes
from launcher.run.starters import LAUNCHERS, RankStart, start_command, start_environment
from tests.helpers import read_json


def test_a_wait_for_workers_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll(2) takes milliseconds; without them the launcher would look 5,000 times a second."""
    waited: list[float] = []

    class Poller:
        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waited.append(milliseconds)
            return []

    monkeypatch.setattr(processes.select, "poll", Poller)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        processes.Workers(process, 0).wait(0.2)
    assert waited == [200.0]


def test_threads_interfaces_and_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an interface, a launcher around us or a limit of threads says in our own environment."""
    foreign = ("PET_NNODES", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *foreign):
        monkeypatch.setenv(name, "eth0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for ranks, threads in ((1, "8"), (3, "2"), (16, "1")):
        environ = start_environment(RankStart(ranks, [], "deepspeed", grace_s=299.7), tmp_path, tmp_path)
        assert environ["OMP_NUM_THREADS"] == threads
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert (environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], environ["DS_ACCELERATOR"]) == ("300", "cpu")
    for tool in LAUNCHERS:
        environ = start_environment(RankStart(1, [], tool), tmp_path, tmp_path)
        assert not {*foreign} & environ.keys()
        assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    on_gpu = start_environment(RankStart(3, [], "deepspeed", on_gpu=True), tmp_path, tmp_path)
    assert (on_gpu["OMP_NUM_THREADS"], "DS_ACCELERATOR" in on_gpu) == ("5", False)


def test_ranks_record_their_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_TIMING")
    names = (*recorded, "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    environ = start_environment(RankStart(2, []), run_dir, scratch)
    assert [environ[name] for name in names] == ["2000", "1", "1", f"{run_dir}/logs/nccl-trace-rank-"]
    assert environ["BERT_DP_LOG_DIR"] == f"{run_dir}/logs"
    assert "PET_RDZV_ENDPOINT" not in environ
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    environ = start_environment(RankStart(2, [], "accelerate"), run_dir, scratch)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "0"
    assert (environ["PET_RDZV_ENDPOINT"], environ["PET_RDZV_ID"]) == (f"{scratch}/agent", "bert-dp")


@pytest.mark.parametrize("visible", [None, "", "3,1"])
def test_each_tool_starts_as_many_ranks_as_were_asked_for_on_the_gpus_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """Whatever is installed here; deepspeed alone sets CUDA_VISIBLE_DEVICES itself."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker = ["run/config.yaml", "--resume", "auto"]
    commands = {tool: start_command(RankStart(3, [], tool), tmp_path, worker) for tool in LAUNCHERS}
    assert all(command[-3:] == worker and "bert_dp.worker" in command for command in commands.values())
    assert {"--nnodes=1", "--nproc-per-node=3", f"--rdzv-endpoint={tmp_path}/agent"} < {*commands["torchrun"]}
    assert "--rdzv-backend=bert-dp-file" in commands["torchrun"]
    assert {f"--config_file={tmp_path}/accelerate.json", "--rdzv_backend=bert-dp-file"} < {
        *commands["accelerate"]
    }
    settings = read_json(tmp_path / "accelerate.json")
    asked = {"num_processes": 3, "num_machines": 1, "mixed_precision": "no", "main_process_ip": "127.0.0.1"}
    assert asked.items() <= settings.items()
    deepspeed = commands["deepspeed"]
    assert {"--num_gpus=3", f"--hostfile={tmp_path}/none", "--master_addr=127.0.0.1"} < {*deepspeed}
    restored = ["-u", "CUDA_VISIBLE_DEVICES"] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    place = deepspeed.index("env") + 1
    assert deepspeed[place : place + len(restored)] == restored
    assert deepspeed[place + len(restored)] == sys.executable


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
        seen = processes.Workers(process, 1)
        seen.wait(0.0)
        assert list(seen.by_rank()) == [2]
        process.stdin.write(b"\n")
        process.stdin.flush()
        seen.wait(60.0)
        assert seen.by_rank() == {}
        assert [(gone.rank, gone.code) for gone in seen.exits] == [(2, code)]
        seen.close()
