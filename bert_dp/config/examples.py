"""Read examples.json of a prepared directory of labelled examples and compare it with a configuration."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from bert_dp.config.errors import Count, Issue, Sha256, StoredModel
from bert_dp.config.manifest import (
    WARNED_LOSS,
    BaseName,
    HashedFile,
    Manifest,
    TokenizerFile,
    lost_words,
    read_hashed,
    read_manifest,
)
from bert_dp.config.schema import MAX_VOCAB_SIZE, Config, LabelKind

MIN_LENGTH, MAX_LENGTH = 8, 8192  # tokens of an example
MAX_LABELS = 1000
TRAIN = "train"

Metric = Literal["mcc", "accuracy", "f1", "auc", "pearson", "spearman"]
Share = Annotated[float, Field(ge=0, lt=1)]


class ExampleSplit(StoredModel):
    """Describe one file of examples. Its tokens include <cls> and <sep>."""

    source: str
    """File that the examples were read from; of an archive its member."""
    source_sha256: Sha256
    file: BaseName
    sha256: Sha256
    examples: int = Field(ge=1, lt=2**63)
    tokens: Count
    truncated: Count
    """Examples that were longer than the sequence length."""
    has_labels: bool
    in_train: Count | None
    """Examples whose texts, but for case and white space, also stand in train; null of train itself."""
    baseline: dict[Metric, float | None] | None
    """Scores of a constant answer, the most frequent label or the mean score of train. None of train itself
    and of a split without labels; a score is None where the metric is not defined for a constant."""
    left_out: Count
    """Broken rows of the file."""
    letters: Count
    lost_letters: Count
    """Letters that the tokenizer drops, or that are part of unknown tokens."""
    without_tokens: Count
    """Examples with a text of which the tokenizer keeps nothing; of a pair one such text is enough."""
    first_without_tokens: str | None
    """Place of the first of them in its file, as in "line 7"."""


class SpecialTokens(StoredModel):
    """Hold the ids of the tokens that frame an example."""

    pad: Count
    cls: Count
    sep: Count


class ExamplesManifest(HashedFile):
    """Describe a prepared directory of examples."""

    file_name: ClassVar[str] = "examples.json"
    hint: ClassVar[str] = "prepare it again with `bert-dp finetune`"
    format: Literal["bert-dp-examples"]
    version: Literal[3]
    task: str = Field(min_length=1, max_length=64)
    """GLUE's name, as in "RTE", or "own"."""
    kind: LabelKind
    labels: list[str] = Field(max_length=MAX_LABELS)
    """Names in the order of the model's outputs; empty of a regression."""
    metrics: list[Metric] = Field(min_length=1)
    """The first is the one that a search goes by."""
    sequence_length: int = Field(ge=MIN_LENGTH, le=MAX_LENGTH)
    """No example has more tokens; longer ones were truncated."""
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    special_tokens: SpecialTokens
    tokenizer: TokenizerFile
    splits: dict[BaseName, ExampleSplit]
    official: bool | None
    """Whether every split has GLUE's own number of rows; null where the task is none of GLUE's."""
    rows: dict[str, Count]
    """GLUE's own number of rows by split."""
    dev_share: Share
    """Of train that became dev; 0 where dev is a file."""
    hash: Sha256

    @property
    def num_samples(self) -> int:
        """Return the number of examples of one epoch."""
        return self.splits[TRAIN].examples

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ExamplesManifest:
        least = {"single_label": 2, "multi_label": 1, "regression": 0}[self.kind]
        names, beyond = self.labels, [id for _, id in self.special_tokens if id >= self.vocab_size]
        if TRAIN not in self.splits:
            raise ValueError("splits: no train")
        if len(set(names)) < max(least, len(names)) or (self.kind == "regression" and names):
            raise ValueError(f"labels: {len(names)} do not fit {self.kind}, or one stands twice")
        if beyond:
            raise ValueError(f"special_tokens: {beyond[0]} is not below vocab_size {self.vocab_size}")
        for name, split in self.splits.items():
            if not 2 * split.examples <= split.tokens <= self.sequence_length * split.examples:
                raise ValueError(f"splits.{name}.tokens: {split.tokens} of {split.examples} examples")
        return self

    def issues(self, config: Config) -> list[Issue]:
        """Return the settings that conflict with the examples."""
        directory, issues = str(config.data.path), []
        if self.sequence_length > (length := config.data.sequence_length):
            message = f"{length}, but {directory} holds examples of up to {self.sequence_length} tokens"
            fix = f"set data.sequence_length={self.sequence_length}"
            issues.append(Issue("data.sequence_length", "conflict", message, length, directory, fix))
        if self.vocab_size > (size := config.model.vocab_size):
            message = f"{size} is below the tokenizer's {self.vocab_size} in {directory}"
            fix = "finetune a run that was trained with this tokenizer"
            issues.append(Issue("model.vocab_size", "conflict", message, size, directory, fix))
        for name, value in (("kind", self.kind), ("labels", tuple(self.labels))):
            if (setting := getattr(config.finetune, name)) != value:
                message, fix = f"{setting}, but {directory} has {value}", "set it so"
                issues.append(Issue(f"finetune.{name}", "conflict", message, setting, directory, fix))
        return issues

    def warnings(self, config: Config) -> list[str]:
        """List what fits the configuration but is probably not intended; one line each."""
        warnings = [
            f"{name}: {split.without_tokens:,} of {split.examples:,} examples have a text without a token "
            f"(first: {split.first_without_tokens}); drop them, or finetune a run whose tokenizer knows them"
            for name, split in self.splits.items()
            if split.without_tokens
        ]
        warnings += [
            f"{name}: {lost_words(split.lost_letters, split.letters)}; finetune a run whose tokenizer knows "
            "them"
            for name, split in self.splits.items()
            if split.lost_letters > WARNED_LOSS * split.letters
        ]
        spellings: dict[str, list[str]] = {}
        for label in self.labels:
            spellings.setdefault(_folded(label), []).append(label)
        for names in spellings.values():
            if len(names) > 1:
                # escapes where the names may look the same
                show = repr if len({name.casefold() for name in names}) == 1 else ascii
                warnings.append(
                    f"labels {' and '.join(map(show, names))} differ in case, white space or spelling alone "
                    f"and count as {len(names)} labels"
                )
        return warnings


def _folded(label: str) -> str:
    """Return the form that spellings of one label share: without case, white space, invisible characters and
    the Unicode form of an accent, and of a whole number without a plus sign and leading zeros."""
    text = unicodedata.normalize("NFKC", label).casefold()
    text = " ".join("".join(c for c in text if unicodedata.category(c) != "Cf").split())
    return str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else text


def read_examples(directory: Path) -> ExamplesManifest:
    """Read and check examples.json of a prepared directory, a run or a checkpoint. Raises ConfigError."""
    return read_hashed(directory, ExamplesManifest)


def read_data(config: Config, directory: Path) -> Manifest | ExamplesManifest:
    """Read the manifest of the kind of data that the objective takes. Raises ConfigError."""
    return read_examples(directory) if config.objective.name == "finetune" else read_manifest(directory)
