"""Read the weights of a ModernBERT in the format of transformers, by our names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_dp import record
from bert_dp.config import Config, ConfigError, Issue, modernbert_issues
from bert_dp.config.stored import sha256
from bert_dp.parallel import State
from bert_dp.record.exported import EXPORTED

TIED = "decoder.weight"  # to the embedding


def modernbert_state(directory: Path, config: Config, tokenizer: str | None) -> State:
    """Return the state that a run begins with from DIR/model.safetensors. `tokenizer`: hash of the data's.

    Raises ConfigError for a file that cannot be read or does not fit.
    """
    issues = modernbert_issues(directory, config)
    own = directory / record.TOKENIZER
    known = {(record.read_json(directory / EXPORTED) or {}).get("tokenizer_sha256")}  # of our own exports
    if tokenizer is not None and own.is_file() and tokenizer not in known | {sha256(own)}:
        message = f"the shards have another tokenizer than {directory}"
        hint = f"build them with data.tokenizer={own}"
        issues.append(Issue("data.tokenizer", "conflict", message, tokenizer, "run.init_from", hint))
    if issues:
        raise ConfigError(issues)
    try:
        tensors = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as error:
        message = f"{directory}: model.safetensors cannot be read ({error})"
        raise ConfigError([Issue("run.init_from", "damaged", message, str(directory))]) from None
    return {"model": dict(our_names(tensors)), "optimizer": {}, "scaler": {}}


def our_names(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under our names. Raises ConfigError for a bias of the keys, which ours lack."""
    is_bare = not any(name.startswith("model.") for name in tensors)  # of AutoModel
    for theirs, tensor in tensors.items():
        name = f"model.{theirs}" if is_bare else theirs
        if theirs == TIED:
            continue
        if name.endswith(".Wqkv.bias"):
            layer = name.removesuffix(".Wqkv.bias")
            query_H, key_H, value_H = tensor.chunk(3)
            if key_H.any():
                message = f"{theirs} has a bias of the keys, which our attention lacks"
                raise ConfigError([Issue("run.init_from", "unsupported", message, theirs)])
            yield f"{layer}.q_bias", query_H.clone()
            yield f"{layer}.v_bias", value_H.clone()
        else:
            yield f"head.{name}" if name.startswith("classifier.") else name, tensor
