"""Test distillation: transfer sets, teacher logits, words sampled by a language model, losses, embeddings,
and the BiLSTM against torch's LSTM."""

import dataclasses
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import bert_dp
from bert_dp import cost
from bert_dp.config import Config, FinetuneConfig, ModelConfig, batch_layout, read_examples, resolve
from bert_dp.config.manifest import manifest_hash
from bert_dp.data import tokenizer
from bert_dp.evaluation import prediction, teacher
from bert_dp.examples import augment
from bert_dp.examples.augment import HOLE, HOLE_ID, MASK, AugmentedData, LogitsData, copy_of
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.examples.table import LOGITS, Columns, CustomData, Examples, answers, read_logits
from bert_dp.exporting import check, source
from bert_dp.files import write_json
from bert_dp.model.bilstm import BiLstm, build_bilstm
from bert_dp.model.classifier import pair_types
from bert_dp.tasks.distill import Distillation, load_embeddings
from tests.example_files import write_examples
from tests.helpers import raised_issues, read_json, write_lines
from tests.runs_to_export import VOCABULARY, WORDS, config_of, finetuned, write_run
from tests.tensors import CPU

LSTM = {"lstm_size": 9, "num_layers": 1, "num_heads": 1, "hidden_size": 16, "dropout": 0.1}
SAVED = "checkpoints/step-00000003"


def student_config(**sections: Any) -> Config:
    config = finetuned(config_of("crammed-bert"), "recipe", head_size=12).model_dump(mode="json")
    student = {"objective": {"name": "distill"}, "model": LSTM, "data": {"sequence_length": 32}}
    return resolve([config, student, sections])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    small = config_of("crammed-bert", data={"sequence_length": 32}, model={"hidden_size": 24, "num_heads": 2})
    bert = {"norm_position": "post", "token_types": 2, "hidden_size": 48}
    configs = {
        "mlm": small,
        "teacher": finetuned(config_of("bert-simple", model=bert), "native"),
        "student": student_config(),
        "student of pairs": student_config(finetune={"pair": True}),
    }
    return {name: write_run(folder / name, config) for name, config in configs.items()}


def edit(examples: Path, part: str, **changes: Any) -> None:
    """Change a section of the examples' manifest."""
    content = read_json(examples / "examples.json")
    (content["splits"]["train"] if part == "train" else content[part]).update(changes)
    write_json(examples / "examples.json", {**content, "hash": manifest_hash(content)})


def rows_of(examples: Path) -> list[list[int]]:
    """Return the tokens of each training example."""
    train = Examples.open(examples, read_examples(examples), "train")
    return [train.tokens(i).tolist() for i in range(len(train))]


def test_any_number_of_ranks_computes_the_same_logits(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples are pairs, and the teacher has token types."""
    monkeypatch.setattr(teacher, "EXAMPLES_PER_FILE", 9)
    examples = write_examples(tmp_path / "examples", train=40, vocab_size=VOCABULARY)
    middle = rows_of(examples)[0][1]
    edit(examples, "special_tokens", sep=middle)
    files = []
    for ranks in (1, 2, 4):
        out = tmp_path / f"n{ranks}"
        for rank in range(ranks):
            teacher.compute_share(runs["teacher"] / SAVED, examples, out, rank, ranks, CPU)
        files.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert len(files[0]) == 5
    assert files[1] == files[2] == files[0]
    monkeypatch.setattr(teacher, "outputs_of", None)  # existing logits are not computed again
    teacher.compute_share(runs["teacher"] / SAVED, examples, tmp_path / "n1", 0, 1, CPU)
    model, _ = bert_dp.load(runs["teacher"])
    batches = [torch.tensor([row]) for row in rows_of(examples)]
    expected = torch.cat([model(ids_BS, types_BS=pair_types(ids_BS, middle)) for ids_BS in batches])
    found = torch.from_numpy(read_logits(tmp_path / "n1", 40, 3))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(found[:1], model(batches[0]), atol=1e-2)


def test_logits_that_are_missing_or_not_finite_are_refused(tmp_path: Path) -> None:
    for values in (None, [[1.0, 2.0]], [[1.0, np.nan, 2.0]] * 2):
        if values is not None:
            save_file({"logits": np.array(values, np.float32)}, tmp_path / LOGITS.format(0))
        (issue,) = raised_issues(read_logits, tmp_path, 2, 3)
        assert (issue.setting, issue.kind) == ("distill.logits", "damaged")


def test_a_language_model_fills_only_the_holes(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ExampleEncoder.load(runs["mlm"] / "tokenizer.json", 32)
    marked = dataclasses.replace(words, marks={MASK: words.special["mask"], HOLE: HOLE_ID})
    texts = [f"the {HOLE} of an {MASK} ship", f"{HOLE} {HOLE}", "no hole", *(f"{x} {HOLE}" for x in WORDS)]
    encoded = marked.encode([(text,) for text in texts])

    def filled(seed: int) -> NDArray[np.uint16]:
        ids = encoded.ids.copy()
        teacher.fill_holes(runs["mlm"] / SAVED, ids, encoded.offsets, seed)
        return ids

    first, holes = filled(1), encoded.ids == HOLE_ID
    assert holes.sum() == 3 + len(WORDS)
    assert (first[~holes] == encoded.ids[~holes]).all()
    assert max(words.special.values()) < first[holes].min()
    assert first[holes].max() < words.tokenizer.get_vocab_size()
    assert (first != filled(2)).any()
    monkeypatch.setattr(teacher, "BATCH_TOKENS", {"cpu": 1})
    assert (first == filled(1)).all()
    fill = (teacher.fill_holes, runs["teacher"] / SAVED, encoded.ids, encoded.offsets, 1)
    assert raised_issues(*fill)[0].setting == "--replace"


@pytest.mark.parametrize(
    "distill", [{}, {"alpha": 0.25}, {"loss": "kl", "temperature": 2.0}, {"alpha": 1.0}], ids=str
)
def test_the_loss_equals_the_formula_of_the_papers(distill: dict[str, Any]) -> None:
    task = Distillation(student_config(distill=distill), CPU)
    logits, teacher_BL = torch.randn(2, 5, 3)
    batch = dataclasses.replace(task.example_batch(5), logits_BL=teacher_BL)
    loss = task.loss(lambda *_: logits, batch)  # type: ignore[arg-type]
    if distill.get("loss") == "kl":
        soft = [(each / 2).softmax(-1) for each in (logits, teacher_BL)]
        against_teacher = 4 * (soft[1] * (soft[1].log() - soft[0].log())).sum()
    else:
        against_teacher = 5 * F.mse_loss(logits, teacher_BL)
    alpha = distill.get("alpha", 0.0)
    against_labels = F.cross_entropy(logits, batch.labels, reduction="sum")
    torch.testing.assert_close(loss, alpha * against_labels + (1 - alpha) * against_teacher)


def test_the_labels_of_augmented_copies_are_the_teachers_predictions(tmp_path: Path) -> None:
    examples = write_examples(tmp_path, train=6, vocab_size=VOCABULARY)
    edit(examples, "train", copies=2)
    logits = np.eye(3, dtype=np.float32)[[2, 2, 2, 2, 1, 0]]
    save_file({"logits": logits}, examples / LOGITS.format(0))
    own = {"data": {"path": str(examples)}, "finetune": {"labels": ["a", "b", "c"]}}
    task = Distillation(student_config(**own, distill={"logits": str(examples)}), CPU)
    task.open_data()
    labels = [int(row[1]) % 3 for row in rows_of(examples)]
    chosen = np.array([4, 0, 5])
    batch = task._batch(task._train, chosen, chosen, torch.zeros(3, dtype=torch.int32))
    assert np.array(task._train.labels).tolist() == [*labels[:4], 1, 0]
    assert torch.equal(batch.logits_BL, torch.from_numpy(logits[chosen]))  # type: ignore[arg-type]


def test_embeddings_are_loaded_from_a_run_or_a_file(runs: dict[str, Path], tmp_path: Path) -> None:
    words = Tokenizer.from_file(str(runs["mlm"] / "tokenizer.json"))
    table, _ = bert_dp.load(runs["mlm"])
    weight = torch.zeros(VOCABULARY, 24)
    load_embeddings(runs["mlm"], words, weight)
    assert torch.equal(weight, table.model.embeddings.tok_embeddings.weight)
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("the 1 2 3\nnowhere 4 5 6\nrain 7 8 9.5\n")
    weight = torch.zeros(VOCABULARY, 3)
    load_embeddings(vectors, words, weight)
    expected = torch.zeros(VOCABULARY, 3)
    expected[[words.token_to_id("the"), words.token_to_id("rain")]] = torch.tensor([[1, 2, 3], [7, 8, 9.5]])
    assert torch.equal(weight, expected)
    for path in (runs["mlm"], vectors, runs["mlm"] / "tokenizer.json"):
        (issue,) = raised_issues(load_embeddings, path, words, torch.zeros(VOCABULARY, 5))
        assert issue.setting == "distill.embeddings"


def test_settings_that_a_student_does_not_support_are_refused() -> None:
    scores = {"finetune": {"kind": "regression", "labels": []}, "distill": {"loss": "kl"}}
    for setting, ranks, sections in (
        ("parallel.tensor", 2, {"parallel": {"tensor": 2}}),
        ("optim.name", 1, {"optim": {"name": "muon"}}),
        ("parallel.zero_stage", 1, {"parallel": {"engine": "deepspeed", "zero_stage": 3}}),
        ("distill.loss", 1, scores),
    ):
        issues = raised_issues(lambda given, n: batch_layout(student_config(**given), n), sections, ranks)
        assert setting in [issue.setting for issue in issues]


@pytest.mark.parametrize("name", ["student", "student of pairs"])
def test_a_student_loads_predicts_and_exports_to_onnx(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    model, _ = bert_dp.load(runs[name])
    assert isinstance(model, BiLstm)
    opened, out = source.open_run(runs[name], encoder=False), tmp_path / "onnx"
    source.export(opened, "onnx", out, command="")
    found = check.check(out, runs[name])
    assert found.ok
    assert {(row.batch, row.length) for row in found.rows} >= {(1, 5), (3, 32), (8, 5)}
    texts = [(" ".join(WORDS[: 2 + i]), "the old rain")[: 1 + model.pair] for i in range(9)]
    ours, theirs = (
        [*prediction.predict(prediction.open_predictor(place), texts, lambda *_: None)]
        for place in (runs[name], out)
    )
    assert [line["label"] for line in ours] == [line["label"] for line in theirs]
    assert ours[3]["probabilities"] == pytest.approx(theirs[3]["probabilities"], abs=1e-4)
    for form in ("hf", "aoti"):
        (issue,) = raised_issues(source.export, opened, form, tmp_path / form, command="")
        assert issue.setting == "model.lstm_size"
        assert not (tmp_path / form).exists()
    assert raised_issues(source.open_run, runs[name], encoder=True)[0].setting == "--encoder"


# --- the BiLSTM


CLS, SEP, PAD = 4, 5, 0
CONFIG = ModelConfig(vocab_size=64, hidden_size=12, num_layers=1, num_heads=1, lstm_size=7, dropout=0.3)


def model_of(pair: bool = False) -> BiLstm:
    finetune = FinetuneConfig(labels=("a", "b", "c"), head_size=10, pair=pair)
    return build_bilstm(CONFIG, finetune, seed=3)


def padded(rows: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def random_rows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(7, 64, (n,), generator=generator).tolist() for n in lengths]


def states_by_torch(model: BiLstm, row: list[int]) -> Tensor:
    """Return the last states of torch's bidirectional LSTM, with equal weights, for one unpadded sentence."""
    own = nn.LSTM(12, 7, bidirectional=True, batch_first=True)
    reverse = {f"{name}_reverse": value for name, value in model.right_to_left.state_dict().items()}
    own.load_state_dict(model.left_to_right.state_dict() | reverse)
    _, (last_21H, _) = own(model.embedding(torch.tensor([row])))
    return last_21H.transpose(0, 1).flatten(1)


def test_the_bilstm_equals_torchs_lstm_on_unpadded_sentences_and_on_each_text_of_a_pair() -> None:
    model, rows = model_of().eval(), random_rows(9, 1, 4, 12)
    states = torch.cat([states_by_torch(model, row) for row in rows])
    expected = model.classifier(model.dense(states).relu())
    torch.testing.assert_close(model(*padded(rows, 16)), expected, rtol=0, atol=1e-6)
    model, (one, two) = model_of(pair=True).eval(), random_rows(3, 5)
    texts = [[CLS, *one, SEP], [*two, SEP]]
    logits = model(*padded([texts[0] + texts[1], texts[0] + texts[1][2:]], 16))[:1]
    a, b = (states_by_torch(model, text) for text in texts)
    features = torch.cat([a, b, a * b, (a - b).abs()], dim=-1)
    expected = model.classifier(model.dense(features).relu())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pair", [False, True])
def test_padding_changes_neither_the_loss_nor_dropout_nor_gradients(pair: bool) -> None:
    model = model_of(pair).train()
    rows = [[CLS, *row, SEP, *row[:2], SEP] for row in random_rows(9, 1, 4, 12)]
    seed_B = torch.arange(4, dtype=torch.int32)
    losses = [model(*padded(rows, length), seed_B).square().sum() for length in (18, 32)]
    short, long = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    for gradient, other in zip(short, long, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)
    assert not short[0][PAD].any(), "the embedding of padding must have no gradient"


def test_the_seed_determines_the_bilstm_and_cost_formulas_count_its_parameters() -> None:
    model, again = model_of(), model_of().state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert again["embedding.weight"].std() == pytest.approx(0.25 / 3**0.5, rel=0.05)
    counted = [p.numel() for name, p in model.named_parameters() if not name.startswith(("dense", "class"))]
    assert cost.num_parameters(CONFIG, 128) == sum(counted)
    weights = sum(p.numel() for name, p in model.named_parameters() if "weight_" in name)
    assert cost.linear_parameters(CONFIG) == weights
    assert cost.flops_per_token(CONFIG, 128, 0.0) == 6 * weights


# --- the transfer set


TEXT = "a fine film with no plot"


def upper(text: str, index: int, draw: Random) -> str:
    return text.split()[index].upper()


KEEP, WHOLE = 0.2, 0.25  # the smallest draws that keep a word and that leave a text uncut


def test_copies_depend_only_on_the_drawn_numbers() -> None:
    for expected, numbers in (
        (f"a {MASK} film with no plot", [KEEP, 0.0999, *[KEEP] * 4, WHOLE]),
        ("A fine film with no PLOT", [0.1, *[KEEP] * 4, 0.1999, WHOLE]),
        ("a", [*[KEEP] * 6, 0.2499, 0.0, 0.0]),
        ("fine film with no plot", [*[KEEP] * 6, 0.0, 0.99, 0.99]),
        (f"{MASK} FINE film", [0.0, 0.15, *[KEEP] * 4, 0.1, 0.5, 0.0]),
        ("one two", [KEEP, KEEP, 0.0, 0.99, 0.99]),
    ):
        draw = Random()
        draw.random = iter(numbers).__next__  # type: ignore[method-assign]
        text = TEXT if len(numbers) > 5 else "one two"
        assert augment.changed(text, upper, draw) == expected


def test_a_word_is_replaced_by_words_of_its_tag_in_proportion_to_their_frequency() -> None:
    texts = ["dog dog cat Run", "dog Run Walk"]
    replace = augment.SameTagWords(texts, lambda words: [str(word[0].isupper()) for word in words])
    draw = Random(0)
    nouns, verbs = (Counter(replace(text, 2, draw) for _ in range(10_000)) for text in texts)
    assert (nouns.keys(), verbs.keys()) == ({"dog", "cat"}, {"Run", "Walk"})
    assert [nouns["dog"], verbs["Run"]] == pytest.approx([7500, 6667], abs=130)  # 3 standard deviations


def test_a_copy_depends_on_seed_example_and_copy_number_and_changes_one_or_both_texts() -> None:
    pair = (TEXT, "it was all over by then")
    for copy, changing in enumerate([{0}, {1}, {0, 1}] * 2):
        copies, again, other = (
            [copy_of(pair, upper, seed=seed, example=e, copy=copy) for e in range(30)] for seed in (1, 1, 2)
        )
        assert copies == again != other
        for side in (0, 1):
            texts = {each[side] for each in copies}
            assert len(texts) > 5 if side in changing else texts == {pair[side]}


def custom(folder: Path, *rows: str, header: str = "text,label") -> CustomData:
    (folder / "all.csv").write_text("\n".join([header, *rows]) + "\n")
    names = dict.fromkeys(("train", "dev"), str(folder / "all.csv"))
    return CustomData(names, Columns(("text",), "label"), None, finds_pair=True)


def test_copies_follow_the_examples_without_duplicates(tmp_path: Path) -> None:
    data = custom(tmp_path, f"{TEXT},good", "bad,bad", "so bad,bad")
    fewer, more = (AugmentedData(data, 3, copies, "none") for copies in (20, 21))
    table = fewer.read(train_only=False).tables["train"]
    texts = [row.texts for row in table.rows]
    assert texts[:3] == [(TEXT,), ("bad",), ("so bad",)]
    assert len(set(texts)) == len(texts) == 3 + table.copies
    assert table.copies > 10
    assert {row.texts for row in more.read(train_only=False).tables["train"].rows} >= set(texts)
    assert more.identity() != fewer.identity()


def test_a_mask_in_a_text_becomes_the_mask_token(tmp_path: Path) -> None:
    for model, kept in (("wordpiece", True), ("byte_bpe", False)):
        words = tokenizer.train([TEXT] * 9, model=model, vocab_size=300, with_normalizer=kept)  # type: ignore[arg-type]
        words.save(str(tmp_path / "tokenizer.json"))
        plain = ExampleEncoder.load(tmp_path / "tokenizer.json", 32)
        masks = dataclasses.replace(plain, marks={MASK: plain.special["mask"], HOLE: HOLE_ID})
        (cls, *first, sep), second = (plain.encode([(part,)]).ids for part in ("a", " film with"))
        mask = plain.special["mask"]
        expected = [cls, *first, mask, *second[1:-1], HOLE_ID, sep]
        assert masks.encode([(f"a {MASK} film with {HOLE}",)]).ids.tolist() == expected
        assert mask not in plain.encode([(f"a {MASK}",)]).ids


def test_a_file_of_logits_replaces_the_training_examples(tmp_path: Path) -> None:
    file = tmp_path / "l.jsonl"
    write_lines(file, [{"text": "x y", "logits": [1, -2.5]}, {"text": "z", "logits": [0, 1]}])
    labelled = LogitsData(custom(tmp_path, "one,good", "two,bad"), str(file)).read(train_only=False)
    assert [row.texts for row in labelled.tables["train"].rows] == [("x y",), ("z",)]
    assert labelled.logits is not None
    assert labelled.logits.tolist() == [[1, -2.5], [0, 1]]
    assert answers(labelled.logits, "single_label").tolist() == [0, 1]
    assert answers(labelled.logits, "multi_label").tolist() == [[1, 0], [0, 1]]
    assert answers(labelled.logits[:, :1], "regression").tolist() == [1, 0]


def test_invalid_logits_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "l.jsonl"
    single = custom(tmp_path, "one,good", "two,bad")
    (tmp_path / "pairs").mkdir()
    pairs = custom(tmp_path / "pairs", "one,two,good", "three,four,bad", header="text,text_pair,label")
    for data, kind, record in (
        (single, "damaged", {"text": "x"}),
        (single, "damaged", {"text": "x", "logits": 3}),
        (single, "damaged", {"text": "x", "logits": [math.nan, 1]}),
        (single, "conflict", {"text": "x", "logits": [1, 2, 3]}),
        (single, "missing", {"logits": [1, 2]}),
        (single, "conflict", {"text": "x", "text_pair": "y", "logits": [1, 2]}),
        (pairs, "missing", {"text": "x", "logits": [1, 2]}),
    ):
        write_lines(file, [record])
        (issue,) = raised_issues(LogitsData(data, str(file)).read, train_only=False)
        assert (issue.setting, issue.kind) == (str(file), kind)


def test_the_tagger_is_loaded_or_its_missing_package_is_named() -> None:
    if find_spec("HanTa") is None:
        (issue,) = raised_issues(augment.load_tagger)
        assert (issue.setting, issue.kind, issue.value) == ("--replace", "needs_package", "HanTa")
    else:
        tags = augment.load_tagger()("a dog and the cat ran".split())
        assert len(tags) == 6
        assert tags[1] == tags[4]
        assert len(set(tags)) > 2
