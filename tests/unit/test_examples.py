"""Test the preparation of labelled texts from GLUE and from user files, and refusals of invalid files."""

import dataclasses
import gzip
import io
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bert_dp.config import Issue
from bert_dp.config.manifest import ExamplesManifest, manifest_hash, read_examples
from bert_dp.data import tokenizer as tokens
from bert_dp.examples import glue, prepare
from bert_dp.examples import table as labelled_table
from bert_dp.examples.prepare import main, summary, truncate
from bert_dp.examples.table import Columns, Examples
from tests.example_files import write_examples
from tests.helpers import make_config, raised_issues, read_json

WORDS = "the cat dog sat ran on under a mat bed and who did it"
RTE_HEADER = "index\tsentence1\tsentence2\tlabel"
RTE = {
    "train": ["0\tthe cat sat\ta cat\tentailment", "1\tthe dog ran\ta cat\tnot_entailment"],
    "dev": ["0\ta dog\tthe dog ran\tnot_entailment", "1\tThe  CAT sat\ta cat\tentailment"],
}
GOOD = "text,label\na cat,x\na dog,y\n"
LOST = "\u732b"  # a text that the tokenizer drops completely


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    # because `main` would install its signal handlers in the test process
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokens.train([WORDS] * 9, model="wordpiece", vocab_size=200, with_normalizer=True).save(str(path))
    return path


class Lab:
    """Helper that writes files into one directory and prepares them."""

    def __init__(self, folder: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.tokenizer, self.capsys = folder, tokenizer, capsys
        self.err = ""

    def write(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def write_glue(self, folder: str, task: str, header: str | None = None, **splits: list[str]) -> str:
        """Write TASK/SPLIT.tsv below `folder` and return the folder."""
        for split, rows in splits.items():
            lines = [*([header] if header else []), *rows]
            self.write(f"{folder}/{task}/{split}.tsv", "\n".join(lines) + "\n")
        return str(self.folder / folder)

    def arguments(self, *options: str, length: int = 16) -> list[str]:
        return ["prepare", "--tokenizer", str(self.tokenizer), "--length", str(length), *options]

    def prepare(self, *options: str, length: int = 16) -> tuple[Path, ExamplesManifest]:
        code = main(self.arguments(*options, length=length))
        out, self.err = self.capsys.readouterr()
        assert code == 0, self.err
        directory = Path(out.strip())
        return directory, read_examples(directory)

    def glue(self, task: str, header: str | None, **splits: list[str]) -> tuple[Path, ExamplesManifest]:
        return self.prepare("--task", task, "--data", self.write_glue("glue", task, header, **splits))

    def own(self, rows: dict[str, str | bytes], *options: str, suffix: str = "csv") -> dict[str, Examples]:
        """Write one file per split, prepare the files and return the prepared splits."""
        named = []
        for split, text in rows.items():
            named += [f"--{split}", self.write(f"{split}.{suffix}", text)]
        directory, manifest = self.prepare(*named, *options)
        return {split: Examples.open(directory, manifest, split) for split in manifest.splits}

    def refused(self, *options: str) -> tuple[Issue, ...]:
        """Return the issues of invalid input, and check that it leaves no files in the cache."""
        issues = raised_issues(prepare.answer, self.arguments(*options))
        assert not list((self.folder / "cache").glob("examples-*"))
        return issues

    def words(self, examples: Examples, index: int) -> str:
        known = Tokenizer.from_file(str(self.tokenizer))
        return " ".join(str(known.id_to_token(int(i))) for i in examples.tokens(index))


@pytest.fixture
def lab(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(tmp_path, tokenizer_file, capsys)


def numbers(examples: Examples) -> list[Any]:
    assert examples.labels is not None
    return list(examples.labels.tolist())


# --- GLUE


def test_a_pair_is_framed_and_its_label_is_the_index_of_its_name(lab: Lab) -> None:
    directory, manifest = lab.glue("RTE", RTE_HEADER, **RTE)
    train = Examples.open(directory, manifest, "train")
    assert manifest.labels == ["entailment", "not_entailment"]
    assert lab.words(train, 0) == "<cls> the cat sat <sep> a cat <sep>"
    assert (numbers(train), train.lengths.tolist()) == ([0, 1], [8, 8])
    known = Tokenizer.from_file(str(directory / manifest.tokenizer.file))
    assert dict(manifest.special_tokens) == {r: known.token_to_id(f"<{r}>") for r in ("pad", "cls", "sep")}
    assert manifest.vocab_size == known.get_vocab_size()
    assert train.tokens(0).tolist() == known.encode("the cat sat", "a cat").ids


ANY_OF_GLUE = {
    # header, rows of train and dev, tokens of the first example, labels, then (kind, label names, metrics)
    "MRPC": (  # quotes are ordinary characters; the byte order mark is dropped
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        ['1\t1\t2\t" the cat\tit', '0\t3\t4\tthe "dog\ta "mat" and'],
        "<cls> <unk> the cat <sep> it <sep>",
        [1, 0],
        ("single_label", ["0", "1"], ["accuracy", "f1"]),
    ),
    "CoLA": (  # train and dev have no header
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
def test_each_glue_task_is_read_in_its_own_format(lab: Lab, task: str) -> None:
    header, rows, words, labels, meaning = ANY_OF_GLUE[task]
    splits = ["train", *(["dev_matched", "dev_mismatched"] if task == "MNLI" else ["dev"])]
    if task == "CoLA":  # its test file has a header and no labels
        lab.write_glue("glue", task, "index\tsentence", test=["0\tthe dog ran"])
    directory, manifest = lab.glue(task, header, **dict.fromkeys(splits, rows))
    assert (manifest.kind, manifest.labels, manifest.metrics) == meaning
    opened = {split: Examples.open(directory, manifest, split) for split in manifest.splits}
    if task == "CoLA":
        test = opened.pop("test")
        assert (lab.words(test, 0), test.labels) == ("<cls> the dog ran <sep>", None)
    assert [*opened] == splits
    for examples in opened.values():
        assert (lab.words(examples, 0), numbers(examples)) == (words, labels)


def test_row_counts_decide_whether_data_is_official(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for train, dev, other_train, official in ((2, 2, 0, True), (3, 2, 2, True), (2, 3, 2, False)):
        facts: dict[str, Any] = {"rows": {"train": train, "dev": dev}, "other_train_rows": other_train}
        monkeypatch.setitem(glue.TASKS, "RTE", dataclasses.replace(glue.TASKS["RTE"], **facts))
        manifest = lab.glue("RTE", RTE_HEADER, **RTE)[1]
        assert manifest.official == official
        assert ("do not match" in summary(manifest)) != official


QQP_HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
# a question contains a line end, as in the published train.tsv
QQP_BROKEN = ["1\t2\t3\twho sat on", "\ta mat\t0"]
QQP_WHOLE = ["0\t1\t2\twho sat\twho ran\t0", "2\t3\t4\twho did it\tthe cat\t1"]


def test_broken_glue_rows_are_dropped_from_train_and_refused_in_dev(lab: Lab) -> None:
    """Blank lines are skipped. A row with an empty text is kept."""
    broken = [QQP_WHOLE[0], *QQP_BROKEN, QQP_WHOLE[1], "3\t5\t6\twho did it\t\t0", "", ""]
    data = lab.write_glue("g", "QQP", QQP_HEADER, train=QQP_WHOLE, dev=broken)
    (issue,) = lab.refused("--task", "QQP", "--data", data)
    assert (issue.setting, issue.kind, issue.message[:7]) == ("QQP/dev.tsv", "damaged", "line 3 ")
    directory, manifest = lab.glue("QQP", QQP_HEADER, train=broken, dev=QQP_WHOLE)
    train = manifest.splits["train"]
    assert (train.examples, train.left_out, train.without_tokens) == (3, 2, 1)
    assert lab.words(Examples.open(directory, manifest, "train"), 2) == "<cls> who did it <sep> <sep>"


def pack(folder: str, tar: Path) -> str:
    """Pack the folder into a tar file, below a top-level directory, and return the file's path."""
    with tarfile.open(tar, "w:xz") as packed:
        packed.add(folder, "top")
    return str(tar)


def test_a_tar_gives_the_examples_of_its_folder_and_is_not_unpacked(lab: Lab) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    tar = pack(folder, lab.folder / "glue.tar.xz")
    before = {path for path in lab.folder.rglob("*") if "cache" not in path.parts}
    one, two = (lab.prepare("--task", "RTE", "--data", data) for data in (folder, tar))
    assert one[0] != two[0]
    assert one[1] == two[1]
    assert {path for path in lab.folder.rglob("*") if "cache" not in path.parts} == before


def test_a_file_is_read_from_the_first_data_path_that_has_it_and_links_are_not_followed(lab: Lab) -> None:
    first = lab.write_glue("a", "RTE", RTE_HEADER, dev=RTE["dev"][:1])
    second = pack(lab.write_glue("b", "RTE", RTE_HEADER, **RTE), lab.folder / "b.tar")
    manifest = lab.prepare("--task", "RTE", "--data", first, "--data", second)[1]
    assert {name: split.examples for name, split in manifest.splits.items()} == {"train": 2, "dev": 1}
    folder = Path(lab.write_glue("g", "RTE", RTE_HEADER, train=RTE["train"]))
    (folder / "RTE/dev.tsv").symlink_to(folder / "RTE/train.tsv")
    (lab.folder / "cache").rename(lab.folder / "before")
    (issue,) = lab.refused("--task", "RTE", "--data", pack(str(folder), lab.folder / "glue.tar.xz"))
    assert (issue.setting, issue.kind, issue.value) == ("--data", "missing", "RTE/dev.tsv")


def test_a_glue_file_has_a_maximum_size_and_is_found_without_reading_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lab.write_glue("g", "RTE", RTE_HEADER, **RTE)
    tar = pack(folder, lab.folder / "glue.tar")
    monkeypatch.setattr(glue, "MAX_FILE_BYTES", 50)
    for data, setting in ((folder, f"{folder}/RTE/train.tsv"), (tar, tar)):
        assert lab.refused("--task", "RTE", "--data", data)[0].setting == setting
        assert json.loads(prepare.answer(["missing", "--data", data]))["RTE"] == []
    monkeypatch.setattr(glue, "MAX_MEMBERS", 1)
    assert lab.refused("--task", "RTE", "--data", tar)[0].kind == "damaged"


def test_missing_glue_files_are_named_across_all_data_paths(lab: Lab) -> None:
    first = lab.write_glue("a", "RTE", RTE_HEADER, train=RTE["train"])
    second = pack(lab.write_glue("b", "RTE", RTE_HEADER, dev=RTE["dev"]), lab.folder / "b.tar")
    lacking = json.loads(prepare.answer(["missing", "--data", first, "--data", second]))
    assert list(lacking) == list(glue.TASKS)
    assert lacking["RTE"] == []
    assert lacking["MNLI"] == ["MNLI/train.tsv", "MNLI/dev_matched.tsv", "MNLI/dev_mismatched.tsv"]
    issues = lab.refused("--task", "MNLI", "--data", first)
    assert [issue.value for issue in issues] == lacking["MNLI"]


def test_the_baseline_is_the_most_frequent_label_of_train(lab: Lab) -> None:
    rows = {"train": [*RTE["train"], RTE["train"][1]], "dev": [*RTE["dev"], *RTE["dev"][:1] * 2]}
    splits = lab.glue("RTE", RTE_HEADER, **rows)[1].splits
    assert (splits["train"].baseline, splits["dev"].baseline) == (None, {"accuracy": 0.75})
    files = {"train": "text,label\na,1\nb,2\n", "dev": "text,label\na,1\nb,3\n", "test": "text\na\n"}
    named = [x for split, text in files.items() for x in (f"--{split}", lab.write(f"{split}.csv", text))]
    splits = lab.prepare(*named, "--kind", "regression")[1].splits
    assert splits["dev"].baseline == {"pearson": None, "spearman": None}  # not defined for a constant
    assert splits["test"].baseline is None


# --- the cache


def test_prepared_examples_are_reused_until_a_file_changes(lab: Lab) -> None:
    options = ["--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, **RTE)]
    directory, manifest = lab.prepare(*options)
    inode = directory.stat().st_ino
    assert lab.prepare(*options)[0] == directory
    assert directory.stat().st_ino == inode
    assert "train 2 " in lab.err
    assert lab.prepare(*options, length=8)[0] != directory
    text = lab.tokenizer.read_text()
    lab.tokenizer = Path(lab.write("copy.json", text))  # every checkpoint has its own copy of the tokenizer
    assert lab.prepare(*options)[0] == directory
    lab.tokenizer = Path(lab.write("other.json", f"{text} "))
    assert lab.prepare(*options)[0] != directory
    lab.write_glue("g", "RTE", RTE_HEADER, train=[*RTE["train"], RTE["dev"][0]])
    assert lab.prepare(*options)[1].splits["train"].examples == manifest.splits["train"].examples + 1
    (lab.folder / "cache").chmod(0o777)  # a cache that other users may write to is refused
    assert main(lab.arguments(*options)) == 2


@pytest.mark.parametrize("name", ["train.safetensors", "tokenizer.json", "examples.json"])
def test_damaged_examples_in_the_cache_are_prepared_again(lab: Lab, name: str) -> None:
    options = ["--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, **RTE)]
    directory, manifest = lab.prepare(*options)
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(whole[:-1] + b"\1")
    assert lab.prepare(*options) == (directory, manifest)
    assert (directory / name).read_bytes() == whole


def test_arrays_that_contradict_the_manifest_are_refused(tmp_path: Path) -> None:
    two = Examples(np.zeros(4, np.uint16), np.array([0, 2, 4]), np.array([0, 1]))
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("single_label", {"ids": np.full(4, 64, np.uint16)}),  # not in the vocabulary
        ("single_label", {"offsets": np.array([0, 4])}),
        ("single_label", {"offsets": np.array([0, 1, 4])}),  # an example of one token
        ("single_label", {"labels": None}),
        ("single_label", {"labels": np.array([0, 3])}),
        ("multi_label", {"labels": np.array([[0, 1], [2, 0]], np.uint8)}),
        ("regression", {"labels": np.array([0.5, np.nan], np.float32)}),
    )
    for kind, arrays in changes:
        facts = read_json(write_examples(tmp_path, kind=kind, train=2, dev=0, length=8) / "examples.json")
        train = facts["splits"]["train"]
        train |= {"tokens": 4, "sha256": dataclasses.replace(two, **arrays).save(tmp_path / train["file"])}
        (tmp_path / "examples.json").write_text(json.dumps(facts | {"hash": manifest_hash(facts)}))
        (issue,) = raised_issues(Examples.open, tmp_path, read_examples(tmp_path), "train")
        assert (issue.setting, issue.kind) == (str(tmp_path / train["file"]), "damaged")


def test_an_inconsistent_manifest_of_examples_is_refused(tmp_path: Path) -> None:
    own = read_json(write_examples(tmp_path, dev=0) / "examples.json")
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("labels", {"labels": ["a", "b", "a"]}),
        ("labels", {"kind": "regression"}),
        ("special_tokens", {"special_tokens": {"pad": 0, "cls": 4, "sep": 64}}),
        ("splits", {"splits": {}}),
        ("version 2", {"version": 2}),
        ("edited or truncated", {"hash": "0" * 64}),
    )
    for named, change in changes:
        whole = own | {"hash": manifest_hash(own | change)} | change
        (tmp_path / "examples.json").write_text(json.dumps(whole))
        (issue,) = raised_issues(read_examples, tmp_path)
        assert issue.setting == str(tmp_path / "examples.json")
        assert named in issue.message


def test_examples_that_do_not_match_the_configuration_are_refused(tmp_path: Path) -> None:
    manifest = read_examples(write_examples(tmp_path, length=32, vocab_size=64))
    fit = "data.path=/x data.sequence_length=32 model.vocab_size=64 finetune.labels=[a,b,c]"
    fits = make_config(*fit.split())
    assert manifest.issues(fits) == manifest.warnings(fits) == []
    unfit = "data.path=/x data.sequence_length=16 model.vocab_size=40 finetune.kind=regression"
    other = make_config(*unfit.split())
    named = ["data.sequence_length", "model.vocab_size", "finetune.kind", "finetune.labels"]
    assert [issue.setting for issue in manifest.issues(other)] == named


# --- truncation


def cut_by_hand(first: list[int], second: list[int], limit: int) -> list[list[int]]:
    """Remove the last token of the longer text until `limit` tokens are left."""
    first, second = list(first), list(second)
    while len(first) + len(second) > limit:
        (first if len(first) > len(second) else second).pop()
    return [first, second]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 14))
def test_the_longer_text_is_cut_first(first: int, second: int, limit: int) -> None:
    pair = [list(range(first)), list(range(100, 100 + second))]
    assert truncate(pair, limit) == cut_by_hand(*pair, limit)
    assert truncate(pair[:1], limit) == [pair[0][:limit]]


def test_a_long_example_is_cut_to_the_length_and_counted(lab: Lab) -> None:
    long = "the cat sat on a mat and the dog ran under the bed"
    text = f"text,other,label\n{long},who did it,x\nthe,cat,y\n{long},{long},x\n"
    train = lab.own({"train": text, "dev": text}, "--text-pair", "other")["train"]
    assert train.lengths.tolist() == [16, 5, 16]
    assert lab.words(train, 0) == "<cls> the cat sat on a mat and the dog ran <sep> who did it <sep>"
    assert lab.words(train, 2) == "<cls> the cat sat on a mat and <sep> the cat sat on a mat <sep>"
    assert "2 truncated to 16" in lab.err


# --- own files


ROWS = [("the cat, sat", "cat"), ("a dog\nran", "dog"), ('who "did" it', "cat"), ("under a bed", "7")]


def parquet(records: list[dict[str, Any]]) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is missing")
    table = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), table)
    return table.getvalue()


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "jsonl.gz", "parquet"])
def test_every_format_gives_the_same_examples(lab: Lab, suffix: str) -> None:
    records = [{"text": text, "label": label} for text, label in ROWS]
    jsonl = "".join(json.dumps(record) + "\n" for record in records)
    quoted = "".join('"{}",{}\n'.format(text.replace('"', '""'), label) for text, label in ROWS)
    content: str | bytes = {
        "csv": "\ufefftext,label\n" + quoted,
        "jsonl": jsonl,
        "json": json.dumps(records),
        "jsonl.gz": gzip.compress(jsonl.encode()),
    }.get(suffix) or parquet(records)
    for examples in lab.own({"train": content, "dev": content}, suffix=suffix).values():
        assert numbers(examples) == [1, 2, 1, 0]
        texts = [lab.words(examples, i)[6:-6] for i in (0, 1, 3)]
        assert texts == ["the cat <unk> sat", "a dog ran", "under a bed"]


def test_a_column_text_pair_is_the_second_text_if_no_column_is_named(lab: Lab) -> None:
    rows = [{"text": "a cat", "text_pair": "a dog", "label": i} for i in (0, 1)]
    csv = lab.write("pair.csv", "text,text_pair,label\na cat,a dog,0\na cat,a dog,1\n")
    for file in (csv, lab.write("pair.json", json.dumps(rows))):
        for options, words in (([], "a cat <sep> a dog <sep>"), (["--text", "text"], "a cat <sep>")):
            train = Examples.open(*lab.prepare("--train", file, "--dev", file, *options), "train")
            assert lab.words(train, 0) == f"<cls> {words}"


def test_texts_without_known_tokens_are_counted_in_every_split(lab: Lab) -> None:
    """A pair counts if either text has no known token. A file without any known token is refused."""
    train = lab.write("train.csv", f"text,label\na cat,x\n{LOST},y\n{LOST},y\n")
    bare = lab.write("bare.csv", f"text,label\n{LOST},x\n\u72ac,y\n")
    for options in (["--train", train, "--dev", bare], ["--train", bare, "--dev", train]):
        (issue,) = lab.refused(*options)
        assert (issue.setting, issue.kind) == ("bare.csv", "unsupported")
    directory, manifest = lab.prepare("--train", train, "--dev", lab.write("dev.csv", GOOD))
    assert lab.words(Examples.open(directory, manifest, "train"), 1) == "<cls> <sep>"
    counts = [(split.without_tokens, split.lost_letters) for split in manifest.splits.values()]
    assert counts == [(2, 2), (0, 0)]
    warnings = manifest.warnings(make_config())
    assert [warning.startswith("train: ") for warning in warnings] == [True, True]
    pairs = f"text,text_pair,label\na,cat,x\na,{LOST},y\n{LOST},a,y\n{LOST},{LOST},y\n"
    file = lab.write("pairs.csv", pairs)
    assert lab.prepare("--train", file, "--dev", file)[1].splits["dev"].without_tokens == 3


def test_labels_that_look_alike_cause_a_warning(lab: Lab) -> None:
    labels = ["pos", "POS", "New York", "New\u00a0York", "Newark"]
    file = lab.write("own.csv", "text,label\n" + "".join(f"a cat,{label}\n" for label in labels))
    manifest = lab.prepare("--train", file, "--dev", file)[1]
    assert sorted(manifest.labels) == sorted(labels)
    warnings = [warning.partition(" differ")[0] for warning in manifest.warnings(make_config())]
    assert warnings == [r"labels 'New York' and 'New\xa0York'", "labels 'POS' and 'pos'"]


def test_the_options_select_the_columns(lab: Lab) -> None:
    file = lab.write("a.csv", "id,question,answer\n1,who sat,the cat\n2,who ran,a dog\n")
    for kind, metrics, names in (
        ("single_label", ["accuracy", "f1"], ["1", "2"]),
        ("multi_label", ["f1", "accuracy"], ["1", "2"]),
        ("regression", ["pearson", "spearman"], []),
    ):
        options = ("--text", "question", "--text-pair", "answer", "--label", "id", "--kind", kind)
        directory, manifest = lab.prepare("--train", file, "--dev", file, *options)
        train = Examples.open(directory, manifest, "train")
        assert lab.words(train, 0) == "<cls> who sat <sep> the cat <sep>"
        assert (manifest.kind, manifest.metrics, manifest.labels) == (kind, metrics, names)


@pytest.mark.parametrize("options", [(), ("--kind", "multi_label")])
def test_equal_labels_have_one_name_and_names_are_sorted(lab: Lab, options: tuple[str, ...]) -> None:
    zeros_and_others = [0.0, "0", "0.0", 0, "-0.0", 1.0, "1.00", -2.0, 1e22, "1.x"]
    tables: tuple[tuple[list[Any], str, list[int]], ...] = (
        (["10", "9", "-1"], "-1 9 10", [2, 1, 0]),
        (["b", "10", "9"], "10 9 b", [2, 0, 1]),
        ([True, False], "false true", [1, 0]),
        ([" b ", "a"], "a b", [1, 0]),
        (zeros_and_others, "-2 0 1 1.x 10000000000000000000000", [1, 1, 1, 1, 1, 2, 2, 0, 4, 3]),
    )
    for values, names, indices in tables:
        file = lab.write("own.json", json.dumps([{"text": "a cat", "label": value} for value in values]))
        directory, manifest = lab.prepare("--train", file, "--dev", file, *options)
        labels = np.array(numbers(Examples.open(directory, manifest, "train")))
        assert manifest.labels == names.split()
        assert (labels.argmax(1) if labels.ndim == 2 else labels).tolist() == indices


@pytest.mark.parametrize("score", ["0.5", "1e-07"])
def test_scores_without_a_kind_are_refused_with_a_hint(lab: Lab, score: str) -> None:
    """One score in dev is enough for the refusal. An explicit kind of labels accepts scores as names."""
    file = lab.write("own.jsonl", f'{{"text": "a", "label": 1}}\n{{"text": "b", "label": {score}}}\n')
    whole = lab.write("t.csv", "text,label\na cat,0\na dog,1\n")
    for train, dev, kind in ((file, file, "wrong_type"), (whole, file, "unknown")):
        (issue,) = lab.refused("--train", train, "--dev", dev)
        assert (issue.setting, issue.kind) == ("own.jsonl", kind)
        assert "--kind regression" in str(issue.hint)
    for kind, names in (("single_label", [score, "1"]), ("multi_label", [score, "1"]), ("regression", [])):
        labels = lab.prepare("--train", file, "--dev", file, "--kind", kind)[1].labels
        assert sorted(labels) == sorted(names)


def test_several_labels_are_given_with_bars_or_as_a_list(lab: Lab) -> None:
    text = 'text,label\nthe cat,red|green\na dog,\nthe mat,"[""blue"", ""red""]"\n'
    train = lab.own({"train": text, "dev": text}, "--kind", "multi_label")["train"]
    assert numbers(train) == [[0, 1, 1], [0, 0, 0], [1, 0, 1]]
    rows = [{"text": "a cat", "label": label} for label in (["red", "blue"], "green", [])]
    listed = lab.own({s: json.dumps(rows) for s in ("train", "dev")}, "--kind", "multi_label", suffix="json")
    assert numbers(listed["train"]) == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    one = "text,label\nthe cat,red\na dog,\n"  # one name is enough because an example may have no label
    assert numbers(lab.own({"train": one, "dev": one}, "--kind", "multi_label")["dev"]) == [[1], [0]]


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_a_test_file_may_have_labels_or_none(lab: Lab, kind: str) -> None:
    for test, expected in (
        ("text\nthe mat\n", None),
        ("text,label\nthe mat,y\n", [1]),
        ("text,label\nthe mat,\na dog, \n", None),
    ):
        labels = lab.own({"train": GOOD, "dev": GOOD, "test": test}, "--kind", kind)["test"].labels
        found = labels if labels is None or labels.ndim == 1 else labels.argmax(1)
        assert (None if found is None else found.tolist()) == expected


def test_a_hub_dataset_is_read_with_its_splits_and_classes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is missing")
    classes = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    labels = {"train": [1, 0], "validation": [0, 1], "test": [-1, -1]}
    loaded = []

    def load_dataset(*name: Any, split: str, streaming: bool) -> Any:
        loaded.append((*name, split))
        rows = {"text": ["a cat", "a dog"], "label": labels[split]}
        return datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = ["--train", "hub:a/b:en", "--dev", "hub:a/b:en", "--test", "hub:a/b"]
    directory, manifest = lab.prepare(*options)
    assert loaded == [("a/b", "en", "train"), ("a/b", "en", "validation"), ("a/b", None, "test")]
    assert (manifest.labels, numbers(Examples.open(directory, manifest, "train"))) == (["no", "yes"], [1, 0])
    assert manifest.splits["test"].has_labels is False


# --- a dev set drawn from train


def test_a_share_of_train_becomes_dev_independently_of_the_order_of_rows(lab: Lab) -> None:
    rows = [f"the {a} {b} {c} {i}" for i, a in enumerate(WORDS.split()) for b in "xyz" for c in "uvw"]
    found = []
    for name, order in (("a.csv", rows), ("b.csv", [*rows[::-1], rows[0]])):
        content = "text,label\n" + "".join(f"{row},{int(row[-1] in '024')}\n" for row in order)
        file = lab.write(name, content)
        directory, manifest = lab.prepare("--train", file, "--dev-share", "0.1")
        splits = {s: Examples.open(directory, manifest, s) for s in manifest.splits}
        found.append({s: {lab.words(e, i) for i in range(len(e))} for s, e in splits.items()})
        assert sum(len(e) for e in splits.values()) == len(order)
        assert (manifest.dev_share, manifest.splits["dev"].in_train) == (0.1, 0)
        assert manifest.official is None
    assert list(found[0]) == ["train", "dev"]
    assert found[0] == found[1]
    labels, of_class = numbers(splits["dev"]), [row[-1] in "024" for row in rows]
    assert [labels.count(each) for each in (0, 1)] == [round(0.1 * of_class.count(each)) for each in (0, 1)]
    other = Examples.open(*lab.prepare("--train", file, "--dev-share", "0.1", "--seed", "1"), "dev")
    assert {lab.words(other, i) for i in range(len(other))} != found[0]["dev"]
    refused = lab.arguments("--train", lab.write("own.csv", GOOD), "--dev-share", "1e-9")
    (issue,) = raised_issues(prepare.answer, refused)
    assert (issue.setting, issue.kind) == ("own.csv", "out_of_range")


def test_a_dev_set_drawn_from_glues_train_replaces_the_real_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of dev that also occur in train are counted."""
    rows = [f"{i}\tthe {a} ran {i}\ta cat\tentailment" for i, a in enumerate(WORDS.split() * 3)]
    complete = dataclasses.replace(glue.TASKS["RTE"], rows={"train": len(rows), "dev": 2})
    monkeypatch.setitem(glue.TASKS, "RTE", complete)
    dev = [rows[0].replace("the ", "THE  "), RTE["dev"][0]]
    options = ("--task", "RTE", "--data", lab.write_glue("g", "RTE", RTE_HEADER, train=rows, dev=dev))
    manifest = lab.prepare(*options)[1]
    assert (manifest.official, manifest.splits["dev"].in_train) == (True, 1)
    manifest = lab.prepare(*options, "--dev-share", "0.3")[1]
    assert sum(split.examples for split in manifest.splits.values()) == len(rows)
    assert manifest.official is False


# --- refusals


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["csv", "tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.xz"]),
    st.binary(max_size=60) | st.text('text,label\n\t\r" x1.[]{}:', max_size=40).map(str.encode),
)
@example("csv", b"text,label\na,x\nb,y\n")
@example("json", b'[{"text": 1, "label": {}}]')
@example("jsonl", b'{"text": "a", "label": ' + b"[" * 10_000)
def test_any_bytes_are_examples_or_are_refused_in_one_line(lab: Lab, suffix: str, content: bytes) -> None:
    file = lab.write(f"any.{suffix}", content)
    code = main(lab.arguments("--train", file, "--dev", file))
    out, err = lab.capsys.readouterr()
    if code == 0:
        assert (len(read_examples(Path(out.strip())).splits), err.count("\n")) == (2, 1)
    else:
        assert (code, err) == (2, "")
        (issue,) = json.loads(out)
        assert len(f"{Issue(**issue)}") < 1000


OWN_FILES = {
    "good.csv": GOOD,
    "blank.csv": f"{GOOD} \t,y\n",
    "no-label.csv": f"{GOOD}a dog,\n",
    "one-label.csv": "text,label\na cat,x\n",
    "twice.csv": "text,label,label\na,x,y\n",
    "quote.csv": 'text,label\na,x\n"b,x\nc,x\nd,x\n',
    "cr.csv": "text,label\ra cat,x\na dog,y\n",
    "comma.tsv": "text,label\na,x\n",
    "dev.csv": "text,label\na cat,z\n",
    "test.json": '[{"text": "a", "label": "x"}, {"text": "b"}]',
    "scores.csv": "text,label\na,1.5\na,good\n",
    "listed.csv": "text,label\na cat,[1\n",
}


@pytest.mark.parametrize(
    ("options", "setting", "kind", "value", "part"),
    [
        ("--train blank.csv --dev good.csv", "blank.csv", "missing", None, "line 4"),
        ("--train no-label.csv --dev good.csv", "no-label.csv", "wrong_type", "", "line 4"),
        ("--train one-label.csv --dev good.csv", "one-label.csv", "out_of_range", 1, "labels is 1"),
        ("--train twice.csv --dev good.csv", "twice.csv", "conflict", "label", "'label'"),
        ("--train quote.csv --dev good.csv", "quote.csv", "damaged", None, "line 3"),
        ("--train cr.csv --dev good.csv", "cr.csv", "damaged", None, "LF"),
        ("--train comma.tsv --dev good.csv", "comma.tsv", "missing", "text", ".csv"),
        ("--train good.csv --dev dev.csv", "dev.csv", "unknown", "z", ""),
        ("--train good.csv --dev good.csv --test test.json", "test.json", "missing", None, ""),
        ("--train scores.csv --dev good.csv --kind regression", "scores.csv", "wrong_type", "good", ""),
        ("--train listed.csv --dev good.csv --kind multi_label", "listed.csv", "wrong_type", "[1", ""),
        ("--train pipe.csv --dev good.csv", "pipe.csv", "wrong_type", None, ""),
        ("--task SQuAD --data .", "--task", "unknown", "SQuAD", ""),
        ("--task RTE --data named", "RTE/train.tsv", "unknown", "perhaps", ""),
        ("--task RTE --data utf-16", "RTE/train.tsv", "damaged", None, ""),
        ("--task RTE --data cut.tar.xz", "cut.tar.xz", "damaged", None, ""),
    ],
)
def test_invalid_files_and_options_are_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, options: str, setting: str, kind: str, value: Any, part: str
) -> None:
    monkeypatch.chdir(lab.folder)
    for name, text in OWN_FILES.items():
        lab.write(name, text)
    os.mkfifo("pipe.csv")
    folder = lab.write_glue("named", "RTE", RTE_HEADER, train=["0\ta\tb\tperhaps"], dev=RTE["dev"])
    lab.write_glue("utf-16", "RTE", RTE_HEADER, dev=RTE["dev"])
    lab.write("utf-16/RTE/train.tsv", f"{RTE_HEADER}\n".encode("utf-16"))
    lab.write("cut.tar.xz", Path(pack(folder, lab.folder / "c.tar.xz")).read_bytes()[:100])
    (issue,) = lab.refused(*options.split())
    assert (issue.setting, issue.kind, issue.value) == (setting, kind, value)
    assert part in str(issue)


def test_a_blank_line_is_refused_in_a_single_column_and_ignored_at_the_end_of_several(lab: Lab) -> None:
    """Every table format refuses an empty text, so that the index of a row follows from its line."""
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        for text, place in (("text\na\n\nb\n", 3), ("text\na\n\n", 3), ("text\n \nb\n", 2)):
            file = lab.write(f"own.{suffix}", text)
            (issue,) = raised_issues(labelled_table.read_table, file, Columns(("text",)), "test")
            assert (issue.setting, issue.kind, issue.message[:6]) == (file, "missing", f"line {place}")
        file = lab.write(f"own.{suffix}", f"text{separator}label\na{separator}x\nb{separator}y\n\n \n\n")
        table = labelled_table.read_table(file, Columns(("text",), "label"), "train")
        assert [(row.place, *row.texts) for row in table.rows] == [("line 2", "a"), ("line 3", "b")]


def test_a_table_may_have_long_texts_and_quotes_in_a_tsv(lab: Lab) -> None:
    """The default limit of Python's csv module is 131,072 characters per field."""
    long = "the cat, " * 20_000
    for name, text, texts in (
        ("a.csv", f'text,label\n"{long}",x\n', [long]),
        ("a.tsv", 'text\tlabel\n"a\tx\nb "c"\ty\n', ['"a', 'b "c"']),
    ):
        table = labelled_table.read_table(lab.write(name, text), Columns(("text",), "label"), "train")
        assert [row.texts for row in table.rows] == [(text,) for text in texts]
