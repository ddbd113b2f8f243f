"""Convert bert-dp's models to transformers classes, without importing transformers.

ModernBERT has most of bert-dp's parameter names. EuroBERT has no norm after its embedding, so bert-dp's
norm is applied to every row of the exported embedding table, and the decoder keeps the original table.
RoBERTa and RobertaPreLayerNorm count positions from pad_token_id + 1. Their layers, like those of BERT,
always have a bias, which is zero if bert-dp's model has none. Axes: as in bert_dp.model.bert.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_dp.config import Config, ConfigError, Kind, native_class, native_issues
from bert_dp.model.bert import make_norm
from bert_dp.model.hf import DECODER_BIAS, PREFIXES, PROJECTIONS, bert_names

Named = Mapping[str, Tensor]
Renamed = Iterator[tuple[str, Tensor]]

CLASS_OF: dict[Kind, str] = {
    "mlm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "encoder": "Model",
}


def settings_of(config: Config, special: Mapping[str, int], kind: Kind) -> dict[str, Any]:
    """Return the contents of config.json for the model's transformers class. `special`: special token ids by
    role. Raise a ConfigError that names the responsible settings if no class can represent the model."""
    prefix, model_type, own_settings, _ = _class_for(config, kind)
    model, finetune = config.model, config.finetune
    settings: dict[str, Any] = {
        "architectures": [prefix + CLASS_OF[kind]],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": config.data.sequence_length,
        "pad_token_id": special["pad"],
        "bos_token_id": special["cls"],
        "eos_token_id": special["sep"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if kind == "classifier":
        is_regression = finetune.kind == "regression"
        names = ("score",) if is_regression else finetune.labels
        settings["id2label"] = {str(i): name for i, name in enumerate(names)}
        settings["label2id"] = {name: i for i, name in enumerate(names)}
        settings["problem_type"] = finetune.kind if is_regression else f"{finetune.kind}_classification"
    return {**settings, **own_settings(config, special, kind)}


def tensors_of(model: nn.Module, config: Config, special: Mapping[str, int], kind: Kind) -> dict[str, Tensor]:
    """Return the parameters of `model` in fp32, named as in the transformers class. Omit a tied decoder.
    Raise ConfigError if no class can represent the model."""
    *_, own_tensors = _class_for(config, kind)
    renamed = own_tensors(model.state_dict(), config, special, kind)
    return {name: tensor.to(torch.float32).clone().contiguous() for name, tensor in renamed}


def _class_for(config: Config, kind: Kind) -> tuple[str, str, Any, Any]:
    if issues := native_issues(config, kind):
        raise ConfigError(issues)
    return _CLASSES[native_class(config.model) or ""]


def _modernbert_settings(config: Config, special: Mapping[str, int], kind: Kind) -> dict[str, Any]:
    """Return the settings of ModernBERT for transformers 4 and 5."""
    model = config.model
    has_local = model.local_attention > 0
    local_theta = model.local_rope_theta if has_local else model.rope_theta
    return {
        "cls_token_id": special["cls"],
        "sep_token_id": special["sep"],
        "norm_eps": model.norm_eps,
        "norm_bias": model.norm_bias,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "decoder_bias": model.decoder_bias,
        "classifier_bias": model.bias and kind == "mlm",
        "classifier_pooling": config.finetune.pooling,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "layer_types": [
            "sliding_attention" if model.is_local(i) else "full_attention" for i in range(model.num_layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": model.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "global_attn_every_n_layers": model.global_attention_every if has_local else 1,
        "global_rope_theta": model.rope_theta,
        "local_rope_theta": local_theta,
        "local_attention": model.local_attention or 2 * config.data.sequence_length,
    }


def _eurobert_settings(config: Config, special: Mapping[str, int], kind: Kind) -> dict[str, Any]:
    model = config.model
    return {
        "mask_token_id": special["mask"],
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "hidden_act": "gelu",
        "num_key_value_heads": model.num_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "classifier_pooling": {"cls": "bos", "mean": "mean"}[config.finetune.pooling],
        "tie_word_embeddings": False,  # the decoder uses the table without the norm
    }


def _bert_settings(config: Config, special: Mapping[str, int], kind: Kind) -> dict[str, Any]:
    """Return the settings of BERT, RoBERTa or RobertaPreLayerNorm."""
    model = config.model
    rows = model.max_positions or config.data.sequence_length + model.position_offset
    return {
        "max_position_embeddings": rows - model.position_offset + _unused_positions(config, special),
        "type_vocab_size": max(1, model.token_types),
        "layer_norm_eps": model.norm_eps,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
    }


def _unused_positions(config: Config, special: Mapping[str, int]) -> int:
    """Return the number of unused rows at the start of the transformers model's position table."""
    return 0 if native_class(config.model) == "BERT" else special["pad"] + 1


def _module(state: Named, hf_name: str, own_name: str, *, biased: bool = False) -> Renamed:
    """Yield the weight and bias of a linear layer or a norm. `biased`: the transformers class always has a
    bias, which is zero if bert-dp's model has none."""
    weight, bias = state[f"{own_name}.weight"], state.get(f"{own_name}.bias")
    yield f"{hf_name}.weight", weight
    if bias is None and biased:
        bias = weight.new_zeros(weight.shape[0])
    if bias is not None:
        yield f"{hf_name}.bias", bias


def _projections(state: Named, attention: str, names: Mapping[str, str], *, biased: bool = False) -> Renamed:
    """Yield query, key and value as separate projections. The bias of the key, if any, is zero."""
    weight_3HH = state[f"{attention}.Wqkv.weight"]
    zeros_H = weight_3HH.new_zeros(weight_3HH.shape[1])
    has_bias = f"{attention}.q_bias" in state
    for role, weight_HH in zip("qkv", weight_3HH.chunk(3), strict=True):
        yield f"{names[role]}.weight", weight_HH
        if has_bias or biased:
            yield f"{names[role]}.bias", state.get(f"{attention}.{role}_bias", zeros_H)


def _modernbert_tensors(state: Named, config: Config, special: Mapping[str, int], kind: Kind) -> Renamed:
    for name, tensor in state.items():
        hf_name = name.removeprefix("model.") if kind == "encoder" else name
        if name.startswith("head.classifier."):
            hf_name = name.removeprefix("head.")
        if name.endswith(".q_bias"):
            bias_3H = torch.cat([tensor, torch.zeros_like(tensor), state[name.replace(".q_", ".v_")]])
            yield hf_name.replace(".q_bias", ".Wqkv.bias"), bias_3H
        elif name == "head.decoder_bias" and kind == "mlm":
            yield DECODER_BIAS["ModernBERT"], tensor
        elif not name.endswith(".v_bias") and not (kind == "encoder" and name.startswith("head.")):
            yield hf_name, tensor


def _eurobert_tensors(state: Named, config: Config, special: Mapping[str, int], kind: Kind) -> Renamed:
    model = config.model
    prefix = "" if kind == "encoder" else "model."
    table_VH = state["model.embeddings.tok_embeddings.weight"]
    norm = make_norm(model).to(table_VH.dtype)
    norm.load_state_dict({"weight": state["model.embeddings.norm.weight"]})
    with torch.no_grad():
        yield f"{prefix}embed_tokens.weight", norm(table_VH)
    for i in range(model.num_layers):
        own_name, hf_name = f"model.layers.{i}", f"{prefix}layers.{i}"
        roles = {role: f"{hf_name}.self_attn.{role}_proj" for role in "qkv"}
        yield from _projections(state, f"{own_name}.attn", roles)
        yield from _module(state, f"{hf_name}.self_attn.o_proj", f"{own_name}.attn.Wo")
        for name, tensor in _module(state, "Wi", f"{own_name}.mlp.Wi"):
            gate, up = tensor.chunk(2)  # the activation function applies to the first half
            yield name.replace("Wi", f"{hf_name}.mlp.gate_proj"), gate
            yield name.replace("Wi", f"{hf_name}.mlp.up_proj"), up
        yield from _module(state, f"{hf_name}.mlp.down_proj", f"{own_name}.mlp.Wo")
        yield from _module(state, f"{hf_name}.input_layernorm", f"{own_name}.attn_norm")
        yield from _module(state, f"{hf_name}.post_attention_layernorm", f"{own_name}.mlp_norm")
    yield from _module(state, f"{prefix}norm", "model.final_norm")
    if kind == "mlm":
        yield "lm_head.weight", table_VH
        if model.bias:  # EuroBERT's mlp_bias also applies to the decoder
            yield "lm_head.bias", table_VH.new_zeros(len(table_VH))
    if kind == "classifier":
        yield from _module(state, "dense", "head.dense")
        yield from _module(state, "classifier", "head.classifier")


def _bert_tensors(state: Named, config: Config, special: Mapping[str, int], kind: Kind) -> Renamed:
    """Yield the tensors of BERT, RoBERTa or RobertaPreLayerNorm."""
    model, family = config.model, native_class(config.model) or ""
    prefix = "" if kind == "encoder" else PREFIXES[family]
    hidden, places = model.hidden_size, "model.embeddings."
    zeros_1H = state[f"{places}tok_embeddings.weight"].new_zeros(1, hidden)
    unused, own_unused = _unused_positions(config, special), model.position_offset
    table_SH = state[f"{places}position_embeddings.weight"][max(0, own_unused - unused) :]
    tables = {
        **state,
        f"{places}position_embeddings.weight": torch.cat(
            [zeros_1H.expand(max(0, unused - own_unused), hidden), table_SH]
        ),
        f"{places}token_type_embeddings.weight": state.get(f"{places}token_type_embeddings.weight", zeros_1H),
    }
    for hf_name, own_name in bert_names(model, family, prefix, has_head=kind == "mlm"):
        yield from _module(tables, hf_name, own_name, biased=not own_name.endswith("_embeddings"))
    for i in range(model.num_layers):
        attention = f"{prefix}encoder.layer.{i}.attention.self"
        roles = {role: f"{attention}.{word}" for role, word in PROJECTIONS.items()}
        yield from _projections(state, f"model.layers.{i}.attn", roles, biased=True)
    if kind == "mlm":
        bias_V = state.get("head.decoder_bias", zeros_1H.new_zeros(model.vocab_size))
        yield DECODER_BIAS[family], bias_V
    elif kind == "classifier":
        dense, last = "classifier.dense", "classifier.out_proj"
        if family == "BERT":
            dense, last = "bert.pooler.dense", "classifier"
        yield from _module(state, dense, "head.dense")
        yield from _module(state, last, "head.classifier")
    else:  # zeros for the untrained pooler, because transformers would initialise it at random
        yield "pooler.dense.weight", zeros_1H.new_zeros(hidden, hidden)
        yield "pooler.dense.bias", zeros_1H.new_zeros(hidden)


_CLASSES = {
    "ModernBERT": ("ModernBert", "modernbert", _modernbert_settings, _modernbert_tensors),
    "EuroBERT": ("EuroBert", "eurobert", _eurobert_settings, _eurobert_tensors),
    "BERT": ("Bert", "bert", _bert_settings, _bert_tensors),
    "RoBERTa": ("Roberta", "roberta", _bert_settings, _bert_tensors),
    "RobertaPreLayerNorm": ("RobertaPreLayerNorm", "roberta-prelayernorm", _bert_settings, _bert_tensors),
}
