"""Directories that `bert-dp export` makes: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from bert_dp import checkpoint, record
from bert_dp.config import Config, ConfigError, native_class
from bert_dp.export import foreign
from bert_dp.export.card import card, tokenizer_files
from bert_dp.export.hf import settings_of, tensors_of
from bert_dp.export.whole import OUTPUTS, Source
from bert_dp.record.exported import EXPORTED, Exported, ExportFormat


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that gets its name at the end. Raises ConfigError where there is one with files in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"--out: {out} is not an empty directory; name a new one"])
    try:
        place = tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise ConfigError(
            [f"--out: {out.parent} cannot be written ({error.strerror}); name a directory elsewhere"]
        ) from None
    with place as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        yield folder
        folder.rename(out)


def write_about(
    folder: Path, source: Source, form: ExportFormat, command: str, scores: str = "", **facts: Any
) -> None:
    """What every format has beside its model: tokenizer, export.json, README.md. `command` and `scores`: of
    the card; `facts`: of Exported."""
    exported = Exported(
        format=form,
        kind=source.kind,
        run=source.run_name,
        weights_sha256=checkpoint.weights_hash(source.checkpoint),
        step=source.facts.step,
        sequence_length=source.config.data.sequence_length,
        vocab_size=source.config.model.vocab_size,
        parameters=sum(p.numel() for p in source.model.parameters()),
        pad=source.special["pad"],
        finetune=source.config.finetune if source.kind == "classifier" else None,
        **facts,
    )
    shutil.copyfile(source.tokenizer_file, folder / checkpoint.TOKENIZER)
    record.write_json(folder / "tokenizer_config.json", tokenizer_files(source))
    record.write_json(folder / EXPORTED, exported.model_dump(mode="json"))
    auto = foreign.AUTO.get(source.kind, "AutoModel")
    output = OUTPUTS[source.kind][0]
    record.write_text(folder / "README.md", card(exported, source, command, scores, auto, output))


def write_hf(source: Source, folder: Path, command: str, scores: str = "") -> None:
    """What transformers' Auto classes load without code of ours. Raises ConfigError where none holds it."""
    how = (source.config, source.special, source.kind)
    save_file(tensors_of(source.model, *how), folder / "model.safetensors", metadata={"format": "pt"})
    record.write_json(folder / "config.json", settings_of(*how))
    if source.kind == "encoder":
        write_sentences(source.config, folder)
    write_about(folder, source, "hf", command, scores, architecture=native_class(source.config.model))


def write_sentences(config: Config, folder: Path) -> None:
    """What makes FOLDER one of sentence-transformers: an encoder, then the mean over the tokens."""
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": config.model.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    length = {"max_seq_length": config.data.sequence_length, "do_lower_case": False}
    record.write_json(folder / "modules.json", listed)
    record.write_json(folder / "1_Pooling" / "config.json", pooling)
    record.write_json(folder / "sentence_bert_config.json", length)
