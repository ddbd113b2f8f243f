"""Check that ranks behave alike if torchrun, accelerate, deepspeed or a shell starts them."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_dp import api
from bert_dp.files import read_lines
from bert_dp.files.models import Summary
from launcher.run.starters import LAUNCHERS, launcher_problem
from launcher.watch.failure import NO_CAUSE
from tests.e2e.cli import (
    begin,
    here,
    members,
    processes_of,
    refused,
    resume_run,
    step_reached,
    train,
    wait_for,
    write_config,
)
from tests.helpers import read_json


def tool(name: str, *more: str) -> Any:
    """Return a launcher as a test parameter that is skipped if its package is not installed."""
    lacks = name != "torchrun" and importlib.util.find_spec(name) is None
    return pytest.param(name, *more, marks=pytest.mark.skipif(lacks, reason=f"{name} is not installed"))


TOOLS = [tool(name) for name in LAUNCHERS]
EAGER = ("schedule.steps=100000", "compile=off")


def with_site(folder: Path, code: str) -> str:
    """Write a sitecustomize.py, which every Python process runs at its start, and return the PYTHONPATH."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", str(Path.cwd()))])


@contextlib.contextmanager
def running(run_dir: Path, launcher: str, shards: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a long run and wait for its third step."""
    process = begin(shards, run_dir, *EAGER, options=("--launcher", launcher))
    try:
        wait_for(lambda: step_reached(run_dir, 3)() or process.poll() is not None, seconds=150)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("launcher", TOOLS[1:])
def test_sigkill_of_the_launcher_leaves_no_process(run_dir: Path, shards: Path, launcher: str) -> None:
    """Row 4 of the fault table tests the same with torchrun."""
    with running(run_dir, launcher, shards) as process:
        assert len(members(run_dir)) == (4 if launcher == "deepspeed" else 3)
        process.kill()
        process.wait()
        wait_for(lambda: not members(run_dir), seconds=30)


@pytest.mark.parametrize("launcher", TOOLS[2:])
def test_a_stop_signal_to_the_tool_saves_a_checkpoint(run_dir: Path, shards: Path, launcher: str) -> None:
    """deepspeed's runner has no handler, so the signal ends it at once."""
    with running(run_dir, launcher, shards) as process:
        children = psutil.Process(process.pid).children()
        (runner,) = [child for child in children if "deepspeed.launcher.runner" in child.cmdline()]
        runner.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    summary = read_json(run_dir / "summary.json")
    assert (run_dir / summary["checkpoint"] / "manifest.json").is_file()
    wait_for(lambda: not members(run_dir), seconds=10)


def test_an_unknown_launcher_is_refused(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for launcher in ("accelerate", "deepspeed"):
        assert f"{launcher} needs `pip install '{launcher}>=" in (launcher_problem(launcher) or "")
    done = train(shards, tmp_path / "run", options=("--launcher", "mpirun"), code=2)
    assert done.stderr.startswith("error: --launcher: unknown launcher mpirun")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


BY_HAND = (  # environment variables of each of three ranks
    {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"},
    {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_NODEID": "0",
    },
    {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    },
)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextlib.contextmanager
def by_hand(config: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start three ranks, each with the environment variables of a different program."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bert_dp.worker", str(config)],
            env={**os.environ, **address, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in BY_HAND
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_ranks_started_by_hand_stop_at_a_signal_and_name_a_failure(run_dir: Path, shards: Path) -> None:
    config = write_config(run_dir, shards, "compile=off batch.global_size=12 schedule.steps=100000")
    for number, victims in ((signal.SIGTERM, slice(3)), (signal.SIGKILL, slice(1))):
        began = len(metrics(run_dir))
        with by_hand(config) as ranks:
            wait_for(step_reached(run_dir, began + 3), seconds=240)
            assert "in use by another run" in refused("train", "--run-dir", str(run_dir), "--nproc", "1")
            for process in ranks[victims]:  # a batch system signals every process
                process.send_signal(number)
            outputs = [process.communicate(timeout=120)[0] for process in ranks]
            codes = [process.returncode for process in ranks]
        wait_for(lambda: not processes_of(run_dir), seconds=60)
        summary = read_json(run_dir / "summary.json")
        if number == signal.SIGTERM:
            assert codes == [0, 0, 0], outputs
            assert (summary["status"], summary["signal"], summary["world_size"]) == ("stopped", number, 3)
            assert re.search(r"^step 3 \|", outputs[0], re.MULTILINE)
            assert f"page: {run_dir / 'report.html'}" in outputs[0]
            assert outputs[1:] == ["", ""]
        else:
            assert codes == [-number, 1, 1], outputs
            failed = summary["failure"]
            assert (summary["status"], failed["rank"]) == ("failed", 0)
            assert failed["message"] == f"ended {NO_CAUSE}"
            assert "failed: rank 0" in outputs[0]
        assert summary["spent"]["seconds"] > 0
        (run_dir / "report.html").unlink()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | BY_HAND[1]
    command = [sys.executable, "-m", "bert_dp.worker", str(config)]
    lost = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert lost.returncode == 2
    assert "MASTER_ADDR and MASTER_PORT" in lost.stderr
    assert "Traceback" not in lost.stderr


def test_a_run_started_by_torchrun_equals_a_run_of_the_launcher(tmp_path: Path, shards: Path) -> None:
    """The documented command writes the same numbers and files, and other verbs accept the run."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (command,) = re.findall(r"^torchrun (.*)$", page, re.MULTILINE)
    settings = "compile=off log.to=[tensorboard]"
    made = write_config(tmp_path / "made", shards, settings)
    changes = {"8": "2", "own.yaml": str(made), "runs/own": "run"}
    words = [changes.get(word, word) for word in command.split()]
    run = [sys.executable, "-P", "-m", "torch.distributed.run", *words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run_dir, launched = tmp_path / "run", tmp_path / "launched"
    kept = f"cp --recursive --target-directory='{tmp_path}'"
    train(shards, launched, settings, options=("--after-save", kept))
    assert metrics(run_dir) == metrics(launched)
    assert {p.name for p in launched.iterdir()} == {p.name for p in run_dir.iterdir()}
    assert (launched / "config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    folders = (run_dir / "checkpoints", launched / "checkpoints", tmp_path)
    weights = [(folder / "step-00000002/model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] == weights[2]
    for word in ("step 2 |", f"page: {run_dir / 'report.html'}", "tensorboard: "):
        assert word in done.stdout
    assert (api.read_run(run_dir).summary or Summary(status="failed")).world_size == 2
    sent = here("report", str(run_dir), "--log-to", "tensorboard")
    assert sent.returncode == 0, sent.stderr
    resume_run(run_dir, "schedule.steps=4", nproc=2)
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def metrics(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in read_lines(run_dir / "metrics.jsonl")]
