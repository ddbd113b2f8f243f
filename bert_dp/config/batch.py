"""Compute the batch sizes of a run, its progress through its budget, and its peak learning rate."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from bert_dp.config.checks import finetune_issues, noise_issues, parallel_issues, residual_issues
from bert_dp.config.errors import ConfigError, Issue
from bert_dp.config.schema import BatchConfig, Config, divisors

# untuned LAMB (arXiv 1904.00962, table 2; batch 512 to 32,768): lr = UNTUNED_LR sqrt(batch / UNTUNED_BATCH)
UNTUNED_LR = 5e-3
UNTUNED_BATCH = 32_768


class BatchLayout(BaseModel):
    """Batch sizes for one world size, where global_size = micro_size x grad_accum_steps x dp."""

    model_config = ConfigDict(frozen=True)
    world_size: int
    tensor: int
    """Ranks per replica."""
    dp: int
    """Number of replicas."""
    micro_size: int
    grad_accum_steps: int
    global_size: int

    @property
    def samples_per_micro_step(self) -> int:
        """Return the number of sequences in one forward/backward pass, summed over the replicas."""
        return self.micro_size * self.dp

    def __str__(self) -> str:
        factors = f"micro {self.micro_size} x accumulation {self.grad_accum_steps} x dp {self.dp}"
        return f"global batch {self.global_size} = {factors}"


def batch_layout(config: Config, world_size: int) -> BatchLayout:
    """Return the batch layout for `world_size` ranks. Raises ConfigError if settings conflict, or if
    batch.global_size or batch.ramp_quantum is not a multiple of micro_size x dp. In the latter case, the hint
    lists the nearest multiples."""
    batch, dp = config.batch, max(1, world_size // config.parallel.tensor)
    micro_step = batch.micro_size * dp  # samples per forward/backward pass, over all replicas
    quantum = batch.ramp_quantum if batch.ramp_fraction > 0 else None
    name, value, near, or_else = "batch.global_size", batch.global_size, list[int](), ""
    if value % micro_step:
        low = value // micro_step * micro_step
        near, or_else = [low, low + micro_step], " (or change batch.micro_size or the number of ranks)"
    elif quantum is not None and quantum % micro_step:
        name, value = "batch.ramp_quantum", quantum
        fits = [q for q in divisors(batch.global_size) if q % micro_step == 0]
        near = sorted(fits, key=lambda q: abs(q - quantum))[:2]
    issues: list[Issue] = []
    if near:
        step = f"batch.micro_size {batch.micro_size} x {dp} replicas = {micro_step}"
        hint = f"nearest multiples: {', '.join(str(n) for n in near if n)}{or_else}"
        message = f"{value} is not a multiple of {step}"
        issues.append(Issue(name, "does_not_divide", message, value, "batch.micro_size", hint))
    issues += [*parallel_issues(config, world_size), *residual_issues(config, config.precision)]
    issues += [*noise_issues(config, dp), *finetune_issues(config)]
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


def progress_at(config: Config, step: int, samples: int, spent: float) -> float:
    """Return the share of the budget spent so far, in [0, 1]. For a budget in epochs, call with_budget first.
    `spent`: for a budget in hours, the elapsed seconds; in dollars or kWh, the share spent; else unused."""
    schedule = config.schedule
    if schedule.steps is not None:
        return min(step / schedule.steps, 1.0)
    if schedule.tokens is not None:
        return min(samples * config.data.sequence_length / schedule.tokens, 1.0)
    if schedule.hours is None:
        return spent
    return min(spent / (schedule.hours * 3600), 1.0)


def with_budget(config: Config, num_samples: int) -> Config:
    """Return the configuration with a budget in epochs converted to tokens or, for labelled
    examples, which differ in length, to whole steps. `num_samples`: samples per epoch."""
    schedule = config.schedule
    if schedule.epochs is None:
        return config
    if config.has_examples:
        budget = {"steps": max(1, int(schedule.epochs * num_samples / config.batch.global_size))}
    else:
        budget = {"tokens": max(1, round(schedule.epochs * num_samples)) * config.data.sequence_length}
    return config.model_copy(update={"schedule": schedule.model_copy(update={"epochs": None, **budget})})


def batch_at(batch: BatchConfig, progress: float) -> int:
    """Return a step's global batch size in sequences. `progress`: share of the budget spent so far."""
    if batch.ramp_fraction <= 0 or batch.ramp_quantum is None:
        return batch.global_size
    quantum = batch.ramp_quantum
    ramped = int(progress * batch.global_size / batch.ramp_fraction / quantum) * quantum + quantum
    return min(ramped, batch.global_size)


class PeakLr(NamedTuple):
    value: float
    equation: str


def peak_lr(config: Config) -> PeakLr:
    """Return the peak learning rate of a run and, as text, its equation. `lr: auto` selects the untuned
    LAMB rule. `lr_scaling: sqrt` is the rule for Adam (arXiv 2205.10287), LAMB and Muon. Under this rule, the
    noise that the updates add over a given number of samples does not depend on the batch size. `linear` is
    the rule for SGD (arXiv 1706.02677)."""
    optim, batch = config.optim, config.batch.global_size
    if optim.lr == "auto":
        value = UNTUNED_LR * (batch / UNTUNED_BATCH) ** 0.5
        rule = f"{UNTUNED_LR:g} sqrt({batch} / {UNTUNED_BATCH}) (untuned LAMB; assumes 3,125 warm-up steps)"
        return PeakLr(value, f"{value:.4g} = {rule}")
    if optim.lr_scaling == "none" or optim.lr_batch is None:
        return PeakLr(optim.lr, f"{optim.lr:g} as given, for global batch {batch}")
    ratio = batch / optim.lr_batch
    root = optim.lr_scaling == "sqrt"
    value = optim.lr * (ratio**0.5 if root else ratio)
    rule = f"{'sqrt' if root else ''}({batch} / {optim.lr_batch})"
    return PeakLr(value, f"{value:.4g} = {optim.lr:g} x {rule} (global batch / optim.lr_batch)")
