"""Labelled texts -> a prepared directory in the cache, found again. Torch-free.

`main` is the command line `python -m bert_dp.examples`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from bert_dp import record
from bert_dp.config import ConfigError
from bert_dp.config.examples import MAX_LENGTH, MIN_LENGTH, TRAIN, ExamplesManifest, read_examples
from bert_dp.config.manifest import format_of, hash_json, with_hash
from bert_dp.config.schema import LabelKind
from bert_dp.corpus import sources
from bert_dp.corpus import tokenizer as tokens
from bert_dp.corpus.atomic_directory import locked, replaced
from bert_dp.corpus.command import run_command
from bert_dp.corpus.dedup import document_key
from bert_dp.examples.encode import Encoder
from bert_dp.examples.glue import GlueData, missing
from bert_dp.examples.labels import to_array
from bert_dp.examples.own import OwnData
from bert_dp.examples.store import Examples
from bert_dp.examples.table import Columns, Labelled, Row


@dataclasses.dataclass(frozen=True)
class Request:
    """What to prepare."""

    data: GlueData | OwnData
    tokenizer: Path
    length: int
    """Tokens of the longest example."""
    dev_share: float = 0.0
    """Of train that becomes dev, for choosing a rate; 0: dev is a file."""

    def __post_init__(self) -> None:
        if not MIN_LENGTH <= self.length <= MAX_LENGTH:
            raise ConfigError([f"--length {self.length}: expected {MIN_LENGTH} to {MAX_LENGTH} tokens"])
        if not 0 <= self.dev_share < 1:
            raise ConfigError([f"--dev-share {self.dev_share}: expected 0, or a share below 1"])
        if isinstance(self.data, OwnData) and not (self.dev_share or "dev" in self.data.files):
            raise ConfigError(["--dev: name the file to score on, or give --dev-share 0.1"])


def prepare(request: Request) -> Path:
    """The prepared directory of a request, built in the cache on first use.

    Safe when several processes call it at once: one builds, the others wait. Raises ConfigError.
    """
    if issues := record.cache_issues():
        raise ConfigError(issues)
    facts = {
        "format": format_of(ExamplesManifest),
        "data": request.data.identity(),
        "tokenizer": sources.file_hash(request.tokenizer),
        "length": request.length,
        "dev_share": request.dev_share,
    }
    directory = record.cache_root() / f"examples-{hash_json(facts)[:20]}"
    with locked(directory):
        with contextlib.suppress(ConfigError):
            _verified(directory)
            return directory
        with replaced(directory) as work:
            _build(request, work)
            if request.data.identity() != facts["data"]:
                raise ConfigError(["a file changed while it was read; run again"])
    return directory


def _verified(directory: Path) -> ExamplesManifest:
    """The manifest, checked against every file. Raises ConfigError."""
    manifest = read_examples(directory)
    for split in manifest.splits:
        Examples.open(directory, manifest, split)
    if sources.file_hash(directory / manifest.tokenizer.file) != manifest.tokenizer.sha256:
        raise ConfigError([f"{directory / manifest.tokenizer.file}: is not the tokenizer that was used"])
    return manifest


def _build(request: Request, work: Path) -> None:
    """Write the splits, tokenizer.json and examples.json into the directory `work`."""
    encoder = Encoder.load(request.tokenizer, request.length)
    labelled = request.data.read(train_only=request.dev_share > 0)
    if request.dev_share:
        labelled = _with_drawn_dev(labelled, request.dev_share)
    train_keys = {_key(row) for row in labelled.tables[TRAIN].rows}
    splits = {split: _write_split(work, split, labelled, encoder, train_keys) for split in labelled.tables}
    if bare := [name for name, split in splits.items() if split["without_tokens"] == split["examples"]]:
        raise ConfigError(
            [
                f"{labelled.tables[name].name}: {request.tokenizer} keeps no token of its texts; finetune a "
                "run whose tokenizer knows them"
                for name in bare
            ]
        )
    shutil.copyfile(request.tokenizer, work / "tokenizer.json")
    content = {
        "task": labelled.task,
        "kind": labelled.kind,
        "labels": list(labelled.labels),
        "metrics": list(labelled.metrics),
        "sequence_length": request.length,
        "vocab_size": tokens.size(encoder.tokenizer),
        "special_tokens": {role: encoder.special[role] for role in ("pad", "cls", "sep")},
        "tokenizer": {"file": "tokenizer.json", "sha256": sources.file_hash(work / "tokenizer.json")},
        "splits": splits,
        "official": labelled.official,
        "rows": labelled.rows,
        "dev_share": request.dev_share,
        "sources": [
            {"name": name, "sha256": sha256}
            for name, sha256 in sorted({(table.name, table.sha256) for table in labelled.tables.values()})
        ],
    }
    record.write_json(work / ExamplesManifest.file_name, with_hash(ExamplesManifest, content))


def _write_split(
    work: Path, split: str, labelled: Labelled, encoder: Encoder, train_keys: set[int]
) -> dict[str, Any]:
    """Write the file of a split; returns its entry in the manifest."""
    table = labelled.tables[split]
    encoded = encoder.encode([row.texts for row in table.rows])
    has_labels = table.rows[0].label is not None
    labels = to_array(labelled.kind, labelled.labels, table) if has_labels else None
    file = f"{split}.safetensors"
    return {
        "file": file,
        "sha256": Examples(encoded.ids, encoded.offsets, labels).save(work / file),
        "examples": len(table.rows),
        "tokens": len(encoded.ids),
        "truncated": encoded.truncated,
        "has_labels": has_labels,
        "in_train": None if split == TRAIN else sum(_key(row) in train_keys for row in table.rows),
        "left_out": table.left_out,
        "letters": encoded.letters,
        "lost_letters": encoded.lost_letters,
        "without_tokens": len(encoded.textless),
        "first_without_tokens": next((table.rows[i].place for i in encoded.textless), None),
    }


def _key(row: Row) -> int:
    """64-bit hash of an example's texts: the same for texts that differ in case and white space only."""
    return document_key("\0".join(" ".join(text.split()) for text in row.texts), seed=0)


def _with_drawn_dev(labelled: Labelled, share: float) -> Labelled:
    """Train alone, of which a share, drawn by the hash of each row's texts, is dev. Raises ConfigError."""
    whole = labelled.tables[TRAIN]
    rows: dict[str, list[Row]] = {TRAIN: [], "dev": []}
    for row in whole.rows:
        rows["dev" if _key(row) < int(share * 2**64) else TRAIN].append(row)
    if empty := [split for split, part in rows.items() if not part]:
        raise ConfigError([f"--dev-share {share}: leaves {empty[0]} no example of {len(whole.rows)}"])
    parts = {split: dataclasses.replace(whole, rows=part) for split, part in rows.items()}
    official = None if labelled.official is None else False
    return dataclasses.replace(labelled, tables=parts, official=official)


def summary(manifest: ExamplesManifest) -> str:
    """What a prepared directory holds, in one line."""
    parts = []
    for name, split in manifest.splits.items():
        rows, share = f"{split.examples:,}", split.truncated / split.examples
        if manifest.official is False and manifest.rows.get(name, split.examples) != split.examples:
            rows += f" of GLUE's {manifest.rows[name]:,}"
        notes = [f"{split.tokens:,} tokens", f"{share:.1%} truncated to {manifest.sequence_length}"]
        if split.in_train:
            notes.append(f"{split.in_train:,} also in train")
        if split.left_out:
            notes.append(f"{split.left_out:,} broken rows left out")
        if split.without_tokens:
            notes.append(f"{split.without_tokens:,} with a text without a token")
        parts.append(f"{name} {rows} examples ({', '.join(notes)})")
    counts = {None: "", True: "; GLUE's own numbers of rows", False: "; a subset, no GLUE score"}
    return f"{manifest.task}: {', '.join(parts)}{counts[manifest.official]}"


def main(argv: Sequence[str] | None = None) -> int:
    """`prepare`: the prepared directory to stdout. `missing`: what GLUE's tasks lack, as JSON. Returns the
    exit code: 0, 2 for bad input, 1 for a failure, 128 + signal."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.examples", description="labelled texts to ids")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("missing")
    verb.add_argument("--data", type=Path, action="append", required=True, help="folder or tar of GLUE's")
    verb = verbs.add_parser("prepare")
    verb.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the pretrained run")
    verb.add_argument("--length", type=int, required=True, help="tokens of the longest example")
    verb.add_argument("--task", help="one of GLUE's")
    verb.add_argument("--data", type=Path, action="append", default=[], help="folder or tar of GLUE's files")
    for split in ("train", "dev", "test"):
        verb.add_argument(f"--{split}", help="CSV, TSV, JSONL, Parquet or hub:NAME[:CONFIG]")
    verb.add_argument("--text", help="column of the text (text)")
    verb.add_argument("--text-pair", help="column of the second text (text_pair, where there is one)")
    verb.add_argument("--label", help="column of the label (label)")
    verb.add_argument("--kind", choices=get_args(LabelKind), help="of the labels (single_label)")
    verb.add_argument("--dev-share", type=float, default=0.0, help="of train that becomes dev")
    arguments = parser.parse_args(argv)
    return run_command(functools.partial(_answer, arguments))


def _answer(arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.verb == "missing":
        return json.dumps(missing(arguments.data)), 0
    record.keep_private()
    request = Request(_data(arguments), arguments.tokenizer, arguments.length, arguments.dev_share)
    directory = prepare(request)
    sys.stderr.write(record.printable(f"{summary(read_examples(directory))}\n"))
    return str(directory), 0


def _data(arguments: argparse.Namespace) -> GlueData | OwnData:
    """Raises ConfigError where not exactly one of a task and a file is named, or an option has no effect."""
    files = {split: getattr(arguments, split) for split in ("train", "dev", "test")}
    files = {split: name for split, name in files.items() if name is not None}
    own_options = {
        name: getattr(arguments, name.replace("-", "_")) for name in ("text", "text-pair", "label", "kind")
    }
    if arguments.task is not None and not files:
        if idle := [name for name, value in own_options.items() if value is not None]:
            raise ConfigError(
                [f"--{idle[0]}: has no effect with --task, whose files GLUE defines; leave it out"]
            )
        return GlueData(arguments.task, tuple(arguments.data))
    if arguments.task is None and TRAIN in files and not arguments.data:
        pair = () if arguments.text_pair is None else (arguments.text_pair,)
        columns = Columns((arguments.text or "text", *pair), arguments.label or "label")
        by_name = arguments.text is None and not pair
        return OwnData(files, columns, arguments.kind, finds_pair=by_name)
    raise ConfigError(["name either --task with --data, or --train with --dev"])
