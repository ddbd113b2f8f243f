"""Translate the config.json of a transformers encoder into `model` settings."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_dp.config.errors import ConfigError, Issue, read_regular, refusing, sha256
from bert_dp.config.schema import Config, DataConfig

HF = "hf:"  # prefix of a directory in transformers format
MAX_CONFIG_BYTES = 2**22
DEFAULT_LENGTH: int = DataConfig.model_fields["sequence_length"].default
WEIGHTS, EXPORTED = "model.safetensors", "export.json"
TOKENIZER = "tokenizer.json"
"""File name of the tokenizer in runs, checkpoints and exports. An export may change the file's contents."""
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
"""`model` setting -> required field of config.json."""
BERT_FIELDS = {
    "token_types": ("type_vocab_size", 2),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}
"""`model` setting -> (optional field of config.json, default of the field)."""
MODERNBERT_FIELDS = {
    "norm_eps": ("norm_eps", 1e-5),
    "norm_bias": ("norm_bias", False),
    "bias": ("attention_bias", False),
    "decoder_bias": ("decoder_bias", True),
    "attention_dropout": ("attention_dropout", 0.0),
}
SHARED: dict[str, Any] = {"norm": "layernorm", "head": "dense", "lstm_size": 0}
BERT_SHAPE: dict[str, Any] = {
    **SHARED,
    "position": "learned",
    "mlp": "gelu",
    "norm_bias": True,
    "first_attention_norm": True,
    "bias": True,
    "decoder_bias": True,
    "local_attention": 0,
}
MODERNBERT_SHAPE: dict[str, Any] = {
    **SHARED,
    "position": "rope",
    "mlp": "geglu",
    "norm_position": "pre",
    "first_attention_norm": False,
    "token_types": 0,
}
# field of config.json -> the only value that bert-dp supports
FIXED: dict[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
}
THETAS = {
    "full_attention": ("rope_theta", "global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", "local_rope_theta", 10_000.0),
}
"""Kind of layer -> (`model` setting, field of config.json in transformers 4, default of the field)."""
ROBERTAS = ("roberta", "roberta-prelayernorm")  # their position ids start at the padding token's id + 1
FAMILIES = ("bert", *ROBERTAS, "modernbert")


@dataclasses.dataclass(frozen=True)
class HfEncoder:
    """An encoder stored as a directory in transformers format."""

    directory: Path
    model: dict[str, Any]
    """`model` settings, translated from config.json."""
    head_bias: bool
    """True if the dense layer before the decoder has a bias."""

    @property
    def tokenizer(self) -> Path:
        """Return the path of the tokenizer file, which may not exist."""
        return self.directory / TOKENIZER

    def level(self) -> dict[str, Any]:
        """Return the directory's settings. Configuration files and overrides take precedence."""
        data: dict[str, Any] = {"tokenizer": str(self.tokenizer)} if self.tokenizer.is_file() else {}
        if rows := self.model.get("max_positions"):
            data["sequence_length"] = min(DEFAULT_LENGTH, rows - self.model["position_offset"])
        return {"model": self.model, "data": data}


def hf_directory(init_from: str | None) -> Path | None:
    """Return DIR if `init_from` is hf:DIR, else None."""
    if init_from is None or not init_from.startswith(HF):
        return None
    return Path(init_from.removeprefix(HF)).expanduser()


def read_hf(directory: Path) -> HfEncoder:
    """Read config.json in `directory`. Raises ConfigError if it is damaged or the model is unsupported."""
    if not directory.is_dir():
        download = f"hf: takes a local directory; create one with `hf download {directory} --local-dir DIR`"
        message = f"{directory} is not a directory"
        raise ConfigError([Issue("run.init_from", "not_found", message, str(directory), hint=download)])
    with refusing("run.init_from", str(directory / "config.json")):
        settings = json.loads(read_regular(directory / "config.json", MAX_CONFIG_BYTES))
        if not isinstance(settings, dict):
            raise ValueError("is not a JSON object")
    family = settings.get("model_type")
    if family not in FAMILIES:
        reason = "which has no norm after the embedding" if family == "eurobert" else "which is not supported"
        message = f"{directory}: model_type is {family!r:.80}, {reason}; supported: {', '.join(FAMILIES)}"
        hint = "if the model was exported from a run, use run.init_from=RUN" if family == "eurobert" else None
        raise ConfigError([Issue("run.init_from", "unsupported", message, family, hint=hint)])
    try:
        is_modern = family == "modernbert"
        model = _modernbert(settings) if is_modern else _bert(settings, family)
        problems = list(_unsupported(settings, is_modern))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        message = f"{directory}: config.json does not describe a {family} model ({error!r:.200})"
        raise ConfigError([Issue("run.init_from", "damaged", message, str(directory))]) from None
    if not (directory / WEIGHTS).is_file():
        problems.append(f"no {WEIGHTS}")
    if problems:
        lines = [f"{directory}: {problem}" for problem in problems]
        raise ConfigError([Issue("run.init_from", "unsupported", line, str(directory)) for line in lines])
    head_bias = settings.get("classifier_bias", False) if is_modern else True
    return HfEncoder(directory, model, head_bias)


def _fields(settings: Mapping[str, Any], optional: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return {setting: value} for the fields of config.json that are named in SIZES and `optional`."""
    sizes = {setting: settings[field] for setting, field in SIZES.items()}
    return sizes | {name: settings.get(field, default) for name, (field, default) in optional.items()}


def _bert(settings: Mapping[str, Any], family: str) -> dict[str, Any]:
    pad = settings.get("pad_token_id", 1)
    return {
        **BERT_SHAPE,
        **_fields(settings, BERT_FIELDS),
        "max_positions": settings["max_position_embeddings"],
        "norm_position": "pre" if family == "roberta-prelayernorm" else "post",
        "position_offset": pad + 1 if family in ROBERTAS else 0,
    }


def _modernbert(settings: Mapping[str, Any]) -> dict[str, Any]:
    model = {**MODERNBERT_SHAPE, **_fields(settings, MODERNBERT_FIELDS), "local_attention": 0}
    kinds = _layer_kinds(settings)
    if "sliding_attention" in kinds:
        model["local_attention"] = settings.get("local_attention", 128)
        model["global_attention_every"] = _global_every(kinds)
    parameters = settings.get("rope_parameters") or {}
    for kind in THETAS.keys() & set(kinds):
        name, old_field, default = THETAS[kind]
        rope = parameters.get(kind) or {}
        model[name] = float(rope.get("rope_theta", settings.get(old_field, default)))
    return model


def _layer_kinds(settings: Mapping[str, Any]) -> list[str]:
    every, layers = settings.get("global_attn_every_n_layers", 3), settings["num_hidden_layers"]
    if not 1 <= layers <= 10_000:
        raise ValueError(f"num_hidden_layers is {layers}")
    return settings.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(layers)
    ]


def _global_every(kinds: list[str]) -> int:
    """Return the distance, in layers, from the first layer, which is global, to the next global layer."""
    return kinds.index("full_attention", 1) if "full_attention" in kinds[1:] else len(kinds)


def _unsupported(settings: Mapping[str, Any], is_modern: bool) -> Iterator[str]:
    """Yield a message for each value in config.json that bert-dp does not support."""
    for name, only in FIXED.items():
        if (value := settings.get(name, only)) != only:
            yield f"{name} is {value!r:.80}, but bert-dp supports only {only}"
    if not is_modern:
        return
    if settings.get("mlp_bias", False) != settings.get("attention_bias", False):
        yield "mlp_bias differs from attention_bias, but bert-dp has one setting for both"
    kinds = _layer_kinds(settings)
    if "sliding_attention" in kinds:
        every = _global_every(kinds)
        if any((kind == "sliding_attention") != (i % every > 0) for i, kind in enumerate(kinds)):
            yield "layer_types: the global layers are not evenly spaced"
    for kind, rope in (settings.get("rope_parameters") or {}).items():
        if (rope or {}).get("rope_type", "default") != "default":
            found = f"{rope['rope_type']!r:.80}"
            yield f"rope_parameters.{kind} has rope_type {found}, but bert-dp supports only default"


def hf_issues(directory: Path, config: Config) -> list[Issue]:
    """Find the problems that prevent a run from starting from the weights in `directory`."""
    try:
        encoder = read_hf(directory)
    except ConfigError as error:
        return [*error.issues]
    own_head = ("head", "decoder_bias") if config.objective.name == "finetune" else ()
    free = (*own_head, "dropout", "attention_dropout")
    issues = []
    for name, value in encoder.model.items():
        if (given := getattr(config.model, name)) != value and name not in free:
            message = f"{given}, but {directory} has {value}"
            hint = "omit the setting, because config.json supplies it"
            issues.append(Issue(f"model.{name}", "conflict", message, given, "run.init_from", hint))
    if not own_head and encoder.head_bias != config.model.bias:
        reason = "classifier_bias differs from attention_bias, but bert-dp has one setting for both"
        issues.append(Issue("run.init_from", "unsupported", f"{directory}: {reason}", str(directory)))
    if config.run.init_keeps == "moments":
        message = f"moments, but {directory} contains only weights"
        issues.append(Issue("run.init_keeps", "conflict", message, "moments", "run.init_from", "use weights"))
    given = config.data.tokenizer
    if config.data.sources and (given is None or Path(given).is_file()):
        issues += tokenizer_issues(directory, None if given is None else sha256(Path(given)))
    return issues


def tokenizer_issues(directory: Path, sha: str | None) -> list[Issue]:
    """Check that the tokenizer of the data matches the weights in `directory`; return at most one issue.
    `sha`: SHA-256 of the data's tokenizer; None = the run would train a tokenizer."""
    own = directory / TOKENIZER
    if sha is not None and (not own.is_file() or sha in (sha256(own), _exported_tokenizer(directory))):
        return []
    if own.is_file():
        message = f"the data uses a different tokenizer than {directory}"
        hint = f"run `data build --tokenizer {own}` or, if data.sources is set, omit data.tokenizer"
    else:
        message = f"{directory} has no {TOKENIZER}, and a new tokenizer would have different token ids"
        hint = "save the model's tokenizer to that directory, or set data.tokenizer to its path"
    return [Issue("data.tokenizer", "conflict", message, sha, "run.init_from", hint)]


def _exported_tokenizer(directory: Path) -> str | None:
    """Return the run tokenizer's SHA-256 from export.json, or None. The exported tokenizer may differ."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads(read_regular(directory / EXPORTED, MAX_CONFIG_BYTES))["tokenizer_sha256"])
    return None
