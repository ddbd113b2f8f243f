"""Write the directories of `bert-dp export`: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, native_class
from bert_dp.config.errors import sha256
from bert_dp.data import tokenizer as tokens
from bert_dp.data.build import locked, replaced
from bert_dp.exporting.hf import card, settings_of, tensors_of
from bert_dp.exporting.traced import ExportSource, require_tools, write_aoti, write_onnx
from bert_dp.files.run_facts import EXPORTED, Exported, ExportFormat, ExportPrecision


def export(
    source: ExportSource, form: ExportFormat, out: Path, *, command: str, precision: ExportPrecision = "fp32"
) -> Exported:
    """Write a run to the new directory `out`. `command`: for the model card.

    Raises ConfigError if `out` holds something, the format does not hold the model, or a package is missing.
    """
    require_tools(form)  # a signal during such an import may end this process before it can clean up
    with new_directory(out) as folder:
        if form == "hf":
            write_hf(source, folder)
        elif form == "onnx":
            write_onnx(source, folder, int8=precision == "int8")
        else:
            write_aoti(source, folder, bf16=precision == "bf16")
        return write_about(folder, source, form, command, precision)


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Make a directory that gets its name at the end. Raises ConfigError if `out` holds something."""
    with locked(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            message, hint = f"{out} is not an empty directory", "name a new one"
            raise ConfigError([Issue("--out", "exists", message, str(out), hint=hint)])
        with replaced(out) as folder:
            yield folder


def describe(source: ExportSource, form: ExportFormat, precision: ExportPrecision = "fp32") -> Exported:
    """Return export.json of a directory that is made of `source`."""
    return Exported(
        format=form,
        kind=source.kind,
        architecture=native_class(source.config.model) if form == "hf" else None,
        precision=precision,
        run=source.run_name,
        weights_sha256=files.weights_hash(source.path),
        step=source.facts.step,
        tokenizer_sha256=sha256(source.tokenizer_file),
        sequence_length=source.config.data.sequence_length,
        vocab_size=source.config.model.vocab_size,
        parameters=sum(p.numel() for p in source.model.parameters()),
        pad=source.special["pad"],
        finetune=source.config.finetune if source.kind == "classifier" else None,
    )


def write_about(
    folder: Path, source: ExportSource, form: ExportFormat, command: str, precision: ExportPrecision = "fp32"
) -> Exported:
    """Write what every format has beside its model: tokenizer, export.json, README.md."""
    exported = describe(source, form, precision)
    framed = tokens.framing_as_trained(source.tokenizer_file, source.special)
    if framed is None:
        shutil.copyfile(source.tokenizer_file, folder / files.TOKENIZER)
    else:
        files.write_text(folder / files.TOKENIZER, framed.to_str(pretty=True))
    files.write_json(folder / "tokenizer_config.json", tokenizer_settings(source))
    files.write_json(folder / EXPORTED, exported.model_dump(mode="json"))
    files.write_text(folder / "README.md", card(exported, source, command))
    return exported


def tokenizer_settings(source: ExportSource) -> dict[str, Any]:
    """Return tokenizer_config.json as PreTrainedTokenizerFast reads it, beside tokenizer.json."""
    roles = {f"{role}_token": source.tokenizer.id_to_token(i) for role, i in source.special.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.data.sequence_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **roles,
    }


def write_hf(source: ExportSource, folder: Path) -> None:
    """Write what transformers' Auto classes load without code of ours. Raises ConfigError if none holds the
    model."""
    layout = (source.config, source.special, source.kind)
    files.write_json(folder / "config.json", settings_of(*layout))
    save_file(tensors_of(source.model, *layout), folder / "model.safetensors", metadata={"format": "pt"})
    if source.kind == "encoder":
        write_sentence_transformer(source.config, folder)


def write_sentence_transformer(config: Config, folder: Path) -> None:
    """Write the files that make an encoder one of sentence-transformers: the mean over its tokens."""
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
    files.write_json(folder / "modules.json", modules)
    files.write_json(folder / "1_Pooling" / "config.json", pooling)
    files.write_json(folder / "sentence_bert_config.json", length)
