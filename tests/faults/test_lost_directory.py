"""The run directory is moved or deleted while the run trains: it is said, the run ends, no second appears."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_dp import record
from bert_dp.config import dump_config, load_config
from launcher.job import shipped_configs
from tests.e2e.cli import TINY, open_to_others, start, step_reached, tiny, umask, wait_for
from tests.shards import write_shards

ENDLESS = ("schedule.steps=1000000", "checkpoint.every_steps=2", "compile=off")
PATIENCE_S = 300.0


def delete(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def exchange(run_dir: Path) -> None:
    """Moved, and another directory of the user's is there."""
    run_dir.rename(run_dir.with_name("elsewhere"))
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")


@pytest.mark.parametrize("lose", [delete, exchange])
def test_a_run_whose_directory_has_gone_says_so_and_ends(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    options = tiny(write_shards(tmp_path / "s"), *ENDLESS)
    with umask(0):
        process = start(
            *("train", "quickstart", *options, "--nproc", "1"),
            *("--run-dir", str(run_dir), "--max-restarts", "3"),
        )
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


def test_a_rank_without_our_launcher_notices_too(tmp_path: Path) -> None:
    run_dir, shards = tmp_path / "run", write_shards(tmp_path / "s")
    run_dir.mkdir()
    settings = [*TINY, f"data.path={shards}", *ENDLESS, "run.device=cpu"]
    (run_dir / "config.yaml").write_text(
        dump_config(load_config(shipped_configs() / "quickstart.yaml", settings))
    )
    command = [sys.executable, "-m", "bert_dp.worker", str(run_dir / "config.yaml")]
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
