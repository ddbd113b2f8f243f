"""Pretrain with masked language modelling on packed sequences. `batches` reproduces any step's batches."""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert_dp import cost, files
from bert_dp.config import Config, ConfigError, Issue, find_config, load_config, read_manifest
from bert_dp.config.batch import batch_at, batch_layout, progress_at, with_budget
from bert_dp.config.schema import CLOCKED, num_masked
from bert_dp.data import stream as data
from bert_dp.data.build import ensure
from bert_dp.model.bert import CrammedBert, build_model
from bert_dp.tasks import Context, DatasetInfo, write_or_warn

EVAL_MASK_RATE = 0.15  # fixed, so that held-out losses of runs with different mask rates are comparable


class MaskedLanguageModel:
    """Task of masked language modelling; see `bert_dp.tasks.Task`."""

    def __init__(self, config: Config, device: torch.device):
        self._config, self._pin = config, device.type == "cuda"
        length = config.data.sequence_length
        self.flops_per_token = cost.flops_per_token(config.model, length, config.objective.mask_rate)
        self._held_out: list[data.MlmBatch] | None = None

    def open_data(self) -> DatasetInfo:
        """Open the shards. Build them on first use, unless data.path is set."""
        path = ensure(self._config)
        manifest = read_manifest(path)
        self._train = data.Shards(path, manifest, "train")
        self._held_out_shards = data.Shards(path, manifest, "held_out")
        return DatasetInfo(
            data_hash=manifest.hash,
            tokenizer=manifest.tokenizer.sha256,
            num_samples=len(self._train),
            num_evaluated=min(len(self._held_out_shards), self._config.eval.max_sequences),
            tokenizer_file=path / manifest.tokenizer.file,
            unigram_entropy_nats=manifest.unigram_entropy_nats,
            uniform_entropy_nats=manifest.uniform_entropy_nats,
        )

    def build_model(self, seed: int) -> CrammedBert:
        return build_model(self._config.model, self._config.data.sequence_length, seed)

    def training_batch(self, sample_ids: NDArray[np.int64]) -> data.MlmBatch:
        """Build the micro batch of the samples at positions `sample_ids` in the training stream."""
        config = self._config
        return data.training_batch(
            self._train,
            sample_ids,
            seed=config.run.seed,
            num_masked=config.num_masked,
            shuffle=config.data.shuffle,
        )

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> data.TrainingStream[data.MlmBatch]:
        return data.TrainingStream(
            self.training_batch,
            micro_size=self._config.batch.micro_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            start_sample=start_sample,
            workers=self._config.data.workers,
            pin=self._pin,
        )

    @staticmethod
    def loss(model: nn.Module, batch: data.MlmBatch) -> Tensor:
        loss: Tensor = model(batch.ids_BS, batch.positions_P, batch.labels_P, seed_B=batch.seed_B)
        return loss

    def num_targets(self, first_sample: int, count: int) -> int:
        return count * self._config.num_masked

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, float] | None:
        """Measure loss and accuracy on the held-out sequences, masked at EVAL_MASK_RATE."""
        vocabulary = cast(CrammedBert, model).vocabulary
        each = num_masked(EVAL_MASK_RATE, self._config.data.sequence_length)  # masked tokens per sequence
        total = min(len(self._held_out_shards), self._config.eval.max_sequences)
        loss_N = torch.zeros(total, dtype=torch.float64, device=context.device)
        hits = torch.zeros((), dtype=torch.float64, device=context.device)
        if self._held_out is None:
            self._held_out = data.held_out_batches(
                self._held_out_shards,
                micro_size=self._config.batch.micro_size,
                max_sequences=total,
                num_masked=each,
                dp_rank=context.dp_rank,
                dp_size=context.dp_size,
            )
        with torch.no_grad(), context.precision.context(context.device):
            for batch in self._held_out:
                if context.stopped():
                    return None
                on_device = batch.to(context.device)
                logits_PV = model(on_device.ids_BS, on_device.positions_P)
                loss_P, hit_P = vocabulary.score(logits_PV, on_device.labels_P).double()
                # rows that pad the last batches repeat sequence 0 with labels IGNORE, so their loss is 0
                index_B = torch.from_numpy(batch.sample_ids).to(context.device)
                loss_N.index_add_(0, index_B, loss_P.view(-1, each).mean(1))
                hits += hit_P.sum()
                context.progress()
        if not total:
            return None
        guessed, *losses = context.sum_over_replicas([float(hits), *loss_N.tolist()])
        measured = {
            "loss": math.fsum(losses) / total,
            "masked_accuracy": guessed / (total * each),
            "mask_rate": EVAL_MASK_RATE,
            "masked_tokens": total * each,
            "sequences": total,
        }
        if total > 1:
            measured["loss_se"] = statistics.stdev(losses) / math.sqrt(total)
        if context.run_dir is not None:
            # fields of files.models.SequenceLosses, for paired comparisons of runs
            text = hashlib.sha256(self._held_out_shards.rows(np.arange(total)).tobytes()).hexdigest()
            facts = {"text_sha256": text, "mask_rate": EVAL_MASK_RATE, "losses": losses}
            write_or_warn(context.run_dir / files.SEQUENCE_LOSSES, json.dumps(files.finite(facts)))
        return measured

    def example_batch(self, micro_size: int) -> data.MlmBatch:
        """Return a micro batch of uniformly random tokens."""
        c = self._config
        sizes = (c.data.sequence_length, c.num_masked, c.model.vocab_size)
        return data.random_batch(c.run.seed, micro_size, *sizes)


make_task = MaskedLanguageModel


def batches(run_or_config: str | os.PathLike[str] | Config, step: int) -> Iterator[data.MlmBatch]:
    """Yield the micro batches of optimizer step `step`, counted from 1, of a masked-LM run.

    `run_or_config`: a Run, a run directory, or a configuration (a file, a name or a Config). As in training,
    shards missing from the cache are built.

    The micro batches of all replicas are yielded in the order of the training stream. With `dp` replicas
    (ranks / parallel.tensor), batch number j, counted from 0, is micro batch j // dp of replica j % dp. A
    batch of B sequences of S tokens has these fields, on the CPU:

    * ids_BS: [B, S] token ids after masking, as the model receives them;
    * positions_P: [P] predicted positions, flat: b * S + s;
    * labels_P: [P] original tokens at the predicted positions;
    * seed_B: [B] int32 keys for dropout;
    * num_masked: P; sample_ids: [B] positions in the training stream.

    The step's loss in metrics.jsonl is the sum of the cross entropies divided by the sum of P.

    With a batch ramp, the number of samples before the step is read from metrics.jsonl or, if that file
    has no line for the step, computed from a budget in steps, tokens or epochs. Raise ConfigError if
    neither is possible, if the run has no such step, or if it is not masked-LM pretraining on real data.
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
    if config.task or config.objective.name != "mlm" or config.data.synthetic:
        message, hint = "has no masked batches of real data", "choose an mlm run on real data"
        raise ConfigError([Issue("RUN", "unsupported", message, str(run_or_config), hint=hint)])
    task = MaskedLanguageModel(config, torch.device("cpu"))
    opened = task.open_data()
    found = files.newest_checkpoint_facts(run_dir) if run_dir else None
    if found and found[1].data_hash != opened.data_hash:
        now = opened.data_hash[:16]
        message = f"the run's shards had hash {found[1].data_hash[:16]}, but the current shards have {now}"
        raise ConfigError([Issue("data", "conflict", message, now, str(run_dir), "restore the run's data")])
    first, size = _locate(with_budget(config, opened.num_samples), step, run_dir)
    micro = batch_layout(config, world_size=1).micro_size  # raises if micro_size does not divide global_size
    starts = range(first, first + size, micro)
    return (task.training_batch(np.arange(start, start + micro)) for start in starts)


def _locate(config: Config, step: int, run_dir: Path | None) -> tuple[int, int]:
    """Return (samples before `step`, samples in it). Raise ConfigError if unknown or beyond the budget."""
    batch, samples = config.batch, (step - 1) * config.batch.global_size
    if batch.ramp_fraction > 0:
        for line in files.read_lines(run_dir / "metrics.jsonl") if run_dir else ():
            if line["step"] == step:
                return line["samples"] - line["global_batch"], line["global_batch"]
        if (unit := config.schedule.unit) in CLOCKED:
            message = (
                f"{step} is not in metrics.jsonl, so its batch size is unknown (the ramp depends on {unit})"
            )
            hint = "choose a logged step"
            raise ConfigError([Issue("step", "not_found", message, step, f"schedule.{unit}", hint)])
        samples = 0
        for done in range(step - 1):
            samples += batch_at(batch, progress_at(config, done, samples, 0.0))
    progress = progress_at(config, step - 1, samples, 0.0)
    if progress >= 1.0:
        message = f"{step} is beyond the run's budget"
        raise ConfigError([Issue("step", "out_of_range", message, step)])
    return samples, batch_at(batch, progress)
