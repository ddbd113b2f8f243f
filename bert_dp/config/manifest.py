"""Read manifest.json (shards) and examples.json (examples), and find settings that conflict with them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator

from bert_dp.config import errors
from bert_dp.config.errors import ConfigError, Count, Issue, IssueKind, Sha256, StoredModel
from bert_dp.config.schema import MAX_VOCAB_SIZE, BuildConfig, Config, LabelKind

TOKEN_BYTES = 2

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=255)]
Hashed = TypeVar("Hashed", bound="HashedFile")

WARNED_LOSS, REFUSED_LOSS = 0.01, 0.2  # SourceFile.loss above which a source causes a warning or an error
ANY_LANGUAGE = (
    "for text in any language, set data.build.tokenizer_model=byte_bpe data.build.normalize=false "
    "data.build.max_tokens_per_char=0"
)
MIN_LENGTH, MAX_LENGTH = 8, 8192  # tokens per example
MAX_LABELS = 1000
TRAIN = "train"

Metric = Literal["mcc", "accuracy", "f1", "auc", "pearson", "spearman"]
Share = Annotated[float, Field(ge=0, lt=1)]


class HashedFile(StoredModel):
    """Base model for a file that contains its `format`, its `version` and a hash of its contents."""

    file_name: ClassVar[str]
    hint: ClassVar[str]
    """Suggested fix for a damaged or missing file."""


class Shard(StoredModel):
    """Flat binary file of uint16 token ids."""

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
    """Number of characters of Unicode category L in all documents, including dropped documents."""
    lost_letters: Count
    """Number of letters that the normalizer drops or that are part of an unknown token."""
    tokens: Count
    unknown_tokens: Count

    @property
    def lost_share(self) -> float:
        """Return the share of letters that are lost."""
        return self.lost_letters / max(1, self.letters)

    @property
    def unknown_share(self) -> float:
        """Return the share of tokens that are unknown."""
        return self.unknown_tokens / max(1, self.tokens)

    @property
    def loss(self) -> float:
        """Return the larger of lost_share and unknown_share."""
        return max(self.lost_share, self.unknown_share)

    def loss_words(self) -> str:
        """Describe the shares of lost letters and unknown tokens."""
        lost = lost_words(self.lost_letters, self.letters)
        return f"{lost}, and {self.unknown_share:.1%} of its tokens are unknown"


class BuildRecord(BuildConfig):
    """Settings that, together with the sources, determine the shards."""

    sequence_length: int | None = None
    vocab_size: int | None = None
    """Maximum vocabulary size of the tokenizer, trained or given (model.vocab_size)."""
    tokenizer_sha256: str | None = None
    """Hash of the given tokenizer; null if the tokenizer was trained."""


class Manifest(HashedFile):
    """Contents of manifest.json for a directory of shards. Entropies are in nats per token."""

    file_name: ClassVar[str] = "manifest.json"
    hint: ClassVar[str] = "build it with `bert-dp data build`"
    format: Literal["bert-dp-shards"]
    version: Literal[3]
    sequence_length: int = Field(ge=1, le=8192)
    dtype: Literal["uint16"]
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    special_tokens: dict[str, Count]
    num_special: Count
    """Lowest id that masking inserts as a random token."""
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
        """Return the number of sequences per epoch."""
        return self.train.sequences

    @property
    def shards(self) -> Iterator[Shard]:
        """Yield the shards of both splits."""
        yield from self.train.shards
        yield from self.held_out.shards

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        issues = []
        if not (self.train.sequences and self.train.documents):
            issues.append("train: the number of sequences or documents is 0")
        for name, split in (("train", self.train), ("held_out", self.held_out)):
            sequences = sum(shard.sequences for shard in split.shards)
            if (split.sequences, split.tokens) != (sequences, sequences * self.sequence_length):
                stated = f"{split.sequences} sequences and {split.tokens} tokens"
                issues.append(f"{name}: {stated}, but its shards contain {sequences} sequences")
        for shard in self.shards:
            size = shard.sequences * self.sequence_length * TOKEN_BYTES
            if shard.bytes != size:
                issues.append(f"{shard.file}: {shard.bytes} bytes, expected {size}")
        if "mask" not in self.special_tokens:
            issues.append("special_tokens: mask is missing")
        for name, number in {**self.special_tokens, "num_special": self.num_special}.items():
            if number >= self.vocab_size:
                issues.append(f"special_tokens: {name!a:.80}: {beyond(number, self.vocab_size)}")
        if issues:
            raise ValueError("; ".join(issues[:8]))
        return self

    def issues(self, config: Config) -> list[Issue]:
        """Find settings that conflict with the shards."""
        directory, issues = config.data.path or "the built shards", []
        if self.sequence_length != (given := config.data.sequence_length):
            message = f"{given}, but {directory} contains sequences of {self.sequence_length} tokens"
            hint = f"set data.sequence_length={self.sequence_length} or rebuild the shards"
            issues.append(Issue("data.sequence_length", "conflict", message, given, "data.path", hint))
        if self.vocab_size > (given := config.model.vocab_size):
            message = f"{given} is less than the {self.vocab_size} tokens of the vocabulary in {directory}"
            hint = f"set model.vocab_size to {self.vocab_size} or more"
            issues.append(Issue("model.vocab_size", "conflict", message, given, "data.path", hint))
        return issues

    def with_build(self, config: Config) -> Config:
        """Return the configuration with data.build replaced by the build settings of the shards."""
        build = BuildConfig(**{name: getattr(self.build, name) for name in BuildConfig.model_fields})
        return config.model_copy(update={"data": config.data.model_copy(update={"build": build})})

    def warnings(self, config: Config) -> list[str]:
        """Return a warning for each setting whose value is allowed but probably unintended."""
        default = BuildConfig()
        warnings = [
            f"data.build.{name}: {value} has no effect; {config.data.path} was built with {was}"
            for name, value in config.data.build
            if config.data.path and value not in ((was := getattr(self.build, name)), getattr(default, name))
        ]
        vocabulary, rows = self.vocab_size, config.model.vocab_size
        if rows > -(-vocabulary // 128) * 128:  # padding to a multiple of 128 rows makes kernels faster
            excess = f"{rows} is {rows / vocabulary:.1f} times the shards' vocabulary of {vocabulary} tokens"
            effect = f"no token uses the other embedding rows; set model.vocab_size={vocabulary}"
            warnings.append(f"model.vocab_size: {excess}; {effect}")
        sequences, batch = self.train.sequences, config.batch.global_size
        if batch > sequences:
            excess = f"{batch} is {batch / sequences:.1f} times the {sequences} training sequences"
            effect = "every step repeats sequences; use a smaller batch or more text"
            warnings.append(f"batch.global_size: {excess}, so {effect}")
        return warnings


def lost_words(lost: int, letters: int) -> str:
    """Describe the share and number of lost letters in a source, a split or a file."""
    return f"{lost / max(1, letters):.1%} of its letters are lost ({lost:,} of {letters:,})"


def loss_warnings(sources: Sequence[SourceFile]) -> list[str]:
    """Describe the sources whose `loss` exceeds WARNED_LOSS: at most five, worst first."""
    worst = sorted((s for s in sources if s.loss > WARNED_LOSS), key=lambda s: -s.loss)
    return [f"{source.name}: {source.loss_words()}; {ANY_LANGUAGE}" for source in worst[:5]]


def beyond(token: int, vocab_size: int) -> str:
    """Return the message for a token id outside the vocabulary."""
    return f"token id {token} is outside the vocabulary of {vocab_size} tokens"


def read_manifest(directory: Path) -> Manifest:
    """Read and check manifest.json. Also check the tokenizer's hash and the size of every shard, but not the
    tokens in the shards. Raises ConfigError with each faulty file's name and expected and actual values."""
    manifest = read_hashed(directory, Manifest)
    issues = []
    expectations: list[tuple[str, int | str]] = [(shard.file, shard.bytes) for shard in manifest.shards]
    for name, expected in (*expectations, (manifest.tokenizer.file, manifest.tokenizer.sha256)):
        file = directory / name
        actual: int | str = "no such file"
        try:
            if file.is_file():
                actual = file.stat().st_size if isinstance(expected, int) else errors.sha256(file)
        except OSError as error:
            actual = str(error.strerror)
        if actual != expected:
            kind: IssueKind = "damaged" if file.is_file() else "not_found"
            unit = "bytes" if isinstance(expected, int) else "(SHA-256)"
            message = f"expected {expected!s:.16} {unit}, found {actual!s:.16}"
            issues.append(Issue(str(file), kind, message, actual, Manifest.file_name, Manifest.hint))
    if issues:
        raise ConfigError(issues)
    return manifest


def read_hashed(directory: Path, model: type[Hashed]) -> Hashed:
    """Read `model.file_name` and check its format, version, hash and content. Raises ConfigError."""
    path = directory / model.file_name
    with errors.refusing(str(path), hint=model.hint):
        content = json.loads(errors.read_regular(path, errors.MAX_JSON_BYTES))
        if not isinstance(content, dict):
            raise ValueError("is not a JSON object")
        format, version = format_of(model)
        if (content.get("format"), content.get("version")) != (format, version):
            other = f"{content.get('format')!r:.40} version {content.get('version')!r:.40}"
            message = f"expected {format!r} version {version}, found {other}"
            raise ConfigError([Issue(str(path), "unsupported", message, hint=model.hint)])
        expected, actual = content.get("hash"), manifest_hash(content)
        if expected != actual:
            raise ValueError(f"edited or truncated: expected hash {str(expected)[:16]}, found {actual[:16]}")
        return model.model_validate(content)


def format_of(model: type[HashedFile]) -> list[Any]:
    """Return the [format, version] of the files that `model` describes."""
    return [get_args(model.model_fields[name].annotation)[0] for name in ("format", "version")]


def with_hash(model: type[HashedFile], content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` plus the format and version that `model` specifies, and a hash of all three."""
    format, version = format_of(model)
    whole = {"format": format, "version": version, **content}
    return {**whole, "hash": hash_json(whole)}


def hash_json(data: Any) -> str:
    """Return the hex SHA-256 of a JSON value. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the hex SHA-256 of a manifest without its `hash` key."""
    return hash_json({k: v for k, v in manifest.items() if k != "hash"})


class ExampleSplit(StoredModel):
    """One split of the examples, in one file. Token counts include <cls> and <sep>."""

    source: str
    """File, member of an archive, or hub data set from which the examples were read."""
    file: BaseName
    sha256: Sha256
    examples: int = Field(ge=1, lt=2**63)
    tokens: Count
    truncated: Count
    """Number of examples that were truncated to the sequence length."""
    has_labels: bool
    in_train: Count | None
    """Number of examples whose texts occur in train, ignoring case and white space; null for train itself."""
    baseline: dict[Metric, float | None] | None
    """Metrics of a model that always predicts the most frequent label or mean score of the train split; null
    for that split and for splits without labels. A metric is null if undefined for constant predictions."""
    left_out: Count
    """Number of rows that were skipped because they were invalid."""
    letters: Count
    lost_letters: Count
    """Number of letters that the normalizer drops or that are part of an unknown token."""
    without_tokens: Count
    """Number of examples in which at least one text has no tokens."""
    copies: Count = 0
    """Number of augmented copies, stored at the end of the split, each with the label of its original."""


class SpecialTokens(StoredModel):
    """Ids of the padding token, of the token that starts an example, and of the separator token."""

    pad: Count
    cls: Count
    sep: Count


class ExamplesManifest(HashedFile):
    """Contents of examples.json in a directory of prepared examples."""

    file_name: ClassVar[str] = "examples.json"
    hint: ClassVar[str] = "prepare it again with `bert-dp finetune`"
    format: Literal["bert-dp-examples"]
    version: Literal[4]
    task: str = Field(min_length=1, max_length=64)
    """Name of a GLUE task, such as "RTE"; "own" for other data."""
    kind: LabelKind
    labels: list[str] = Field(max_length=MAX_LABELS)
    """Label names in the order of the model's outputs; empty for regression."""
    pair: bool = False
    """True if each example consists of two texts."""
    metrics: list[Metric] = Field(min_length=1)
    """Metrics to compute. The first metric is used to rank the trials of a GLUE task."""
    sequence_length: int = Field(ge=MIN_LENGTH, le=MAX_LENGTH)
    """Maximum number of tokens per example; longer examples were truncated."""
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    special_tokens: SpecialTokens
    tokenizer: TokenizerFile
    splits: dict[BaseName, ExampleSplit]
    official: bool | None
    """True if every split has GLUE's official number of rows; null if the task is not from GLUE."""
    dev_share: Share
    """Share of the train split that was moved to the dev split; 0 if the dev split has its own file."""
    hash: Sha256

    @property
    def num_samples(self) -> int:
        """Return the number of examples per epoch."""
        return self.splits[TRAIN].examples

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        least = {"single_label": 2, "multi_label": 1, "regression": 0}[self.kind]
        names, too_large = self.labels, [id for _, id in self.special_tokens if id >= self.vocab_size]
        if TRAIN not in self.splits:
            raise ValueError("splits: train is missing")
        if len(set(names)) < max(least, len(names)) or (self.kind == "regression" and names):
            raise ValueError(f"labels: wrong number for {self.kind} ({len(names)}), or a label occurs twice")
        if too_large:
            raise ValueError(f"special_tokens: {beyond(too_large[0], self.vocab_size)}")
        for name, split in self.splits.items():
            if not 2 * split.examples <= split.tokens <= self.sequence_length * split.examples:
                fits = f"{split.examples} examples of 2 to {self.sequence_length} tokens"
                raise ValueError(f"splits.{name}.tokens: {split.tokens} is impossible for {fits}")
        return self

    def issues(self, config: Config) -> list[Issue]:
        """Find settings that conflict with the examples."""
        directory, issues = str(config.data.path), []
        if self.sequence_length > (length := config.data.sequence_length):
            message = f"{length}, but {directory} contains examples of up to {self.sequence_length} tokens"
            fix = f"set data.sequence_length={self.sequence_length}"
            issues.append(Issue("data.sequence_length", "conflict", message, length, directory, fix))
        if self.vocab_size > (size := config.model.vocab_size):
            message = f"{size} is less than the {self.vocab_size} tokens of the vocabulary in {directory}"
            fix = "finetune a run that was trained with this tokenizer"
            issues.append(Issue("model.vocab_size", "conflict", message, size, directory, fix))
        for name, value in (("kind", self.kind), ("labels", tuple(self.labels)), ("pair", self.pair)):
            if (setting := getattr(config.finetune, name)) != value:
                message, fix = f"{setting}, but {directory} has {value}", "use the examples' value"
                issues.append(Issue(f"finetune.{name}", "conflict", message, setting, directory, fix))
        return issues

    def warnings(self, config: Config) -> list[str]:
        """Return a warning for each property of the data that is allowed but probably unintended."""
        warnings, fix = [], "finetune a run whose tokenizer supports this text"
        for name, split in self.splits.items():
            if split.without_tokens:
                count = f"{split.without_tokens:,} of {split.examples:,} examples"
                warnings.append(f"{name}: {count} have a text without tokens; drop these examples, or {fix}")
            if split.lost_letters > WARNED_LOSS * split.letters:
                warnings.append(f"{name}: {lost_words(split.lost_letters, split.letters)}; {fix}")
        spellings: dict[str, list[str]] = {}
        for label in self.labels:
            spellings.setdefault(" ".join(label.casefold().split()), []).append(label)
        warnings += [
            f"labels {' and '.join(map(ascii, names))} differ only in case or white space, but count as "
            f"{len(names)} labels"
            for names in spellings.values()
            if len(names) > 1
        ]
        return warnings


def read_examples(directory: Path) -> ExamplesManifest:
    """Read and check examples.json in a prepared directory, a run or a checkpoint. Raises ConfigError."""
    return read_hashed(directory, ExamplesManifest)


def read_data(config: Config, directory: Path) -> Manifest | ExamplesManifest:
    """Read the manifest of the shards or examples that the objective needs. Raises ConfigError."""
    return read_examples(directory) if config.has_examples else read_manifest(directory)
