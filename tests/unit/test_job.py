"""What verbs that start runs share: devices, and the directory that they go on in."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ConfigError
from launcher import job, results
from launcher.machine import environment
from launcher.machine.gpus import Gpu
from launcher.output import KeptPlan, Output, claim, identity
from launcher.results import LrPlanFile
from launcher.run.restarts import Policy
from launcher.run.train import start_warnings
from tests.helpers import issues_of, make_config, write_files

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


def test_what_is_allowed_but_hardly_meant_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for gpus, ranks, restarts, every, keep, warned in (
        (0, 3, 1, 5, 2, []),
        (0, 4, 0, 5, 2, ["4 CPU ranks share 3 cores"]),
        (4, 4, 0, 5, 2, []),
        (0, 1, 0, 0, 2, []),
        (0, 1, 1, 0, 2, [RESTART]),
        (0, 1, 0, 0, 0, [UNSAVED]),
        (0, 1, 1, 0, 0, [RESTART, UNSAVED]),
    ):
        saves = make_config(f"checkpoint.every_steps={every}", f"checkpoint.keep={keep}")
        asked = dataclasses.replace(made("auto", gpus), config=saves)
        said = start_warnings(asked, ranks, tmp_path, Policy(restarts), None)
        assert [line[: len(start)] for line, start in zip(said, warned, strict=True)] == warned
    tmp_path.chmod(0o707)
    assert "can be written by every user" in start_warnings(asked, 1, tmp_path, Policy(), None)[-1]


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
    gpu = {"name": "a", "driver": "570"}
    facts = {**facts, "gpus": [gpu], "versions": {"torch": "2.11", "deepspeed": "0.17", "rich": "14"}}
    for change in (
        {"affinity_cores": 99},
        {"cpu_model": "x"},
        {"gpus": [{**gpu, "driver": "580"}]},
        {"gpus": [gpu, gpu]},
        *({"versions": {**facts["versions"], name: "3"}} for name in ("torch", "deepspeed", "bert-dp")),
    ):
        assert identity({**facts, **change}, "a") != identity(facts, "a"), change
    for change in ({"memory_available_gib": 1.0}, {"versions": {**facts["versions"], "rich": "15"}}):
        assert identity({**facts, **change}, "a") == identity(facts, "a"), change


def test_the_seconds_of_all_calls_are_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 103.0, 110.0))
    monkeypatch.setattr("launcher.output.time.monotonic", lambda: next(now))
    kept = KeptPlan(tmp_path / "grid.json", plan().model_copy(update={"seconds": 50.0}))
    kept.save()
    kept.save()
    assert kept.plan.seconds == results.read(tmp_path / "grid.json", LrPlanFile).seconds == 60.0


def test_the_configuration_of_a_directory_that_is_gone_on_with_is_its_own(tmp_path: Path) -> None:
    assert job.find_config(None, tmp_path).stem == "quickstart"
    (tmp_path / "config.yaml").touch()
    assert job.find_config(None, tmp_path) == tmp_path / "config.yaml"
    place = made("cpu", 0).directory(None, "tune", "batch")
    assert re.fullmatch(r"tune/x-batch-\d{8}-\d{6}", str(place.relative_to(Path.cwd())))
    assert made("cpu", 0).directory(tmp_path / "a" / ".." / "b", "tune") == tmp_path / "b"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("parallel.engine=independent", "parallel.engine: independent trains a model of its own"),
        ("parallel.engine=accelerate", "parallel.engine: accelerate needs `pip install"),
        ("parallel.engine=deepspeed", "parallel.engine: deepspeed needs `pip install"),
        ("run.init_from={}", "run.init_from: {} holds no checkpoint"),
        ("run.init_from={}/none", "run.init_from: {}/none does not exist"),
        ("data.tokenizer={}", "data.tokenizer: {} is not a regular file"),
        ("data.sources=[{}/*.txt]", "data.sources: {}/*.txt matches no file"),
        ("data.sources=[{}/**/*.txt]", ""),
    ],
)
def test_what_a_configuration_names_and_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, said: str
) -> None:
    monkeypatch.setattr(job, "has_package", lambda name: name not in ("accelerate", "deepspeed"))
    write_files(tmp_path, {"a/b/c.txt": "text"})
    issues = job.input_issues(make_config("data.sources=[builtin]", setting.format(tmp_path)))
    assert [line.startswith(said.format(tmp_path)) for line in issues] == ([True] if said else [])


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
