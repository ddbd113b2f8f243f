"""Labelled texts to ids: GLUE's files and own ones, labels, truncation, what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import re
import signal
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bert_dp.config import ConfigError
from bert_dp.config.examples import ExamplesManifest, read_examples
from bert_dp.config.manifest import manifest_hash
from bert_dp.corpus import readers
from bert_dp.corpus import tokenizer as tokens
from bert_dp.examples import Examples, archive, encode, glue, own
from bert_dp.examples.encode import truncate
from bert_dp.examples.prepare import main, summary
from bert_dp.examples.store import LABEL_TYPES
from bert_dp.examples.table import Columns, Labelled
from tests.e2e.cli import open_to_others, umask
from tests.example_files import write_examples
from tests.helpers import make_config, read_json

WORDS = "the cat dog sat ran on under a mat bed and who did it"
RTE_HEADER = "index\tsentence1\tsentence2\tlabel"
RTE = {
    "train": ["0\tthe cat sat\ta cat\tentailment", "1\tthe dog ran\ta cat\tnot_entailment"],
    "dev": ["0\ta dog\tthe dog ran\tnot_entailment", "1\tThe  CAT sat\ta cat\tentailment"],
}


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process, whose command line `main` is


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokens.train([WORDS] * 9, model="wordpiece", vocab_size=200, with_normalizer=True).save(str(path))
    return path


class Lab:
    """Files in one folder, and what preparing them gives."""

    def __init__(self, folder: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.tokenizer, self.capsys = folder, tokenizer, capsys
        self.err = ""

    def write(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def write_glue(self, folder: str, task: str, header: str | None = None, **splits: list[str]) -> str:
        """TASK/SPLIT.tsv below `folder`; returns the folder."""
        for split, rows in splits.items():
            lines = [*([header] if header else []), *rows]
            self.write(f"{folder}/{task}/{split}.tsv", "\n".join(lines) + "\n")
        return str(self.folder / folder)

    def run(self, *arguments: str, length: int = 16) -> tuple[int, str]:
        """(exit code, stdout); stderr is kept in `err`."""
        options = ["--tokenizer", str(self.tokenizer), "--length", str(length)]
        code = main(["prepare", *options, *arguments])
        out, self.err = self.capsys.readouterr()
        return code, out

    def prepare(self, *arguments: str, length: int = 16) -> tuple[Path, ExamplesManifest]:
        code, out = self.run(*arguments, length=length)
        assert code == 0, self.err
        directory = Path(out.strip())
        return directory, read_examples(directory)

    def glue(self, task: str, header: str | None, **splits: list[str]) -> tuple[Path, ExamplesManifest]:
        """These rows, prepared."""
        return self.prepare("--task", task, "--data", self.write_glue("glue", task, header, **splits))

    def own(self, rows: dict[str, str], *arguments: str, suffix: str = "csv") -> dict[str, Examples]:
        """The splits that files of these texts give."""
        named = []
        for split, text in rows.items():
            named += [f"--{split}", self.write(f"{split}.{suffix}", text)]
        directory, manifest = self.prepare(*named, *arguments)
        return {split: Examples.open(directory, manifest, split) for split in manifest.splits}

    def refusal(self, *arguments: str, length: int = 16) -> str:
        """The one line on stderr of a bad input."""
        code, out = self.run(*arguments, length=length)
        assert (code, out) == (2, "")
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert not list((self.folder / "cache").glob("examples-*"))
        return self.err

    def words(self, examples: Examples, index: int) -> str:
        known = Tokenizer.from_file(str(self.tokenizer))
        return " ".join(str(known.id_to_token(int(i))) for i in examples.tokens(index))


@pytest.fixture
def lab(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(tmp_path, tokenizer_file, capsys)


# --- GLUE


def test_a_pair_is_framed_and_its_label_is_the_index_of_its_name(lab: Lab) -> None:
    directory, manifest = lab.glue("RTE", RTE_HEADER, **RTE)
    train = Examples.open(directory, manifest, "train")
    assert manifest.labels == ["entailment", "not_entailment"]
    assert (manifest.kind, manifest.metrics) == ("single_label", ["accuracy"])
    assert lab.words(train, 0) == "<cls> the cat sat <sep> a cat <sep>"
    assert lab.words(train, 1) == "<cls> the dog ran <sep> a cat <sep>"
    assert train.labels is not None
    assert train.labels.tolist() == [0, 1]
    assert (train.labels.dtype, train.ids.dtype, train.lengths.tolist()) == (np.int64, np.uint16, [8, 8])
    assert (len(train), manifest.splits["train"].tokens, manifest.splits["train"].truncated) == (2, 16, 0)
    special = manifest.special_tokens
    known = Tokenizer.from_file(str(directory / manifest.tokenizer.file))
    assert [known.token_to_id(name) for name in ("<pad>", "<cls>", "<sep>")] == [
        special.pad,
        special.cls,
        special.sep,
    ]
    assert manifest.vocab_size == known.get_vocab_size()
    assert (
        train.tokens(0).tolist() == known.encode("the cat sat", "a cat").ids
    )  # by the tokenizer's own template


ANY_OF_GLUE = {
    # header of its files, rows of train and dev, words of the first example, labels; kind, names, metrics
    "MRPC": (  # a quote is a character, a byte order mark is none
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        ['1\t1\t2\t" the cat\tit', '0\t3\t4\tthe "dog\ta "mat" and'],
        "<cls> <unk> the cat <sep> it <sep>",
        [1, 0],
        ("single_label", ["0", "1"], ["accuracy", "f1"]),
    ),
    "CoLA": (  # without a header in train and dev
        None,
        ["gj04\t1\t\tthe cat sat", "gj04\t0\t*\tcat the on"],
        "<cls> the cat sat <sep>",
        [1, 0],
        ("single_label", ["0", "1"], ["mcc"]),
    ),
    "STS-B": (
        "index\tsentence1\tsentence2\tscore",
        ["0\tthe cat\ta cat\t4.750", "1\tthe dog\ta mat\t0.000"],
        "<cls> the cat <sep> a cat <sep>",
        [4.75, 0.0],
        ("regression", [], ["pearson", "spearman"]),
    ),
    "MNLI": (  # two dev splits
        "index\tsentence1\tsentence2\tlabel1\tgold_label",
        [f"0\tthe cat\ta cat\tneutral\t{name}" for name in ("contradiction", "entailment")],
        "<cls> the cat <sep> a cat <sep>",
        [2, 0],
        ("single_label", ["entailment", "neutral", "contradiction"], ["accuracy"]),
    ),
}


@pytest.mark.parametrize("task", ANY_OF_GLUE)
def test_each_task_is_read_as_glue_writes_it(lab: Lab, task: str) -> None:
    header, rows, words, labels, meaning = ANY_OF_GLUE[task]
    dev = ["dev_matched", "dev_mismatched"] if task == "MNLI" else ["dev"]
    directory, manifest = lab.glue(task, header, **dict.fromkeys(("train", *dev), rows))
    assert (manifest.kind, manifest.labels, manifest.metrics) == meaning
    assert {name: split.examples for name, split in manifest.splits.items()} == dict.fromkeys(
        ("train", *dev), 2
    )
    for split in manifest.splits:
        examples = Examples.open(directory, manifest, split)
        assert lab.words(examples, 0) == words
        assert examples.labels is not None
        assert (examples.labels.tolist(), examples.labels.dtype) == (labels, LABEL_TYPES[manifest.kind])


def test_cola_has_a_header_in_its_test_which_has_no_labels(lab: Lab) -> None:
    rows = ANY_OF_GLUE["CoLA"][1]
    lab.write_glue("glue", "CoLA", "index\tsentence", test=["0\tthe dog ran"])
    directory, manifest = lab.glue("CoLA", None, train=rows, dev=rows)
    test = Examples.open(directory, manifest, "test")
    assert (lab.words(test, 0), test.labels) == ("<cls> the dog ran <sep>", None)
    assert manifest.splits["test"].has_labels is False


def test_row_counts_decide_whether_it_is_glue(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    data = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    manifest = lab.prepare("--task", "RTE", "--data", data)[1]
    assert (manifest.official, manifest.rows) == (False, {"train": 2490, "dev": 277, "test": 3000})
    assert "train 2 of GLUE's 2,490 examples" in lab.err
    assert "a subset, no GLUE score" in lab.err
    small = dataclasses.replace(glue.TASKS["RTE"], rows={"train": 2, "dev": 2})
    monkeypatch.setitem(glue.TASKS, "RTE", small)
    whole = lab.prepare("--task", "RTE", "--data", data, length=17)[1]
    assert (whole.official, "GLUE's own numbers of rows" in summary(whole)) == (True, True)
    other = dataclasses.replace(small, rows={"train": 3, "dev": 2}, also={"train": 2})
    monkeypatch.setitem(glue.TASKS, "RTE", other)
    assert lab.prepare("--task", "RTE", "--data", data, length=18)[1].official is True
    monkeypatch.setitem(glue.TASKS, "RTE", small)
    fewer = lab.write_glue("h", "RTE", RTE_HEADER, train=RTE["train"], dev=RTE["dev"][:1])
    assert lab.prepare("--task", "RTE", "--data", fewer)[1].official is False


def test_glue_has_its_published_numbers_of_rows() -> None:
    """https://huggingface.co/datasets/nyu-mll/glue, whose test set of CoLA and others is GLUE's own."""
    assert {name: tuple(task.rows.values()) for name, task in glue.TASKS.items()} == {
        "CoLA": (8551, 1043, 1063),
        "SST-2": (67349, 872, 1821),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
        "QQP": (363846, 40430, 390965),
        "MNLI": (392702, 9815, 9832, 9796, 9847),
        "QNLI": (104743, 5463, 5463),
        "RTE": (2490, 277, 3000),
        "WNLI": (635, 71, 146),
    }
    also = {name: dict(task.also) for name, task in glue.TASKS.items() if task.also}
    assert also == {"QQP": {"train": 363849}}  # with the rows that line ends cut in pieces


QQP_HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
QQP_BROKEN = ["1\t2\t3\twho sat on", "\ta mat\t0"]  # as in the published train.tsv: a line end in a question
QQP_WHOLE = ["0\t1\t2\twho sat\twho ran\t0", "2\t3\t4\twho did it\tthe cat\t1"]


def test_broken_rows_are_left_out_of_train_and_counted(lab: Lab) -> None:
    data = lab.write_glue("g", "QQP", QQP_HEADER, train=[*QQP_WHOLE, *QQP_BROKEN], dev=QQP_WHOLE)
    manifest = lab.prepare("--task", "QQP", "--data", data)[1]
    assert (manifest.splits["train"].examples, manifest.splits["train"].left_out) == (2, 2)
    assert "2 broken rows left out" in lab.err


def test_an_example_of_glue_with_an_empty_text_is_kept(lab: Lab) -> None:
    rows = [*QQP_WHOLE, "3\t5\t6\twho did it\t\t0"]
    directory, manifest = lab.glue("QQP", QQP_HEADER, train=rows, dev=rows)
    dev = Examples.open(directory, manifest, "dev")
    assert (len(dev), lab.words(dev, 2)) == (3, "<cls> who did it <sep> <sep>")
    assert manifest.splits["dev"].without_tokens == 1


def test_a_broken_row_of_dev_is_refused(lab: Lab) -> None:
    data = lab.write_glue("g", "QQP", QQP_HEADER, train=QQP_WHOLE, dev=[*QQP_WHOLE, *QQP_BROKEN])
    assert "QQP/dev.tsv: line 4 has fewer fields than the header" in lab.refusal(
        "--task", "QQP", "--data", data
    )


def pack(folder: str, tar: Path) -> str:
    """The folder as a tar, below a top folder."""
    with tarfile.open(tar, "w:xz") as packed:
        packed.add(folder, "top")
    return str(tar)


def test_a_tar_gives_what_the_folder_gives_and_is_not_unpacked(lab: Lab) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    tar = pack(folder, lab.folder / "glue.tar.xz")
    before = {path for path in lab.folder.rglob("*") if "cache" not in path.parts}
    one, two = (lab.prepare("--task", "RTE", "--data", data) for data in (folder, tar))
    assert one[0] != two[0]
    assert one[1] == two[1]
    assert {source.name for source in one[1].sources} == {"RTE/train.tsv", "RTE/dev.tsv"}
    assert {path for path in lab.folder.rglob("*") if "cache" not in path.parts} == before


def test_a_file_is_taken_from_the_first_place_that_has_it(lab: Lab) -> None:
    first = lab.write_glue("a", "RTE", RTE_HEADER, dev=RTE["dev"][:1])
    second = pack(lab.write_glue("b", "RTE", RTE_HEADER, **RTE), lab.folder / "b.tar")
    manifest = lab.prepare("--task", "RTE", "--data", first, "--data", second)[1]
    assert {name: split.examples for name, split in manifest.splits.items()} == {"train": 2, "dev": 1}


def test_a_link_in_a_tar_is_not_followed(lab: Lab) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, train=RTE["train"])
    tar = lab.folder / "glue.tar"
    with tarfile.open(tar, "w") as packed:
        packed.add(folder, "top")
        link = tarfile.TarInfo("top/RTE/dev.tsv")
        link.type, link.linkname = tarfile.SYMTYPE, f"{folder}/RTE/train.tsv"
        packed.addfile(link)
    assert "no RTE/dev.tsv in" in lab.refusal("--task", "RTE", "--data", str(tar))


def test_a_file_of_a_tar_has_a_largest_size(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    tar = pack(folder, lab.folder / "glue.tar")
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 50)
    assert f"{folder}/RTE/train.tsv: cannot be read (larger than" in lab.refusal(
        "--task", "RTE", "--data", folder
    )
    assert "top/RTE/" in lab.refusal("--task", "RTE", "--data", tar)
    monkeypatch.setattr(archive, "MAX_MEMBERS", 1)
    assert "more than 1 files" in lab.refusal("--task", "RTE", "--data", tar)


def test_a_file_is_found_without_reading_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 50)  # whatever the size of those that are not asked for
    for data in (folder, pack(folder, lab.folder / "glue.tar")):
        assert main(["missing", "--data", data]) == 0
        assert json.loads(lab.capsys.readouterr().out)["RTE"] == []


def test_a_test_set_whose_labels_are_all_minus_one_has_none(lab: Lab) -> None:
    """So data sets of the hub mark what is not public."""
    few = "text,label\na cat,x\na dog,y\n"
    hidden, known = "text,label\na cat,-1\na dog,-1\n", "text,label\na cat,-1\na dog,1\n"
    assert lab.own({"train": few, "dev": few, "test": hidden})["test"].labels is None
    own = lab.own({"train": known, "dev": known, "test": hidden})["test"].labels
    assert own is not None
    assert own.tolist() == [0, 0], "of labels -1 and 1"
    scores = "text,label\na cat,0.5\na dog,-1\n"
    files = lab.own({"train": scores, "dev": scores, "test": hidden}, "--kind", "regression")
    assert files["test"].labels is None


# --- the cache


def test_what_was_prepared_is_found_again_until_a_file_changes(lab: Lab) -> None:
    arguments = ["--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, **RTE)]
    directory, manifest = lab.prepare(*arguments)
    assert "train 2 of" in lab.err
    inode = directory.stat().st_ino
    assert lab.prepare(*arguments)[0] == directory
    assert directory.stat().st_ino == inode
    assert "train 2 of" in lab.err
    assert lab.prepare(*arguments, length=8)[0] != directory
    text = lab.tokenizer.read_text()
    lab.tokenizer = Path(lab.write("copy.json", text))  # every checkpoint has one
    assert lab.prepare(*arguments)[0] == directory
    lab.tokenizer = Path(lab.write("other.json", f"{text} "))
    assert lab.prepare(*arguments)[0] != directory
    lab.write_glue("g", "RTE", RTE_HEADER, train=[*RTE["train"], RTE["dev"][0]])
    assert lab.prepare(*arguments)[1].splits["train"].examples == manifest.splits["train"].examples + 1


def test_what_is_prepared_is_for_its_user_alone(lab: Lab) -> None:
    """Whatever the umask is."""
    with umask(0):
        lab.own({"train": GOOD, "dev": GOOD})
    assert open_to_others(lab.folder / "cache") == []


def test_what_is_damaged_in_the_cache_is_prepared_again(lab: Lab) -> None:
    arguments = ["--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, **RTE)]
    directory, manifest = lab.prepare(*arguments)
    file = directory / manifest.splits["train"].file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(ConfigError, match="expected SHA-256"):
        Examples.open(directory, manifest, "train")
    assert lab.prepare(*arguments)[0] == directory
    assert file.read_bytes() == whole


def test_a_tokenizer_that_is_damaged_in_the_cache_is_replaced(lab: Lab) -> None:
    """Else a run would be finetuned that no one can predict by."""
    arguments = ["--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, **RTE)]
    directory, _ = lab.prepare(*arguments)
    (directory / "tokenizer.json").write_text("{}")
    assert lab.prepare(*arguments)[0] == directory
    assert (directory / "tokenizer.json").read_bytes() == lab.tokenizer.read_bytes()


def test_a_tar_that_was_replaced_is_read_again(lab: Lab) -> None:
    tar = lab.folder / "glue.tar"
    arguments = ["--task", "RTE", "--data", pack(lab.write_glue("g", "RTE", RTE_HEADER, **RTE), tar)]
    first, _ = lab.prepare(*arguments)
    pack(lab.write_glue("h", "RTE", RTE_HEADER, train=RTE["train"], dev=RTE["dev"][:1]), tar)
    second, manifest = lab.prepare(*arguments)
    assert (first != second, manifest.splits["dev"].examples) == (True, 1)


def test_an_edited_manifest_and_arrays_of_another_task_are_refused(lab: Lab) -> None:
    data = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    directory, manifest = lab.prepare("--task", "RTE", "--data", data)
    facts: dict[str, Any] = read_json(directory / "examples.json")
    (directory / "examples.json").write_text(json.dumps(facts | {"labels": ["no", "yes"]}))
    with pytest.raises(ConfigError, match="edited or torn"):
        read_examples(directory)
    other = facts | {"kind": "regression", "labels": []}
    (directory / "examples.json").write_text(json.dumps(other | {"hash": manifest_hash(other)}))
    with pytest.raises(ConfigError, match="do not fit regression"):
        Examples.open(directory, read_examples(directory), "train")
    wrong = facts | {"labels": ["entailment"]}
    (directory / "examples.json").write_text(json.dumps(wrong | {"hash": manifest_hash(wrong)}))
    with pytest.raises(ConfigError, match="labels: 1 do not fit single_label"):
        read_examples(directory)
    with pytest.raises(ConfigError, match="no split 'held_out', only train, dev"):
        Examples.open(directory, manifest, "held_out")


TWO = Examples(np.zeros(4, np.uint16), np.array([0, 2, 4]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"ids": np.full(4, 64, np.uint16)}, "token id 64, but the vocabulary has 64"),
        ({"ids": np.zeros(4, np.int64)}, "ids int64 and offsets int64, not uint16 and int64"),
        ({"ids": np.zeros(5, np.uint16)}, "expected 2 examples of 4 tokens, found 2 of 4"),
        ({"offsets": np.array([0, 4])}, "expected 2 examples of 4 tokens, found 1 of 4"),
        ({"offsets": np.array([0, 1, 4])}, "lengths of 1 to 3, not 2 to 8"),
        ({"labels": None}, "expected has_labels True, found False"),
        ({"labels": np.array([0, 3])}, "a label that there is none of"),
        ({"labels": np.array([-1, 2])}, "a label that there is none of"),
        ({"labels": np.array([0.0, 1.0])}, "labels float64 (2,) do not fit single_label (2,)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_not_those_of_the_manifest_are_refused(
    tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    facts = read_json(write_examples(tmp_path, train=2, dev=0, length=8) / "examples.json")
    train = facts["splits"]["train"]
    sha256 = dataclasses.replace(TWO, **arrays).save(tmp_path / train["file"])
    facts["splits"]["train"] = {**train, "tokens": 4, "sha256": sha256}
    (tmp_path / "examples.json").write_text(json.dumps(facts | {"hash": manifest_hash(facts)}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        Examples.open(tmp_path, read_examples(tmp_path), "train")


@pytest.mark.parametrize(
    ("kind", "labels", "said"),
    [
        ("multi_label", np.array([[0, 1], [2, 0]], np.uint8), "a label that there is none of"),
        ("multi_label", np.array([[0], [1]], np.uint8), "labels uint8 (2, 1) do not fit multi_label (2, 2)"),
        ("multi_label", np.array([[0, 0], [1, 1]], np.uint8), None),
        ("regression", np.array([0.5, np.nan], np.float32), "a label that there is none of"),
        ("regression", np.array([0.5, np.inf], np.float32), "a label that there is none of"),
        ("regression", np.array([-7.5, 1e30], np.float32), None),
        ("single_label", np.array([0, 2]), None),
    ],
)
def test_labels_are_those_of_their_kind(
    tmp_path: Path, kind: str, labels: np.ndarray, said: str | None
) -> None:
    facts = read_json(write_examples(tmp_path, kind=kind, train=2, dev=0, length=8) / "examples.json")
    train = facts["splits"]["train"]
    sha256 = dataclasses.replace(TWO, labels=labels).save(tmp_path / train["file"])
    facts["splits"]["train"] = {**train, "tokens": 4, "sha256": sha256}
    (tmp_path / "examples.json").write_text(json.dumps(facts | {"hash": manifest_hash(facts)}))
    manifest = read_examples(tmp_path)
    if said is None:
        found = Examples.open(tmp_path, manifest, "train").labels
        assert found is not None
        assert found.tolist() == labels.tolist()
    else:
        with pytest.raises(ConfigError, match=re.escape(said)):
            Examples.open(tmp_path, manifest, "train")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": ["a", "b", "a"]}, "labels: a name stands twice"),
        ({"labels": ["a"]}, "labels: 1 do not fit single_label"),
        ({"kind": "multi_label", "labels": []}, "labels: 0 do not fit multi_label"),
        ({"kind": "regression"}, "labels: 3 do not fit regression"),
        ({"special_tokens": {"pad": 0, "cls": 4, "sep": 64}}, "special_tokens.sep: token id 64, but the voc"),
        ({"splits": {}}, "splits: no train"),
        ({"splits": {"train": {"tokens": 79}}}, "splits.train.tokens: 79 are not those of 40 examples"),
        ({"splits": {"train": {"tokens": 1281}}}, "splits.train.tokens: 1281 are not those of 40 examples"),
        ({"splits": {"train": {"tokens": 80}}}, None),
        ({"splits": {"train": {"tokens": 1280}}}, None),
        ({"kind": "multi_label", "labels": ["a"]}, None),
        ({"kind": "regression", "labels": []}, None),
        ({"metrics": []}, "metrics: "),
        ({"dev_share": 1.0}, "dev_share: "),
        ({"sequence_length": 8193}, "sequence_length: "),
    ],
)
def test_a_manifest_of_examples_that_does_not_hold_together_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    facts = read_json(write_examples(tmp_path, dev=0) / "examples.json")
    splits = {name: {**facts["splits"][name], **more} for name, more in changes.get("splits", {}).items()}
    facts = {**facts, **changes, "splits": splits if "splits" in changes else facts["splits"]}
    (tmp_path / "examples.json").write_text(json.dumps(facts | {"hash": manifest_hash(facts)}))
    if said is None:
        read_examples(tmp_path)
    else:
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            read_examples(tmp_path)
        assert len(caught.value.issues) == 1


def test_examples_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    manifest = read_examples(write_examples(tmp_path, length=32, vocab_size=64))
    names = {"kind": "single_label", "labels": ["a", "b", "c"]}
    fits = make_config("data.path=/x", "data.sequence_length=32", "model.vocab_size=64", finetune=names)
    assert manifest.issues(fits) == manifest.warnings(fits) == []
    other = make_config("data.path=/x", "data.sequence_length=16", "model.vocab_size=40")
    assert manifest.issues(other) == [
        "data.sequence_length: 16, but /x holds examples of up to 32 tokens; set data.sequence_length=32",
        "model.vocab_size: 40 is below the tokenizer's 64 in /x; finetune a run that was trained with this "
        "tokenizer",
        "finetune.labels: (), but /x has ('a', 'b', 'c'); set it so",
    ]
    scores = make_config("data.path=/x", "model.vocab_size=64", "finetune.kind=regression", finetune=names)
    assert manifest.issues(scores) == ["finetune.kind: regression, but /x has single_label; set it so"]


# --- truncation


def cut_by_hand(first: list[int], second: list[int], room: int) -> list[list[int]]:
    """Token by token."""
    first, second = list(first), list(second)
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()
    return [first, second]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 14))
def test_the_longer_text_is_cut_first(first: int, second: int, room: int) -> None:
    pair = [list(range(first)), list(range(100, 100 + second))]
    assert truncate(pair, room) == cut_by_hand(*pair, room)
    assert truncate(pair[:1], room) == [pair[0][:room]]


def test_a_long_example_is_cut_to_the_length_and_counted(lab: Lab) -> None:
    long = "the cat sat on a mat and the dog ran under the bed"
    text = f"text,other,label\n{long},who did it,x\nthe,cat,y\n{long},{long},x\n"
    arguments = ["--text-pair", "other"]
    files = lab.own({"train": text, "dev": text}, *arguments)
    train = files["train"]
    assert train.lengths.tolist() == [16, 5, 16]
    assert lab.words(train, 0) == "<cls> the cat sat on a mat and the dog ran <sep> who did it <sep>"
    assert lab.words(train, 2) == "<cls> the cat sat on a mat and <sep> the cat sat on a mat <sep>"
    assert "66.7% truncated to 16" in lab.err


def test_examples_are_encoded_alike_in_batches_of_any_size(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        f"{word} sat,{' '.join(WORDS.split()[: i % 5])} it,x{i % 2}" for i, word in enumerate(WORDS.split())
    ]
    text = "\n".join(["text,other,label", *rows]) + "\n"
    found = []
    for size in (1000, 4, 7, 1):
        monkeypatch.setattr(encode, "BATCH_EXAMPLES", size)
        encoder = encode.Encoder.load(lab.tokenizer, 16)
        table = own.read_table(lab.write("a.csv", text), Columns(("text", "other"), "label"), "train")
        encoded = encoder.encode([row.texts for row in table.rows])
        assert len(encoded.offsets) == len(rows) + 1
        textless = encoded.textless.tolist()
        found.append((encoded.ids.tolist(), encoded.offsets.tolist(), encoded.truncated, textless))
    assert found == [found[0]] * 4


def test_a_special_token_in_a_text_is_text(lab: Lab) -> None:
    files = lab.own({"train": "text,label\nthe <sep> cat,x\na dog,y\n", "dev": "text,label\na cat,x\n"})
    words = lab.words(files["train"], 0).split()
    assert words.count("<sep>") == 1
    assert words[-1] == "<sep>"


# --- own files


ROWS = [("the cat, sat", "cat"), ("a dog\nran", "dog"), ('who "did" it', "cat"), ("under a bed", "7")]


def tables(lab: Lab) -> dict[str, str]:
    """The same rows in every format, and the file of each."""
    records = [{"text": text, "label": label} for text, label in ROWS]
    jsonl = "".join(json.dumps(record) + "\n" for record in records)
    quoted = "".join('"{}",{}\n'.format(text.replace('"', '""'), label) for text, label in ROWS)
    arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    table = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(records), table)
    return {
        "csv": lab.write("own.csv", "\ufefftext,label\n" + quoted),
        "jsonl": lab.write("own.jsonl", jsonl),
        "json": lab.write("own.json", json.dumps(records)),
        "jsonl.gz": lab.write("own.jsonl.gz", gzip.compress(jsonl.encode())),
        "parquet": lab.write("own.parquet", table.getvalue()),
    }


def test_every_format_gives_the_same_examples(lab: Lab) -> None:
    found = {}
    for format, file in tables(lab).items():
        directory, manifest = lab.prepare("--train", file, "--dev", file)
        examples = Examples.open(directory, manifest, "train")
        assert examples.labels is not None
        found[format] = (manifest.labels, examples.labels.tolist(), examples.ids.tolist())
        assert lab.words(examples, 1) == "<cls> a dog ran <sep>"
    assert {str(value) for value in found.values()} == {str(found["jsonl"])}
    assert found["jsonl"][:2] == (["7", "cat", "dog"], [1, 2, 1, 0])


def test_a_column_text_pair_is_the_second_text_where_none_is_named(lab: Lab) -> None:
    rows = [{"text": "a cat", "text_pair": "a dog", "label": i % 2} for i in range(4)]
    jsonl = "".join(json.dumps(row) + "\n" for row in rows)
    files = {
        "csv": lab.write("pair.csv", "text,text_pair,label\n" + "a cat,a dog,0\na cat,a dog,1\n" * 2),
        "jsonl": lab.write("pair.jsonl", jsonl),
    }
    for file in files.values():
        directory, manifest = lab.prepare("--train", file, "--dev", file)
        examples = Examples.open(directory, manifest, "train")
        assert lab.words(examples, 0) == "<cls> a cat <sep> a dog <sep>"
        directory, manifest = lab.prepare("--train", file, "--dev", file, "--text", "text")
        assert lab.words(Examples.open(directory, manifest, "train"), 0) == "<cls> a cat <sep>"


LOST = "\u732b"  # a text of which the tokenizer keeps nothing


def test_texts_that_the_vocabulary_has_nothing_of_are_counted_in_every_split(lab: Lab) -> None:
    """In pairs each side counts."""
    train = lab.write("train.csv", f"text,label\na cat,x\n{LOST},y\n{LOST},y\n")
    dev = lab.write("dev.csv", "text,label\na cat,x\na dog,y\n")
    directory, manifest = lab.prepare("--train", train, "--dev", dev)
    assert lab.words(Examples.open(directory, manifest, "train"), 1) == "<cls> <sep>"
    counts = {n: (s.without_tokens, s.first_without_tokens) for n, s in manifest.splits.items()}
    assert counts == {"train": (2, "line 3"), "dev": (0, None)}
    warning, lost = manifest.warnings(make_config())
    assert warning.startswith("train: 2 of 3 ")
    assert "line 3" in warning
    assert lost.startswith("train: ")
    assert "(2 of 6)" in lost
    pairs = f"text,text_pair,label\na,cat,x\na,{LOST},y\n{LOST},a,y\n{LOST},{LOST},y\n"
    file = lab.write("pairs.csv", pairs)
    split = lab.prepare("--train", file, "--dev", file)[1].splits["dev"]
    assert (split.without_tokens, split.first_without_tokens) == (3, "line 3")


def test_lost_letters_are_counted_in_every_split(lab: Lab) -> None:
    """Also where each text keeps some token; both texts of a pair count."""
    texts = {"train": f"a cat {LOST}", "dev": "a cat" + " a cat" * 99 + LOST}
    for columns in (1, 2):
        head = ",".join(["text", "text_pair"][:columns])
        named = []
        for split, text in texts.items():
            content = f"{head},label\n" + "".join(f"{','.join([text] * columns)},{y}\n" for y in "xy")
            named += [f"--{split}", lab.write(f"{split}{columns}.csv", content)]
        manifest = lab.prepare(*named)[1]
        counts = {name: (split.lost_letters, split.letters) for name, split in manifest.splits.items()}
        assert counts == {"train": (2 * columns, 10 * columns), "dev": (2 * columns, 802 * columns)}
        (warning,) = manifest.warnings(make_config())
        assert warning.startswith("train: 20.0% ")


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_file_of_which_no_token_is_left_is_refused(lab: Lab, split: str) -> None:
    files = {"train": GOOD, "dev": GOOD, split: f"text,label\n{LOST},x\n\u72ac,y\n"}
    named = [x for name, text in files.items() for x in (f"--{name}", lab.write(f"{name}.csv", text))]
    assert f"error: {split}.csv: " in lab.refusal(*named)


@pytest.mark.parametrize(
    ("labels", "remarked"),
    [
        (["pos", "POS", "neg"], ["'POS'", "'pos'"]),
        (["caf\u00e9", "cafe\u0301", "cafe"], [r"'cafe\u0301'", r"'caf\xe9'"]),
        (
            ["New York", "New\u00a0York", "New  York", "Newark"],
            ["'New  York'", "'New York'", r"'New\xa0York'"],
        ),
        (["a", "a\u200b", "b"], ["'a'", r"'a\u200b'"]),
        (["1", "+1", "01", "0", "-1"], ["'+1'", "'01'", "'1'"]),
        (["1", "\u0661", "2"], ["'1'", r"'\u0661'"]),
    ],
)
def test_labels_that_look_like_one_are_remarked_on(lab: Lab, labels: list[str], remarked: list[str]) -> None:
    file = lab.write("own.csv", "text,label\n" + "".join(f"a cat,{label}\n" for label in labels))
    manifest = lab.prepare("--train", file, "--dev", file)[1]
    assert sorted(manifest.labels) == sorted(labels)
    (warning,) = manifest.warnings(make_config())
    assert warning.startswith(f"labels {' and '.join(remarked)} ")
    assert f" {len(remarked)} labels" in warning


def test_a_file_that_changes_while_it_is_read_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lab.write("own.csv", GOOD)
    read = own.OwnData.read

    def read_and_change(self: own.OwnData, *, train_only: bool) -> Labelled:
        found = read(self, train_only=train_only)
        lab.write("own.csv", GOOD + "the mat,x\n")
        return found

    monkeypatch.setattr(own.OwnData, "read", read_and_change)
    assert "a file changed while it was read" in lab.refusal("--train", file, "--dev", file)


def test_a_tsv_takes_quotes_as_they_are(lab: Lab) -> None:
    text = 'text\tlabel\n"the cat\tx\nthe "dog"\ty\n'
    train = lab.own({"train": text, "dev": text}, suffix="tsv")["train"]
    assert len(train) == 2
    assert lab.words(train, 0).endswith("the cat <sep>")


def test_columns_have_the_names_of_the_options(lab: Lab) -> None:
    text = "id,question,answer,grade\n1,who sat,the cat,good\n2,who ran,a dog,bad\n"
    named = ("--text", "question", "--text-pair", "answer", "--label", "grade")
    train = lab.own({"train": text, "dev": text}, *named)["train"]
    assert lab.words(train, 0) == "<cls> who sat <sep> the cat <sep>"
    files = [
        "--train",
        str(lab.folder / "train.csv"),
        "--dev",
        str(lab.folder / "dev.csv"),
        "--text",
        "answer",
    ]
    for kind, column, metrics in (
        ("single_label", "grade", ["accuracy", "f1"]),
        ("single_label", "id", ["accuracy", "f1"]),
        ("multi_label", "id", ["f1", "accuracy"]),
        ("regression", "id", ["pearson", "spearman"]),
    ):  # of the same files, which are prepared anew
        directory, manifest = lab.prepare(*files, "--label", column, "--kind", kind)
        assert lab.words(Examples.open(directory, manifest, "train"), 0) == "<cls> the cat <sep>"
        assert (manifest.kind, manifest.metrics) == (kind, metrics)
        names = {"grade": ["bad", "good"], "id": ["1", "2"]}[column]
        assert manifest.labels == ([] if kind == "regression" else names)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["b", "10", "9"], ["10", "9", "b"]),
        ([True, False], ["false", "true"]),
        ([2, 0], ["0", "2"]),
        ([" b ", "a"], ["a", "b"]),
    ],
)
def test_labels_are_names_in_order(lab: Lab, values: list[Any], names: list[str]) -> None:
    text = "".join(json.dumps({"text": "a cat", "label": value}) + "\n" for value in values)
    file = lab.write("own.jsonl", text)
    directory, manifest = lab.prepare("--train", file, "--dev", file)
    labels = Examples.open(directory, manifest, "train").labels
    assert manifest.labels == names
    assert labels is not None
    assert [names[i] for i in labels] == [str(v).lower().strip() for v in values]


@pytest.mark.parametrize("kind", [[], ["--kind", "single_label"], ["--kind", "multi_label"]])
def test_a_whole_number_is_one_label_however_it_is_written(lab: Lab, kind: list[str]) -> None:
    values = [0.0, "0", "0.0", 0, "-0.0", 1.0, "1.00", -2.0, 1e22, "1.x"]
    names = ["-2", "0", "1", "1.x", "10000000000000000000000"]
    indices = [1, 1, 1, 1, 1, 2, 2, 0, 4, 3]
    text = "".join(json.dumps({"text": "a cat", "label": value}) + "\n" for value in values)
    table = "text,label\n" + "".join(f"a cat,{value}\n" for value in values if value != 1e22)
    for suffix, content, of in (("jsonl", text, indices), ("csv", table, [i for i in indices if i != 4])):
        file = lab.write(f"own.{suffix}", content)
        directory, manifest = lab.prepare("--train", file, "--dev", file, *kind)
        labels = Examples.open(directory, manifest, "train").labels
        assert labels is not None
        assert manifest.labels == [name for i, name in enumerate(names) if i in of]
        assert (labels.argmax(1) if labels.ndim == 2 else labels).tolist() == of


def test_scores_without_a_kind_are_refused_with_it(lab: Lab) -> None:
    """Also where dev holds only seen values; a user who calls them names has them as such."""
    for suffix, text in (
        ("csv", "text,label\na cat,1\na dog,0.5\n"),
        ("jsonl", '{"text": "a cat", "label": 1}\n{"text": "a dog", "label": 0.5}\n'),
        ("jsonl", '{"text": "a cat", "label": 1}\n{"text": "a dog", "label": 1e-07}\n'),
    ):
        file = lab.write(f"own.{suffix}", text)
        refusal = lab.refusal("--train", file, "--dev", file)
        assert f"own.{suffix}: line {text.count(chr(10))}: " in refusal
        assert "--kind regression" in refusal
    unseen = lab.write("dev.csv", "text,label\na cat,0.5\n")
    assert "--kind regression" in lab.refusal("--train", lab.write("t.csv", NUMBERS), "--dev", unseen)
    for kind, names in (("single_label", ["0.5", "1"]), ("multi_label", ["0.5", "1"]), ("regression", [])):
        file = lab.write("own.jsonl", '[{"text": "a", "label": 1}, {"text": "a", "label": 0.5}]')
        assert lab.prepare("--train", file, "--dev", file, "--kind", kind)[1].labels == names


def test_several_labels_by_a_bar_or_a_list(lab: Lab) -> None:
    text = 'text,label\nthe cat,red|green\na dog,\nthe mat,"[""blue"", ""red""]"\n'
    train = lab.own({"train": text, "dev": text}, "--kind", "multi_label")["train"]
    assert train.labels is not None
    assert train.labels.dtype == np.uint8
    assert train.labels.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 1]]
    rows = [{"text": "a cat", "label": label} for label in (["red", "blue"], "green", [])]
    listed = lab.own({s: json.dumps(rows) for s in ("train", "dev")}, "--kind", "multi_label", suffix="json")
    assert listed["train"].labels is not None
    assert listed["train"].labels.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_a_test_file_may_have_labels_or_none(lab: Lab) -> None:
    text = "text,label\na cat,x\na dog,y\n"
    without = lab.own({"train": text, "dev": text, "test": "text\nthe mat\n"})
    assert without["test"].labels is None
    with_labels = lab.own({"train": text, "dev": text, "test": "text,label\nthe mat,y\n"})
    assert with_labels["test"].labels is not None
    assert with_labels["test"].labels.tolist() == [1]
    for kind in ("single_label", "multi_label"):
        blank = "text,label\nthe mat,\na dog, \n"
        empty = lab.own({"train": text, "dev": text, "test": blank}, "--kind", kind)
        assert empty["test"].labels is None


def test_a_text_of_a_table_may_be_long(lab: Lab) -> None:
    """Python's own limit is 131,072 characters."""
    long = f'text,label\n"{"the cat, " * 20_000}",x\na dog,y\n'
    assert lab.words(lab.own({"train": long, "dev": GOOD})["train"], 0).startswith("<cls> the cat")


def test_a_test_file_of_any_format_may_have_labels_or_none(lab: Lab) -> None:
    """Of Parquet only the columns that are asked for are read."""
    arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    train = lab.write("train.csv", GOOD)
    for suffix in ("jsonl", "parquet"):
        for more, expected in (({}, None), ({"label": "y"}, [1])):
            record = {"id": 3, "text": "the mat", **more}
            table = io.BytesIO()
            parquet.write_table(arrow.Table.from_pylist([record]), table)
            content = table.getvalue() if suffix == "parquet" else json.dumps(record)
            test = lab.write(f"test-{len(more)}.{suffix}", content)
            directory, manifest = lab.prepare("--train", train, "--dev", train, "--test", test)
            examples = Examples.open(directory, manifest, "test")
            assert lab.words(examples, 0) == "<cls> the mat <sep>"
            assert (None if examples.labels is None else examples.labels.tolist()) == expected


def test_one_name_is_enough_where_an_example_may_have_none(lab: Lab) -> None:
    text = "text,label\nthe cat,red\na dog,\n"
    train = lab.own({"train": text, "dev": text}, "--kind", "multi_label")["train"]
    assert train.labels is not None
    assert train.labels.tolist() == [[1], [0]]


def test_a_set_of_the_hub_is_read_by_its_splits(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        asked.append((name, split))
        yield from ((f"row {i}", {"text": text, "label": i, "id": i}) for i, text in enumerate("ab", 1))

    monkeypatch.setattr(readers, "hub_records", rows)
    hub = ["--train", "hub:org/set:en", "--dev", "hub:org/set:en", "--test", "hub:org/set"]
    manifest = lab.prepare(*hub)[1]
    assert asked == [("hub:org/set:en", "train"), ("hub:org/set:en", "validation"), ("hub:org/set", "test")]
    assert (manifest.labels, manifest.splits["test"].has_labels) == (["1", "2"], True)


def test_a_class_of_the_hub_has_its_name(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hub")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    labels = {"train": [1, 0], "validation": [0, 1], "test": [-1, -1]}

    def load_dataset(*_: Any, split: str, streaming: bool) -> Any:
        rows = {"text": ["a cat", "a dog"], "label": labels[split]}
        return datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    directory, manifest = lab.prepare(
        *(x for split in ("train", "dev", "test") for x in (f"--{split}", "hub:a/b"))
    )
    train = Examples.open(directory, manifest, "train").labels
    assert train is not None
    assert (manifest.labels, train.tolist()) == (["no", "yes"], [1, 0])
    assert manifest.splits["test"].has_labels is False


def test_the_page_names_every_task_and_its_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text()
    words = {"Matthews correlation": "mcc"}
    listed = {
        task: tuple(words.get(name, name.lower()) for name in metrics.partition(", of ")[0].split(", "))
        for tasks, metrics in re.findall(r"^\| ([A-Z][^|]*?) \| [^|]* \| ([^|]*?) \|$", page, re.MULTILINE)
        for task in tasks.split(", ")
    }
    assert listed == {name: task.metrics for name, task in glue.TASKS.items()}


# --- rows of dev that stand in train, and a dev drawn from train


def test_dev_rows_that_stand_in_train_are_counted(lab: Lab) -> None:
    data = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    manifest = lab.prepare("--task", "RTE", "--data", data)[1]
    assert (manifest.splits["train"].in_train, manifest.splits["dev"].in_train) == (None, 1)
    assert "1 also in train" in lab.err


def test_a_share_of_train_becomes_dev_by_the_rows_alone(lab: Lab) -> None:
    rows = [f"the {a} {b} {c} {i}" for i, a in enumerate(WORDS.split()) for b in "xyz" for c in "uvw"]
    text = "text,label\n" + "".join(f"{row},{i % 2}\n" for i, row in enumerate(rows))
    again = "text,label\n" + "".join(f"{row},{i % 2}\n" for i, row in enumerate([*rows[::-1], rows[0]]))
    found = []
    for name, content in (("a.csv", text), ("b.csv", again)):
        directory, manifest = lab.prepare("--train", lab.write(name, content), "--dev-share", "0.1")
        splits = {s: Examples.open(directory, manifest, s) for s in manifest.splits}
        found.append({s: {lab.words(e, i) for i in range(len(e))} for s, e in splits.items()})
        assert sum(len(e) for e in splits.values()) == content.count("\n") - 1
        assert (manifest.dev_share, manifest.splits["dev"].in_train) == (0.1, 0)
        assert manifest.official is None
    assert list(found[0]) == ["train", "dev"]
    assert found[0] == found[1]
    assert 0.04 * len(rows) < len(found[0]["dev"]) < 0.17 * len(rows)


def test_a_dev_drawn_from_glues_train_leaves_the_real_one_out(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{i}\tthe {a} ran {i}\ta cat\tentailment" for i, a in enumerate(WORDS.split() * 3)]
    complete = dataclasses.replace(glue.TASKS["RTE"], rows={"train": len(rows), "dev": 2})
    monkeypatch.setitem(glue.TASKS, "RTE", complete)
    data = lab.write_glue("g", "RTE", RTE_HEADER, train=rows, dev=RTE["dev"])
    assert lab.prepare("--task", "RTE", "--data", data)[1].official is True
    manifest = lab.prepare("--task", "RTE", "--data", data, "--dev-share", "0.3")[1]
    assert list(manifest.splits) == ["train", "dev"]
    assert sum(split.examples for split in manifest.splits.values()) == len(rows)
    assert manifest.official is False


# --- layouts of tables


def test_a_blank_line_is_an_empty_text_of_one_column_and_none_at_the_end_of_more(lab: Lab) -> None:
    """In every reader of tables: an empty text is refused, so that the index of a row is that of its line."""
    for suffix in ("csv", "tsv"):
        for text, place in (
            ("text\na\n\nb\n", "line 3"),
            ("text\na\n\n", "line 3"),
            ("text\n \nb\n", "line 2"),
        ):
            with pytest.raises(ConfigError, match=f"own.{suffix}: {place}: "):
                own.read_table(lab.write(f"own.{suffix}", text), Columns(("text",)), "test")
    for separator, suffix in ((",", "csv"), ("\t", "tsv")):
        two = f"text{separator}label\na{separator}x\n{{}}b{separator}y\n\n \n\n"
        table = own.read_table(
            lab.write(f"own.{suffix}", two.format("")), Columns(("text",), "label"), "train"
        )
        assert [(row.place, *row.texts) for row in table.rows] == [("line 2", "a"), ("line 3", "b")]
        with pytest.raises(ConfigError, match=f"own.{suffix}: line 3 has 0 fields"):
            own.read_table(lab.write(f"own.{suffix}", two.format("\n\n")), Columns(("text",)), "test")


def test_blank_lines_of_glue_are_broken_rows_but_at_the_end(lab: Lab) -> None:
    apart = [QQP_WHOLE[0], "", QQP_WHOLE[1], "", ""]
    data = lab.write_glue("g", "QQP", QQP_HEADER, train=QQP_WHOLE, dev=apart)
    assert "QQP/dev.tsv: line 3 " in lab.refusal("--task", "QQP", "--data", data)
    data = lab.write_glue("h", "QQP", QQP_HEADER, train=apart, dev=QQP_WHOLE)
    train = lab.prepare("--task", "QQP", "--data", data)[1].splits["train"]
    assert (train.examples, train.left_out) == (2, 1)


UTF16 = "text,label\na cat,x\na dog,y\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("own.csv", "text;label\na;x\n", "semicolons"),
        ("own.csv", '"text";"label"\n"a";"x"\n', "semicolons"),
        ("own.csv", "text\tlabel\na\tx\n", ".tsv"),
        ("own.tsv", "text,label\na,x\n", ".csv"),
        ("own.csv", 'text,label\na,x\n"b,x\nc,x\nd,x\n', "own.csv: line 3 is not CSV"),
        ("own.csv", 'text,label\na,x\n"b,x\nc,x\n"d",x\n', "own.csv: line 3 is not CSV"),
        ("own.csv", UTF16.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("own.csv", UTF16.encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8"),
        ("own.tsv", UTF16.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
        ("own.csv", b"\xfe\xff" + UTF16.encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
        ("own.csv", UTF16.encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
        ("own.csv.gz", gzip.compress(UTF16.encode("utf-16")), "iconv -f UTF-16 -t UTF-8"),
        ("own.json", '[{"text": "a", "label": 1}]'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_another_separator_or_encoding_is_named(lab: Lab, name: str, content: str | bytes, said: str) -> None:
    file = lab.write(name, content)
    assert said in lab.refusal("--train", file, "--dev", file)


def test_glue_in_utf_16_is_named(lab: Lab) -> None:
    data = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    lab.write("g/RTE/dev.tsv", f"{RTE_HEADER}\n".encode("utf-16"))
    assert "RTE/dev.tsv: is UTF-16" in lab.refusal("--task", "RTE", "--data", data)


def test_columns_may_be_nested_keys(lab: Lab) -> None:
    """In JSON, Parquet and the hub; a key that holds a dot itself goes first."""
    arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    records = [{"a": {"b": f"the {x}", "c": {"d": x}}, "e.f": "a bed"} for x in ("cat", "dog")]
    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(records), buffer)
    options = ["--text", "a.b", "--text-pair", "e.f", "--label", "a.c.d"]
    for name, content in (("own.json", json.dumps(records)), ("own.parquet", buffer.getvalue())):
        file = lab.write(name, content)
        directory, manifest = lab.prepare("--train", file, "--dev", file, *options)
        train = Examples.open(directory, manifest, "train")
        assert manifest.labels == ["cat", "dog"]
        assert lab.words(train, 1) == "<cls> the dog <sep> a bed <sep>"
        code, _ = lab.run("--train", file, "--dev", file, "--text", "a.x", "--label", "a.c.d")
        assert (code, "no column 'a.x'" in lab.err) == (2, True)


# --- what is refused


NUMBERS = "text,label\na cat,0\na dog,1\n"
GOOD = "text,label\na cat,x\na dog,y\n"
CSV = "text,label\na cat,x\n"
REFUSED: list[tuple[dict[str, str], str, str]] = [
    # files in place of good ones, options, and what is said
    ({"train": "title,label\na cat,x\n"}, "", "no column 'text' (got 'title', 'label')"),
    ({"train": "text\na cat\n"}, "", "line 2: no column 'label' (got 'text')"),
    ({"dev": "text,label\na cat,z\n"}, "", "dev.csv: line 2: label 'z' is none of train's 'x', 'y'"),
    ({"train": "text,label\na,1.5\na,good\n"}, "--kind regression", "train.csv: line 3: 'good' is no number"),
    ({"train": "text,label\na cat,1e40\n"}, "--kind regression", "'1e40' is no number"),
    ({"train": f"{CSV} \t,y\n"}, "", "line 3: a text is empty"),
    ({"train": f"{CSV}a dog,\n"}, "", "line 3: '' is no label"),
    ({"train": f"{CSV}a dog,x\n"}, "", "1 different labels, 2 at least"),
    (
        {"train": CSV + "".join(f"a cat,{i}\n" for i in range(1000))},
        "",
        "1001 different labels, 1000 at most",
    ),
    ({"train": "text,label\na cat\n"}, "", "line 2 has 1 fields, the header 2"),
    ({"train": 'text,label\n"a cat,x\n'}, "", "is not CSV"),
    ({"train": "text,label\ra cat,x\na dog,y\n"}, "", "a line ends with CR; make it LF"),
    ({"train": r'[{"text": "a \ud83d", "label": "x"}]'}, "", r"record 1 holds a lone surrogate '\ud83d'"),
    ({"train": r'[{"text": "a", "label": "\ud83d"}]'}, "", r"record 1 holds a lone surrogate '\ud83d'"),
    ({"train": "text,text,label\na,b,x\n"}, "", "names 'text' twice"),
    ({"train": "text,label,label\na,x,y\n"}, "", "names 'label' twice"),
    (
        {"train": "text,label\n" + "".join(f"a cat,{name}\n" for name in "abcdefghij")},
        "",
        "label 'x' is none of train's 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' and 2 more",
    ),
    ({"train": "text,label\n"}, "", "holds no example"),
    ({"train": ""}, "", "train.csv: is empty"),
    ({"train": f"text,label\na cat,{'1' * 5000}\n"}, "", "a label of 5,000 characters, 1000 at most"),
    ({"train": "text,label\na cat,2.5\na,2.5\n"}, "--kind regression", "every score is the same"),
    ({"test": '[{"text": "a", "label": "x"}, {"text": "b"}]'}, "", "record 2 has no label, but others have"),
    ({"train": "text,label\na cat,[1\n"}, "--kind multi_label", "'[1' is no JSON list"),
    ({}, "--dev-share 0.00001", "leaves dev no example of 2"),
    ({}, "--dev-share 1.5", "--dev-share 1.5"),
    ({}, "--task RTE", "name either --task with --data, or --train"),
]


def test_a_table_whose_lines_end_with_cr_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\ra cat,x\ra dog,y\r")
    table = own.read_table(str(path), Columns(("text",), "label"), "train")
    assert [(row.texts, row.label) for row in table.rows] == [(("a cat",), "x"), (("a dog",), "y")]


@pytest.mark.parametrize(("files", "options", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_own_files_that_do_not_fit_are_refused(
    lab: Lab, files: dict[str, str], options: str, said: str
) -> None:
    named = []
    for split, text in {"train": GOOD, "dev": GOOD, **files}.items():
        suffix = "json" if text.startswith("[") else "csv"
        named += [f"--{split}", lab.write(f"{split}.{suffix}", text)]
    assert said in lab.refusal(*named, *options.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--task", "SQuAD", "--data", "."], "GLUE's tasks are CoLA, SST-2, MRPC"),
        (["--task", "RTE"], "needs --data"),
        (["--task", "RTE", "--data", ".", "--text", "body"], "--text: has no effect with --task"),
        (["--task", "RTE", "--data", ".", "--kind", "regression"], "--kind: has no effect with --task"),
        (["--task", "RTE", "--data", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
        (["--train", "nowhere.csv", "--dev", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--train", "nowhere.csv"], "--dev: name the file to score on"),
        (["--train", "own.txt", "--dev", "own.txt"], "own.txt: not a table of a known suffix: .csv, .tsv"),
        (["--train", "pipe.csv", "--dev", "own.txt"], "pipe.csv is not a regular file"),
        ([], "name either --task with --data, or --train"),
    ],
)
def test_what_names_no_data_is_refused(
    lab: Lab, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("own.txt", "a cat\n")
    monkeypatch.chdir(lab.folder)
    os.mkfifo("pipe.csv")
    assert expected in lab.refusal(*arguments)


def test_files_that_glue_lacks_are_named_one_a_line(lab: Lab) -> None:
    data = lab.write_glue("g", "MNLI", "sentence1\tsentence2\tgold_label", train=["a\tb\tneutral"])
    code, _ = lab.run("--task", "MNLI", "--data", data)
    assert code == 2
    named = [line.partition(" in ")[0] for line in lab.err.splitlines()]
    assert named == [f"error: --task MNLI: no MNLI/dev_{name}matched.tsv" for name in ("", "mis")]


def test_what_glue_tasks_lack_is_told_over_all_places(lab: Lab) -> None:
    first = lab.write_glue("a", "RTE", RTE_HEADER, train=RTE["train"])
    second = pack(lab.write_glue("b", "RTE", RTE_HEADER, dev=RTE["dev"]), lab.folder / "b.tar")
    assert main(["missing", "--data", first, "--data", second]) == 0
    told = json.loads(lab.capsys.readouterr().out)
    assert list(told) == list(glue.TASKS)
    assert told["RTE"] == []
    assert told["MNLI"] == ["MNLI/train.tsv", "MNLI/dev_matched.tsv", "MNLI/dev_mismatched.tsv"]
    assert main(["missing", "--data", str(lab.folder / "nowhere")]) == 2
    assert "there is no such folder or tar" in lab.capsys.readouterr().err


def test_glue_files_that_do_not_fit_are_refused(lab: Lab) -> None:
    data = lab.write_glue("a", "RTE", "index\tsentence1\tlabel", train=["0\ta\tentailment"], dev=RTE["dev"])
    assert "RTE/train.tsv: no column 'sentence2'" in lab.refusal("--task", "RTE", "--data", data)
    data = lab.write_glue("b", "RTE", RTE_HEADER, train=["0\ta\tb\tperhaps"], dev=RTE["dev"])
    assert "RTE/train.tsv: line 2: label 'perhaps'" in lab.refusal("--task", "RTE", "--data", data)
    data = lab.write("cut.tar.xz", Path(pack(data, lab.folder / "c.tar.xz")).read_bytes()[:100])
    assert "no tar, or a damaged one" in lab.refusal("--task", "RTE", "--data", data)
    with zipfile.ZipFile(lab.folder / "glue.zip", "w") as packed:
        packed.writestr("RTE/train.tsv", "")
    zipped = str(lab.folder / "glue.zip")
    assert "is a zip; unpack it and name the folder" in lab.refusal("--task", "RTE", "--data", zipped)
    lab.write("d/RTE/train.tsv", b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tentailment\n")
    lab.write_glue("d", "RTE", RTE_HEADER, dev=RTE["dev"])
    assert "not UTF-8" in lab.refusal("--task", "RTE", "--data", str(lab.folder / "d"))


def test_a_tokenizer_or_a_length_that_does_not_fit_is_refused(lab: Lab) -> None:
    file = lab.write("own.csv", GOOD)
    assert "--length 7: expected 8 to 8192" in lab.refusal("--train", file, "--dev", file, length=7)
    bare = json.loads(lab.tokenizer.read_text())
    bare["added_tokens"] = []
    for name in ("<cls>", "<s>"):
        del bare["model"]["vocab"][name]
    lab.tokenizer = Path(lab.write("bare.json", json.dumps(bare)))
    assert "has no token <cls> or [CLS]" in lab.refusal("--train", file, "--dev", file)


def test_a_cache_that_others_may_write_to_is_not_used(lab: Lab) -> None:
    file = lab.write("own.csv", GOOD)
    cache = Path(os.environ["BERT_DP_CACHE"])
    cache.mkdir()
    cache.chmod(0o777)
    assert "can be written by every user" in lab.refusal("--train", file, "--dev", file)
