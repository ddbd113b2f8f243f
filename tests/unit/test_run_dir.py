"""Tests of the directories that `bert-dp train` accepts as a run directory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files as record
from bert_dp.config import Config, dump_config
from launcher.job import Job
from launcher.machine import environment
from launcher.run.train import data_issues, is_complete, run_dir_issues, start_issues
from tests.helpers import make_config, write_files
from tests.states import FACTS

MACHINE = environment.probe()
CONFIG = make_config("schedule.steps=1")


def put(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if name.endswith("/") else path.write_text("")

    return make


def checkpoint(folder: Path, **facts: Any) -> None:
    saved = {**FACTS, "step": 1, "config": CONFIG.model_dump(mode="json"), **facts}
    write_files(folder, {"checkpoints/step-00000001/state.json": json.dumps(saved)})


def copied(folder: Path) -> None:
    (folder / "config.yaml").write_text(dump_config(CONFIG))
    record.write_json(folder / "environment.json", {"launcher": "torchrun", "cpu_model": "x"})


def killed_early(folder: Path) -> None:
    copied(folder)
    (folder / "config.yaml").unlink()
    put(".launcher.lock", "logs/rank-0.log", "notes.txt")(folder)


def on_separate_disks(folder: Path) -> None:
    copied(folder)
    for name in ("logs", "checkpoints"):
        (folder.parent / "disks" / name).mkdir(parents=True)
        (folder / name).symlink_to(folder.parent / "disks" / name)


BENIGN = (".env", ".git/config", "slurm-123.out", "logs/job.out", ".launcher.lock", "checkpoints/lost+found/")


@pytest.mark.parametrize("fill", [put(), put(*BENIGN), checkpoint, copied, killed_early, on_separate_disks])
def test_a_run_accepts_harmless_directories(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    fill(tmp_path)
    assert run_dir_issues(tmp_path, CONFIG, "auto") == []


@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (put("config.yaml", "environment.json", "src/"), "config.yaml, environment.json, src"),
        (put("metrics.jsonl"), "metrics.jsonl"),
        (put("checkpoints/best.pt"), "checkpoints"),
        (put("a", "b", "c", "d", "e"), "a, b, c and 2 more"),
        (put("logs/rank-0.error.json", ".env"), "logs"),
        (put(".launcher.lock", "config.yaml", "notes.txt"), "config.yaml, notes.txt"),
    ],
)
def test_a_foreign_directory_is_refused(tmp_path: Path, fill: Callable[[Path], None], named: str) -> None:
    fill(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (issue,) = run_dir_issues(tmp_path, CONFIG, "auto")
    assert (issue.setting, issue.kind) == ("--run-dir", "exists")
    assert f"contains {named} but no run" in issue.message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_complete_if_its_budget_is_spent(tmp_path: Path) -> None:
    """A larger budget makes a run incomplete. The unspent reserve of a dollar budget does not."""
    checkpoint(tmp_path, elapsed_s=1800.0, samples=10, config={"schedule": {"dollars": 0.5}})
    spent = ("steps=1", "hours=0.5", "tokens=1280", "dollars=0.5")
    for status, resume in (("done", "auto"), ("done", "never"), ("stopped", "auto")):
        record.write_json(tmp_path / "summary.json", {"status": status})
        for budget in (*spent, "steps=2", "hours=0.6", "tokens=1281", "dollars=0.6", "kwh=0.5"):
            config = make_config(f"schedule.{budget}", "data.sequence_length=128")
            is_whole = budget in spent and (status, resume) == ("done", "auto")
            assert is_complete(tmp_path, config, resume) == is_whole, budget


def test_a_forbidden_change_is_reported_with_old_and_new_value(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run")
    run, changed = tmp_path / "run", make_config("schedule.steps=1", "optim.beta1=0.5")
    line = (
        f"optim.beta1: 0.5, but the run has {CONFIG.optim.beta1}; undo the change or choose another --run-dir"
    )
    for place, resume in ((run, "auto"), (tmp_path / "new", str(run))):
        assert data_issues(place, resume, FACTS["data_hash"]) == []
        expected = line.replace("--run-dir", "--resume") if resume != "auto" else line
        assert [*map(str, run_dir_issues(place, changed, resume))] == [expected], "no data are needed"
        (issue,) = data_issues(place, resume, "1" * 64)
        assert "different data (hash 0000000000000000, now 1111111111111111)" in issue.message
    assert data_issues(run, "never", "1" * 64) == []
    (issue,) = run_dir_issues(run, CONFIG, "never")
    assert str(issue).startswith(f"--resume never: {run} already contains a run")
    (issue,) = run_dir_issues(run, CONFIG, str(tmp_path))
    assert str(issue).startswith(f"--resume: {tmp_path} contains no checkpoint")


def weights(run: Path, sha256: str) -> Path:
    """Write a run whose only checkpoint has weights with this hash."""
    checkpoint(run)
    files = {"model.safetensors": {"sha256": sha256}}
    record.write_json(run / "checkpoints" / "step-00000001" / "manifest.json", {"files": files})
    return run


def begun_with(source: Path | None) -> Config:
    return make_config("schedule.steps=1", *([f"run.init_from={source}"] if source else []))


def test_the_initial_weights_of_a_run_may_move_but_not_change(tmp_path: Path) -> None:
    one, two = weights(tmp_path / "one", "1" * 64), weights(tmp_path / "two", "2" * 64)
    init = {"checkpoint": str(one / "checkpoints/step-00000001"), "sha256": "1" * 64, "tensors": 1, "of": 1}
    for source, others in ((one, (two, None)), (None, (one,))):
        run, begun = tmp_path / f"of-{source and source.name}", begun_with(source)
        checkpoint(run, config=begun.model_dump(mode="json"), init_from=init if source else None)
        assert run_dir_issues(run, begun, "auto") == []
        for other in others:
            (issue,) = run_dir_issues(run, begun_with(other), "auto")
            assert issue.setting == "run.init_from"
            assert all(str(name or "random weights") in issue.message for name in (source, other))
    run, moved = tmp_path / "of-one", one.rename(tmp_path / "moved")
    job = Job("run", begun_with(one), MACHINE)
    assert start_issues(job, run, "auto") == []
    (issue,) = start_issues(job, tmp_path / "new", "auto")
    assert issue.setting == "run.init_from"
    for source in (moved, None):
        assert run_dir_issues(run, begun_with(source), "auto") == []


def test_a_world_writable_directory_takes_no_new_run_but_keeps_an_existing_one(tmp_path: Path) -> None:
    for mode, refused in ((0o770, False), (0o707, True)):
        tmp_path.chmod(mode)
        issues = run_dir_issues(tmp_path, CONFIG, "auto")
        assert ["is writable by every user" in issue.message for issue in issues] == [True] * refused
    checkpoint(tmp_path)
    assert run_dir_issues(tmp_path, CONFIG, "auto") == []


def test_a_checkpoint_folder_is_no_run_directory_but_a_run_can_resume_from_it(tmp_path: Path) -> None:
    checkpoint(old := tmp_path / "old")
    for folder in (old / "checkpoints", old / "checkpoints" / "step-00000001"):
        (issue,) = run_dir_issues(folder, CONFIG, "auto")
        assert "but no run" in issue.message
        assert run_dir_issues(tmp_path / "new", CONFIG, str(folder)) == []
    for place in (tmp_path / "new", old):
        assert run_dir_issues(place, CONFIG, str(old)) == []
    put("mine/x")(tmp_path)
    (issue,) = run_dir_issues(tmp_path / "mine", CONFIG, str(old))
    assert "contains x but no run" in issue.message


@pytest.mark.parametrize("name", ["config.yaml", ".launcher.lock", "heartbeats", "logs/rank-0.log"])
def test_a_run_directory_with_linked_files_is_refused(tmp_path: Path, name: str) -> None:
    """A run would write through the link."""
    folder = tmp_path / "run"
    put("logs/", "heartbeats/")(folder)
    copied(folder)
    put("mine/x")(tmp_path)
    path = folder / name
    for target in (tmp_path / "mine", tmp_path / "mine/x"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.symlink_to(target)
        (issue,) = run_dir_issues(folder, CONFIG, "auto")
        assert str(issue).startswith(f"--run-dir: {path} is a link")
