"""Test `make gpu`: without a GPU, in its short form on the CPU, with time limits, signals and bad input."""

import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.cli import Done, ended, wait_for
from tests.gpu.__main__ import PARTS
from tests.helpers import read_json, read_lines, write_files
from tests.shards import write_shards

ROOT = Path(__file__).parents[2]
# makes the part `machine` hang with a child process, and the part `lookup` exit with code 3
BROKEN = """
import os, subprocess, sys, time
if "--one" in sys.orig_argv and "machine" in sys.orig_argv:
    subprocess.Popen(["sleep", "SECONDS"])
    time.sleep(1000)
if "--one" in sys.orig_argv and "lookup" in sys.orig_argv:
    os._exit(3)
"""


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu", *options]


def gpu(*options: str, code: int | None) -> Done:
    return ended(subprocess.run(command(*options), cwd=ROOT, capture_output=True, text=True), code)


def sleepers(seconds: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_checked(tmp_path: Path) -> None:
    done = gpu("--out", str(tmp_path / "out"), code=1)
    assert "no GPU that torch can use: nothing was checked" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(1500)
def test_the_short_form_runs_every_part_and_resumes(tmp_path: Path) -> None:
    done = gpu("--short", "--out", str(tmp_path), code=None)
    results = {line["part"]: line for line in read_lines(tmp_path / "results.jsonl")}
    assert {name: line["problems"] for name, line in results.items() if line["problems"]} == {}
    expected = set(PARTS) - {"bert", "micro-512", "length-512", "tune-512", "trainer"}
    assert set(results) == expected
    facts = {name: line["facts"] for name, line in results.items()}
    skipped = {name for name, found in facts.items() if "skipped" in found}
    assert skipped <= {"deepspeed", "kernels"}, "deepspeed may not be installed, and kernels need a GPU"
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "record.json")
    assert record["environment"]["device"] == "CPU, short form"
    assert record["environment"]["git_commit"]
    assert {part["part"] for part in record["parts"]} == expected
    assert facts["engines"]["cells"] == 2
    assert facts["2-ranks-on-one-gpu"]["cells"] == facts["4-ranks-on-one-gpu"]["cells"] == 1
    assert facts["host-sync"]["refused_by_torch"] is False
    assert facts["step"]["ours:eager"]["tokens_per_s"] > 0
    assert facts["pretrain"]["heldout_loss"] > 0
    assert (tmp_path / "raw" / "profile" / "trace.json.gz").exists()
    assert (tmp_path / "raw" / "pretrain" / "run" / "metrics.jsonl").exists()
    before = (tmp_path / "results.jsonl").read_text()
    again = gpu("--short", "--out", str(tmp_path), "timers", code=0)
    assert "timers: already done" in again.stdout
    assert (tmp_path / "results.jsonl").read_text() == before


@pytest.mark.parametrize("limit", ["--total", "SIGTERM"])
def test_a_hung_part_is_ended_with_its_child_processes(tmp_path: Path, limit: str) -> None:
    seconds = "1000.25" if limit == "--total" else "1000.75"  # the two cases may run at the same time
    (tmp_path / "sitecustomize.py").write_text(BROKEN.replace("SECONDS", seconds))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    total = ["--total", "20"] if limit == "--total" else []
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("--short", "--out", str(out), *total, "lookup", "machine"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: sleepers(seconds))
    if limit == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (143 if limit == "SIGTERM" else 1)
    wait_for(lambda: not sleepers(seconds), seconds=10)
    if limit == "--total":  # SIGTERM may arrive before the first part is recorded
        lines = {line["part"]: line for line in read_lines(out / "results.jsonl")}
        assert "ended with exit code 3" in lines["lookup"]["problems"][0]
        assert "machine" in lines
        assert "lookup" in (out / "table.txt").read_text()
        assert "FAILED" in output


@pytest.mark.quick
def test_bad_input_is_refused(tmp_path: Path) -> None:
    for options in (["nosuchpart"], ["--data", str(tmp_path)]):
        gpu("--short", "--out", str(tmp_path / "out"), *options, code=2)
    assert not (tmp_path / "out").exists()


def test_the_kit_runs_without_git_and_without_an_installation(tmp_path: Path) -> None:
    """Run a copy of the sources; the installed packages replace the wheels of the kit."""
    copy, kit, out = tmp_path / "copy", tmp_path / "copy" / ".gpukit", tmp_path / "out"
    for folder in ("launcher", "bert_dp", "configs", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("raw", "__pycache__"))
    metadata = "Metadata-Version: 2.1\nName: bert-dp\nVersion: 9.9.9\n"
    points = importlib.metadata.distribution("bert-dp").read_text("entry_points.txt") or ""
    write_files(kit / "bert_dp-9.9.9.dist-info", {"METADATA": metadata, "entry_points.txt": points})
    (kit / "COMMIT").write_text("0123abc\n")
    write_shards(tmp_path / "shards", vocab_size=32_768, length=128)
    with tarfile.open(kit / "shards.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "shards", arcname="shards")
    script = ["bash", str(copy / "tests" / "gpu" / "offline.sh"), "--rehearse", "--total", "500", "pretrain"]
    environ = {"PYTHON": sys.executable, "OUT": str(out), "SITE": str(tmp_path / "site")}
    environ = {name: value for name, value in os.environ.items() if name != "BERT_DP_COMMIT"} | environ
    done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {"record.json", "table.txt", "raw.tar.gz"}
    record = read_json(out / "record.json")
    assert record["environment"]["git_commit"] == "0123abc"
    assert record["environment"]["versions"]["bert-dp"] == "9.9.9"
    (part,) = record["parts"]
    # a loss above ln 4096 shows that the kit's text was used: the built-in vocabulary has 4096 tokens
    assert part["facts"]["heldout_loss"] > math.log(4096)
    with tarfile.open(out / "raw.tar.gz") as tar:
        assert {"raw/pretrain/run/metrics.jsonl", "logs/pretrain.log"} <= set(tar.getnames())


@pytest.mark.quick
@pytest.mark.parametrize("sources", [[], ["nothing.txt"]])
def test_a_kit_without_text_is_refused(tmp_path: Path, sources: list[str]) -> None:
    script = tmp_path / "tests" / "gpu" / "make_kit.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "make_kit.sh", script)
    done = subprocess.run(["bash", str(script), *sources], capture_output=True, text=True, check=False)
    assert (done.returncode, "DATA" in done.stderr) == (2, True)
    assert not (tmp_path / ".gpukit").exists()
