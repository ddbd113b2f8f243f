"""The learning rate rules, in one place, each with its equation."""

from __future__ import annotations

from typing import NamedTuple

from bert_dp.config.schema import Config

# arXiv 1904.00962, table 2: one rule for batches 512 to 32,768, and 3,125 warm-up steps whatever the batch
UNTUNED_LR = 5e-3
UNTUNED_BATCH = 32_768
UNTUNED_WARMUP_STEPS = 3_125


class PeakLr(NamedTuple):
    value: float
    equation: str


def peak_lr(config: Config) -> PeakLr:
    """The peak learning rate of a run and how it came about.

    optim.lr: auto = the untuned LAMB rule. lr_scaling: sqrt keeps the noise of Adam, LAMB and Muon updates
    per sample (arXiv 2205.10287), linear is the rule of plain SGD (arXiv 1706.02677).
    """
    optim, batch = config.optim, config.batch.global_size
    if optim.lr == "auto":
        value = UNTUNED_LR * (batch / UNTUNED_BATCH) ** 0.5
        return PeakLr(
            value,
            f"{value:.4g} = {UNTUNED_LR:g} sqrt({batch} / {UNTUNED_BATCH}) (untuned LAMB; its rule warms up "
            f"over {UNTUNED_WARMUP_STEPS:,} steps of the whole run)",
        )
    if optim.lr_scaling == "none" or optim.lr_batch is None:
        return PeakLr(optim.lr, f"{optim.lr:g} as given, for global batch {batch}")
    ratio = batch / optim.lr_batch
    root = optim.lr_scaling == "sqrt"
    value = optim.lr * (ratio**0.5 if root else ratio)
    rule = f"{'sqrt' if root else ''}({batch} / {optim.lr_batch})"
    return PeakLr(value, f"{value:.4g} = {optim.lr:g} x {rule}, global batch / the batch it was tuned at")
