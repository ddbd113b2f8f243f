"""Load a model for use, from a run or a checkpoint, with its tokenizer."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tokenizers import Tokenizer

from bert_dp import checkpoint, record
from bert_dp.classifier import Classifier
from bert_dp.config import Config, ConfigError, resolve
from bert_dp.corpus import tokenizer
from bert_dp.model import CrammedBert


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """A model for use, on the CPU and in eval mode, with what its checkpoint says of it."""

    path: Path
    facts: record.CheckpointFacts
    config: Config
    model: CrammedBert | Classifier
    tokenizer: Tokenizer


def load(run: str | os.PathLike[str]) -> tuple[CrammedBert | Classifier, Tokenizer]:
    """Load the model, on the CPU and in eval mode, and the tokenizer of a run (a Run, its directory: the
    newest good checkpoint) or of one checkpoint's directory.

    `model.model(ids_BS)` gives the hidden states [B, S, H], `model(ids_BS, positions_P)` of a pretrained run
    the logits [P, V] at the flat positions b * S + s, `model(ids_BS, real_BS)` of a finetuned one those of
    whole examples [B, L]; S is at most the run's data.sequence_length. Models are pretrained on text without
    <cls>, where a <sep> ends each document: encode with `add_special_tokens=False`. An example of finetuning
    is <cls> A <sep> or <cls> A <sep> B <sep>.

    Raises ConfigError.
    """
    loaded = load_checkpoint(checkpoint.resolve(os.path.expanduser(run)))
    return loaded.model, loaded.tokenizer


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Load the model and the tokenizer of a checkpoint that `checkpoint.resolve` has verified. Raises
    ConfigError."""
    state, facts = checkpoint.load(path)
    config = resolve([facts.config])
    model = make_model(config)
    model.to(next(iter(state["model"].values())).dtype)
    state["optimizer"] = {}  # half of the memory, and of no use here
    if issues := checkpoint.state_issues(path, state, model):
        raise ConfigError(issues)
    model.load_state_dict(state["model"])
    return LoadedCheckpoint(path, facts, config, model.eval(), tokenizer.load(record.tokenizer_of(path)))


def make_model(config: Config) -> CrammedBert | Classifier:
    """Build the model that a run of `config` trains, with weights of any value."""
    length = config.data.sequence_length
    if config.objective.name == "finetune":
        return Classifier(config.model, length, config.finetune)
    return CrammedBert(config.model, length)
