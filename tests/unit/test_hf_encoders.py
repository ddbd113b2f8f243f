"""Test runs that start from transformers encoders: equal outputs and gradients, and unchanged exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_dp.config import Config, hf_issues, load_config, read_hf, resolve
from bert_dp.exporting.hf import settings_of, tensors_of
from bert_dp.model.bert import CrammedBert
from bert_dp.model.hf import from_bert, from_modernbert, load_hf
from bert_dp.model.load import make_model
from tests.helpers import raised_issues
from tests.runs_to_export import LABELS, padded_batch

transformers = pytest.importorskip("transformers")

LENGTH = 24
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 48}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", {"vocab_size": 60, "max_position_embeddings": 40, "layer_norm_eps": 1e-3}),
    "RoBERTa": (
        "Roberta",
        {"vocab_size": 61, "max_position_embeddings": 42, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "RobertaPreLayerNorm": (
        "RobertaPreLayerNorm",
        {"vocab_size": 60, "max_position_embeddings": 42, "pad_token_id": 1, "type_vocab_size": 2},
    ),
    "ModernBERT": (
        "ModernBert",
        {
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id"), 0),
            "sep_token_id": 0,
            "vocab_size": 60,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}
ROLES = ("pad", "unk", "cls", "sep", "mask")


class WideRotary(nn.Module):
    """Rotary tables of ModernBERT in the precision of the input; transformers computes them in fp32."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
        theta = PEERS["ModernBERT"][1]["rope_parameters"][layer_type]["rope_theta"]
        angle = position_ids[..., None] * theta ** -(torch.arange(half, dtype=x.dtype) / half)
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def write_peer(folder: Path, family: str, kind: str = "ForMaskedLM") -> nn.Module:
    """Save a transformers model in fp64 with noise in every parameter, and return the model."""
    name, settings = PEERS[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    peer = getattr(transformers, name + kind)(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    for module in peer.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # because bert-dp trains the row of padding like any other row
        if family == "ModernBERT" and hasattr(module, "rotary_emb"):
            module.rotary_emb = WideRotary()
    peer.save_pretrained(folder)
    return peer


def config_for(folder: Path, **sections: Any) -> Config:
    """Return the configuration of a run that starts from a directory and sets nothing of the model."""
    data = {"sequence_length": LENGTH, **sections.pop("data", {"path": "shards"})}
    given = {"run": {"init_from": f"hf:{folder}"}, "data": data, "schedule": {"steps": 3}}
    return resolve([read_hf(folder).level(), given, sections])


def classifying(**finetune: Any) -> dict[str, Any]:
    return {"objective": {"name": "finetune"}, "finetune": {**LABELS, "head": "native", **finetune}}


def model_from(folder: Path, config: Config) -> tuple[CrammedBert, tuple[str, ...]]:
    """Return the model in fp64 with the weights of a directory, and the names of dropped tensors."""
    weights, dropped = load_hf(folder, config, None)
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_state_dict(weights)
    assert isinstance(model, CrammedBert)
    return model.eval(), dropped


@pytest.mark.parametrize("family", PEERS)
def test_states_logits_and_gradients_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # ModernBERT rotates in fp32
    peer = write_peer(tmp_path, family)
    config = config_for(tmp_path)
    model, _ = model_from(tmp_path, config)
    ids_BS, mask_BS, types_BS = padded_batch(LENGTH, config.model.vocab_size, pad=1)
    types_BS = types_BS % max(1, config.model.token_types)
    typed = {"token_type_ids": types_BS} if config.model.token_types else {}
    found = peer.base_model(ids_BS, mask_BS, **typed).last_hidden_state
    states = model.model(ids_BS, mask_BS != 0, types_BS if typed else None)
    real_BS = mask_BS != 0
    torch.testing.assert_close(states[real_BS], found[real_BS], rtol=1e-10, atol=1e-10)

    positions_P = real_BS.flatten().nonzero()[:, 0]
    logits = peer(input_ids=ids_BS, attention_mask=mask_BS).logits.flatten(0, 1)[positions_P]
    ours = model(ids_BS, positions_P, real_BS=real_BS)
    torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-10)

    labels_P = (positions_P * 7) % config.model.vocab_size
    F.cross_entropy(logits, labels_P, reduction="sum").backward()
    model(ids_BS, positions_P, labels_P, real_BS).backward()
    theirs = {name: parameter.grad for name, parameter in peer.named_parameters()}
    theirs = {name: torch.zeros(()) if grad is None else grad for name, grad in theirs.items()}
    modern = family == "ModernBERT"
    renamed = dict(from_modernbert(theirs)) if modern else from_bert(theirs, config, family)[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, renamed[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("family", PEERS)
def test_an_export_equals_the_initial_weights_except_for_key_biases(family: str, tmp_path: Path) -> None:
    peer = write_peer(tmp_path, family)
    config = config_for(tmp_path)
    model, dropped = model_from(tmp_path, config)
    special = dict.fromkeys(ROLES, PEERS[family][1].get("pad_token_id", 0))
    settings = settings_of(config, special, "mlm")
    before = json.loads((tmp_path / "config.json").read_text())
    own = {"dtype", "bos_token_id", "eos_token_id"}
    own |= {"max_position_embeddings"} if family == "ModernBERT" else set()
    for name in before.keys() & settings.keys() - own:
        assert settings[name] == before[name], name
    tensors = tensors_of(model, config, special, "mlm")
    keys = {name for name in tensors if name.endswith("self.key.bias")}
    assert set(dropped) == {name.removeprefix(name.partition(".")[0] + ".") for name in keys}
    assert len(keys) == (0 if family == "ModernBERT" else SIZES["num_hidden_layers"])
    again = type(peer)(transformers.AutoConfig.for_model(**settings))
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert {name.rpartition("decoder.")[2] for name in missing} <= {"weight", "bias"}, "only a tied decoder"
    for name, tensor in peer.named_parameters():
        expected = torch.zeros_like(tensor) if name in keys else tensor
        assert torch.equal(tensors[name], expected.float()), name


def test_unused_heads_are_dropped_and_named(tmp_path: Path) -> None:
    """Pretraining drops BERT's pooler and next-sentence head; finetuning also drops the token head."""
    write_peer(tmp_path, "BERT", "ForPreTraining")
    poolers = {f"pooler.dense.{leaf}" for leaf in ("weight", "bias")}
    nsp = {f"cls.seq_relationship.{leaf}" for leaf in ("weight", "bias")}
    _, dropped = model_from(tmp_path, config_for(tmp_path))
    assert {name for name in dropped if not name.endswith("key.bias")} == poolers | nsp
    weights, dropped = load_hf(tmp_path, config_for(tmp_path, **classifying()), None)
    assert not any(name.startswith("head.") for name in weights)
    assert {name.partition(".")[0] for name in dropped} == {"pooler", "cls", "encoder"}


# --- settings


def edited(folder: Path, **changes: Any) -> Path:
    """Change config.json of a directory; None removes a field."""
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return folder


def directory(folder: Path, family: str, **changes: Any) -> Path:
    """Write a directory with config.json and an empty file of weights, which is never read."""
    name, settings = PEERS[family]
    getattr(transformers, f"{name}Config")(**{**SIZES, **settings}).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return edited(folder, **changes)


def test_the_model_and_tokenizer_of_a_configuration_follow_from_the_directory(tmp_path: Path) -> None:
    for family in PEERS:
        folder = directory(tmp_path / family, family)
        (folder / "tokenizer.json").write_text("{}")
        file = tmp_path / "own.yaml"
        file.write_text(f"run: {{init_from: 'hf:{folder}'}}\nschedule: {{steps: 3}}\n")
        config = load_config(file, ["data.sources=builtin", "model.dropout=0.25", "data.sequence_length=16"])
        assert hf_issues(folder, config) == []
        assert config.data.tokenizer == str(folder / "tokenizer.json")
        assert (config.model.dropout, config.model.num_layers) == (0.25, 4)
        assert load_config(file, ["data.path=shards", "data.sequence_length=16"]).data.tokenizer is None
        complete = resolve([config.model_dump(mode="json")])
        (tmp_path / "whole.yaml").write_text(json.dumps(complete.model_dump(mode="json")))
        (folder / "config.json").unlink()
        assert load_config(tmp_path / "whole.yaml") == complete, "a resumed run must read its own settings"


@pytest.mark.parametrize("family", PEERS)
def test_a_setting_that_contradicts_config_json_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = directory(tmp_path, family)
    fits = config_for(folder)
    others: dict[str, Any] = {
        "vocab_size": 64,
        "num_heads": 4,
        "norm_eps": 1e-7,
        "head": "none",
        "norm": "rmsnorm",
        "mlp": "geglu" if fits.model.mlp == "gelu" else "gelu",
        "decoder_bias": False,
        "local_attention": 8,
        "token_types": 3,
    }
    rope = {"rope_theta": 7.0, "local_rope_theta": 7.0}
    others |= rope if family == "ModernBERT" else {"max_positions": 44}
    for name, value in others.items():
        (issue,) = hf_issues(folder, config_for(folder, model={name: value}))
        assert (issue.setting, issue.kind, issue.value) == (f"model.{name}", "conflict", value)
    finetuning = config_for(folder, **classifying(), model={"head": "none", "decoder_bias": False})
    assert hf_issues(folder, finetuning) == [], "finetuning replaces the head"
    moments = {"init_from": f"hf:{folder}", "init_keeps": "moments"}
    (issue,) = hf_issues(folder, config_for(folder, run=moments))
    assert (issue.setting, issue.kind) == ("run.init_keeps", "conflict")


ROPE = {"rope_type": "default", "rope_theta": 500.0}
UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "another architecture": ("BERT", {"model_type": "electra"}),
    "a folded norm": ("ModernBERT", {"model_type": "eurobert"}),
    "hidden_act": ("BERT", {"hidden_act": "gelu_new"}),
    "position_embedding_type": ("BERT", {"position_embedding_type": "relative_key"}),
    "is_decoder": ("RoBERTa", {"is_decoder": True}),
    "hidden_activation": ("ModernBERT", {"hidden_activation": "relu"}),
    "tie_word_embeddings": ("ModernBERT", {"tie_word_embeddings": False}),
    "mlp_bias": ("ModernBERT", {"mlp_bias": True}),
    "layer_types": ("ModernBERT", {"layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 2]}),
    "rope_type": ("ModernBERT", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
}
DAMAGED: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": None},
    {"num_hidden_layers": 10**15, "layer_types": None},
    {"num_hidden_layers": "many", "layer_types": None},
    {"layer_types": None, "global_attn_every_n_layers": 0},
    {"layer_types": [{}]},
    {"rope_parameters": [1]},
)


@pytest.mark.parametrize("name", UNFIT)
def test_an_unsupported_encoder_is_refused(name: str, tmp_path: Path) -> None:
    family, changes = UNFIT[name]
    (issue,) = raised_issues(read_hf, directory(tmp_path, family, **changes))
    assert (issue.setting, issue.kind) == ("run.init_from", "unsupported")
    named = name if " " not in name else changes["model_type"]
    assert named in issue.message


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    for changes in DAMAGED:
        (issue,) = raised_issues(read_hf, directory(tmp_path, "ModernBERT", **changes))
        assert (issue.setting, issue.kind) == ("run.init_from", "damaged"), changes
    for text in ("[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        assert raised_issues(read_hf, tmp_path)[0].kind == "damaged"
    assert raised_issues(read_hf, tmp_path / "none")[0].kind == "not_found"
    bare = directory(tmp_path / "bare", "BERT")
    (bare / "model.safetensors").unlink()
    assert "model.safetensors" in raised_issues(read_hf, bare)[0].message
    longer = {"data": {"path": "shards", "sequence_length": 41}}
    (issue,) = raised_issues(config_for, directory(tmp_path / "long", "BERT"), **longer)
    assert "data.sequence_length: 41 is more than the model's 40 positions" in issue.message


def test_missing_and_surplus_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_peer(tmp_path, "RoBERTa")
    tensors = load_file(tmp_path / "model.safetensors")
    removed = tensors.pop("roberta.encoder.layer.1.output.dense.bias")
    config = config_for(tmp_path)
    save_file({**tensors, "adapter.weight": removed}, tmp_path / "model.safetensors")
    lacking, surplus = raised_issues(load_hf, tmp_path, config, None)
    assert "encoder.layer.1.output.dense.bias" in lacking.message
    assert "adapter.weight" in surplus.message
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    (issue,) = raised_issues(load_hf, tmp_path, config, None)
    assert (issue.setting, issue.kind) == ("run.init_from", "damaged")


def test_data_with_another_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = directory(tmp_path / "dir", "BERT")
    other = tmp_path / "other.json"
    other.write_text("{}")
    read = {"sources": ["builtin"]}
    (issue,) = hf_issues(folder, config_for(folder, data=read))
    assert (issue.setting, issue.kind) == ("data.tokenizer", "conflict"), "a new tokenizer cannot fit"
    assert hf_issues(folder, config_for(folder, data={**read, "tokenizer": str(other)})) == []
    (folder / "tokenizer.json").write_text("[]")
    assert hf_issues(folder, config_for(folder, data=read)) == []
    (issue,) = hf_issues(folder, config_for(folder, data={**read, "tokenizer": str(other)}))
    assert (issue.setting, issue.other) == ("data.tokenizer", "run.init_from")
