"""Tests of launcher.job: device selection, output directories and missing inputs."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bert_dp.config import MAX_RANKS, ConfigError
from launcher import job, results
from launcher.job import Output, VerbOptions, identity, lock_output_dir, place_issues
from launcher.machine import environment
from launcher.machine.environment import Gpu
from launcher.report.page import Report
from launcher.results import PlanFile
from launcher.run.restarts import RunOptions
from launcher.run.train import start_warnings
from tests.e2e.cli import umask
from tests.helpers import make_config, raised_issues, read_json, write_files

REQUESTED = {"repeats": 3, "steps": 50, "tokens": None}


class MadePlan(PlanFile):
    settings: dict[str, Any]
    tokens: int | None = None


def plan(**settings: Any) -> MadePlan:
    return MadePlan(config_hash="abc", settings={**REQUESTED, **settings})


def output(out: Path, **settings: Any) -> Output[MadePlan]:
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
        ("cpu", 4, "auto", 2),  # CPU ranks use cores even if the machine has GPUs
        ("cpu", 4, "8", 8),
        ("auto", 0, str(MAX_RANKS), MAX_RANKS),
        ("auto", 0, str(MAX_RANKS + 1), ("--nproc", "out_of_range")),
        ("cpu", 0, "two", ("--nproc", "out_of_range")),
        ("cpu", 0, "0", ("--nproc", "out_of_range")),
        ("auto", 2, "3", ("--nproc", "out_of_range")),
        ("cuda", 0, "auto", ("run.device", "unsupported")),
        ("cuda", 0, "1", ("run.device", "unsupported")),
    ],
)
def test_ranks_need_devices(device: str, gpus: int, setting: str, ranks: int | tuple[str, str]) -> None:
    if isinstance(ranks, int):
        assert made(device, gpus).choose_ranks(setting) == ranks
    else:
        (issue,) = raised_issues(made(device, gpus).choose_ranks, setting)
        assert (issue.setting, issue.kind) == ranks


def test_gpus_missing_from_cuda_visible_devices_give_a_warning(tmp_path: Path) -> None:
    quiet = [("auto", 0, None), ("auto", 0, ""), ("auto", 0, "-1"), ("auto", 1, "0"), ("cpu", 0, "0")]
    for device, gpus, selection in [("auto", 0, "0,1"), ("auto", 0, "GPU-7"), *quiet]:
        requested = made(device, gpus)
        machine = dataclasses.replace(requested.machine, cuda_visible_devices=selection, gpus_present=2)
        requested = dataclasses.replace(requested, machine=machine)
        lines, is_warned = requested.device_warnings(), (device, gpus, selection) not in quiet
        assert [f"CUDA_VISIBLE_DEVICES={selection}" in line for line in lines] == [True] * is_warned
        assert lines == start_warnings(requested, RunOptions(), 1, 1, tmp_path, None)[: len(lines)]


RESTART, UNSAVED = "--max-restarts: no checkpoints are saved", "checkpoint.keep is 0"


def test_start_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for gpus, ranks, restarts, every, keep, warned in (
        (0, 3, 1, "steps=5", 2, []),
        (0, 1, 1, "minutes=10", 2, []),
        (0, 4, 0, "steps=5", 2, ["4 CPU ranks share 3 cores"]),
        (4, 4, 0, "steps=5", 2, []),
        (0, 1, 0, "minutes=0", 2, []),
        (0, 1, 1, "minutes=0", 2, [RESTART]),
        (0, 1, 0, "steps=0", 0, [UNSAVED]),
        (0, 1, 1, "minutes=10", 0, [RESTART, UNSAVED]),
    ):
        saves = make_config(f"checkpoint.every_{every}", f"checkpoint.keep={keep}")
        requested = dataclasses.replace(made("auto", gpus), config=saves)
        printed = start_warnings(requested, RunOptions(max_restarts=restarts), ranks, ranks, tmp_path, None)
        assert [line[: len(start)] for line, start in zip(printed, warned, strict=True)] == warned
    tmp_path.chmod(0o707)
    assert "is writable by every user" in start_warnings(requested, RunOptions(), 1, 1, tmp_path, None)[-1]


def test_an_output_directory_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert output(tmp_path / "new").issues() == output(tmp_path).issues() == []
    (tmp_path / "mine.txt").touch()
    for place in (tmp_path, tmp_path / "mine.txt" / "out"):
        (issue,) = output(place).issues()
        assert (issue.setting, issue.kind) == ("--out", "exists")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({}, None),
        ({"repeats": 5}, None),  # repeats may increase
        ({"repeats": 2}, "settings.repeats: 3 before, 2 now"),
        ({"steps": 60}, "settings.steps: 50 before, 60 now"),
        ({"tokens": 5}, "settings.tokens: None before, 5 now"),
    ],
)
def test_the_plan_of_a_directory_is_fixed(tmp_path: Path, now: dict[str, Any], words: str | None) -> None:
    results.write(tmp_path / "grid.json", plan())
    issues = output(tmp_path, **now).issues()
    assert [words is not None and words in issue.message for issue in issues] == ([True] if words else [])


def test_a_changed_configuration_is_reported_setting_by_setting(tmp_path: Path) -> None:
    def begun(*settings: str) -> Output[MadePlan]:
        config = make_config(*settings)
        mine = {"config_hash": config.hash(), "config": config.model_dump(mode="json")}
        return dataclasses.replace(output(tmp_path), plan=plan().model_copy(update=mine))

    results.write(tmp_path / "grid.json", begun("optim.lr=3e-4").plan)
    assert begun("optim.lr=3e-4").issues() == []
    (issue,) = begun("optim.lr=1e-4", "data.shuffle=false").issues()
    assert "(data.shuffle: True before, False now; optim.lr: 0.0003 before, 0.0001 now)" in issue.message


def test_another_machine_is_refused(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.job.prepare_data", lambda config: shards)
    config = make_config()
    out = tmp_path / "out"
    out.mkdir()
    facts, place, manifest = output(out).begin(config)
    first = results.read(out / "grid.json", MadePlan)
    assert (place, facts["data_hash"], first.machine["data"]) == (shards, manifest.hash, manifest.hash)
    assert facts["command"] == read_json(out / "environment.json")["command"]
    results.write(out / "grid.json", first.model_copy(update={"tokens": 7}))
    output(out, repeats=4).begin(config)
    later = results.read(out / "grid.json", MadePlan)
    assert (later.tokens, later.settings["repeats"]) == (7, 4)  # the results are kept
    other = {**first.machine, "cores": 99}
    results.write(out / "grid.json", first.model_copy(update={"machine": other}))
    with pytest.raises(ConfigError, match=r"\(cores: 99 before, "):
        output(out).begin(config)
    assert results.read(out / "grid.json", MadePlan).machine == other, "the file keeps the first machine"


def test_identity_depends_on_the_machine_and_the_data() -> None:
    facts = {**environment.probe().to_json(), "gpus": [gpu := {"name": "a", "driver": "570"}]}
    assert identity(facts, "a") == json.loads(json.dumps(identity(facts, "a"))) != identity(facts, "b")
    other = [{"affinity_cores": 99}, {"cpu_model": "x"}, {"gpus": [gpu, gpu]}]
    other += [{"gpus": [{**gpu, "driver": "0"}]}, {"versions": {**facts["versions"], "torch": "3"}}]
    for change in other:
        assert identity({**facts, **change}, "a") != identity(facts, "a"), change
    for change in ({"memory_available_gib": 1.0}, {"versions": {**facts["versions"], "rich": "15"}}):
        assert identity({**facts, **change}, "a") == identity(facts, "a"), change


def test_an_existing_run_directory_supplies_its_own_configuration(tmp_path: Path) -> None:
    assert job.find_config(None, tmp_path).stem == "quickstart"
    (tmp_path / "config.yaml").touch()
    assert job.find_config(None, tmp_path) == tmp_path / "config.yaml"
    place = made("cpu", 0).directory(None, "tune", "batch")
    assert re.fullmatch(r"tune/x-batch-\d{8}-\d{6}", str(place.relative_to(Path.cwd())))
    assert made("cpu", 0).directory(tmp_path / "a" / ".." / "b", "tune") == tmp_path / "b"


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("parallel.engine=independent", "unsupported"),
        ("parallel.engine=deepspeed", "needs_package"),
        ("run.init_from={}", "not_found"),
        ("run.init_from={}/none", "not_found"),
        ("data.tokenizer={}", "not_found"),
        ("data.sources=[{}/*.txt]", "not_found"),
        ("data.sources=['{}/a/part[1].txt']", None),
        ("data.sources=['{}/a/part[2].txt']", "not_found"),
        ("data.sources=['~$none.txt']", "not_found"),
        ("data.sources=[{}/**/*.txt]", None),
    ],
)
def test_missing_inputs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, kind: str | None
) -> None:
    monkeypatch.setattr(job, "has_package", lambda name: name != "deepspeed")
    write_files(tmp_path, {"a/b/c.txt": "text", "a/part[1].txt": "text"})
    issues = job.input_issues(make_config("data.sources=[builtin]", setting.format(tmp_path)))
    assert [(i.setting, i.kind) for i in issues] == ([(setting.partition("=")[0], kind)] if kind else [])


def test_finetuning_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "has_package", lambda name: name != "scipy")
    config = make_config("objective.name=finetune", "finetune.labels=[a,b]", "data.path=/none")
    assert ("objective.name", "needs_package") in [(i.setting, i.kind) for i in job.input_issues(config)]


def test_data_are_not_built_in_a_cache_open_to_others(monkeypatch: pytest.MonkeyPatch, shards: Path) -> None:
    monkeypatch.setattr(job.files, "cache_issues", lambda: ["others write blocked"])
    prepared = ("data.sources=null", f"data.path={shards}", "data.sequence_length=16", "model.vocab_size=64")
    assert job.input_issues(make_config("data.sources=[builtin,hub:some/text]")) == ["others write blocked"]
    assert job.input_issues(make_config(*prepared)) == []


@pytest.mark.parametrize("existed", [True, False])
def test_locking_leaves_an_unused_directory_as_it_was(tmp_path: Path, existed: bool) -> None:
    directory = tmp_path / "run"
    if existed:
        directory.mkdir()
    with lock_output_dir(directory, ".lock", "--run-dir", "run"):
        assert (directory / ".lock").exists()
        again = lock_output_dir(directory, ".lock", "-", "run")
        with pytest.raises(ConfigError, match="in use by another run"):
            again.__enter__()
    assert directory.exists() == existed
    assert not list(tmp_path.rglob(".lock"))
    with lock_output_dir(directory, ".lock", "--run-dir", "run"):
        (directory / "config.yaml").touch()
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "config.yaml"]


def test_output_directories_are_private_and_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with umask(0), lock_output_dir(tmp_path / "a" / "out", ".lock", "--out", "grid"):
        assert (tmp_path / "a" / "out").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    issues = raised_issues(lock_output_dir(tmp_path / "file" / "x", ".lock", "--out", "grid").__enter__)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    issues += tuple(place_issues(tmp_path / "new" / "er", "--out"))
    assert [(i.setting, i.kind) for i in issues] == [("--out", "not_found")] * 2


def test_a_result_is_printed_as_json_or_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`blocked`: a directory with the name of the page keeps the page from being written."""
    for as_json, blocked in ((True, False), (False, False), (True, True)):
        out, place = io.StringIO(), output(tmp_path / f"{as_json}-{blocked}")
        if blocked:
            (place.path / "report.html").mkdir(parents=True)
        how = VerbOptions(None, False, as_json, Console(file=out, width=200))
        assert how.measure(place, lambda: (plan(), Report("a result"), 3)) == 3
        assert (f"{place.path}/report.html" in out.getvalue()) != as_json
        printed = capsys.readouterr()
        assert printed.out == (results.to_json(plan()) if as_json else "")
        assert ("report.html was not written" in printed.err) == blocked
        assert blocked or "a result" in (place.path / "report.html").read_text()
