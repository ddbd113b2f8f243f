"""Train a student to match a teacher's logits on the examples of a prepared directory. Axes: as in
bert_dp.tasks.finetune, plus V (vocabulary size) and E (embedding size)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import refusing
from bert_dp.data import readers
from bert_dp.examples.table import Examples, answers, read_logits
from bert_dp.model.bilstm import BiLstm, build_bilstm
from bert_dp.model.classifier import Classifier
from bert_dp.model.kernels import widened
from bert_dp.tasks import DatasetInfo
from bert_dp.tasks.finetune import Finetuning, LabelledBatch
from bert_dp.training import checkpoint

EMBEDDINGS = ("model.embeddings.tok_embeddings.weight", "embedding.weight")  # in a transformer; in a BiLSTM


class Distillation(Finetuning):
    """Distillation task, evaluated like finetuning; see `bert_dp.tasks.Task`."""

    def open_data(self) -> DatasetInfo:
        """Open the prepared directory and the teacher's logits. Raise ConfigError if they do not match."""
        info = super().open_data()
        outputs = self._config.finetune.num_outputs
        self._logits_NL = read_logits(Path(self._config.distill.logits or ""), len(self._train), outputs)
        labels = np.array(self._train.labels)
        if copies := self._manifest.splits["train"].copies:
            labels[-copies:] = answers(self._logits_NL[-copies:], self._kind)
        self._train = Examples(self._train.ids, self._train.offsets, labels)
        self._tokenizer_file = info.tokenizer_file
        return info

    def build_model(self, seed: int) -> Classifier | BiLstm:  # type: ignore[override]
        config = self._config
        if not config.model.lstm_size:
            return super().build_model(seed)
        model = build_bilstm(config.model, config.finetune, seed)
        if config.distill.embeddings is not None:
            path, tokenizer = Path(config.distill.embeddings), Tokenizer.from_file(str(self._tokenizer_file))
            load_embeddings(path, tokenizer, model.embedding.weight)
        return model

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Tensor:
        assert batch.labels is not None
        assert batch.logits_BL is not None
        student_BL = widened(model(batch.ids_BS, batch.real_BS, batch.seed_B, **batch.types))
        teacher_BL = batch.logits_BL.to(student_BL.dtype)
        distill = self._config.distill
        if distill.loss == "mse":
            loss = (student_BL - teacher_BL).square().mean(1).sum()
        else:
            log_student_BL = (student_BL / distill.temperature).log_softmax(-1)
            log_teacher_BL = (teacher_BL / distill.temperature).log_softmax(-1)
            divergence = F.kl_div(log_student_BL, log_teacher_BL, reduction="sum", log_target=True)
            loss = distill.temperature**2 * divergence
        if not distill.alpha:
            return loss
        label_loss = self._loss(student_BL, batch.labels) / self._targets_of_example
        return torch.lerp(loss, label_loss, distill.alpha)

    def num_targets(self, first_sample: int, count: int) -> int:
        """Count one target per example."""
        return count

    def example_batch(self, micro_size: int) -> LabelledBatch:
        logits_BL = torch.zeros(micro_size, self._config.finetune.num_outputs)
        return replace(super().example_batch(micro_size), logits_BL=logits_BL)

    def _batch(self, examples: Examples, index_B: NDArray[np.int64], *more: Any) -> LabelledBatch:
        batch = super()._batch(examples, index_B, *more)
        if examples is not self._train:
            return batch
        return replace(batch, logits_BL=torch.from_numpy(self._logits_NL[index_B]))


def load_embeddings(path: Path, tokenizer: Tokenizer, weight_VE: Tensor) -> None:
    """Copy the vectors in `path`, a run or a text file, to the rows of their tokens in `weight_VE`. Raise
    ConfigError if `path` cannot be read, if a copied vector's width is wrong, or if no token has a vector."""
    setting, width = "distill.embeddings", weight_VE.shape[1]
    rows: dict[int, Tensor] = {}
    if path.is_dir():
        tensors = load_file(checkpoint.resolve(str(path)) / "model.safetensors")
        (table_VE,) = (tensors[name] for name in EMBEDDINGS if name in tensors)
        rows = dict(enumerate(table_VE[: len(weight_VE)]))
    else:
        vocabulary = {token.removeprefix("Ġ"): i for token, i in tokenizer.get_vocab().items()}
        with refusing(setting, str(path)):
            for _, line in readers.lines(path):
                token, *numbers = line.split()
                if (i := vocabulary.get(token)) is not None and i < len(weight_VE):
                    rows[i] = torch.tensor([float(number) for number in numbers])
    widths = {len(row) for row in rows.values()}
    if widths != {width}:
        message, hint = f"{path} has no vector for any token of the vocabulary", "choose other embeddings"
        if widths:
            message = f"{path} has vectors of size {', '.join(map(str, sorted(widths)))}, not {width}"
            hint = "change model.hidden_size"
        raise ConfigError([Issue(setting, "conflict", message, str(path), "model.hidden_size", hint)])
    with torch.no_grad():
        for i, row in rows.items():
            weight_VE[i] = row


make_task = Distillation
