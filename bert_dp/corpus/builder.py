"""Build the shards of a configuration, in a directory or in the cache, under a lock. Torch-free.

A build works in a temporary directory beside OUT, which takes OUT's place as its last act. `main` is the
command line `python -m bert_dp.corpus`, for a launcher that supervises ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import BuildConfig, Config, ConfigError, Issue, Manifest, load_config, read_manifest
from bert_dp.config.manifest import SourceFile, format_of, hash_json, loss_warnings
from bert_dp.corpus import dedup, pipeline, shards
from bert_dp.corpus import sources as inputs
from bert_dp.corpus.atomic_directory import locked, replaced
from bert_dp.corpus.command import run_command
from bert_dp.corpus.pipeline import Progress


def build(
    sources: Sequence[str],
    out: Path,
    options: BuildConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    tokenizer: str | None = None,
    seed: int = 0,
    processes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Build shards of [sequences, sequence_length] token ids in `out`; return the manifest.

    `vocab_size`: of the tokenizer to train, and the most that a given one may have. `seed` selects the
    held-out split and the MinHash permutations. `processes`: by default one per core, fewer for small input.
    An `out` that holds these options and sources is kept; `force` replaces another build. Raises ConfigError
    for bad sources or tokenizer, a missing package, too little text, or an `out` that would be lost.
    """
    tell: Progress = progress or (lambda stage, done, total: None)
    out = out.expanduser().resolve()
    if options.dedup == "near":
        dedup.rensa()
    settings = {
        **options.model_dump(),
        "sequence_length": sequence_length,
        "vocab_size": vocab_size,
        "seed": seed,
        "tokenizer_sha256": inputs.file_hash(Path(tokenizer)) if tokenizer else None,
    }
    found = inputs.resolve(sources, options, out)
    plan = pipeline.BuildPlan(found, options, tokenizer, settings, processes)
    with locked(out, tell):
        before = [*map(inputs.identity, found)]
        records = [*map(pipeline.source_record, found)]
        if (kept := _existing(out, settings, records, force)) is not None:
            tell(f"kept {out}: it holds this build", 0, 0)
            return kept
        with replaced(out) as work:
            manifest = pipeline.build_in(plan, records, work, tell)
            if before != [*map(inputs.identity, found)]:
                message = "a source changed while it was read"
                raise ConfigError([Issue("data.sources", "conflict", message, hint="run again")])
    if warning := filter_warning(manifest):
        tell(warning, 0, 0)
    for line in loss_warnings(manifest.sources):
        tell(f"warning: {line}", 0, 0)
    return manifest


def cache_dir(config: Config) -> Path:
    """Return where `ensure` keeps the shards of `config`: $BERT_DP_CACHE or ~/.cache/bert-dp, then a hash.

    The hash covers the options, the tokenizer and every source's name, size and mtime. Raises ConfigError.
    """
    data = config.data
    facts = {
        "format": format_of(Manifest),
        "build": data.build.model_dump(),
        "sequence_length": data.sequence_length,
        "vocab_size": config.model.vocab_size,
        "tokenizer": inputs.file_identity(Path(data.tokenizer)) if data.tokenizer else None,
        "sources": [inputs.identity(source) for source in inputs.resolve(data.sources or (), data.build)],
    }
    return record.cache_root() / hash_json(facts)[:20]


def find(config: Config) -> Path | None:
    """Return where `ensure` has built the shards of `config`, if it has. Raises ConfigError."""
    directory = cache_dir(config)
    with contextlib.suppress(ConfigError):  # what is damaged is built again
        read_manifest(directory)
        return directory
    return None


def ensure(config: Config, progress: Progress | None = None) -> Path:
    """Return the directory of the shards that `config` needs, built in the cache on first use.

    Safe when several processes call it at once: one builds, the others wait. Raises ConfigError.
    """
    data = config.data
    if data.path is not None:
        directory = Path(data.path).expanduser()
        manifest = _verified(directory)
    else:
        if issues := record.cache_issues():
            raise ConfigError(issues)
        directory = cache_dir(config)
        try:
            manifest = _verified(directory)
        except ConfigError:
            manifest = build(
                data.sources or (),
                directory,
                data.build,
                vocab_size=config.model.vocab_size,
                sequence_length=data.sequence_length,
                tokenizer=data.tokenizer,
                force=True,
                progress=progress,
            )
    if unfit := manifest.issues(config):
        raise ConfigError(unfit)
    return directory


def _verified(directory: Path) -> Manifest:
    """Read the manifest and check a sample of the shards against it. Raises ConfigError."""
    manifest = read_manifest(directory)
    if issues := shards.check_sample(directory, manifest):
        raise ConfigError(issues)
    return manifest


def _existing(
    out: Path, settings: dict[str, Any], records: list[dict[str, Any]], force: bool
) -> Manifest | None:
    """Return the manifest of `out` if it holds this build undamaged, None if `out` may be written. Raises
    ConfigError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    same = False
    with contextlib.suppress(ConfigError):
        manifest = read_manifest(out)
        same = manifest.build == settings and _are_these(manifest.sources, records)
        if same and not shards.verify(out):
            return manifest
    if not shards.are_alone(out):
        message = f"{out} holds files that are not shards"
        raise ConfigError([Issue("--out", "exists", message, str(out), hint="name a new directory")])
    if not (same or force):
        message = f"{out} holds another build (options or sources differ)"
        raise ConfigError([Issue("--out", "exists", message, str(out), "--force", "--force replaces it")])
    return None


def _are_these(sources: Sequence[SourceFile], records: Sequence[dict[str, Any]]) -> bool:
    """Compare a manifest's sources with the records: by hash, or by name where a record has no hash."""
    return len(sources) == len(records) and all(
        old.sha256 == new["sha256"] if new["sha256"] else old.name == new["name"]
        for old, new in zip(sources, records, strict=True)
    )


def filter_warning(manifest: Manifest) -> str | None:
    """Warn when the token filter dropped over a fifth of the documents: a small vocabulary does that."""
    filtered = manifest.dropped["tokens_per_char"]
    total = sum(manifest.dropped.values()) + manifest.train.documents + manifest.held_out.documents
    if filtered <= 0.2 * total:
        return None
    limit = manifest.build["max_tokens_per_char"]
    return (
        f"warning: {filtered / total:.0%} of the documents were dropped for more than {limit} tokens per "
        "character; raise max_tokens_per_char (0 keeps all) or the vocabulary"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the directory of a configuration's shards: `ensure CONFIG.yaml` builds them, `find CONFIG.yaml`
    prints nothing where they are not built. Progress goes to stderr.

    Returns the exit code of run_command.
    """
    parser = argparse.ArgumentParser(prog="python -m bert_dp.corpus", description="text to packed shards")
    parser.add_argument("verb", choices=["ensure", "find"])
    parser.add_argument("config", type=Path)
    given = parser.parse_args(argv)

    def answer() -> str:
        config = load_config(given.config)
        if given.verb == "find":
            return str(find(config) or "")
        record.keep_private()
        with shown_progress() as progress:
            return str(ensure(config, progress))

    return run_command(answer, f"the cache is {record.cache_root()}, BERT_DP_CACHE names another")


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function that writes a line per stage to stderr, renewed twice a second on a terminal, else
    followed by one every ten seconds."""
    on_terminal = sys.stderr.isatty()
    last: dict[str, float] = {}
    ends = [""]  # the end of the open line

    def write(stage: str, done: int, total: int | None) -> None:
        pause = 0.5 if on_terminal else 10
        if stage in last and time.monotonic() - last[stage] < pause and done != total:
            return
        last[stage] = time.monotonic()
        line = record.printable(f"{stage}{f': {done}' if done else ''}{f' of {total}' if total else ''}")
        is_open = on_terminal and done != total
        sys.stderr.write(("\r\x1b[K" if on_terminal else "") + line + ("" if is_open else "\n"))
        sys.stderr.flush()
        ends[0] = "\n" if is_open else ""

    try:
        yield write
    finally:
        sys.stderr.write(ends[0])
