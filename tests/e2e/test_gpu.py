"""`make gpu` without a GPU: it says so; its short form runs the checks themselves on the CPU, and goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cli import here
from tests.gpu import checks
from tests.helpers import read_json

ROOT = Path(__file__).parents[2]
# the others start benchmarks, faults and searches that have tests of their own
CHOSEN = ("lookup gradient", "engines", "finetuning", "no host sync", "bit-equal resume", "timers")


def gpu(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    done = gpu("--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "no GPU that torch can use: nothing was checked" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_short_form_runs_and_goes_on(tmp_path: Path) -> None:
    chosen = [part for name in CHOSEN for part in ("--only", name)]
    done = gpu("--short", "--out", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["environment"]["device"] == "CPU, short form"
    assert [check["check"] for check in record["checks"]] == list(CHOSEN)
    facts = {check["check"]: check["facts"] for check in record["checks"]}
    assert facts["engines"]["cells"] == 2
    assert facts["no host sync"]["refused_by_torch"] is False
    table = done.stdout.partition("2 x CPU, short form\n")[2].splitlines()
    assert [line.split("  ")[0].strip() for line in table if line[0] != " "].count("right") == 6
    before = (tmp_path / "results.jsonl").read_text()
    again = gpu("--short", "--out", str(tmp_path), "--only", "timers")
    assert "timers: already done" in again.stdout
    assert (tmp_path / "results.jsonl").read_text() == before


def test_throughput_is_read_off_what_scale_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb accepts what it is asked; its file is that of an earlier run."""

    def asked(*arguments: str, **_: Any) -> subprocess.CompletedProcess[str]:
        out = Path(arguments[arguments.index("--out") + 1])
        done = here(*arguments, "--dry-run")
        out.mkdir()
        shutil.copy(ROOT / "benchmarks/raw/2026-11-21-scaling/scaling.json", out)
        return done

    monkeypatch.setattr(checks, "bert_dp", asked)
    found = checks.scaling(checks.Place(devices=2, short=True, folder=tmp_path), length=128)
    assert found.problems == []
    cells = {cell["id"]: cell for cell in read_json(tmp_path / "scale" / "scaling.json")["cells"]}
    assert found.facts["weak-ddp-n1"]["tokens_per_s"] == cells["weak-ddp-n1"]["tokens_per_s"]


def test_a_check_that_breaks_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif '--one' in sys.orig_argv: os._exit(3)\n")
    done = gpu("--short", "--out", str(tmp_path / "out"), "--only", "timers", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert "ended with exit code 3" in json.loads(line)["problems"][0]
    assert "FAILED" in done.stdout
