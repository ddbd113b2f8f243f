"""Build shards from text sources, and store them in a directory or in the cache. Torch-free.

A build reads the sources three times: to hash them, to sample text for training the tokenizer, and to
tokenize them. The second read is skipped if a tokenizer is given. Memory holds two copies of the sample (at
most 2^27 characters each) and a few batches per process. Exact dedup adds 8 bytes per document (24 while it
merges two arrays), near dedup about 2 kB. A lock prevents concurrent builds in one output directory. The
shards are written to a temporary directory, which replaces the output directory once complete. The
launcher runs `python -m bert_dp.data.build` to build or find shards; the command prints their directory.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert_dp import files
from bert_dp.config import BuildConfig, Config, ConfigError, Issue, Manifest, load_config, read_manifest
from bert_dp.config import manifest as manifests
from bert_dp.data import readers as inputs
from bert_dp.data import shards
from bert_dp.data import tokenizer as tokens
from bert_dp.data.shards import ShardWriter
from bert_dp.files import write_json, write_text
from bert_dp.training.process import follow_launcher

SAMPLE_BYTES = 128 * 2**20  # maximum number of characters in the sample that trains the tokenizer
WARNED_SHARE = 0.01  # warn if a filter drops a larger share of the documents
BYTES_PER_PROCESS = 8 * 2**20  # source bytes per additional process; more processes cost more than they save
Progress = Callable[[str, int, int | None], None]
"""Callback (stage, done, total). `total` is None if unknown. A message is passed as `stage`, with total 0."""


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Sources and settings of a build."""

    sources: list[inputs.Source]
    config: Config
    settings: dict[str, Any]
    """`build` section of the manifest: everything that the shards depend on, except the sources."""
    processes: int | None
    report: Progress


def build(
    config: Config,
    out: Path,
    *,
    processes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Build shards of [sequences, data.sequence_length] token ids in `out`; return the manifest.

    The tokenizer, trained or given, has at most `model.vocab_size` tokens. By default, the build uses one
    process per core, or fewer for small input. If `out` already contains this build, it is kept. `force`
    replaces a different or damaged build. Raises ConfigError for unusable sources or settings, for too little
    text, and if `out` contains other files or, without `force`, another build.
    """
    data = config.data
    report: Progress = progress or (lambda stage, done, total: None)
    out = out.expanduser().resolve()
    if data.build.dedup == "near":
        tokens.rensa()
    settings = {
        **data.build.model_dump(),
        "sequence_length": data.sequence_length,
        "vocab_size": config.model.vocab_size,
        "tokenizer_sha256": inputs.file_hash(Path(data.tokenizer)) if data.tokenizer else None,
    }
    found = inputs.resolve(data.sources or (), data.build, out)
    with locked(out):
        before = [*map(inputs.identity, found)]
        records = [*map(source_record, found)]
        if (kept := _existing(out, settings, records, force)) is not None:
            report(f"kept {out}: it already contains this build", 0, 0)
            return kept
        with replaced(out) as work:
            manifest = build_in(BuildPlan(found, config, settings, processes, report), records, work)
            if before != [*map(inputs.identity, found)]:
                message = "a source changed while it was being read"
                raise ConfigError([Issue("data.sources", "conflict", message, hint="run again")])
    for line in (*filter_warnings(manifest), *manifests.loss_warnings(manifest.sources)):
        report(f"warning: {line}", 0, 0)
    return manifest


def _existing(
    out: Path, settings: dict[str, Any], records: list[dict[str, Any]], force: bool
) -> Manifest | None:
    """Return the manifest if `out` holds this build, or None if `out` may be replaced. Raises ConfigError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    with contextlib.suppress(ConfigError):
        manifest = read_manifest(out)
        before = [source.sha256 or source.name for source in manifest.sources]
        is_same = before == [record["sha256"] or record["name"] for record in records]
        if is_same and manifest.build.model_dump() == settings and not shards.verify(out):
            return manifest
    if not (out.is_dir() and all(shards.OWN_FILES.fullmatch(path.name) for path in out.iterdir())):
        message = f"{out} contains files that are not shards"
        raise ConfigError([Issue("--out", "exists", message, str(out), hint="choose a new directory")])
    if not force:
        message = f"{out} contains a different or damaged build"
        raise ConfigError([Issue("--out", "exists", message, str(out), "--force", "--force replaces it")])
    return None


def cache_dir(config: Config) -> Path:
    """Return the cache directory for the shards of `config`. Its name is a hash of the build options, the
    tokenizer, and the name, size and modification time of every source. Raises ConfigError."""
    data = config.data
    facts = {
        "format": manifests.format_of(Manifest),
        "build": data.build.model_dump(),
        "sequence_length": data.sequence_length,
        "vocab_size": config.model.vocab_size,
        "tokenizer": inputs.file_identity(Path(data.tokenizer)) if data.tokenizer else None,
        "sources": [inputs.identity(source) for source in inputs.resolve(data.sources or (), data.build)],
    }
    return files.cache_root() / manifests.hash_json(facts)[:20]


def find(config: Config) -> Path | None:
    """Return the directory of shards that `ensure` has built for `config`, or None. Raises ConfigError."""
    directory = cache_dir(config)
    with contextlib.suppress(ConfigError):  # damaged shards count as missing: `ensure` rebuilds them
        read_manifest(directory)
        return directory
    return None


def ensure(config: Config, progress: Progress | None = None) -> Path:
    """Return the directory of the shards for `config`. If data.path is not set, the first call builds them in
    the cache, while concurrent calls wait. Raises ConfigError."""
    given = config.data.path
    if given is None and (issues := files.cache_issues()):
        raise ConfigError(issues)
    directory = cache_dir(config) if given is None else Path(given).expanduser()
    try:
        manifest = read_manifest(directory)
        if damage := shards.check_sample(directory, manifest):
            raise ConfigError(damage)
    except ConfigError:
        if given is not None:
            raise
        manifest = build(config, directory, force=True, progress=progress)
    if unfit := manifest.issues(config):
        raise ConfigError(unfit)
    return directory


def build_in(plan: BuildPlan, records: list[dict[str, Any]], work: Path) -> Manifest:
    """Build the shards, tokenizer.json and manifest.json in the directory `work`; return the manifest."""
    data = plan.config.data
    tokenizer_json, total = _tokenizer(plan)
    write_text(work / "tokenizer.json", tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    vocab_size, special = tokens.size(tokenizer), tokens.special_ids(tokenizer, data.tokenizer or "trained")
    cores, size = len(os.sched_getaffinity(0)), sum(record["bytes"] for record in records)
    has_hub = any(source.name.startswith("hub:") for source in plan.sources)  # hub sources' sizes are unknown
    processes = plan.processes or (cores if has_hub else min(cores, 1 + size // BYTES_PER_PROCESS))
    batches = (
        (index, texts)  # index of a source, a batch of its documents
        for index, (source, record) in enumerate(zip(plan.sources, records, strict=True))
        for texts in tokens.in_batches(read_documents([source], [record]))
    )
    encoded = tokens.encode_all(batches, tokenizer_json, data.build, processes)
    names, length = ("train", "held_out"), data.sequence_length
    train, held_out = (ShardWriter(work, name, length, vocab_size) for name in names)
    with contextlib.closing(train), contextlib.closing(held_out), contextlib.closing(encoded):
        dropped = _route(encoded, records, plan, train, held_out, total)
    _check_split(train, held_out, dropped, data.build)
    content = {
        "sequence_length": data.sequence_length,
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
        "build": plan.settings,
        "dropped": dropped,
    }
    write_json(work / Manifest.file_name, manifests.with_hash(Manifest, content))
    return read_manifest(work)


def _tokenizer(plan: BuildPlan) -> tuple[str, int | None]:
    """Train the tokenizer, or read the given one. Return the content of tokenizer.json and the number of
    documents in all sources. This number is None for a given tokenizer, because no documents are counted."""
    most, path, options = plan.config.model.vocab_size, plan.config.data.tokenizer, plan.config.data.build
    if path is None:
        sample, total = _sample(chain.from_iterable(map(inputs.documents, plan.sources)), plan.report)
        plan.report("train tokenizer", 0, None)
        model, trained = options.tokenizer_model, list[str]()

        def train() -> None:
            tokenizer = tokens.train(sample, model=model, vocab_size=most, with_normalizer=options.normalize)
            trained.append(tokenizer.to_str())

        thread = threading.Thread(target=train, daemon=True)  # keeps the main thread free to handle signals
        thread.start()
        thread.join()
        return trained[0], total
    if (size := tokens.size(tokens.load(Path(path)))) > most:
        message, other = f"{most} is less than the {size} tokens in {path}", "data.tokenizer"
        raise ConfigError([Issue("model.vocab_size", "conflict", message, most, other, "raise it")])
    return Path(path).read_text(encoding="utf-8"), None


def source_record(source: inputs.Source) -> dict[str, Any]:
    """Return a source's entry in the manifest: its name and, for a file, its size and hash."""
    record: dict[str, Any] = {"name": source.name, "bytes": 0, "sha256": "", "documents": 0}
    if source.path is not None:
        record["name"] = source.path.name  # no directory, so that a moved file counts as the same source
        record["bytes"] = inputs.file_identity(source.path)["bytes"]
        record["sha256"] = inputs.file_hash(source.path)
    return record


def read_documents(sources: list[inputs.Source], records: list[dict[str, Any]]) -> Generator[str, None, None]:
    """Yield all documents of the sources in order. Count them in `records`, one entry per source."""
    for source, record in zip(sources, records, strict=True):
        for text in inputs.documents(source):
            record["documents"] += 1
            yield text


def _sample(documents: Iterable[str], report: Progress) -> tuple[list[str], int]:
    """Sample documents by the CRC-32 of their text, up to SAMPLE_BYTES characters in all. Return the sample
    and the total number of documents."""
    bound, size, sample, total = 2**32, 0, [], 0
    for text in documents:
        total += 1
        if total % 10_000 == 0:
            report("read", total, None)
        key = zlib.crc32(text.encode())
        if key >= bound:
            continue
        sample.append((key, text))
        size += len(text)
        while size > SAMPLE_BYTES and len(sample) > 1:
            bound //= 2
            sample = [pair for pair in sample if pair[0] < bound]
            size = sum(len(text) for _, text in sample)
    report("read", total, total)
    return [text for _, text in sample], total


def _route(
    encoded: Iterable[tuple[int, tokens.EncodedDocuments]],
    records: list[dict[str, Any]],
    plan: BuildPlan,
    train: ShardWriter,
    held_out: ShardWriter,
    total: int | None,
) -> dict[str, int]:
    """Drop duplicates, and write each remaining document to `train` or `held_out`, depending on a hash of its
    text. Add each source's counts (tokens.COUNTS) to its record. Return {stage: number of dropped documents}.
    Raises ConfigError if the tokenizer loses too much of a source."""
    options = plan.config.data.build
    bound = np.uint64(int(options.held_out_fraction * 2.0**64))
    is_new = exact_filter()
    near = None
    if options.dedup == "near":  # `add` returns False if an earlier document's MinHash is similar
        threshold = options.near_threshold
        near = tokens.rensa().RMinHashDeduplicator(threshold, tokens.NUM_PERMUTATIONS, True, None, 0)
    dropped = {"empty": 0, "tokens_per_char": 0, "exact_duplicate": 0, "near_duplicate": 0}
    read = current = 0
    for record in records:
        record.update(dict.fromkeys(tokens.COUNTS, 0))
    for index, batch in encoded:
        if index > current:
            _refuse_loss(records[current], plan)
            current = index
        for name, count in zip(tokens.COUNTS, batch.counts, strict=True):
            records[index][name] += count
        keep = np.ones(len(batch.keys), bool)
        if options.dedup != "none":
            keep = is_new(batch.contents)
            dropped["exact_duplicate"] += int((~keep).sum())
        if near is not None:
            exact = keep.copy()
            keep[exact] = [near.add(str(near.len()), batch.sketches[i]) for i in np.flatnonzero(exact)]
            dropped["near_duplicate"] += int((exact & ~keep).sum())
        is_held_out = batch.keys < bound
        for writer, chosen in ((train, keep & ~is_held_out), (held_out, keep & is_held_out)):
            writer.documents += int(chosen.sum())
            writer.write(batch.ids[np.repeat(chosen, batch.lengths)])
        dropped["empty"] += batch.empty
        dropped["tokens_per_char"] += batch.filtered
        read += len(batch.keys) + batch.empty + batch.filtered
        plan.report("tokenize", read, total)
    _refuse_loss(records[current], plan)
    return dropped


def exact_filter() -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that takes keys [D] uint64 and returns a mask [D], which is True where a key occurs
    for the first time in all calls so far. Sorted arrays of doubling size hold the keys, 8 bytes each. The
    probability that any two of n different documents share a key is n^2 / 2^65: 3e-4 for 1e8 documents."""
    levels: list[np.ndarray] = []

    def is_new(keys: np.ndarray) -> np.ndarray:
        new = np.zeros(len(keys), bool)
        new[np.unique(keys, return_index=True)[1]] = True
        for level in levels:
            nearest = np.minimum(np.searchsorted(level, keys), len(level) - 1)
            new &= level[nearest] != keys
        added = np.sort(keys[new])
        while levels and len(levels[-1]) <= len(added):
            added = np.sort(np.concatenate([levels.pop(), added]), kind="stable")
        if len(added):
            levels.append(added)
        return new

    return is_new


def _refuse_loss(record: dict[str, Any], plan: BuildPlan) -> None:
    """Raise ConfigError if a source's share of lost letters or unknown tokens exceeds REFUSED_LOSS."""
    source = manifests.SourceFile(**record)
    if source.loss > manifests.REFUSED_LOSS:
        without = "" if plan.config.data.tokenizer is None else "omit data.tokenizer (--tokenizer), and "
        hint = f"{without}{manifests.ANY_LANGUAGE}, or omit the source"
        message = f"{source.name}: {source.loss_words()}"
        raise ConfigError([Issue("data.sources", "out_of_range", message, source.loss, hint=hint)])


def _check_split(
    train: ShardWriter, held_out: ShardWriter, dropped: dict[str, int], options: BuildConfig
) -> None:
    """Raise ConfigError if a split that should have sequences has none, or held_out has more than train."""
    share = options.held_out_fraction
    if train.sequences >= max(1, held_out.sequences) and (held_out.sequences or share == 0):
        return
    counts = [f"{w.sequences} sequences from {w.documents} documents" for w in (train, held_out)]
    lost = ", ".join(f"{n} {stage}" for stage, n in dropped.items() if n) or "none"
    sizes = f"training {counts[0]}, held-out {counts[1]} (dropped: {lost})"
    message = f"too little text: {sizes}; only whole documents are held out"
    hint = (
        f"add text, split long documents (data.build.documents is {options.documents}), or change "
        f"data.build.held_out_fraction ({share}) or data.build.max_tokens_per_char (0 = no filter)"
    )
    other = "data.build.held_out_fraction"
    raise ConfigError([Issue("data.sources", "out_of_range", message, other=other, hint=hint)])


def filter_warnings(manifest: Manifest) -> list[str]:
    """Return a warning for each filter that dropped more than WARNED_SHARE of the documents."""
    limit = tokens.max_tokens_per_char(manifest.build, manifest.vocab_size)
    total = sum(manifest.dropped.values()) + manifest.train.documents + manifest.held_out.documents
    reasons = {
        "empty": "the tokenizer produces no tokens for them (check data.build.normalize and data.tokenizer)",
        "tokens_per_char": f"they have {limit:.3g} or more tokens per character "
        "(data.build.max_tokens_per_char=0 keeps all)",
        "exact_duplicate": "each repeats the tokens of an earlier one (data.build.dedup=none keeps all)",
        "near_duplicate": "they are similar to an earlier document (data.build.dedup=exact keeps them)",
    }
    return [
        f"{count:,} of {total:,} documents ({count / total:.1%}) were dropped: {reasons[stage]}"
        for stage, count in manifest.dropped.items()
        if count > WARNED_SHARE * total
    ]


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock a file next to `out`. Wait while another process holds the lock. If this process dies, the kernel
    releases the lock. Raises ConfigError if the file cannot be created or locked."""
    path = out.parent / f".{out.name}.lock"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = files.lock(path)
        if file is None:
            sys.stderr.write(files.printable(f"waiting for another process that is writing {out}\n"))
            file = files.lock(path, wait=True)
    except OSError as error:
        setting = "BERT_DP_CACHE" if out.is_relative_to(files.cache_root()) else "--out"
        message, hint = f"{out.parent} is not writable ({error.strerror})", "choose another directory"
        raise ConfigError([Issue(setting, "not_found", message, value=str(out), hint=hint)]) from None
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield a new directory, then replace `out` with it, or delete it on failure. Callers must lock `out`."""
    prefix = f".{out.name}.building-"
    for stale in [p for p in out.parent.iterdir() if p.name.startswith(prefix)]:
        shutil.rmtree(stale)  # its writer has exited; otherwise it would still hold the lock
    work = out.with_name(f"{prefix}{secrets.token_hex(4)}")  # set before `try`, because `finally` uses it
    old = work.with_name(f"{work.name}-old")
    try:
        work.mkdir(mode=0o700)
        yield work
        umask = os.umask(0o077)
        os.umask(umask)
        work.chmod(0o777 & ~umask)  # private until complete; now the umask sets the permissions
        if out.exists():
            out.rename(old)
        work.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)  # this process was interrupted between the two renames
        for directory in (work, old):
            shutil.rmtree(directory, ignore_errors=True)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(answer: Callable[[], str]) -> int:
    """Print the result of `answer`, and return exit code 0. On ConfigError, print the issues as JSON and
    return 2. On OSError or RuntimeError, print it and return 1. On a signal, return 128 + its number."""
    for number in files.honoured(STOPS):
        signal.signal(number, _stop)
    follow_launcher()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocked it
        sys.stdout.write(f"{answer()}\n")
    except ConfigError as error:
        sys.stdout.write(json.dumps([issue.to_json() for issue in error.issues]))
        return 2
    except KeyboardInterrupt as stop:
        return 128 + int(stop.args[0])
    except (OSError, RuntimeError) as error:
        place = f"the cache is {files.cache_root()}; set BERT_DP_CACHE to use another directory"
        sys.stderr.write(files.printable(f"error: {error}; {place}\n"))
        return 1
    return 0


def _stop(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt. Ignore later signals, so that the removal of unfinished files completes."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function that writes a stage's progress to stderr. A terminal shows one line, which is updated
    at most twice a second. Other outputs get a new line at most once every ten seconds."""
    on_terminal = sys.stderr.isatty()
    last: dict[str, float] = {}
    end = ""  # "\n" while the last line is unfinished

    def write(stage: str, done: int, total: int | None) -> None:
        nonlocal end
        pause = 0.5 if on_terminal else 10
        if stage in last and time.monotonic() - last[stage] < pause and done != total:
            return
        last[stage] = time.monotonic()
        line = files.printable(f"{stage}{f': {done}' if done else ''}{f' of {total}' if total else ''}")
        is_open = on_terminal and done != total
        sys.stderr.write(("\r\x1b[K" if on_terminal else "") + line + ("" if is_open else "\n"))
        sys.stderr.flush()
        end = "\n" if is_open else ""

    try:
        yield write
    finally:
        sys.stderr.write(end)


def main(argv: Sequence[str]) -> int:
    """Print the directory of a configuration's shards and return the exit code. `ensure CONFIG.yaml` builds
    missing shards; `find CONFIG.yaml` prints an empty line if there are none."""
    verb, path = argv

    def answer() -> str:
        config = load_config(Path(path))
        if verb == "find":
            return str(find(config) or "")
        files.set_private_umask()
        with shown_progress() as progress:
            return str(ensure(config, progress))

    return run_command(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
