"""Write summary.json at the end of a run that is done, was stopped by a signal, or failed on all ranks."""

import math

from bert_dp import files
from bert_dp.config import computes_alone
from bert_dp.files.models import HeldOut, InitFrom, RunStatus, Straggler, Summary
from bert_dp.parallel import engine_name
from bert_dp.training import devices, metrics, noise
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.loop import Trainer, TrainingOutcome
from bert_dp.training.metrics import straggler
from bert_dp.training.process import TolerantFile


def write_summary(
    trainer: Trainer,
    state: TrainState,
    result: TrainingOutcome,
    setup_s: float,
    dry_run_s: float,
    before_j: float | None,
) -> None:
    """Write summary.json on rank 0, with the highest peak memory of any rank and the ranks' total energy.
    `before_j`: reading of this rank's energy counter before the first step, in joules. Collective."""
    after_j = devices.joules(trainer.device)
    used = math.nan if before_j is None or after_j is None else after_j - before_j
    writers = (TolerantFile, trainer.records, trainer.checkpointer, trainer.trace)
    failed_writes = float(sum(writer.failed_writes for writer in writers))
    gathered = trainer.comm.all_gather([devices.peak_memory_gib(trainer.device), used, failed_writes])
    memory, used = gathered[:, 0].max().item(), gathered[:, 1].sum().item()
    if trainer.comm.world.rank != 0:
        return
    status: RunStatus = "failed" if result.failure else "stopped" if result.signal else "done"
    scale = noise.estimate_of_run(trainer.run_dir) if trainer.config.log.noise_scale else None
    engine = engine_name(trainer.config.parallel, trainer.comm.world.size)
    ratio, slowest = None, None
    if computes_alone(engine, trainer.layout.tensor):
        ratio, slowest = straggler(trainer.meter.compute_before_reduction_s, trainer.meter.total_steps)
    init = trainer.metadata["init_from"]
    newest = trainer.checkpointer.newest
    heldout = HeldOut.model_validate(state.heldout) if state.heldout else None
    summary = Summary(
        status=status,
        failure=result.failure,
        signal=result.signal or None,
        step=state.step,
        samples=state.samples,
        tokens=trainer.meter.tokens(state.samples),
        final_loss=state.final_loss,
        heldout_loss=heldout.loss if heldout else None,
        heldout=heldout,
        heldout_step=state.evaluated_step,
        since_step=state.step - trainer.meter.total_steps,
        unigram_entropy_nats=trainer.data.unigram_entropy_nats,
        uniform_entropy_nats=trainer.data.uniform_entropy_nats,
        world_size=trainer.comm.world.size,
        device=devices.device_name(trainer.device),
        parameters=trainer.num_parameters,
        global_batch=trainer.layout.global_size,
        micro_batch=trainer.layout.micro_size,
        accumulation=trainer.layout.grad_accum_steps,
        precision=trainer.precision.name,
        compiled=trainer.metadata["compiled"],
        **trainer.meter.total_rates(),
        peak_memory_gib=memory,
        energy_j=used if math.isfinite(used) else None,
        skipped_steps=state.skipped_steps,
        bucket_bytes=metrics.bucket_bytes(trainer.model),
        metrics=trainer.meter.measured,
        loss_spikes=state.loss_spikes,
        failed_saves=trainer.checkpointer.failed_saves,
        failed_writes=int(gathered[:, 2].sum()),
        profiled_steps=trainer.trace.steps,
        noise_scale=scale,
        checkpoint=str(newest.relative_to(trainer.run_dir)) if newest else None,
        init_from=InitFrom.model_validate(init) if init else None,
        straggler_ratio=ratio,
        straggler=Straggler.model_validate(slowest) if slowest else None,
        time_s={
            "setup": setup_s,
            "compile": dry_run_s,
            **{name.removesuffix("_s"): seconds for name, seconds in trainer.meter.totals.items()},
            "eval": state.eval_s,
            "save": trainer.checkpointer.stall_s,
        },
    )
    try:
        files.write_json(trainer.run_dir / "summary.json", summary.model_dump(mode="json"))
    except OSError as error:  # a full disk must not hide a failure; the launcher notices the missing file
        trainer.log_rank0(f"warning: could not write summary.json: {error}")
