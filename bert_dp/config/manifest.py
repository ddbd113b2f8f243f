"""Read manifest.json of shards and examples.json of labelled examples; compare them with a configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from bert_dp.config.errors import (
    MAX_JSON_BYTES,
    ConfigError,
    Count,
    Issue,
    IssueKind,
    Sha256,
    StoredModel,
    read_regular,
    refusing,
    sha256,
)
from bert_dp.config.schema import MAX_VOCAB_SIZE, BuildConfig, Config, LabelKind

TOKEN_BYTES = 2

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=255)]
Hashed = TypeVar("Hashed", bound="HashedFile")

WARNED_LOSS, REFUSED_LOSS = 0.01, 0.2  # share of a source's letters that are lost, or of its unknown tokens
ANY_LANGUAGE = (
    "for text in any language set data.build.tokenizer_model=byte_bpe data.build.normalize=false "
    "data.build.max_tokens_per_char=0"
)
MIN_LENGTH, MAX_LENGTH = 8, 8192  # tokens of an example
MAX_LABELS = 1000
TRAIN = "train"

Metric = Literal["mcc", "accuracy", "f1", "auc", "pearson", "spearman"]
Share = Annotated[float, Field(ge=0, lt=1)]


class HashedFile(StoredModel):
    """Model a file that holds its own hash, its `format` and its `version`."""

    file_name: ClassVar[str]
    hint: ClassVar[str]
    """Command that makes another one."""


class Shard(StoredModel):
    """Describe one flat file of token ids."""

    file: BaseName
    sequences: int = Field(ge=1)
    bytes: Count
    sha256: Sha256


class Split(StoredModel):
    sequences: Count
    tokens: Count
    documents: Count
    shards: list[Shard]


class TokenizerFile(StoredModel):
    file: BaseName
    sha256: Sha256


class SourceFile(StoredModel):
    name: str
    bytes: Count
    sha256: str
    documents: Count
    letters: Count
    """Characters of Unicode category L in the documents, before any document is dropped."""
    lost_letters: Count
    """Letters of whose normal form no letter is left, and those in unknown tokens."""
    tokens: Count
    unknown_tokens: Count

    @property
    def lost_share(self) -> float:
        """Share of the letters that are lost."""
        return self.lost_letters / max(1, self.letters)

    @property
    def unknown_share(self) -> float:
        """Share of the tokens that are unknown."""
        return self.unknown_tokens / max(1, self.tokens)

    @property
    def loss(self) -> float:
        """Greater of the two shares."""
        return max(self.lost_share, self.unknown_share)

    def loss_words(self) -> str:
        """Name both shares."""
        lost = lost_words(self.lost_letters, self.letters)
        return f"{lost}, {self.unknown_share:.1%} of its tokens are unknown"


class BuildRecord(BuildConfig):
    """Hold what shards depend on beside their sources."""

    sequence_length: int | None = None
    vocab_size: int | None = None
    """Of the tokenizer to train, and the most that a given one may have."""
    tokenizer_sha256: str | None = None
    """Of the tokenizer that was given."""


class Manifest(HashedFile):
    """Describe a directory of shards. Entropies in nats per token."""

    file_name: ClassVar[str] = "manifest.json"
    hint: ClassVar[str] = "build it with `bert-dp data build`"
    format: Literal["bert-dp-shards"]
    version: Literal[3]
    sequence_length: int = Field(ge=1, le=8192)
    dtype: Literal["uint16"]
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    special_tokens: dict[str, Count]
    num_special: Count
    """Random replacements of a mask are drawn from the ids beyond these."""
    train: Split
    held_out: Split
    unigram_entropy_nats: float | None
    uniform_entropy_nats: float
    tokenizer: TokenizerFile
    sources: list[SourceFile]
    build: BuildRecord
    dropped: dict[str, Count] = {}  # noqa: RUF012 (pydantic copies a default)
    hash: Sha256

    @property
    def num_samples(self) -> int:
        """Return the sequences of one epoch."""
        return self.train.sequences

    @property
    def shards(self) -> Iterator[Shard]:
        """Yield the shards of both splits."""
        yield from self.train.shards
        yield from self.held_out.shards

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Manifest:
        issues = []
        if not (self.train.sequences and self.train.documents):
            issues.append("train: holds no sequences")
        for name, split in (("train", self.train), ("held_out", self.held_out)):
            sequences = sum(shard.sequences for shard in split.shards)
            if (split.sequences, split.tokens) != (sequences, sequences * self.sequence_length):
                issues.append(f"{name}: {split.sequences} sequences, its shards hold {sequences}")
        for shard in self.shards:
            size = shard.sequences * self.sequence_length * TOKEN_BYTES
            if shard.bytes != size:
                issues.append(f"{shard.file}: {shard.bytes} bytes, {shard.sequences} sequences take {size}")
        if "mask" not in self.special_tokens:
            issues.append("special_tokens: no mask")
        for name, number in {**self.special_tokens, "num_special": self.num_special}.items():
            if number >= self.vocab_size:
                issues.append(f"special_tokens: {name!a:.80}: {beyond(number, self.vocab_size)}")
        if issues:
            raise ValueError("; ".join(issues[:8]))
        return self

    def issues(self, config: Config) -> list[Issue]:
        """Find settings that do not fit the shards."""
        directory, issues = config.data.path or "the built shards", []
        if self.sequence_length != (given := config.data.sequence_length):
            message = f"{given}, but {directory} holds sequences of {self.sequence_length}"
            hint = f"set data.sequence_length={self.sequence_length} or build again"
            issues.append(Issue("data.sequence_length", "conflict", message, given, "data.path", hint))
        if self.vocab_size > (given := config.model.vocab_size):
            message = f"{given} is below the tokenizer's {self.vocab_size} in {directory}"
            hint = f"set model.vocab_size={self.vocab_size} or more"
            issues.append(Issue("model.vocab_size", "conflict", message, given, "data.path", hint))
        return issues

    def with_build(self, config: Config) -> Config:
        """Return the configuration with the settings that the shards were built with."""
        build = BuildConfig(**{name: getattr(self.build, name) for name in BuildConfig.model_fields})
        return config.model_copy(update={"data": config.data.model_copy(update={"build": build})})

    def warnings(self, config: Config) -> list[str]:
        """Describe settings that fit the shards but are probably not intended; one line each."""
        default = BuildConfig()
        warnings = [
            f"data.build.{name}: {value} has no effect, {config.data.path} was built with {was}"
            for name, value in config.data.build
            if config.data.path and value not in ((was := getattr(self.build, name)), getattr(default, name))
        ]
        vocabulary, rows = self.vocab_size, config.model.vocab_size
        if rows > -(-vocabulary // 128) * 128:  # a vocabulary may be padded for the device's sake
            excess = f"{rows} is {rows / vocabulary:.1f} x the {vocabulary} tokens of the shards' vocabulary"
            effect = f"the rest of the embedding is never trained; set model.vocab_size={vocabulary}"
            warnings.append(f"model.vocab_size: {excess}; {effect}")
        sequences, batch = self.train.sequences, config.batch.global_size
        if batch > sequences:
            excess = f"{batch} is {batch / sequences:.1f} x the {sequences} training sequences"
            effect = "every step repeats them; lower it, or give more text"
            warnings.append(f"batch.global_size: {excess}, so {effect}")
        return warnings


def lost_words(lost: int, letters: int) -> str:
    """Name the share of a source's letters that the tokenizer loses."""
    return f"{lost / max(1, letters):.1%} of its letters are lost ({lost:,} of {letters:,})"


def loss_warnings(sources: Sequence[SourceFile]) -> list[str]:
    """Name the five worst of the sources that lose more than WARNED_LOSS, the worst first."""
    worst = sorted((s for s in sources if s.loss > WARNED_LOSS), key=lambda s: -s.loss)
    return [f"{source.name}: {source.loss_words()}; {ANY_LANGUAGE}" for source in worst[:5]]


def beyond(token: int, vocab_size: int) -> str:
    """Describe a token id that the vocabulary does not have."""
    return f"token id {token}, but the vocabulary has {vocab_size}"


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json and check its format, version, own hash and content, the tokenizer's hash, and every
    shard's size on disk. No token is read.

    Raises ConfigError naming the file, what was expected and what was found.
    """
    manifest = read_hashed(directory, Manifest)
    issues = []
    expectations: list[tuple[str, int | str]] = [(shard.file, shard.bytes) for shard in manifest.shards]
    for name, expected in (*expectations, (manifest.tokenizer.file, manifest.tokenizer.sha256)):
        file = directory / name
        actual: int | str = "no such file"
        try:
            if file.is_file():
                actual = file.stat().st_size if isinstance(expected, int) else sha256(file)
        except OSError as error:
            actual = str(error.strerror)
        if actual != expected:
            kind: IssueKind = "damaged" if file.is_file() else "not_found"
            unit = "bytes" if isinstance(expected, int) else "as SHA-256"
            message = f"expected {expected!s:.16} {unit}, found {actual!s:.16}"
            issues.append(Issue(str(file), kind, message, actual, Manifest.file_name, Manifest.hint))
    if issues:
        raise ConfigError(issues)
    return manifest


def read_hashed(directory: Path, model: type[Hashed]) -> Hashed:
    """Read the file of this model in a directory; check its format, version, hash and content. Raises
    ConfigError with what was expected and what was found."""
    path = directory / model.file_name
    with refusing(str(path), hint=model.hint):
        content = json.loads(read_regular(path, MAX_JSON_BYTES))
        if not isinstance(content, dict):
            raise ValueError("is not a JSON object")
        format, version = format_of(model)
        if (content.get("format"), content.get("version")) != (format, version):
            other = f"{content.get('format')!r:.40} version {content.get('version')!r:.40}"
            message = f"expected {format!r} version {version}, found {other}"
            raise ConfigError([Issue(str(path), "unsupported", message, hint=model.hint)])
        expected, actual = content.get("hash"), manifest_hash(content)
        if expected != actual:
            raise ValueError(f"expected hash {str(expected)[:16]}, found {actual[:16]}: edited or torn")
        return model.model_validate(content)


def format_of(model: type[HashedFile]) -> list[Any]:
    """Return [format, version] of a file of this model."""
    return [get_args(model.model_fields[name].annotation)[0] for name in ("format", "version")]


def with_hash(model: type[HashedFile], content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file of this model: `content` with format, version and hash."""
    format, version = format_of(model)
    whole = {"format": format, "version": version, **content}
    return {**whole, "hash": hash_json(whole)}


def hash_json(data: Any) -> str:
    """Return the hex SHA-256 of JSON values, regardless of the order of their keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the hex SHA-256 of everything in a manifest but its hash."""
    return hash_json({k: v for k, v in manifest.items() if k != "hash"})


class ExampleSplit(StoredModel):
    """Describe one file of examples. Its tokens include <cls> and <sep>."""

    source: str
    """File that the examples were read from; of an archive its member."""
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
    copies: Count = 0
    """Last examples, which are changed copies of others: their labels are not their own."""


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
    version: Literal[4]
    task: str = Field(min_length=1, max_length=64)
    """GLUE's name, as in "RTE", or "own"."""
    kind: LabelKind
    labels: list[str] = Field(max_length=MAX_LABELS)
    """Names in the order of the model's outputs; empty of a regression."""
    pair: bool = False
    """An example is two texts."""
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
        names, too_large = self.labels, [id for _, id in self.special_tokens if id >= self.vocab_size]
        if TRAIN not in self.splits:
            raise ValueError("splits: no train")
        if len(set(names)) < max(least, len(names)) or (self.kind == "regression" and names):
            raise ValueError(f"labels: {len(names)} do not fit {self.kind}, or one stands twice")
        if too_large:
            raise ValueError(f"special_tokens: {beyond(too_large[0], self.vocab_size)}")
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
        for name, value in (("kind", self.kind), ("labels", tuple(self.labels)), ("pair", self.pair)):
            if (setting := getattr(config.finetune, name)) != value:
                message, fix = f"{setting}, but {directory} has {value}", "set it so"
                issues.append(Issue(f"finetune.{name}", "conflict", message, setting, directory, fix))
        return issues

    def warnings(self, config: Config) -> list[str]:
        """List what fits the configuration but is probably not intended; one line each."""
        warnings, fix = [], "finetune a run whose tokenizer knows them"
        for name, split in self.splits.items():
            if split.without_tokens:
                count = f"{split.without_tokens:,} of {split.examples:,} examples"
                warnings.append(f"{name}: {count} have a text without a token; drop them, or {fix}")
            if split.lost_letters > WARNED_LOSS * split.letters:
                warnings.append(f"{name}: {lost_words(split.lost_letters, split.letters)}; {fix}")
        spellings: dict[str, list[str]] = {}
        for label in self.labels:
            spellings.setdefault(" ".join(label.casefold().split()), []).append(label)
        warnings += [
            f"labels {' and '.join(map(ascii, names))} differ in case or white space alone and count as "
            f"{len(names)} labels"
            for names in spellings.values()
            if len(names) > 1
        ]
        return warnings


def read_examples(directory: Path) -> ExamplesManifest:
    """Read and check examples.json of a prepared directory, a run or a checkpoint. Raises ConfigError."""
    return read_hashed(directory, ExamplesManifest)


def read_data(config: Config, directory: Path) -> Manifest | ExamplesManifest:
    """Read the manifest of the kind of data that the objective takes. Raises ConfigError."""
    return read_examples(directory) if config.has_examples else read_manifest(directory)
