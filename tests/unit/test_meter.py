"""Tests of the lines of metrics.jsonl: rates, MFU, memory and loss of unequal ranks, with a fake clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bert_dp.config import BatchLayout
from bert_dp.training import metrics
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.metrics import STRAGGLER_RATIO, STRAGGLER_STEPS, Meter, straggler
from tests.ranks import OneOf
from tests.tensors import CPU

LAYOUT = BatchLayout(world_size=4, tensor=2, dp=2, micro_size=2, grad_accum_steps=3, global_size=12)
LENGTH, FLOPS, PEAK = 8, 1e6, 4e8  # tokens per sequence, FLOPs per token, FLOP/s per rank
WAIT, PASSES, UPDATE = 0.125, 0.5, 0.25  # seconds per step
OWN = 0.375  # seconds of PASSES before the reduction
STEP = WAIT + PASSES + UPDATE
OWN_GIB = 1.0


def four_ranks(own: list[float]) -> list[list[float]]:
    """Return the values of four ranks. Ranks 0 (this rank) and 1 form a replica with one loss, ranks 2 and 3
    the other. Rank 1 uses the most memory, rank 3 the most time."""
    loss, gib, *seconds = own
    losses, more_gib = (loss, loss, loss + 2, loss + 2), (0, 3, 1, -0.5)
    return [
        [losses[rank], gib + more_gib[rank], *((rank + 1) * each for each in seconds)] for rank in range(4)
    ]


class Run:
    """A meter and the clock that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peak: float | None = PEAK):
        self.now = 1000.0
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(metrics, "peak_memory_gib", lambda device: OWN_GIB)
        self.meter = Meter(
            OneOf(0, 4, four_ranks),
            CPU,
            LAYOUT,
            tokens_per_sample=LENGTH,
            flops_per_token=FLOPS,
            peak_flops=peak,
        )
        self.steps, self.wait_s = 0, 7.0
        self.meter.start(self.wait_s)

    def step(self, loss: float = 0.5) -> None:
        timers = self.meter.timers
        self.now += WAIT
        self.wait_s += WAIT
        begin = timers.mark()
        self.now += OWN
        timers.count("compute_before_reduction", begin)
        self.now += PASSES - OWN
        timers.count("forward_backward", begin)
        begin = timers.mark()
        self.now += UPDATE
        timers.count("optimizer", begin)
        self.steps += 1
        samples, micro_steps = LAYOUT.global_size, LAYOUT.grad_accum_steps
        self.meter.observe(torch.tensor(loss), torch.tensor(1.5), samples, micro_steps, self.wait_s)

    def pause(self, seconds: float) -> None:
        with self.meter.paused():
            self.now += seconds

    def line(self) -> Any:
        size = LAYOUT.global_size
        state = TrainState(self.steps, self.steps * size, lr=1e-3, global_batch=size)
        return SimpleNamespace(**self.meter.flush(state, epoch=0, progress=0.2, elapsed_s=self.now))


def test_rates_are_summed_over_ranks_and_mfu_is_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    early = run.meter.total_rates()  # rates of a run stopped before its first step
    for _ in range(3):
        run.step()
    line = run.line()
    assert (line.lr, line.progress, line.elapsed_s, line.epoch) == (1e-3, 0.2, run.now, 0)
    assert (line.step, line.samples, line.tokens, line.global_batch) == (3, 36, 36 * LENGTH, 12)
    tokens_per_s = 12 * LENGTH / STEP
    assert line.step_time_s == STEP
    assert line.steps_per_s == pytest.approx(1 / STEP)
    assert line.samples_per_s == pytest.approx(12 / STEP)
    assert line.tokens_per_s == pytest.approx(tokens_per_s)
    assert line.tokens_per_s_per_gpu == pytest.approx(tokens_per_s / 4)
    assert line.mfu == pytest.approx(tokens_per_s / 4 * FLOPS / PEAK)
    assert line.global_steps_per_s == pytest.approx(3 * 2 / STEP)  # micro batches of both replicas
    assert (line.data_wait_s, line.forward_backward_s, line.optimizer_s) == (WAIT, PASSES, UPDATE)
    assert (line.world_size, line.micro_batch, line.accumulation, line.grad_norm) == (4, 2, 3, 1.5)
    assert run.meter.measured == {"grad_norm": 1.5}
    run.step()
    run.line()
    for name, rate in run.meter.total_rates().items():
        assert rate == pytest.approx(getattr(line, name)), name
    assert early == dict.fromkeys(run.meter.total_rates())
    unknown = Run(monkeypatch, peak=None)
    unknown.step()
    assert unknown.line().mfu is None


def test_losses_of_replicas_are_summed_and_memory_is_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.step(loss=9.0)
    run.step(loss=0.5)
    line = run.line()
    assert line.loss == 0.5 + 2.5  # the losses of the last step
    assert line.peak_memory_gib == OWN_GIB + 3
    assert run.meter.steps["peak_memory_gib"] == OWN_GIB, "each rank records its own peak"
    assert run.meter.steps["step_s"] == [STEP] * 2
    assert run.meter.steps["data_wait_s"] == [WAIT] * 2


def test_step_time_excludes_evaluation_and_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time excludes them too. Each rank records its own steps, and the totals sum all lines."""
    run = Run(monkeypatch)
    monkeypatch.setattr(metrics, "alloc_retries", lambda device: 2)
    for times in (1, 2):  # pauses between steps, after a line, and twice in a row
        run.step()
        run.pause(100.0)
        run.step()
        run.line()
        line = run.meter.steps
        assert (line["step"], line["alloc_retries"]) == (2 * times, 2)
        assert line["host_s"] == line["step_s"] == [STEP] * 2
        assert line["compute_before_reduction_s"] == [OWN] * 2
        assert (line["forward_backward_s"], line["optimizer_s"]) == ([PASSES] * 2, [UPDATE] * 2)
        run.pause(50.0)
        run.pause(25.0)
    run.step()
    assert run.line().step_time_s == STEP
    assert run.meter.steps["step_s"] == [STEP]
    assert run.meter.compute_before_reduction_s == [5 * OWN * times for times in (1, 2, 3, 4)]
    totals = {"train_s": STEP, "data_wait_s": WAIT, "forward_backward_s": PASSES, "optimizer_s": UPDATE}
    assert run.meter.totals == {name: 5 * seconds for name, seconds in totals.items()}
    assert run.meter.total_rates()["steps_per_s"] == pytest.approx(1 / STEP)


class Event:
    """A fake CUDA event on a device clock in milliseconds."""

    now = 0.0
    behind = 0.0
    """Milliseconds by which the device lags behind the enqueued work."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at

    def query(self) -> bool:
        return self.at <= Event.now - Event.behind


def test_gpu_timers_read_the_device_clock_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    host = itertools.count()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: float(next(host))))
    timers = metrics.Timers(torch.device("cuda"))
    for behind in (0.0, 1000.0):
        monkeypatch.setattr(Event, "behind", behind)
        begin = timers.mark()
        Event.now += 250.0
        timers.count("optimizer", begin)
        Event.now += 500.0
        timers.end_step()
    drained = timers.drain()
    assert (drained["optimizer"], drained["step"]) == ([0.25] * 2, [0.75] * 2)
    # in the second step the device lags, so the host may have waited for its full queue
    assert drained["host"] == [1.0, 0.0]


def test_a_data_wait_hidden_by_gpu_work_does_not_count() -> None:
    """The host waits while the device computes, so a wait counts only up to the device's idle time."""
    phases = {"step": [1.0] * 3, "forward_backward": [0.5, 0.9, 0.95], "optimizer": [0.1] * 3}
    assert metrics.exposed_waits([0.3] * 3, phases) == pytest.approx([0.3, 0.0, 0.0])


class Counting(nn.Module):
    """A model with DDP's logging data: times in nanoseconds and bucket sizes as text."""

    def __init__(self, **facts: Any):
        super().__init__()
        self._facts = facts

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._facts


def test_ddp_communication_and_bucket_sizes_are_read_and_absent_for_other_models() -> None:
    """Exposed communication is not covered by the backward pass. Rebuilt bucket sizes take precedence."""
    sampled: list[int] = []
    model = Counting(backward_comm_time=5_000_000, backward_compute_comm_overlap_time=3_000_000)
    model._set_ddp_runtime_logging_sample_rate = sampled.append
    metrics.sample_communication(model, 7)
    metrics.sample_communication(nn.Linear(1, 1), 7)
    assert sampled == [7]
    assert metrics.exposed_communication_s(model) == pytest.approx(0.002)
    for unmeasured in (Counting(backward_comm_time=5_000_000), nn.Linear(1, 1)):
        assert metrics.exposed_communication_s(unmeasured) is None
    assert metrics.bucket_bytes(Counting(bucket_sizes="900", rebuilt_bucket_sizes="400, 500")) == [400, 500]
    assert metrics.bucket_bytes(Counting(bucket_sizes="900", rebuilt_bucket_sizes="")) == [900]
    assert metrics.bucket_bytes(nn.Linear(1, 1)) == []


@pytest.mark.parametrize(
    ("own_s", "steps", "ratio", "seconds_per_step"),
    [
        ([1.0, 5.0, 2.0, 3.0], 20, 2.5, 0.15),  # compared with the median of the others
        ([10.0, 10.0 * STRAGGLER_RATIO], 1000, STRAGGLER_RATIO, None),  # not above the limit
        ([1.0, 3.0], STRAGGLER_STEPS - 1, 3.0, None),  # too few steps to name a straggler
        ([1.0, 3.0], STRAGGLER_STEPS, 3.0, 0.2),
        ([4.0], 100, None, None),  # nothing to compare with
        ([0.0, 0.0], 0, None, None),
        ([0.0, 3.0], 100, None, None),
        ([], 5, None, None),
    ],
)
def test_the_slowest_rank_is_compared_with_the_others(
    own_s: list[float], steps: int, ratio: float | None, seconds_per_step: float | None
) -> None:
    slowest = {"rank": 1, "ratio": ratio, "seconds_per_step": seconds_per_step}
    expected = (ratio and pytest.approx(ratio), slowest if seconds_per_step else None)
    assert straggler(own_s, steps) == expected
