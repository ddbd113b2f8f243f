"""Filter, deduplicate, tokenise and pack sources into shards in one directory. Torch-free.

The sources are read for their hashes, for a sample to train the tokenizer (left out when one is given) and to
build. Held in memory: the sample (at most 128 MiB of text, twice), a few batches per process, 8 bytes per
document for exact dedup (24 while two tables are merged; about 2 kB for near dedup). The result does not
depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert_dp.config import BuildConfig, ConfigError, Issue, Manifest, read_manifest
from bert_dp.config.manifest import ANY_LANGUAGE, REFUSED_LOSS, SourceFile, with_hash
from bert_dp.corpus import dedup, encode, shards
from bert_dp.corpus import sources as inputs
from bert_dp.corpus import tokenizer as tokens
from bert_dp.corpus.shards import ShardWriter
from bert_dp.record import write_json, write_text

SAMPLE_BYTES = 128 * 2**20  # text that the tokenizer is trained on, at most
BYTES_PER_PROCESS = 8 * 2**20  # of source; for less, starting a process costs more than it saves

LONG_DOCUMENT = 0.1  # of all tokens: a document of more distorts the split
DOCUMENT_HINT = {
    "line": "each line of a text file is a document (data.build.documents)",
    "blank_line": "a blank line ends a document of a text file; where it has none, use documents=line",
}

Progress = Callable[[str, int, int | None], None]
"""Stage, done, total; None: unknown, 0: a message and no stage."""


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Hold the sources and settings of a build."""

    sources: list[inputs.Source]
    options: BuildConfig
    tokenizer: str | None
    """A file; None = train one."""
    settings: dict[str, Any]
    """`build` of the manifest: everything that the shards depend on beside the sources."""
    processes: int | None


def build_in(plan: BuildPlan, records: list[dict[str, Any]], work: Path, tell: Progress) -> Manifest:
    """Build the shards, tokenizer.json and manifest.json in the directory `work`; returns the manifest."""
    options, settings = plan.options, plan.settings
    tokenizer_json, total = _tokenizer(plan, tell)
    write_text(work / "tokenizer.json", tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    vocab_size, special = tokens.size(tokenizer), tokens.special_ids(tokenizer, plan.tokenizer or "trained")
    encoding = encode.Encoding(
        tokenizer_json,
        sep=special["sep"],
        unk=special["unk"],
        max_tokens_per_char=options.max_tokens_per_char,
        near=options.dedup == "near",
        seed=settings["seed"],
    )
    batches = encode.in_batches(read_documents(plan.sources, records))
    encoded = encode.encode_all(batches, encoding, plan.processes or _processes(plan.sources))
    with contextlib.closing(encoded):  # ends the processes, however this ends
        train, held_out, dropped = _route(encoded, records, work, plan, vocab_size, tell, total)
    _check_split(train, held_out, dropped, options, tell)
    content = {
        "sequence_length": settings["sequence_length"],
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "special_tokens": special,
        "num_special": tokens.first_ordinary(tokenizer, special),
        "train": train.record(),
        "held_out": held_out.record(),
        "unigram_entropy_nats": shards.cross_entropy(train.counts, held_out.counts),
        "uniform_entropy_nats": math.log(vocab_size),
        "tokenizer": {"file": "tokenizer.json", "sha256": inputs.file_hash(work / "tokenizer.json")},
        "sources": records,
        "build": settings,
        "dropped": dropped,
    }
    write_json(work / Manifest.file_name, with_hash(Manifest, content))
    return read_manifest(work)


def _tokenizer(plan: BuildPlan, tell: Progress) -> tuple[str, int | None]:
    """Return (tokenizer.json, number of all documents if it was counted)."""
    most, path, options = plan.settings["vocab_size"], plan.tokenizer, plan.options
    if path is None:
        sample, total = _sample(chain.from_iterable(map(inputs.documents, plan.sources)), tell)
        tell("train tokenizer", 0, None)
        kind = options.tokenizer_model
        trained = _in_thread(
            functools.partial(
                tokens.train, sample, model=kind, vocab_size=most, with_normalizer=options.normalize
            )
        )
        return trained.to_str(), total
    size = tokens.size(tokens.load(Path(path)))
    if size > most:
        message = f"{most} is below the {size} tokens of {path}"
        raise ConfigError(
            [Issue("model.vocab_size", "conflict", message, most, "data.tokenizer", "raise it")]
        )
    return Path(path).read_text(encoding="utf-8"), None


def _in_thread(work: Callable[[], Tokenizer]) -> Tokenizer:
    """Do long work outside of Python in a thread, so that signals are handled meanwhile."""
    future: Future[Tokenizer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def source_record(source: inputs.Source, *, hashed: bool = True) -> dict[str, Any]:
    """Return bytes and hash of a file, if it is to be `hashed`; of anything else those of its text, filled in
    when it is read, as the number of documents is."""
    if source.path is None:
        return {"name": source.name, "bytes": 0, "sha256": "", "documents": 0}
    size = inputs.file_identity(source.path)["bytes"]
    sha256 = inputs.file_hash(source.path) if hashed else None
    name = source.path.name  # not the directory: the same text elsewhere is the same build
    return {"name": name, "bytes": size, "sha256": sha256, "documents": 0}


def read_documents(sources: list[inputs.Source], records: list[dict[str, Any]]) -> Generator[str, None, None]:
    """Yield all documents of the sources, in order; fill in their records (`source_record`), also of a source
    that is closed before its end."""
    for source, record in zip(sources, records, strict=True):
        digest, size, count = hashlib.sha256(), 0, 0
        try:
            for text in inputs.documents(source):
                count += 1
                if source.path is None:
                    data = text.encode() + b"\n"
                    digest.update(data)
                    size += len(data)
                yield text
        finally:
            record["documents"] = count
            if source.path is None:
                record |= {"bytes": size, "sha256": digest.hexdigest()}


def _sample(documents: Iterable[str], tell: Progress) -> tuple[list[str], int]:
    """Return (documents to train a tokenizer on, number of all documents).

    Those whose CRC-32 lies below a bound, which halves whenever more than SAMPLE_BYTES are held: a function
    of the texts alone.
    """
    bound, size, sample, total = 2**32, 0, [], 0
    for text in documents:
        total += 1
        if total % 10_000 == 0:
            tell("read", total, None)
        key = zlib.crc32(text.encode())
        if key >= bound:
            continue
        sample.append((key, text))
        size += len(text)
        while size > SAMPLE_BYTES and len(sample) > 1:
            bound //= 2
            sample = [pair for pair in sample if pair[0] < bound]
            size = sum(len(text) for _, text in sample)
    tell("read", total, total)
    return [text for _, text in sample], total


def _processes(sources: list[inputs.Source]) -> int:
    cores = len(os.sched_getaffinity(0))
    if any(source.name.startswith("hub:") for source in sources):
        return cores
    size: int = sum(inputs.identity(source).get("bytes", 0) for source in sources)
    return min(cores, 1 + size // BYTES_PER_PROCESS)


def _route(
    encoded: Iterable[encode.EncodedDocuments],
    records: list[dict[str, Any]],
    work: Path,
    plan: BuildPlan,
    vocab_size: int,
    tell: Progress,
    total: int | None,
) -> tuple[ShardWriter, ShardWriter, dict[str, int]]:
    """Drop duplicates, then send each document to training or held-out by the hash of its text; add what
    was counted to the records of the sources.

    Returns both splits, and how many documents each stage dropped. Raises ConfigError as soon as a source
    ends of which too much is lost.
    """
    options, settings = plan.options, plan.settings
    length = settings["sequence_length"]
    train = ShardWriter(work, "train", length, vocab_size)
    held_out = ShardWriter(work, "held_out", length, vocab_size)
    bound = np.uint64(int(options.held_out_fraction * 2.0**64))
    is_new = dedup.exact_filter()
    is_unlike = (
        dedup.near_filter(options.near_threshold, settings["seed"]) if options.dedup == "near" else None
    )
    dropped = {"empty": 0, "tokens_per_char": 0, "exact_duplicate": 0, "near_duplicate": 0}
    read = checked = 0
    for record in records:
        record.update(dict.fromkeys(encode.COUNTS, 0))
    with contextlib.closing(train), contextlib.closing(held_out):
        for batch in encoded:
            # the sources are read ahead: those that end in this batch have their number of documents already
            ended = itertools.takewhile(bool, (record["documents"] for record in records))
            place_N = np.searchsorted(np.cumsum([*ended]), np.arange(read, read + batch.read), side="right")
            for place in np.unique(place_N).tolist():
                sums = batch.counts[place_N == place].sum(axis=0).tolist()
                for name, count in zip(encode.COUNTS, sums, strict=True):
                    records[place][name] += count
            _refuse_loss(records[checked : place_N[-1]], plan)
            checked = place_N[-1]
            keep = np.ones(len(batch.keys), bool)
            if options.dedup != "none":
                keep = is_new(batch.contents)
                dropped["exact_duplicate"] += int((~keep).sum())
            if is_unlike is not None:
                exact = keep.copy()
                keep[exact] = [is_unlike(batch.sketches[i]) for i in np.flatnonzero(exact)]
                dropped["near_duplicate"] += int((exact & ~keep).sum())
            is_held_out = batch.keys < bound
            for writer, chosen in ((train, keep & ~is_held_out), (held_out, keep & is_held_out)):
                writer.documents += int(chosen.sum())
                writer.longest = max(writer.longest, int(batch.lengths[chosen].max(initial=0)))
                writer.write(batch.ids[np.repeat(chosen, batch.lengths)])
            dropped["empty"] += batch.empty
            dropped["tokens_per_char"] += batch.filtered
            read += batch.read
            tell("tokenize", read, total)
        _refuse_loss(records[checked:], plan)
    return train, held_out, dropped


def _refuse_loss(records: list[dict[str, Any]], plan: BuildPlan) -> None:
    """Raise ConfigError for sources of which more than REFUSED_LOSS is lost."""
    without = "" if plan.tokenizer is None else "leave data.tokenizer (--tokenizer) out, and "
    hint = f"{without}{ANY_LANGUAGE}, or leave the source out"
    issues = [
        Issue("data.sources", "out_of_range", f"{source.name}: {source.loss_words()}", source.loss, hint=hint)
        for source in (SourceFile(**record) for record in records)
        if source.loss > REFUSED_LOSS
    ]
    if issues:
        raise ConfigError(issues)


def _check_split(
    train: ShardWriter, held_out: ShardWriter, dropped: dict[str, int], options: BuildConfig, tell: Progress
) -> None:
    """Warn of a document that is a large part of the text.

    Raises ConfigError for a split without a sequence and for more held-out than training sequences.
    """
    counts = [f"{w.sequences} sequences from {w.documents} documents" for w in (train, held_out)]
    hint, share = DOCUMENT_HINT[options.documents], options.held_out_fraction
    total = train.length * (train.sequences + held_out.sequences)
    longest = max(train.longest, held_out.longest) / max(1, total)
    if held_out.sequences > train.sequences:
        message = (
            f"held-out {counts[1]}, but training {counts[0]}: documents are held out whole and the longest "
            f"has {longest:.0%} of the tokens"
        )
        hint += f"; split long documents, add text, or lower data.build.held_out_fraction {share}"
        other = "data.build.held_out_fraction"
        raise ConfigError([Issue("data.sources", "conflict", message, other=other, hint=hint)])
    if not train.sequences or not (held_out.sequences or share == 0):
        lost = ", ".join(f"{n} {stage}" for stage, n in dropped.items() if n) or "none"
        message = f"too little text: training {counts[0]}, held-out {counts[1]} (dropped: {lost})"
        hint += (
            f"; add text, raise data.build.held_out_fraction {share} or data.build.max_tokens_per_char "
            f"{options.max_tokens_per_char} (0 = no filter)"
        )
        issue = Issue("data.sources", "out_of_range", message, other="data.sequence_length", hint=hint)
        raise ConfigError([issue])
    if longest > LONG_DOCUMENT and share > 0:
        what = f"one document has {longest:.0%} of the tokens, and documents are held out whole"
        tell(f"warning: {what}; {hint}", 0, 0)
