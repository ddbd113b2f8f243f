"""summary.json of a run that ended by itself, well or not, or by a signal."""

from __future__ import annotations

import dataclasses
import math

from bert_dp import ddp_counters, energy, noise, record
from bert_dp.lines import LOSSES
from bert_dp.metrics import peak_memory_gib, straggler
from bert_dp.setup import device_name
from bert_dp.train import Counters, Job, Outcome


def write_summary(
    job: Job,
    counters: Counters,
    outcome: Outcome,
    setup_s: float,
    dry_run_s: float,
    before_j: float | None,
) -> None:
    """Rank 0 writes; collective: the peak memory is the largest of all ranks', the energy their sum.

    `before_j`: this rank's counter of joules before the first step.
    """
    after_j = energy.joules(job.device)
    used = math.nan if before_j is None or after_j is None else after_j - before_j
    gathered = job.comm.gather([peak_memory_gib(job.device), used])
    memory, used = gathered[:, 0].max().item(), gathered[:, 1].sum().item()
    if job.comm.world.rank != 0 or job.lost():
        return
    totals = job.meter.totals
    status = "failed" if outcome.failure else "stopped" if outcome.signal else "done"
    ratio, slowest = straggler(job.meter.own_work_s, job.meter.total_steps)
    summary = record.Summary(
        status=status,
        exit_code={"done": 0, "stopped": 128 + outcome.signal, "failed": 1}[status],
        cause=outcome.failure,  # what stopped a run stands in `signal`
        signal=outcome.signal or None,
        step=counters.step,
        samples=counters.samples,
        tokens=counters.samples * job.config.data.sequence_length,
        final_loss=outcome.final_loss,
        heldout_loss=outcome.heldout_loss,
        unigram_entropy_nats=job.data.unigram_entropy_nats,
        uniform_entropy_nats=job.data.uniform_entropy_nats,
        world_size=job.comm.world.size,
        device=device_name(job.device),
        parameters=job.num_parameters,
        global_batch=job.plan.global_size,
        micro_batch=job.plan.micro_size,
        accumulation=job.plan.accumulation,
        precision=job.precision.name,
        compiled=job.facts["compiled"],
        **job.meter.total_rates(),
        peak_memory_gib=memory,
        energy_j=used if math.isfinite(used) else None,
        skipped_steps=counters.skipped_steps,
        ddp=ddp_counters.summary(job.model),
        loss_spikes=counters.loss_spikes,
        failed_saves=job.saver.failed_saves,
        noise_scale=dataclasses.asdict(noise.of_run(job.run_dir)) if job.config.log.noise_scale else None,
        checkpoint=str(outcome.checkpoint.relative_to(job.run_dir)) if outcome.checkpoint else None,
        straggler_ratio=ratio,
        straggler=slowest,
        time_s={
            "setup": setup_s,
            "compile": dry_run_s,
            "train": totals["train_s"],
            "data_wait": totals["data_wait_s"],
            "forward_backward": totals["forward_backward_s"],
            "optimizer": totals["optimizer_s"],
            "eval": outcome.eval_s,
            "save": outcome.save_s,
        },
    )
    try:
        record.write_json(job.run_dir / "summary.json", summary.__dict__)
    except OSError as error:  # a full disk must not hide why the run ended; the launcher misses the file
        LOSSES.note(error)
        job.say(f"warning: summary.json is missing: {error}")
