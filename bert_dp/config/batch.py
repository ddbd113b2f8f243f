"""The batch equation, its ramp, and how far a run has come in its budget."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bert_dp.config.checks import finetune_issues, noise_issues, parallel_issues, residual_issues
from bert_dp.config.error import ConfigError, Issue
from bert_dp.config.schema import BatchConfig, Config, divisors


class BatchLayout(BaseModel):
    """The batch equation for one world size: global = micro x accumulation x dp."""

    model_config = ConfigDict(frozen=True)
    world_size: int
    tensor: int
    """Ranks of one replica."""
    dp: int
    micro_size: int
    grad_accum_steps: int
    global_size: int

    @property
    def samples_per_micro_step(self) -> int:
        """Sequences of one forward/backward over all replicas."""
        return self.micro_size * self.dp

    def __str__(self) -> str:
        return (
            f"global batch {self.global_size} = micro {self.micro_size} "
            f"x accumulation {self.grad_accum_steps} x dp {self.dp}"
        )


def batch_layout(config: Config, world_size: int) -> BatchLayout:
    """Accumulation for `world_size` ranks at the declared global batch.

    Raises ConfigError, naming the nearest batches that divide, when it does not.
    """
    batch, dp = config.batch, max(1, world_size // config.parallel.tensor)
    issues: list[Issue] = []
    micro_step = batch.micro_size * dp  # samples of one forward/backward over all replicas
    if batch.global_size % micro_step:
        low = batch.global_size // micro_step * micro_step
        near = ", ".join(str(n) for n in (low, low + micro_step) if n)
        or_else = (
            "the number of ranks" if batch.global_size % dp else "batch.micro_size or the number of ranks"
        )
        message = (
            f"{batch.global_size} is not a multiple of batch.micro_size {batch.micro_size} "
            f"x {dp} replicas = {micro_step}"
        )
        hint = f"nearest that are: {near} (or change {or_else})"
        issues.append(
            Issue(
                "batch.global_size", "does_not_divide", message, batch.global_size, "batch.micro_size", hint
            )
        )
    elif batch.ramp_fraction > 0 and batch.ramp_quantum is not None and batch.ramp_quantum % micro_step:
        fits = [q for q in divisors(batch.global_size) if q % micro_step == 0]
        near = ", ".join(map(str, sorted(fits, key=lambda q: abs(q - (batch.ramp_quantum or 0)))[:2]))
        message = (
            f"{batch.ramp_quantum} is not a multiple of batch.micro_size {batch.micro_size} "
            f"x {dp} replicas = {micro_step}"
        )
        issues.append(
            Issue(
                "batch.ramp_quantum",
                "does_not_divide",
                message,
                batch.ramp_quantum,
                "batch.micro_size",
                f"nearest that are: {near}",
            )
        )
    issues += parallel_issues(config, world_size)
    issues += residual_issues(config, config.precision)
    issues += noise_issues(config, dp) + finetune_issues(config)
    if issues:
        raise ConfigError(issues)
    return BatchLayout(
        world_size=world_size,
        tensor=config.parallel.tensor,
        dp=dp,
        micro_size=batch.micro_size,
        grad_accum_steps=batch.global_size // micro_step,
        global_size=batch.global_size,
    )


def progress_at(config: Config, step: int, samples: int, elapsed_s: float) -> float:
    """f in [0, 1]: consumed / declared in the budget's own unit. Of a budget in epochs: see with_budget."""
    schedule = config.schedule
    if schedule.steps is not None:
        return min(step / schedule.steps, 1.0)
    if schedule.tokens is not None:
        return min(samples * config.data.sequence_length / schedule.tokens, 1.0)
    assert schedule.hours is not None
    return min(elapsed_s / (schedule.hours * 3600), 1.0)


def with_budget(config: Config, num_samples: int) -> Config:
    """The configuration with schedule.epochs, if it has any, as the tokens of so many passes over
    `num_samples` training sequences; of finetuning, whose examples differ in length, as its whole steps."""
    schedule = config.schedule
    if schedule.epochs is None:
        return config
    if config.objective.name == "finetune":
        budget = {"steps": max(1, int(schedule.epochs * num_samples / config.batch.global_size))}
    else:
        budget = {"tokens": max(1, round(schedule.epochs * num_samples)) * config.data.sequence_length}
    resolved = schedule.model_copy(update={"epochs": None, **budget})
    return config.model_copy(update={"schedule": resolved})


def batch_at(batch: BatchConfig, progress: float) -> int:
    """Sequences of the step that starts at progress f: the recipe's linear ramp in declared quanta."""
    if batch.ramp_fraction <= 0 or batch.ramp_quantum is None:
        return batch.global_size
    quantum = batch.ramp_quantum
    ramped = int(progress * batch.global_size / batch.ramp_fraction / quantum) * quantum + quantum
    return min(ramped, batch.global_size)
