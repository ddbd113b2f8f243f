"""Draw the micro batches of any step again, to recompute the numbers of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bert_dp import files
from bert_dp.config import (
    Config,
    ConfigError,
    Issue,
    batch_at,
    find_config,
    load_config,
    progress_at,
    with_budget,
)
from bert_dp.data.stream import MlmBatch
from bert_dp.tasks.mlm import MaskedLanguageModel


def batches(run_or_config: str | os.PathLike[str] | Config, step: int) -> Iterator[MlmBatch]:
    """Yield the micro batches of optimizer step `step`, counted from 1, of a masked-LM run.

    `run_or_config`: a Run or its directory; or a configuration: its file, its name or a Config. Its data are
    built on first use, as in training.

    The micro batches are those of all replicas together, in the order of the training stream. Of `dp`
    replicas (ranks / parallel.tensor), batch number j, counted from 0, is micro batch j // dp of replica
    j % dp. A batch of B sequences of S tokens has, on the CPU,

    * ids_BS: [B, S] token ids as the model sees them, masked;
    * positions_P: [P] predicted positions, flat: b * S + s;
    * labels_P: [P] the tokens that stood there;
    * seed_B: [B] int32 keys of dropout;
    * num_masked: P; sample_ids: [B] positions in the training stream.

    The loss of the step in metrics.jsonl is the sum of the cross entropies over the sum of P.

    Under a batch ramp the samples before a step follow from its line in metrics.jsonl, or else from the
    budget in steps or tokens that the configuration has now. Raises ConfigError for another objective, data
    that are not the run's, a step beyond the budget, and, under a ramp over hours, a step without a line.
    """
    if step < 1:
        raise ConfigError([Issue("step", "out_of_range", f"{step} is below 1", step, hint="use 1 or more")])
    run_dir = None
    if isinstance(run_or_config, Config):
        config = run_or_config
    else:
        path = Path(run_or_config).expanduser()
        run_dir = path if (path / "config.yaml").is_file() else None
        config = load_config(find_config(str(path)) if run_dir is None else path / "config.yaml")
    if config.objective.name != "mlm":
        message = f"{config.objective.name} has no masked batches"
        raise ConfigError(
            [Issue("objective.name", "unsupported", message, config.objective.name, hint="name an mlm run")]
        )
    if config.data.synthetic:
        message = "true trains on one random batch"
        raise ConfigError(
            [Issue("data.synthetic", "unsupported", message, True, hint="name a run on real data")]
        )
    task = MaskedLanguageModel(config, torch.device("cpu"))
    data = task.open_data()
    found = files.newest_checkpoint_facts(run_dir) if run_dir else None
    if found and found[1].data_hash != data.data_hash:
        was, here = found[1].data_hash[:16], data.data_hash[:16]
        message = f"the run was trained on shards {was}, these are {here}"
        raise ConfigError([Issue("data", "conflict", message, here, str(run_dir), "restore the run's data")])
    first, size = _locate(with_budget(config, data.num_samples), step, run_dir)
    micro = config.batch.micro_size
    if size % micro:
        message = f"{micro} does not divide the {size} sequences of step {step}"
        raise ConfigError([Issue("batch.micro_size", "does_not_divide", message, micro)])
    starts = range(first, first + size, micro)
    return (task.training_batch(np.arange(start, start + micro)) for start in starts)


def _locate(config: Config, step: int, run_dir: Path | None) -> tuple[int, int]:
    """Find the number of samples before a step and its global batch. Raises ConfigError."""
    batch, samples, done = config.batch, 0, 0
    if batch.ramp_fraction > 0:
        for line in files.read_lines(run_dir / "metrics.jsonl") if run_dir else ():
            if line["step"] == step:
                return line["samples"] - line["global_batch"], line["global_batch"]
        if config.schedule.hours is not None:
            # the batch follows the clock, so that only a logged step can be located
            message = (
                f"{step} has no line in metrics.jsonl, and batch.ramp_fraction follows a budget in hours"
            )
            issue = Issue("step", "not_found", message, step, "schedule.hours", "name a logged step")
            raise ConfigError([issue])
        size = batch_at(batch, 0.0)
        while size < batch.global_size and done < step - 1:
            samples, done = samples + size, done + 1
            size = batch_at(batch, progress_at(config, done, samples, 0.0))
    samples += (step - 1 - done) * batch.global_size  # once the ramp has ended
    progress = progress_at(config, step - 1, samples, 0.0)
    if progress >= 1.0:
        message = f"{step} is beyond the budget of the run"
        raise ConfigError([Issue("step", "out_of_range", message, step)])
    return samples, batch_at(batch, progress)
