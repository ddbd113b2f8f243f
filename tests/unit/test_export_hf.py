"""Our models beside the classes of transformers that they are exported to, with every parameter perturbed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_dp.config import Config, Kind
from bert_dp.export import card, check, foreign
from bert_dp.export.as_function import Whole, open_run
from bert_dp.export.hf import settings_of
from bert_dp.export.write import describe, new_directory, write_about, write_hf
from tests.helpers import issues_of, read_json
from tests.runs_to_export import (
    SPECIAL,
    VOCABULARY,
    WORDS,
    config_of,
    finetuned,
    peer_of,
    perturbed,
    write_run,
)

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 48, "num_heads": 4, "intermediate_size": 40}
CONFIGS: dict[str, Config] = {
    name: config_of(shipped, model=SMALL | changes)
    for name, shipped, changes in (
        ("ModernBERT", "crammed-rope", {}),
        ("ModernBERT, biases", "crammed-rope", {"bias": True, "norm_bias": True, "rope_theta": 500.0}),
        ("EuroBERT", "small-text", {}),
        ("EuroBERT, biases", "small-text", {"bias": True, "rope_theta": 500.0}),
        ("RobertaPreLayerNorm", "bert-simple", {}),
        ("RobertaPreLayerNorm, no biases", "bert-simple", {"bias": False, "norm_bias": False}),
    )
}
KINDS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("mlm", {}),
    ("encoder", {}),
    ("classifier", {"pooling": "cls"}),
    ("classifier", {"pooling": "mean"}),
    ("classifier", {"kind": "regression", "labels": []}),
)


def make_batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences, two of them padded."""
    ids_BS = torch.randint(7, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(1))
    mask_BS = (torch.arange(length) < torch.tensor([[length], [2 * length // 3], [1]])).long()
    return ids_BS * mask_BS + SPECIAL["pad"] * (1 - mask_BS), mask_BS


def outputs_of(config: Config, kind: Kind, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What ours and theirs make of a batch, at its tokens."""
    model = perturbed(config)
    peer = peer_of(model, config, kind)
    ids_BS, mask_BS = make_batch(length)
    whole = Whole(model, kind)
    with torch.inference_mode():
        ours = whole(ids_BS, mask_BS)[0]
        found = peer(input_ids=ids_BS, attention_mask=mask_BS)
    theirs = found.last_hidden_state if kind == "encoder" else found.logits
    return (ours, theirs) if kind == "classifier" else (ours[mask_BS != 0], theirs[mask_BS != 0])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("kind", "options"),
    KINDS,
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else part,
)
def test_outputs_are_those_of_the_class(name: str, kind: Kind, options: dict[str, Any]) -> None:
    config = CONFIGS[name]
    if kind == "classifier":
        if options.get("pooling") == "mean" and name.startswith("Roberta"):
            pytest.skip("its class has no mean pooling: refused, below")
        config = finetuned(config, "native", **options)
    for length in (5, 37, 128):
        ours, theirs = outputs_of(config, kind, length)
        scale = max(1.0, float(ours.abs().max()))
        assert scale > 0.1
        assert float((ours - theirs).abs().max()) / scale < 1e-5


@pytest.mark.parametrize("name", ["ModernBERT", "EuroBERT", "RobertaPreLayerNorm"])
def test_an_encoder_is_one_of_sentence_transformers_too(tmp_path: Path, name: str) -> None:
    """What its files say is the mean over the tokens that transformers' own classes give."""
    source = open_run(write_run(tmp_path / "run", CONFIGS[name]), encoder=True)
    out = tmp_path / "out"
    out.mkdir()
    write_hf(source, out)
    write_about(out, source, "hf", "bert-dp export")
    modules = read_json(out / "modules.json")
    assert [module["type"] for module in modules] == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
    ]
    assert [module["path"] for module in modules] == ["", "1_Pooling"]
    assert read_json(out / "1_Pooling" / "config.json") == {
        "word_embedding_dimension": SMALL["hidden_size"],
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    assert read_json(out / "sentence_bert_config.json")["max_seq_length"] == 128
    assert "was not trained for similarity" in (out / "README.md").read_text()
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed: what it loads is not seen"
    )
    texts = [" ".join(WORDS[:n]) for n in (1, 5, 12)] + [" ".join(WORDS * 20)]
    found = sentence_transformers.SentenceTransformer(str(out), device="cpu").encode(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] == 128
    with torch.inference_mode():
        hidden_BSH = transformers.AutoModel.from_pretrained(out)(**batch).last_hidden_state
    mask_BS1 = batch["attention_mask"][..., None]
    mean_BH = (hidden_BSH * mask_BS1).sum(1) / mask_BS1.sum(1)
    assert found == pytest.approx(mean_BH.numpy(), abs=1e-5)


def test_config_json_tells_the_dropout_of_attention_from_the_other() -> None:
    config = CONFIGS["RobertaPreLayerNorm"]
    model = config.model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.2})
    settings = settings_of(config.model_copy(update={"model": model}), SPECIAL, "mlm")
    assert (settings["hidden_dropout_prob"], settings["attention_probs_dropout_prob"]) == (0.1, 0.2)


@pytest.mark.parametrize("name", ["ModernBERT", "EuroBERT", "RobertaPreLayerNorm"])
@pytest.mark.parametrize("kind", ["mlm", "encoder"])
def test_config_json_names_the_tokens_that_frame_an_example(name: str, kind: Kind) -> None:
    """As a generation or a data collator of theirs looks them up."""
    settings = settings_of(CONFIGS[name], SPECIAL, kind)
    named = {role: settings[f"{role}_token_id"] for role in ("bos", "eos", "pad")}
    assert named == {"bos": SPECIAL["cls"], "eos": SPECIAL["sep"], "pad": SPECIAL["pad"]}


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    (line,) = issues_of(new_directory(Path("/proc/out")).__enter__)
    assert line.startswith("--out: /proc cannot be written (")


def test_a_file_that_is_not_what_config_json_says_is_refused(tmp_path: Path) -> None:
    """transformers would draw what is missing at random."""
    out = tmp_path / "out"
    out.mkdir()
    write_hf(open_run(write_run(tmp_path / "run", CONFIGS["EuroBERT"]), encoder=True), out)
    settings = read_json(out / "config.json")
    foreign.open_directory(out, "hf", "encoder")
    for change, named in (({"num_hidden_layers": 3}, "layers.2."), ({"vocab_size": 64}, "embed_tokens")):
        (out / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(foreign.Unusable, match=f"model.safetensors has no {named}.* as config.json"):
            foreign.open_directory(out, "hf", "encoder")


@pytest.mark.parametrize(
    ("config", "kind", "named"),
    [
        (config_of("crammed-bert"), "mlm", ["model.position: scaled_sinusoidal"]),
        (config_of("crammed-bert"), "encoder", ["model.position: scaled_sinusoidal"]),
        (finetuned(config_of("crammed-rope"), "recipe"), "classifier", ["finetune.head: recipe"]),
        (
            finetuned(config_of("bert-simple"), "native", pooling="mean"),
            "classifier",
            ["finetune.pooling: mean"],
        ),
        (config_of("small-text", model={"head": "dense"}), "mlm", ["model.head: dense"]),
        (
            config_of("crammed-rope", model={"mlp": "gelu", "first_attention_norm": True, "head": "none"}),
            "mlm",
            ["model.mlp: gelu", "model.first_attention_norm: true", "model.head: none"],
        ),
    ],
)
def test_what_no_class_holds_is_refused_by_its_settings(config: Config, kind: Kind, named: list[str]) -> None:
    issues = issues_of(peer_of, perturbed(config), config, kind)
    assert [issue.partition(",")[0].partition(" with")[0] for issue in issues] == named
    assert all("export onnx" in issue for issue in issues)


NEAR = {"difference": 1e-7, "top1": 1.0}
PROVEN: dict[str, Any] = {
    "not_loaded": [],
    "parameters": 9,
    "stored_parameters": 9,
    "tolerance": 1e-5,
    "rows": [NEAR, {"difference": 1e-7, "top1": None}],
    "again": 1e-7,
}


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"again": 1e-3}, False),
        ({"rows": [NEAR, {**NEAR, "difference": 1e-3}]}, False),
        ({"rows": [{**NEAR, "top1": 0.99}, NEAR]}, False),
        ({"not_loaded": ["a.weight"]}, False),
        ({"parameters": 10}, False),
        ({"tolerance": None, "rows": [{"difference": 0.1, "top1": 0.5}], "again": 1e-3}, True),
        ({"tolerance": None, "parameters": 10}, False),
    ],
)
def test_one_difference_anywhere_fails_the_check(change: dict[str, Any], ok: bool) -> None:
    assert check.is_ok({**PROVEN, **change}) == ok


def test_a_batch_is_compared_at_its_real_tokens(tmp_path: Path) -> None:
    """The second sequence has one token, and the difference is over the largest output."""
    source = open_run(write_run(tmp_path / "run", CONFIGS["EuroBERT"]), encoder=False)
    ids_BS, mask_BS = np.ones((2, 2), np.int64), np.array([[1, 1], [1, 0]])
    ours = np.array([[[4.0, 1.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 9.0]]])
    theirs = ours + np.array([[[0.0, 0.2], [0.0, 0.0]], [[0.0, 0.0], [9.0, 0.0]]])
    exported = describe(source, "hf")
    found = check.compare((ids_BS, mask_BS), ours, theirs, exported, 1e-5)
    assert found == {"batch": 2, "length": 2, "outputs": 6, "difference": pytest.approx(0.05), "top1": 1.0}
    swapped = check.compare((ids_BS, mask_BS), ours, theirs[:, ::-1], exported, 1e-5)
    assert swapped["top1"] == pytest.approx(2 / 3)
    hidden = exported.model_copy(update={"kind": "encoder"})
    assert check.compare((ids_BS, mask_BS), ours, theirs, hidden, 1e-5) == {**found, "top1": None}


def test_a_run_is_found_beside_a_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "beside" / "runs" / "first", CONFIGS["ModernBERT"])
    source = open_run(run, encoder=False)
    exported = describe(source, "onnx")
    (tmp_path / "here" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert check.open_source(tmp_path / "beside" / "out", exported, None).checkpoint == source.checkpoint
    later = write_run(tmp_path / "other", CONFIGS["ModernBERT, biases"], step=9) / "checkpoints"
    shutil.copytree(later / "step-00000009", run / "checkpoints" / "step-00000009")  # it was trained on
    assert check.open_source(tmp_path / "beside" / "out", exported, run).checkpoint == source.checkpoint
    alone = shutil.copytree(run / "checkpoints" / "step-00000003", tmp_path / "alone" / "mine")
    assert (source.run_name, open_run(alone, encoder=False).run_name) == ("first", "mine")
    (issue,) = issues_of(check.open_source, tmp_path / "elsewhere" / "out", exported, None)
    assert "no run first with the weights of DIR" in issue


def test_a_card_quotes_the_summary_of_its_own_step_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config_of("small-text"), step=3)
    for step, told in ((3, True), (9, False)):
        heldout = {"loss": 4.25, "loss_unit": "squared error", "scores": {"dev/auc": None}}
        losses = {"heldout_loss": 4.25, "final_loss": 4.5, "unigram_entropy_nats": 6.0, "heldout": heldout}
        summary = {"status": "done", "step": step, **losses, "schema_version": 1}
        (run / "summary.json").write_text(json.dumps(summary))
        facts = dict(card.training_facts(open_run(run, encoder=False)))
        assert (facts["steps"], facts["samples"], facts["tokens"]) == ("3", "24", "3,072")
        assert ("held-out loss" in facts) == told
        if told:
            assert facts["loss of the last step"] == "4.5000 squared error"
            assert (facts["held-out loss"], facts["dev/auc"]) == ("4.2500 squared error", "not defined")


@pytest.mark.parametrize(
    ("name", "form", "encoder", "told", "not_told"),
    [
        ("EuroBERT", "hf", False, "AutoModelForMaskedLM|exists from transformers 5", "similarity"),
        ("EuroBERT", "onnx", False, 'session.run(["logits"]', "transformers 5|same kind"),
        ("ModernBERT", "hf", True, "import AutoModel,|sentence-transformers too", "transformers 5"),
        ("ModernBERT", "aoti", True, "of the same kind|encodings were not trained", "sentence-transformers"),
    ],
)
def test_a_card_says_how_to_load_and_what_to_know(
    tmp_path: Path, name: str, form: Any, encoder: bool, told: str, not_told: str
) -> None:
    source = open_run(write_run(tmp_path / "run", CONFIGS[name]), encoder=encoder)
    write_about(tmp_path, source, form, "bert-dp export", "## GLUE\n\nNine numbers.\n")
    text = (tmp_path / "README.md").read_text()
    for words in (*told.split("|"), "add_special_tokens=False", "at most 128 tokens", "## GLUE\n\nNine"):
        assert words in text, words
    assert not [words for words in not_told.split("|") if words in text]
    assert read_json(tmp_path / "tokenizer_config.json")["model_max_length"] == 128
    about = read_json(tmp_path / "export.json")
    assert (about["run"], about["architecture"]) == ("run", name if form == "hf" else None)
    assert (about["finetune"], about["precision"], about["step"]) == (None, "fp32", 3)
    assert about["parameters"] == sum(p.numel() for p in perturbed(CONFIGS[name]).parameters())
