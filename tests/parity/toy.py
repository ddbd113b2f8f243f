"""A minimal task: a perceptron whose samples have one to three targets, so that micro batches differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import Config
from bert_dp.data.stream import hash64
from bert_dp.model.interface import Model
from bert_dp.tasks import Context, DatasetInfo

WORDS, WIDTH, MOST = 32, 8, 3
NUM_SAMPLES, HELD_OUT = 60, 14


def targets_of(sample_ids: Any) -> Any:
    return 1 + sample_ids % MOST


@dataclass(frozen=True)
class ToyBatch:
    words_B: Tensor
    labels_BT: Tensor  # -100 = no target
    sample_ids: Any

    def to(self, device: torch.device) -> ToyBatch:
        return ToyBatch(self.words_B.to(device), self.labels_BT.to(device), self.sample_ids)

    def pin(self) -> ToyBatch:
        return self


class ToyModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, MOST * WORDS)

    def forward(self, words_B: Tensor, labels_BT: Tensor) -> Tensor:
        x_BH = self.words(words_B)
        for layer in self.layers:
            x_BH = x_BH + F.gelu(layer(x_BH))
        logits = self.out(x_BH).view(-1, WORDS)
        return F.cross_entropy(logits, labels_BT.flatten(), reduction="sum")

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class ToyStream:
    wait_s = 0.0

    def __init__(self, start: int, micro_size: int, stride: int):
        self._start, self._micro_size, self._stride = start, micro_size, stride

    def next(self) -> ToyBatch:
        ids = np.arange(self._start, self._start + self._micro_size)
        self._start += self._stride
        return make_batch(ids)

    def close(self) -> None:
        pass


def make_batch(ids: Any, epoch_size: int = NUM_SAMPLES) -> ToyBatch:
    draws_BT = hash64(7, ids[:, None] % epoch_size, np.arange(MOST + 1)[None]) % np.uint64(WORDS)
    draws_BT = draws_BT.astype(np.int64)
    labels_BT = np.where(np.arange(MOST)[None] < targets_of(ids)[:, None], draws_BT[:, 1:], -100)
    return ToyBatch(torch.from_numpy(draws_BT[:, 0]), torch.from_numpy(labels_BT), ids)


class ToyTask:
    """Task of `ToyModel`; see `bert_dp.tasks.Task`."""

    flops_per_token = 1.0

    def __init__(self, config: Config, device: torch.device):
        self._micro_size = config.batch.micro_size

    def open_data(self) -> DatasetInfo:
        return DatasetInfo(data_hash="0" * 64, tokenizer=None, num_samples=NUM_SAMPLES)

    def build_model(self, seed: int) -> ToyModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return ToyModel()

    def stream(self, *, dp_rank: int, dp_size: int, start_sample: int) -> ToyStream:
        size = self._micro_size
        return ToyStream(start_sample + dp_rank * size, size, dp_size * size)

    def loss(self, model: nn.Module, batch: ToyBatch) -> Tensor:
        return model(batch.words_B, batch.labels_BT)

    def num_targets(self, first_sample: int, count: int) -> int:
        return int(targets_of(np.arange(first_sample, first_sample + count)).sum())

    def evaluate(self, model: nn.Module, context: Context) -> dict[str, float] | None:
        total, count = 0.0, 0
        for number in range(0, HELD_OUT, context.dp_size):  # all replicas take equally many samples
            if context.stopped():
                return None
            ids = np.arange(number + context.dp_rank, number + context.dp_rank + 1)
            with torch.no_grad():
                loss = float(self.loss(model, make_batch(1000 + ids, 10_000)))
            if ids[0] < HELD_OUT:
                total, count = total + loss, count + int(targets_of(1000 + ids)[0])
            context.progress()
        total, count = context.sum_over_replicas([total, count])
        return {"loss": total / count, "targets": int(count)}

    def example_batch(self, micro_size: int) -> ToyBatch:
        return make_batch(np.full(micro_size, MOST - 1))
