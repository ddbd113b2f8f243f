"""What a run would be, in words: batch equation, data, model, memory, length."""

from __future__ import annotations

from pathlib import Path

from bert_dp.config import BatchLayout, Config, ExamplesManifest, Manifest, batch_at, peak_lr
from bert_dp.cost import flops_per_token, num_parameters
from bert_dp.record import CheckpointFacts
from launcher.report.numbers import count_of, format_duration, format_percent
from launcher.run.memory_check import MemoryCheck

COMPLETE = "this run is complete: its budget is spent; raise schedule.* to go on"


def expected_steps(config: Config) -> int | None:
    """Optimizer steps of the whole run with its batch ramp; None for a budget in hours, and in epochs of data
    that are not built."""
    schedule = config.schedule
    if schedule.steps is not None:
        return schedule.steps
    if schedule.tokens is None:
        return None
    steps = tokens = 0
    while tokens < schedule.tokens:
        batch = batch_at(config.batch, tokens / schedule.tokens)
        size = batch * config.data.sequence_length  # tokens of a step, until the ramp's next quantum
        if batch == config.batch.global_size:
            return steps - (tokens - schedule.tokens) // size  # rounded up
        end = int(batch / config.batch.global_size * config.batch.ramp_fraction * schedule.tokens)
        count = max(1, (end - tokens) // size - 1)  # short of the end by a step: progress is rounded
        steps, tokens = steps + count, tokens + count * size
    return steps


def describe(
    config: Config, layout: BatchLayout, manifest: Manifest | ExamplesManifest | None, memory: MemoryCheck
) -> list[str]:
    """The dry run's report. `manifest`: None before the data is built."""
    sequence = config.data.sequence_length
    parts = ", ".join(f"{name} {size:.2f}" for name, size in memory.parts_gib.items())
    flops = flops_per_token(config.model, sequence, config.predicted_share)
    tokens = layout.global_size * sequence
    packed = config.objective.name == "mlm"  # else examples differ in length
    step = f"{tokens:,} tokens" if packed else f"{layout.global_size:,} examples"
    ramp = f", ramped in steps of {config.batch.ramp_quantum}" if config.batch.ramp_fraction else ""
    return [
        f"batch   {layout} = {step} a step{ramp}",
        f"data    {describe_data(config, manifest)}",
        f"model   {num_parameters(config.model, sequence):,} parameters, {flops / 1e6:.1f} MFLOP a token",
        f"memory  about {memory.total_gib:.2f} GiB a rank (estimate, {memory.precision}, eager: {parts})",
        f"length  {describe_length(config, tokens if packed else None)}; schedule {config.schedule.name}",
        f"rate    {peak_lr(config).equation}; {config.optim.name}",
    ]


def describe_start(checkpoint: tuple[Path, CheckpointFacts] | None, *, is_done: bool) -> list[str]:
    """Where a run would go on; nothing of a new one."""
    if checkpoint is None:
        return []
    path, facts = checkpoint
    return [f"resume  {COMPLETE if is_done else f'from step {facts.step:,}, {path.name}'}"]


def describe_length(config: Config, step_tokens: int | None) -> str:
    """Steps, hours or epochs, and tokens where their number is known. `step_tokens`: of a whole batch; None
    where it differs from step to step."""
    schedule, steps = config.schedule, expected_steps(config)
    length = "" if steps is None else count_of(steps, "step")
    if schedule.hours is not None:
        hours = f"{schedule.hours:g} h"
        length = hours if schedule.hours >= 1 else f"{format_duration(schedule.hours * 3600)} ({hours})"
        length += " on rank 0's clock"
    if schedule.epochs is not None:
        length = f"{schedule.epochs:g} epochs of the data, which are not built yet"
    tokens = schedule.tokens
    if tokens is None and steps is not None and step_tokens is not None and not config.batch.ramp_fraction:
        tokens = steps * step_tokens
    return length if tokens is None else f"{length} = {tokens:,} tokens"


def describe_data(config: Config, manifest: Manifest | ExamplesManifest | None) -> str:
    """How much there is of it, and how often the run passes over it. `manifest`: None before it is built."""
    if manifest is None:
        return "not built yet; built when the run starts"
    if isinstance(manifest, ExamplesManifest):
        return describe_examples(config, manifest)
    train, schedule = manifest.train, config.schedule
    line = f"{train.sequences:,} sequences of {manifest.sequence_length} tokens"
    if schedule.hours is not None or (schedule.steps is not None and config.batch.ramp_fraction):
        return line  # how much that is shows only as it runs
    step_tokens = config.batch.global_size * manifest.sequence_length
    passes = (schedule.tokens or (expected_steps(config) or 0) * step_tokens) / train.tokens
    how = f"reads {format_percent(passes)} of them" if passes < 1 else f"passes over them {passes:.3g} times"
    return f"{line}; the run {how}"


def describe_examples(config: Config, manifest: ExamplesManifest) -> str:
    """Task, rows and lengths; of GLUE whether the rows are all that there are."""
    train, steps = manifest.splits["train"], expected_steps(config)
    of_glue = {None: "", True: ", GLUE's own rows", False: ", a subset of GLUE's rows"}[manifest.official]
    cut = format_percent(train.truncated / train.examples)
    line = (
        f"{manifest.task}: {train.examples:,} examples of {train.tokens / train.examples:.1f} tokens on "
        f"average, {cut} of them truncated to {manifest.sequence_length}{of_glue}"
    )
    if steps is None:
        return line
    passes = steps * config.batch.global_size / train.examples
    return f"{line}; the run passes over them {passes:.3g} times"
