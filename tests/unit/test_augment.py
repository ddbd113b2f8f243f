"""The text operations of a transfer set, and what is read of a file with a teacher's logits."""

import dataclasses
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bert_dp.data import tokenizer
from bert_dp.examples import augment
from bert_dp.examples.augment import HOLE, HOLE_ID, MASK, AugmentedData, LogitsData, copy_of
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.examples.table import Columns, CustomData, answers
from tests.helpers import raised_issues, write_lines

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


@pytest.mark.parametrize(
    ("text", "numbers", "expected"),
    [
        (TEXT, [KEEP] * 6 + [WHOLE], TEXT),
        (TEXT, [KEEP, 0.0999, *[KEEP] * 4, WHOLE], f"a {MASK} film with no plot"),
        (TEXT, [0.1, *[KEEP] * 4, 0.1999, WHOLE], "A fine film with no PLOT"),
        (TEXT, [*[KEEP] * 6, 0.2499, 0.0, 0.0], "a"),
        (TEXT, [*[KEEP] * 6, 0.0, 0.99, 0.99], "fine film with no plot"),
        (TEXT, [0.0, 0.15, *[KEEP] * 4, 0.1, 0.5, 0.0], f"{MASK} FINE film"),
        ("one two", [KEEP, KEEP, 0.0, 0.99, 0.99], "one two"),
    ],
)
def test_golden_examples(text: str, numbers: list[float], expected: str) -> None:
    assert augment.changed(text, upper, Scripted(*numbers)) == expected


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
            kept.update(found)
    whole = lengths.pop(words)
    longest = augment.LONGEST_CUT
    assert within_3_sigma(texts - whole, texts, augment.CUT_RATE)
    assert sorted(lengths) == list(range(1, longest + 1))
    assert all(within_3_sigma(n, texts, augment.CUT_RATE / longest) for n in lengths.values())
    assert within_3_sigma(kept[MASK], whole * words, augment.MASK_RATE)
    assert within_3_sigma(kept[HOLE], whole * words, augment.REPLACE_RATE)


def test_a_word_is_replaced_by_those_of_its_tag_by_their_frequency() -> None:
    texts = ["dog dog cat Run", "dog Run Walk"]
    replace = augment.SameTagWords(texts, lambda words: [str(word[0].isupper()) for word in words])
    draw = Random(0)
    nouns, verbs = (Counter(replace(text, 2, draw) for _ in range(10_000)) for text in texts)
    assert (nouns.keys(), verbs.keys()) == ({"dog", "cat"}, {"Run", "Walk"})
    assert within_3_sigma(nouns["dog"], 10_000, 3 / 4)
    assert within_3_sigma(verbs["Run"], 10_000, 2 / 3)


def test_a_copy_follows_from_seed_example_and_copy() -> None:
    first, again, other = (
        [copy_of((TEXT,), upper, seed=seed, example=e, copy=c) for e in range(9) for c in range(9)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert len(set(first)) > 20
    assert first != other


def test_each_text_of_a_pair_changes_and_then_both() -> None:
    pair = (TEXT, "it was all over by then")
    for copy, changing in enumerate([{0}, {1}, {0, 1}] * 2):
        copies = [copy_of(pair, upper, seed=0, example=e, copy=copy) for e in range(30)]
        for side in (0, 1):
            texts = {each[side] for each in copies}
            assert len(texts) > 5 if side in changing else texts == {pair[side]}


def custom(folder: Path, *rows: str, header: str = "text,label") -> CustomData:
    names = {name: str(folder / f"{name}.csv") for name in ("train", "dev")}
    for path in names.values():
        Path(path).write_text("\n".join([header, *rows]) + "\n")
    return CustomData(names, Columns(("text",), "label"), None, finds_pair=True)


def test_copies_stand_behind_the_examples_without_duplicates(tmp_path: Path) -> None:
    data = custom(tmp_path, f"{TEXT},good", "bad,bad", "so bad,bad")
    fewer, more = (AugmentedData(data, 3, copies, "none") for copies in (20, 21))
    table = fewer.read(train_only=False).tables["train"]
    texts = [row.texts for row in table.rows]
    assert texts[:3] == [(TEXT,), ("bad",), ("so bad",)]
    assert len(set(texts)) == len(texts) == 3 + table.copies
    assert table.copies > 10
    assert {row.texts for row in more.read(train_only=False).tables["train"].rows} >= set(texts)
    assert more.identity() != fewer.identity()


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


def test_a_file_of_logits_takes_the_place_of_train(tmp_path: Path) -> None:
    file = tmp_path / "l.jsonl"
    write_lines(file, [{"text": "x y", "logits": [1, -2.5]}, {"text": "z", "logits": [0, 1]}])
    labelled = LogitsData(custom(tmp_path, "one,good", "two,bad"), str(file)).read(train_only=False)
    assert [row.texts for row in labelled.tables["train"].rows] == [("x y",), ("z",)]
    assert labelled.logits is not None
    assert labelled.logits.tolist() == [[1, -2.5], [0, 1]]
    assert answers(labelled.logits, "single_label").tolist() == [0, 1]
    assert answers(labelled.logits, "multi_label").tolist() == [[1, 0], [0, 1]]
    assert answers(labelled.logits[:, :1], "regression").tolist() == [1, 0]


SINGLE = (("one,good", "two,bad"), "text,label")
PAIRS = (("one,two,good", "three,four,bad"), "text,text_pair,label")


@pytest.mark.parametrize(
    ("record", "kind", "data"),
    [
        ({"text": "x"}, "damaged", SINGLE),
        ({"text": "x", "logits": 3}, "damaged", SINGLE),
        ({"text": "x", "logits": [math.nan, 1]}, "damaged", SINGLE),
        ({"text": "x", "logits": [1, 2, 3]}, "conflict", SINGLE),
        ({"logits": [1, 2]}, "missing", SINGLE),
        ({"text": "x", "text_pair": "y", "logits": [1, 2]}, "conflict", SINGLE),
        ({"text": "x", "logits": [1, 2]}, "missing", PAIRS),
    ],
    ids=str,
)
def test_bad_logits_are_refused(record: dict[str, Any], kind: str, data: Any, tmp_path: Path) -> None:
    file, (rows, header) = tmp_path / "l.jsonl", data
    write_lines(file, [record])
    read = LogitsData(custom(tmp_path, *rows, header=header), str(file)).read
    (issue,) = raised_issues(read, train_only=False)
    assert (issue.setting, issue.kind) == (str(file), kind)


def test_the_tagger_is_that_of_the_extra_or_is_named() -> None:
    if find_spec("HanTa") is None:
        (issue,) = raised_issues(augment.load_tagger)
        assert (issue.setting, issue.kind, issue.value) == ("--replace", "needs_package", "HanTa")
    else:
        tags = augment.load_tagger()("a dog and the cat ran".split())
        assert len(tags) == 6
        assert tags[1] == tags[4]
        assert len(set(tags)) > 2
