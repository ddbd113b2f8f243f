"""Predict a run on GPUs that this machine does not have (`train --dry-run --gpu`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bert_dp.config import CLOCKED, ConfigError, Issue
from bert_dp.config.manifest import Manifest, read_data
from bert_dp.cost import peak_flops
from launcher.job import Job, built_data
from launcher.log import PLAIN, show
from launcher.machine.environment import Gpu
from launcher.plan import gpu_speed
from launcher.plan.budget import Costs
from launcher.plan.scaling import unknown_issues
from launcher.plan.step_model import hardware
from launcher.report.formats import format_duration, format_ratio, format_si, format_step_time
from launcher.run.train import expected_steps

if TYPE_CHECKING:
    from rich.console import Console

PRECISIONS = ("bf16", "fp16", "fp32")  # in the order in which `precision: auto` prefers them


def on_gpus(job: Job, gpu: str, nproc: str) -> Job:
    """Return the job as if this machine had `nproc` (auto: one) GPUs of type `gpu`. Raises ConfigError
    if hardware.yaml does not list the GPU, or if the GPU does not support the precision."""
    if issues := unknown_issues("--gpu", gpu, hardware()["gpus"]):
        raise ConfigError(issues)
    device, config = hardware()["gpus"][gpu]["device"], job.config
    known = [name for name in PRECISIONS if peak_flops(device, name) is not None]
    precision = known[0] if config.precision == "auto" else config.precision
    if precision not in known:
        message, hint = f"{gpu} does not support {precision}", f"use {known[0]}"
        raise ConfigError([Issue("precision", "unsupported", message, precision, "--gpu", hint)])
    size = gpu_speed.memory_gib(gpu)
    count = int(nproc) if nproc.isdecimal() and len(nproc) < 6 else 1
    gpus = tuple(Gpu(i, device, size, None, free_gib=size) for i in range(count))
    machine = dataclasses.replace(job.machine, gpus=gpus)
    run = config.run.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"run": run, "precision": precision})
    return Job(job.name, config, machine)


def speed_here(job: Job, ranks: int) -> tuple[float, float] | None:
    """Return the predicted tokens/s on `ranks` GPUs of this machine and the factor of the 95 % interval, or
    None if no GPU is used, or if the GPU or its peak in the job's precision is unknown."""
    config = job.config
    precision = "bf16" if config.precision == "auto" else config.precision
    nearest = [
        (len(row["device"]), -abs(gpu_speed.memory_gib(name) - (gpu.memory_gib or 0.0)), name)
        for gpu in job.machine.gpus[: min(job.gpus, 1)]
        for name, row in hardware()["gpus"].items()
        if row["device"] in gpu.name and gpu_speed.peak_of(name, precision) is not None
    ]
    if not nearest:
        return None
    name = max(nearest)[2]
    row, factor = gpu_speed.predicted_step(config, name, ranks, precision, config.batch.micro_size)
    return row.tokens_per_s, factor


def print_speed(job: Job, gpu: str, console: Console, nodes: int) -> None:
    """Print the predicted micro batch, speed, and training time or token count of a job made by `on_gpus`."""
    config, count = job.config, job.gpus
    if nodes > 1:
        text = "speed   not predicted for several nodes; use `bert-dp plan scaling --gpu NAME --inter LINK`"
        return show(console, text, **PLAIN)
    link, precision = gpu_speed.link_of(gpu, count), config.precision
    row, factor = gpu_speed.predicted_step(config, gpu, count, precision, config.batch.micro_size)
    fits = gpu_speed.micro_batch_that_fits(config, precision, gpu, count)
    of = f"{count} x {gpu}" + (f" over {link}" if link else "")
    quantum = config.batch.ramp_quantum if config.batch.ramp_fraction > 0 else None
    divided = "share of the batch" if quantum is None else f"share of batch.ramp_quantum ({quantum})"
    largest = f"{fits} is the largest that" if fits else "no size"

    def between(value: float, text: Callable[[float], str]) -> str:
        return f"{text(value)} ({text(value / factor)} to {text(value * factor)}, 95 %)"

    tokens_text = partial(format_si, unit="tokens")
    lines = [
        f"micro   {largest} divides a replica's {divided} and fits in 90 % of {gpu}'s memory (estimate)",
        f"speed   {between(row.tokens_per_s, tokens_text)} per second on {of}, "
        f"{format_step_time(row.step_time_s)} per step (roofline fitted to published measurements)",
    ]
    # the time for a budget in steps ignores the batch ramp
    steps, whole = expected_steps(config) or 0, config.batch.global_size * config.data.sequence_length
    if (unit := config.schedule.unit) in CLOCKED:
        run, watts = config.run, float(hardware()["gpus"][gpu]["watts"])
        costs = Costs(count, run.price_per_device_hour, run.watts_per_device or watts, run.pue)
        hours = costs.hours(unit, getattr(config.schedule, unit))
        expected = row.tokens_per_s * hours * 3600
        lines.append(f"tokens  {between(expected, tokens_text)} in {hours:g} h")
        manifest = read_data(config, data) if (data := built_data(config)) is not None else None
        if isinstance(manifest, Manifest):
            passes = format_ratio(expected / manifest.train.tokens)
            lines[-1] += f", {passes} passes over {manifest.train.tokens:,} tokens of data"
    elif tokens := config.schedule.tokens or steps * whole:
        lines.append(f"time    {between(tokens / row.tokens_per_s, format_duration)} of training")
    for line in lines:
        show(console, line, **PLAIN)
