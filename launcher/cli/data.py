"""`data build` and `data inspect`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from launcher.cli import options as opt


def build(
    sources: Annotated[list[str], Argument(help=opt.TEXTS)],
    out: Annotated[Path, Option(help="Directory to write.")],
    vocab_size: Annotated[
        int | None, Option(help="Tokens of the tokenizer to train; default: 32,768.")
    ] = None,
    sequence_length: Annotated[int, Option(help="Tokens per sequence.")] = 128,
    tokenizer: Annotated[str | None, Option(help="Existing tokenizer.json; default: train one.")] = None,
    format: opt.Format = "auto",
    text_key: opt.TextKey = "text",
    set_: Annotated[
        list[str] | None, Option("--set", metavar="name=v", help="Set data.build.NAME; repeatable.")
    ] = None,
    processes: Annotated[
        int | None, Option(min=1, max=4096, help="Tokenizing processes; default: one per core.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the contents of OUT.")] = False,
) -> int:
    """Build token shards from text.

    Steps: filter, deduplicate, train a tokenizer, tokenize and pack; a manifest has the hash of each shard.
    """
    from launcher import datasets

    return datasets.build(
        sources,
        out,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        overrides=[f"source_format={format}", f"text_field={jsonlib.dumps(text_key)}", *(set_ or [])],
        processes=processes,
        force=force,
        console=opt.console(),
    )


def inspect(
    directory: Annotated[Path, Argument(help="Directory made by `bert-dp data build`.")],
    json: opt.Json = False,
) -> int:
    """Verify the hashes of shards; show their counts, entropies and samples."""
    from launcher import datasets

    return datasets.inspect(directory, as_json=json, console=opt.console())
