"""Promise 1: N ranks train the same model as 1 rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bert_dp.config import batch_at, load_config
from bert_dp.files import write_json
from bert_dp.files.ledger import LEDGER, LedgerFile
from bert_dp.model.bert import build_model
from bert_dp.optim import lr_factor
from tests.helpers import logged, read_json, read_lines
from tests.parity.runs import metrics, samples_by_step, settings, state, train_run, train_runs, write_run
from tests.tensors import bits, largest_relative_error

RAMP = {"micro_size": 2, "ramp_fraction": 0.6, "ramp_quantum": 8}
COUNTED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {"precision": "fp64"},
    "ramp": {
        "precision": "fp64",
        "batch": {"global_size": 24, **RAMP},
        "schedule": {"steps": 30, "name": "cosine"},
    },
    "tokens": {"precision": "fp64", "schedule": {"tokens": 5000, "name": "wsd"}},
    "threads": {"data": {"workers": 3}},
}
CLOCKED = ("hours", "dollars")
CASES = (*COUNTED, *CLOCKED)
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case on 1, 2 and 4 ranks as root/<case>/<N>; `threads` has 3 prefetch threads, others 1."""
    root = tmp_path_factory.mktemp("invariance")
    for size in SIZES:
        train_runs(
            size, [write_run(root / c / str(size), settings(shards, own)) for c, own in COUNTED.items()]
        )
        batch, a_dollar_a_second = {"global_size": 16, **RAMP}, {"price_per_device_hour": 3600.0}
        hours = settings(shards, precision="fp64", schedule={"hours": 90 / 3600}, batch=batch)
        dollars = {
            **hours,
            "schedule": {"dollars": 92.0},
            "run": a_dollar_a_second,
            "eval": {"every_steps": 9},
        }
        for name, config in (("hours", hours), ("dollars", dollars)):
            run_dir = write_run(root / name / str(size), config)
            if name == "dollars":
                write_json(run_dir / LEDGER, LedgerFile(dollars_per_s=1.0).model_dump())
            train_run(run_dir, config, size, seconds_per_call=1.0)
    return root


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_same_samples_and_masks(runs: Path, case: str, size: int) -> None:
    one, many = samples_by_step(runs / case / "1"), samples_by_step(runs / case / str(size))
    assert len(one) == len(many) >= 20
    for step_one, step_many in zip(one, many, strict=True):
        assert step_one.keys() == step_many.keys()
        for sample, (positions, inputs) in step_one.items():
            assert np.array_equal(positions, step_many[sample][0])
            assert np.array_equal(inputs, step_many[sample][1])


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", CASES)
def test_schedule_loss_and_weights_are_the_same(runs: Path, case: str, size: int) -> None:
    one, many = runs / case / "1", runs / case / str(size)
    exact = case in ("fp64", "ramp", "tokens", *CLOCKED)
    loss_tolerance, weight_tolerance = (1e-10, 1e-10) if exact else (1e-5, 1e-4)
    for a, b in zip(metrics(one), metrics(many), strict=True):
        for key in ("step", "samples", "tokens", "epoch", "progress", "lr", "global_batch"):
            assert a[key] == b[key], key
        assert a["loss"] == pytest.approx(b["loss"], abs=loss_tolerance)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=loss_tolerance * 10)
    for a, b in zip(*(read_lines(run / "evals.jsonl") for run in (one, many)), strict=True):
        assert a["step"] == b["step"]
        assert a["masked_tokens"] == b["masked_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], abs=loss_tolerance)
    step = metrics(one)[-1]["step"]
    assert largest_relative_error(state(many, step), state(one, step)) < weight_tolerance


def test_the_weights_change_much_more_than_the_tolerances(runs: Path) -> None:
    config = load_config(runs / "fp64" / "1" / "config.yaml")
    start = build_model(config.model, config.data.sequence_length, config.run.seed).double().state_dict()
    end = state(runs / "fp64" / "1", 50)
    moved = {name: float((end[name] - start[name]).norm() / end[name].norm()) for name in start}
    assert min(moved.values()) > 1e-2, moved


def test_the_ramp_raises_the_global_batch(runs: Path) -> None:
    batches = logged(runs / "ramp" / "1", "global_batch")
    assert batches[0] == 8
    assert batches[-1] == 24
    assert sorted(batches) == batches


@pytest.mark.parametrize("case", CLOCKED)
def test_budgets_in_hours_and_dollars_end_by_the_clock_of_rank_0(runs: Path, case: str) -> None:
    """The clocks of other ranks run 4, 7 and 10 times as fast, so a run that used them would be shorter."""
    lengths = {size: metrics(runs / case / str(size))[-1]["step"] for size in SIZES}
    assert len(set(lengths.values())) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_budget_in_hours_uses_the_time_at_the_start_of_each_step(runs: Path, size: int) -> None:
    """The clock advances by 1 s at each reading: when a step starts, is logged, and ends. The next step
    starts 1 s later, but the schedule expects it to start when the last one ends."""
    lines = metrics(runs / "hours" / str(size))
    config = load_config(runs / "hours" / str(size) / "config.yaml")
    elapsed_s = [line["elapsed_s"] for line in lines]
    expected_s = [0.0, elapsed_s[0] + 2.0, *(end_s + 1.0 for end_s in elapsed_s[1:-1])]
    rates = [config.optim.lr * lr_factor(config.schedule, seconds / 90) for seconds in expected_s]
    assert rates[0] < rates[1]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)
    batches = [batch_at(config.batch, seconds / 90) for seconds in expected_s]
    assert [line["global_batch"] for line in lines] == batches
    assert [line["progress"] for line in lines] == pytest.approx(
        [min(end_s / 90, 1.0) for end_s in elapsed_s]
    )


@pytest.mark.parametrize("case", COUNTED)
def test_the_last_line_has_full_progress(runs: Path, case: str) -> None:
    assert [metrics(runs / case / str(size))[-1]["progress"] for size in SIZES] == [1.0] * len(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_a_resumed_budget_in_hours_includes_earlier_hours(runs: Path, tmp_path: Path, size: int) -> None:
    """The first step after resuming from the 1-rank checkpoint has the saved progress."""
    origin = runs / "hours" / "1"
    checkpoint = max((origin / "checkpoints").glob("step-*"))
    config = yaml.safe_load((origin / "config.yaml").read_text())
    config["schedule"]["hours"] *= 2
    again = train_run(tmp_path, config, size, seconds_per_call=1.0, resume=str(checkpoint))
    spent_s = read_json(checkpoint / "state.json")["elapsed_s"]
    first = metrics(again)[0]
    budget = load_config(again / "config.yaml")
    assert spent_s >= 90.0
    assert first["lr"] == budget.optim.lr * lr_factor(budget.schedule, spent_s / 180)


def test_prefetch_threads_do_not_change_the_weights(runs: Path) -> None:
    """The weights are bit-equal, because threads only prefetch batches."""
    assert bits(state(runs / "fp32" / "1", 50)) == bits(state(runs / "threads" / "1", 50))
