"""Test the build of shards from text: exact packing, any number of processes, interruption and refusals."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bert_dp import files as record
from bert_dp.config import BuildConfig, Config, Issue, read_manifest
from bert_dp.config.manifest import Split
from bert_dp.config.schema import MIN_BYTE_VOCAB_SIZE
from bert_dp.data import build as builder
from bert_dp.data import readers, shards, tokenizer
from bert_dp.data.build import Progress
from launcher.job import input_issues
from tests.e2e import cli
from tests.e2e.cli import open_to_others, umask
from tests.helpers import make_config, raised_issues
from tests.shards import edited_manifest, write_shards

LENGTH, VOCAB = 16, 300
PLAIN: dict[str, Any] = {"max_tokens_per_char": 0.0, "held_out_fraction": 0.1}
WORDS = [a + b for a in "ba ko mi re tu sal pon".split() for b in "la ner st ing um dy".split()]


def prose(num: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)

    def some(least: int, most: int) -> list[str]:
        return rng.choices(WORDS, k=rng.randint(least, most))

    return [f"{' '.join(some(3, 30)).capitalize()}. {i} {'. '.join(some(0, 5))}" for i in range(num)]


def write(path: Path, docs: list[str]) -> str:
    path.write_text("\n".join(docs) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "a.txt", prose(100))


@pytest.fixture
def out(source: str, tmp_path: Path) -> Path:
    """Build the shards of `source` and return their directory."""
    make(source, tmp_path / "out")
    return tmp_path / "out"


def config(*sources: str, vocab_size: int = VOCAB, **extra: Any) -> Config:
    data = {"sources": sources, "sequence_length": LENGTH, "build": PLAIN, **extra}
    return make_config(data=data, model={"vocab_size": vocab_size})


def make(
    source: str | list[str], out: Path, *, progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """Build shards and return the manifest. `options`: arguments of `builder.build` and settings."""
    request = {name: options.pop(name, default) for name, default in (("processes", 1), ("force", False))}
    vocab_size, tokenizer = options.pop("vocab_size", VOCAB), options.pop("tokenizer", None)
    sources = [source] if isinstance(source, str) else source
    requested = config(*sources, vocab_size=vocab_size, tokenizer=tokenizer, build={**PLAIN, **options})
    return builder.build(requested, out, progress=progress, **request).model_dump()


def refusal(source: str | list[str], out: Path, **options: Any) -> Issue:
    """Return the one issue of a build, which leaves nothing new behind."""
    before = sorted(out.parent.iterdir())
    (issue,) = raised_issues(make, source, out, **options)
    assert sorted(out.parent.iterdir()) == before
    return issue


def split(out: Path, name: str) -> np.ndarray:
    found: Split = getattr(read_manifest(out), name)
    parts = [np.fromfile(out / s.file, "<u2") for s in found.shards]
    return np.concatenate(parts).reshape(-1, LENGTH)


def recomputed(out: Path, docs: list[str], fraction: float) -> dict[str, list[int]]:
    """Recompute the token streams, one document at a time, with the saved tokenizer."""
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    tok.encode_special_tokens = True
    streams: dict[str, list[int]] = {"train": [], "held_out": []}
    seen = set()
    for doc in docs:
        key = readers.document_key(doc)
        ids = tok.encode(doc, add_special_tokens=False).ids
        if key in seen or not ids:
            continue
        seen.add(key)
        streams["held_out" if key < fraction * 2**64 else "train"] += [*ids, tok.token_to_id("<sep>")]
    return {name: ids[: len(ids) // LENGTH * LENGTH] for name, ids in streams.items()}


def test_packing_is_exact_and_every_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special token inside a text counts as text. Every shard is synced at its final size, and the manifest
    last, so that a power cut leaves no manifest with incomplete shards."""
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(shards, "SHARD_BYTES", LENGTH * 2 * 50)
    docs = [*prose(300), *(f"{doc} <mask> <pad> <cls> <s>" for doc in prose(50, seed=1))]
    manifest = make(write(tmp_path / "a.txt", docs), tmp_path / "out")
    files = [shard for name in ("train", "held_out") for shard in manifest[name]["shards"]]
    assert {(shard["file"], shard["bytes"]) for shard in files} <= set(synced[:-1])
    assert synced[-1][0].startswith(".manifest.json.")
    streams = recomputed(tmp_path / "out", docs, 0.1)
    for name, ids in streams.items():
        rows = split(tmp_path / "out", name)
        assert rows.ravel().tolist() == ids
        assert (manifest[name]["sequences"], manifest[name]["tokens"]) == (len(rows), rows.size)
    assert not {0, 1, 2, 4, 6} & {*streams["train"], *streams["held_out"]}
    assert manifest["train"]["documents"] + manifest["held_out"]["documents"] == len(docs)
    assert manifest["special_tokens"] == {"pad": 0, "unk": 3, "cls": 4, "sep": 5, "mask": 6}
    assert manifest["num_special"] == 7
    size, train = manifest["vocab_size"], streams["train"]
    nats = [-math.log((train.count(token) + 1) / (len(train) + size)) for token in streams["held_out"]]
    *whole, last = [shard["sequences"] for shard in manifest["train"]["shards"]]
    assert 0 < last <= 50 == min(whole)
    assert manifest["unigram_entropy_nats"] == pytest.approx(sum(nats) / len(nats), rel=1e-12)
    assert manifest["unigram_entropy_nats"] < manifest["uniform_entropy_nats"] == math.log(size)
    assert shards.verify(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe"])
def test_shards_do_not_depend_on_processes_batches_or_the_source_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The counts of each source do not depend on the batches either."""
    texts = [prose(400), prose(50), *(prose(9, seed=i) + russian(9)[i - 1 :: 3] for i in (1, 2, 3))]
    options = {"tokenizer_model": kind, "max_tokens_per_char": 0.5, "normalize": False}
    found = []
    for size, processes in ((37, 1), (31, 2), (1, 1)):
        monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", size)
        folder = tmp_path / f"{size}"
        folder.mkdir()
        files = [write(folder / f"{i}.txt", docs) for i, docs in enumerate(texts)]
        found.append(make(files, folder / "out", processes=processes, **options))
    assert found[0] == found[1] == found[2]
    assert str(tmp_path) not in json.dumps(found[0])
    assert found[0]["dropped"]["exact_duplicate"] == 50
    for name in ("tokenizer.json", "train-00000.bin", "held_out-00000.bin"):
        assert len({(tmp_path / f"{size}/out" / name).read_bytes() for size in (37, 31, 1)}) == 1
    letters = [sum(map(str.isalpha, "".join(docs))) for docs in texts]
    counts = [(source["letters"], source["documents"]) for source in found[0]["sources"]]
    assert counts == list(zip(letters, map(len, texts), strict=True))


def test_a_file_without_blank_lines_is_one_document_and_an_uneven_split_is_refused(tmp_path: Path) -> None:
    """The hash of the document puts it into a held-out set of 40 %, but not into one of 30 %."""
    whole, others = tmp_path / "whole.txt", tmp_path / "others.txt"
    whole.write_text("\n".join(prose(400, seed=6)))
    others.write_text("\n\n".join(prose(60)))
    alone, both = [str(whole)], [str(whole), str(others)]
    for fraction, sources in ((0.3, alone), (0.4, alone), (0.4, both)):
        issue = refusal(sources, tmp_path / "out", documents="blank_line", held_out_fraction=fraction)
        named = (issue.setting, issue.kind, issue.other)
        assert named == ("data.sources", "out_of_range", "data.build.held_out_fraction")
    for fraction, sources in ((0.05, both), (0.0, alone)):
        out = tmp_path / f"{fraction}"
        made = make(sources, out, documents="blank_line", held_out_fraction=fraction)
        assert made["train"]["sequences"]


def test_near_dedup_drops_the_later_document(tmp_path: Path) -> None:
    """The sketch of a document does not depend on the number of exact duplicates before the document."""
    pytest.importorskip("rensa")
    rng = random.Random(0)
    docs = [" ".join(rng.choices(WORDS, k=120)) for _ in range(60)]
    edited = [" ".join([*d.split()[:118], "other", "end"]) for d in docs[-20:]]
    source = write(tmp_path / "a.txt", [docs[0], *docs, *docs[:4], *edited])
    manifest = make(source, tmp_path / "near", dedup="near", held_out_fraction=0.2)
    assert manifest["dropped"]["exact_duplicate"] == 5
    assert manifest["dropped"]["near_duplicate"] == 20
    for name, ids in recomputed(tmp_path / "near", docs, 0.2).items():
        assert split(tmp_path / "near", name).ravel().tolist() == ids
    two = make(source, tmp_path / "two", dedup="near", held_out_fraction=0.2, processes=2)
    assert two["hash"] == manifest["hash"]
    assert make(source, tmp_path / "none", dedup="none")["dropped"]["exact_duplicate"] == 0
    half = [" ".join(WORDS[:25] + WORDS[i : i + 15]) for i in (25, 27)]  # 21 of 51 shingles are shared
    source = write(tmp_path / "b.txt", [*prose(60), *half])
    for threshold, dropped in ((0.2, 1), (0.9, 0)):
        made = make(source, tmp_path / f"{threshold}", dedup="near", near_threshold=threshold)
        assert made["dropped"]["near_duplicate"] == dropped


@pytest.mark.parametrize("when", ["read", "train tokenizer", "tokenize"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, when: str, gone: bool) -> None:
    """The manifest must describe the text that was read, so the refused build leaves no files."""
    source = Path(write(tmp_path / "a.txt", prose(100)))
    stages: list[str] = []

    def touch(stage: str, *_: object) -> None:
        if stage == when and stage not in stages:
            source.unlink() if gone else os.utime(source, ns=(0, 0))
        stages.append(stage)

    (issue,) = raised_issues(make, str(source), tmp_path / "out", progress=touch)
    assert when in stages
    expected = (str(source), "not_found") if gone else ("data.sources", "conflict")
    assert (issue.setting, issue.kind) == expected
    assert not list(tmp_path.glob("*out*"))


def test_filter_drops_by_tokens_per_character(tmp_path: Path) -> None:
    docs = prose(200)
    trash = [f"q {c} z j x v 1 2 3" for c in "abc"]
    source = write(tmp_path / "a.txt", [*docs, *trash, "日本語", "   ́  "])
    manifest = make(source, tmp_path / "out", max_tokens_per_char=0.5, held_out_fraction=0.2)
    tok = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    rates = [len(tok.encode(d, add_special_tokens=False).ids) / len(d) for d in [*docs, *trash]]
    too_many = sum(rate >= 0.5 for rate in rates)
    assert manifest["dropped"]["tokens_per_char"] == too_many
    assert 0 < too_many < len(docs)
    assert manifest["dropped"]["empty"] == 2


def test_python_normalisation_equals_the_tokenizers_for_every_character() -> None:
    """Test each character alone, between letters and doubled, with many characters per call for speed."""
    rust = tokenizer.normalizer()
    for start in range(0, 0x110000, 4096):
        chars = [chr(c) for c in range(start, start + 4096) if not 0xD800 <= c < 0xE000]
        text = "|".join(f"{c}|a{c}b|1{c}{c} {c}2" for c in chars)
        assert tokenizer.normalize(text) == rust.normalize_str(text), hex(start)


# White_Space of Unicode 15.1, PropList.txt
UNICODE_WHITE_SPACE = [
    *(*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        *((f"a{chr(code)}b", "a b") for code in UNICODE_WHITE_SPACE),
        *((f"the{chr(code)}world", "the-world") for code in (*range(0x2010, 0x2016), 0x2212, 0x207B, 0xFE58)),
        ("\u201cit\u2019s\u201d, \u201aso\u2018 \u00abhe\u00bb", '"it\'s", \'so\' "he"'),
        ("so\u2026 3\u00d74, 1\u20442, 1\u00bd cups, \u00be", "so... 3x4, 1/2, 1 1/2 cups, 3/4"),
        ("\ufb01ne o\ufb03ce \u00c6on \u0153uvre Stra\u00dfe", "fine office aeon oeuvre strasse"),
        ("zero\u200bwidth so\u00adft \ufeffmark jo\u200din", "zerowidth soft mark join"),
        ("na\u00efve CAF\u00c9 \u0130stanbul", "naive cafe istanbul"),
        ("``tex''  two\u00a0 \u00a0spaces", '"tex" two spaces'),
        ("5 \u20ac \u4e2d \u043c", "5 "),
        (
            "5\u00b13, 5\u20ac20 a\u2192b x\u20225 end\u3002so I\U0001f600love 5\u00b0C",
            "5 3, 5 20 a b x 5 end so i love 5 c",
        ),
        ("a\u2260b a\u226eb a\u226fb a\u2264b a\u2265b 3\u00f74", "a!=b a>=b a<=b a<=b a>=b 3/4"),
        ("10\u00b2 note\u2074 Name\u2122 Name\u00ae", "10 2 note 4 name tm name "),
        ("H\u2082O 1\u00ba col\u00b7lecci\u00f3 10\u00b5m rock\u00b4n", "h2o 1o colleccio 10m rock n"),
    ],
)
def test_normal_form_keeps_word_boundaries(text: str, normal: str) -> None:
    assert tokenizer.normalize(text) == tokenizer.normalizer().normalize_str(text) == normal


RUSSIAN = (
    "\u043c\u0438\u0440 \u0436\u0438\u0437\u043d\u044c \u0432\u0440\u0435\u043c\u044f \u0434\u043e\u043c"
)
BYTES: dict[str, Any] = {"tokenizer_model": "byte_bpe", "normalize": False, "vocab_size": 400}


def russian(num: int) -> list[str]:
    rng = random.Random(1)
    return [" ".join(rng.choices(RUSSIAN.split(), k=20)) + f" {i}." for i in range(num)]


@pytest.mark.parametrize(
    ("source_docs", "options", "refused"),
    [
        ([[f"{a} {b}" for a, b in zip(prose(100), russian(100), strict=True)]], {}, True),
        ([prose(900), russian(30)], {}, True),  # a small source among others
        ([[*prose(900), *russian(10)]], {}, False),
        ([russian(200)], {"normalize": False}, False),
        ([[f"{i} " + "\u4e2d\u6587\u8a9e" * (i % 7 + 2) for i in range(200)]], BYTES, False),
    ],
)
# a file that is left open raises this warning
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_source_that_loses_many_letters_is_refused(
    tmp_path: Path, source_docs: list[list[str]], options: dict[str, Any], refused: bool
) -> None:
    files = [write(tmp_path / f"{i}.txt", docs) for i, docs in enumerate(source_docs)]
    stages: list[str] = []
    options = {"vocab_size": VOCAB, **options, "progress": lambda stage, done, total: stages.append(stage)}
    if refused:
        issue = refusal(files, tmp_path / "out", **options)
        assert (issue.setting, issue.kind) == ("data.sources", "out_of_range")
        assert issue.message.startswith(f"{len(files) - 1}.txt: ")
        assert issue.value > 0.2
        assert "tokenizer_model=byte_bpe" in (issue.hint or "")
        return
    (counted,) = make(files, tmp_path / "out", **options)["sources"]
    letters = [c for c in "".join(source_docs[0]) if c.isalpha()]
    lost = sum(not c.isascii() for c in letters) if options.get("normalize", True) else 0
    assert (counted["letters"], counted["lost_letters"]) == (len(letters), lost)
    assert counted["unknown_tokens"] == 0
    assert any(line.startswith("warning: 0.txt") for line in stages) == (lost > 0.01 * len(letters))


def test_unknown_tokens_of_a_given_tokenizer_are_counted(tmp_path: Path) -> None:
    """The tokenizer knows only WORDS and the full stop."""
    path = bert_like(tmp_path / "t.json", SPECIALS)
    known = [" ".join(random.Random(i).choices(WORDS, k=20)) for i in range(100)]
    sources = {n: write(tmp_path / f"{n}.txt", [text + " foreign" * n for text in known]) for n in (0, 1, 6)}
    for n in (0, 1):
        (counted,) = make(sources[n], tmp_path / f"out{n}", tokenizer=path)["sources"]
        assert (counted["tokens"], counted["unknown_tokens"]) == (100 * (20 + n), 100 * n)
    issue = refusal(sources[6], tmp_path / "out", tokenizer=path)
    assert (issue.setting, issue.kind) == ("data.sources", "out_of_range")
    assert "data.tokenizer" in (issue.hint or "")


@pytest.mark.parametrize("normalize", [True, False])
def test_letters_in_unknown_tokens_count_as_lost(tmp_path: Path, normalize: bool) -> None:
    """WordPiece replaces a word of more than 100 characters by a single unknown token."""
    word = "caf\u00e9\u0142" * 30  # the normaliser drops the Polish l with a stroke
    docs = [" ".join(random.Random(i).choices(WORDS, k=300)) + f" {i}" for i in range(40)]
    docs[0] += " " + word
    (counted,) = make(write(tmp_path / "a.txt", docs), tmp_path / "out", normalize=normalize)["sources"]
    letters = sum(map(str.isalpha, "".join(docs)))
    assert counted["unknown_tokens"] == 1
    assert (counted["letters"], counted["lost_letters"]) == (letters, len(word))
    docs = [f"{doc} {word * 9}" for doc in docs]  # 0.3 % of the tokens, over 20 % of the letters
    issue = refusal(write(tmp_path / "b.txt", docs), tmp_path / "refused", normalize=normalize)
    assert (issue.setting, issue.kind) == ("data.sources", "out_of_range")


def test_documents_with_the_same_tokens_are_duplicates(tmp_path: Path) -> None:
    """Documents that differ only in dropped or unknown signs are duplicates; case matters if it is kept."""
    docs = [f"{text} {sign}{i}" for i, text in enumerate(prose(60)) for sign in "\u20ac\u00a3\u00a5"]
    source = write(tmp_path / "a.txt", docs)
    assert make(source, tmp_path / "a")["dropped"]["exact_duplicate"] == 120
    assert make(source, tmp_path / "b", **BYTES)["dropped"]["exact_duplicate"] == 0
    cased = write(tmp_path / "c.txt", [*prose(60), *(text.upper() for text in prose(60))])
    assert make(cased, tmp_path / "d")["dropped"]["exact_duplicate"] == 60
    assert make(cased, tmp_path / "e", normalize=False)["dropped"]["exact_duplicate"] == 0


def test_byte_level_bpe_keeps_every_text_and_no_vocabulary_is_larger_than_requested() -> None:
    docs = [*prose(100), *russian(100), "\u4e2d\u6587\u8a9e\U0001f600 a  b\t"]
    trained = tokenizer.train(docs, model="byte_bpe", vocab_size=400, with_normalizer=False)
    assert tokenizer.size(trained) == 400
    assert [trained.decode(trained.encode(text).ids) for text in docs] == docs
    only_bytes = tokenizer.train(docs, model="byte_bpe", vocab_size=263, with_normalizer=False)
    assert tokenizer.size(only_bytes) == MIN_BYTE_VOCAB_SIZE
    assert len(only_bytes.encode("\u4e2d", add_special_tokens=False).ids) == 3
    for requested, least, most in ((30_000, 50, 2000), (16, 10, 16)):
        trained = tokenizer.train(prose(60), model="wordpiece", vocab_size=requested, with_normalizer=True)
        assert least < tokenizer.size(trained) == trained.get_vocab_size() <= most


def bert_like(path: Path, specials: list[str], extra: int = 0) -> str:
    vocab = {t: i for i, t in enumerate([*specials, *WORDS, ".", *(f"x{i}" for i in range(extra))])}
    tok = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.enable_truncation(4)
    tok.enable_padding()
    tok.save(str(path))
    return str(path)


def test_a_given_tokenizer_is_used_for_the_build(tmp_path: Path) -> None:
    docs = prose(300)
    source = write(tmp_path / "a.txt", docs)
    specials = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = bert_like(tmp_path / "t.json", specials)
    manifest = make(source, tmp_path / "out", tokenizer=path)
    assert manifest["special_tokens"] == {"pad": 0, "unk": 2, "cls": 3, "sep": 4, "mask": 5}
    assert manifest["num_special"] == 6
    assert manifest["tokenizer"]["sha256"] == readers.file_hash(Path(path))
    rows = split(tmp_path / "out", "train")
    assert (rows == 4).sum() == pytest.approx(manifest["train"]["documents"], abs=5)
    assert not (rows == 0).any()


SPECIALS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def test_settings_that_a_build_cannot_use_are_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    few, many, most = (
        bert_like(tmp_path / f"{i}.json", *given)
        for i, given in enumerate([(SPECIALS[:-1],), (SPECIALS, 500), (SPECIALS, 70_000)])
    )
    for setting, kind, options in (
        ("data.tokenizer", "missing", {"tokenizer": few}),
        ("model.vocab_size", "conflict", {"tokenizer": many}),
        ("data.tokenizer", "out_of_range", {"tokenizer": most}),
        ("data.build.dedup", "needs_package", {"dedup": "near"}),
        ("data.sources", "out_of_range", {"held_out_fraction": 1e-6}),  # too little text
    ):
        issue = refusal(source, tmp_path / "no", **options)
        assert (issue.setting, issue.kind) == (setting, kind)


def test_special_tokens_of_other_libraries_and_the_first_ordinary_token_are_found() -> None:
    """RoBERTa frames texts with <s> and </s>. If a tokenizer has both spellings, <cls> and <sep> are used.
    Ordinary tokens follow the special tokens in the lower half of the ids; ModernBERT has most at the end."""
    roberta = {t: i for i, t in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>"])}
    found = tokenizer.special_ids(Tokenizer(models.WordPiece(roberta, unk_token="<unk>")), "it")
    assert found == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 5}
    ours = tokenizer.train(["a b"], model="wordpiece", vocab_size=40, with_normalizer=True)
    assert tokenizer.special_ids(ours, "it") == {"pad": 0, "unk": 3, "cls": 4, "sep": 5, "mask": 6}
    for specials, expected in (([0, 1, 2, 3, 4], 5), ([90, 91, 92, 0, 7], 8), ([95, 96, 97, 98, 99], 0)):
        names = dict(zip(specials, SPECIALS, strict=True))
        vocabulary = {names.get(i, f"w{i}"): i for i in range(100)}
        tok = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        assert tokenizer.first_ordinary(tok, tokenizer.special_ids(tok, "it")) == expected


def test_the_documents_and_characters_of_a_batch_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(tokenizer, "BATCH_CHARS", 10)
    documents = ["a" * size for size in (1, 1, 1, 6, 4, 30, 9, 1, 1, 1)]
    sizes = [list(map(len, batch)) for batch in tokenizer.in_batches(documents)]
    assert sizes == [[1, 1, 1], [6, 4], [30], [9, 1], [1, 1]]


def test_a_build_from_the_hub_is_reused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def rows(name: str, split: str) -> Any:
        read.append(name)
        yield from ((f"row {i}", {"text": text}) for i, text in enumerate([*prose(60), " "]))

    monkeypatch.setattr(readers, "hub_records", rows)
    manifest = make("hub:org/\u00fc", tmp_path / "out")
    assert [(s["name"], s["documents"]) for s in manifest["sources"]] == [("hub:org/\u00fc", 60)]
    read.clear()
    assert make("hub:org/\u00fc", tmp_path / "out") == manifest
    assert read == []
    assert refusal("hub:org/other", tmp_path / "out").other == "--force"


def test_existing_output_is_kept_refused_or_replaced(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build also finds damage that the start of a run, which reads only a sample, would miss."""
    monkeypatch.setattr(shards, "SAMPLED_BYTES", 0)
    out = tmp_path / "out put ü"
    first = make(source, out)
    before = (out / "manifest.json").stat().st_mtime_ns
    assert make(source, out) == first
    assert (out / "manifest.json").stat().st_mtime_ns == before
    issue = refusal(source, out, dedup="none")
    assert (issue.setting, issue.kind, issue.value, issue.other) == ("--out", "exists", str(out), "--force")
    assert refusal([source, write(tmp_path / "b.txt", prose(9))], out) == issue
    good = (out / "train-00000.bin").read_bytes()
    (out / "train-00000.bin").write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert refusal(source, out) == issue
    assert make(source, out, force=True) == first
    assert (out / "train-00000.bin").read_bytes() == good
    write(tmp_path / "a.txt", prose(100, seed=1))
    assert refusal(source, out) == issue
    assert make(source, out, force=True)["hash"] != first["hash"]
    (out / "train.bin").write_text("mine")
    issue = refusal(source, out, dedup="none", force=True)
    assert (issue.setting, issue.kind, issue.other) == ("--out", "exists", None)


def test_an_earlier_build_is_restored_if_its_replacement_fails(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = (out / "manifest.json").read_bytes(), Path.rename

    def stopped(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith("-old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), builder.replaced(out):
        pass
    assert (out / "manifest.json").read_bytes() == before
    assert [path.name for path in out.parent.glob("*out*")] == ["out"]


def test_a_build_inside_its_source_directory_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    write(folder / "a.txt", prose(100))
    first = make(str(folder), folder / "shards")
    assert make(str(folder), folder / "shards") == first
    assert make(str(folder), folder / "shards", force=True, dedup="none")["sources"] == first["sources"]
    assert refusal(str(folder), folder).kind == "exists"


def test_damaged_or_mismatching_shards_are_refused(out: Path) -> None:
    (issue,) = raised_issues(builder.ensure, config("", path=str(out), sources=None, sequence_length=32))
    assert (issue.setting, issue.kind, issue.other) == ("data.sequence_length", "conflict", "data.path")
    file = out / "train-00000.bin"
    data = file.read_bytes()[:-2] + b"\xff\xff"
    file.write_bytes(data)
    problems = shards.check_sample(out, read_manifest(out))
    actual = hashlib.sha256(data).hexdigest()
    assert [(i.setting, i.value) for i in problems] == [(str(file), actual), (str(file), 65535)]
    assert shards.verify(out) == problems
    file.write_bytes(data[:-2])
    issues = raised_issues(read_manifest, out)
    assert [(i.setting, i.kind, i.value) for i in issues] == [(str(file), "damaged", len(data) - 2)]
    assert shards.verify(out) == list(issues)


def test_a_start_verifies_all_of_a_small_corpus_and_a_sample_of_a_large_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", LENGTH * 2 * 10)
    out = tmp_path / "out"
    make(source, out)
    manifest = read_manifest(out)
    for shard in manifest.shards:
        (out / shard.file).write_bytes(bytes(shard.bytes))

    def found() -> frozenset[str]:
        return frozenset(issue.setting for issue in shards.check_sample(out, manifest))

    assert found() == {str(out / shard.file) for shard in manifest.shards}
    monkeypatch.setattr(shards, "SAMPLED_BYTES", LENGTH * 2 * 10 + 1)
    starts = [found() for _ in range(30)]
    assert {*map(len, starts)} <= {2, 3}  # the last file of a split may be small
    assert len(set(starts)) > 1


def test_ensure_builds_once_per_source_text_and_refuses_a_cache_that_others_may_write_to(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    assert builder.find(config(source)) is None
    first = builder.ensure(config(source))
    assert builder.find(config(source)) == first == builder.cache_dir(config(source))
    stamp = (first / "manifest.json").stat().st_mtime_ns
    assert builder.ensure(config(source)) == first
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    good = (first / "train-00000.bin").read_bytes()
    for damaged in (b"", bytes(len(good))):
        (first / "train-00000.bin").write_bytes(damaged)
        assert builder.find(config(source)) == (first if damaged else None)
        assert shards.verify(builder.ensure(config(source))) == []  # rebuilt
    write(tmp_path / "a.txt", prose(101))
    assert builder.ensure(config(source)) != first
    (tmp_path / "cache").chmod(0o777)  # other users may write to the cache
    (issue,) = raised_issues(builder.ensure, config(source))
    assert (issue.setting, issue.kind) == ("BERT_DP_CACHE", "unsupported")
    assert input_issues(config(source)) == [issue]
    (tmp_path / "cache").chmod(0o755)
    assert record.cache_issues() == []
    if os.getuid() == 0:  # only root can give a directory away
        os.chown(tmp_path / "cache", 12_345, -1)
        assert len(record.cache_issues()) == 1


def test_the_cache_directory_depends_on_every_input_of_the_shards(tmp_path: Path) -> None:
    source, other, given = (write(tmp_path / name, ["text"]) for name in ("a.txt", "b.txt", "t.json"))
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"sequence_length": 2 * LENGTH},
        {"sources": [other]},
        {"build": {**PLAIN, "held_out_fraction": 0.4}},
        {"tokenizer": given},
    )
    directories = {builder.cache_dir(config(source, **change)) for change in changes}
    larger = config(source).model.model_copy(update={"vocab_size": 2 * VOCAB})
    directories.add(builder.cache_dir(config(source).model_copy(update={"model": larger})))
    write(Path(given), ["another"])
    directories.add(builder.cache_dir(config(source, tokenizer=given)))
    assert len(directories) == len(changes) + 2


def test_concurrent_processes_build_the_corpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "a.txt", prose(3000))
    (tmp_path / "c.yaml").write_text(config(source).model_dump_json())
    command = [sys.executable, "-m", "bert_dp.data.build", "ensure", str(tmp_path / "c.yaml")]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with umask(0):
        both = [subprocess.Popen(command, **piped) for _ in range(2)]
    answers = [p.communicate(timeout=60) for p in both]
    assert [p.returncode for p in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert shards.verify(Path(answers[0][0].strip())) == []
    assert sum("tokenize" in err for _, err in answers) == 1
    assert open_to_others(tmp_path / "cache") == []


def test_a_build_in_a_named_directory_has_the_file_modes_of_the_users_umask(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", prose(100))
    with umask(0o027):
        assert build(tmp_path).wait(60) == 0
    out = tmp_path / "out"
    assert out.stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {0o640}


def build(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    sizes = ["--sequence-length", str(LENGTH), "--vocab-size", str(VOCAB), "data.build.max_tokens_per_char=0"]
    return cli.start(
        "data", "build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *sizes, *options
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing_and_can_restart(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "a.txt", prose(40_000))
    # because a shell's background job ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = build(tmp_path, "--processes", "2")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    while "tokenize" not in process.stderr.readline():
        assert process.poll() is None
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    was_killed = number == signal.SIGKILL
    left = sorted(path.name.partition("-")[0] for path in tmp_path.glob(".out.*"))
    assert left == ([".out.building", ".out.lock"] if was_killed else [])
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):  # no orphan outlives the build
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if was_killed:
        again = build(tmp_path, "--processes", "2")
        err = again.communicate(timeout=60)[1]
        assert again.returncode == 0, err
        assert shards.verify(tmp_path / "out") == []
        assert not list(tmp_path.glob(".out.*"))


def test_a_filter_that_drops_more_than_1_percent_names_its_setting_and_limit(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "s", train=380, held_out=5, vocab_size=4096)
    with edited_manifest(directory) as edited:
        edited["dropped"] = {"empty": 4, "tokens_per_char": 5, "exact_duplicate": 6, "near_duplicate": 0}
    few, many = builder.filter_warnings(read_manifest(directory))
    assert few.startswith("5 of 400 documents (1.2%)")
    assert "0.335 or more" in few
    assert "data.build.max_tokens_per_char" in few
    assert "data.build.dedup" in many
    sizes = (4096, 8192, 16384, 32768, 65535)
    limits = [tokenizer.max_tokens_per_char(BuildConfig(), size) for size in sizes]
    assert limits == pytest.approx([0.3352, 0.2992, 0.2708, 0.25, 0.2368], abs=1e-4)
    assert tokenizer.max_tokens_per_char(BuildConfig(max_tokens_per_char=0.0), 4096) == 0
