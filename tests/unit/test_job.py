"""What verbs that start runs share: devices, and the directory that they go on in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from launcher import job, results
from launcher.machine import environment
from launcher.machine.gpus import Gpu
from launcher.output import Output, claim, identity
from launcher.results import LrPlanFile
from launcher.run.restarts import Policy
from launcher.run.train import start_warnings
from tests.helpers import issues_of, make_config

ASKED = {"repeats": 3, "steps": 50, "tokens": None}


def plan(**settings: Any) -> LrPlanFile:
    return LrPlanFile(config_hash="abc", settings={**ASKED, **settings})


def output(out: Path, **settings: Any) -> Output[LrPlanFile]:
    fixed, grows = ("config_hash", "settings"), ("settings.repeats",)
    return Output(out, "grid", "grid.json", plan(**settings), fixed, grows)


def made(device: str, gpus: int) -> job.Job:
    shown = tuple(Gpu(k, "a", 80.0, None) for k in range(gpus))
    machine = dataclasses.replace(environment.probe(), gpus=shown)
    return job.Job("x", make_config(f"run.device={device}"), machine)


@pytest.mark.parametrize(
    ("device", "gpus", "setting", "ranks"),
    [
        ("auto", 0, "auto", 2),
        ("auto", 4, "auto", 4),
        ("auto", 4, "3", 3),
        ("cpu", 0, "64", 64),
        ("auto", 2, "3", "--nproc: 3 ranks but 2 GPUs; use --nproc 2, or --set run.device=cpu"),
        ("cuda", 0, "1", "run.device: cuda, but this machine shows no GPU; use run.device=cpu or auto"),
        ("cpu", 0, "two", "--nproc: two is not auto or a whole number of 1 to "),
        ("cpu", 0, "0", "--nproc: 0 is not auto or a whole number of 1 to "),
    ],
)
def test_ranks_need_devices(device: str, gpus: int, setting: str, ranks: int | str) -> None:
    if isinstance(ranks, int):
        assert made(device, gpus).choose_ranks(setting) == ranks
        return
    assert issues_of(made(device, gpus).choose_ranks, setting)[0].startswith(ranks)


RESTART, UNSAVED = "--max-restarts: checkpoint.every_steps or checkpoint.keep is 0", "checkpoint.keep is 0"


@pytest.mark.parametrize(
    ("gpus", "ranks", "restarts", "saves", "warned"),
    [
        (0, 3, 1, (5, 2), []),
        (0, 4, 0, (5, 2), ["4 CPU ranks share 3 cores"]),
        (4, 4, 0, (5, 2), []),
        (0, 1, 0, (0, 2), []),
        (0, 1, 1, (0, 2), [RESTART]),
        (0, 1, 0, (0, 0), [UNSAVED]),
        (0, 1, 1, (0, 0), [RESTART, UNSAVED]),
    ],
)
def test_what_is_allowed_but_hardly_meant_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ranks: int,
    restarts: int,
    saves: tuple[int, int],
    warned: list[str],
) -> None:
    asked = made("auto", gpus)
    checkpoint = asked.config.checkpoint.model_copy(update={"every_steps": saves[0], "keep": saves[1]})
    asked = dataclasses.replace(asked, config=asked.config.model_copy(update={"checkpoint": checkpoint}))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    said = start_warnings(asked, ranks, tmp_path, Policy(restarts), None)
    assert len(said) == len(warned)
    assert all(line.startswith(start) for line, start in zip(said, warned, strict=True))
    tmp_path.chmod(0o707)
    assert "can be written by every user" in start_warnings(asked, ranks, tmp_path, Policy(), None)[-1]


def test_who_may_stand_where_a_verb_writes(tmp_path: Path) -> None:
    assert output(tmp_path / "new").issues() == []
    assert output(tmp_path).issues() == []
    (tmp_path / ".lock").touch()
    assert output(tmp_path).issues() == []
    (tmp_path / "mine.txt").touch()
    (issue,) = output(tmp_path).issues()
    assert "is not empty and holds no grid; choose another directory" in issue
    (issue,) = output(tmp_path / "mine.txt" / "out").issues()
    assert "cannot be made" in issue


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({}, None),
        ({"repeats": 5}, None),  # more of them go on in the same directory
        ({"repeats": 2}, "holds another grid (settings.repeats differ)"),
        ({"steps": 60}, "holds another grid (settings.steps differ)"),
        ({"tokens": 5}, "holds another grid (settings.tokens differ)"),
    ],
)
def test_what_a_directory_was_begun_with(tmp_path: Path, now: dict[str, Any], words: str | None) -> None:
    results.write(tmp_path / "grid.json", plan())
    issues = output(tmp_path, **now).issues()
    assert [words is not None and words in issue for issue in issues] == ([True] if words else [])


@pytest.mark.parametrize(("then", "refused"), [([], False), (["adamw", "lamb"], True)])
def test_a_directory_begun_with_an_option_that_was_cut(
    tmp_path: Path, then: list[str], refused: bool
) -> None:
    results.write(tmp_path / "grid.json", plan(optimizers=then))
    issues = output(tmp_path).issues()
    assert bool(issues) == refused
    if refused:
        assert "settings that this version does not have (settings.optimizers)" in issues[0]


def test_runs_of_another_machine_or_other_data_are_not_mixed(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.output.prepare_data", lambda config: shards)
    config = make_config()
    out = tmp_path / "out"
    out.mkdir()
    first = output(out).begin(config)
    assert first.plan == results.read(out / "grid.json", LrPlanFile)
    assert first.plan.machine["data"] == first.manifest.hash
    results.write(out / "grid.json", first.plan.model_copy(update={"tokens": 7}))
    later = output(out, repeats=4).begin(config).plan
    assert (later.tokens, later.settings["repeats"]) == (7, 4)  # what was measured stays
    other = {**first.plan.machine, "cores": 99}
    results.write(out / "grid.json", first.plan.model_copy(update={"machine": other}))
    with pytest.raises(
        ConfigError, match=r"was started with another machine, versions or data \(cores: 99 then, "
    ):
        output(out).begin(config)


def test_identity_is_of_the_machine_and_the_data() -> None:
    facts = environment.probe().to_json()
    assert identity(facts, "a") == identity(facts, "a") == json.loads(json.dumps(identity(facts, "a")))
    assert identity(facts, "a") != identity(facts, "b")
    assert identity({**facts, "affinity_cores": 99}, "a") != identity(facts, "a")


@pytest.mark.parametrize("stands", [True, False])
def test_a_directory_in_which_nothing_was_written_is_as_before(tmp_path: Path, stands: bool) -> None:
    directory = tmp_path / "run"
    if stands:
        directory.mkdir()
    with claim(directory, ".lock", "--run-dir", "run"):
        assert (directory / ".lock").exists()
        again = claim(directory, ".lock", "-", "run")
        with pytest.raises(ConfigError, match="in use by another run"):
            again.__enter__()
    assert directory.exists() == stands
    assert not list(tmp_path.rglob(".lock"))
    with claim(directory, ".lock", "--run-dir", "run"):
        (directory / "config.yaml").touch()
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "config.yaml"]
