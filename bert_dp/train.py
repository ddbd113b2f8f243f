"""The one loop: train_step, evaluate, train."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bert_dp import ddp_counters, health, record
from bert_dp.config import BatchPlan, Config, batch_at, peak_lr, progress_at
from bert_dp.data import hash64
from bert_dp.dist import Comm, SharedClock
from bert_dp.heartbeat import Heartbeat
from bert_dp.lines import Records
from bert_dp.metrics import Meter, Timers
from bert_dp.noise import NormPairs
from bert_dp.optim import lr_factor, set_lr
from bert_dp.parallel import Engine
from bert_dp.precision import Precision
from bert_dp.saving import Saver
from bert_dp.tasks import Batch, Context, Metadata, Stream, Task
from bert_dp.trainable import Model

GIVE_UP = 1000  # for the clock's exchange: above every signal's number, so that its MAX prefers it

LossFn = Callable[[nn.Module, Any], Tensor]
"""(model, micro batch on the device) -> sum over the targets, a device scalar."""


@dataclasses.dataclass
class Counters:
    """How far the run is; what a checkpoint keeps beside the tensors."""

    step: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    skipped_steps: int = 0
    loss_spikes: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    """The logged ones that the next is compared with."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything one rank trains with; built by the worker, held together only for the call of `train`."""

    config: Config
    plan: BatchPlan
    run_dir: Path
    comm: Comm
    device: torch.device
    precision: Precision
    engine: Engine
    model: nn.Module
    bare_model: Model
    optimizer: torch.optim.Optimizer
    task: Task
    data: Metadata
    stream: Stream
    num_parameters: int
    meter: Meter
    facts: dict[str, Any]
    """What else state.json keeps: the configuration, the data's hash, whether the model is compiled."""
    saver: Saver
    lost: Callable[[], str | None]
    """What became of the run directory when it is no longer where it was; asked by rank 0, which writes."""
    records: Records
    say: Callable[[str], None]
    """Writes a line of rank 0's log."""
    heartbeat: Heartbeat
    received_signal: Callable[[], int]
    """The signal this rank has received, or 0."""
    mirror: Callable[[dict[str, Any]], None]
    """Where rank 0 also sends each line (TensorBoard, or nowhere)."""
    norm_pairs: NormPairs | None
    """What the engine measures for log.noise_scale, if it can."""


@dataclasses.dataclass
class Course:
    """What the loop remembers for its end; alike on every rank."""

    logged_step: int
    evaluated_step: int
    line_facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    final_loss: float | None = None
    heldout_loss: float | None = None
    eval_s: float = 0.0
    trouble: str | None = None
    """Why the run must stop."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    signal: int
    """0 = the budget is spent, or `failure`."""
    failure: str | None
    """Why the run ended itself; the same on every rank."""
    final_loss: float | None
    heldout_loss: float | None
    checkpoint: Path | None
    eval_s: float
    save_s: float


def train_step(
    engine: Engine,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    *,
    num_targets: int,
    device: torch.device,
    precision: Precision,
    max_norm: float,
    timers: Timers,
    dropout_seed: int | None,
    progress: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Forward, backward, reduce, clip, step.

    `num_targets` is that of the step over all replicas. Returns this replica's share of the mean loss over
    them (the shares sum to it) and the reduced gradient norm, both device scalars; no host sync. With
    `dropout_seed` a micro batch draws its dropout from (dropout_seed, its first sample), whichever rank it
    falls to. `progress` is called after each micro batch.

    Timed as own_work: up to the last micro batch's backward, before any gradient is reduced. That is this
    rank's alone under single, ddp, zero1 and accelerate; fsdp and tensor parallelism meet in the forward.
    """
    loss_share = torch.zeros((), dtype=precision.parameters, device=device)
    with timers.phase("forward_backward"):
        timers.start("own_work")
        for i, batch in enumerate(batches):
            if dropout_seed is not None:
                torch.manual_seed(int(hash64(dropout_seed, 4, batch.sample_ids[0])[0] >> np.uint64(1)))
            last = i == len(batches) - 1
            with engine.accumulate(last=last):
                with precision.context(device):
                    loss = loss_fn(model, batch.to(device)) / num_targets
                if last:
                    timers.stop("own_work")
                engine.backward(loss)
            loss_share += loss.detach()
            progress()
    with timers.phase("optimizer"):
        norm = engine.step(max_norm)
    return loss_share, norm


def dry_run(job: Job) -> None:
    """One synchronised step before the first real one: compiles, finds out-of-memory early, lets DDP build
    its buckets (at three ranks or more its first iteration reduces in another order). Collective.

    It moves weights and optimizer state, so `setup.restore` must follow. It takes no samples.
    """
    batches = [job.task.example_batch(job.plan.micro_size)] * min(2, job.plan.accumulation)
    timers = Timers(job.device)
    train_step(
        job.engine,
        job.model,
        job.task.loss,
        batches,
        num_targets=job.task.num_targets(0, len(batches) * job.plan.micro_size * job.plan.dp),
        device=job.device,
        precision=job.precision,
        max_norm=job.config.optim.clip,
        timers=timers,
        dropout_seed=None,
        progress=job.heartbeat.progress,
    )
    asked = itertools.count()
    evaluate(job, lambda: next(asked) > 0)  # one batch
    job.comm.barrier()


def evaluate(job: Job, stopped: Callable[[], bool]) -> dict[str, float] | None:
    """What the task measures on held-out data, without dropout; None when nothing is held out or `stopped`,
    asked before each batch and alike on all ranks, says so. Collective."""
    context = Context(
        comm=job.comm,
        device=job.device,
        precision=job.precision,
        dp_rank=job.engine.dp_rank,
        dp_size=job.engine.dp_size,
        tensor=job.plan.tensor,
        progress=job.heartbeat.progress,
        stopped=stopped,
    )
    model = job.bare_model.eval()
    measured = job.task.evaluate(model, context)
    model.train()
    return measured


def train(job: Job, counters: Counters, clock: SharedClock) -> Outcome:
    """Steps until the budget is spent, a signal arrives on any rank, or the run gives up; `counters` is kept
    up to date.

    Rank 0 writes metrics.jsonl, noise.jsonl, evals.jsonl and checkpoints. Collective.
    """
    config, meter, heartbeat = job.config, job.meter, job.heartbeat
    dropout_seed = config.run.seed if config.model.dropout > 0 else None
    per_pass = job.plan.micro_size * job.plan.dp
    peak = peak_lr(config).value
    course = Course(counters.step, counters.step)
    meter.start(job.stream.wait_s)
    while True:
        heartbeat.enter("data", counters.step + 1)
        elapsed_s, stop = clock.tick(_wish(job, course))
        progress = progress_at(config, counters.step, counters.samples, elapsed_s)
        if stop or progress >= 1.0:
            break
        batch = batch_at(config.batch, progress)
        lr = peak * lr_factor(config.schedule, progress)
        set_lr(job.optimizer, lr)
        batches = [job.stream.next() for _ in range(batch // per_pass)]
        heartbeat.enter("step")
        loss, norm = train_step(
            job.engine,
            job.model,
            job.task.loss,
            batches,
            num_targets=job.task.num_targets(counters.samples, batch),
            device=job.device,
            precision=job.precision,
            max_norm=config.optim.clip,
            timers=meter.timers,
            dropout_seed=dropout_seed,
            progress=heartbeat.progress,
        )
        meter.observe(loss, norm, batch, len(batches), job.stream.wait_s)
        counters.step += 1
        counters.samples += batch
        course.line_facts = {"progress": progress, "lr": lr, "batch": batch}
        if counters.step % config.log.every_steps == 0:
            _log(job, counters, clock, course)
        if config.eval.every_steps and counters.step % config.eval.every_steps == 0:
            with meter.paused():
                _evaluate_and_write(job, counters, clock, course)
        if config.checkpoint.every_steps and counters.step % config.checkpoint.every_steps == 0:
            with meter.paused():
                _begin_to_save(job, counters, clock.elapsed_s())
    return _finish(job, counters, clock, course, stop)


def _wish(job: Job, course: Course) -> int:
    """What this rank tells the others: the signal that it has received, or that the run must end."""
    return GIVE_UP if course.trouble or job.saver.gave_up else job.received_signal()


def _finish(job: Job, counters: Counters, clock: SharedClock, course: Course, stop: int) -> Outcome:
    """The last line, evaluation and checkpoint. `stop`: what ended the loop, 0 = the budget is spent."""
    if counters.step > course.logged_step:
        _log(job, counters, clock, course)
    if not stop:
        lr, skipped = float(course.line_facts.get("lr", 0.0)), counters.skipped_steps
        found = health.nothing_learned(job.precision.name, skipped, counters.step, lr)
        course.trouble = course.trouble or found
    evaluated = course.heldout_loss is not None and counters.step <= course.evaluated_step
    if not (stop or course.trouble or evaluated):
        _evaluate_and_write(job, counters, clock, course)
        stop = clock.ask(_wish(job, course)) if course.heldout_loss is None else 0
    clock.finish()
    job.records.close()
    failure = job.comm.share(course.trouble or job.saver.gave_up)
    if not failure:  # else the state may be what made it fail, and must not push out the good ones
        failure = save(job, counters, clock.elapsed_s())
    return Outcome(
        signal=0 if stop == GIVE_UP else stop,
        failure=failure,
        final_loss=course.final_loss,
        heldout_loss=course.heldout_loss,
        checkpoint=job.saver.newest,
        eval_s=course.eval_s,
        save_s=job.saver.held_s,
    )


def _log(job: Job, counters: Counters, clock: SharedClock, course: Course) -> None:
    job.heartbeat.enter("log", counters.step)
    course.trouble = course.trouble or job.lost()
    line = job.meter.flush(
        step=counters.step,
        samples=counters.samples,
        epoch=counters.samples // job.data.num_samples,
        wait_s=job.stream.wait_s,
        elapsed_s=clock.elapsed_s(),
        **course.line_facts,
    )
    if job.config.log.step_times:
        steps = {**job.meter.steps, "ddp_exposed_s": ddp_counters.exposed_s(job.model)}
        job.records.append(f"steps/rank-{job.comm.world.rank}.jsonl", steps)
    norms = job.norm_pairs.drain(job.comm, counters.step) if job.norm_pairs is not None else []
    counters.skipped_steps = line.skipped_steps
    course.final_loss, course.logged_step = line.loss, line.step
    if job.comm.world.rank == 0 and not job.lost():
        job.records.append("metrics.jsonl", line)
        for pairs in norms:
            job.records.append("noise.jsonl", pairs)
        job.mirror(dataclasses.asdict(line))
    recent = counters.recent_losses
    if health.is_spike(line.loss, recent):
        counters.loss_spikes += 1
        mean = sum(recent) / len(recent)
        job.say(
            f"warning: loss spike at step {line.step}: {line.loss:.4f}, mean of the last {len(recent)} "
            f"logged losses {mean:.4f}"
        )
    if math.isfinite(line.loss):
        counters.recent_losses = [*recent, line.loss][-health.WINDOW :]
    in_a_row = job.meter.skipped_in_a_row
    found = health.too_many_skipped(job.config, job.precision.name, in_a_row, line.step, line.lr)
    course.trouble = course.trouble or found


def _evaluate_and_write(job: Job, counters: Counters, clock: SharedClock, course: Course) -> None:
    job.heartbeat.enter("evaluate", counters.step)
    start = clock.elapsed_s()
    measured = evaluate(job, lambda: clock.ask(_wish(job, course)) != 0)
    elapsed = clock.elapsed_s()
    course.heldout_loss = measured["loss"] if measured else None
    course.evaluated_step = counters.step
    course.eval_s += elapsed - start
    course.trouble = course.trouble or job.lost()
    if job.comm.world.rank == 0 and measured and not course.trouble:
        with suppress(OSError):
            record.cut_back(job.run_dir / "evals.jsonl", counters.step - 1)  # one line a step, also repeated
        tokens = counters.samples * job.config.data.sequence_length
        line = {"step": counters.step, "tokens": tokens, **measured, "elapsed_s": elapsed}
        job.records.append("evals.jsonl", line)
        job.mirror({"step": counters.step, "heldout_loss": course.heldout_loss})


def save(job: Job, counters: Counters, elapsed_s: float) -> str | None:
    """Save the state that the run is in, unless that is done, and wait for it; why it could not be saved, the
    same on every rank. Collective."""
    job.heartbeat.enter("save", counters.step)
    if job.comm.share(job.saver.settle())[0] == counters.step:
        return None
    _begin_to_save(job, counters, elapsed_s)
    step, problem = job.comm.share(job.saver.settle())
    return None if step == counters.step else problem


def _begin_to_save(job: Job, counters: Counters, elapsed_s: float) -> None:
    job.heartbeat.enter("save", counters.step)
    counters.elapsed_s = elapsed_s
    counters.skipped_steps = int(job.meter.skipped)
    facts = {**job.facts, **dataclasses.asdict(counters)}
    job.saver.save(counters.step, job.engine.gather_state, facts)
