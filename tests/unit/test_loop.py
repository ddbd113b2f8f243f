"""Tests of the training loop: evaluation, step times, budgets, saves and the summary."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bert_dp import tasks
from bert_dp.config import RunConfig, progress_at
from bert_dp.data.stream import MlmBatch, random_batch
from bert_dp.files.ledger import EXIT_S, Ledger, Spending
from bert_dp.files.models import Failure
from bert_dp.measure import profile_step
from bert_dp.measure.profile_step import lone_trainer
from bert_dp.model.bert import TiedEmbedding
from bert_dp.model.interface import Model
from bert_dp.optim import lr_factor
from bert_dp.parallel import single
from bert_dp.tasks.mlm import MaskedLanguageModel
from bert_dp.training import devices, metrics, summary
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.devices import precision_of
from bert_dp.training.distributed import HostCollectives, SharedClock, Stop
from bert_dp.training.loop import Trainer, TrainingOutcome, evaluate, train
from bert_dp.training.process import Signals, TolerantFile, World, gc_paused
from tests.helpers import TINY_MODEL, logged, read_json, read_lines, tiny_run, write_lines
from tests.ranks import OneOf

LENGTH = 16


def config(shards: Path, **sections: Any) -> Any:
    base = {"batch": {"global_size": 4, "micro_size": 2}, "model": {**TINY_MODEL, "dropout": 0.5}}
    return tiny_run(shards, **base | sections)


# --- evaluation


@pytest.fixture
def trainer(shards: Path, tmp_path: Path) -> Iterator[Trainer]:
    with lone_trainer(config(shards), tmp_path) as trainer:
        yield trainer


def measured(trainer: Trainer) -> dict[str, Any]:
    result = evaluate(trainer, lambda: False)
    assert result is not None
    return result


def test_dropout_is_off_in_evaluation_and_on_again_in_training(trainer: Trainer) -> None:
    def total_loss() -> float:
        with torch.no_grad():
            return sum(float(trainer.task.loss(model, batch)) for batch in held_out)

    model, result = trainer.bare_model, measured(trainer)
    held_out: list[MlmBatch] = trainer.task._held_out  # type: ignore[attr-defined]
    assert model.training
    trained = total_loss()
    model.eval()
    wanted = total_loss()
    assert result["masked_tokens"] == sum(batch.num_masked for batch in held_out)
    assert result["loss"] == pytest.approx(wanted / result["masked_tokens"], rel=1e-6)
    assert trained != pytest.approx(wanted, rel=1e-6), "dropout has no effect on the loss"


def test_a_stopped_evaluation_leaves_the_model_in_training_mode(trainer: Trainer) -> None:
    answers = iter((False, True))
    assert evaluate(trainer, lambda: next(answers)) is None
    assert trainer.bare_model.training


def test_the_held_out_loss_counts_each_replicas_sequences_once(trainer: Trainer) -> None:
    """Two replicas of two ranks each. A replica reports 0 for a sequence that it has not measured."""

    def gather(values: Any) -> list[Any]:
        hits, *losses = values
        return [values, values, *[[hits, *(2 * loss for loss in losses)]] * 2]

    alone = measured(trainer)
    layout = trainer.layout.model_copy(update={"tensor": 2})
    both = measured(dataclasses.replace(trainer, layout=layout, comm=OneOf(0, 4, gather)))
    assert both["masked_tokens"] == alone["masked_tokens"]
    assert both["loss"] == pytest.approx(3 * alone["loss"])
    assert both["masked_accuracy"] == pytest.approx(2 * alone["masked_accuracy"])


# --- step time


class Slow(Model):
    """A model that takes 1 s for a micro batch in training and 100 s in evaluation."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.vocabulary = TiedEmbedding()
        self._clock = clock

    def forward(self, ids_BS: Any, positions_P: Any, labels_P: Any = None, seed_B: Any = None) -> Tensor:
        self._clock.now += 1.0 if self.training else 100.0
        return torch.zeros(len(positions_P), 64) if labels_P is None else (self.scale * labels_P).sum()


class Clock:
    now = 5000.0

    def read(self) -> float:
        return self.now


FULL = Failure(message="disk full", kind="disk")


class SlowCheckpointer:
    """A checkpointer that takes 1,000 s for a save."""

    abort_reason, problem, newest, stall_s, failed_saves, failed_writes = None, None, None, 0.0, 0, 0
    save_s = 1000.0

    def __init__(self, clock: Clock):
        self._clock, self.steps, self.facts = clock, [0], list[Any]()
        self.waited: list[int] = []

    def save(self, step: int, gather: Any, metadata: Any) -> None:
        self._clock.now += self.save_s
        self.steps.append(step)
        self.facts.append(metadata)

    def wait(self) -> int:
        self.waited.append(self.steps[-1])
        return self.steps[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the metrics and of the trained model."""
    clock = Clock()

    class SlowTask(MaskedLanguageModel):
        def build_model(self, seed: int) -> Any:
            return Slow(clock)

    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=clock.read))
    monkeypatch.setattr(tasks, "make_task", SlowTask)
    return clock


Trained = tuple[Trainer, TrainState, TrainingOutcome]
TrainHere = Callable[..., Trained]


@pytest.fixture
def train_here(tmp_path: Path, shards: Path, clock: Clock) -> TrainHere:
    """Return a function that trains five steps of two micro batches, unless `sections` override this."""

    def train_here(
        stream: Any = None, enter: Any = None, waits_s: float = 0.0, spending: Any = None, **sections: Any
    ) -> Trained:
        engine = sections.pop("engine", "auto")
        base = {
            "schedule": {"steps": 5, "name": "constant"},
            "checkpoint": {"every_steps": 2},
            "log": {"every_steps": 2},
            "eval": {"max_sequences": 2},
        }
        with lone_trainer(config(shards, **base | sections), tmp_path) as lone:
            # set after loading, because the configuration refuses `independent` with one rank
            parallel = lone.config.parallel.model_copy(update={"engine": engine})
            heartbeat: Any = SimpleNamespace(enter=enter, progress=lambda: enter("progress"))
            trainer = dataclasses.replace(
                lone,
                config=lone.config.model_copy(update={"parallel": parallel}),
                stream=stream or SimpleNamespace(next=micro_batch, wait_s=0.0),
                checkpointer=SlowCheckpointer(clock),
                heartbeat=heartbeat if enter else lone.heartbeat,
            )
            state, shared = TrainState(), WaitingClock(trainer.comm, clock, waits_s, spending)
            return trainer, state, train(trainer, state, shared)

    return train_here


class WaitingClock(SharedClock):
    """A shared clock on which the other ranks take `waits_s` seconds to answer."""

    def __init__(self, comm: HostCollectives, clock: Clock, waits_s: float, spending: Spending | None):
        super().__init__(comm, now=clock.read, spending=spending)
        self._clock, self._waits_s = clock, waits_s

    def exchange(self, stop: Stop) -> tuple[float, Stop]:
        self._clock.now += self._waits_s
        return super().exchange(stop)


@pytest.fixture
def trained(tmp_path: Path, train_here: TrainHere, request: pytest.FixtureRequest) -> Trained:
    """Train with an evaluation every `request.param` steps (default: 1)."""
    # the line of an earlier start that reached the same step
    write_lines(tmp_path / "evals.jsonl", [{"step": 5, "loss": 1.0}])
    return train_here(eval={"every_steps": getattr(request, "param", 1), "max_sequences": 2})


def micro_batch() -> MlmBatch:
    return random_batch(0, 2, LENGTH, 4, 64)


def bad_batch() -> MlmBatch:
    """Return a micro batch whose gradient is not finite."""
    good = micro_batch()
    return dataclasses.replace(good, labels_P=torch.full((len(good.labels_P),), torch.nan))


@pytest.mark.parametrize(("trained", "steps"), [(2, [2, 4, 5]), (5, [5]), (0, [5])], indirect=["trained"])
def test_the_last_step_is_evaluated_once(tmp_path: Path, trained: Trained, steps: list[int]) -> None:
    lines = read_lines(tmp_path / "evals.jsonl")
    assert [line["step"] for line in lines] == steps
    assert [line["tokens"] for line in lines] == [step * 4 * LENGTH for step in steps]


def test_step_time_excludes_evaluation_and_saving(tmp_path: Path, trained: Trained) -> None:
    trainer, state, _ = trained
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert [line["step_time_s"] for line in lines] == [2.0] * 3  # two micro batches
    assert [line["progress"] for line in lines] == pytest.approx([0.4, 0.8, 1.0])  # at the end of the step
    assert trainer.checkpointer.steps == [0, 2, 4, 5]
    # 2 s per step, 100 s for the evaluation after each step, 1,000 s for each earlier save
    saved = [(facts["step"], facts["samples"], facts["elapsed_s"]) for facts in trainer.checkpointer.facts]
    assert saved == [(2, 8, 204.0), (4, 16, 1408.0), (5, 20, 2510.0)]
    assert trainer.checkpointer.waited == [4, 5], "only the end of training waits for saves"
    assert trainer.meter.totals["train_s"] == 5 * 2.0
    assert state.eval_s == 5 * 100.0
    assert read_lines(tmp_path / "evals.jsonl")[0]["elapsed_s"] == 2.0 + 100.0
    assert np.isfinite((state.heldout or {})["loss"])


@pytest.mark.parametrize(("engine", "step_s"), [("independent", 2.0), ("auto", 5.0)])
def test_independent_replicas_never_wait_in_a_step(train_here: TrainHere, engine: str, step_s: float) -> None:
    """The step time of ranks that train one model includes the wait."""
    trainer, *_ = train_here(engine=engine, waits_s=3.0, log={"every_steps": 5})
    assert trainer.meter.steps["step_s"] == [step_s] * 5


def test_a_checkpoint_counts_the_steps_skipped_so_far(train_here: TrainHere) -> None:
    drawn = iter(
        [*[micro_batch] * 2, *[bad_batch] * 2, *[micro_batch] * 6]
    )  # two per step, so one is skipped
    trainer, *_ = train_here(SimpleNamespace(next=lambda: next(drawn)(), wait_s=0.0), log={"every_steps": 5})
    assert trainer.checkpointer.steps == [0, 2, 4, 5]
    assert [facts["skipped_steps"] for facts in trainer.checkpointer.facts] == [1, 1, 1]


def test_every_step_uses_the_scheduled_learning_rate_and_the_configured_clip(
    tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameter groups and the logged line have the same learning rate."""
    taken: list[tuple[set[float], float]] = []
    plain = single.SingleEngine.step

    def step(engine: Any, max_norm: float) -> Tensor:
        taken.append(({group["lr"] for group in engine._optimizer.param_groups}, max_norm))
        return plain(engine, max_norm)

    monkeypatch.setattr(single.SingleEngine, "step", step)
    schedule = {"steps": 5, "name": "linear", "warmup_fraction": 0.2}
    trainer, *_ = train_here(schedule=schedule, optim={"lr": 0.02, "clip": 0.25}, log={"every_steps": 1})
    wanted = [0.02 * lr_factor(trainer.config.schedule, number / 5) for number in range(5)]
    assert len(set(wanted)) == 5
    assert [norm for _, norm in taken] == [0.25] * 5
    assert [list(rates) for rates, _ in taken] == [[pytest.approx(rate)] for rate in wanted]
    assert logged(tmp_path, "lr") == pytest.approx(wanted)


def test_training_stops_before_a_budget_overrun(tmp_path: Path, train_here: TrainHere, clock: Clock) -> None:
    """A restarted run trains no further, because its progress is 1."""
    waits = iter([1.0] * 6 + [9.0, 1.0, 1.0, 1.0])

    def slow_batch() -> MlmBatch:
        clock.now += next(waits, 1.0) - 1.0
        return micro_batch()

    stream = SimpleNamespace(next=slow_batch, wait_s=0.0)
    rarely = {"checkpoint": {"every_steps": 0}, "eval": {"every_steps": 0}}
    trainer, state, _ = train_here(stream, schedule={"hours": 20 / 3600}, log={"every_steps": 1}, **rarely)
    assert (state.step, logged(tmp_path, "elapsed_s")[-1]) == (5, 18.0)
    spent_s = trainer.checkpointer.facts[-1]["elapsed_s"]
    assert progress_at(trainer.config, state.step, state.samples, spent_s) == 1.0


@pytest.mark.parametrize(
    ("save_s", "keep", "steps"),
    [(0.0, 2, [0, 31, 61, 75]), (0.5, 2, [0, 31, 61, 75]), (0.8, 2, [0, 31, 71, 75]), (0.0, 0, [0, 75])],
)
def test_saves_by_time_take_at_most_one_percent_of_the_time(
    train_here: TrainHere,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    save_s: float,
    keep: int,
    steps: list[int],
) -> None:
    """A step takes 2 s, so a save each minute comes every 30 steps. Saves of 0.8 s must be 80 s apart."""
    monkeypatch.setattr(SlowCheckpointer, "save_s", save_s)
    saves = {"every_steps": 0, "every_minutes": 1.0, "keep": keep}
    trainer, *_ = train_here(checkpoint=saves, schedule={"steps": 75}, eval={"every_steps": 0})
    assert trainer.checkpointer.steps == steps
    assert capsys.readouterr().out.count("checkpoint.every_minutes") == (save_s == 0.8)


@pytest.mark.parametrize("unit", ["dollars", "kwh"])
@pytest.mark.parametrize("seed", range(10))
def test_a_budget_in_dollars_or_kwh_ends_within_two_steps_of_its_amount(
    tmp_path: Path, train_here: TrainHere, clock: Clock, monkeypatch: pytest.MonkeyPatch, unit: str, seed: int
) -> None:
    """An earlier start used 500 device-seconds, and this start began 30 s before training. A step takes 2 to
    5 s, an evaluation 100 s and a save 1,000 s."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # skipped, because it takes longer than a step
    draw = random.Random(seed)
    rate = draw.uniform(1e-4, 1e-2)  # dollars or kWh per second
    budget = rate * draw.uniform(1850, 1950)
    setting, price = ("price_per_device_hour", 3.6e3) if unit == "dollars" else ("watts_per_device", 3.6e6)
    run = {setting: price * rate}
    Ledger(tmp_path, 2, RunConfig(**run), now=clock.read, began_s=clock.now - 250.0).update()
    ledger = Ledger(tmp_path, 1, RunConfig(**run), now=clock.read)
    clock.now += 30.0
    ledger.update()

    def slow_batch() -> MlmBatch:
        clock.now += draw.uniform(0.0, 1.5)
        return micro_batch()

    train_here(
        SimpleNamespace(next=slow_batch, wait_s=0.0),
        spending=Spending(tmp_path, unit, budget, end_s=1000.0 + EXIT_S),
        run=run,
        schedule={unit: budget, "name": "linear", "warmup_fraction": 0.0},
        optim={"lr": 0.02},
        checkpoint={"every_steps": 0},
        log={"every_steps": 1},
        eval={"every_steps": 20, "max_sequences": 2},
    )
    clock.now += EXIT_S
    over_s = (getattr(ledger.update(), unit) - budget) / rate
    assert -2 * 5 <= over_s <= 2 * 5
    assert logged(tmp_path, "lr")[-1] <= 0.02 * 2 * 5 / 218
    progress = logged(tmp_path, "progress")
    assert progress == sorted(progress)
    assert progress[-1] >= 1 - 5 / 218


def test_a_run_fails_if_setup_spends_the_budget(tmp_path: Path, train_here: TrainHere, clock: Clock) -> None:
    run, schedule = {"price_per_device_hour": 3600.0}, {"dollars": 20.0}
    ledger = Ledger(tmp_path, 1, RunConfig(**run), now=clock.read)
    clock.now += 15.0
    ledger.update()
    spending = Spending(tmp_path, "dollars", 20.0, end_s=10.0)
    _, state, result = train_here(spending=spending, run=run, schedule=schedule)
    assert (state.step, result.failure.kind) == (0, "error")


def test_the_heartbeat_reports_the_phase_between_steps(train_here: TrainHere) -> None:
    """Hang reports and their time limits depend on the phase."""
    phases: list[Any] = []

    def enter(phase: str, step: int | None = None) -> None:
        if phase not in ("data", "step", "progress"):
            phases.append((phase, step))

    train_here(enter=enter, schedule={"steps": 3}, eval={"every_steps": 2, "max_sequences": 2})
    on_time = [("log", 2), ("evaluate", 2), ("save", 2)]
    assert phases == [*on_time, ("log", 3), ("save", 3), ("evaluate", 3)]


def test_only_rank_0_logs_and_only_plain_text(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.log_rank0("one\x1b[2J")
    dataclasses.replace(trainer, comm=HostCollectives(World(1, 1, 2, 2), None)).log_rank0("two")
    out = capsys.readouterr().out
    assert out.startswith("one")
    assert out.count("\n") == 1
    assert "\x1b" not in out


def test_a_failed_run_is_neither_evaluated_nor_saved(tmp_path: Path, train_here: TrainHere) -> None:
    """A checkpoint of the failed state would displace a good one."""
    stream = SimpleNamespace(next=bad_batch, wait_s=0.0)
    trainer, state, result = train_here(stream, run={"max_skipped_in_a_row": 9})
    assert (result.failure.kind, result.signal) == ("not_finite", 0)
    assert (state.heldout, (tmp_path / "evals.jsonl").exists()) == (None, False)
    assert trainer.checkpointer.steps == [0, 2, 4]


@pytest.mark.parametrize(("failure", "signal"), [(None, 15), (FULL, 0)])
def test_a_signal_in_the_last_evaluation_stops_the_run_unless_it_has_failed(
    tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch, failure: Any, signal: int
) -> None:
    signals = Signals()

    def enter(phase: str, *step: int) -> None:
        if (phase, *step) == ("evaluate", 5):
            signals.received = 15
            monkeypatch.setattr(SlowCheckpointer, "abort_reason", failure)

    monkeypatch.setattr(profile_step, "Signals", lambda: signals)
    _, state, result = train_here(enter=enter, eval={"max_sequences": 20, "every_steps": 4})
    assert (result.signal, result.failure) == (signal, failure)
    assert (state.step, state.evaluated_step) == (5, 4), "the evaluation of step 4 does not count for step 5"
    assert [line["step"] for line in read_lines(tmp_path / "evals.jsonl")] == [4]


def test_a_held_out_nan_fails(tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_dp.training.loop.evaluate", lambda *_: {"loss": math.nan, "loss_unit": "nats"})
    _, state, result = train_here(eval={"every_steps": 0})
    assert (state.step, result.failure.kind) == (5, "not_finite")
    (line,) = read_lines(tmp_path / "evals.jsonl")
    assert (line["step"], line["loss"]) == (5, None), "the record keeps null"


def test_a_save_precedes_the_last_evaluation(train_here: TrainHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an earlier evaluation, an error would lose all training since the last checkpoint."""
    saved: list[list[int]] = []

    def fails(trainer: Any, *_: Any) -> None:
        saved.append([*trainer.checkpointer.steps])
        raise RuntimeError("out of memory")

    monkeypatch.setattr("bert_dp.training.loop.evaluate_and_write", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train_here(checkpoint={"every_steps": 0})
    assert saved == [[0, 5]]


def test_micro_batches_are_drawn_one_by_one(tmp_path: Path, train_here: TrainHere, clock: Clock) -> None:
    """The device would idle if all micro batches were drawn first. The heartbeat reports the wait for data,
    and no compute timer includes this wait."""
    events: list[str] = []
    steps: list[int] = []

    def enter(name: str, *step: int) -> None:
        events.append(name)
        steps.extend(step)

    def slow_batch() -> MlmBatch:
        clock.now += 10.0
        stream.wait_s += 10.0
        events.append("drawn")
        return micro_batch()

    stream = SimpleNamespace(next=slow_batch, wait_s=500.0)  # waited before training
    trainer, *_ = train_here(stream, enter, batch={"global_size": 6, "micro_size": 2}, schedule={"steps": 1})
    assert events[: events.index("log")] == ["data", *["data", "drawn", "step", "progress"] * 3, "data"]
    assert steps[:3] == [1, 2, 1], "the data of step 1, the data after it, and the log line"
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["step_time_s"], line["data_wait_s"], line["forward_backward_s"]) == (33.0, 30.0, 3.0)
    assert trainer.meter.compute_before_reduction_s == [3.0]


class Knot:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_when_a_line_is_logged(train_here: TrainHere) -> None:
    left, alive, before = list[weakref.ref[Knot]](), list[int](), gc.get_threshold()

    def leaky_batch() -> MlmBatch:
        left.append(weakref.ref(Knot()))
        return micro_batch()

    def enter(phase: str, *_: Any) -> None:
        if phase == "data" and len(left) % 2 == 0:
            alive.append(sum(knot() is not None for knot in left))

    with gc_paused():
        train_here(SimpleNamespace(next=leaky_batch, wait_s=0.0), enter)
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    # counted at the start of a step; a step draws two micro batches, and every second step logs a line
    assert list(dict.fromkeys(alive)) == [0, 2]
    assert sum(knot() is not None for knot in left) == 0


def test_a_step_of_a_batch_ramp_is_divided_by_its_own_target_count(
    tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []

    def num_targets(task: MaskedLanguageModel, first_sample: int, count: int) -> int:
        steps.append((first_sample, count))
        return count

    monkeypatch.setattr(MaskedLanguageModel, "num_targets", num_targets)
    batch = {"global_size": 8, "micro_size": 2, "ramp_fraction": 0.8, "ramp_quantum": 2}
    _, state, _ = train_here(batch=batch)
    counts = [count for _, count in steps]
    assert (counts[0], counts[-1]) == (2, 8)
    assert [first for first, _ in steps] == [sum(counts[:step]) for step in range(5)]
    assert state.samples == sum(counts)
    assert logged(tmp_path, "accumulation") == [counts[step - 1] // 2 for step in (2, 4, 5)]


def test_the_summary_of_all_ranks(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state, result = trained
    # the other rank used more memory and less energy, and two of its writes failed
    ranks = OneOf(0, 2, lambda own: [own, [own[0] + 3.0, own[1] / 2, 2.0]])
    trainer = dataclasses.replace(trainer, comm=ranks)
    state.samples += 1000  # from an earlier start
    state.global_batch = 2  # the batch of a ramp step, not of the run
    state.step += 1000
    trainer.meter.compute_before_reduction_s, trainer.meter.total_steps = [20.0, 60.0], 20
    trainer.meter.totals |= {"data_wait_s": 1.0, "forward_backward_s": 6.0, "optimizer_s": 3.0}
    trainer.checkpointer.stall_s, trainer.checkpointer.failed_saves = 4.5, 3  # type: ignore[misc]
    state.loss_spikes, state.skipped_steps = 2, 1
    for i, writer in enumerate((TolerantFile, trainer.records, trainer.checkpointer, trainer.trace), 1):
        monkeypatch.setattr(writer, "failed_writes", 10**i)
    monkeypatch.setattr(devices, "peak_memory_gib", lambda device: 1.0)
    monkeypatch.setattr(devices, "joules", lambda device: 130.0)
    summary.write_summary(trainer, state, result, 1.0, 2.0, before_j=30.0)
    end = read_json(tmp_path / "summary.json")
    assert end["peak_memory_gib"] == 4.0
    assert end["energy_j"] == 150.0
    assert end["mfu"] is None
    assert end["straggler"] == {"rank": 1, "ratio": 3.0, "seconds_per_step": 2.0}
    assert (end["step"], end["since_step"], end["heldout_step"]) == (1005, 985, 5)
    assert state.heldout is not None
    assert end["heldout_loss"] == end["heldout"]["loss"] == state.heldout["loss"]
    assert end["heldout"]["masked_tokens"] == state.heldout["masked_tokens"] > 0
    assert (end["samples"], end["tokens"]) == (1020, 1020 * LENGTH)
    assert end["tokens_per_s"] == pytest.approx(5 * 4 * LENGTH / 10.0)
    own = {"setup": 1.0, "compile": 2.0, "train": 10.0, "eval": 500.0, "save": 4.5}
    assert end["time_s"] == own | {"data_wait": 1.0, "forward_backward": 6.0, "optimizer": 3.0}
    assert (end["failed_saves"], end["failed_writes"]) == (3, 11112)
    assert (end["loss_spikes"], end["skipped_steps"], end["noise_scale"]) == (2, 1, None)
    assert (end["unigram_entropy_nats"], end["uniform_entropy_nats"]) == (3.9, math.log(64))
    assert end["final_loss"] == read_lines(tmp_path / "metrics.jsonl")[-1]["loss"] != end["heldout_loss"]
    assert (end["global_batch"], end["micro_batch"], end["accumulation"]) == (4, 2, 2)
    assert (end["exit_code"], end["failure"], end["signal"]) == (0, None, None)


def test_the_summary_records_the_outcome_and_the_setup_of_the_run(tmp_path: Path, trained: Trained) -> None:
    trainer, state, result = trained

    def written(**changes: Any) -> dict[str, Any]:
        summary.write_summary(trainer, state, dataclasses.replace(result, **changes), 1.0, 2.0, before_j=None)
        return read_json(tmp_path / "summary.json")

    end = written(signal=15)
    assert (end["status"], end["exit_code"], end["signal"]) == ("stopped", 128 + 15, 15)
    trainer.trace.steps = [2, 3]
    trainer.checkpointer.newest = tmp_path / "checkpoints" / "step-00000004"  # type: ignore[misc]
    end = written(failure=FULL)
    assert (end["status"], end["exit_code"], end["signal"]) == ("failed", 1, None)
    assert (end["failure"]["message"], end["failure"]["kind"]) == ("disk full", "disk")
    assert (end["checkpoint"], end["profiled_steps"]) == ("checkpoints/step-00000004", [2, 3])
    model: Any = nn.Linear(1, 1)
    model._get_ddp_logging_data = lambda: {"rebuilt_bucket_sizes": "400, 500"}
    init = {"checkpoint": "there", "sha256": "ab" * 32, "tensors": 7, "of": 9}
    metadata = {**trainer.metadata, "compiled": True, "init_from": init}
    trainer = dataclasses.replace(trainer, model=model, precision=precision_of("bf16"), metadata=metadata)
    end = written()
    assert (end["precision"], end["compiled"], end["device"], end["world_size"]) == ("bf16", True, "CPU", 1)
    assert (end["bucket_bytes"], end["metrics"].keys()) == ([400, 500], {"grad_norm"})
    assert end["init_from"] == {**init, "dropped": []}
