"""Implement `bert-dp data build` and `bert-dp data inspect`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp.config import MAX_VOCAB_SIZE, ConfigError, Issue, no_effect, parse_overrides, resolve
from bert_dp.config.manifest import SourceFile, loss_warnings
from launcher.job import issues_by_option
from launcher.log import PLAIN, runnable, show
from launcher.report.formats import count_of, format_count, format_nats, format_percent
from launcher.report.page import Quantity, Report, ReportSection, Table, Verdict, show_result, table, words

VOCAB_SIZE = 32_768
OPTIONS = {
    "data.sources": "SOURCES",
    "data.tokenizer": "--tokenizer",
    "model.vocab_size": "--vocab-size",
    "data.sequence_length": "--sequence-length",
    "data.build.source_format": "--format",
    "data.build.text_field": "--text-key",
}
"""Setting -> option of `data build` that sets it, for error messages."""
SAMPLE_CHARS = 300  # maximum length of a sample in the report, in characters
SHOWN_SOURCES = 20  # the table of sources shows at most this many rows, largest `SourceFile.loss` first
SPLIT_COLUMNS = [Quantity(name, name, "count") for name in ("documents", "tokens", "sequences")]
SOURCE_COLUMNS = [
    Quantity("documents", "documents", "count"),
    Quantity("letters", "letters", "count"),
    Quantity("lost_share", "letters lost", "percent"),
    Quantity("unknown_share", "unknown tokens", "percent"),
]
if TYPE_CHECKING:
    from rich.console import Console


def build(
    sources: Sequence[str],
    out: Path,
    *,
    vocab_size: int | None,
    sequence_length: int,
    tokenizer: str | None,
    overrides: Sequence[str],
    processes: int | None,
    force: bool,
    console: Console,
) -> int:
    """Build shards, print a summary and return 0. `vocab_size`: for a new tokenizer; None = VOCAB_SIZE.
    `overrides`: settings of the form data.build.NAME=VALUE. Raise ConfigError if the input is unusable."""
    from bert_dp.data.build import build as build_shards
    from bert_dp.data.build import shown_progress

    if tokenizer is not None and vocab_size is not None:
        message, hint = "--tokenizer fixes the vocabulary size", "omit --vocab-size"
        raise ConfigError([Issue("--vocab-size", "conflict", message, vocab_size, "--tokenizer", hint)])
    if others := [key for item in overrides if not (key := item.partition("=")[0]).startswith("data.build.")]:
        message = "is not a data.build setting"
        hint = "pass only data.build.NAME=VALUE; other settings have options (see --help)"
        raise ConfigError([Issue(key, "unknown", message, hint=hint) for key in others])
    if not sources:
        raise ConfigError([Issue("SOURCES", "missing", "pass the text to build the shards from")])
    size = vocab_size or (VOCAB_SIZE if tokenizer is None else MAX_VOCAB_SIZE)
    out, tokenizer = out.expanduser(), tokenizer and os.path.expanduser(tokenizer)
    options = {
        "data": {"sources": list(sources), "tokenizer": tokenizer, "sequence_length": sequence_length},
        "model": {"vocab_size": size},
        "schedule": {"steps": 1},
    }
    with issues_by_option(OPTIONS):
        config = resolve([options, parse_overrides(overrides)])
        for issue in no_effect(config):
            if issue.setting.startswith("data.build."):
                show(console, f"warning: {issue}", **PLAIN)
        with shown_progress() as progress:
            manifest = build_shards(config, out, processes=processes, force=force, progress=progress)
    train, held_out = manifest.train, manifest.held_out
    for line in (
        f"{out}: {train.sequences:,} training and {held_out.sequences:,} held-out sequences of "
        f"{sequence_length} tokens, from {count_of(train.documents + held_out.documents, 'document')}",
        f"dropped: {dropped_words(manifest.dropped)}; vocabulary: {manifest.vocab_size:,} tokens",
        f"letters lost: {_share(manifest.sources, 'lost_letters', 'letters')}; "
        f"unknown tokens: {_share(manifest.sources, 'unknown_tokens', 'tokens')}",
        f"next: {runnable(train_command(out, manifest.model_dump()))}",
    ):
        show(console, line, **PLAIN)
    return 0


def inspect(directory: Path, *, as_json: bool, console: Console) -> int:
    """Verify and report on shards; return 0, or 1 if any is damaged. Raise ConfigError if any is missing."""
    from bert_dp.data import shards

    facts = shards.inspect(directory.expanduser())
    show_result(console, facts, lambda: shards_report(facts, directory), as_json=as_json)
    return 1 if facts["problems"] else 0


def shards_report(facts: Mapping[str, Any], directory: Path) -> Report:
    """Build the report that `inspect` prints: counts, entropies, samples and damaged files."""
    manifest = facts["manifest"]
    sources = [SourceFile.model_validate(source) for source in manifest["sources"]]
    damaged = [Verdict("fail", f"damaged: {problem}") for problem in facts["problems"]]
    warnings = [Verdict("warn", line) for line in loss_warnings(sources)]
    worst = sorted(sources, key=lambda source: -source.loss)[:SHOWN_SOURCES]
    corner = "source" if len(worst) == len(sources) else f"source ({len(worst)} of {len(sources):,})"
    rows = [
        words("sequence", f"{format_count(manifest['sequence_length'])} tokens"),
        words("vocabulary", f"{format_count(manifest['vocab_size'])} tokens"),
        words("unigram entropy", format_nats(manifest["unigram_entropy_nats"]), "per held-out token"),
        words("ln V", format_nats(manifest["uniform_entropy_nats"]), "loss of a uniform guess"),
        words("dropped", dropped_words(manifest["dropped"])),
        *[words(f"sample {i}", sample[:SAMPLE_CHARS]) for i, sample in enumerate(facts["samples"], 1)],
    ]
    splits = [("train", manifest["train"]), ("held-out", manifest["held_out"])]
    tables = [
        table(splits, SPLIT_COLUMNS, corner="split"),
        table([(source.name, source) for source in worst], SOURCE_COLUMNS, corner=corner),
        Table(rows),
    ]
    return Report(
        "bert-dp: shards",
        verdicts=[*(damaged or [Verdict("ok", "valid: every hash and token id checked")]), *warnings],
        sections=[ReportSection("", tables=tables)],
        next="" if damaged else train_command(directory, manifest),
    )


def _share(sources: Sequence[SourceFile], part: str, whole: str) -> str:
    """Sum the fields `part` and `whole` over all sources, and format both sums with their ratio."""
    counted, total = (sum(getattr(source, name) for source in sources) for name in (part, whole))
    return f"{counted:,} of {total:,} ({format_percent(counted / max(1, total))})"


def dropped_words(dropped: Mapping[str, int]) -> str:
    """Format the number of dropped documents for each reason."""
    counts = [f"{format_count(n)} {stage.replace('_', ' ')}" for stage, n in dropped.items() if n]
    return ", ".join(counts) or "no documents"


def train_command(directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the command that trains on these shards."""
    settings = f"data.sequence_length={manifest['sequence_length']} model.vocab_size={manifest['vocab_size']}"
    return f"bert-dp train data.path={shlex.quote(str(directory))} {settings}"
