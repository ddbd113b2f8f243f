"""Compare the ModernBERT of `run.init_from: hf:DIR` with the model of a configuration. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_dp.config.errors import ConfigError, Issue, read_regular, refusing
from bert_dp.config.schema import Config

HF = "hf:"  # before a directory in the format of transformers
MAX_BYTES = 2**22  # of config.json
# config.json -> our setting of the same meaning
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "attention_bias": "bias",
    "mlp_bias": "bias",
}
# config.json -> the only value that our models have
FIXED = {"hidden_activation": "gelu", "classifier_activation": "gelu", "tie_word_embeddings": True}
SHAPE = {"position": "rope", "norm": "layernorm", "mlp": "geglu", "first_attention_norm": False}
THETAS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
"""Kind of layer -> its field in the layout before transformers 5, and the default."""


def hf_directory(init_from: str | None) -> Path | None:
    """Return DIR of hf:DIR."""
    if init_from is None or not init_from.startswith(HF):
        return None
    return Path(init_from.removeprefix(HF))


def modernbert_issues(directory: Path, config: Config) -> list[Issue]:
    """Find why the weights in `directory` do not fit this model, an issue for each field."""
    try:
        with refusing("run.init_from", str(directory / "config.json")):
            settings = json.loads(read_regular(directory / "config.json", MAX_BYTES))
            if not isinstance(settings, dict):
                raise ValueError("no object")
    except ConfigError as error:
        return [*error.issues]
    if (kind := settings.get("model_type")) != "modernbert":
        lines = [f"model_type is {kind!r}; only modernbert can be begun with"]
    elif not (directory / "model.safetensors").is_file():
        lines = ["no model.safetensors"]
    else:
        lines = [*_differences(settings, config)]
        if config.run.init_keeps == "moments":
            lines.append("holds weights alone; set run.init_keeps=weights")
    return [Issue("run.init_from", "conflict", f"{directory}: {line}", str(directory)) for line in lines]


def _differences(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    model = config.model
    mlm = config.objective.name == "mlm"
    for name, value in {**SHAPE, **({"head": "dense"} if mlm else {})}.items():
        if (ours := getattr(model, name)) != value:
            yield f"ModernBERT has {name} {value}; set model.{name}={value}, not {ours}"
    for theirs, name in {**FIELDS, **({"classifier_bias": "bias"} if mlm else {})}.items():
        value, ours = settings.get(theirs), getattr(model, name)
        if value != ours:
            yield f"{theirs} is {value}; set model.{name}={value}, not {ours}"
    for theirs, only in FIXED.items():
        if (value := settings.get(theirs, only)) != only:
            yield f"{theirs} is {value}, and our models have {only} alone"
    if mlm and settings.get("decoder_bias", True):
        yield "decoder_bias is true, and our decoder has no bias"
    # every layer attends to the whole sequence with the same positions, in either layout
    every = settings.get("global_attn_every_n_layers", 3)
    kinds = settings.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(config.model.num_layers)
    ]
    length, window = config.data.sequence_length, settings.get("local_attention", 128)
    if "sliding_attention" in kinds and window // 2 < length - 1:
        yield f"local_attention is {window}, which is not global at data.sequence_length {length}"
    parameters = settings.get("rope_parameters") or {}
    for kind in sorted(set(kinds) & THETAS.keys()):
        field, default = THETAS[kind]
        rope = parameters.get(kind) or {}
        theta = rope.get("rope_theta", settings.get(field, default))
        if rope.get("rope_type", "default") != "default":
            yield f"rope_parameters.{kind} has rope_type {rope['rope_type']}, and ours is default"
        if theta != config.model.rope_theta:
            yield f"{field} is {theta}; set model.rope_theta={theta}, not {config.model.rope_theta}"
