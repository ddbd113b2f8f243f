"""Test exported models against their transformers classes, with every parameter perturbed."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from bert_dp.config import Config, ConfigError, Kind, export_formats, finetuned_head
from bert_dp.data import readers
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.exporting import check
from bert_dp.exporting import load_exported as foreign
from bert_dp.exporting import source as write
from bert_dp.exporting.hf import settings_of, tensors_of
from bert_dp.exporting.source import ExportModule, describe, open_run, write_about, write_hf
from bert_dp.model.hf import from_modernbert
from bert_dp.training.process import RunFailed
from tests.helpers import issues_of, raised_issues, read_json, write_files
from tests.runs_to_export import (
    SPECIAL,
    VOCABULARY,
    config_of,
    finetuned,
    padded_batch,
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
        ("BERT", "bert-simple", {"norm_position": "post", "token_types": 2}),
        ("RoBERTa", "bert-simple", {"norm_position": "post", "position_offset": 1, "token_types": 1}),
    )
}
KINDS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("mlm", {}),
    ("encoder", {}),
    ("classifier", {"pooling": "cls"}),
    ("classifier", {"pooling": "mean"}),
    ("classifier", {"kind": "regression", "labels": []}),
)


def outputs_of(config: Config, kind: Kind, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of bert-dp and of transformers for a batch, at its real tokens."""
    model = perturbed(config)
    peer = peer_of(model, config, kind)
    ids_BS, mask_BS, types_BS = padded_batch(length, VOCABULARY, SPECIAL["pad"])
    typed = {"token_type_ids": types_BS} if config.model.takes_types else {}
    whole = ExportModule(model, kind)
    with torch.inference_mode():
        ours = whole(ids_BS, mask_BS, **typed)[0]
        found = peer(input_ids=ids_BS, attention_mask=mask_BS, **typed)
    theirs = found.last_hidden_state if kind == "encoder" else found.logits
    return (ours, theirs) if kind == "classifier" else (ours[mask_BS != 0], theirs[mask_BS != 0])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("kind", "options"),
    KINDS,
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else part,
)
def test_outputs_equal_those_of_transformers(name: str, kind: Kind, options: dict[str, Any]) -> None:
    config = CONFIGS[name]
    if kind == "classifier":
        if options.get("pooling") == "mean" and config.model.position == "learned":
            pytest.skip("the transformers class has no mean pooling")
        config = finetuned(config, "native", **options)
    for length in (5, 37, 128):
        ours, theirs = outputs_of(config, kind, length)
        scale = max(1.0, float(ours.abs().max()))
        assert scale > 0.1
        assert float((ours - theirs).abs().max()) / scale < 1e-5


def test_config_json_has_the_fields_that_its_class_reads() -> None:
    """The test covers dropout, the tokens that frame an example, and a classifier's labels."""
    config = CONFIGS["RobertaPreLayerNorm"]
    model = config.model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.2})
    roberta = settings_of(config.model_copy(update={"model": model}), SPECIAL, "mlm")
    assert (roberta["hidden_dropout_prob"], roberta["attention_probs_dropout_prob"]) == (0.1, 0.2)
    modern = settings_of(CONFIGS["ModernBERT"], SPECIAL, "encoder")
    euro = settings_of(CONFIGS["EuroBERT"], SPECIAL, "mlm")
    for settings in (roberta, modern, euro):
        named = [settings[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
        assert named == [SPECIAL[role] for role in ("cls", "sep", "pad")]
    assert (modern["cls_token_id"], modern["sep_token_id"]) == (SPECIAL["cls"], SPECIAL["sep"])
    assert euro["mask_token_id"] == SPECIAL["mask"]
    assert not {"id2label", "label2id", "problem_type"} & modern.keys()
    for kind, labels, names in (
        ("single_label", ["sky", "sea"], ["sky", "sea"]),
        ("multi_label", ["sky", "sea"], ["sky", "sea"]),
        ("regression", [], ["score"]),
    ):
        config = finetuned(CONFIGS["ModernBERT"], "native", kind=kind, labels=labels)
        settings = settings_of(config, SPECIAL, "classifier")
        assert settings["id2label"] == {str(i): name for i, name in enumerate(names)}
        assert settings["label2id"] == {name: i for i, name in enumerate(names)}
        assert settings["problem_type"] == (kind if kind == "regression" else f"{kind}_classification")


# --- a run that starts from an export


@pytest.mark.parametrize("name", ["ModernBERT", "ModernBERT, biases"])
@pytest.mark.parametrize("kind", ["mlm", "encoder", "classifier"])
def test_from_modernbert_restores_exported_weights(name: str, kind: Kind) -> None:
    """An export for AutoModel has names without a prefix, and no head."""
    config = CONFIGS[name]
    if kind == "classifier":
        config = finetuned(config, "native")
    ours = perturbed(config).state_dict()
    back = dict(from_modernbert(tensors_of(perturbed(config), config, SPECIAL, kind)))
    expected = {key for key in ours if kind != "encoder" or not key.startswith("head.")}
    assert back.keys() == expected
    assert all(torch.equal(tensor, ours[key]) for key, tensor in back.items())
    tied = {**tensors_of(perturbed(config), config, SPECIAL, kind), "decoder.weight": torch.ones(1)}
    assert dict(from_modernbert(tied)).keys() == expected


# --- the export directory and its check


def test_weights_that_contradict_config_json_are_refused(tmp_path: Path) -> None:
    """transformers would initialise missing tensors at random."""
    out = tmp_path / "out"
    out.mkdir()
    write_hf(open_run(write_run(tmp_path / "run", CONFIGS["EuroBERT"]), encoder=True), out)
    settings = read_json(out / "config.json")
    foreign.open_directory(out, "hf", "encoder")
    for change, named in (({"num_hidden_layers": 3}, "layers.2."), ({"vocab_size": 64}, "embed_tokens")):
        (out / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(foreign.Unusable, match=f"model.safetensors has no {named}.* of the shape"):
            foreign.open_directory(out, "hf", "encoder")


def test_a_model_without_a_transformers_class_is_refused_by_its_settings() -> None:
    simple = finetuned(config_of("bert-simple"), "native", pooling="mean")
    recipe = finetuned(config_of("crammed-rope"), "recipe")
    gelu = config_of("crammed-rope", model={"mlp": "gelu", "first_attention_norm": True, "head": "none"})
    dense = config_of("small-text", model={"head": "dense"})
    cases: tuple[tuple[Config, Kind, list[str]], ...] = (
        (config_of("crammed-bert"), "mlm", ["model.position: scaled_sinusoidal"]),
        (config_of("crammed-bert"), "encoder", ["model.position: scaled_sinusoidal"]),
        (recipe, "classifier", ["finetune.head: recipe"]),
        (simple, "classifier", ["finetune.pooling: mean"]),
        (dense, "mlm", ["model.head: dense"]),
        (gelu, "mlm", ["model.mlp: gelu", "model.first_attention_norm: true", "model.head: none"]),
    )
    for config, kind, named in cases:
        issues = issues_of(peer_of, perturbed(config), config, kind)
        assert [issue.partition(",")[0].partition(" with")[0] for issue in issues] == named


def test_full_short_and_padded_sequences_are_compared(tmp_path: Path) -> None:
    """They have ordinary tokens of the whole vocabulary and the padding token of the export."""
    source = open_run(write_run(tmp_path / "run", CONFIGS["EuroBERT"]), encoder=False)
    exported = describe(source, "hf").model_copy(update={"pad": 2, "sequence_length": 100})
    batches = check.make_batches(source, exported)
    assert [mask.shape for _, mask in batches] == [(b, s) for s in (5, 37, 100) for b in (1, 3, 8)]
    assert {int(token) for ids, mask in batches for token in ids[mask == 0]} == {2}
    real = np.concatenate([ids[mask != 0] for ids, mask in batches])
    assert (real.min(), real.max()) == (7, VOCABULARY - 1)
    assert len({int(n) for _, mask in batches for n in mask.sum(1)}) > 10


def test_the_export_formats_of_a_run_are_listed() -> None:
    """A classifier with head `auto` has the head of the transformers class, if there is one."""
    graphs, headless = "ONNX, AOTInductor", "transformers EuroBERT without the head"
    none = "no transformers class supports"
    for name, model, head, formats in (
        ("crammed-bert", {}, "recipe", f"{graphs}; {none} model.position"),
        ("crammed-rope", {}, "ModernBERT", f"transformers ModernBERT, {graphs}"),
        ("quickstart", {}, "ModernBERT", f"transformers ModernBERT, {graphs}"),
        ("bert-simple", {"norm_position": "post"}, "BERT", f"transformers BERT, {graphs}"),
        ("small-text", {"head": "dense"}, "EuroBERT", f"{graphs}, {headless}; {none} model.head"),
        ("crammed-bert", {"lstm_size": 8}, "recipe", "ONNX"),
    ):
        config = config_of(name, model=model)
        assert export_formats(config) == formats
        classifier = finetuned(config, "auto")
        assert finetuned_head(classifier.model, classifier.finetune) == head
        assert export_formats(classifier).startswith(f"transformers {head}" if head != "recipe" else "ONNX")


def test_a_model_card_names_no_directories_and_quotes_only_the_evaluation_of_its_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config_of("small-text"), step=3)
    words = ["/opt/env/bin/bert-dp", "train", "data.sources=[/srv/texts/a b.txt]"]
    (run / "environment.json").write_text(json.dumps({"command": words}))
    heldout = {"heldout_loss": 4.25, "heldout": {"loss": 4.25, "scores": {"dev/auc": None}}}
    own, other = (json.dumps({"status": "done", "heldout_step": step, **heldout}) for step in (3, 2))
    for summary, is_quoted in ((own, True), (other, False), ("{", False)):
        (run / "summary.json").write_text(summary)
        facts = dict(write.training_facts(open_run(run, encoder=False)))
        assert facts["command"] == "`bert-dp train 'data.sources=[a b.txt]'`"
        assert [name in facts for name in ("held-out loss", "dev/auc")] == [is_quoted] * 2


def test_an_export_keeps_a_known_frame_of_a_tokenizer_and_replaces_an_unknown_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CONFIGS["EuroBERT"])
    source, file = open_run(run, encoder=False), tmp_path / "foreign.json"
    ours = Tokenizer.from_file(str(source.tokenizer_file))
    roberta, unknown, padded = (Tokenizer.from_str(ours.to_str()) for _ in range(3))
    roberta.post_processor = processors.RobertaProcessing(("<sep>", 5), ("<cls>", 4))
    unknown.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    padded.post_processor = roberta.post_processor
    padded.enable_padding(length=20)
    for name, tokenizer, wanted in (
        ("ours", ours, ours),
        ("roberta", roberta, roberta),
        ("unknown", unknown, ours),
        ("padded", padded, roberta),
    ):
        file.write_text(tokenizer.to_str())
        out = tmp_path / name
        write_files(out, {"config.json": "", "model.safetensors": ""})
        write_about(out, dataclasses.replace(source, tokenizer_file=file), "hf", "bert-dp export")
        assert read_json(out / "export.json")["tokenizer_sha256"] == readers.file_hash(file)
        kept = (out / "tokenizer.json").read_bytes() == file.read_bytes()
        assert kept == (name in ("ours", "roberta"))
        exported = Tokenizer.from_file(str(out / "tokenizer.json"))
        for texts in (("an old ship",), ("an old ship", "rain")):
            got, encoding = exported.encode(*texts), wanted.encode(*texts)
            assert (got.ids, got.type_ids) == (encoding.ids, encoding.type_ids)
        framed = ExampleEncoder.load(file, 20).encode([("an old ship",), ("an old ship", "rain")])
        rows = [wanted.encode("an old ship").ids, wanted.encode("an old ship", "rain").ids]
        assert framed.ids.tolist() == [*rows[0], *rows[1]]
        cut = ExampleEncoder.load(file, 8).encode([("an old ship sailed", "rain fell on seven")])
        assert len(cut.ids) == 8


NEAR = {"batch": 1, "length": 5, "outputs": 9, "difference": 1e-7, "top1": 1.0}
PROVEN: dict[str, Any] = {
    **dict.fromkeys(("format", "kind", "precision", "architecture", "checkpoint"), "x"),
    **dict.fromkeys(("parameters", "stored_parameters", "run_parameters"), 9),
    **{"tolerance": 1e-5, "again": 1e-7, "not_loaded": [], "versions": {}},
    "rows": [NEAR, {**NEAR, "top1": None}],
}


def test_one_difference_anywhere_fails_the_check() -> None:
    changes: tuple[tuple[bool, dict[str, Any]], ...] = (
        (True, {}),
        (False, {"again": 1e-3}),
        (False, {"rows": [NEAR, {**NEAR, "difference": 1e-3}]}),
        (False, {"rows": [{**NEAR, "top1": 0.99}, NEAR]}),
        (False, {"not_loaded": ["a.weight"]}),
        (True, {"tolerance": None, "rows": [{**NEAR, "difference": 0.1, "top1": 0.5}], "again": 1e-3}),
        (False, {"tolerance": None, "parameters": 10}),
    )
    for ok, change in changes:
        assert check.ExportCheck.model_validate({**PROVEN, **change}).ok == ok


def test_a_key_bias_is_refused() -> None:
    """With rotary positions, a key bias is not a constant shift that softmax cancels."""
    bias = torch.arange(12.0)
    name = "model.layers.0.attn.Wqkv.bias"
    with pytest.raises(ConfigError, match=r"Wqkv\.bias contains a nonzero key bias"):
        dict(from_modernbert({name: bias}))
    back = dict(from_modernbert({name: torch.cat([bias[:4], torch.zeros(4), bias[8:]])}))
    assert [values.tolist() for values in back.values()] == [bias[:4].tolist(), bias[8:].tolist()]


def test_a_batch_is_compared_at_its_real_tokens(tmp_path: Path) -> None:
    """The second sequence has one real token. The difference is relative to the largest output."""
    source = open_run(write_run(tmp_path / "run", CONFIGS["EuroBERT"]), encoder=False)
    ids_BS, mask_BS = np.ones((2, 2), np.int64), np.array([[1, 1], [1, 0]])
    ours = np.array([[[4.0, 1.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 9.0]]])
    theirs = ours + np.array([[[0.0, 0.2], [0.0, 0.0]], [[0.0, 0.0], [9.0, 0.0]]])
    exported = describe(source, "hf")
    found = check.compare((ids_BS, mask_BS), ours, theirs, exported, 1e-5)
    assert (found.batch, found.length, found.outputs, found.top1) == (2, 2, 6, 1.0)
    assert found.difference == pytest.approx(0.05)
    swapped = check.compare((ids_BS, mask_BS), ours, theirs[:, ::-1], exported, 1e-5)
    assert swapped.top1 == pytest.approx(2 / 3)
    hidden = exported.model_copy(update={"kind": "encoder"})
    assert check.compare((ids_BS, mask_BS), ours, theirs, hidden, 1e-5).top1 is None
    for pair in ((ours + np.nan, theirs), (ours, theirs + np.inf)):
        with pytest.raises(RunFailed, match="not finite"):
            check.compare((ids_BS, mask_BS), *pair, exported, 1e-5)


def test_the_run_of_an_export_is_found_despite_a_directory_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "beside" / "runs" / "first", CONFIGS["ModernBERT"])
    source = open_run(run, encoder=False)
    exported = describe(source, "onnx")
    (tmp_path / "here" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert check.open_source(tmp_path / "beside" / "out", exported, None).path == source.path
    later = write_run(tmp_path / "other", CONFIGS["ModernBERT, biases"], step=9) / "checkpoints"
    shutil.copytree(later / "step-00000009", run / "checkpoints" / "step-00000009")  # a later step
    assert check.open_source(tmp_path / "beside" / "out", exported, run).path == source.path
    alone = shutil.copytree(run / "checkpoints" / "step-00000003", tmp_path / "alone" / "mine")
    assert (source.run_name, open_run(alone, encoder=False).run_name) == ("first", "mine")
    (issue,) = raised_issues(check.open_source, tmp_path / "elsewhere" / "out", exported, None)
    assert (issue.setting, issue.kind) == ("--run", "not_found")
