"""Define every setting of a run, with its unit, in one tree of strict, frozen models.

Marks in a field's metadata state when the setting may change and when it has an effect. A section's marks
apply to all its settings.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from bert_dp.config.engines import ENGINES, OPTIMIZERS

MAX_VOCAB_SIZE = 65_535  # token ids are stored as uint16
MIN_BYTE_VOCAB_SIZE = 263  # 256 bytes and the special tokens
# limits far above any practical value: they catch typos and keep loops and integers in checks bounded
MAX_BATCH = 2**20  # sequences per optimizer step
MAX_STEPS = 10**12
MAX_TOKENS = 10**18
MAX_RANKS = 2**16
MAX_SECONDS = 1e9
MAX_PATH = 4096  # bytes
Logger = Literal["tensorboard", "wandb", "mlflow", "trackio"]
PredictedName = Literal["tokens", "steps", "loss", "hours", "dollars", "kwh"]
LabelKind = Literal["single_label", "multi_label", "regression"]
CODE = re.compile(r"\S.*\.py:[A-Za-z_]\w*")  # custom code, given as FILE.py:function
FREE_ON_RESUME = "free on resume"
"""Marks a setting that may be changed when a run resumes."""
FREE_FROM_WEIGHTS = "free from weights"
"""Marks a model setting that need not have the value with which the weights in run.init_from were trained."""
METERED = ("dollars", "kwh")  # budgets whose spending is recorded in ledger.json
CLOCKED = ("hours", *METERED)  # budgets for which the number of steps is not known in advance
BUDGETS = ("steps", "tokens", "epochs", *CLOCKED)  # a schedule sets exactly one of these budgets


class OnlyWith:
    """Marks a setting as having an effect only if the setting named `setting` has one of `values`. Without
    `values`, that setting must not be null, 0 or false."""

    def __init__(self, setting: str, *values: object):
        self.setting, self.values = setting, values

    def applies(self, value: object) -> bool:
        """Return True if the marked setting has an effect when `setting` has this value."""
        return value in self.values if self.values else bool(value)


def _can_be_a_path(text: str) -> str:
    if "\0" in text or len(text.encode()) > MAX_PATH:
        raise ValueError(f"is not a valid path: it contains a NUL byte or is longer than {MAX_PATH} bytes")
    return text


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


OneOrMore = BeforeValidator(_as_tuple)
"""Validator that accepts a list, or a single value without brackets."""


def parse_duration(text: str) -> float:
    """Parse `90s`, `5m`, `1.5h` or `2d` into seconds. Raises ValueError."""
    units_s = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip()):
        return float(match[1]) * units_s[match[2]]
    raise ValueError(f"{text!r} is not a duration such as 90s, 5m, 1h or 2d")


def duration(unit_s: float) -> BeforeValidator:
    """Return a validator that converts a duration, such as 5m, to units of `unit_s` seconds."""
    return BeforeValidator(lambda value: parse_duration(value) / unit_s if isinstance(value, str) else value)


def key_of(table: Mapping[str, object], *other: str, code: bool = False) -> AfterValidator:
    """Return a validator that accepts the strings in `other`, the keys of `table` (also those added later)
    and, if `code` is true, FILE.py:function."""

    def check(text: str) -> str:
        if text in (*other, *table) or (code and CODE.fullmatch(text)):
            return text
        expected = ", ".join(map(repr, (*other, *table)))
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    return AfterValidator(check)


def _is_code(text: str) -> str:
    if not CODE.fullmatch(text):
        raise ValueError("expected FILE.py:function")
    return text


PathText = Annotated[str, AfterValidator(_can_be_a_path)]


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: object, info: ValidationInfo) -> object:
        """Convert whole-number floats to integers in integer fields, because YAML reads 1e3 as a float."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        is_count = int in (annotation, *get_args(annotation))
        return int(value) if is_count and isinstance(value, float) and value.is_integer() else value


class RunConfig(Section):
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed for the initial weights, the sample order, the masks and dropout."""
    device: Annotated[Literal["auto", "cpu", "cuda"], FREE_ON_RESUME] = "auto"
    """auto = all GPUs of the machine, or the CPU if the machine has no GPU."""
    deterministic: Annotated[bool, FREE_ON_RESUME] = False
    """Use a fixed order of additions on GPUs, so that a run resumed with the same number of ranks and the
    same micro batch is bit-equal to an uninterrupted one, unless the budget is in hours, dollars or kWh. This
    slows down training on GPUs. CPUs always use a fixed order."""
    init_from: Annotated[PathText | None, FREE_ON_RESUME] = None
    """Source of the initial weights: a checkpoint, a run directory, or hf:DIR. DIR contains a BERT, RoBERTa
    or ModernBERT in transformers format; it also supplies the model settings and the tokenizer. Counters and
    schedule start at zero."""
    init_keeps: Annotated[Literal["weights", "moments"], FREE_ON_RESUME, OnlyWith("run.init_from")] = (
        "weights"
    )
    """State to copy from run.init_from. weights = only the weights; moments = also the optimizer state and
    its step count, as in phase 2 of pretraining with LAMB. moments requires the same optimizer and shapes."""
    max_skipped_in_a_row: Annotated[int, FREE_ON_RESUME] = Field(5, ge=1, le=MAX_STEPS)
    """Stop the run after this many consecutive skipped steps. A step is skipped if its gradients are not
    finite. With fp16, 16 more are allowed, because each skip halves the loss scale, which starts at 2^16."""
    hang_after_s: Annotated[float, duration(1), FREE_ON_RESUME] = Field(30.0, gt=0, le=MAX_SECONDS)
    """Report a hang after this many seconds without progress, with the stack of the rank that the others
    wait for. The limit is at least three times the median step time and, during set-up, compilation and
    saving, at least 300 s."""
    price_per_device_hour: Annotated[float | None, FREE_ON_RESUME] = Field(None, gt=0, le=1e6)
    """Dollars per device-hour, for schedule.dollars and the cost in the summary."""
    watts_per_device: Annotated[float | None, FREE_ON_RESUME] = Field(None, gt=0, le=1e6)
    """Mean power of a device in watts, used if the energy counters cannot be read."""
    pue: Annotated[float, FREE_ON_RESUME] = Field(1.0, ge=1, le=10)
    """Power usage effectiveness: total facility power / IT equipment power. All kWh values include it."""
    grams_co2_per_kwh: Annotated[float | None, FREE_ON_RESUME] = Field(None, ge=0, le=1e4)
    """Grams of CO2 per kWh from the local grid, for the summary; null = CO2 is not estimated."""
    end_hung_after_s: Annotated[float, duration(1), FREE_ON_RESUME] = Field(600.0, ge=0, le=MAX_SECONDS)
    """Seconds from the report of a hang until the run is stopped with status failed; 0 = never."""


class BuildConfig(Section):
    """Options for building shards from a corpus (`data build`, or `data.sources` on first use)."""

    normalize: Annotated[bool, OnlyWith("data.tokenizer", None)] = True
    """Normalize text in the tokenizer: apply NFKD; lowercase; replace white space, dashes, quotes,
    ligatures and most symbols with ASCII; drop all other non-ASCII characters (accents, other scripts);
    collapse spaces. The build fails if a source loses over 20 % of its letters or has over 20 % unknown
    tokens."""
    tokenizer_model: Annotated[Literal["wordpiece", "byte_bpe"], OnlyWith("data.tokenizer", None)] = (
        "wordpiece"
    )
    """Kind of tokenizer to train. byte_bpe has a token for every byte and thus no unknown tokens: use it for
    text in any language, together with `normalize: false` and `max_tokens_per_char: 0`."""
    max_tokens_per_char: float | None = Field(None, ge=0)
    """Drop documents with at least this many tokens per character; 0 = keep all. null = 0.25 + 0.017 x +
    0.0038 x^2 with x = log2(32768 / vocab_size); vocab_size 32768 gives the cramming recipe's 0.25."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """exact = keep one of several documents with the same tokens; near = also drop near duplicates, which are
    found by MinHash LSH (extra `dedup`)."""
    near_threshold: Annotated[float, OnlyWith("data.build.dedup", "near")] = Field(0.8, gt=0, le=1)
    """Jaccard similarity above which `dedup: near` drops the later of two documents."""
    held_out_fraction: float = Field(0.01, ge=0, lt=0.5)
    """Share of documents reserved for the held-out loss."""
    source_format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """Format of source files. auto = by suffix; no suffix means text, and an unknown suffix is an error."""
    text_field: str = Field("text", min_length=1, max_length=256)
    """Field of a JSON record, or column of a Parquet file or hub data set, that contains the text. a.b is
    field b of object a."""
    documents: Literal["line", "blank_line"] = "line"
    """Document separator in plain text: line = the end of each line; blank_line = a blank line. A
    document is never divided between training and held-out data, so blank_line keeps the lines of a
    paragraph together."""


class DataConfig(Section):
    path: Annotated[PathText | None, FREE_ON_RESUME] = None
    """Directory of shards built by `bert-dp data build`."""
    sources: Annotated[tuple[PathText, ...] | None, OneOrMore, FREE_ON_RESUME] = None
    """Files, directories, globs, `hub:NAME` or `builtin` (CPython's documentation). Shards are cached."""
    tokenizer: Annotated[PathText | None, OnlyWith("data.sources")] = None
    """Existing tokenizer.json; null = train a tokenizer on the sources."""
    sequence_length: int = Field(128, ge=8, le=8192)
    """Tokens per sequence."""
    shuffle: Annotated[bool, OnlyWith("objective.name", "mlm"), OnlyWith("data.synthetic", False)] = True
    """Shuffle the sequences anew in every epoch; false = keep the order of the shards."""
    workers: Annotated[int, FREE_ON_RESUME, OnlyWith("data.synthetic", False)] = Field(1, ge=0, le=64)
    """Prefetch threads per rank; 0 = none."""
    synthetic: bool = False
    """Train on one fixed micro batch of random tokens, to measure step times without the data loader."""
    build: BuildConfig = BuildConfig()
    """Options for building shards from data.sources. With data.path, the existing shards' options apply."""


class ModelConfig(Section):
    vocab_size: int = Field(32_768, ge=16, le=MAX_VOCAB_SIZE)
    """Number of rows of the token embedding, and maximum size of the tokenizer."""
    hidden_size: int = Field(768, ge=8, le=2**17)
    num_layers: int = Field(16, ge=1, le=10_000)
    num_heads: int = Field(12, ge=1, le=2**17)
    intermediate_size: int = Field(1536, ge=8, le=2**20)
    """Width of the MLP after the activation; geglu projects to twice this width."""
    position: Literal["scaled_sinusoidal", "rope", "learned"] = "scaled_sinusoidal"
    rope_theta: Annotated[float, FREE_FROM_WEIGHTS, OnlyWith("model.position", "rope")] = Field(
        160_000.0, gt=0
    )
    max_positions: Annotated[int | None, OnlyWith("model.position", "learned")] = Field(None, ge=8, le=2**17)
    """Number of rows of the position embedding; null = data.sequence_length + model.position_offset."""
    position_offset: Annotated[int, OnlyWith("model.position", "learned")] = Field(0, ge=0, le=1024)
    """Row of the position embedding for the first token (RoBERTa: 2); earlier rows are unused."""
    token_types: int = Field(0, ge=0, le=16)
    """Number of rows of the token-type embedding (BERT: 2, for the two texts of a pair); 0 = none."""
    local_attention: int = Field(0, ge=0, le=2**17)
    """Width of the attention window in local layers, half on either side of a token (ModernBERT: 128); 0 =
    all layers attend to the whole sequence."""
    global_attention_every: Annotated[int, OnlyWith("model.local_attention")] = Field(3, ge=1, le=10_000)
    """With local attention, layers 0, n, 2n, ... attend to the whole sequence; n is this setting."""
    local_rope_theta: Annotated[float, FREE_FROM_WEIGHTS, OnlyWith("model.local_attention")] = Field(
        10_000.0, gt=0
    )
    """rope_theta of local layers."""
    mlp: Literal["geglu", "gelu"] = "geglu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_bias: Annotated[bool, OnlyWith("model.norm", "layernorm")] = True
    """Add a bias to layernorms."""
    norm_eps: Annotated[float, FREE_FROM_WEIGHTS] = Field(1e-12, gt=0)
    norm_position: Literal["pre", "post"] = "pre"
    """pre = norms before attention and MLP, and a final norm; post = norms after the residual sums (BERT)."""
    first_attention_norm: Annotated[bool, OnlyWith("model.norm_position", "pre")] = True
    """false = no norm before the first attention (ModernBERT)."""
    head: Literal["none", "dense"] = "none"
    """Layers before the tied decoder: none, or dense + GELU + norm (as in BERT and ModernBERT)."""
    decoder_bias: bool = False
    """Add a bias for each vocabulary entry to the tied decoder."""
    bias: bool = False
    """Add biases to all linear layers except the key projections. Without rotary positions, a key bias has no
    effect."""
    dropout: Annotated[float, FREE_FROM_WEIGHTS] = Field(0.0, ge=0, lt=1)
    """Dropout probability for the embedding, the attention output and the MLP output."""
    attention_dropout: Annotated[float, FREE_FROM_WEIGHTS] = Field(0.0, ge=0, lt=1)
    """Dropout probability for the attention matrix. Above 0, the matrix is materialized, which is slower."""
    lstm_size: Annotated[int, OnlyWith("objective.name", "distill")] = Field(0, ge=0, le=2**17)
    """Hidden units per direction of a BiLSTM between the embedding and the head; 0 = a transformer. Of the
    other model settings, only vocab_size, hidden_size and dropout have an effect on a BiLSTM."""
    residual_dtype: Annotated[Literal["full", "bf16"], FREE_FROM_WEIGHTS] = "full"
    """Data type of the residual stream; full = the parameters' precision. bf16 halves the memory traffic of
    norms and additions but rounds every sum. It needs `precision: bf16`, or auto if auto selects bf16."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            near = nearest_divisors(self.hidden_size, self.num_heads)
            raise ValueError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; use {near}"
            )
        if self.position == "rope" and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"rope needs an even head size, got {self.hidden_size // self.num_heads}")
        if self.position == "scaled_sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"scaled_sinusoidal needs an even hidden_size, got {self.hidden_size}")
        if self.norm_position == "post" and not self.first_attention_norm:
            raise ValueError("norm_position: post needs first_attention_norm: true (post uses this norm)")
        return self

    @property
    def takes_types(self) -> bool:
        """Return True if the model distinguishes the two texts of a pair by token types."""
        return self.token_types > 1 and not self.lstm_size

    def is_local(self, layer: int) -> bool:
        """Return True if `layer`, counted from 0, attends only within the local window."""
        return self.local_attention > 0 and layer % self.global_attention_every > 0


class ObjectiveConfig(Section):
    name: Literal["mlm", "finetune", "distill"] = "mlm"
    """Training objective. mlm = masked language modelling; finetune = prediction of labels; distill =
    prediction of a teacher's logits."""
    mask_rate: Annotated[float, OnlyWith("objective.name", "mlm")] = Field(0.25, gt=0, lt=1)
    """Share of positions to predict: exactly round(mask_rate x sequence_length) positions per sequence."""


class FinetuneConfig(Section):
    """Task of a run whose objective.name is finetune or distill. `bert-dp finetune` and `bert-dp distill`
    read kind, labels and pair from the data."""

    kind: LabelKind = "single_label"
    """single_label: one class per example; multi_label: any number of classes; regression: a score."""
    labels: Annotated[tuple[str, ...], OneOrMore] = ()
    """Names of the classes, in the order of the model's outputs."""
    pair: bool = False
    """true = each example consists of two texts. A BiLSTM encodes them separately."""
    head: Literal["auto", "recipe", "native"] = "auto"
    """recipe = dense, tanh, dropout, linear; native = the head of the transformers class to which the encoder
    can be exported; auto = native if there is a matching class, else recipe."""
    head_size: Annotated[int, OnlyWith("finetune.head", "auto", "recipe")] = Field(1024, ge=1, le=2**17)
    """Width of the dense layer in the recipe head, or in a BiLSTM's head."""
    pooling: Literal["cls", "mean"] = "cls"
    """Input of the head: cls = the output for the first token; mean = the mean output for all tokens."""

    @property
    def num_outputs(self) -> int:
        """Return the number of logits per example."""
        return 1 if self.kind == "regression" else len(self.labels)


class DistillConfig(Section):
    """Teacher and loss of a run whose objective.name is distill. The loss of an example is alpha x (loss
    against the label) + (1 - alpha) x (loss against the teacher's logits)."""

    logits: PathText | None = None
    """Directory with the teacher's logits for every training example, written by `bert-dp distill`."""
    loss: Literal["mse", "kl"] = "mse"
    """mse = mean squared difference of the logits (arXiv 1903.12136); kl = temperature^2 x
    KL(teacher || student) of the softmax outputs (arXiv 1503.02531), only for single_label tasks."""
    temperature: Annotated[float, OnlyWith("distill.loss", "kl")] = Field(1.0, gt=0, le=1000)
    """Number by which the logits of student and teacher are divided before the softmax."""
    alpha: float = Field(0.0, ge=0, le=1)
    """Weight of the loss against the labels. An augmented copy's label is the teacher's prediction for it."""
    embeddings: Annotated[PathText | None, FREE_ON_RESUME, OnlyWith("model.lstm_size")] = None
    """Source of a BiLSTM's initial embedding: a run, or a text file with a token and its vector on each line;
    null = random. `bert-dp distill --embeddings` sets it."""


class BatchConfig(Section):
    global_size: int = Field(8192, ge=1, le=MAX_BATCH)
    """Sequences per optimizer step over all replicas, independent of the number of GPUs."""
    micro_size: Annotated[int, FREE_ON_RESUME] = Field(128, ge=1, le=MAX_BATCH)
    """Sequences per replica in one forward/backward pass. On one node, `bert-dp train` also accepts auto: it
    first makes short runs to choose a size, as `bert-dp tune batch` does, and saves the size in the run's
    configuration."""
    ramp_fraction: float = Field(0.0, ge=0, le=1)
    """Length of the linear batch ramp as a share of the budget; 0 = no ramp. At share f of the budget, the
    batch is ramp_quantum x (1 + floor(f x global_size / (ramp_fraction x ramp_quantum))), up to global_size.
    The ramp ends at f = ramp_fraction x (1 - ramp_quantum / global_size)."""
    ramp_quantum: Annotated[int | None, OnlyWith("batch.ramp_fraction")] = Field(None, ge=1, le=MAX_BATCH)
    """Sequences per increment of the ramp; a divisor of global_size."""

    @model_validator(mode="after")
    def _quantum_divides(self) -> Self:
        if self.ramp_fraction > 0 and self.ramp_quantum is None:
            raise ValueError("ramp_fraction is set, but ramp_quantum (a divisor of global_size) is not")
        if self.ramp_quantum is not None and self.global_size % self.ramp_quantum:
            near = nearest_divisors(self.global_size, self.ramp_quantum)
            raise ValueError(
                f"ramp_quantum {self.ramp_quantum} does not divide global_size {self.global_size}; use {near}"
            )
        return self


class ScheduleConfig(Section):
    name: Literal["budget_triangle", "linear", "cosine", "wsd", "constant", "exponential"] = "budget_triangle"
    """Shape of the learning rate over the run. wsd = warmup, stable, decay; exponential = exponential rise
    from 1e-4 of the peak to the peak, for learning-rate range tests."""
    steps: Annotated[int | None, FREE_ON_RESUME] = Field(None, ge=1, le=MAX_STEPS)
    """Budget in optimizer steps. Set exactly one of steps, tokens, hours, epochs, dollars, kwh."""
    tokens: Annotated[int | None, FREE_ON_RESUME] = Field(None, ge=1, le=MAX_TOKENS)
    """Budget in tokens over all replicas."""
    hours: Annotated[float | None, duration(3600), FREE_ON_RESUME] = Field(None, gt=0, le=MAX_SECONDS / 3600)
    """Budget in hours on rank 0's clock, from the first step on; set-up does not count."""
    epochs: Annotated[float | None, FREE_ON_RESUME] = Field(None, gt=0, le=MAX_STEPS)
    """Budget in passes over the training sequences. The run's saved configuration gives the same budget in
    tokens or, for finetuning and distillation, in steps."""
    dollars: Annotated[float | None, FREE_ON_RESUME] = Field(None, gt=0, le=1e9)
    """Budget in dollars at run.price_per_device_hour, over all starts of the run. The whole time that
    the launcher runs is charged."""
    kwh: Annotated[float | None, FREE_ON_RESUME] = Field(None, gt=0, le=1e9)
    """Budget in kWh over all starts of the run. Energy is measured, or computed from run.watts_per_device."""
    warmup_fraction: Annotated[float, OnlyWith("schedule.name", "linear", "cosine", "wsd")] = Field(
        0.06, ge=0, lt=1
    )
    """Share of the budget for linear warmup (linear, cosine, wsd)."""
    decay_fraction: Annotated[float, OnlyWith("schedule.name", "wsd")] = Field(0.2, gt=0, le=1)
    """Share of the budget for the final decay (wsd)."""

    @property
    def unit(self) -> str:
        """Return the name of the budget that is set."""
        return next(name for name in BUDGETS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ValueError(f"set exactly one of {', '.join(BUDGETS)} (got {', '.join(budgets) or 'none'})")
        if self.name == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError("warmup_fraction + decay_fraction is greater than 1")
        return self


class OptimConfig(Section):
    name: Annotated[PathText, key_of(OPTIMIZERS, code=True)] = "adamw"
    """muon = Muon for the matrices in the blocks and AdamW for all other parameters. FILE.py:function = a
    custom optimizer (docs/own-code.md), which needs --allow-code."""
    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = 1e-3
    """Peak learning rate. auto = the untuned LAMB rule 5e-3 sqrt(global_size / 32768), only for lamb."""
    lr_batch: Annotated[int | None, OnlyWith("optim.lr_scaling", "sqrt", "linear")] = Field(
        None, ge=1, le=MAX_BATCH
    )
    """Global batch for which lr was tuned; lr_scaling needs it."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Factor by which lr is multiplied: sqrt = sqrt(global_size / lr_batch), for Adam, LAMB and Muon; linear
    = global_size / lr_batch."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of Muon."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay for all parameters except biases and norms."""
    clip: float = Field(0.5, ge=0)
    """Maximum global L2 norm of the reduced gradient; 0 = no clipping."""

    @field_validator("lr", mode="wrap")
    @classmethod
    def _one_reason(cls, value: object, check: Callable[[object], Any]) -> Any:
        """Replace pydantic's two errors (one for the number, one for auto) with a single error."""
        try:
            return check(value)
        except ValidationError:
            raise ValueError("expected a number above 0, or auto (LAMB's untuned rule)") from None

    @model_validator(mode="after")
    def _rate_rules(self) -> Self:
        if self.lr == "auto" and self.name != "lamb":
            raise ValueError(f"lr: auto is LAMB's untuned rule; set a number for {self.name}")
        if self.lr == "auto" and self.lr_scaling != "none":
            raise ValueError(
                f"lr_scaling: {self.lr_scaling} conflicts with lr: auto, which already scales with the batch"
            )
        if self.lr_scaling != "none" and self.lr_batch is None:
            raise ValueError(
                f"lr_scaling: {self.lr_scaling} needs lr_batch, the global batch for which lr was tuned"
            )
        return self


class ParallelConfig(Section):
    engine: Annotated[str, key_of(ENGINES, "auto")] = "auto"
    """auto = single on one rank, ddp on several. independent = no reductions: every rank trains a separate
    model. `scale` uses it to measure the throughput without communication; `train` refuses it."""
    tensor: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of ranks per replica (Megatron-style tensor parallelism). Engines: ddp, zero1 and fsdp."""
    bucket_mib: float | None = Field(None, gt=0, le=2**20)
    """ddp, zero1 and accelerate: size of a reduction bucket in MiB; null = 25 (1 for DDP's first bucket)."""
    reduce_dtype: Literal["full", "bf16", "fp16"] = "full"
    """ddp: data type of reduced gradients; full = the parameters' precision; fp16 needs `precision: fp16`."""
    static_graph: bool = False
    """ddp: pass static_graph to torch's DDP, which then assumes that every step runs the same graph."""
    fsdp_replicas: int = Field(1, ge=1, le=MAX_RANKS)
    """fsdp: number of copies of the sharded state (hybrid sharding). With dp = ranks / parallel.tensor, each
    copy is sharded over dp / fsdp_replicas ranks."""
    zero_stage: int = Field(1, ge=0, le=3)
    """deepspeed: state that ZeRO shards; 0 = none, 1 = optimizer, 2 = also gradients, 3 = also parameters."""
    activation_checkpointing: bool = False
    """Save only the input of each block and recompute the block in the backward pass. This needs less memory
    but a third more compute."""


class CheckpointConfig(Section):
    every_steps: Annotated[int, OnlyWith("checkpoint.keep")] = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps between checkpoints; 0 = off. A run also saves when it ends or is stopped."""
    every_minutes: Annotated[float, duration(60), OnlyWith("checkpoint.keep")] = Field(
        10.0, ge=0, le=MAX_SECONDS / 60
    )
    """Minutes between checkpoints; 0 = off. The interval increases if saving would stall training for over
    1 % of the time."""
    keep: int = Field(2, ge=0, le=MAX_STEPS)
    """Number of newest checkpoints to keep; 0 = write no checkpoints, so the run cannot resume."""
    on_error: Annotated[Literal["continue", "stop"], OnlyWith("checkpoint.keep")] = "continue"
    """Action if a checkpoint cannot be saved. continue = keep training and retry at the next checkpoint; stop
    = end the run with status failed. A run that cannot save its first or last state always fails."""


class EvalConfig(Section):
    every_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps between held-out evaluations; 0 = only at the end."""
    max_sequences: Annotated[int, OnlyWith("objective.name", "mlm")] = Field(2048, ge=1, le=MAX_STEPS)
    """Maximum number of held-out sequences to evaluate."""


class LogConfig(Section):
    every_steps: int = Field(10, ge=1, le=MAX_STEPS)
    """Optimizer steps between lines of metrics.jsonl."""
    step_times: bool = False
    """Also write the step times of every rank to steps/rank-N.jsonl."""
    noise_scale: bool = False
    """Write each step's squared gradient norms at two batch sizes, before clipping, to noise.jsonl, and
    the gradient noise scale (in sequences) over the last 200 steps to summary.json. Engines: single, ddp and
    zero1, without tensor parallelism. A single replica needs at least two micro batches per step."""
    to: Annotated[tuple[Logger, ...], OneOrMore] = ()
    """Services that also receive the run's records. Each needs the extra of the same name. Records stay on
    this machine unless environment variables configure a server."""


class PlannedFigure(Section):
    """Figure predicted by `bert-dp plan`, with its 95 % interval and its origin. `value`: null = unknown."""

    value: float | None
    ci95: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    origin: Literal["measured", "fitted", "published", "assumed", "stated"]
    note: str = ""


class Config(Section):
    task: Annotated[PathText, AfterValidator(_is_code)] | None = None
    """FILE.py:function = a custom task with its own model, data and objective (docs/own-code.md), which needs
    --allow-code; null = the built-in task of objective.name."""
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    finetune: Annotated[FinetuneConfig, OnlyWith("objective.name", "finetune", "distill")] = FinetuneConfig()
    distill: Annotated[DistillConfig, OnlyWith("objective.name", "distill")] = DistillConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig
    optim: OptimConfig = OptimConfig()
    parallel: Annotated[ParallelConfig, FREE_ON_RESUME] = ParallelConfig()
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """auto = bf16 if every rank's device has bf16 instructions (GPUs since Ampere, CPUs with avx512_bf16
    or amx_bf16), else fp16 with a gradient scaler on GPUs and fp32 on CPUs. Resuming keeps the precision."""
    compile: Annotated[Literal["auto", "on", "off"], FREE_ON_RESUME] = "auto"
    """Use torch.compile; auto = only on GPUs."""
    checkpoint: Annotated[CheckpointConfig, FREE_ON_RESUME] = CheckpointConfig()
    eval: Annotated[EvalConfig, FREE_ON_RESUME] = EvalConfig()
    log: Annotated[LogConfig, FREE_ON_RESUME] = LogConfig()
    prediction: Annotated[dict[PredictedName, PlannedFigure] | None, FREE_ON_RESUME] = None
    """Figures predicted by `bert-dp plan`, shown next to the measured figures in the run's report; they have
    no effect on training."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.task is not None:  # a custom task has its own data and model
            if self.schedule.epochs is not None:
                raise ValueError(
                    "schedule.epochs: a custom task's number of samples is unknown; use steps or hours"
                )
            return self
        if self.has_examples and self.data.path is None:
            verb = self.objective.name
            raise ValueError(f"objective.name: {verb} reads labelled examples; use `bert-dp {verb} RUN`")
        rows, first = self.model.max_positions, self.model.position_offset
        if rows is not None and self.data.sequence_length > rows - first:
            raise ValueError(
                f"data.sequence_length: {self.data.sequence_length} is more than the model's {rows - first} "
                f"positions; use {rows - first} or less"
            )
        if (self.data.path is None) == (self.data.sources is None):
            which = "none" if self.data.path is None else "both"
            raise ValueError(
                f"set exactly one of data.path, data.sources (got {which}); for example, data.sources=builtin"
            )
        if self.data.sources is not None and not self.data.sources:
            raise ValueError("data.sources is empty; set a file, a glob or `builtin`")
        if self.has_examples:
            return self
        trains_bytes = self.data.tokenizer is None and self.data.build.tokenizer_model == "byte_bpe"
        if trains_bytes and self.data.sources and self.model.vocab_size < MIN_BYTE_VOCAB_SIZE:
            raise ValueError(
                f"model.vocab_size: {self.model.vocab_size} is too small for the 256 bytes and the special "
                f"tokens of data.build.tokenizer_model: byte_bpe; set {MIN_BYTE_VOCAB_SIZE} or more"
            )
        if num_masked(self.objective.mask_rate, self.data.sequence_length) < 1:
            raise ValueError(
                f"objective.mask_rate {self.objective.mask_rate} masks no position if "
                f"data.sequence_length is {self.data.sequence_length}; increase one of them"
            )
        return self

    @property
    def has_examples(self) -> bool:
        """Return True if the data are labelled examples of different lengths, not packed sequences."""
        return self.objective.name != "mlm"

    @property
    def predicted_share(self) -> float:
        """Return the share of positions whose tokens the model predicts; 0 for labelled examples."""
        return self.objective.mask_rate if self.objective.name == "mlm" else 0.0

    @property
    def num_masked(self) -> int:
        """Return the number of predicted positions per training sequence."""
        return num_masked(self.predicted_share, self.data.sequence_length)

    @property
    def loss_unit(self) -> Literal["nats", "squared error"]:
        """Return the unit of the held-out loss."""
        return "squared error" if self.has_examples and self.finetune.kind == "regression" else "nats"

    @property
    def training_loss_unit(self) -> Literal["nats", "squared error"]:
        """Return the unit of the training loss. Distillation with mse and alpha < 1 uses squared error."""
        by_mse = self.objective.name == "distill" and self.distill.loss == "mse" and self.distill.alpha < 1
        return "squared error" if by_mse else self.loss_unit

    def hash(self) -> str:
        """Return the first 16 hex digits of the SHA-256 of the resolved configuration."""
        tree = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(tree.encode()).hexdigest()[:16]


def all_settings(
    section: type[Section] = Config, prefix: str = "", above: tuple[object, ...] = ()
) -> Iterator[tuple[str, FieldInfo, tuple[object, ...]]]:
    """Yield the dotted path, field and metadata of each setting, including the metadata of its sections."""
    for name, field in section.model_fields.items():
        marks = (*above, *field.metadata)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from all_settings(field.annotation, f"{prefix}{name}.", marks)
        else:
            yield f"{prefix}{name}", field, marks


def num_masked(rate: float, sequence_length: int) -> int:
    """Return the number of predicted positions: round(rate x sequence_length), with halves rounded up."""
    return int(rate * sequence_length + 0.5)


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(n: int, target: int) -> str:
    return " or ".join(str(d) for d in sorted(sorted(divisors(n), key=lambda d: abs(d - target))[:2]))
