"""Map transformers' tensor names to bert-dp's, and load initial weights saved by transformers.

ModernBERT has nearly the same names as bert-dp. The names of BERT, RoBERTa and RobertaPreLayerNorm differ
from each other only in the prefix, the head and the positions of the norms. Axes: as in bert_dp.model.bert.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_dp.config import Config, ConfigError, Issue, ModelConfig, hf_issues, native_class, tokenizer_issues
from bert_dp.config.hf import WEIGHTS

PREFIXES = {"BERT": "bert.", "RoBERTa": "roberta.", "RobertaPreLayerNorm": "roberta_prelayernorm."}
DECODER_BIAS = {"ModernBERT": "decoder.bias", "BERT": "cls.predictions.bias"}
DECODER_BIAS |= dict.fromkeys(("RoBERTa", "RobertaPreLayerNorm"), "lm_head.bias")
PROJECTIONS = {"q": "query", "k": "key", "v": "value"}
IN_EMBEDDINGS = {
    "word_embeddings": "tok_embeddings",
    "token_type_embeddings": "token_type_embeddings",
    "position_embeddings": "position_embeddings",
    "LayerNorm": "norm",
}
IN_BLOCKS = (
    ("attention.output.dense", "attn.Wo"),
    ("intermediate.dense", "mlp.Wi"),
    ("output.dense", "mlp.Wo"),
)
NORMS = {
    "pre": (("attention.LayerNorm", "attn_norm"), ("intermediate.LayerNorm", "mlp_norm")),
    "post": (("attention.output.LayerNorm", "attn_norm"), ("output.LayerNorm", "mlp_norm")),
}
DROPPED = ("pooler.", "classifier.", "cls.seq_relationship.", "qa_outputs.")
"""Name prefixes of heads that are never loaded."""
NOT_STORED = ("position_ids", "token_type_ids", "decoder.weight", "decoder.bias")
"""Name suffixes of tensors to skip: buffers, and copies of the embedding and of the decoder bias."""


def bert_names(model: ModelConfig, family: str, prefix: str, *, has_head: bool) -> Iterator[tuple[str, str]]:
    """Yield (name in transformers, name in bert-dp) for each embedding, norm and linear layer of BERT,
    RoBERTa or RobertaPreLayerNorm, except query, key and value. The names omit ".weight" and ".bias".
    `prefix`: the encoder's prefix in transformers. `has_head`: include the prediction head but no decoder."""
    for hf_name, own_name in IN_EMBEDDINGS.items():
        yield f"{prefix}embeddings.{hf_name}", f"model.embeddings.{own_name}"
    for i in range(model.num_layers):
        for hf_name, own_name in (*IN_BLOCKS, *NORMS[model.norm_position]):
            yield f"{prefix}encoder.layer.{i}.{hf_name}", f"model.layers.{i}.{own_name}"
    if model.norm_position == "pre":
        yield f"{prefix}LayerNorm", "model.final_norm"
    if has_head:
        is_bert = family == "BERT"
        yield "cls.predictions.transform.dense" if is_bert else "lm_head.dense", "head.dense"
        yield "cls.predictions.transform.LayerNorm" if is_bert else "lm_head.layer_norm", "head.norm"


def load_hf(
    directory: Path, config: Config, tokenizer: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters in model.safetensors under bert-dp's names, and the names of tensors that are
    not loaded. `tokenizer`: hash of the data's tokenizer. Raise ConfigError if the file cannot be read or
    does not fit the configuration."""
    issues = hf_issues(directory, config)
    if tokenizer is not None:
        issues += tokenizer_issues(directory, tokenizer)
    if issues:
        raise ConfigError(issues)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        message = f"{directory}: {WEIGHTS} cannot be read ({error})"
        raise ConfigError([Issue("run.init_from", "damaged", message, str(directory))]) from None
    if (family := native_class(config.model)) == "ModernBERT":
        return dict(from_modernbert(tensors)), ()
    assert family is not None
    return from_bert(tensors, config, family)


def from_modernbert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under bert-dp's names. Raise ConfigError if a key bias is not zero."""
    is_bare = not any(name.startswith("model.") for name in tensors)  # saved by AutoModel
    for hf_name, tensor in tensors.items():
        name = f"model.{hf_name}" if is_bare else hf_name
        if hf_name == "decoder.weight":  # tied to the embedding
            continue
        if hf_name == "decoder.bias":
            yield "head.decoder_bias", tensor
        elif name.endswith(".Wqkv.bias"):
            layer = name.removesuffix(".Wqkv.bias")
            query_H, key_H, value_H = tensor.chunk(3)
            if key_H.any():
                message = f"{hf_name} contains a nonzero key bias, which bert-dp does not support"
                raise ConfigError([Issue("run.init_from", "unsupported", message, hf_name)])
            yield f"{layer}.q_bias", query_H.clone()
            yield f"{layer}.v_bias", value_H.clone()
        else:
            yield f"head.{name}" if name.startswith("classifier.") else name, tensor


def from_bert(
    tensors: Mapping[str, Tensor], config: Config, family: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters of BERT, RoBERTa or RobertaPreLayerNorm under bert-dp's names, and the names of
    tensors that are not loaded. Raise ConfigError if a tensor is missing or unknown."""
    left = {
        name.removeprefix(PREFIXES[family]).replace(".gamma", ".weight").replace(".beta", ".bias"): tensor
        for name, tensor in tensors.items()
    }
    missing: list[str] = []

    def take(name: str) -> Tensor:
        if name not in left:
            missing.append(name)
        return left.pop(name, torch.empty(0))

    has_head = config.objective.name == "mlm"
    state: dict[str, Tensor] = {"head.decoder_bias": take(DECODER_BIAS[family])} if has_head else {}
    for hf_name, own_name in bert_names(config.model, family, "", has_head=has_head):
        for leaf in ("weight",) if own_name.endswith("_embeddings") else ("weight", "bias"):
            state[f"{own_name}.{leaf}"] = take(f"{hf_name}.{leaf}")
    dropped = []
    for i in range(config.model.num_layers):
        own_name, hf_name = f"model.layers.{i}.attn", f"encoder.layer.{i}.attention.self"
        roles = {role: f"{hf_name}.{word}" for role, word in PROJECTIONS.items()}
        state[f"{own_name}.Wqkv.weight"] = torch.cat([take(f"{name}.weight") for name in roles.values()])
        state |= {f"{own_name}.{role}_bias": take(f"{roles[role]}.bias") for role in "qv"}
        # without rotary positions a key bias shifts all scores of a query equally, so it has no effect
        if left.pop(f"{roles['k']}.bias", torch.zeros(1)).any():
            dropped.append(f"{roles['k']}.bias")
    heads = DROPPED if has_head else (*DROPPED, "cls.", "lm_head.")
    others = [name for name in left if not name.endswith(NOT_STORED)]
    dropped += [name for name in others if name.startswith(heads)]
    surplus = [name for name in others if not name.startswith(heads)]
    lines = [f"has no {', '.join(missing)}"] if missing else []
    lines += [f"contains {', '.join(surplus)}, which {family} does not have"] if surplus else []
    messages = [f"{WEIGHTS} {line[:400]}" for line in lines]
    if messages:
        raise ConfigError([Issue("run.init_from", "conflict", line, WEIGHTS) for line in messages])
    return state, tuple(dropped)
