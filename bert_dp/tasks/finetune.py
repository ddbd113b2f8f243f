"""Finetune a model to predict labels or scores of whole examples in a prepared directory (bert_dp.examples).

Axes: N examples in a split, B examples in a micro batch, S positions in its padded examples, L labels.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bert_dp import cost, files
from bert_dp.config import Config, ConfigError, read_examples
from bert_dp.data.stream import TensorBatch, TrainingStream, hash64, key32, permute
from bert_dp.evaluation.scores import score
from bert_dp.examples.table import Examples
from bert_dp.model.bert import initialize
from bert_dp.model.classifier import Classifier, pair_types
from bert_dp.model.kernels import widened
from bert_dp.tasks import LENGTH_MULTIPLE, Context, DatasetInfo, write_or_warn


@dataclass(frozen=True)
class LabelledBatch(TensorBatch):
    """Micro batch of examples. `real_BS` is False at padding, and None if no example is padded."""

    ids_BS: Tensor
    real_BS: Tensor | None
    labels: Tensor | None
    """Classes [B] (int64), scores [B] (float32) or independent labels [B, L]; None = no labels."""
    seed_B: Tensor
    types_BS: Tensor | None
    """Token types; None for a model without token types."""
    logits_BL: Tensor | None = None
    """Teacher's logits in distillation."""

    @property
    def types(self) -> dict[str, Tensor]:
        """Return the keyword arguments for token types, empty for a model without token types."""
        return {} if self.types_BS is None else {"types_BS": self.types_BS}


class Finetuning:
    """Finetuning task; see `bert_dp.tasks.Task`."""

    def __init__(self, config: Config, device: torch.device):
        self._config, self._pin = config, device.type == "cuda"
        self._kind, self._has_types = config.finetune.kind, config.model.takes_types
        self._targets_of_example = config.finetune.num_outputs if self._kind == "multi_label" else 1
        self.flops_per_token = cost.flops_per_token(config.model, config.data.sequence_length, 0.0)

    def open_data(self) -> DatasetInfo:
        """Open the prepared directory. Raise ConfigError if it is damaged or does not fit the settings."""
        path = Path(self._config.data.path or "")
        manifest = read_examples(path)
        if issues := manifest.issues(self._config):
            raise ConfigError(issues)
        self._manifest = manifest
        self._splits = {name: Examples.open(path, manifest, name) for name in manifest.splits}
        self._train = self._splits.pop("train")
        return DatasetInfo(
            data_hash=manifest.hash,
            tokenizer=manifest.tokenizer.sha256,
            num_samples=len(self._train),
            num_evaluated=sum(map(len, self._splits.values())),
            tokenizer_file=path / manifest.tokenizer.file,
            tokens_per_sample=manifest.splits["train"].tokens / len(self._train),
        )

    def build_model(self, seed: int) -> Classifier:
        config = self._config
        return initialize(Classifier(config.model, config.data.sequence_length, config.finetune), seed)

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> TrainingStream[LabelledBatch]:
        return TrainingStream(
            self._training_batch,
            micro_size=self._config.batch.micro_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            start_sample=start_sample,
            workers=self._config.data.workers,
            pin=self._pin,
        )

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Tensor:
        assert batch.labels is not None
        logits = widened(model(batch.ids_BS, batch.real_BS, batch.seed_B, **batch.types))
        return self._loss(logits, batch.labels)

    def num_targets(self, first_sample: int, count: int) -> int:
        """Count one target per example, or one per label if the labels are independent."""
        return count * self._targets_of_example

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, Any] | None:
        """Write predictions for all splits except the train split, and compute scores for those with labels.
        Every example counts once. `HeldOut.loss` is the mean over the dev examples (MNLI has two dev splits).
        A split gets no scores if any of its logits is not finite."""
        logits: dict[str, NDArray[np.float64]] = {}
        for name, examples in self._splits.items():
            logits_NL = self._logits(model, examples, context)
            if logits_NL is None:
                return None
            logits[name] = logits_NL
        first = context.comm.world.rank == 0  # only rank 0 imports the scoring packages
        measured: dict[str, Any] | None = context.comm.broadcast(self._measure(logits) if first else None)
        if context.run_dir is not None:
            lines = (_prediction_lines(name, logits[name], each) for name, each in self._splits.items())
            text = "".join(itertools.chain.from_iterable(lines))
            write_or_warn(context.run_dir / files.PREDICTIONS, text)
        return measured

    def _measure(self, logits: Mapping[str, NDArray[np.float64]]) -> dict[str, Any] | None:
        """Compute the result of `evaluate` from each split's logits; None if no dev split has labels."""
        scores: dict[str, float] = {}
        one_class: list[str] = []
        total, count = 0.0, 0
        for name, logits_NL in logits.items():
            examples = self._splits[name]
            if examples.labels is None:
                continue
            labels = torch.from_numpy(np.asarray(examples.labels))
            if name.startswith("dev"):
                total += float(self._loss(torch.from_numpy(logits_NL), labels)) / self._targets_of_example
                count += len(examples)
            if np.isfinite(logits_NL).all():
                measured = score(self._manifest.metrics, self._kind, logits_NL, examples.labels)
                scores |= {f"{name}/{metric}": value for metric, value in measured.items()}
                if self._kind == "single_label" and len(set(logits_NL.argmax(axis=1).tolist())) == 1:
                    one_class.append(name)
        if not count:
            return None
        result: dict[str, Any] = {
            "loss": total / count,
            "loss_unit": self._config.loss_unit,
            "examples": count,
            "scores": scores,
            "baseline": {
                f"{name}/{metric}": value
                for name, split in self._manifest.splits.items()
                for metric, value in (split.baseline or {}).items()
            },
        }
        if one_class:
            result["one_class"] = one_class
        if self._kind != "regression":
            binary = self._config.finetune.num_outputs == 2
            result["f1_average"] = "micro" if self._kind == "multi_label" else "binary" if binary else "macro"
        return result

    def example_batch(self, micro_size: int) -> LabelledBatch:
        """Return a micro batch of random tokens. Every example ends with padding, so that there is a mask."""
        config, outputs = self._config, self._config.finetune.num_outputs
        g = torch.Generator().manual_seed(config.run.seed)
        length = config.data.sequence_length
        ids_BS = torch.randint(config.model.vocab_size, (micro_size, length), generator=g)
        real_BS = torch.ones(micro_size, length, dtype=torch.bool)
        real_BS[:, -1] = False
        index = np.arange(micro_size)
        labels = {
            "single_label": torch.randint(outputs, (micro_size,), generator=g),
            "multi_label": torch.zeros(micro_size, outputs),
            "regression": torch.zeros(micro_size),
        }[self._kind]
        types_BS = torch.zeros_like(ids_BS) if self._has_types else None
        return LabelledBatch(index, ids_BS, real_BS, labels, key32(hash64(0, index)), types_BS)

    def _loss(self, logits_BL: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss over the targets."""
        if self._kind == "single_label":
            return F.cross_entropy(logits_BL, labels, reduction="sum")
        labels = labels.to(logits_BL.dtype)
        if self._kind == "multi_label":
            return F.binary_cross_entropy_with_logits(logits_BL, labels, reduction="sum")
        return F.mse_loss(logits_BL[:, 0], labels, reduction="sum")

    def _training_batch(self, sample_ids: NDArray[np.int64]) -> LabelledBatch:
        """Return the micro batch at `sample_ids` in the training stream. A global batch is a random set of
        examples, sorted by length to reduce padding."""
        size, seed, n = self._config.batch.global_size, self._config.run.seed, len(self._train)
        first = int(sample_ids[0]) // size * size
        epoch, within = np.divmod(np.arange(first, first + size), n)
        index = permute(within, n, hash64(seed, 1, epoch))
        order = np.argsort(self._train.lengths[index], kind="stable")
        chosen = order[sample_ids - first]
        index_B, epoch_B = index[chosen], epoch[chosen]
        seed_B = key32(hash64(seed, 4, epoch_B, index_B))
        return self._batch(self._train, index_B, first + chosen, seed_B)

    def _batch(
        self, examples: Examples, index_B: NDArray[np.int64], sample_ids: NDArray[np.int64], seed_B: Tensor
    ) -> LabelledBatch:
        """Return a batch, padded to its longest example and then to a multiple of LENGTH_MULTIPLE."""
        special, length_B = self._manifest.special_tokens, examples.lengths[index_B]
        longest = -(-int(length_B.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        length = min(longest, self._config.data.sequence_length)
        padded_BS = np.full((len(index_B), length), special.pad, np.int64)
        for row, i in enumerate(index_B):
            padded_BS[row, : length_B[row]] = examples.tokens(i)
        ids_BS = torch.from_numpy(padded_BS)
        real_BS = torch.from_numpy(np.arange(length) < length_B[:, None])
        labels = None if examples.labels is None else torch.from_numpy(np.asarray(examples.labels)[index_B])
        types_BS = pair_types(ids_BS, special.sep) if self._has_types else None
        real = None if real_BS.all() else real_BS
        return LabelledBatch(sample_ids, ids_BS, real, labels, seed_B, types_BS)

    def _evaluation_batches(self, examples: Examples, context: Context) -> Iterator[LabelledBatch]:
        """Sort the examples by length and yield this replica's batches. Copies of the longest example fill up
        the last batches, because some engines require the same number of batches on all replicas."""
        micro = self._config.batch.micro_size
        order = np.argsort(examples.lengths, kind="stable")
        rounds = -(-len(order) // (micro * context.dp_size))
        padded = np.pad(order, (0, rounds * micro * context.dp_size - len(order)), mode="edge")
        for start in range(context.dp_rank * micro, len(padded), context.dp_size * micro):
            index_B = padded[start : start + micro]
            yield self._batch(examples, index_B, index_B, key32(hash64(0, index_B)))

    def _logits(self, model: nn.Module, examples: Examples, context: Context) -> NDArray[np.float64] | None:
        """Return the logits [N, L] in the order of the examples, on every rank; None if `context.stopped`
        returned True. If several replicas compute an example, its logits are averaged. Collective."""
        own_NL = np.zeros((len(examples), self._config.finetune.num_outputs))
        seen_N1 = np.zeros((len(examples), 1))
        with torch.no_grad(), context.precision.context(context.device):
            for batch in self._evaluation_batches(examples, context):
                if context.stopped():
                    return None
                on_device = batch.to(context.device)
                logits_BL = widened(model(on_device.ids_BS, on_device.real_BS, **on_device.types))
                own_NL[batch.sample_ids] = logits_BL.double().cpu().numpy()
                seen_N1[batch.sample_ids] = 1
                context.progress()
        gathered = context.sum_over_replicas([*own_NL.ravel().tolist(), *seen_N1.ravel().tolist()])
        sum_NL, count_N1 = np.split(np.array(gathered), [own_NL.size])
        return sum_NL.reshape(own_NL.shape) / count_N1[:, None]


def _prediction_lines(split: str, logits_NL: NDArray[np.float64], examples: Examples) -> Iterator[str]:
    labels = None if examples.labels is None else np.asarray(examples.labels).tolist()
    for i, logits in enumerate(logits_NL.tolist()):
        label = None if labels is None else labels[i]
        finite = [x if np.isfinite(x) else None for x in logits]
        yield json.dumps({"split": split, "index": i, "label": label, "logits": finite}) + "\n"


make_task = Finetuning
