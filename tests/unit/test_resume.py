"""Test what a rank checks and does before it resumes from a checkpoint, with or without the launcher."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bert_dp.config import Config, ConfigError, Issue, resolve
from bert_dp.config.errors import sha256
from bert_dp.measure.profile_step import ALONE, lone_trainer
from bert_dp.model.load import first_state
from bert_dp.tasks import DatasetInfo
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.training import build, checkpoint
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.devices import Placement
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.process import World
from tests.helpers import TINY_MODEL, issues_of, raised_issues, read_json, read_lines, tiny_run, write_lines
from tests.ranks import OneOf
from tests.states import FACTS
from tests.tensors import CPU


def config() -> Config:
    return resolve([{"data": {"path": "x"}, "schedule": {"steps": 9}}])


def rank_with(run_dir: Path, digit: str, log: list[str] | None = None) -> Any:
    """Return a lone rank whose data hash repeats `digit`."""
    log = [] if log is None else log
    return SimpleNamespace(
        config=config(),
        run_dir=run_dir,
        comm=HostCollectives(ALONE, None),
        device=CPU,
        data=DatasetInfo(data_hash=digit * 64, tokenizer=None, num_samples=9),
        log_rank0=log.append,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run with a checkpoint of step 3."""
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"w/step": torch.tensor(3.0)}, "scaler": {}}
    facts = {**FACTS, "config": config().model_dump(mode="json"), "samples": 12, "elapsed_s": 7.5}
    (tmp_path / "checkpoints").mkdir()
    checkpoint.save_checkpoint(tmp_path / "checkpoints", 3, state, facts, 9)
    return tmp_path


def test_a_rank_resumes_only_with_the_data_of_the_checkpoint(run_dir: Path) -> None:
    """The launcher makes this check too, but srun and mpirun start ranks without the launcher."""
    log: list[str] = []
    (run_dir / "checkpoints" / "step-00000004").mkdir()
    resumed = build.select_checkpoint(rank_with(run_dir, "0", log), "auto")
    assert log[0].startswith("checkpoint skipped: ")
    assert "step-00000004" in log[0]
    assert log[1:] == ["resuming from step-00000003: 12 samples seen"]
    assert resumed.path == run_dir / "checkpoints" / "step-00000003"
    state = TrainState.from_checkpoint(resumed.facts)
    assert state == TrainState(step=3, samples=12, elapsed_s=7.5, logged_step=3)
    with pytest.raises(ConfigError, match=f"hash {'0' * 16}, but the current data has {'1' * 16}"):
        build.select_checkpoint(rank_with(run_dir, "1"), "auto")
    assert build.select_checkpoint(rank_with(run_dir, "0"), "never") is None


def test_a_missing_or_damaged_checkpoint_and_changed_settings_are_refused(run_dir: Path) -> None:
    """A damaged checkpoint is refused, because a new start would cut the records back and set the checkpoints
    aside."""
    rank = rank_with(run_dir, "0")
    (issue,) = raised_issues(build.select_checkpoint, rank, str(run_dir / "nowhere"))
    assert (issue.setting, issue.kind) == ("--resume", "not_found")
    rank.config = config().model_copy(update={"optim": config().optim.model_copy(update={"clip": 0.75})})
    (issue,) = raised_issues(build.select_checkpoint, rank, "auto")
    assert (issue.setting, "--resume never" in (issue.hint or "")) == ("optim.clip", True)
    weights = run_dir / "checkpoints" / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (issue,) = raised_issues(build.select_checkpoint, rank_with(run_dir, "0"), "auto")
    assert (issue.setting, issue.kind, str(weights) in issue.message) == ("--resume", "damaged", True)


def test_ranks_use_the_checkpoint_or_error_of_rank_0(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks neither search nor verify, even if they see a newer or an undamaged checkpoint."""
    monkeypatch.setattr(checkpoint, "newest_valid", lambda folder: pytest.fail("only rank 0 may search"))
    old = run_dir / "checkpoints" / "step-00000003"
    (old.parent / "step-00000004").mkdir()
    rank = rank_with(run_dir, "0")
    rank.comm = OneOf(1, 2, said=[[str(old), "of rank 0's view"], []])
    monkeypatch.setattr("bert_dp.files.io.STALE_S", 0.0)
    (issue,) = raised_issues(build.select_checkpoint, rank, "auto")
    assert (issue.setting, issue.kind) == (str(old), "not_found"), "a different checkpoint"
    rank.comm = OneOf(1, 2, said=[[str(old), sha256(old / "manifest.json")], []])
    resumed = build.select_checkpoint(rank, str(run_dir / "nowhere"))
    assert resumed is not None
    assert (resumed.path, resumed.facts.step) == (old, 3)
    gone = Issue("--resume", "not_found", "gone").to_json()
    rank.comm = OneOf(1, 2, said=[None, [gone]])
    assert issues_of(build.select_checkpoint, rank, "auto") == ("--resume: gone",)
    rank.comm = OneOf(1, 2, said=[["", ""], []])
    assert build.select_checkpoint(rank, "auto") is None


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_writes_before_rank_0_has_cut_the_records_back(run_dir: Path, rank: int) -> None:
    record = run_dir / "steps" / "rank-1.jsonl"
    others = [run_dir / f"{name}.jsonl" for name in ("metrics", "evals", "noise")]
    for path in (record, *others):
        write_lines(path, ({"step": step} for step in range(1, 6)))
    (run_dir / "summary.json").write_text("{}")
    seen: list[list[int]] = []  # the steps in the records at the barrier
    comm = SimpleNamespace(
        world=World(rank, rank, 2, 2),
        barrier=lambda: seen.append([line["step"] for line in read_lines(record)]),
    )
    trainer: Any = SimpleNamespace(run_dir=run_dir, comm=comm, config=config())
    resumed: Any = "a checkpoint"
    later = checkpoint.path_of(run_dir / "checkpoints", 5)
    shutil.copytree(run_dir / "checkpoints" / "step-00000003", later)
    build.cut_records_back(trainer, TrainState(step=3), resumed)
    assert later.exists() == (rank == 1), "set aside by rank 0"
    assert (run_dir / "summary.json").exists() == (rank == 1), "deleted by rank 0"
    left = [1, 2, 3] if rank == 0 else [1, 2, 3, 4, 5]
    assert seen == [left]
    assert [[line["step"] for line in read_lines(path)] for path in others] == [left] * 3


def lone_config(shards: Path, **sections: Any) -> Config:
    return tiny_run(shards, **{"batch": {"global_size": 8, "micro_size": 2}, **sections})


def test_the_environment_records_this_rank_and_the_cores_of_every_rank(shards: Path, tmp_path: Path) -> None:
    config = lone_config(shards)
    (tmp_path / "environment.json").write_text('{"host": "n1"}')
    with lone_trainer(config, tmp_path) as trainer:
        build.write_environment(trainer, Placement(((0, 1, 2), (4, 5, 6)), 3))
    facts = read_json(tmp_path / "environment.json")
    worker = facts["worker"]
    assert facts["host"] == "n1"
    assert (worker["cores"], worker["threads_per_rank"], worker["world_size"]) == (["0-2", "4-6"], 3, 1)
    assert (worker["precision"], worker["compiled"]) == ("fp32", False)
    assert (worker["config_hash"], worker["device"], worker["nccl"]) == (config.hash(), "CPU", None)


@pytest.mark.parametrize("setting", ["on", "off"])
def test_optimizer_and_model_are_compiled_alike(shards: Path, tmp_path: Path, setting: str) -> None:
    with mock.patch.object(build.optim, "make_optimizer", wraps=build.optim.make_optimizer) as made:
        with lone_trainer(lone_config(shards, compile=setting), tmp_path) as trainer:
            assert trainer.metadata["compiled"] is (setting == "on")
    assert made.call_args.kwargs == {"compiled": setting == "on", "precision": trainer.precision.name}


def test_a_bf16_residual_needs_bf16(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks check this, because only they can query a GPU."""
    config = lone_config(shards, precision="auto", model={**TINY_MODEL, "residual_dtype": "bf16"})
    monkeypatch.setattr(build.devices, "has_bf16", lambda _: True)
    with lone_trainer(config, tmp_path) as trainer:
        assert trainer.precision.name == "bf16"
    monkeypatch.setattr(build.devices, "has_bf16", lambda _: False)
    (line,) = issues_of(lone_trainer(config, tmp_path).__enter__)
    assert line.startswith("model.residual_dtype: bf16")


@pytest.mark.parametrize(("synthetic", "mean", "tokens"), [(True, None, 160), (False, 3.5, 35)])
def test_the_samples_and_tokens_of_a_run_are_counted(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic: bool, mean: Any, tokens: int
) -> None:
    """A synthetic run repeats one batch. Padding does not count as tokens."""
    plain = MaskedLanguageModel.open_data

    def open_data(task: MaskedLanguageModel) -> DatasetInfo:
        return dataclasses.replace(plain(task), tokens_per_sample=mean)

    monkeypatch.setattr(MaskedLanguageModel, "open_data", open_data)
    with lone_trainer(lone_config(shards, data={"synthetic": synthetic}), tmp_path) as trainer:
        assert (trainer.stream.next() is trainer.stream.next()) == synthetic
        assert trainer.meter.tokens(10) == tokens


def test_weights_without_a_known_tokenizer_are_accepted(shards: Path, tmp_path: Path) -> None:
    with lone_trainer(lone_config(shards), tmp_path) as trainer:
        state = trainer.engine.gather_state()
        assert state is not None
        facts = {**FACTS, "config": trainer.config.model_dump(mode="json"), "tokenizer": None}
        saved = checkpoint.save_checkpoint(tmp_path, 0, state, facts, 9)
        config = lone_config(shards, run={"init_from": str(saved)})
        _, init = first_state(config, trainer.bare_model, trainer.data, trainer.comm)
        assert init is not None
        assert init.tensors == init.of == len(state["model"])
