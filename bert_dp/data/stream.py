"""Make micro batches from shards. Order and masks are pure functions of (seed, epoch, index in the epoch).

Axes: B sequences of a micro batch, S positions, K predicted positions per sequence, P = B * K. A *sample* is
a position in the endless training stream. In a corpus of n sequences, sample s belongs to epoch
s // n. It is sequence s % n or, with data.shuffle, the sequence to which a permutation maps s % n. Batches do
not depend on the number of ranks or threads.
"""

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_dp.data.shards import MaskVocabulary, Shards
from bert_dp.model.bert import IGNORE

U64 = np.uint64
GOLDEN = U64(0x9E3779B97F4A7C15)
FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class TensorBatch:
    """Micro batch. `sample_ids`: positions in the training stream; in evaluation, indices in the split."""

    sample_ids: NDArray[np.int64]

    def to(self, device: torch.device) -> Self:
        return self if device.type == "cpu" else self._map(lambda t: t.to(device, non_blocking=True))

    def pin(self) -> Self:
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to every tensor."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)


@dataclass(frozen=True)
class MlmBatch(TensorBatch):
    """Masked micro batch. `positions_P`: predicted positions, flat (b * S + s). `seed_B`: dropout keys."""

    ids_BS: Tensor
    positions_P: Tensor
    labels_P: Tensor
    seed_B: Tensor
    num_masked: int


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finalizer, a 64-bit bijection (Steele et al. 2014, doi 10.1145/2714064.2660195)."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def hash64(*parts: Any) -> NDArray[np.uint64]:
    """Broadcast integers or integer arrays, and hash them jointly to 64 bits. The result is at least 1-D."""
    state = np.zeros(1, U64)
    for part in parts:
        state = mix64((state ^ np.atleast_1d(part).astype(U64)) + GOLDEN)
    return state


def permute(index: NDArray[np.int64], size: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Apply a keyed permutation of range(size) in O(1) memory: a balanced Feistel network with cycle walking
    (Black & Rogaway 2002, doi 10.1007/3-540-45760-7_9). Takes index [B] and key [1] or [B]; returns [B]."""
    half = U64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (U64(1) << half) - U64(1)
    keys = np.broadcast_to(key, index.shape)

    def network(x: NDArray[np.uint64], k: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & low
        for r in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (hash64(k, r, right) & low)
        return (left << half) | right

    out = network(index.astype(U64), keys)
    while (outside := np.flatnonzero(out >= U64(size))).size:
        out[outside] = network(out[outside], keys[outside])
    return out.astype(np.int64)


def mask(
    rows_BS: NDArray[np.uint16], seed_B: NDArray[np.uint64], num_masked: int, vocabulary: MaskVocabulary
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Choose exactly `num_masked` = K positions per row, and corrupt them 80/10/10 with deterministic counts.

    Of the K positions, K / 10 (halves round up) get a random ordinary token, as many keep theirs, and the
    rest get <mask>. For K = 32 the counts are 3, 3 and 26, as in the cramming recipe. For K = 16 they are 2,
    2 and 12, that is, 12.5, 12.5 and 75 %. Returns ids [B, S], flat positions [B * K], labels [B * K].
    """
    batch, length = rows_BS.shape
    columns = np.arange(1, length + 1, dtype=U64)
    random_BS = mix64((seed_B[:, None] + columns * GOLDEN).astype(U64))
    chosen_BK = np.argsort(random_BS, axis=1, kind="stable")[:, :num_masked]
    ids_BS = rows_BS.astype(np.int64)
    rows = np.arange(batch)[:, None]
    labels_BK = ids_BS[rows, chosen_BK]
    tenth = int(num_masked / 10 + 0.5)
    masked, randomised = chosen_BK[:, 2 * tenth :], chosen_BK[:, :tenth]
    ids_BS[rows, masked] = vocabulary.mask_id
    draw = mix64(random_BS[rows, randomised] + GOLDEN) % U64(vocabulary.size - vocabulary.num_special)
    ids_BS[rows, randomised] = draw.astype(np.int64) + vocabulary.num_special
    return ids_BS, (chosen_BK + rows * length).reshape(-1), labels_BK.reshape(-1)


def training_batch(
    shards: Shards, sample_ids: NDArray[np.int64], *, seed: int, num_masked: int, shuffle: bool
) -> MlmBatch:
    """Make the micro batch for the given stream positions."""
    epoch_B, within_B = np.divmod(sample_ids, len(shards))
    index_B = permute(within_B, len(shards), hash64(seed, 1, epoch_B)) if shuffle else within_B
    seed_B = hash64(seed, 2, epoch_B, index_B)
    arrays = mask(shards.rows(index_B), seed_B, num_masked, shards.vocabulary)
    ids, positions, labels = (torch.from_numpy(a) for a in arrays)
    dropout_key_B = key32(hash64(seed, 4, epoch_B, index_B))
    return MlmBatch(sample_ids, ids, positions, labels, dropout_key_B, len(labels))


def key32(seed_B: NDArray[np.uint64]) -> Tensor:
    """Convert seeds to the int32 dropout keys [B] that bert_dp.model.kernels uses."""
    return torch.from_numpy((seed_B >> U64(32)).astype(np.uint32).view(np.int32))


def held_out_batches(
    shards: Shards, *, micro_size: int, num_masked: int, max_sequences: int, dp_rank: int, dp_size: int
) -> list[MlmBatch]:
    """Return this replica's batches of held-out sequences, with fixed masks. Batches are assigned to replicas
    round-robin. Rows whose labels are all IGNORE pad the last batches, because engines that communicate in
    the forward pass need equally many batches on every replica, all of the same shape."""
    total = min(len(shards), max_sequences)
    batches = []
    rounds = -(-total // (micro_size * dp_size))
    for start in range(dp_rank * micro_size, rounds * dp_size * micro_size, dp_size * micro_size):
        index_B = np.arange(start, start + micro_size)
        real_B = index_B < total
        index_B = np.where(real_B, index_B, 0)
        arrays = mask(shards.rows(index_B), hash64(0, 3, index_B), num_masked, shards.vocabulary)
        arrays[-1][~np.repeat(real_B, num_masked)] = IGNORE  # arrays[-1]: the labels
        count = int(real_B.sum()) * num_masked
        ids, positions, labels = map(torch.from_numpy, arrays)
        seed_B = key32(hash64(0, 4, index_B))
        batches.append(MlmBatch(index_B, ids, positions, labels, seed_B, count))
    return batches


def random_batch(
    seed: int, micro_size: int, sequence_length: int, num_masked: int, vocab_size: int
) -> MlmBatch:
    """Return a micro batch with uniformly random tokens, labels and predicted positions."""
    g = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocab_size, (micro_size, sequence_length), generator=g)
    within = [torch.randperm(sequence_length, generator=g)[:num_masked].sort()[0] for _ in range(micro_size)]
    positions_P = torch.cat([row * sequence_length + chosen for row, chosen in enumerate(within)])
    labels_P = torch.randint(vocab_size, (len(positions_P),), generator=g)
    sample_ids = np.arange(micro_size)
    seed_B = key32(hash64(seed, 4, sample_ids))
    return MlmBatch(sample_ids, ids_BS, positions_P, labels_P, seed_B, len(positions_P))


AnyBatch = TypeVar("AnyBatch", bound=TensorBatch)


class TrainingStream(Generic[AnyBatch]):
    """Stream of one replica's micro batches, in order, prefetched by `workers` threads. `make` builds a
    micro batch from the stream positions of its samples.

    From `start_sample` on, micro batches of `micro_size` samples are assigned to the replicas round-robin.
    Therefore, a replica's stream depends neither on gradient accumulation nor on the batch ramp.
    """

    def __init__(
        self,
        make: Callable[[NDArray[np.int64]], AnyBatch],
        *,
        micro_size: int,
        dp_rank: int,
        dp_size: int,
        start_sample: int,
        workers: int,
        pin: bool,
    ):
        self._make = make
        self._pin = pin
        self._micro_size = micro_size
        self._next_start = start_sample + dp_rank * micro_size
        self._stride = dp_size * micro_size
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch") if workers else None
        self._queue: collections.deque[Future[AnyBatch]] = collections.deque()
        self._depth = 2 * workers
        self.wait_s = 0.0
        """Total seconds spent in `next`."""

    def next(self) -> AnyBatch:
        """Wait until this replica's next micro batch is built, and return it in host memory."""
        start = time.perf_counter()
        if self._pool is None:
            batch = self._build(self._advance())
        else:
            while len(self._queue) <= self._depth:
                self._queue.append(self._pool.submit(self._build, self._advance()))
            batch = self._queue.popleft().result()
        self.wait_s += time.perf_counter() - start
        return batch

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _advance(self) -> NDArray[np.int64]:
        ids = np.arange(self._next_start, self._next_start + self._micro_size)
        self._next_start += self._stride
        return ids

    def _build(self, sample_ids: NDArray[np.int64]) -> AnyBatch:
        batch = self._make(sample_ids)
        return batch.pin() if self._pin else batch
