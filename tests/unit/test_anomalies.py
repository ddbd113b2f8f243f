"""Loss spikes and rows of skipped steps: when they are seen, when not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bert_dp import anomalies
from bert_dp.config import BatchLayout
from bert_dp.dist import Comm
from bert_dp.lines import LostWrites, Records
from bert_dp.metrics import Meter
from bert_dp.rank_process import collector_at_rest
from bert_dp.train_state import TrainState
from bert_dp.trainer import log_steps
from bert_dp.world import World
from tests.helpers import make_config

CPU = torch.device("cpu")
LAYOUT = BatchLayout(world_size=1, tensor=1, dp=1, micro_size=2, grad_accum_steps=1, global_size=2)


def noise(count: int, mean: float = 2.0, deviation: float = 0.1) -> list[float]:
    draws = np.random.default_rng(0).standard_normal(count)
    return list(mean + deviation * (draws - draws.mean()) / draws.std())


def test_a_spike_is_above_mean_and_six_deviations() -> None:
    recent = noise(128)  # mean 2.0, deviation 0.1
    assert not anomalies.is_spike(2.59, recent)
    assert anomalies.is_spike(2.61, recent)
    assert not anomalies.is_spike(1.0, recent)


def test_no_spike_without_enough_to_compare_with() -> None:
    assert not anomalies.is_spike(1e9, noise(15))
    assert anomalies.is_spike(1e9, noise(16))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_spike(loss: float) -> None:
    assert not anomalies.is_spike(loss, noise(128))


def test_a_falling_loss_has_no_spikes() -> None:
    """The start of training: ten nats down to three, with noise."""
    losses = list(3.0 + 7.0 * np.exp(-np.arange(400) / 40) + np.array(noise(400, 0.0, 0.1)))
    assert not any(anomalies.is_spike(x, losses[max(0, i - 128) : i]) for i, x in enumerate(losses))


def config(**run: int) -> Any:
    return make_config(run=run)


@pytest.mark.parametrize(
    ("precision", "row", "limit"), [("fp32", 5, 5), ("bf16", 3, 3), ("fp16", 21, 5), ("fp16", 17, 1)]
)
def test_how_many_in_a_row_stop(precision: str, row: int, limit: int) -> None:
    settings = config(max_skipped_in_a_row=limit)
    assert anomalies.too_many_skipped(settings, precision, row - 1, 40, 1e-3) is None
    cause = anomalies.too_many_skipped(settings, precision, row, 40, 1e-3)
    assert cause is not None
    for text in (f"{row} steps in a row", "step 40", "0.001", "optim.lr"):
        assert text in cause
    assert ("precision: fp32" in cause) == (precision != "fp32")


@pytest.mark.parametrize(("skipped", "step", "failed"), [(0, 0, False), (3, 4, False), (4, 4, True)])
def test_a_run_that_skipped_every_step_is_not_done(skipped: int, step: int, failed: bool) -> None:
    cause = anomalies.nothing_learned(config(), "bf16", skipped, step)
    assert (cause is not None) == failed
    for text in ("all 4 steps", "not finite", "optim.lr (now 0.001)", "precision: fp32"):
        assert not failed or text in (cause or "")


def flush(meter: Meter) -> None:
    meter.flush(TrainState(step=1, samples=2, global_batch=2), epoch=0, wait_s=0.0, elapsed_s=1.0)


def make_meter() -> Meter:
    comm = Comm(World(0, 0, 1, 1), None)
    return Meter(comm, CPU, LAYOUT, tokens_per_sample=4, flops_per_token=1.0, peak_flops=None)


@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        ("..x..|.....", [1, 0]),
        ("xx.xxx.x|.....", [3, 0]),
        (".xx|xxx..|..", [2, 5, 0]),  # a row goes on over a line
        ("xx|xx|xx", [2, 4, 6]),
        ("xx.|x.", [2, 1]),
    ],
)
def test_the_longest_row_of_skips_is_known_at_each_line(steps: str, rows: list[int]) -> None:
    meter = make_meter()
    found = []
    for part in steps.split("|"):
        for mark in part:
            norm = torch.tensor(float("nan") if mark == "x" else 1.0)
            meter.observe(torch.tensor(2.0), norm, 2, 1, 0.0)
        flush(meter)
        found.append(meter.skipped_in_a_row)
    assert found == rows
    assert int(meter.skipped) == steps.count("x")


def test_a_logged_spike_is_said_counted_and_remembered_with_the_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    meter, state = make_meter(), TrainState(global_batch=2)
    trainer: Any = SimpleNamespace(
        config=config(),
        comm=Comm(World(0, 0, 1, 1), None),
        meter=meter,
        run_dir=tmp_path,
        log_rank0=said.append,
        data=SimpleNamespace(num_samples=100),
        stream=SimpleNamespace(wait_s=0.0),
        heartbeat=SimpleNamespace(enter=lambda *_: None),
        precision=SimpleNamespace(name="fp32"),
        engine=SimpleNamespace(norm_pairs=None),
        directory_lost=lambda: None,
        records=Records(tmp_path, said.append, LostWrites()),
    )
    clock: Any = SimpleNamespace(elapsed_s=lambda: 1.0)
    losses = [*noise(140), 20.0, *noise(3), float("nan")]
    with collector_at_rest():  # as in a run: each line collects garbage
        for step, loss in enumerate(losses, 1):
            state.step = step
            meter.observe(torch.tensor(loss), torch.tensor(1.0), 2, 1, 0.0)
            log_steps(trainer, state, clock)
    assert state.trouble is None
    assert state.loss_spikes == 1
    (line,) = said
    assert "step 141" in line
    assert "20.0000" in line
    assert len(state.recent_losses) == 128
    assert state.recent_losses == pytest.approx(losses[-129:-1])  # the NaN is not among them
