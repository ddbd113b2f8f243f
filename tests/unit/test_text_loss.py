"""Tests of `eval mlm`: masked tokens and hidden words, losses and their denominators, and refusals."""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bert_dp.config import BuildConfig, ModelConfig, resolve
from bert_dp.data import readers
from bert_dp.data import tokenizer as tokens
from bert_dp.evaluation import text_loss
from bert_dp.model.bert import CrammedBert, build_model
from bert_dp.training.process import RunFailed
from launcher.evaluate.text_loss import text_report
from tests.helpers import TINY_MODEL, raised_issues
from tests.runs_to_export import config_of, finetuned, write_run

RUN = Path(__file__).parents[1] / "fixtures/stopped-run"
SENTENCE = "Seven old ships sailed slowly past the quiet harbour, while rain fell on every lamp of it."
DOCUMENTS = [f"{SENTENCE} This is number {i}: {SENTENCE[i % 40 :]}" for i in range(60)]
LENGTH = 16
SMALL = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


def quiet(stage: str, done: int, total: int | None) -> None:
    pass


def trained(size: int, kind: str = "wordpiece") -> Tokenizer:
    return tokens.train(DOCUMENTS, model=kind, vocab_size=size, with_normalizer=True)  # type: ignore[arg-type]


def read(documents: Sequence[str], tokenizer: Tokenizer) -> text_loss.Text:
    return text_loss.read(documents, tokenizer, tokens.special_ids(tokenizer, "it"))


def model_of(size: int) -> CrammedBert:
    return build_model(ModelConfig(**{**TINY_MODEL, "vocab_size": size}), LENGTH, 0).eval()


def hide(text: str, tokenizer: Tokenizer) -> tuple[list[Any], text_loss.WordCounts, list[Any], list[Any]]:
    """Return the words with a hidden token, read from the text by the tokens' offsets; the counts; and the
    spans of the hidden words and of the visible tokens."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    hidden_T, counts = text_loss.hide_words(text, encoded.offsets, readers.document_key(text))
    places = [span for span, hides in zip(encoded.offsets, hidden_T, strict=True) if hides]
    seen = [span for span, hides in zip(encoded.offsets, hidden_T, strict=True) if not hides]
    words = [word.span() for word in re.finditer(r"\S+", text)]
    covered = [(a, b) for a, b in words if any(begin < b and a < end for begin, end in places)]
    return [text[a:b] for a, b in covered], counts, covered, seen


# --- masked tokens and hidden words


def test_the_same_words_are_hidden_for_every_vocabulary() -> None:
    texts = [*DOCUMENTS, "Na\u00efve caf\u00e9s sold \u201ccr\u00eapes\u201d \u2014 and  ``tea''.\n" * 9]
    small, large = trained(80), trained(400)
    assert len(small.encode(texts[0]).ids) > 1.5 * len(large.encode(texts[0]).ids)
    assert [hide(t, small)[0] for t in texts] == [hide(t, large)[0] for t in texts]
    of_small, of_large = read(texts, small), read(texts, large)
    small_D, large_D = of_small.counts_D, of_large.counts_D
    assert small_D.hidden.sum() > 0.1 * small_D.words.sum()
    assert small_D.hidden.tolist() == large_D.hidden.tolist()
    assert small_D.hidden_bytes.tolist() == large_D.hidden_bytes.tolist()
    assert of_small.hidden_T.sum() > of_large.hidden_T.sum()


def test_hidden_words_are_complete_and_counted_in_bytes_of_the_text() -> None:
    text = "Zw\u00f6lf Boxk\u00e4mpfer \u2192 jagen \u00e4\u00f6\u00fc, " * 30
    words, counts, covered, seen = hide(text, trained(90))
    assert all(not (x < b and a < y) for a, b in covered for x, y in seen)
    arrows = counts.hidden - len(covered)  # the normaliser drops arrows, so no token covers one
    assert counts.words == 150
    assert counts.without_token == arrows > 0
    assert counts.hidden_bytes == sum(len(word.encode()) for word in words) + arrows * len("\u2192".encode())


def test_the_masks_of_a_document_do_not_depend_on_other_documents() -> None:
    tokenizer = trained(80)
    whole, alone = read(DOCUMENTS, tokenizer), read(DOCUMENTS[7:8], tokenizer)
    seventh = whole.document_T == 7
    for name in ("ids_T", "seen_T", "drawn_T", "hidden_T"):
        assert getattr(whole, name)[seventh].tolist() == getattr(alone, name).tolist()
    assert alone.drawn_T.any()
    assert alone.hidden_T.any()
    other = whole.document_T == 8
    assert whole.drawn_T[seventh].tolist() != whole.drawn_T[other].tolist()


def test_the_shares_of_masked_random_and_kept_tokens() -> None:
    count, first, end = 200_000, 7, 64
    ids_T = np.full(count, 9, np.uint16)
    seen_T, drawn_T = text_loss.draw_tokens(ids_T, 3, 6, (first, end))
    assert drawn_T.mean() == pytest.approx(0.15, abs=0.004)
    share = [(seen_T[drawn_T] == token).mean() for token in (6, 9)]
    assert share == pytest.approx([0.8, 0.1 + 0.1 / (end - first)], abs=0.01)
    assert set(seen_T[drawn_T]) == {6, *range(first, end)}
    assert set(seen_T[~drawn_T]) == {9}


def test_special_tokens_in_a_text_are_plain_text() -> None:
    text = read(["one <mask> two"], trained(80))
    special = tokens.special_ids(trained(80), "it")
    assert special["mask"] not in text.ids_T
    assert text.ids_T.tolist().count(special["sep"]) == 1
    assert text.ids_T[-1] == special["sep"]


# --- losses


def test_a_model_with_zero_logits_needs_the_bits_of_its_vocabulary() -> None:
    """The loss is ln V nats or log2 V bits per token. All counts are checked by hand."""
    tokenizer = trained(80)
    model, text = model_of(80), read(DOCUMENTS, tokenizer)
    torch.nn.init.zeros_(model.model.embeddings.tok_embeddings.weight)
    row = text_loss.token_losses(model, text, LENGTH, quiet)
    assert row.loss == pytest.approx(math.log(80), rel=1e-6)
    assert row.loss_se == pytest.approx(0.0, abs=1e-6)
    assert (row.tokens, row.documents) == (text.drawn_T.sum(), len(DOCUMENTS))
    special = tokens.special_ids(tokenizer, "it")
    words = text_loss.word_losses(model, text, LENGTH, special, quiet)
    hidden = [word for document in DOCUMENTS for word in hide(document, tokenizer)[0]]
    assert (words.words, words.bytes) == (len(hidden), sum(map(len, hidden)))
    assert words.bits_per_byte == pytest.approx(words.tokens * math.log2(80) / words.bytes, rel=1e-6)
    assert words.bits_per_byte_se > 0


def test_hidden_words_outside_the_vocabulary_are_counted() -> None:
    """A document without hidden words is not counted."""
    tokenizer = tokens.train(["a b c"], model="wordpiece", vocab_size=20, with_normalizer=True)
    documents = [*("xyz a " * 20 for _ in range(3)), *("a" for _ in range(30))]
    text, special = read(documents, tokenizer), tokens.special_ids(tokenizer, "it")
    words = text_loss.word_losses(model_of(64), text, LENGTH, special, quiet)
    hidden = [hide(document, tokenizer)[0] for document in documents]
    assert words.documents == sum(map(bool, hidden)) < len(documents)
    unknown = sum(word == "xyz" for each in hidden for word in each)
    assert (words.unknown_tokens, words.words) == (unknown, sum(map(len, hidden)))
    assert 0 < unknown < words.tokens


def test_the_loss_equals_the_training_loss_at_the_same_positions() -> None:
    tokenizer = trained(80)
    model, text = model_of(80), read(DOCUMENTS, tokenizer)
    row = text_loss.token_losses(model, text, LENGTH, quiet)
    total = 0.0
    for first in range(0, len(text.ids_T), LENGTH):  # the last sequence is shorter
        cut = slice(first, first + LENGTH)
        (positions,) = np.nonzero(text.drawn_T[cut])
        ids = torch.from_numpy(text.seen_T[cut].astype(np.int64))[None]
        labels = torch.from_numpy(text.ids_T[cut][positions].astype(np.int64))
        total += model(ids, torch.from_numpy(positions), labels).item()
    assert len(text.ids_T) % LENGTH
    assert row.loss * row.tokens == pytest.approx(total, rel=1e-5)


def test_a_prediction_is_right_if_its_logit_is_the_largest() -> None:
    """A model that predicts its input is right where the token is visible, and rarely elsewhere."""
    model, text = model_of(80), read(DOCUMENTS, trained(80))
    with torch.no_grad():
        model.model.embeddings.tok_embeddings.weight.mul_(100.0)  # embeddings now outweigh all other terms
        for layer in model.model.layers:
            for name in ("attn.Wo", "mlp.Wo"):
                layer.get_submodule(name).weight.zero_()
    same = (text.seen_T == text.ids_T)[text.drawn_T].mean()
    assert text_loss.token_losses(model, text, LENGTH, quiet).accuracy == pytest.approx(same, abs=0.02)


def test_the_standard_error_of_a_ratio_by_hand() -> None:
    """3 / 2 and 1 / 1: mean 4/3, residuals 1/3 and -1/3, sqrt(2/9 x 2/1) / 3 = 2/9. The third is empty."""
    assert text_loss.ratio(np.array([3.0, 1.0, 0.0]), np.array([2, 1, 0])) == pytest.approx((4 / 3, 2 / 9))
    assert text_loss.ratio(np.array([3.0]), np.array([2])) == (1.5, None)
    assert text_loss.ratio(np.zeros(2), np.zeros(2, np.int64)) == (None, None)


@pytest.mark.parametrize("most", text_loss.BATCH_TOKENS.values())
@pytest.mark.parametrize("count", [1, 15, 16, 17, 8192, 8193, 20_000, 70_000])
def test_every_token_is_read_once_in_sequences_of_equal_length_except_the_last(count: int, most: int) -> None:
    cut = list(text_loss.pieces(count, LENGTH, most))
    assert {end - begin for begin, end, _ in cut if end < count // LENGTH * LENGTH} <= {most}
    assert [n for begin, end, _ in cut for n in range(begin, end)] == list(range(count))
    assert all((end - begin) % width == 0 for begin, end, width in cut)
    assert {width for _, _, width in cut[:-1]} <= {LENGTH}
    assert cut[-1][2] == (count % LENGTH or LENGTH)


def test_a_diverged_model_is_not_scored() -> None:
    model = model_of(80)
    torch.nn.init.constant_(model.model.final_norm.weight, math.nan)
    with pytest.raises(RunFailed, match="not finite"):
        text_loss.token_losses(model, read(DOCUMENTS, trained(80)), LENGTH, quiet)


# --- runs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = shutil.copytree(RUN, tmp_path / "run")
    trained(60).save(str(path / "tokenizer.json"))
    return path


def measure(run: Path, texts: Path, **options: Any) -> text_loss.TextLoss:
    how = {"options": BuildConfig(), "progress": quiet, **options}
    return text_loss.text_loss(str(run), [str(texts)], **how)


def test_the_text_loss_of_a_run_and_its_report(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join("\n".join(DOCUMENTS[i : i + 3]) for i in range(0, 60, 3)))
    options = BuildConfig(documents="blank_line")
    measured = measure(run_dir, path, options=options)
    assert (measured.documents, measured.step, measured.precision) == (20, 12, "float32")
    assert measured.vocab_size == 60, "the tokenizer's, not the model's"
    assert measured.bytes == sum(map(len, DOCUMENTS)) + 40
    assert [source["documents"] for source in measured.sources] == [20]
    few = measured.model_copy(
        update={"predicted": measured.predicted.model_copy(update={"documents": 2, "loss_se": 0.01})}
    )
    row = text_report(few).sections[0].tables[0].rows[0]  # Student's t of one degree of freedom: 12.706
    assert row.cells[0].text.endswith(" \u00b1 0.1271")
    fp32, bf16 = (measure(run_dir, path, options=options, precision=name) for name in ("fp32", "bf16"))
    assert measured == fp32, "auto is fp32 without a GPU"
    assert bf16.precision == "bfloat16"
    assert 0 < abs(bf16.predicted.loss - fp32.predicted.loss) < 0.01
    path.write_text(" ".join(DOCUMENTS[:9]))
    alone = measure(run_dir, path, options=options)
    assert (alone.documents, alone.predicted.loss_se) == (1, None)


def test_documents_without_tokens_are_counted(run_dir: Path, tmp_path: Path) -> None:
    """A text in which no document has tokens is refused."""
    lost = "\u043c\u0438\u0440"
    (tmp_path / "a.txt").write_text("\n".join([*DOCUMENTS[:20], lost, *DOCUMENTS[20:], lost]))
    (tmp_path / "lost.txt").write_text(f"{lost}\n" * 40)
    assert measure(run_dir, tmp_path / "a.txt").documents_without_tokens == 2
    (issue,) = raised_issues(measure, run_dir, tmp_path / "lost.txt")
    assert (issue.setting, issue.kind, issue.other) == ("TEXT", "conflict", "RUN")


def test_texts_and_runs_that_cannot_be_measured_are_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refusal(run: Path) -> tuple[str, str, str | None]:
        (issue,) = raised_issues(measure, run, tmp_path / "a.txt")
        return issue.setting, issue.kind, issue.hint

    assert refusal(run_dir) == ("TEXT", "out_of_range", "pass more text")
    larger = trained(60)
    larger.add_tokens([f"word{i}" for i in range(1000)])
    larger.save(str(run_dir / "tokenizer.json"))
    assert refusal(run_dir)[:2] == ("RUN", "conflict")
    plain = finetuned(config_of("quickstart", model=SMALL), "recipe")
    for begin, named in ((None, "choose a pretrained run"), ("/runs/a", "choose /runs/a")):
        config = resolve([plain.model_dump(mode="json"), {"run": {"init_from": begin}}])
        run = write_run(tmp_path / f"finetuned-{begin is None}", config)
        assert refusal(run) == ("RUN", "unsupported", named)
