"""The whole configuration of a run: one tree of strict, frozen models. Torch-free.

Precedence, lowest first: defaults < YAML file < `--set`. Example: with `optim: {lr: 1e-3}` in the file and
`--set optim.lr=2e-3`, the run uses 2e-3. Members of an exclusive group (`schedule.steps|tokens|hours`,
`data.path|sources`) displace the members set at a lower level; two at one level are an error.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_VOCAB_SIZE = 65_535  # token ids are stored as uint16
MAX_CONFIG_BYTES = 1_000_000
EXCLUSIVE_GROUPS = (("schedule", ("steps", "tokens", "hours")), ("data", ("path", "sources")))


class ConfigError(ValueError):
    """A configuration that cannot run. `issues` holds one line per problem, each with the full path."""

    def __init__(self, issues: Sequence[str]):
        self.issues = tuple(issues)
        super().__init__("\n".join(self.issues))


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial weights, sample order and masks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = every GPU of the machine, else the CPU."""
    init_from: str | None = None
    """Checkpoint directory (or run directory) whose weights start this run; optimizer and counters start fresh."""


class BuildConfig(Section):
    """How a corpus becomes shards (`data build`, or `data.sources` on first use)."""

    normalize: bool = True
    """TeX-style quotes to ", NFD, lowercase, strip accents, collapse spaces, drop non-ASCII (in the tokenizer)."""
    tokenizer_model: Literal["wordpiece", "bpe"] = "wordpiece"
    """Kind of tokenizer to train when none is given."""
    max_tokens_per_char: float = Field(0.25, ge=0)
    """Drop a document with more tokens per character than this; 0 = keep all."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """exact = same normalised text once; near = MinHash LSH (extra `dedup`)."""
    near_threshold: float = Field(0.8, gt=0, le=1)
    """Jaccard similarity above which `near` drops the later document."""
    order: Literal["none", "sentence_length", "unigram"] = "none"
    """Order of the sequences in the shards: short sentences first, or likely tokens first. Needs data.shuffle: false."""
    held_out_fraction: float = Field(0.01, ge=0, lt=0.5)
    """Share of the documents kept for the held-out loss."""


class DataConfig(Section):
    path: str | None = None
    """Directory made by `bert-dp data build`."""
    sources: tuple[str, ...] | None = None
    """Files, globs, `hub:NAME`, or `builtin` (the documentation every CPython carries); built on first use, cached."""
    tokenizer: str | None = None
    """Existing tokenizer.json; null = train one on the sources."""
    sequence_length: int = Field(128, ge=8, le=8192)
    """Tokens per sequence."""
    shuffle: bool = True
    """A new permutation of the sequences every epoch; false = the order of the shards."""
    workers: int = Field(1, ge=0, le=64)
    """Prefetch threads per rank; 0 = none."""
    build: BuildConfig = BuildConfig()


class ModelConfig(Section):
    vocab_size: int = Field(32_768, ge=16, le=MAX_VOCAB_SIZE)
    """Rows of the embedding; also the size of a trained tokenizer."""
    hidden_size: int = Field(768, ge=8)
    num_layers: int = Field(16, ge=1)
    num_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(1536, ge=8)
    """Width after the activation; geglu projects to twice this."""
    position: Literal["scaled_sinusoidal", "rope", "learned"] = "scaled_sinusoidal"
    rope_theta: float = Field(160_000.0, gt=0)
    mlp: Literal["geglu", "gelu"] = "geglu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_bias: bool = True
    """Bias of a layernorm."""
    norm_eps: float = Field(1e-12, gt=0)
    first_attention_norm: bool = True
    """false = no norm before the first attention (ModernBERT)."""
    head: Literal["none", "dense"] = "none"
    """What stands before the tied decoder: nothing, or dense + GELU + norm (ModernBERT, BERT)."""
    bias: bool = False
    """Biases in the linear layers. There is never a key bias: its gradient is exactly zero."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability, on embedding, attention output and MLP output."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            near = _nearest_divisors(self.hidden_size, self.num_heads)
            raise ValueError(f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; use {near}")
        if self.position == "rope" and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"rope needs an even head size, got {self.hidden_size // self.num_heads}")
        if self.position == "scaled_sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"scaled_sinusoidal needs an even hidden_size, got {self.hidden_size}")
        return self


class ObjectiveConfig(Section):
    mask_rate: float = Field(0.25, gt=0, lt=1)
    """Exactly round(mask_rate x sequence_length) positions of every sequence are predicted."""


class BatchConfig(Section):
    global_size: int = Field(8192, ge=1)
    """Sequences per optimizer step over all replicas. Declared; never changed by the number of GPUs."""
    micro_size: int = Field(128, ge=1)
    """Sequences per replica in one forward/backward."""
    ramp_fraction: float = Field(0.0, ge=0, le=1)
    """Progress f at which the linear batch ramp reaches global_size; 0 = no ramp."""
    ramp_quantum: int | None = Field(None, ge=1)
    """Sequences by which the ramp grows; a divisor of global_size."""

    @model_validator(mode="after")
    def _quantum_divides(self) -> BatchConfig:
        if self.ramp_fraction > 0 and self.ramp_quantum is None:
            raise ValueError("ramp_fraction is set, so ramp_quantum must be too (a divisor of global_size)")
        if self.ramp_quantum is not None and self.global_size % self.ramp_quantum:
            near = _nearest_divisors(self.global_size, self.ramp_quantum)
            raise ValueError(
                f"ramp_quantum {self.ramp_quantum} does not divide global_size {self.global_size}; use {near}"
            )
        return self


class ScheduleConfig(Section):
    name: Literal["budget_triangle", "linear", "cosine", "wsd", "constant"] = "budget_triangle"
    """Learning rate as a function of progress f: the recipe's triangle, or linear / cosine / warmup-stable-decay / constant."""
    steps: int | None = Field(None, ge=1)
    """Budget in optimizer steps. Exactly one of steps, tokens, hours."""
    tokens: int | None = Field(None, ge=1)
    """Budget in tokens over all replicas."""
    hours: float | None = Field(None, gt=0)
    """Budget in hours on rank 0's clock, from the first real step."""
    warmup_fraction: float = Field(0.06, ge=0, lt=1)
    """Share of the budget for linear warm-up (linear, cosine, wsd)."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the budget for the final decay (wsd)."""

    @model_validator(mode="after")
    def _one_budget(self) -> ScheduleConfig:
        given = [k for k in ("steps", "tokens", "hours") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of steps, tokens, hours (got {', '.join(given) or 'none'})")
        if self.name == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError("warmup_fraction + decay_fraction is above 1")
        return self


class OptimConfig(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled; not applied to biases and norms."""
    clip: float = Field(0.5, ge=0)
    """Global L2 norm of the reduced gradient; 0 = no clipping."""


class ParallelConfig(Section):
    engine: Literal["auto", "single", "ddp"] = "auto"
    """auto = single on one rank, ddp on more."""
    bucket_mib: float | None = Field(None, gt=0)
    """Size of a ddp reduction bucket, MiB; null = torch's default (25, the first one 1)."""


class CheckpointConfig(Section):
    every_steps: int = Field(0, ge=0)
    """Optimizer steps between checkpoints; 0 = only at the end and on a signal."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class EvalConfig(Section):
    every_steps: int = Field(0, ge=0)
    """Optimizer steps between held-out losses; 0 = only at the end."""
    max_sequences: int = Field(2048, ge=1)
    """Held-out sequences used at most."""


class LogConfig(Section):
    every_steps: int = Field(10, ge=1)
    """Optimizer steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Mirror metrics.jsonl to TensorBoard (extra `tensorboard`)."""


class Config(Section):
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """auto = bf16 on a GPU that has it, fp16 with a gradient scaler on one that has not, fp32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """auto = on a GPU, and on a CPU when the run is long enough to earn the compile time back."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Config:
        if (self.data.path is None) == (self.data.sources is None):
            which = "none" if self.data.path is None else "both"
            raise ValueError(f"set exactly one of data.path, data.sources (got {which}); `builtin` is a source")
        if self.data.sources is not None and not self.data.sources:
            raise ValueError("data.sources is empty; name a file, a glob or `builtin`")
        if num_masked(self.objective.mask_rate, self.data.sequence_length) < 1:
            raise ValueError(
                f"objective.mask_rate {self.objective.mask_rate} masks no position of "
                f"data.sequence_length {self.data.sequence_length}; raise either"
            )
        return self

    @property
    def num_masked(self) -> int:
        """Predicted positions per training sequence."""
        return num_masked(self.objective.mask_rate, self.data.sequence_length)

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the resolved configuration."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]


def num_masked(rate: float, sequence_length: int) -> int:
    """Positions predicted per sequence: round(rate x S), halves up."""
    return int(rate * sequence_length + 0.5)


class BatchPlan(BaseModel):
    """The batch equation for one world size: global = micro x accumulation x dp."""

    model_config = ConfigDict(frozen=True)
    world_size: int
    dp: int
    micro_size: int
    accumulation: int
    global_size: int

    def __str__(self) -> str:
        return (
            f"global batch {self.global_size} = micro {self.micro_size} x accumulation {self.accumulation} "
            f"x dp {self.dp}"
        )


def batch_plan(config: Config, world_size: int) -> BatchPlan:
    """Accumulation for `world_size` ranks at the declared global batch.

    Raises ConfigError, naming the nearest batches that divide, when it does not.
    """
    batch, dp = config.batch, world_size
    per_pass = batch.micro_size * dp
    issues = []
    if batch.global_size % per_pass:
        low = batch.global_size // per_pass * per_pass
        near = ", ".join(str(n) for n in (low, low + per_pass) if n)
        issues.append(
            f"batch.global_size: {batch.global_size} is not a multiple of batch.micro_size {batch.micro_size} x "
            f"{dp} replicas = {per_pass}; nearest that are: {near} (or change batch.micro_size or --nproc)"
        )
    elif batch.ramp_fraction > 0 and batch.ramp_quantum is not None and batch.ramp_quantum % per_pass:
        fits = [q for q in _divisors(batch.global_size) if q % per_pass == 0]
        near = ", ".join(map(str, sorted(fits, key=lambda q: abs(q - (batch.ramp_quantum or 0)))[:2]))
        issues.append(
            f"batch.ramp_quantum: {batch.ramp_quantum} is not a multiple of batch.micro_size {batch.micro_size} x "
            f"{dp} replicas = {per_pass}; nearest that are: {near}"
        )
    if config.parallel.engine == "single" and world_size > 1:
        issues.append(f"parallel.engine: single runs one rank, got --nproc {world_size}; use ddp")
    if issues:
        raise ConfigError(issues)
    return BatchPlan(
        world_size=world_size,
        dp=dp,
        micro_size=batch.micro_size,
        accumulation=batch.global_size // per_pass,
        global_size=batch.global_size,
    )


def batch_at(batch: BatchConfig, progress: float) -> int:
    """Sequences of the step that starts at progress f: the recipe's linear ramp in declared quanta."""
    if batch.ramp_fraction <= 0 or batch.ramp_quantum is None:
        return batch.global_size
    quantum = batch.ramp_quantum
    ramped = int(progress * batch.global_size / batch.ramp_fraction / quantum) * quantum + quantum
    return min(ramped, batch.global_size)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Resolve defaults < YAML file < overrides (`a.b=value`, the value read as YAML).

    Raises ConfigError with every problem found, each with its full path and a suggestion.
    """
    levels: list[dict[str, Any]] = []
    if path is not None:
        levels.append(_read_yaml(Path(path)))
    if overrides:
        levels.append(parse_overrides(overrides))
    return resolve(levels)


def resolve(levels: Sequence[dict[str, Any]]) -> Config:
    """Merge nested dictionaries, lowest precedence first, and validate. Raises ConfigError."""
    merged: dict[str, Any] = {}
    issues: list[str] = []
    for level in levels:
        for section, members in EXCLUSIVE_GROUPS:
            values = level.get(section)
            given = [m for m in members if isinstance(values, dict) and values.get(m) is not None]
            if len(given) > 1:
                issues.append(f"{section}: {' and '.join(given)} are both set; keep one")
            if given and isinstance(merged.get(section), dict):
                for member in members:
                    merged[section].pop(member, None)
        _merge(merged, level)
    if issues:
        raise ConfigError(issues)
    if "schedule" not in merged:
        merged["schedule"] = {}
    try:
        return Config.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        raise ConfigError([_explain(e, merged) for e in error.errors()]) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["optim.lr=1e-3"]` -> `{"optim": {"lr": 0.001}}`. Raises ConfigError on a missing `=`."""
    tree: dict[str, Any] = {}
    issues = []
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep or not key.strip():
            issues.append(f"--set {item}: expected a.b=value, for example --set optim.lr=1e-3")
            continue
        node = tree
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            node = child if isinstance(child, dict) else node
        try:
            node[leaf] = yaml.load(value, Loader=ConfigLoader)  # noqa: S506 (a SafeLoader)
        except (yaml.YAMLError, ValueError) as error:
            issues.append(f"--set {item}: not a YAML value ({str(error).splitlines()[0]})")
    if issues:
        raise ConfigError(issues)
    return tree


def dump_config(config: Config) -> str:
    """The complete configuration as YAML; loading it again gives an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def no_effect(config: Config) -> list[str]:
    """One line for each setting that was given explicitly and changes nothing in this run."""
    lines = []

    def given(section: Section, name: str) -> bool:
        return name in section.model_fields_set and getattr(section, name) != type(section).model_fields[name].default

    if config.batch.ramp_fraction == 0 and given(config.batch, "ramp_quantum"):
        lines.append("batch.ramp_quantum has no effect: batch.ramp_fraction is 0")
    if config.schedule.name in ("budget_triangle", "constant") and given(config.schedule, "warmup_fraction"):
        lines.append(f"schedule.warmup_fraction has no effect with schedule.name: {config.schedule.name}")
    if config.schedule.name != "wsd" and given(config.schedule, "decay_fraction"):
        lines.append(f"schedule.decay_fraction has no effect with schedule.name: {config.schedule.name}")
    if config.model.position != "rope" and given(config.model, "rope_theta"):
        lines.append(f"model.rope_theta has no effect with model.position: {config.model.position}")
    if config.model.norm == "rmsnorm" and given(config.model, "norm_bias"):
        lines.append("model.norm_bias has no effect with model.norm: rmsnorm")
    if config.data.path is not None:
        if config.data.tokenizer is not None:
            lines.append("data.tokenizer has no effect with data.path: the shards carry their tokenizer")
        lines += [f"data.build.{name} has no effect with data.path" for name in BuildConfig.model_fields
                  if given(config.data.build, name)]  # fmt: skip
    if config.data.sources is not None:
        if config.data.tokenizer is not None and given(config.data.build, "tokenizer_model"):
            lines.append("data.build.tokenizer_model has no effect: data.tokenizer is given")
        if config.data.build.order != "none" and config.data.shuffle:
            lines.append(f"data.build.order: {config.data.build.order} has no effect while data.shuffle is true")
        if config.data.build.dedup != "near" and given(config.data.build, "near_threshold"):
            lines.append(f"data.build.near_threshold has no effect with data.build.dedup: {config.data.build.dedup}")
    if config.parallel.engine == "single" and given(config.parallel, "bucket_mib"):
        lines.append("parallel.bucket_mib has no effect with parallel.engine: single")
    return lines


class ConfigLoader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a float (YAML 1.2) and refuses duplicate keys."""


def _construct_mapping(loader: ConfigLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
ConfigLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError([f"{path}: larger than {MAX_CONFIG_BYTES} bytes; not a configuration"])
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=ConfigLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"{path}: not valid YAML ({' '.join(str(error).split())})"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: expected a mapping of settings, got {type(data).__name__}"])
    return data


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = json.loads(json.dumps(value, default=str)) if isinstance(value, dict) else value


def setting_paths(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every setting as a dotted path."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from setting_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _explain(error: Any, merged: dict[str, Any]) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(setting_paths())
        leaf = path.rpartition(".")[2]
        close = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
        close = close or [k for k in known if k.rpartition(".")[2] == leaf]
        close = close or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{path}: unknown setting{hint}"
    value = error.get("input")
    shown = "" if isinstance(value, dict) or error["type"] == "missing" else f" (got {value!r})"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(value, str):
        options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        close = difflib.get_close_matches(value, options, n=1, cutoff=0.4)
        shown += f"; did you mean {close[0]}?" if close else ""
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _nearest_divisors(n: int, wanted: int) -> str:
    return " or ".join(str(d) for d in sorted(sorted(_divisors(n), key=lambda d: abs(d - wanted))[:2]))
