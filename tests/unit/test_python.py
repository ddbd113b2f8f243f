"""Tests of bert-dp's Python interface: imports, Run objects and exceptions. No rank is started."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert_dp
from bert_dp import api, files
from bert_dp.api import overrides
from bert_dp.config import parse_overrides, read_yaml
from tests.e2e.cli import here
from tests.helpers import failed, issues_of, write_files
from tests.report_fixture import SUMMARY, make_run
from tests.states import FACTS


def test_an_import_loads_no_dependency_and_train_does_not_load_torch() -> None:
    """Public names stay callable after every submodule is imported."""
    code = (
        "import sys, bert_dp\n"
        "assert set(bert_dp._MODULES) < set(dir(bert_dp))\n"
        "assert not hasattr(bert_dp, 'nothing')\n"
        "assert not {'torch', 'launcher', 'pydantic'} & set(sys.modules)\n"
        "bert_dp.train, bert_dp.read_run, bert_dp.Run\n"
        "assert 'bert_dp.api' in sys.modules\n"
        "assert not {'torch', 'numpy', 'launcher', 'typer'} & set(sys.modules)\n"
        "bert_dp.load\n"
        "import importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(bert_dp.__path__, 'bert_dp.'):\n"
        "    if not module.name.endswith('gpu_kernels'):\n"
        "        importlib.import_module(module.name)\n"
        "assert [name for name in bert_dp._MODULES if not callable(getattr(bert_dp, name))] == []\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_of_a_directory_are_rows_with_their_settings(tmp_path: Path) -> None:
    done, killed = make_run(tmp_path / "done"), make_run(tmp_path / "killed")
    going = make_run(tmp_path / "going")
    for path in (killed, going):
        (path / "summary.json").unlink()
    with files.lock(going / ".lock"):
        rows = bert_dp.runs(tmp_path)
        table = here("runs", str(tmp_path)).stdout.splitlines()
    rows = {row["run"]: row for row in rows}
    states = {"done": "done", "killed": "killed", "going": "running"}
    assert {name: row["status"] for name, row in rows.items()} == states
    row = rows["done"]
    assert Path(row["directory"]) == done
    assert (row["heldout_loss"], row["tokens"], row["step"]) == (6.25, 819200, 100)
    assert row["optim.lr"] == read_yaml(done / "config.yaml")["optim"]["lr"]
    assert 0 <= row["age_s"] < 60
    assert all(not isinstance(value, dict) for value in row.values())
    assert dict(line.split()[:2] for line in table[1:]) == states
    (line,) = issues_of(bert_dp.runs, tmp_path / "nowhere")
    assert line.startswith("DIR: ")


def test_read_run_returns_summary_metrics_and_paths(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / "report.html").write_text("a page")
    write_files(path, {"checkpoints/step-00000100/state.json": "not read here"})
    run = bert_dp.read_run(os.path.relpath(path))
    assert run.directory == Path(run) == path
    assert run.summary.heldout_loss == SUMMARY["heldout_loss"]
    assert [line["step"] for line in run.metrics] == list(range(10, 110, 10))
    assert [line["loss"] for line in run.evals] == [6.25]
    assert all(not isinstance(v, (dict, list)) for line in (*run.metrics, *run.evals) for v in line.values())
    assert run.checkpoint is None  # an unreadable checkpoint does not count
    assert run.report == path / "report.html"
    assert len(repr(run)) < 400 + len(str(path))
    for name in ("summary.json", "report.html"):
        (path / name).unlink()
    run = bert_dp.read_run(path)
    assert (run.summary, run.report, len(run.metrics)) == (None, None, 10)
    (line,) = issues_of(bert_dp.read_run, tmp_path)
    assert line.startswith(f"{tmp_path}: not a run directory")


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        ({"schedule.steps": 20, "schedule": {"min_lr": 0.0}}, {"schedule": {"steps": 20, "min_lr": 0.0}}),
        ({"optim": {"lr": 1e-7}}, {"optim": {"lr": 1e-7}}),
        (
            {"data.sources": ("\U0001f600 é", "no: 'yes'")},
            {"data": {"sources": ["\U0001f600 é", "no: 'yes'"]}},
        ),
        ({"a": "1e-3", "b": "null", "c": ""}, {"a": "1e-3", "b": "null", "c": ""}),
        ({"a": None, "b": True, "c": Path("x")}, {"a": None, "b": True, "c": "x"}),
        ({"a": np.int64(3), "b": np.float32(0.5)}, {"a": 3, "b": 0.5}),
        ({}, {}),
    ],
)
def test_settings_reach_the_verb_unchanged(settings: dict[str, Any], tree: dict[str, Any]) -> None:
    assert parse_overrides(list(overrides(settings))) == tree


def test_a_setting_of_an_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="PathLike"):
        list(overrides({"a": object()}))


def test_bad_input_raises_every_issue_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"schedule.stepz": 1, "optim": {"lr": -1}, "data.sources": ["builtin"]}
    with pytest.raises(bert_dp.ConfigError) as caught:
        bert_dp.train("quickstart", settings=settings)
    assert [i.setting for i in caught.value.issues] == ["schedule.stepz", "optim.lr"]
    assert "did you mean schedule.steps?" in str(caught.value)
    with pytest.raises(bert_dp.ConfigError) as caught:
        bert_dp.train("quickstart", run_dir="r", nproc=0)
    assert [(i.setting, i.kind, i.value) for i in caught.value.issues] == [("--nproc", "out_of_range", "0")]
    (line,) = issues_of(bert_dp.train, "quickstart", run_dir="r", launcher="mpirun")
    assert line.startswith("--launcher: ")
    (line,) = issues_of(bert_dp.train, "quickstrat", run_dir="r")
    assert "did you mean quickstart?" in line
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().err == ""


def test_arguments_reach_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(api, "_follow", lambda words, **_: calls.append(words) or api._Outcome(0, []))
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path / "run")
    write_files(path, {"checkpoints/step-00000100/state.json": json.dumps({**FACTS, "step": 100})})
    more = {"resume": Path("/x/step-1"), "launcher": "accelerate", "settings": {"schedule.steps": 20}}
    run = bert_dp.train(nproc=3, run_dir=path, **more)
    options = f"--nproc 3 --launcher accelerate --run-dir {path} --resume /x/step-1 --set schedule.steps=20"
    assert calls == [["train", *options.split(), "--"]]
    assert run.checkpoint == path / "checkpoints" / "step-00000100"
    bert_dp.train("quickstart")
    place = Path(calls[1][calls[1].index("--run-dir") + 1])
    assert re.fullmatch(r"runs/quickstart-\d{8}-\d{6}", str(place.relative_to(tmp_path)))
    assert calls[1][-2:] == ["--", "quickstart"]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that sets how the verb ends, in a directory with a failed earlier start."""
    older = failed("older", "killed", where="older.py:1", fix=["an older fix"])
    path = make_run(tmp_path / "run", summary=older)

    def end(code: int, summary: dict[str, Any] | None, *output: str, interrupted: bool = False) -> Path:
        def follow(_: object, **__: object) -> api._Outcome:
            if summary is not None:
                (path / "summary.json").unlink()
                write_files(path, {"summary.json": json.dumps(summary)})
            return api._Outcome(code, ["some line", *output], interrupted)

        monkeypatch.setattr(api, "_follow", follow)
        return path

    return end


NO_SPACE = ["error: /x: No space left on device"]
CARD = ["failed: the run directory was deleted", "  fix: start again", "  | step 3"]
HANG = failed("no progress", "hang", rank=1)
MEMORY = failed("no memory", where="a.py:3", fix=["batch.micro_size=4"])


@pytest.mark.parametrize(
    ("code", "summary", "output", "kind", "lines"),
    [
        (1, HANG, NO_SPACE, "hang", ["rank 1: no progress"]),
        (1, MEMORY, [], "error", ["no memory", "at a.py:3", "batch.micro_size=4"]),
        (143, {"status": "stopped", "signal": 15}, NO_SPACE, "stopped", ["SIGTERM: stopped"]),
        (1, None, NO_SPACE, "error", ["/x: No space left on device"]),
        (1, None, CARD, "error", ["the run directory was deleted"]),
        (-9, None, NO_SPACE, "killed", ["killed by signal 9"]),
    ],
)
def test_a_failure_raises_with_kind_cause_and_hint(
    ended: Callable[..., Path],
    code: int,
    summary: dict[str, Any] | None,
    output: list[str],
    kind: str,
    lines: list[str],
) -> None:
    path = ended(code, summary, *output)
    with pytest.raises(bert_dp.TrainingFailed) as caught:
        bert_dp.train(run_dir=path)
    assert caught.value.kind == kind
    assert caught.value.cause.startswith(lines[0])
    assert caught.value.run.directory == path
    shown = str(caught.value).splitlines()
    assert shown[-1] == f"run: {path}"
    assert shown[0].startswith(lines[0])
    assert shown[1:-1] == lines[1:]


@pytest.mark.parametrize("code", [130, 0, -2, 129])
def test_an_interrupt_is_raised_for_any_exit_code(ended: Callable[..., Path], code: int) -> None:
    path = ended(code, {"status": "stopped"}, interrupted=True)
    with pytest.raises(KeyboardInterrupt, match="resumes the run"):
        bert_dp.train(run_dir=path)
