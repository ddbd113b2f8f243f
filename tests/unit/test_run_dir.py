"""Which directories `bert-dp train` takes as a run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bert_dp import record
from bert_dp.config import dump_config, load_config
from launcher import training

CONFIG = load_config(None, ["schedule.steps=1", "data.sources=[builtin]"])


def put(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if name.endswith("/") else path.write_text("")

    return make


def checkpoint(folder: Path) -> None:
    record_of = folder / "checkpoints" / "step-00000001"
    record_of.mkdir(parents=True)
    record.write_json(record_of / "state.json", {"config": CONFIG.model_dump(mode="json")})


def copied(folder: Path) -> None:
    (folder / "config.yaml").write_text(dump_config(CONFIG))
    record.write_json(folder / "environment.json", {"launcher": "torchrun", "cpu_model": "x"})


@pytest.mark.parametrize(
    "fill",
    [
        put(),
        put(".env", ".git/config", "slurm-123.out", "logs/job.out"),
        put("checkpoints/lost+found/", "lost+found/"),
        put(".launcher.lock", "config.yaml", "logs/", "notes.txt"),
        checkpoint,
        copied,
    ],
)
def test_an_empty_directory_one_with_a_run_and_what_may_stand_beside_it(
    tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    fill(tmp_path)
    assert training.run_dir_issues(tmp_path, CONFIG, "auto") == []


@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (put("creds.json", ".env"), "creds.json"),
        (put("config.yaml", "environment.json", "src/"), "config.yaml, environment.json, src"),
        (put("metrics.jsonl"), "metrics.jsonl"),
        (put("summary.json"), "summary.json"),
        (put("checkpoints/best.pt"), "checkpoints"),
        (put("logs"), "logs"),
        (put("a", "b", "c", "d", "e"), "a, b, c and 2 more"),
        (put("slurm.out"), "slurm.out"),
    ],
)
def test_a_directory_that_holds_something_else_is_refused_and_stays(
    tmp_path: Path, fill: Callable[[Path], None], named: str
) -> None:
    fill(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (issue,) = training.run_dir_issues(tmp_path, CONFIG, "auto")
    assert issue == (
        f"--run-dir: {tmp_path} holds {named} but no run, and a run would write among what is yours; choose "
        f"a new directory, for example {tmp_path}/run"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_elsewhere_to_go_on_from_makes_it_no_run(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old")
    assert training.run_dir_issues(tmp_path / "new", CONFIG, str(tmp_path / "old")) == []
    assert training.run_dir_issues(tmp_path / "old", CONFIG, str(tmp_path / "old")) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    (issue,) = training.run_dir_issues(tmp_path / "mine", CONFIG, str(tmp_path / "old"))
    assert "holds x but no run" in issue
