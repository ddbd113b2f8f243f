"""Test the initial state of run.init_from, with and without moments, and a budget in epochs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config import ConfigError, load_config
from bert_dp.measure.profile_step import ALONE
from bert_dp.model.load import first_state
from bert_dp.tasks import make_task
from bert_dp.training.distributed import HostCollectives
from tests.helpers import read_json
from tests.parity.runs import metrics, settings, state, train_named, train_run, write_run
from tests.tensors import bits

STEPS = 6
LAMB = {"name": "lamb", "lr": 1e-2}


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train root/first for STEPS steps of LAMB, and from its end root/<keeps> for one step on two ranks."""
    root = tmp_path_factory.mktemp("init")
    first = {"schedule": {"name": "constant", "steps": STEPS}, "optim": LAMB}
    runs = {"first": (1, settings(shards, first))}
    for keeps in ("weights", "moments"):
        second: dict[str, Any] = {
            "run": {"init_from": str(root / "first"), "init_keeps": keeps},
            "schedule": {"name": "constant", "steps": 1},
            "checkpoint": {"every_steps": 1, "keep": 9},
            "parallel": {"engine": "zero1"},
        }
        runs[keeps] = (2, settings(shards, first, second))
    return train_named(root, runs)


@pytest.mark.parametrize("keeps", ["weights", "moments"])
def test_a_second_phase_starts_from_the_weights_or_moments_it_keeps(runs: Path, keeps: str) -> None:
    end, start = state(runs / "first", STEPS), state(runs / keeps, 0)
    kept = {name for name in end if keeps == "moments" or "/" not in name}
    assert bits(start) == bits({name: end[name] for name in kept})
    assert [line["step"] for line in metrics(runs / keeps)] == [1], "the counters do not start from 0"
    steps = {float(t) for name, t in state(runs / keeps, 1).items() if name.endswith("/step")}
    assert steps == {STEPS + 1.0 if keeps == "moments" else 1.0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"name": "adamw"}}, "optim.name: 'adamw', but run.init_from"),
        ({"model": {"hidden_size": 48}}, "model.hidden_size: 48, but run.init_from"),
    ],
    ids=str,
)
def test_moments_of_another_optimizer_or_model_are_refused(
    runs: Path, shards: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    first = {"init_from": str(runs / "first"), "init_keeps": "moments"}
    run_dir = write_run(tmp_path, settings(shards, **{"optim": LAMB, "run": first, **sections}))
    config = load_config(run_dir / "config.yaml")
    task = make_task(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        first_state(config, task.build_model(0), task.open_data(), HostCollectives(ALONE, None))


def test_two_epochs_use_each_sequence_twice_also_in_a_resumed_run(shards: Path, tmp_path: Path) -> None:
    """The shards have 96 sequences, in batches of 8; the second run resumes from the checkpoint half way."""
    config = settings(shards, schedule={"epochs": 2}, checkpoint={"every_steps": 12, "keep": 9})
    whole = train_run(tmp_path / "whole", config)
    again = train_run(tmp_path / "again", config, resume=str(whole / "checkpoints" / "step-00000012"))
    for run_dir in (whole, again):
        last = metrics(run_dir)[-1]
        assert (last["step"], last["samples"], last["progress"]) == (24, 2 * 96, 1.0)
    assert bits(state(whole, 24)) == bits(state(again, 24))
    saved = read_json(whole / "checkpoints" / "step-00000024" / "state.json")["config"]
    assert saved["schedule"]["epochs"] is None
    assert saved["schedule"]["tokens"] == 2 * 96 * 16
