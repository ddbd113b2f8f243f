"""Test data order and masks: a permutation, exact counts, and equal samples for any ranks and threads."""

import functools
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bert_dp.config import ConfigError, read_manifest
from bert_dp.data.stream import (
    MaskVocabulary,
    MlmBatch,
    Shards,
    TrainingStream,
    hash64,
    held_out_batches,
    mask,
    permute,
    random_batch,
    training_batch,
)
from bert_dp.model.bert import IGNORE
from tests.shards import SPECIAL, write_shards

VOCABULARY = MaskVocabulary(size=64, num_special=7, mask_id=SPECIAL["mask"])
LENGTH = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), length=LENGTH, train=50, held_out=21)


@pytest.fixture(scope="module")
def shards(directory: Path) -> Shards:
    return open_shards(directory, "train")


def open_shards(directory: Path, split: str) -> Shards:
    return Shards(directory, read_manifest(directory), split)


def stream(
    shards: Shards, *, seed: int = 3, shuffle: bool = True, **changed: Any
) -> TrainingStream[MlmBatch]:
    make = functools.partial(training_batch, shards, seed=seed, num_masked=4, shuffle=shuffle)
    arguments: dict[str, Any] = {"micro_size": 4, "start_sample": 0, "workers": 0, "pin": False}
    return TrainingStream(make, **{"dp_rank": 0, "dp_size": 1, **arguments, **changed})


def rows_of(batch: MlmBatch) -> list[tuple[int, bytes]]:
    """Return (sample, content) of each row of a batch, independent of the row's micro batch."""
    size, length = batch.ids_BS.shape
    positions = batch.positions_P.reshape(size, -1) - torch.arange(size)[:, None] * length
    labels = batch.labels_P.reshape(size, -1)
    return [
        (int(s), b"|".join(t[i].numpy().tobytes() for t in (batch.ids_BS, positions, labels, batch.seed_B)))
        for i, s in enumerate(batch.sample_ids)
    ]


def same(a: MlmBatch, b: MlmBatch) -> bool:
    return rows_of(a) == rows_of(b) and a.num_masked == b.num_masked


# --- permutation


def whole(size: int, *key: int) -> NDArray[np.int64]:
    return permute(np.arange(size), size, hash64(*key))


@pytest.mark.parametrize("power", [1, 2, 4, 8, 10])
@given(size=st.integers(1, 5000), key=st.integers(0, 2**63 - 1))
@settings(max_examples=12)
def test_permute_is_a_bijection(power: int, size: int, key: int) -> None:
    """The sizes are arbitrary ones and those next to powers of two."""
    for number in (size, 2**power - 1, 2**power, 2**power + 1):
        out = whole(number, key)
        assert out.dtype == np.int64
        assert np.array_equal(np.sort(out), np.arange(number))


def test_permute_supports_sizes_beyond_32_bits_and_depends_on_its_key() -> None:
    size = 2**40 + 3
    out = permute(np.array([0, 1, 2**33, size - 1]), size, hash64(1))
    assert len(set(out.tolist())) == 4
    assert ((out >= 0) & (out < size)).all()
    orders = {whole(100, seed, 1, epoch).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


# --- masks


def random_rows(count: int, length: int, seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(7, 64, (count, length)).astype(np.uint16)


@pytest.mark.parametrize(
    ("num_masked", "masked", "random", "kept"),
    [(32, 26, 3, 3), (19, 15, 2, 2), (10, 8, 1, 1), (4, 4, 0, 0), (5, 3, 1, 1), (128, 102, 13, 13)],
)
def test_mask_counts_are_exact(num_masked: int, masked: int, random: int, kept: int) -> None:
    rows = random_rows(40, 128)
    ids, positions, _ = mask(rows, hash64(np.arange(40)), num_masked, VOCABULARY)
    assert (positions.reshape(40, num_masked) // 128 == np.arange(40)[:, None]).all()
    now = ids.reshape(-1)[positions].reshape(40, num_masked)
    original = rows.reshape(-1)[positions].reshape(40, num_masked)
    assert ((now == VOCABULARY.mask_id).sum(1) == masked).all()
    assert ((now == original).sum(1) >= kept).all()
    changed = ((now != VOCABULARY.mask_id) & (now != original)).sum()
    assert random * 40 * 0.7 <= changed <= random * 40  # a random token equals the original in 1 of 57 cases


@given(batch=st.integers(1, 5), length=st.integers(8, 40), data=st.data())
@settings(max_examples=50)
def test_mask_changes_only_its_positions_and_labels_are_the_original_tokens(
    batch: int, length: int, data: st.DataObject
) -> None:
    num_masked = data.draw(st.integers(1, length))
    rows = random_rows(batch, length, data.draw(st.integers(0, 999)))
    before = rows.copy()
    ids, positions, labels = mask(rows, hash64(np.arange(batch), 9), num_masked, VOCABULARY)
    assert np.array_equal(rows, before)  # the memory map is never written
    assert (ids.dtype, positions.dtype, labels.dtype) == (np.int64, np.int64, np.int64)
    assert len(positions) == len(set(positions.tolist())) == batch * num_masked
    untouched = np.ones(batch * length, bool)
    untouched[positions] = False
    assert np.array_equal(ids.reshape(-1)[untouched], before.reshape(-1)[untouched])
    assert np.array_equal(labels, before.reshape(-1)[positions])


# --- batches


def batch_of(shards: Shards, start: int, stop: int, *, seed: int = 3, shuffle: bool = True) -> MlmBatch:
    return training_batch(shards, np.arange(start, stop), seed=seed, num_masked=4, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("start", [0, 42, 50, 95])
def test_a_batch_does_not_depend_on_its_micro_batches(shards: Shards, start: int, shuffle: bool) -> None:
    """The starts 42 and 95 put the end of an epoch (50 sequences) inside the batch."""
    one = batch_of(shards, start, start + 16, shuffle=shuffle)
    two = [batch_of(shards, start + i, start + i + 8, shuffle=shuffle) for i in (0, 8)]
    assert rows_of(one) == rows_of(two[0]) + rows_of(two[1])
    assert one.num_masked == two[0].num_masked + two[1].num_masked == 64
    assert one.ids_BS.shape == (16, LENGTH)
    assert one.positions_P.shape == one.labels_P.shape == (64,)


def unmasked(batch: MlmBatch) -> NDArray[np.int64]:
    ids = batch.ids_BS.clone().reshape(-1)
    ids[batch.positions_P] = batch.labels_P
    return ids.reshape(batch.ids_BS.shape).numpy()


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_visits_every_sequence_once_with_new_masks(shards: Shards, shuffle: bool) -> None:
    """The order differs between epochs; without shuffle, it is the order of the shards."""
    everything = shards.rows(np.arange(50)).astype(np.int64)
    first, second = (batch_of(shards, 50 * e, 50 * (e + 1), shuffle=shuffle) for e in range(2))
    for batch in (first, second):
        assert sorted(map(bytes, unmasked(batch))) == sorted(map(bytes, everything))
        assert np.array_equal(unmasked(batch), everything) != shuffle
    assert np.array_equal(unmasked(first), unmasked(second)) != shuffle
    assert not torch.equal(first.positions_P, second.positions_P)


def test_dropout_seeds_differ_by_sequence_epoch_and_run_seed(shards: Shards) -> None:
    drawn = [
        batch_of(shards, 0, 150, seed=s, shuffle=shuffle).seed_B for s in (3, 4) for shuffle in (True, False)
    ]
    for keys, same in zip(drawn[::2], drawn[1::2], strict=True):
        assert len(keys.unique()) == 150
        # the seed depends on the sequence, not on its position
        assert sorted(keys.tolist()) == sorted(same.tolist())
    assert not set(drawn[0].tolist()) & set(drawn[2].tolist())


def test_several_shard_files_read_as_their_concatenation(tmp_path: Path, directory: Path) -> None:
    tokens = np.fromfile(directory / "train-00000.bin", "<u2").reshape(50, LENGTH)
    write_shards(tmp_path, length=LENGTH, train=50, held_out=21, files=(7, 1, 42))
    split, one = open_shards(tmp_path, "train"), open_shards(directory, "train")
    assert len(split) == len(one) == 50
    for index in (np.arange(50), np.array([49, 0, 7, 6, 8, 8]), np.array([], np.int64)):
        assert np.array_equal(split.rows(index), tokens[index])
        assert np.array_equal(one.rows(index), tokens[index])
        assert one.rows(index).dtype == np.uint16
    assert same(batch_of(split, 0, 60), batch_of(one, 0, 60))


# --- streams


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetch_threads_change_no_batch_and_end_on_close(shards: Shards, workers: int) -> None:
    before = set(threading.enumerate())
    plain, threaded, unused = stream(shards), stream(shards, workers=workers), stream(shards, workers=2)
    try:
        for _ in range(30):  # more than two epochs
            assert same(plain.next(), threaded.next())
        assert any(t.name.startswith("prefetch") for t in set(threading.enumerate()) - before)
    finally:
        for each in (plain, threaded, unused):
            each.close()
    assert set(threading.enumerate()) <= before


@given(dp_size=st.integers(1, 4), micro_size=st.integers(1, 5), start=st.integers(0, 120))
@settings(max_examples=25)
def test_replicas_together_read_the_samples_in_order_from_any_start(
    shards: Shards, dp_size: int, micro_size: int, start: int
) -> None:
    """Micro batches go round-robin to replicas, so that every optimizer step has consecutive samples."""
    sizes = {"micro_size": micro_size, "dp_size": dp_size, "start_sample": start}
    replicas = [stream(shards, dp_rank=rank, **sizes) for rank in range(dp_size)]
    for index in range(12 * dp_size):
        first = start + index * micro_size
        assert same(replicas[index % dp_size].next(), batch_of(shards, first, first + micro_size))


def test_an_error_in_a_prefetch_thread_reaches_the_loop(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Shards, index_B: NDArray[np.int64]) -> NDArray[np.uint16]:
        raise OSError("gone")

    broken = stream(shards, workers=1)
    monkeypatch.setattr(Shards, "rows", fail)
    try:
        with pytest.raises(OSError, match="gone"):
            broken.next()
    finally:
        broken.close()


# --- held-out loss


def held_out(shards: Shards, dp_size: int, micro_size: int, max_sequences: int) -> list[list[MlmBatch]]:
    """Return the held-out batches of each replica."""
    sizes = {"micro_size": micro_size, "num_masked": 3, "max_sequences": max_sequences, "dp_size": dp_size}
    return [held_out_batches(shards, dp_rank=rank, **sizes) for rank in range(dp_size)]


def real_rows(batch: MlmBatch) -> list[tuple[int, bytes]]:
    labels = batch.labels_P.reshape(len(batch.ids_BS), -1)
    ignored = labels == IGNORE
    assert torch.equal(ignored.any(1), ignored.all(1))  # a row is either counted or ignored as a whole
    rows = rows_of(batch)
    index = torch.nonzero(~ignored.any(1)).flatten().tolist()
    size = len(batch.ids_BS)
    assert batch.num_masked == len(index) * batch.labels_P.numel() // size
    return [rows[i] for i in index]


@pytest.mark.parametrize("max_sequences", [1000, 13, 1])
def test_every_held_out_row_counts_once_with_equal_masks_for_any_batch_and_replicas(
    directory: Path, max_sequences: int
) -> None:
    shards = open_shards(directory, "held_out")
    total = min(21, max_sequences)
    (single,) = held_out(shards, 1, 21, max_sequences)
    expected = real_rows(single[0])
    assert [sample for sample, _ in expected] == list(range(total))
    assert np.array_equal(unmasked(single[0])[:total], shards.rows(np.arange(total)))
    for micro_size, dp_size in itertools.product((1, 4, 5, 21, 32), (1, 2, 3, 4, 7)):
        batches = [b for rank in held_out(shards, dp_size, micro_size, max_sequences) for b in rank]
        assert sorted(row for batch in batches for row in real_rows(batch)) == expected
        assert sum(batch.num_masked for batch in batches) == total * 3
        shapes = {(*batch.ids_BS.shape, batch.positions_P.numel()) for batch in batches}
        assert shapes == {(micro_size, LENGTH, micro_size * 3)}


def test_all_tensors_of_a_batch_move_to_a_device(shards: Shards) -> None:
    batch = batch_of(shards, 0, 4)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    tensors = [(b.ids_BS, b.positions_P, b.labels_P) for b in (batch, moved)]
    assert [t.device.type for t in tensors[1]] == ["meta"] * 3
    assert [t.shape for t in tensors[1]] == [t.shape for t in tensors[0]]
    assert (moved.num_masked, moved.sample_ids) == (batch.num_masked, batch.sample_ids)


def test_a_synthetic_batch_has_random_tokens_and_random_positions_in_each_row() -> None:
    batch, again, other = (random_batch(seed, 5, 64, 16, 100) for seed in (1, 1, 2))
    assert same(batch, again)
    assert not torch.equal(batch.ids_BS, other.ids_BS)
    assert not torch.equal(batch.positions_P, other.positions_P)
    assert (*batch.ids_BS.shape, len(batch.labels_P), batch.num_masked) == (5, 64, 80, 80)
    assert (batch.positions_P.diff() > 0).all()
    assert torch.bincount(batch.positions_P // 64).tolist() == [16] * 5
    assert len((batch.positions_P % 64).reshape(5, 16).unique(dim=0)) == 5
    for tokens in (batch.ids_BS, batch.labels_P):
        assert 0 <= int(tokens.min()) < 10
        assert 90 <= int(tokens.max()) < 100
        assert len(tokens.unique()) > 40


def test_shards_are_mapped_read_only_and_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = write_shards(tmp_path, length=LENGTH, train=50, held_out=1, files=(7, 43))
    size = read_manifest(directory).vocab_size
    tokens = np.memmap(directory / "train-00001.bin", "<u2", "r+", shape=(43, LENGTH))
    tokens[2, 5] = size - 1
    tokens[3, 5] = size
    tokens.flush()
    broken = open_shards(directory, "train")
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert {line.split()[1][:3] for line in maps if "train-00000" in line} == {"r--"}
    assert broken.rows(np.array([0, 9]))[1, 5] == size - 1
    with pytest.raises(ConfigError, match=rf"train-00001\.bin: .*\b{size}\b"):
        broken.rows(np.array([0, 10]))


def test_data_wait_is_the_total_time_in_next(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stream(shards)
    clock = iter([10.0, 12.0, 20.0, 24.0])  # seconds at which two calls begin and end
    with monkeypatch.context() as patched:
        patched.setattr("bert_dp.data.stream.time.perf_counter", lambda: next(clock))
        made.next()
        first = made.wait_s
        made.next()
    assert (first, made.wait_s) == (2.0, 6.0)
