"""Which class of transformers holds a model, and why none does."""

from __future__ import annotations

from typing import Any, Literal

from bert_dp.config.error import ConfigError
from bert_dp.config.schema import Config, ModelConfig

Kind = Literal["mlm", "classifier", "encoder"]
"""What is exported: with the head that predicts tokens, with that of labels, or without one."""

_CLASSES = {
    ("rope", "layernorm"): "ModernBERT",
    ("rope", "rmsnorm"): "EuroBERT",
    ("learned", "layernorm"): "RobertaPreLayerNorm",
}
# what a class computes whatever its configuration says: setting -> the only value that it holds
_HOLDS: dict[str, dict[str, Any]] = {
    "ModernBERT": {"mlp": "geglu", "first_attention_norm": False},
    "EuroBERT": {"mlp": "geglu", "first_attention_norm": True},
    "RobertaPreLayerNorm": {"mlp": "gelu", "first_attention_norm": True},
}
_PREDICTS_BY = {"ModernBERT": "dense", "EuroBERT": "none", "RobertaPreLayerNorm": "dense"}  # model.head
_OTHERWISE = "use `bert-dp export onnx`, which holds any run"


def native_class(model: ModelConfig) -> str | None:
    """The architecture of transformers with these positions and this norm."""
    return _CLASSES.get((model.position, model.norm))


def native_head(model: ModelConfig) -> str:
    """The architecture of transformers whose head `finetune.head: native` is. Raises ConfigError for a model
    without one."""
    if (name := native_class(model)) is None:
        raise ConfigError(
            [
                f"finetune.head: native, but transformers has no class for model.position: {model.position} "
                f"with model.norm: {model.norm}; use finetune.head: recipe"
            ]
        )
    return name


def native_issues(config: Config, kind: Kind) -> list[str]:
    """Why no class of transformers can hold this model; one line for each setting."""
    model, finetune = config.model, config.finetune
    name = native_class(model)
    if name is None:
        return [
            f"model.position: {model.position} with model.norm: {model.norm}, and no class of transformers "
            f"has both; {_OTHERWISE}"
        ]
    if kind == "classifier" and finetune.head != "native":
        return [
            f"finetune.head: {finetune.head}, which no class of transformers has; finetune with "
            f"finetune.head: native, or {_OTHERWISE}"
        ]
    holds = {**_HOLDS[name], **({"head": _PREDICTS_BY[name]} if kind == "mlm" else {})}
    issues = [
        f"model.{field}: {_shown(getattr(model, field))}, but {name} has {_shown(value)} alone; {_OTHERWISE}"
        + (", or --encoder, which leaves the head out" if field == "head" else "")
        for field, value in holds.items()
        if getattr(model, field) != value
    ]
    if kind == "classifier" and name == "RobertaPreLayerNorm" and finetune.pooling != "cls":
        issues.append(f"finetune.pooling: {finetune.pooling}, but {name} has cls alone; {_OTHERWISE}")
    return issues


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
