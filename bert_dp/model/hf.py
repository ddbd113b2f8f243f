"""Map tensor names of transformers to ours, and load the weights that a run starts from.

ModernBERT has our names. BERT, RoBERTa and RobertaPreLayerNorm share names, except for the prefix, the head
and the positions of the norms. Axes as in bert_dp.model.bert.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_dp.config import Config, ConfigError, Issue, ModelConfig, hf_issues, native_class, tokenizer_issues
from bert_dp.config.hf import WEIGHTS

FRONTS = {"BERT": "bert.", "RoBERTa": "roberta.", "RobertaPreLayerNorm": "roberta_prelayernorm."}
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
"""Name prefixes of heads that are not loaded."""
NOT_STORED = ("position_ids", "token_type_ids", "decoder.weight", "decoder.bias")
"""Name suffixes of buffers and of a tied decoder, which is the embedding with a separate bias."""


def bert_names(model: ModelConfig, family: str, front: str, *, has_head: bool) -> Iterator[tuple[str, str]]:
    """Yield (their name, our name) of each table, norm and linear layer of BERT, RoBERTa or
    RobertaPreLayerNorm, without ".weight" and ".bias", and without query, key and value. `front`: prefix of
    their names for the encoder; `has_head`: include the token-prediction head, except the decoder."""
    for theirs, ours in IN_EMBEDDINGS.items():
        yield f"{front}embeddings.{theirs}", f"model.embeddings.{ours}"
    for i in range(model.num_layers):
        for theirs, ours in (*IN_BLOCKS, *NORMS[model.norm_position]):
            yield f"{front}encoder.layer.{i}.{theirs}", f"model.layers.{i}.{ours}"
    if model.norm_position == "pre":
        yield f"{front}LayerNorm", "model.final_norm"
    if has_head:
        is_bert = family == "BERT"
        yield "cls.predictions.transform.dense" if is_bert else "lm_head.dense", "head.dense"
        yield "cls.predictions.transform.LayerNorm" if is_bert else "lm_head.layer_norm", "head.norm"


def load_hf(
    directory: Path, config: Config, tokenizer: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters in DIR/model.safetensors by our names, and the names of those not loaded.
    `tokenizer`: hash of the data's tokenizer. Raises ConfigError for a file that cannot be read or does not
    fit."""
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
    """Yield the parameters under our names. Raises ConfigError for a key bias, which our attention lacks."""
    is_bare = not any(name.startswith("model.") for name in tensors)  # saved from AutoModel
    for theirs, tensor in tensors.items():
        name = f"model.{theirs}" if is_bare else theirs
        if theirs == "decoder.weight":  # tied to the embedding
            continue
        if theirs == "decoder.bias":
            yield "head.decoder_bias", tensor
        elif name.endswith(".Wqkv.bias"):
            layer = name.removesuffix(".Wqkv.bias")
            query_H, key_H, value_H = tensor.chunk(3)
            if key_H.any():
                message = f"{theirs} has a key bias, which our attention lacks"
                raise ConfigError([Issue("run.init_from", "unsupported", message, theirs)])
            yield f"{layer}.q_bias", query_H.clone()
            yield f"{layer}.v_bias", value_H.clone()
        else:
            yield f"head.{name}" if name.startswith("classifier.") else name, tensor


def from_bert(
    tensors: Mapping[str, Tensor], config: Config, family: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters of BERT, RoBERTa or RobertaPreLayerNorm under our names, and the names of those
    not loaded. Raises ConfigError for missing tensors, or tensors that the class does not have."""
    left = {
        name.removeprefix(FRONTS[family]).replace(".gamma", ".weight").replace(".beta", ".bias"): tensor
        for name, tensor in tensors.items()
    }
    missing: list[str] = []

    def take(name: str) -> Tensor:
        if name not in left:
            missing.append(name)
        return left.pop(name, torch.empty(0))

    has_head = config.objective.name == "mlm"
    state: dict[str, Tensor] = {"head.decoder_bias": take(DECODER_BIAS[family])} if has_head else {}
    for theirs, ours in bert_names(config.model, family, "", has_head=has_head):
        for leaf in ("weight",) if ours.endswith("_embeddings") else ("weight", "bias"):
            state[f"{ours}.{leaf}"] = take(f"{theirs}.{leaf}")
    dropped = []
    for i in range(config.model.num_layers):
        ours, theirs = f"model.layers.{i}.attn", f"encoder.layer.{i}.attention.self"
        roles = {role: f"{theirs}.{word}" for role, word in PROJECTIONS.items()}
        state[f"{ours}.Wqkv.weight"] = torch.cat([take(f"{name}.weight") for name in roles.values()])
        state |= {f"{ours}.{role}_bias": take(f"{roles[role]}.bias") for role in "qv"}
        # without rotary positions a key bias shifts all scores of a query alike, which softmax ignores
        if left.pop(f"{roles['k']}.bias", torch.zeros(1)).any():
            dropped.append(f"{roles['k']}.bias")
    heads = DROPPED if has_head else (*DROPPED, "cls.", "lm_head.")
    others = [name for name in left if not name.endswith(NOT_STORED)]
    dropped += [name for name in others if name.startswith(heads)]
    surplus = [name for name in others if not name.startswith(heads)]
    lines = [f"has no {', '.join(missing)}"] if missing else []
    lines += [f"has {', '.join(surplus)}, which {family} does not have"] if surplus else []
    messages = [f"{WEIGHTS} {line[:400]}" for line in lines]
    if messages:
        raise ConfigError([Issue("run.init_from", "conflict", line, WEIGHTS) for line in messages])
    return state, tuple(dropped)
