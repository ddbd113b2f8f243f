"""The run directory is moved or deleted while the run trains: it is said, the run ends, no second appears."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_dp import record
from tests.e2e.cli import begin, open_to_others, step_reached, umask, wait_for, write_config

ENDLESS = ("schedule.steps=1000000", "checkpoint.every_steps=2", "compile=off")
PATIENCE_S = 300.0


def delete(run_dir: Path) -> None:
    while run_dir.exists():  # the run still writes there: a file that comes meanwhile stops rmtree
        shutil.rmtree(run_dir, ignore_errors=True)


def exchange(run_dir: Path) -> None:
    """Moved, and another directory of the user's is there."""
    run_dir.rename(run_dir.with_name("elsewhere"))
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")


@pytest.mark.parametrize("lose", [delete, exchange])
def test_a_run_whose_directory_has_gone_says_so_and_ends(
    tmp_path: Path, shards: Path, lose: Callable[[Path], None]
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with umask(0):
        process = begin(shards, run_dir, *ENDLESS, nproc=1, options=("--max-restarts", "3"))
    wait_for(step_reached(run_dir, 5), PATIENCE_S)
    lose(run_dir)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said + errors
    assert "Traceback" not in said + errors
    assert "restart 1" not in said
    if lose is delete:
        assert f"failed: the run directory {run_dir} was deleted during the run\n" in said
        assert "went with it" in said
        assert not run_dir.exists()
        return
    assert [p.name for p in run_dir.iterdir()] == ["notes.txt"]
    assert f"failed: the run directory {run_dir} was moved to {elsewhere} during the run\n" in said
    newest = record.list_checkpoints(elsewhere / "checkpoints")[0]
    assert f"the newest checkpoint is {newest};" in said
    assert f"--run-dir {elsewhere} goes on from there" in said
    summary = record.read_json(elsewhere / "summary.json") or {}
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert f"moved to {elsewhere}" in summary["cause"]
    assert open_to_others(elsewhere) == []


def test_a_rank_without_our_launcher_notices_too(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(run_dir, shards, *ENDLESS, "run.device=cpu")
    command = [sys.executable, "-m", "bert_dp.worker", str(config)]
    with umask(0):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for(step_reached(run_dir, 5), PATIENCE_S)
    exchange(run_dir)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1, errors
    assert f"error: the run directory {run_dir} was moved to {tmp_path / 'elsewhere'} during" in errors
    assert "Traceback" not in errors
    assert [p.name for p in run_dir.iterdir()] == ["notes.txt"]
    assert open_to_others(tmp_path / "elsewhere" / "checkpoints") == []
