"""Continue pretraining from an encoder of transformers, finetune, predict, and export to transformers."""

import csv
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tests.e2e.cli import accepted, bert_dp, refused
from tests.glue_fixture import write_two_tasks
from tests.helpers import logged, read_json, read_lines, write_files
from tests.runs_to_export import WORDS

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 66}
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=30)) for i in range(120)]
PAIRS = [(WORDS[i % 15], f"{WORDS[(i * i) % 15]} {WORDS[(3 * i) % 15]}") for i in range(48)]
SETTINGS = "schedule.steps=3 batch.global_size=8 batch.micro_size=4 log.every_steps=1 precision=fp32".split()
SHORT = "data.sequence_length=32"
COLUMNS = "--text text --text-pair text_pair --out".split()


def bert_tokenizer() -> Tokenizer:
    """Train a WordPiece tokenizer with BERT's special tokens and token types."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def roberta_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer with RoBERTa's special tokens, two of which separate texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=301, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def write_encoder(folder: Path, name: str, tokenizer: Tokenizer, **settings: Any) -> Path:
    """Save an encoder with transformers after adding noise to every parameter."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=tokenizer.get_vocab_size(), **SIZES, **settings
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForMaskedLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_table(path: Path) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "text_pair", "label"])
        rows.writerows([*pair, "long" if len(pair[0]) > 4 else "short"] for pair in PAIRS)
    return path


def assert_predicts_as_transformers(exported: Path, lines: list[dict[str, Any]]) -> None:
    """Compare the predictions for PAIRS with those of transformers' model and tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    inputs = tokenizer(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = model(**inputs).logits.softmax(-1)
    names = [model.config.id2label[i] for i in range(2)]
    expected = torch.tensor([[line["probabilities"][name] for name in names] for line in lines])
    torch.testing.assert_close(expected, found, rtol=0, atol=2e-5)
    assert expected.std(0).min() > 2e-4


def test_a_bert_is_pretrained_further_finetuned_and_exported(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "Bert", bert_tokenizer(), max_length=9)
    write_files(tmp_path, {"corpus/part.txt": "\n".join(TEXTS)})
    config = tmp_path / "more.yaml"  # the example of docs/export.md with other names
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    named = block.replace("bert-base-uncased", str(folder)).replace("corpus/*", f"{tmp_path}/corpus/*")
    config.write_text(f"{named}data.build: {{max_tokens_per_char: 0, held_out_fraction: 0.2}}\n")
    run, table = tmp_path / "run", write_table(tmp_path / "pairs.csv")
    output = bert_dp("train", str(config), *SETTINGS, SHORT, "--nproc", "2", "--run-dir", str(run)).stdout
    assert "not loaded, because the model has no such tensors: " in output
    keys = [f"encoder.layer.{i}.attention.self.key.bias" for i in range(2)]
    init = read_json(run / "summary.json")["init_from"]
    assert (init["tensors"], init["dropped"]) == (init["of"], keys)
    assert logged(run, "step") == [1, 2, 3]
    recipe = ("train", "continued", f"run.init_from=hf:{folder}", *SETTINGS, SHORT)
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.2")
    bert_dp(*recipe, *build, "--nproc", "1", "--run-dir", "continued", cwd=tmp_path)
    assert read_json(tmp_path / "continued/summary.json")["heldout_loss"] > 0
    accepted("export", "hf", str(run), "--out", str(tmp_path / "encoder"))
    before, after = (read_json(place / "config.json") for place in (folder, tmp_path / "encoder"))
    assert before["architectures"] == after["architectures"]
    tuned = tmp_path / "tuned"
    files = ["--train", str(table), "--dev", str(table)]
    options = [*SETTINGS, "optim.lr=2e-2"]
    bert_dp("finetune", str(run), *options, *files, "--nproc", "2", "--run-dir", str(tuned))
    out, predicted = tmp_path / "out", tmp_path / "predicted.jsonl"
    accepted("predict", str(tuned), str(table), *COLUMNS, str(predicted))
    accepted("export", "hf", str(tuned), "--out", str(out))
    assert read_json(out / "config.json")["model_type"] == "bert"
    assert read_json(out / "config.json")["max_position_embeddings"] == 66
    assert_predicts_as_transformers(out, read_lines(predicted))
    accepted("predict", str(out), str(table), *COLUMNS, str(tmp_path / "again.jsonl"))
    for expected, found in zip(read_lines(predicted), read_lines(tmp_path / "again.jsonl"), strict=True):
        assert expected["probabilities"] == pytest.approx(found["probabilities"], abs=1e-4)
    accepted("export", "check", str(out), "--run", str(tuned))
    assert "data.sequence_length: 67" in refused("train", str(config), *SETTINGS, "data.sequence_length=67")
    assert "model.num_layers: 3, but" in refused("train", str(config), *SETTINGS, "model.num_layers=3")


def test_a_roberta_is_finetuned_without_pretraining(tmp_path: Path) -> None:
    settings = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    folder = write_encoder(tmp_path / "roberta", "Roberta", roberta_tokenizer(), **settings)
    table, tuned, out = write_table(tmp_path / "pairs.csv"), tmp_path / "tuned", tmp_path / "out"
    options = [f"hf:{folder}", *SETTINGS, "optim.lr=2e-2", "--train", str(table), "--dev", str(table)]
    bert_dp("finetune", *options, "--nproc", "1", "--run-dir", str(tuned))
    predicted = tmp_path / "predicted.jsonl"
    accepted("predict", str(tuned), str(table), *COLUMNS, str(predicted))
    accepted("export", "hf", str(tuned), "--out", str(out))
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert_predicts_as_transformers(out, read_lines(predicted))
    errors = refused("finetune", *options, "parallel.tensor=2", "--nproc", "2")
    assert "model.vocab_size: 301 is not a multiple of parallel.tensor 2" in errors
    assert "RUN: " in refused("finetune", f"hf:{tmp_path}", *options[1:])


def test_an_encoder_is_evaluated_on_glue(tmp_path: Path) -> None:
    folder, out = write_encoder(tmp_path / "bert", "Bert", bert_tokenizer()), tmp_path / "out"
    data = write_two_tasks(tmp_path / "glue")
    few = ["precision=fp32", "schedule.epochs=1", "--tasks=WNLI", "--seeds=1"]
    bert_dp("eval", "glue", f"hf:{folder}", *few, f"--data={data}", f"--out={out}")
    glue = read_json(out / "glue.json")
    ((trial,),) = [task["trials"] for task in glue["tasks"]]
    start = read_json(out / "trials" / trial["trial"] / "summary.json")["init_from"]
    assert (glue["status"], trial["status"], start["tensors"]) == ("complete", "ok", 31)
    assert {name.partition(".")[0] for name in start["dropped"]} == {"cls", "encoder"}, (
        "not only head and key biases"
    )
