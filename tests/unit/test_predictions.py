"""Tests of `predict` (reading files, outputs per example) and of `bert_dp.load`."""

import contextlib
import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bert_dp
from bert_dp.config import FinetuneConfig, ModelConfig
from bert_dp.data import tokenizer
from bert_dp.evaluation import prediction
from bert_dp.exporting import load_exported
from bert_dp.exporting.source import open_run, write_about
from bert_dp.files.run_facts import MODEL_FILES
from bert_dp.model.bert import build_model
from bert_dp.training.process import RunFailed
from tests.helpers import TINY_MODEL, issues_of, raised_issues, read_json, write_files
from tests.runs_to_export import WORDS, config_of, finetuned, write_run
from tests.tensors import CPU

FIXTURES = Path(__file__).parents[1] / "fixtures"
LENGTH, PAD, CLS, MOST = 32, 0, 4, 10_000
SMALL = {"hidden_size": 16, "num_heads": 2}
ROWS = [
    np.array([CLS, *np.random.default_rng(n).integers(7, 64, n % 29 + 1), 5], np.uint16) for n in range(50)
]


def test_an_encoding_is_the_mean_of_the_hidden_states() -> None:
    model = build_model(ModelConfig(**TINY_MODEL), LENGTH, 0).eval()
    encodings = prediction.outputs_of(prediction.on_device(model, CPU), ROWS, PAD, MOST)
    for row, encoding in zip(ROWS, encodings, strict=True):
        with torch.no_grad():
            expected = model.model(torch.from_numpy(row.astype(np.int64))[None])[0].mean(0)
        assert encoding == pytest.approx(expected.numpy(), abs=1e-5)


def answers(run: Path, texts: Any, precision: str = "auto") -> tuple[list[Any], list[Any]]:
    """Return the output lines of `texts` and the progress reports."""
    reports: list[tuple[str, int, int | None]] = []
    tell = lambda *now: reports.append(now)  # noqa: E731
    return list(prediction.predict(prediction.open_predictor(run, precision), texts, tell)), reports


def test_lines_have_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", config_of("quickstart", model=SMALL))
    texts = [(" ".join(WORDS[: 1 + n * 7 % len(WORDS)]),) for n in range(50)]
    whole, _ = answers(run, texts)
    monkeypatch.setattr(prediction, "SORTED_EXAMPLES", 20)
    monkeypatch.setitem(prediction.BATCH_TOKENS, "cpu", 60)
    lines, reports = answers(run, texts)
    assert [line["index"] for line in lines] == list(range(50))
    for line, expected in zip(lines, whole, strict=True):
        assert line["encoding"] == pytest.approx(expected["encoding"], abs=1e-5)
        assert line["encoding"] != [round(x, 4) for x in line["encoding"]]
    done = [number for _, number, _ in reports]
    assert done == sorted(done)
    assert len(done) > 10
    assert reports[-1] == ("examples", 50, 50)


LOST = "\u043c\u0438\u0440"  # the tokenizer drops this text completely


@pytest.mark.parametrize("form", ["labels", "encodings"])
def test_a_text_without_tokens_has_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A pair needs tokens in both texts. A file without any usable example is refused before writing."""
    monkeypatch.setattr(prediction, "SORTED_EXAMPLES", 2)
    config = config_of("quickstart", model=SMALL)
    run = write_run(tmp_path / "run", config if form == "encodings" else finetuned(config, "recipe"))
    known, pair = " ".join(WORDS[:5]), {"text": "a", "text_pair": "b"}
    pairs = f"a,b\n{known},{known}\n{known},{LOST}\n{LOST},{known}\n{LOST},{LOST}\n"
    write_files(tmp_path, {"pairs.csv": pairs, "lost.txt": f"{LOST}\n", "lost.csv": f"a,b\n{known},{LOST}\n"})
    prediction.predict_file(run, str(tmp_path / "pairs.csv"), **pair)
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert lines[1:] == [{"index": i, "tokens": 0} for i in (1, 2, 3)]
    assert ("label" in lines[0]) == (form == "labels")
    for part in ("3 of 4 examples", "index 1", f"({4 * len(LOST)} of "):
        assert part in printed.err
    out = tmp_path / "new" / "out.jsonl"
    for name, columns in (("lost.txt", {}), ("lost.csv", pair)):
        (issue,) = raised_issues(prediction.predict_file, run, str(tmp_path / name), out=out, **columns)
        assert (issue.setting, issue.kind, issue.other) == ("FILE", "conflict", "RUN")
    assert not out.parent.exists()


@pytest.mark.parametrize(("is_finetuned", "special"), [(False, 1), (True, 2)])
def test_a_text_may_fill_all_positions_except_those_of_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finetuned: bool, special: int
) -> None:
    config = config_of("quickstart", model=SMALL)
    run = write_run(tmp_path / "run", finetuned(config, "recipe") if is_finetuned else config)
    lengths: list[int] = []
    outputs_of = prediction.outputs_of

    def noted(compute: Any, rows: Any, *more: Any) -> Any:
        lengths.extend(map(len, rows))
        return outputs_of(compute, rows, *more)

    monkeypatch.setattr(prediction, "outputs_of", noted)
    for more in (0, 1):
        _, reports = answers(run, [("a " * (128 - special + more),)])
        assert len([total for *_, total in reports if not total]) == more
    assert lengths == [128, 128]


def test_exported_files_decide_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, labels and tokenizer come from export.json, not from the run."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(load_exported, "open_directory", lambda *_: None)
    config = finetuned(config_of("quickstart", model=SMALL), "recipe", pooling="mean")
    run, out = write_run(tmp_path / "run", config), tmp_path / "out"
    out.mkdir()
    (out / "model.onnx").touch()
    write_about(out, open_run(run, encoder=False), "onnx", "bert-dp export")
    (out / "export.json").write_text(json.dumps({**read_json(out / "export.json"), "sequence_length": 9}))
    for place, length in ((out, 9), (run, 128)):
        found = prediction.open_predictor(place)
        assert (found.finetune, found.encoder.length) == (config.finetune, length)
    (issue,) = raised_issues(prediction.open_predictor, out, "bf16")
    assert (issue.setting, issue.kind) == ("--precision", "conflict")
    write_about(out, open_run(run, encoder=True), "onnx", "bert-dp export")
    assert prediction.open_predictor(out).finetune is None


def test_a_diverged_run_predicts_nothing() -> None:
    """One output that is not finite makes the prediction fail."""

    def compute(ids_BS: torch.Tensor, real_BS: torch.Tensor) -> torch.Tensor:
        return torch.where(real_BS.sum(1, keepdim=True) == 9, math.nan, 1.0)

    fine = [row for row in ROWS if len(row) != 9]
    assert prediction.outputs_of(compute, fine, PAD, MOST).tolist() == [[1.0]] * len(fine)
    with pytest.raises(RunFailed, match="not finite") as caught:
        prediction.outputs_of(compute, ROWS, PAD, MOST)
    assert caught.value.failure_kind == "not_finite"


@pytest.mark.parametrize("form", ["hf", "onnx", "aoti"])
def test_a_damaged_model_file_gives_one_line(tmp_path: Path, form: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert", **small}))
    for content in (b"torn", b"PK\x03\x04" + bytes(64), b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "):
        (tmp_path / MODEL_FILES[form]).write_bytes(content)  # type: ignore[index]
        with pytest.raises(load_exported.Unusable, match="export the run again") as caught:
            load_exported.open_directory(tmp_path, form, "mlm")
        assert str(caught.value).startswith(f"DIR: {tmp_path}")
        assert "\n" not in str(caught.value)


def test_batches_are_bounded_and_cover_all_examples() -> None:
    lengths = np.random.default_rng(0).integers(1, 130, 200)
    found = list(prediction.batches(lengths, 100))
    assert sorted(np.concatenate(found).tolist()) == list(range(200))
    assert all(len(b) * lengths[b].max() <= 100 or len(b) == 1 for b in found)
    assert sum(len(b) * int(lengths[b].max()) for b in found) < 1.05 * lengths.sum()


def test_bf16_is_close_to_fp32_and_auto_is_fp32_without_a_gpu(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config_of("quickstart", model=SMALL))
    texts = [(" ".join(WORDS[: n + 1]),) for n in range(5)]
    found = {precision: answers(run, texts, precision=precision)[0] for precision in ("auto", "fp32", "bf16")}
    assert found["auto"] == found["fp32"]
    wide, narrow = (np.array([line["encoding"] for line in found[name]]) for name in ("fp32", "bf16"))
    assert 0 < np.abs(wide - narrow).max() < 0.05 * max(1.0, np.abs(wide).max())


def test_labels_have_probabilities() -> None:
    logits = np.array([0.0, math.log(3), -800.0])
    names = ("no", "yes", "never")
    single = prediction.labelled(logits, FinetuneConfig(labels=names))
    assert single == {"label": "yes", "probabilities": {"no": 0.25, "yes": 0.75, "never": 0.0}}
    several = prediction.labelled(logits, FinetuneConfig(labels=names, kind="multi_label"))
    assert several == {"labels": ["yes"], "probabilities": {"no": 0.5, "yes": 0.75, "never": 0.0}}
    regression = FinetuneConfig(kind="regression")
    assert prediction.labelled(np.array([2.123456789]), regression) == {"score": 2.123457}


def test_texts_are_read_from_every_file_format(tmp_path: Path) -> None:
    records = [{"text": "one", "a": "x", "b": "y"}, {"text": "two, and", "a": "v", "b": "w"}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    tables = {"a.tsv": "a\tb\nx\ty\nv\tw\n", "a.csv": 'text\none\n"two, and"\n'}
    write_files(tmp_path, {"a.txt": "one\ntwo, and\n", "a.jsonl": lines, **tables})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("a.txt", "a.jsonl", "a.csv", "a.jsonl.gz"):
        assert prediction.read_texts(str(tmp_path / name), []) == [("one",), ("two, and",)]
    for name in ("a.jsonl", "a.tsv"):
        assert prediction.read_texts(str(tmp_path / name), ["a", "b"]) == [("x", "y"), ("v", "w")]


def test_an_invalid_example_gives_one_line(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"a.txt": "one\n\nthree\n", "empty.txt": "", "a.csv": "a,b\n1,2\n", "b.csv": "text\n' '\n\"\"\n"},
    )
    for name, columns, part in (
        ("a.txt", [], "line 2 "),
        ("empty.txt", [], "contains no example"),
        ("a.csv", [], "string for the key 'text' (got keys ['a', 'b']); choose a column with --text"),
        ("b.csv", [], "line 3: "),
        ("", [], "cannot be read"),
    ):
        (line,) = issues_of(prediction.read_texts, str(tmp_path / name), columns)
        assert part in line


@pytest.mark.parametrize(("out", "kind"), [("a.txt", "exists"), ("a.txt/b", "not_found")])
def test_an_output_path_that_cannot_be_written_is_refused(tmp_path: Path, out: str, kind: str) -> None:
    run = write_run(tmp_path / "run", config_of("quickstart", model=SMALL))
    (tmp_path / "a.txt").write_text("one\n")
    (issue,) = raised_issues(prediction.predict_file, run, str(tmp_path / "a.txt"), out=tmp_path / out)
    assert (issue.setting, issue.kind) == ("--out", kind)


def test_an_unfinished_output_file_does_not_appear(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    with contextlib.suppress(KeyboardInterrupt), prediction.destination(out) as file:
        file.write("1\n")
        raise KeyboardInterrupt
    assert list(out.parent.iterdir()) == []
    with prediction.destination(out) as file:
        file.write("1\n")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "1\n"


# --- bert_dp.load


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory with a tokenizer."""
    path = shutil.copytree(FIXTURES / "stopped-run", tmp_path / "run")
    words = tokenizer.train(["a cat sat on a mat"], model="wordpiece", vocab_size=60, with_normalizer=True)
    words.save(str(path / "tokenizer.json"))
    return path


def test_load_returns_the_model_in_eval_mode_and_the_tokenizer(run_dir: Path) -> None:
    model, words = bert_dp.load(str(run_dir))
    saved = load_file(run_dir / "checkpoints/step-00000012/model.safetensors")
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    assert words.encode("a cat", add_special_tokens=False).tokens == ["a", "cat"]
    ids = torch.arange(8).reshape(2, 4)
    with torch.inference_mode():
        hidden, logits = model.model(ids), model(ids, torch.arange(8))
        torch.testing.assert_close(model(ids, torch.tensor([5]))[0], logits[5])
    assert hidden.shape[:2] == (2, 4)
    assert logits.shape == (8, len(saved["model.embeddings.tok_embeddings.weight"]))


def test_load_takes_the_newest_valid_checkpoint_or_the_given_one(run_dir: Path) -> None:
    good = run_dir / "checkpoints/step-00000012"
    torn = shutil.copytree(good, run_dir / "checkpoints/step-00000013")
    (torn / "model.safetensors").write_bytes(b"torn")
    expected = dict(bert_dp.load(good)[0].named_parameters())
    model, _ = bert_dp.load(run_dir)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())
    (line,) = issues_of(bert_dp.load, torn)
    assert str(torn) in line
    wide = shutil.copytree(FIXTURES / "step-00000003", run_dir / "checkpoints/step-00000003")
    assert {tensor.dtype for tensor in bert_dp.load(wide)[0].parameters()} == {torch.float64}


def test_load_names_what_it_cannot_read(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no valid checkpoint" in issues_of(bert_dp.load, tmp_path / "empty")[0]
    (run_dir / "tokenizer.json").write_text("{}")
    assert "not a valid tokenizer.json" in issues_of(bert_dp.load, run_dir)[0]
    (run_dir / "tokenizer.json").unlink()
    (line,) = issues_of(bert_dp.load, run_dir)
    assert line.endswith(f"copy the tokenizer.json of the run's shards to {run_dir / 'tokenizer.json'}")
