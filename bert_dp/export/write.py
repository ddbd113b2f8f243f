"""Directories that `bert-dp export` makes: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from bert_dp import record
from bert_dp.config import Config, ConfigError, native_class
from bert_dp.config.stored import sha256
from bert_dp.corpus import tokenizer as tokens
from bert_dp.corpus.atomic_directory import locked, replaced
from bert_dp.export.as_function import Source
from bert_dp.export.card import card, tokenizer_files
from bert_dp.export.hf import settings_of, tensors_of
from bert_dp.record.exported import EXPORTED, Exported, ExportFormat, ExportPrecision


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that gets its name at the end. Raises ConfigError for a mount point, and where there is one
    with files in it."""
    with locked(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError([f"--out: {out} is not an empty directory; name a new one"])
        with replaced(out) as folder:
            yield folder


def describe(source: Source, form: ExportFormat, precision: ExportPrecision = "fp32") -> Exported:
    """export.json of a directory that is made of `source`."""
    return Exported(
        format=form,
        kind=source.kind,
        architecture=native_class(source.config.model) if form == "hf" else None,
        precision=precision,
        run=source.run_name,
        weights_sha256=record.weights_hash(source.checkpoint),
        step=source.facts.step,
        tokenizer_sha256=sha256(source.tokenizer_file),
        sequence_length=source.config.data.sequence_length,
        vocab_size=source.config.model.vocab_size,
        parameters=sum(p.numel() for p in source.model.parameters()),
        pad=source.special["pad"],
        finetune=source.config.finetune if source.kind == "classifier" else None,
    )


def write_about(
    folder: Path, source: Source, form: ExportFormat, command: str, precision: ExportPrecision = "fp32"
) -> None:
    """What every format has beside its model: tokenizer, export.json, README.md. `command` stands in the
    model card."""
    exported = describe(source, form, precision)
    framed = tokens.framing_as_trained(source.tokenizer_file, source.special)
    if framed is None:
        shutil.copyfile(source.tokenizer_file, folder / record.TOKENIZER)
    else:
        record.write_text(folder / record.TOKENIZER, framed.to_str(pretty=True))
    record.write_json(folder / "tokenizer_config.json", tokenizer_files(source))
    record.write_json(folder / EXPORTED, exported.model_dump(mode="json"))
    record.write_text(folder / "README.md", card(exported, source, command))


def write_hf(source: Source, folder: Path) -> None:
    """What transformers' Auto classes load without code of ours. Raises ConfigError where none holds it."""
    layout = (source.config, source.special, source.kind)
    save_file(tensors_of(source.model, *layout), folder / "model.safetensors", metadata={"format": "pt"})
    record.write_json(folder / "config.json", settings_of(*layout))
    if source.kind == "encoder":
        write_sentences(source.config, folder)


def write_sentences(config: Config, folder: Path) -> None:
    """What makes FOLDER one of sentence-transformers: an encoder, then the mean over the tokens."""
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
    ]
    pooling = {
        "word_embedding_dimension": config.model.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    length = {"max_seq_length": config.data.sequence_length, "do_lower_case": False}
    (folder / "1_Pooling").mkdir()
    record.write_json(folder / "modules.json", modules)
    record.write_json(folder / "1_Pooling" / "config.json", pooling)
    record.write_json(folder / "sentence_bert_config.json", length)
