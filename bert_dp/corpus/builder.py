"""The shards of a configuration, built in a directory or in the cache under a lock. Torch-free.

Nothing half-made is ever reused: a build works in a temporary directory beside OUT, which takes OUT's place
as its last act. `main` is the command line `python -m bert_dp.corpus`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bert_dp import record
from bert_dp.config import (
    MAX_VOCAB_SIZE,
    BuildConfig,
    Config,
    ConfigError,
    Manifest,
    load_config,
    read_manifest,
)
from bert_dp.config.manifest import SourceFile, format_of, hash_json, loss_warnings
from bert_dp.config.stored import problem_lines
from bert_dp.corpus import dedup, pipeline, shards
from bert_dp.corpus import sources as inputs
from bert_dp.corpus.atomic_directory import locked, refuse_mount_point, replaced
from bert_dp.corpus.command import run_command
from bert_dp.corpus.pipeline import Progress


class BuildRequest(BaseModel):
    """What to build. OPTIONS.json holds one; what is null there has its default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    sources: list[str] = Field(min_length=1)
    out: str = Field(min_length=1)
    options: BuildConfig = BuildConfig()
    vocab_size: int = Field(32_768, ge=16, le=MAX_VOCAB_SIZE)
    """Of a trained tokenizer, and the most that a given one may have."""
    sequence_length: int = Field(128, ge=8, le=8192)
    tokenizer: str | None = None
    seed: int = 0
    """Another one picks another held-out split and other MinHash permutations."""
    processes: int | None = Field(None, ge=1, le=4096)
    """None: one per usable core, fewer for small input."""
    force: bool = False
    """Replace another build that stands in `out`."""

    @property
    def directory(self) -> Path:
        """`out`, absolute."""
        return Path(os.path.expanduser(self.out)).resolve()

    def resolved(self) -> pipeline.BuildPlan:
        """Raises ConfigError for sources, a tokenizer or a package that are not there."""
        if self.options.dedup == "near":
            dedup.rensa()
        settings = {
            **self.options.identity(),
            "sequence_length": self.sequence_length,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "tokenizer_sha256": inputs.file_hash(Path(self.tokenizer)) if self.tokenizer else None,
        }
        sources = inputs.resolve(self.sources, self.options, self.directory)
        return pipeline.BuildPlan(sources, self.options, self.tokenizer, settings, self.processes)


def build(request: BuildRequest, progress: Progress | None = None) -> Manifest:
    """Build shards of [sequences, sequence_length] token ids in `out`; returns the manifest.

    An `out` that holds these options and sources is kept. Raises ConfigError for bad sources or tokenizer,
    too little text, or an `out` that would be lost.
    """
    tell: Progress = progress or (lambda stage, done, total: None)
    out, plan = request.directory, request.resolved()
    if not (out / Manifest.file_name).is_file():  # else it may be this very build, which is kept
        refuse_mount_point(out)
    with locked(out, tell):
        before = [_stamp(source) for source in plan.sources]
        records = [pipeline.source_record(source) for source in plan.sources]
        if (kept := _existing(out, plan.settings, records, request.force)) is not None:
            tell(f"kept {out}: it holds this build", 0, 0)
            return kept
        with replaced(out) as work:
            manifest = pipeline.build_in(plan, records, work, tell)
            if before != [_stamp(source) for source in plan.sources]:
                raise ConfigError(["data.sources: a source changed while it was read; run again"])
    if warning := filter_warning(manifest):
        tell(warning, 0, 0)
    for line in loss_warnings(manifest.sources):
        tell(f"warning: {line}", 0, 0)
    return manifest


def cache_dir(config: Config) -> Path:
    """Where `ensure` keeps the shards of `config`: $BERT_DP_CACHE or ~/.cache/bert-dp, then a hash.

    The hash covers the options, the tokenizer and every source's name, size and mtime. Raises ConfigError.
    """
    data = config.data
    facts = {
        "format": format_of(Manifest),
        "build": data.build.identity(),
        "sequence_length": data.sequence_length,
        "vocab_size": config.model.vocab_size,
        "tokenizer": inputs.file_identity(Path(data.tokenizer)) if data.tokenizer else None,
        "sources": [inputs.identity(source) for source in inputs.resolve(data.sources or (), data.build)],
    }
    return record.cache_root() / hash_json(facts)[:20]


def find(config: Config) -> Path | None:
    """Where `ensure` has built the shards of `config` before; None where it has not. Raises ConfigError."""
    directory = cache_dir(config)
    with contextlib.suppress(ConfigError):  # what is damaged is built again
        read_manifest(directory)
        return directory
    return None


def ensure(config: Config, progress: Progress | None = None) -> Path:
    """The directory of shards that `config` asks for, built in the cache on first use.

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
            request = BuildRequest(
                sources=list(data.sources or ()),
                out=str(directory),
                options=data.build,
                vocab_size=config.model.vocab_size,
                sequence_length=data.sequence_length,
                tokenizer=data.tokenizer,
                force=True,
            )
            manifest = build(request, progress)
    if issues := manifest.issues(config):
        raise ConfigError(issues)
    return directory


def _verified(directory: Path) -> Manifest:
    """The manifest, checked against files and sampled blocks. Raises ConfigError with both hashes."""
    manifest = read_manifest(directory)
    if problems := shards.check_blocks(directory, manifest):
        raise ConfigError(problems)
    return manifest


def _stamp(source: inputs.Source) -> dict[str, Any]:
    """What changes with every write to the source, also one that keeps size and mtime. Raises ConfigError."""
    stamp = inputs.identity(source)
    if source.path is not None:
        status = source.path.stat()
        stamp |= {"inode": status.st_ino, "ctime_ns": status.st_ctime_ns}
    return stamp


def _existing(
    out: Path, settings: dict[str, Any], records: list[dict[str, Any]], force: bool
) -> Manifest | None:
    """The manifest of `out` if it is this very build, and sound; None if `out` may be (re)placed. Raises
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
        raise ConfigError([f"--out {out}: holds files that are not shards; name a new directory"])
    if not (same or force):
        raise ConfigError(
            [f"--out {out}: holds another build (options or sources differ); --force replaces it"]
        )
    return None


def _are_these(sources: Sequence[SourceFile], records: Sequence[dict[str, Any]]) -> bool:
    """Whether a manifest's sources are those of the records: by their hash, or by name where it has none."""
    if len(sources) != len(records):
        return False
    return all(
        old.sha256 == new["sha256"] if new["sha256"] else old.name == new["name"]
        for old, new in zip(sources, records, strict=True)
    )


def filter_warning(manifest: Manifest) -> str | None:
    """What to say when the token filter took over a fifth of the documents: a small vocabulary does that."""
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
    """`build OPTIONS.json`: manifest to stdout. `ensure CONFIG.yaml`: directory. `find CONFIG.yaml`: the
    directory where it is built. `inspect DIR`: JSON.

    OPTIONS.json holds a BuildRequest. Progress and errors go to stderr.
    Returns the exit code: 0, 2 for bad input, 1 for a failure, 128 + signal.
    """
    parser = argparse.ArgumentParser(prog="python -m bert_dp.corpus", description="text to packed shards")
    verbs = parser.add_subparsers(dest="verb", required=True)
    arguments = {"build": "OPTIONS.json", "ensure": "CONFIG.yaml", "find": "CONFIG.yaml", "inspect": "DIR"}
    for verb, argument in arguments.items():
        verbs.add_parser(verb).add_argument("path", type=Path, metavar=argument)
    given = parser.parse_args(argv)
    hint = f"the cache is {record.cache_root()}, BERT_DP_CACHE names another"
    return run_command(functools.partial(_answer, given), hint if given.verb == "ensure" else "")


def _answer(arguments: argparse.Namespace) -> tuple[str, int]:
    """(what stdout is to say, exit code)."""
    with shown_progress() as progress:
        if arguments.verb == "build":
            return build(read_request(arguments.path), progress).model_dump_json(indent=1), 0
        if arguments.verb == "ensure":
            record.keep_private()
            return str(ensure(load_config(arguments.path), progress)), 0
        if arguments.verb == "find":
            return str(find(load_config(arguments.path)) or ""), 0
        facts = shards.inspect(arguments.path)
        return json.dumps(facts, indent=1), 1 if facts["problems"] else 0


def read_request(path: Path) -> BuildRequest:
    """Raises ConfigError for what is missing or unknown."""
    options = record.read_json(path)
    if options is None:
        raise ConfigError([f"{path}: not a JSON object"])
    text = json.dumps({key: value for key, value in options.items() if value is not None})
    try:
        return BuildRequest.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError([f"{path}: {line}" for line in problem_lines(error)]) from None


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar when stderr is a terminal, else a line per stage and one every ten seconds."""
    if sys.stderr.isatty():
        import rich.console
        import rich.markup
        import rich.progress

        console = rich.console.Console(stderr=True)
        with rich.progress.Progress(console=console, redirect_stdout=False) as bars:
            tasks: dict[str, rich.progress.TaskID] = {}

            def draw(stage: str, done: int, total: int | None) -> None:
                text = rich.markup.escape(record.printable(stage))
                if total == 0:
                    bars.console.print(text, soft_wrap=True, highlight=False)
                    return
                if stage not in tasks:
                    for before in bars.tasks:  # a stage of unknown length ends with the next one's begin
                        if before.total is None:
                            bars.update(before.id, total=1, completed=1)
                    tasks[stage] = bars.add_task(text)
                bars.update(tasks[stage], completed=done, total=total)

            yield draw
        return
    last: dict[str, float] = {}

    def write(stage: str, done: int, total: int | None) -> None:
        if stage in last and time.monotonic() - last[stage] < 10 and done != total:
            return
        last[stage] = time.monotonic()
        of = f" of {total}" if total else ""
        sys.stderr.write(record.printable(f"{stage}{f': {done}{of}' if done else ''}\n"))
        sys.stderr.flush()

    yield write
