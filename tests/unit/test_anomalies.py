"""Test the detection of loss spikes and of consecutive skipped steps."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_dp.config import BatchLayout
from bert_dp.files import CheckpointFacts
from bert_dp.measure.profile_step import ALONE, lone_trainer
from bert_dp.training import metrics
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.distributed import HostCollectives, SharedClock
from bert_dp.training.loop import log_steps
from bert_dp.training.metrics import Meter
from bert_dp.training.process import World, gc_paused
from tests.helpers import logged, make_config, read_lines, tiny_run
from tests.states import FACTS
from tests.tensors import CPU

LAYOUT = BatchLayout(world_size=1, tensor=1, dp=1, micro_size=2, grad_accum_steps=1, global_size=2)


def noise(count: int, mean: float = 2.0, deviation: float = 0.1) -> list[float]:
    draws = np.random.default_rng(0).standard_normal(count)
    return list(mean + deviation * (draws - draws.mean()) / draws.std())


@pytest.mark.parametrize(
    ("loss", "recent", "spike"),
    [
        (2.59, 128, False),  # mean 2.0, deviation 0.1
        (2.61, 128, True),
        (1.0, 128, False),
        (1e9, 15, False),  # too few recent losses for a comparison
        (1e9, 16, True),
        (float("nan"), 128, False),
        (float("inf"), 128, False),
    ],
)
def test_a_spike_is_more_than_six_deviations_above_the_mean(loss: float, recent: int, spike: bool) -> None:
    assert metrics.is_spike(loss, noise(recent)) == spike


def test_a_falling_loss_has_no_spikes() -> None:
    """The loss falls from ten nats to three with noise, as at the start of training."""
    losses = list(3.0 + 7.0 * np.exp(-np.arange(400) / 40) + np.array(noise(400, 0.0, 0.1)))
    assert not any(metrics.is_spike(x, losses[max(0, i - 128) : i]) for i, x in enumerate(losses))


@pytest.mark.parametrize(
    ("precision", "row", "limit"),
    [("fp32", 1, 1), ("fp32", 5, 5), ("bf16", 3, 3), ("fp16", 21, 5), ("fp16", 17, 1)],
)
def test_a_run_stops_at_the_limit_of_consecutive_skipped_steps(precision: str, row: int, limit: int) -> None:
    settings = make_config(run={"max_skipped_in_a_row": limit}, log={"every_steps": 7})
    assert metrics.too_many_skipped(settings, precision, row - 1, 40, 2e-4) is None
    cause = metrics.too_many_skipped(settings, precision, row, 40, 2e-4)
    assert cause is not None
    assert f"{row} steps in a row up to step 40" in cause
    assert ("precision: fp32" in cause) == (precision != "fp32")


@pytest.mark.parametrize(("skipped", "step", "failed"), [(0, 0, False), (3, 4, False), (4, 4, True)])
def test_a_run_that_skipped_every_step_fails(skipped: int, step: int, failed: bool) -> None:
    assert (metrics.nothing_learned(make_config(), "bf16", skipped, step) is not None) == failed


@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        ("..x..|.....", [0, 0]),  # a later step resets the count
        (".xx|xxx|xx.|..", [2, 5, 0, 0]),  # the count continues across a log line
        ("xx.|.x", [0, 1]),
    ],
)
def test_consecutive_skipped_steps_are_counted_up_to_each_log_line(steps: str, rows: list[int]) -> None:
    comm, found = HostCollectives(ALONE, None), []
    meter = Meter(comm, CPU, LAYOUT, tokens_per_sample=4, flops_per_token=1.0, peak_flops=None)
    for part in steps.split("|"):
        for mark in part:
            meter.observe(torch.tensor(2.0), torch.tensor(float("nan") if mark == "x" else 1.0), 2, 1, 0.0)
        meter.flush(TrainState(step=1, samples=2, global_batch=2), epoch=0, progress=0.1, elapsed_s=1.0)
        found.append(meter.skipped_in_a_row)
    assert found == rows
    assert int(meter.skipped) == steps.count("x")


def test_a_loss_spike_is_counted(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny_run(shards, batch={"global_size": 2, "micro_size": 2})
    state = TrainState(global_batch=2)
    losses = [*noise(140), 20.0, *noise(3), float("nan")]
    with lone_trainer(settings, tmp_path) as trainer, gc_paused():  # because each log line collects garbage
        clock = SharedClock(trainer.comm)
        for step, loss in enumerate(losses, 1):
            state.step, state.samples = step, 2 * step
            trainer.meter.observe(torch.tensor(loss), torch.tensor(1.0), 2, 1, 0.0)
            log_steps(trainer, state, clock)
    assert state.abort_reason is None
    assert state.loss_spikes == 1
    (line,) = capsys.readouterr().out.splitlines()
    for text in ("warning: loss spike at step 141", "20.0000", f"{np.mean(losses[12:140]):.4f}"):
        assert text in line
    assert len(state.recent_losses) == 128
    assert state.recent_losses == pytest.approx(losses[-129:-1])  # the NaN is excluded
    resumed = TrainState.from_checkpoint(CheckpointFacts.model_validate(FACTS | state.saved()))
    assert (resumed.loss_spikes, resumed.recent_losses) == (1, state.recent_losses)
    assert resumed.logged_step == resumed.step == state.step
    assert logged(tmp_path, "epoch") == [2 * step // 96 for step in range(1, len(losses) + 1)]


def test_a_rank_other_than_0_writes_only_its_own_step_times(tmp_path: Path, shards: Path) -> None:
    settings = tiny_run(shards, batch={"global_size": 2, "micro_size": 2}, log={"step_times": True})
    with lone_trainer(settings, tmp_path) as lone:
        (tmp_path / "steps").mkdir()
        before = set(tmp_path.iterdir())
        trainer = dataclasses.replace(lone, comm=HostCollectives(World(1, 1, 2, 2), None))
        trainer.meter.observe(torch.tensor(2.0), torch.tensor(1.0), 2, 1, 0.0)
        log_steps(trainer, TrainState(step=1, samples=2, global_batch=2), SharedClock(lone.comm))
    assert set(tmp_path.iterdir()) == before
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["rank-1.jsonl"]
    (line,) = read_lines(tmp_path / "steps" / "rank-1.jsonl")
    assert (line["step"], len(line["step_s"]), line["ddp_exposed_s"]) == (1, 1, None)


def test_the_first_abort_reason_is_kept() -> None:
    state = TrainState()
    for cause, kind in ((None, "error"), ("disk full", "disk"), ("hung", "hang")):
        state.request_abort(cause, kind)  # type: ignore[arg-type]
    assert (state.abort_reason.message, state.abort_reason.kind) == ("disk full", "disk")
