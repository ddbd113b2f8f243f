"""The text operations of a transfer set, and what is read of a file with a teacher's logits."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from bert_dp.config import ConfigError
from bert_dp.data import tokenizer
from bert_dp.examples.augment import (
    CUT_RATE,
    HOLE,
    HOLE_ID,
    LONGEST_CUT,
    MASK,
    MASK_RATE,
    REPLACE_RATE,
    AugmentedData,
    LogitsData,
    SameTagWords,
    changed,
    copy_of,
    load_tagger,
)
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.examples.table import Columns, CustomData, answers

TEXT = "a fine film with no plot"


class Scripted(Random):
    """Random numbers that a test lists."""

    def __init__(self, *numbers: float):
        super().__init__()
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


def upper(text: str, index: int, draw: Random) -> str:
    return text.split()[index].upper()


KEEP, WHOLE = 0.5, 0.9  # a word that stays, a text that is not cut
GOLDEN = {
    "nothing": ([KEEP] * 6 + [WHOLE], TEXT),
    "mask": ([KEEP, 0.0999, *[KEEP] * 4, WHOLE], f"a {MASK} film with no plot"),
    "replace": ([0.1, *[KEEP] * 4, 0.1999, WHOLE], "A fine film with no PLOT"),
    "first word alone": ([*[KEEP] * 6, 0.2499, 0.0, 0.0], "a"),
    "last five words": ([*[KEEP] * 6, 0.0, 0.99, 0.99], "fine film with no plot"),
    "all three": ([0.0, 0.15, *[KEEP] * 4, 0.1, 0.5, 0.0], f"{MASK} FINE film"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_examples(name: str) -> None:
    numbers, expected = GOLDEN[name]
    assert changed(TEXT, upper, Scripted(*numbers)) == expected


def test_a_cut_is_no_longer_than_the_text() -> None:
    assert changed("one two", upper, Scripted(KEEP, KEEP, 0.0, 0.99, 0.99)) == "one two"


def within_3_sigma(count: int, n: int, rate: float) -> bool:
    return abs(count - n * rate) < 3 * math.sqrt(n * rate * (1 - rate))


def test_rates_on_100_000_words() -> None:
    texts, words = 10_000, 10
    text = " ".join("abcdefghij")
    kept: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for example in range(texts):
        (copy,) = copy_of((text,), lambda *_: HOLE, seed=7, example=example, copy=0)
        found = copy.split(" ")
        lengths[len(found)] += 1
        if len(found) == words:
            kept.update({MASK: found.count(MASK), HOLE: found.count(HOLE)})
    whole = lengths.pop(words)
    assert within_3_sigma(texts - whole, texts, CUT_RATE)
    assert sorted(lengths) == list(range(1, LONGEST_CUT + 1))
    assert all(within_3_sigma(n, texts, CUT_RATE / LONGEST_CUT) for n in lengths.values())
    assert within_3_sigma(kept[MASK], whole * words, MASK_RATE)
    assert within_3_sigma(kept[HOLE], whole * words, REPLACE_RATE)


def test_a_word_is_replaced_by_those_of_its_tag_by_their_frequency() -> None:
    texts = ["dog dog cat Run", "dog Run Walk"]
    replace = SameTagWords(texts, lambda words: ["V" if word[0].isupper() else "N" for word in words])
    draw = Random(0)
    nouns = Counter(replace(texts[0], 2, draw) for _ in range(10_000))
    verbs = Counter(replace(texts[1], 2, draw) for _ in range(10_000))
    assert nouns.keys() | verbs.keys() == {"dog", "cat", "Run", "Walk"}
    assert within_3_sigma(nouns["dog"], 10_000, 3 / 4)
    assert within_3_sigma(verbs["Run"], 10_000, 2 / 3)


def test_a_copy_follows_from_seed_example_and_copy() -> None:
    first = [copy_of((TEXT,), upper, seed=1, example=e, copy=c) for e in range(9) for c in range(9)]
    again = [copy_of((TEXT,), upper, seed=1, example=e, copy=c) for e in range(9) for c in range(9)]
    assert first == again
    assert len(set(first)) > 20
    assert first != [copy_of((TEXT,), upper, seed=2, example=e, copy=c) for e in range(9) for c in range(9)]


def test_each_text_of_a_pair_changes_and_then_both() -> None:
    pair = (TEXT, "it was all over by then")
    for copy, fixed in ((0, 1), (1, 0), (3, 1), (4, 0)):
        copies = [copy_of(pair, upper, seed=0, example=e, copy=copy) for e in range(30)]
        assert {each[fixed] for each in copies} == {pair[fixed]}
        assert len({each[1 - fixed] for each in copies}) > 5
    both = [copy_of(pair, upper, seed=0, example=e, copy=2) for e in range(30)]
    assert any(one != pair[0] and two != pair[1] for one, two in both)


def custom(folder: Path, rows: list[str], header: str = "text,label", **more: Any) -> CustomData:
    for name in ("train", "dev"):
        (folder / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    names = {name: str(folder / f"{name}.csv") for name in ("train", "dev")}
    return CustomData(names, Columns(("text",), "label"), None, finds_pair=True)


def test_copies_stand_behind_the_examples_without_duplicates(tmp_path: Path) -> None:
    data = custom(tmp_path, [f"{TEXT},good", "bad,bad", "so bad,bad"])
    table = AugmentedData(data, 3, 20, "none").read(train_only=False).tables["train"]
    texts = [row.texts for row in table.rows]
    assert texts[:3] == [(TEXT,), ("bad",), ("so bad",)]
    assert len(set(texts)) == len(texts) == 3 + table.copies
    assert table.copies > 10
    more = AugmentedData(data, 3, 21, "none")
    assert {row.texts for row in more.read(train_only=False).tables["train"].rows} >= set(texts)
    assert more.identity() != AugmentedData(data, 3, 20, "none").identity()


def test_a_mask_in_a_text_becomes_the_token(tmp_path: Path) -> None:
    for model, kept in (("wordpiece", True), ("byte_bpe", False)):
        words = tokenizer.train([TEXT] * 9, model=model, vocab_size=300, with_normalizer=kept)  # type: ignore[arg-type]
        words.save(str(tmp_path / "tokenizer.json"))
        plain = ExampleEncoder.load(tmp_path / "tokenizer.json", 32)
        masks = dataclasses.replace(plain, marks={MASK: plain.special["mask"], HOLE: HOLE_ID})
        parts = [plain.encode([(part,)]).ids[1:-1] for part in ("a", " film with")]
        mask = plain.special["mask"]
        expected = [plain.special["cls"], *parts[0], mask, *parts[1], HOLE_ID, plain.special["sep"]]
        assert masks.encode([(f"a {MASK} film with {HOLE}",)]).ids.tolist() == expected
        assert mask not in plain.encode([(f"a {MASK}",)]).ids


def write_lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_file_of_logits_takes_the_place_of_train(tmp_path: Path) -> None:
    data = custom(tmp_path, ["one,good", "two,bad"])
    file = write_lines(
        tmp_path / "l.jsonl", {"text": "x y", "logits": [1, -2.5]}, {"text": "z", "logits": [0, 1]}
    )
    labelled = LogitsData(data, file).read(train_only=False)
    assert [row.texts for row in labelled.tables["train"].rows] == [("x y",), ("z",)]
    assert labelled.logits is not None
    assert labelled.logits.tolist() == [[1, -2.5], [0, 1]]
    assert answers(labelled.logits, "single_label").tolist() == [0, 1]
    assert answers(labelled.logits, "multi_label").tolist() == [[1, 0], [0, 1]]
    assert answers(labelled.logits[:, :1], "regression").tolist() == [1, 0]


BAD = {
    "missing": ({"text": "x"}, "damaged"),
    "no list": ({"text": "x", "logits": 3}, "damaged"),
    "not a number": ({"text": "x", "logits": [math.nan, 1]}, "damaged"),
    "three": ({"text": "x", "logits": [1, 2, 3]}, "conflict"),
    "no text": ({"logits": [1, 2]}, "missing"),
    "a pair": ({"text": "x", "text_pair": "y", "logits": [1, 2]}, "conflict"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_logits_are_refused(name: str, tmp_path: Path) -> None:
    record, kind = BAD[name]
    file = write_lines(tmp_path / "l.jsonl", {"text": "x", "logits": [1, 2]}, record)
    with pytest.raises(ConfigError) as refused:
        LogitsData(custom(tmp_path, ["one,good", "two,bad"]), file).read(train_only=False)
    assert [(issue.setting, issue.kind) for issue in refused.value.issues] == [(file, kind)]


def test_single_texts_are_refused_for_pairs(tmp_path: Path) -> None:
    data = custom(tmp_path, ["one,two,good", "three,four,bad"], "text,text_pair,label")
    file = write_lines(tmp_path / "l.jsonl", {"text": "x", "logits": [1, 2]})
    with pytest.raises(ConfigError) as refused:
        LogitsData(data, file).read(train_only=False)
    assert refused.value.issues[0].kind == "missing"


def test_the_tagger_is_that_of_the_extra_or_is_named() -> None:
    try:
        import HanTa  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError) as refused:
            load_tagger()
        (issue,) = refused.value.issues
        assert (issue.setting, issue.kind, issue.value) == ("--replace", "needs_package", "HanTa")
    else:
        tags = load_tagger()("a dog and the cat ran".split())
        assert len(tags) == 6
        assert tags[1] == tags[4]
        assert np.unique(tags).size > 2
