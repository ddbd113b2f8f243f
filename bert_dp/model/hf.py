"""Map tensor names of transformers to ours, and load the weights that a run begins with.

ModernBERT has our names. BERT, RoBERTa and RobertaPreLayerNorm share theirs but for the front, the head and
where the norms stand. Axes as in bert_dp.model.bert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_dp.config import Config, ConfigError, Issue, ModelConfig, hf_issues, native_class, tokenizer_issues
from bert_dp.config.hf import WEIGHTS

Names = Iterator[tuple[str, str]]
"""Their name and ours of linear layers, norms and tables, without the names of their tensors."""
FRONTS = {"BERT": "bert.", "RoBERTa": "roberta.", "RobertaPreLayerNorm": "roberta_prelayernorm."}
PROJECTIONS = {"q": "query", "k": "key", "v": "value"}
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
"""Prefixes of the names of heads that are not loaded."""
NOT_STORED = ("position_ids", "token_type_ids", "decoder.weight", "decoder.bias")
"""Suffixes of the names of buffers, and of a tied decoder, which is the embedding and its bias."""


def embedding_names() -> Names:
    """Yield the names of BERT's embedding tables and of the norm after them."""
    yield "embeddings.word_embeddings", "model.embeddings.tok_embeddings"
    yield "embeddings.token_type_embeddings", "model.embeddings.token_type_embeddings"
    yield "embeddings.position_embeddings", "model.embeddings.position_embeddings"
    yield "embeddings.LayerNorm", "model.embeddings.norm"


def block_names(model: ModelConfig) -> Names:
    """Yield the names of BERT's blocks without query, key and value, and of the final norm where there is
    one."""
    for i in range(model.num_layers):
        for theirs, ours in (*IN_BLOCKS, *NORMS[model.norm_position]):
            yield f"encoder.layer.{i}.{theirs}", f"model.layers.{i}.{ours}"
    if model.norm_position == "pre":
        yield "LayerNorm", "model.final_norm"


def head_names(family: str) -> Names:
    """Yield the names of the head that predicts tokens, without the decoder."""
    if family == "BERT":
        yield "cls.predictions.transform.dense", "head.dense"
        yield "cls.predictions.transform.LayerNorm", "head.norm"
    else:
        yield "lm_head.dense", "head.dense"
        yield "lm_head.layer_norm", "head.norm"


def decoder_bias_name(family: str) -> str:
    """Return the name of the decoder's bias."""
    return {"ModernBERT": "decoder.bias", "BERT": "cls.predictions.bias"}.get(family, "lm_head.bias")


def load_hf(
    directory: Path, config: Config, tokenizer: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters in DIR/model.safetensors by our names, and the names of those that are left out.
    `tokenizer`: hash of the data's.

    Raises ConfigError for a file that cannot be read or does not fit.
    """
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
    """Yield the parameters under our names. Raises ConfigError for a bias of the keys, which ours lack."""
    is_bare = not any(name.startswith("model.") for name in tensors)  # of AutoModel
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
                message = f"{theirs} has a bias of the keys, which our attention lacks"
                raise ConfigError([Issue("run.init_from", "unsupported", message, theirs)])
            yield f"{layer}.q_bias", query_H.clone()
            yield f"{layer}.v_bias", value_H.clone()
        else:
            yield f"head.{name}" if name.startswith("classifier.") else name, tensor


def from_bert(
    tensors: Mapping[str, Tensor], config: Config, family: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the parameters of BERT, RoBERTa or RobertaPreLayerNorm under our names, and the names of those
    that are left out.

    A bias of the keys is left out: without rotary positions it shifts all scores of a query alike, which
    softmax ignores. Raises ConfigError for tensors that are missing, or that the class does not have.
    """
    left = {
        name.removeprefix(FRONTS[family]).replace(".gamma", ".weight").replace(".beta", ".bias"): tensor
        for name, tensor in tensors.items()
    }
    missing: list[str] = []

    def take(name: str) -> Tensor:
        if name not in left:
            missing.append(name)
        return left.pop(name, torch.empty(0))

    state: dict[str, Tensor] = {}
    for theirs, ours in embedding_names():
        state[f"{ours}.weight"] = take(f"{theirs}.weight")
    state["model.embeddings.norm.bias"] = take("embeddings.LayerNorm.bias")
    whole = [*block_names(config.model)]
    if config.objective.name == "mlm":
        whole += head_names(family)
        state["head.decoder_bias"] = take(decoder_bias_name(family))
    for theirs, ours in whole:
        for leaf in ("weight", "bias"):
            state[f"{ours}.{leaf}"] = take(f"{theirs}.{leaf}")
    dropped = []
    for i in range(config.model.num_layers):
        ours, theirs = f"model.layers.{i}.attn", f"encoder.layer.{i}.attention.self"
        roles = {role: f"{theirs}.{word}" for role, word in PROJECTIONS.items()}
        state[f"{ours}.Wqkv.weight"] = torch.cat([take(f"{name}.weight") for name in roles.values()])
        state |= {f"{ours}.{role}_bias": take(f"{roles[role]}.bias") for role in "qv"}
        if left.pop(f"{roles['k']}.bias", torch.zeros(1)).any():
            dropped.append(f"{roles['k']}.bias")
    heads = DROPPED if config.objective.name == "mlm" else (*DROPPED, "cls.", "lm_head.")
    dropped += [name for name in left if name.startswith(heads) and not name.endswith(NOT_STORED)]
    surplus = [name for name in left if not name.startswith(heads) and not name.endswith(NOT_STORED)]
    lines = [f"has no {', '.join(missing)}"] if missing else []
    lines += [f"has {', '.join(surplus)}, which {family} does not have"] if surplus else []
    if lines:
        raise ConfigError(
            [Issue("run.init_from", "conflict", f"{WEIGHTS} {line[:400]}", WEIGHTS) for line in lines]
        )
    return state, tuple(dropped)
