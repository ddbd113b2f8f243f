"""Define the training loop (`train`) and its parts: steps, evaluations and saves."""

import dataclasses
import gc
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bert_dp import files
from bert_dp.config import BatchLayout, Config, batch_at, peak_lr, progress_at
from bert_dp.files.models import Failure
from bert_dp.model.interface import Model
from bert_dp.optim import lr_factor, set_lr
from bert_dp.parallel import Engine, State
from bert_dp.tasks import Context, DatasetInfo, MicroBatch, Stream, Task
from bert_dp.training import metrics
from bert_dp.training.checkpoint import AsyncCheckpointer, SaveTimer, TrainState
from bert_dp.training.devices import Precision
from bert_dp.training.distributed import HostCollectives, SharedClock, Stop
from bert_dp.training.metrics import Meter, Timers, exposed_communication_s
from bert_dp.training.process import HeartbeatWriter, Records, Signals
from bert_dp.training.profiler import StepTrace


@dataclasses.dataclass(frozen=True)
class Rank:
    """Context of one rank after the rendezvous, before the model is built."""

    config: Config
    layout: BatchLayout
    run_dir: Path
    comm: HostCollectives
    device: torch.device
    task: Task
    data: DatasetInfo
    heartbeat: HeartbeatWriter
    signals: Signals

    def log_rank0(self, text: str) -> None:
        """Write a line to rank 0's log, which the launcher shows. Does nothing on other ranks."""
        if self.comm.world.rank == 0:
            sys.stdout.write(files.printable(text) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer(Rank):
    """All objects that one rank needs for training; created in build.py."""

    precision: Precision
    stream: Stream
    engine: Engine
    bare_model: Model
    model: nn.Module
    """Model as wrapped by the engine."""
    optimizer: torch.optim.Optimizer
    num_parameters: int
    metadata: dict[str, Any]
    """Further fields of state.json, such as the configuration and the data's hash."""
    meter: Meter
    checkpointer: AsyncCheckpointer
    records: Records
    trace: StepTrace


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """Result of `train`."""

    signal: int
    """Signal that stopped the run; 0 if the budget was spent or a failure stopped the run."""
    failure: Failure | None
    """Reason why the run failed, identical on every rank; None if it did not fail."""


def train_step(
    trainer: Trainer,
    batches: Iterable[MicroBatch],
    *,
    grad_accum_steps: int,
    num_targets: int,
    timers: Timers,
) -> tuple[Tensor, Tensor]:
    """Run one training step: forward, backward, reduction, clipping and the optimizer's update.

    `batches` yields `grad_accum_steps` micro batches; each is fetched after the previous one's backward pass.
    `num_targets`: number of targets in this step, over all replicas. Without a host sync, return two device
    scalars: this replica's share of the mean loss over the targets (the shares sum to the mean), and the norm
    of the reduced gradient. The timer compute_before_reduction covers every forward and backward pass except
    the last backward pass, because that pass reduces gradients.
    """
    engine, device, precision = trainer.engine, trainer.device, trainer.precision
    loss_share = torch.zeros((), dtype=precision.parameters, device=device)
    for left, batch in zip(reversed(range(grad_accum_steps)), batches, strict=True):
        begin = timers.mark()
        with engine.accumulate(last=not left):
            with precision.context(device):
                loss = trainer.task.loss(trainer.model, batch.to(device)) / num_targets
            if not left:
                timers.count("compute_before_reduction", begin)
            engine.backward(loss)
        loss_share += loss.detach()
        if left:
            timers.count("compute_before_reduction", begin)
        timers.count("forward_backward", begin)
        trainer.heartbeat.progress()
    begin = timers.mark()
    norm = engine.step(trainer.config.optim.clip)
    timers.count("optimizer", begin)
    return loss_share, norm


def dry_run(trainer: Trainer, start: State) -> None:
    """Run one training step and one evaluation batch, then load the state `start`. This compiles the model
    and shows early whether memory suffices. It also lets DDP build its final buckets: with three or more
    ranks, later iterations sum in a different order from the first. Takes no stream samples. Collective."""
    layout, engine = trainer.layout, trainer.engine
    count = min(2, layout.grad_accum_steps)
    train_step(
        trainer,
        [trainer.task.example_batch(layout.micro_size)] * count,
        grad_accum_steps=count,
        num_targets=trainer.task.num_targets(0, count * layout.samples_per_micro_step),
        timers=Timers(trainer.device),
    )
    batches = itertools.count()
    evaluate(trainer, lambda: next(batches) > 0)  # stop after one batch
    trainer.comm.barrier()
    engine.scatter_state(start)
    if engine.norm_pairs is not None:
        engine.norm_pairs.clear()


def evaluate(
    trainer: Trainer, stopped: Callable[[], bool], run_dir: Path | None = None
) -> dict[str, Any] | None:
    """Return the task's measurements on held-out data, without dropout, or None (see `Task.evaluate`).
    `stopped` and `run_dir`: see `Context`. Collective."""
    context = Context(
        comm=trainer.comm,
        device=trainer.device,
        precision=trainer.precision,
        dp_rank=trainer.engine.dp_rank,
        dp_size=trainer.engine.dp_size,
        tensor=trainer.layout.tensor,
        progress=trainer.heartbeat.progress,
        stopped=stopped,
        run_dir=run_dir if trainer.comm.world.rank == 0 else None,
    )
    model = trainer.bare_model.eval()
    measured = trainer.task.evaluate(model, context)
    model.train()
    return measured


def train(trainer: Trainer, state: TrainState, clock: SharedClock) -> TrainingOutcome:
    """Train until the budget is spent, a signal arrives or the run fails; update `state`. Collective."""
    config, meter, heartbeat = trainer.config, trainer.meter, trainer.heartbeat
    peak, saves = peak_lr(config).value, SaveTimer(config.checkpoint, clock.shared_elapsed_s)
    meter.start(trainer.stream.wait_s)
    trainer.trace.reached(state.step, meter)
    while True:
        heartbeat.enter("data", state.step + 1)
        spent, stop = clock.exchange(stop_request(trainer, state))
        if config.parallel.engine == "independent":
            meter.timers.restart()  # exclude the time for which replicas wait for each other
        progress = progress_at(config, state.step, state.samples, spent)
        if stop or progress >= 1.0:
            break
        state.global_batch = batch_at(config.batch, progress)
        state.lr = peak * lr_factor(config.schedule, progress)
        set_lr(trainer.optimizer, state.lr)
        grad_accum_steps = state.global_batch // trainer.layout.samples_per_micro_step
        loss, norm = train_step(
            trainer,
            micro_batches(trainer, grad_accum_steps),
            grad_accum_steps=grad_accum_steps,
            num_targets=trainer.task.num_targets(state.samples, state.global_batch),
            timers=meter.timers,
        )
        meter.observe(loss, norm, state.global_batch, grad_accum_steps, trainer.stream.wait_s)
        state.step += 1
        state.samples += state.global_batch
        trainer.trace.reached(state.step, meter)
        if state.step % config.log.every_steps == 0:
            log_steps(trainer, state, clock)
        step_s = clock.end_step()
        if clock.spending is not None and not state.eval_s:
            # estimate, used until the first evaluation: a forward pass takes about a third of a step
            clock.spending.evaluation_s = step_s * trainer.data.num_evaluated / state.global_batch / 3
        evaluates = config.eval.every_steps and state.step % config.eval.every_steps == 0
        if evaluates and clock.has_time_for("evaluation_s"):  # otherwise evaluate only at the end
            with meter.paused():
                evaluate_and_write(trainer, state, clock)
            clock.read_again(stop_request(trainer, state))
        if saves.is_due(state.step, clock.shared_elapsed_s) and clock.has_time_for("end_s"):
            with meter.paused():
                began_s = clock.elapsed_s()
                save(trainer, state, clock.spent_s())
                if line := saves.saved(clock.shared_elapsed_s, clock.pause_since(began_s)):
                    trainer.log_rank0(line)
            clock.read_again(stop_request(trainer, state))
    trainer.trace.reached(state.step, meter, at_end=True)
    return _finish(trainer, state, clock, stop)


def micro_batches(trainer: Trainer, count: int) -> Iterator[MicroBatch]:
    """Yield the next `count` micro batches. During a fetch, the heartbeat is in phase `data`."""
    for _ in range(count):
        trainer.heartbeat.enter("data")
        batch = trainer.stream.next()
        trainer.heartbeat.enter("step")
        yield batch


def stop_request(trainer: Trainer, state: TrainState) -> Stop:
    """Return this rank's stop request."""
    return Stop(trainer.signals.received, bool(state.abort_reason or trainer.checkpointer.abort_reason))


def _finish(trainer: Trainer, state: TrainState, clock: SharedClock, stop: Stop) -> TrainingOutcome:
    """Write the last log line, evaluation and checkpoint. `stop`: the request that ended the loop, if any."""
    if state.step > state.logged_step:
        log_steps(trainer, state, clock)
    if not stop:
        precision, skipped = trainer.precision.name, state.skipped_steps
        nothing = metrics.nothing_learned(trainer.config, precision, skipped, state.step)
        state.request_abort(nothing, "not_finite" if state.step else "error")
    is_due = not (stop or state.abort_reason or state.step == state.evaluated_step)
    unsaved = save(trainer, state, clock.spent_s(), wait=True) if is_due else None
    if is_due:  # after the save, so that an error here does not lose the run
        evaluate_and_write(trainer, state, clock)
        if state.step != state.evaluated_step:  # the evaluation was interrupted, or there is no held-out data
            stop = clock.poll_stop(stop_request(trainer, state))
    clock.finish()
    failure = trainer.comm.broadcast_failure(state.abort_reason or trainer.checkpointer.abort_reason)
    if failure is None:  # a failed run must not replace good checkpoints
        failure = unsaved if is_due else save(trainer, state, clock.spent_s(), wait=True)
    return TrainingOutcome(0 if stop.failed else stop.signal, failure)


def log_steps(trainer: Trainer, state: TrainState, clock: SharedClock) -> None:
    """Write a line to metrics.jsonl and check for loss spikes and skipped steps. Collective."""
    trainer.heartbeat.enter("log", state.step)
    gc.collect()  # all ranks do this at once, while devices work; fast, because gc_paused froze older objects
    epoch = state.samples // trainer.data.num_samples
    elapsed_s = clock.elapsed_s()
    spent = clock.spent(elapsed_s)
    progress = progress_at(trainer.config, state.step, state.samples, spent)  # at the end of this step
    line = trainer.meter.flush(state, epoch=epoch, progress=progress, elapsed_s=elapsed_s)
    norm_pairs = trainer.engine.norm_pairs
    norms = norm_pairs.drain(trainer.comm, state.step) if norm_pairs is not None else []
    if trainer.config.log.step_times:
        steps = {**trainer.meter.steps, "ddp_exposed_s": exposed_communication_s(trainer.model)}
        trainer.records.append(f"steps/rank-{trainer.comm.world.rank}.jsonl", steps)
    if trainer.comm.world.rank == 0:
        trainer.records.append("metrics.jsonl", line)
        for pairs in norms:
            trainer.records.append("noise.jsonl", pairs)
    state.logged_step, state.final_loss = state.step, line["loss"]
    state.skipped_steps = line["skipped_steps"]
    watch_loss(trainer, state, line["loss"])
    skipping = metrics.too_many_skipped(
        trainer.config, trainer.precision.name, trainer.meter.skipped_in_a_row, state.step, state.lr
    )
    state.request_abort(skipping, "not_finite")


def watch_loss(trainer: Trainer, state: TrainState, loss: float) -> None:
    """Report and count a spike in the logged loss; store the loss for later comparisons."""
    recent = state.recent_losses
    if metrics.is_spike(loss, recent):
        state.loss_spikes += 1
        mean = f"the mean of the last {len(recent)} logged losses is {statistics.fmean(recent):.4f}"
        trainer.log_rank0(f"warning: loss spike at step {state.step}: {loss:.4f}; {mean}")
    if math.isfinite(loss):
        state.recent_losses = [*recent, loss][-metrics.WINDOW :]


def evaluate_and_write(trainer: Trainer, state: TrainState, clock: SharedClock) -> None:
    """Evaluate and write a line to evals.jsonl. Collective."""
    trainer.heartbeat.enter("evaluate", state.step)
    start = clock.elapsed_s()
    measured = evaluate(trainer, lambda: bool(clock.poll_stop(stop_request(trainer, state))), trainer.run_dir)
    elapsed = clock.elapsed_s()
    state.eval_s += elapsed - start
    if clock.spending is not None:
        clock.spending.evaluation_s = elapsed - start
    if measured is None:
        return
    state.heldout, state.evaluated_step = measured, state.step
    if trainer.comm.world.rank == 0:
        with suppress(OSError):
            files.cut_back(trainer.run_dir / "evals.jsonl", state.step - 1)  # drop this step's line, if any
        line = {
            "step": state.step,
            "tokens": trainer.meter.tokens(state.samples),
            **measured,
            "elapsed_s": elapsed,
        }
        trainer.records.append("evals.jsonl", line)
    state.request_abort(metrics.has_diverged(measured["loss"], state.step), "not_finite")


def save(trainer: Trainer, state: TrainState, elapsed_s: float, *, wait: bool = False) -> Failure | None:
    """Start saving a checkpoint in the background. With `wait`, wait for the save and return its failure, or
    None if the save succeeded. The result is identical on every rank. Collective."""
    trainer.heartbeat.enter("save", state.step)
    checkpointer, comm = trainer.checkpointer, trainer.comm
    if wait and comm.broadcast(checkpointer.wait()) == state.step:
        return None
    state.elapsed_s, state.skipped_steps = elapsed_s, int(trainer.meter.skipped)
    checkpointer.save(state.step, trainer.engine.gather_state, {**trainer.metadata, **state.saved()})
    if not wait or comm.broadcast(checkpointer.wait()) == state.step:
        return None
    return comm.broadcast_failure(checkpointer.problem)
