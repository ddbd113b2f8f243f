"""Text -> filtered, deduplicated, tokenised, packed shards. Torch-free.

The sources are read twice: once for a sample to train the tokenizer (left out when one is given), once to
build. Held in memory: the sample (at most 128 MiB of text, twice), a few batches per process, 8 bytes per
document for exact dedup (24 while two tables are merged; about 2 kB for near dedup), and 12-20 bytes per
sequence when `order` is set. The result does not depend on the number of processes. Nothing half-made is ever
reused: a build works in a temporary directory beside OUT, which takes OUT's place as its last act.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from tokenizers import Tokenizer

from bert_dp import sources as inputs
from bert_dp import tokenizer as tokens
from bert_dp.config import MAX_VOCAB_SIZE, BuildConfig, Config, ConfigError, data_issues, load_config
from bert_dp.record import read_json, write_json, write_text

FORMAT, VERSION = "bert-dp-shards", 1
SHARD_BYTES = 2**30
SAMPLE_BYTES = 128 * 2**20  # text that the tokenizer is trained on, at most
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**20
BYTES_PER_PROCESS = 8 * 2**20  # of source; for less, starting a process costs more than it saves
TOKEN = np.dtype("<u2")

Progress = Callable[[str, int, int | None], None]  # stage, done, total (None = unknown)


def build(
    sources: Sequence[str],
    out: Path,
    *,
    options: BuildConfig,
    vocab_size: int,
    sequence_length: int,
    tokenizer: str | None,
    seed: int = 0,
    processes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build shards of [sequences, sequence_length] token ids in `out`; returns the manifest.

    `vocab_size` is the size of a trained tokenizer and the most that a given one may have. `seed` picks
    another held-out split and other MinHash permutations. `processes`: None = one per usable core, fewer for
    small input. An `out` that holds these options and sources is kept; another build is replaced on `force`.
    Raises ConfigError for bad sources or tokenizer, too little text, or an `out` that would be lost.
    """
    tell: Progress = progress or (lambda stage, done, total: None)
    out = out.expanduser().resolve()
    found = inputs.resolve(sources)
    before = [inputs.identity(source) for source in found]
    settings = {
        **options.model_dump(mode="json"),
        "sequence_length": sequence_length,
        "vocab_size": vocab_size,
    }
    settings |= {"seed": seed, "tokenizer_sha256": inputs.file_hash(Path(tokenizer)) if tokenizer else None}
    with _locked(out, tell):
        records = [_source_record(source) for source in found]
        if (kept := _existing(out, settings, records, force)) is not None:
            tell(f"kept {out}: it holds this build", 0, None)
            return kept
        prefix = f".{out.name}.building-"
        for stale in [p for p in out.parent.iterdir() if p.name.startswith(prefix)]:
            shutil.rmtree(stale)  # its process is gone: this one holds the lock
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        try:
            manifest = _build(found, records, work, options, settings, tokenizer, processes, tell)
            if before != [inputs.identity(source) for source in found]:
                raise ConfigError(["data.sources: a source changed while it was read; run again"])
            _install(work, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return manifest


def cache_dir(config: Config) -> Path:
    """Where `ensure` keeps the shards of `config`: $BERT_DP_CACHE or ~/.cache/bert-dp, then a hash.

    The hash covers the options, the tokenizer and every source's name, size and mtime. Raises ConfigError.
    """
    data = config.data
    found = inputs.resolve(data.sources or ())
    given = inputs.identity(inputs.Source("", Path(data.tokenizer))) if data.tokenizer else None
    facts = {
        "format": [FORMAT, VERSION],
        "build": data.build.model_dump(mode="json"),
        "sequence_length": data.sequence_length,
        "vocab_size": config.model.vocab_size,
        "tokenizer": given,
        "sources": [inputs.identity(source) for source in found],
    }
    root = os.environ.get("BERT_DP_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "bert-dp") / _hash_json(facts)[:20]


def ensure(config: Config, progress: Progress | None = None) -> Path:
    """The directory of shards that `config` asks for, built in the cache on first use.

    Safe when several processes call it at once: one builds, the others wait. Raises ConfigError.
    """
    data = config.data
    if data.path is not None:
        directory = Path(data.path).expanduser()
        manifest = read_manifest(directory)
    else:
        directory = cache_dir(config)
        try:
            manifest = read_manifest(directory)
        except ConfigError:
            manifest = build(
                data.sources or (),
                directory,
                options=data.build,
                vocab_size=config.model.vocab_size,
                sequence_length=data.sequence_length,
                tokenizer=data.tokenizer,
                force=True,
                progress=progress,
            )
    if issues := data_issues(config, manifest):
        raise ConfigError(issues)
    return directory


def read_manifest(directory: Path) -> dict[str, Any]:
    """manifest.json, checked: format, version, own hash, tokenizer hash, and every shard's size on disk.

    Raises ConfigError naming the file, what was expected and what was found.
    """
    path = directory / "manifest.json"
    again = "build it again with `bert-dp data build`"
    manifest = read_json(path)
    if manifest is None:
        raise ConfigError([f"{path}: no manifest; {again}"])
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        got = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise ConfigError([f"{path}: expected {FORMAT!r} version {VERSION}, found {got}; {again}"])
    expected, found = manifest.get("hash"), _manifest_hash(manifest)
    if expected != found:
        raise ConfigError(
            [f"{path}: expected hash {str(expected)[:16]}, found {found[:16]}: edited or torn; {again}"]
        )
    issues = []
    for shard in (*manifest["train"]["shards"], *manifest["held_out"]["shards"]):
        file = directory / shard["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            shown = "no such file" if size is None else f"{size} bytes"
            issues.append(f"{file}: expected {shard['bytes']} bytes, found {shown}; {again}")
    file = directory / manifest["tokenizer"]["file"]
    if not file.is_file() or inputs.file_hash(file) != manifest["tokenizer"]["sha256"]:
        issues.append(f"{file}: missing or another file than the manifest's; {again}")
    if issues:
        raise ConfigError(issues)
    return manifest


def verify(directory: Path) -> list[str]:
    """Every problem found by reading all shards: sizes, SHA-256, ids beyond the vocabulary. Empty = sound."""
    try:
        manifest = read_manifest(directory)
    except ConfigError as error:
        return list(error.issues)
    problems = []
    for shard in (*manifest["train"]["shards"], *manifest["held_out"]["shards"]):
        file = directory / shard["file"]
        if (found := inputs.file_hash(file)) != shard["sha256"]:
            problems.append(f"{file}: expected SHA-256 {shard['sha256'][:16]}, found {found[:16]}")
        largest = max(
            int(part.max()) for part in _chunks(_mapped(directory, [shard], manifest["sequence_length"]))
        )
        if largest >= manifest["vocab_size"]:
            problems.append(f"{file}: token id {largest}, but the vocabulary has {manifest['vocab_size']}")
    return problems


def inspect(directory: Path, *, samples: int = 3, most: int = 20) -> dict[str, Any]:
    """What is in the shards: the manifest, tokens per document, frequent tokens, decoded sequences, problems.

    Token frequencies are over the whole training set. Raises ConfigError.
    """
    manifest = read_manifest(directory)
    tokenizer = tokens.load(directory / manifest["tokenizer"]["file"])
    mapped = _mapped(directory, manifest["train"]["shards"], manifest["sequence_length"])
    counts = np.zeros(manifest["vocab_size"], np.int64)
    for part in _chunks(mapped):
        counts += np.bincount(part.ravel(), minlength=len(counts))
    top = np.argsort(-counts, kind="stable")[:most]
    total = manifest["train"]["sequences"]
    picked = _rows(mapped, np.linspace(0, total - 1, min(samples, total)).astype(np.int64))
    return {
        "manifest": manifest,
        "tokens_per_document": manifest["train"]["tokens"] / manifest["train"]["documents"],
        "frequent_tokens": [
            {"token": tokenizer.id_to_token(int(i)), "id": int(i), "share": float(counts[i] / counts.sum())}
            for i in top
        ],
        "samples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in picked],
        "problems": verify(directory),
    }


def _build(
    found: list[inputs.Source],
    records: list[dict[str, Any]],
    work: Path,
    options: BuildConfig,
    settings: dict[str, Any],
    tokenizer_path: str | None,
    processes: int | None,
    tell: Progress,
) -> dict[str, Any]:
    tokenizer_json, total = _tokenizer(found, options, settings, tokenizer_path, tell)
    write_text(work / "tokenizer.json", tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    vocab_size, special = tokens.size(tokenizer), tokens.special_ids(tokenizer, tokenizer_path or "trained")
    encoding = tokens.Encoding(
        tokenizer_json, special["sep"], options.max_tokens_per_char, options.dedup == "near", settings["seed"]
    )
    batches = in_batches(_documents(found, records))
    encoded = tokens.encode_all(batches, encoding, processes or _processes(found))
    with contextlib.closing(encoded):  # ends the processes, however this ends
        (train, held_out), dropped = _route(encoded, work, options, settings, vocab_size, tell, total)
    _check_enough(train, held_out, settings, dropped)
    if options.order != "none":
        train = _order(work, train, options.order, tokenizer, tell)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "sequence_length": settings["sequence_length"],
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "special_tokens": special,
        "num_special": tokens.first_ordinary(tokenizer, special),
        "train": train.record(),
        "held_out": held_out.record(),
        "unigram_entropy_nats": _cross_entropy(train.counts, held_out.counts),
        "uniform_entropy_nats": math.log(vocab_size),
        "tokenizer": {"file": "tokenizer.json", "sha256": inputs.file_hash(work / "tokenizer.json")},
        "sources": records,
        "build": settings,
        "dropped": dropped,
    }
    manifest["hash"] = _manifest_hash(manifest)
    write_json(work / "manifest.json", manifest)
    return manifest


def _tokenizer(
    found: list[inputs.Source],
    options: BuildConfig,
    settings: dict[str, Any],
    path: str | None,
    tell: Progress,
) -> tuple[str, int | None]:
    """(tokenizer.json, number of all documents if it was counted)."""
    most = settings["vocab_size"]
    if path is None:
        sample, total = _sample(_documents(found, None), tell)
        tell("train tokenizer", 0, None)
        kind = options.tokenizer_model
        trained = tokens.train(sample, model=kind, vocab_size=most, with_normalizer=options.normalize)
        return trained.to_str(), total
    size = tokens.size(tokens.load(Path(path)))
    if size > most:
        raise ConfigError(
            [f"data.tokenizer: {path} has {size} tokens, but model.vocab_size is {most}; raise it"]
        )
    return Path(path).read_text(encoding="utf-8"), None


def _source_record(source: inputs.Source) -> dict[str, Any]:
    """Bytes and hash of a file; of anything else those of its text, filled in when it is read."""
    if source.path is None:
        return {"name": source.name, "bytes": 0, "sha256": "", "documents": 0}
    size = inputs.identity(source)["bytes"]
    name = source.path.name  # not the directory: the same text elsewhere is the same build
    return {"name": name, "bytes": size, "sha256": inputs.file_hash(source.path), "documents": 0}


def _documents(found: list[inputs.Source], records: list[dict[str, Any]] | None) -> Iterator[str]:
    """All documents; fills in the records of the sources."""
    for source, record in zip(found, records or [{} for _ in found], strict=True):
        digest, size, count = hashlib.sha256(), 0, 0
        for text in inputs.documents(source):
            count += 1
            if source.path is None and records is not None:
                data = text.encode() + b"\n"
                digest.update(data)
                size += len(data)
            yield text
        record["documents"] = count
        if source.path is None:
            record |= {"bytes": size, "sha256": digest.hexdigest()}


def _sample(documents: Iterable[str], tell: Progress) -> tuple[list[str], int]:
    """(documents to train a tokenizer on, number of all documents).

    Those whose CRC-32 lies below a bound, which halves whenever more than SAMPLE_BYTES are held: a function
    of the texts alone.
    """
    bound, held, sample, total = 2**32, 0, [], 0
    for text in documents:
        total += 1
        if total % 10_000 == 0:
            tell("read", total, None)
        key = zlib.crc32(text.encode())
        if key >= bound:
            continue
        sample.append((key, text))
        held += len(text)
        while held > SAMPLE_BYTES and len(sample) > 1:
            bound //= 2
            sample = [pair for pair in sample if pair[0] < bound]
            held = sum(len(text) for _, text in sample)
    tell("read", total, total)
    return [text for _, text in sample], total


def in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of at most BATCH_DOCUMENTS documents and, but for a last one, BATCH_CHARS characters."""
    batch: list[str] = []
    chars = 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if len(batch) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _processes(found: list[inputs.Source]) -> int:
    cores = len(os.sched_getaffinity(0))
    if any(source.name.startswith("hub:") for source in found):
        return cores
    size: int = sum(inputs.identity(source).get("bytes", 0) for source in found)
    return min(cores, 1 + size // BYTES_PER_PROCESS)


class ShardWriter:
    """Packs a stream of tokens into sequences of S and those into files of at most SHARD_BYTES."""

    def __init__(self, directory: Path, name: str, sequence_length: int, vocab_size: int):
        self.directory, self.name, self.length = directory, name, sequence_length
        self.counts = np.zeros(vocab_size, np.int64)  # of the tokens written
        self.documents = 0
        self.sequences = 0
        self.shards: list[dict[str, Any]] = []
        self._rest = np.empty(0, TOKEN)  # fewer than S tokens
        self._file: Any = None

    def write(self, ids: np.ndarray) -> None:
        """Append tokens [T]; whole sequences go to disk."""
        ids = np.concatenate([self._rest, ids.astype(TOKEN, copy=False)])
        whole = len(ids) // self.length
        self._rest = ids[whole * self.length :]
        rows = ids[: whole * self.length].reshape(whole, self.length)
        self.counts += np.bincount(rows.ravel(), minlength=len(self.counts))
        self.sequences += whole
        capacity = max(1, SHARD_BYTES // (self.length * TOKEN.itemsize))
        while len(rows):
            if self._file is None:
                shard: dict[str, Any] = {"file": f"{self.name}-{len(self.shards):05d}.bin", "sequences": 0}
                self.shards.append(shard)
                self._file, self._hash = (self.directory / shard["file"]).open("wb"), hashlib.sha256()
            shard = self.shards[-1]
            part, rows = np.split(rows, [capacity - shard["sequences"]])
            self._file.write(data := part.tobytes())
            self._hash.update(data)
            shard["sequences"] += len(part)
            if shard["sequences"] == capacity:
                self.close()

    def close(self) -> None:
        """End the open file; the tokens that fill no sequence are dropped."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            size = self.shards[-1]["sequences"] * self.length * TOKEN.itemsize
            self.shards[-1] |= {"bytes": size, "sha256": self._hash.hexdigest()}

    def record(self) -> dict[str, Any]:
        """The split's part of the manifest."""
        size = {"sequences": self.sequences, "tokens": self.sequences * self.length}
        return {**size, "documents": self.documents, "shards": self.shards}


def _route(
    encoded: Iterable[tokens.Encoded],
    work: Path,
    options: BuildConfig,
    settings: dict[str, Any],
    vocab_size: int,
    tell: Progress,
    total: int | None,
) -> tuple[tuple[ShardWriter, ShardWriter], dict[str, int]]:
    """Drop duplicates, then send each document to training or held-out by the hash of its text."""
    length = settings["sequence_length"]
    name = "train" if options.order == "none" else "unordered"
    train = ShardWriter(work, name, length, vocab_size)
    held_out = ShardWriter(work, "held_out", length, vocab_size)
    bound = np.uint64(int(options.held_out_fraction * 2.0**64))
    is_new, is_unlike = _exact_filter(), _near_filter(options, settings["seed"])
    dropped = {"empty": 0, "tokens_per_char": 0, "exact_duplicate": 0, "near_duplicate": 0}
    read = 0
    for batch in encoded:
        keep = np.ones(len(batch.keys), bool)
        if options.dedup != "none":
            keep = is_new(batch.keys)
            dropped["exact_duplicate"] += int((~keep).sum())
        if options.dedup == "near":
            exact = keep.copy()
            keep[exact] = [is_unlike(batch.sketches[i]) for i in np.flatnonzero(exact)]
            dropped["near_duplicate"] += int((exact & ~keep).sum())
        apart = batch.keys < bound
        for writer, mine in ((train, keep & ~apart), (held_out, keep & apart)):
            writer.documents += int(mine.sum())
            writer.write(batch.ids[np.repeat(mine, batch.lengths)])
        dropped["empty"] += batch.empty
        dropped["tokens_per_char"] += batch.filtered
        read += batch.read
        tell("tokenize", read, total)
    train.close()
    held_out.close()
    return (train, held_out), dropped


def _exact_filter() -> Callable[[np.ndarray], np.ndarray]:
    """A function from keys [D] uint64 to whether each is seen for the first time, over all calls.

    Sorted arrays of doubling size hold 8 bytes per key. Two different texts share a key with probability
    n^2 / 2^65: 3e-4 for any pair among 1e8 documents.
    """
    levels: list[np.ndarray] = []

    def is_new(keys: np.ndarray) -> np.ndarray:
        new = np.zeros(len(keys), bool)
        new[np.unique(keys, return_index=True)[1]] = True
        for level in levels:
            at = np.minimum(np.searchsorted(level, keys), len(level) - 1)
            new &= level[at] != keys
        fresh = np.sort(keys[new])
        while levels and len(levels[-1]) <= len(fresh):
            fresh = np.sort(np.concatenate([levels.pop(), fresh]), kind="stable")
        if len(fresh):
            levels.append(fresh)
        return new

    return is_new


def _near_filter(options: BuildConfig, seed: int) -> Callable[[Any], bool]:
    """A function from a MinHash sketch to whether no earlier one is as similar as the threshold."""
    if options.dedup != "near":
        return lambda sketch: True
    rensa = inputs.require("rensa", "dedup", "data.build.dedup: near")
    index = rensa.RMinHashDeduplicator(options.near_threshold, tokens.NUM_PERMUTATIONS, True, None, seed)

    def is_unlike(sketch: Any) -> bool:
        added: bool = index.add(str(index.len()), sketch)
        return added

    return is_unlike


def _check_enough(
    train: ShardWriter, held_out: ShardWriter, settings: dict[str, Any], dropped: dict[str, int]
) -> None:
    needs_held_out = settings["held_out_fraction"] > 0
    if train.sequences and (held_out.sequences or not needs_held_out):
        return
    counts = [f"{w.sequences} sequences from {w.documents} documents" for w in (train, held_out)]
    lost = ", ".join(f"{n} {stage}" for stage, n in dropped.items() if n) or "none"
    length, share, rate = (
        settings[k] for k in ("sequence_length", "held_out_fraction", "max_tokens_per_char")
    )
    raise ConfigError(
        [
            f"data.sources: too little text for data.sequence_length {length}: training {counts[0]}, "
            f"held-out {counts[1]} (dropped: {lost}); add text, raise "
            f"data.build.held_out_fraction {share} or data.build.max_tokens_per_char {rate} (0 = no filter)"
        ]
    )


def _order(
    work: Path, unordered: ShardWriter, order: str, tokenizer: Tokenizer, tell: Progress
) -> ShardWriter:
    """Rewrite the shards: most "." tokens first (sentence_length), or most likely tokens first (unigram)."""
    mapped = _mapped(work, unordered.shards, unordered.length)
    stop = tokenizer.token_to_id(".")
    if order == "sentence_length" and stop is None:
        raise ConfigError(["data.build.order: sentence_length needs a token '.' in the tokenizer; use none"])
    log_p = np.log((unordered.counts + 1) / (unordered.counts.sum() + len(unordered.counts)))
    keys = []
    for part in _chunks(mapped):
        score = (part == stop).sum(axis=1) if order == "sentence_length" else log_p[part].sum(axis=1)
        keys.append(-score.astype(np.float32))
    ranks = np.argsort(np.concatenate(keys), kind="stable")
    ordered = ShardWriter(work, "train", unordered.length, len(unordered.counts))
    ordered.documents = unordered.documents
    for start in range(0, len(ranks), 8192):
        tell("order", start, len(ranks))
        ordered.write(_rows(mapped, ranks[start : start + 8192]).ravel())
    ordered.close()
    for shard in unordered.shards:
        (work / shard["file"]).unlink()
    return ordered


def _mapped(directory: Path, shards: list[dict[str, Any]], length: int) -> list[np.ndarray]:
    """The shards as memory maps [sequences, S]."""
    return [np.memmap(directory / s["file"], TOKEN, "r").reshape(-1, length) for s in shards]


def _chunks(mapped: list[np.ndarray]) -> Iterator[np.ndarray]:
    for array in mapped:
        for start in range(0, len(array), 8192):
            yield np.asarray(array[start : start + 8192])


def _rows(mapped: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Sequences [len(wanted), S] by their number over all shards."""
    ends = np.cumsum([len(array) for array in mapped])
    out = np.empty((len(wanted), mapped[0].shape[1]), TOKEN)
    shard = np.searchsorted(ends, wanted, side="right")
    for i, array in enumerate(mapped):
        mine = shard == i
        out[mine] = array[wanted[mine] - (ends[i] - len(array))]
    return out


def _cross_entropy(train: np.ndarray, held_out: np.ndarray) -> float | None:
    """Nats per held-out token under add-one smoothed training frequencies; counts [V]. None if empty."""
    if not held_out.sum():
        return None
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_p).sum() / held_out.sum())


def _hash_json(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest_hash(manifest: dict[str, Any]) -> str:
    return _hash_json({k: v for k, v in manifest.items() if k != "hash"})


@contextlib.contextmanager
def _locked(out: Path, tell: Progress) -> Iterator[None]:
    """One build of `out` at a time, by a lock file beside it that the kernel frees when its holder dies."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = (out.parent / f".{out.name}.lock").open("w")
    except OSError as error:
        raise ConfigError([f"--out {out}: {out.parent} cannot be written ({error.strerror})"]) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"wait for another build of {out}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _existing(
    out: Path, settings: dict[str, Any], records: list[dict[str, Any]], force: bool
) -> dict[str, Any] | None:
    """The manifest of `out` if it is this very build; None if `out` may be (re)placed. Raises ConfigError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        manifest = read_manifest(out)
    except ConfigError:
        manifest = None
    if manifest is not None and manifest["build"] == settings and len(manifest["sources"]) == len(records):
        pairs = zip(manifest["sources"], records, strict=True)
        if all(
            old["sha256"] == new["sha256"] if new["sha256"] else old["name"] == new["name"]
            for old, new in pairs
        ):
            return manifest
    own = {"manifest.json", "tokenizer.json"}
    if not out.is_dir() or any(p.suffix != ".bin" and p.name not in own for p in out.iterdir()):
        raise ConfigError([f"--out {out}: holds files that are not shards; name a new directory"])
    if not force:
        raise ConfigError(
            [f"--out {out}: holds another build (options or sources differ); --force replaces it"]
        )
    return None


def _install(work: Path, out: Path) -> None:
    """Move the finished directory to `out`; a build that stands there goes first."""
    work.chmod(0o755)  # mkdtemp makes it private
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)


def main(argv: Sequence[str] | None = None) -> int:
    """`build OPTIONS.json`: manifest to stdout. `ensure CONFIG.yaml`: directory. `inspect DIR`: JSON.

    OPTIONS.json holds the arguments of `build`, `options` as a mapping. Progress and errors go to stderr.
    Returns the exit code: 0, 2 for bad input, 1 for a failure, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m bert_dp.corpus", description="text to packed shards")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, argument in (("build", "OPTIONS.json"), ("ensure", "CONFIG.yaml"), ("inspect", "DIR")):
        verbs.add_parser(verb).add_argument("path", type=Path, metavar=argument)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with _shown_progress() as progress:
            if arguments.verb == "build":
                answer = json.dumps(build(**_read_options(arguments.path), progress=progress), indent=1)
            elif arguments.verb == "ensure":
                answer = str(ensure(load_config(arguments.path), progress))
            else:
                answer = json.dumps(inspect(arguments.path), indent=1)
    except ConfigError as error:
        sys.stderr.writelines(f"error: {issue}\n" for issue in error.issues)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was written\n")
        return 130
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(answer + "\n")
    return 0


def _read_options(path: Path) -> dict[str, Any]:
    """Keyword arguments of `build` from a JSON file. Raises ConfigError for what is missing or unknown."""
    given = read_json(path)
    if given is None:
        raise ConfigError([f"{path}: not a JSON object"])
    types = {
        "sources": list,
        "out": str,
        "vocab_size": int,
        "sequence_length": int,
        "tokenizer": str,
        "seed": int,
    }
    types |= {"options": dict, "processes": int, "force": bool}
    issues = [f"{path}: unknown key {key!r}; known: {', '.join(types)}" for key in given if key not in types]
    issues += [f"{path}: {key} is missing" for key in ("sources", "out") if not given.get(key)]
    for key, value in given.items():
        if value is not None and key in types and not isinstance(value, types[key]):
            issues.append(f"{path}: {key}: expected {types[key].__name__}, got {value!r}")
    for key, least, most in (
        ("vocab_size", 16, MAX_VOCAB_SIZE),
        ("sequence_length", 8, 8192),
        ("processes", 1, 4096),
    ):
        if isinstance(given.get(key), int) and not least <= given[key] <= most:
            issues.append(f"{path}: {key}: {given[key]} is not in {least}..{most}")
    try:
        options = BuildConfig.model_validate_json(json.dumps(given.get("options") or {}))
    except ValidationError as error:
        issues += [f"options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    if issues:
        raise ConfigError(issues)
    defaults = {"vocab_size": 32_768, "sequence_length": 128, "tokenizer": None}
    given = {key: value for key, value in given.items() if value is not None}
    return {**defaults, **given, "out": Path(given["out"]), "options": options}


@contextlib.contextmanager
def _shown_progress() -> Iterator[Progress]:
    """A bar when stderr is a terminal, else a line per stage and one every ten seconds."""
    if sys.stderr.isatty():
        import rich.console
        import rich.progress

        with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bars:
            tasks: dict[str, rich.progress.TaskID] = {}

            def draw(stage: str, done: int, total: int | None) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage)
                bars.update(tasks[stage], completed=done, total=total)

            yield draw
        return
    last: dict[str, float] = {}

    def write(stage: str, done: int, total: int | None) -> None:
        if stage in last and time.monotonic() - last[stage] < 10 and done != total:
            return
        last[stage] = time.monotonic()
        of = f" of {total}" if total else ""
        sys.stderr.write(f"{stage}{f': {done}{of}' if done else ''}\n")
        sys.stderr.flush()

    yield write


if __name__ == "__main__":
    sys.exit(main())
