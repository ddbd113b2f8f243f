"""Tests of the readers: every format and compression, and every kind of bad input."""

import gzip
import io
import json
import lzma
import sys
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_dp.config import BuildConfig, ConfigError, Issue
from bert_dp.data import readers
from tests.helpers import raised_issues

DOCS = ["First document.", "Zwölf Boxkämpfer — jagen", 'third "quoted"', "x" * 5000]


def read(*items: object, **options: Any) -> list[str]:
    found = readers.resolve([str(i) for i in items], BuildConfig(**options))
    return [text for source in found for text in readers.documents(source)]


def as_text(docs: list[str]) -> bytes:
    return ("\n\n".join(docs) + "\n").encode()


def as_jsonl(docs: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(docs)).encode()


def as_parquet(docs: list[str]) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": docs, "n": list(range(len(docs)))}), file, row_group_size=2)
    return file.getvalue()


def as_zst(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


Writer = Callable[[list[str]], bytes]
Compressor = Callable[[bytes], bytes]
FORMATS: dict[str, Writer] = {".txt": as_text, ".jsonl": as_jsonl, ".parquet": as_parquet}
COMPRESSIONS: dict[str, Compressor] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": as_zst}


def fails(path: Path | str, kind: str, *parts: str) -> Issue:
    """Check that reading raises one issue of `kind` that names the file and `parts`. Return the issue."""
    (issue,) = raised_issues(read, path)
    assert (issue.setting, issue.kind) == (str(path), kind)
    assert all(part in issue.message for part in parts), issue
    assert str(issue).isprintable()
    return issue


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_and_compression_reads_the_same_documents(
    tmp_path: Path, form: str, compression: str
) -> None:
    path = tmp_path / f"dätä dir {form}{compression}"
    path.write_bytes(COMPRESSIONS[compression](FORMATS[form](DOCS)))
    if form == ".parquet" and compression:
        fails(path, "damaged", "compressed")
    else:
        assert read(path) == DOCS


def test_a_zst_file_may_have_a_large_window(tmp_path: Path) -> None:
    """The frame is built by hand: one raw block, and the 256 MiB window of `zstd --long=28`."""
    pytest.importorskip("zstandard")
    text = b"some words\n"
    block = (len(text) << 3 | 1).to_bytes(3, "little") + text  # the last block, uncompressed
    path = tmp_path / "a.txt.zst"
    path.write_bytes(bytes.fromhex("28b52ffd00") + bytes([(28 - 10) << 3]) + block)
    assert read(path) == ["some words"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_blank_line_ends_a_document(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.txt{compression}"
    text = "\ufeff\n \none\ntwo\r\n\n\t\n\nthree\n\nfour\nfive"
    path.write_bytes(COMPRESSIONS[compression](text.encode()))
    assert read(path, documents="blank_line") == ["one\ntwo", "three", "four\nfive"]
    assert read(path) == ["one", "two", "three", "four", "five"]


def test_a_document_of_many_lines_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 2**20)
    path = tmp_path / "a.txt"
    path.write_text(("x" * 1023 + "\n") * 1024 + "\n" + "y\n")
    assert len(read(path, documents="blank_line")) == 2
    path.write_text(("x" * 1023 + "\n") * 1030)
    (issue,) = raised_issues(read, path, documents="blank_line")
    assert (issue.setting, issue.kind) == (str(path), "out_of_range")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_streams_of_a_compressed_file_may_split_a_record_or_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """Chunks have a minimum size, because a long line is joined from its chunks."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7)
    path = tmp_path / f"a.json{compression}"
    compress, data = COMPRESSIONS[compression], '[{"text": "na\u00efve"}, {"text": "b"}]'.encode()
    for at in range(1, len(data)):
        path.write_bytes(compress(data[:at]) + compress(data[at:]))
        assert read(path) == ["na\u00efve", "b"]
        *chunks, last = readers._chunks(path)
        assert min(map(len, chunks), default=7) >= 7
        assert b"".join([*chunks, last]) == data


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_truncated_file_or_garbage_after_a_stream_is_refused(tmp_path: Path, compression: str) -> None:
    """Zeros may follow a .gz or .xz stream, and a skippable frame may follow a .zst stream."""
    path, compress = tmp_path / f"a.txt{compression}", COMPRESSIONS[compression]
    one, two = compress(b"one\n"), compress(b"two\n" * 1000)
    skippable = b"\x5a\x2a\x4d\x18" + (30).to_bytes(4, "little") + b"?" * 30
    paddings = (b"", skippable) if compression == ".zst" else (b"", b"\0" * 8, b"\0" * 2**20)
    for padding in paddings:
        path.write_bytes(one + padding + two + padding)
        assert read(path) == ["one", *["two"] * 1000]
    cuts = [two[:cut] for cut in range(1, len(two))]
    garbage = [b"garbage", b"garbage" * 9, b"?" + two[1:], b"\0" * 4 + b"?" + two[1:]]
    for rest in (*cuts, *garbage, *([b"\0"] if compression == ".zst" else [])):
        path.write_bytes(one + rest)
        fails(path, "damaged")
    for cut in range(1, len(one)):
        path.write_bytes(one[:cut])
        fails(path, "damaged")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_decompression_bomb_is_read_in_little_memory(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"bomb.txt{compression}"
    path.write_bytes(COMPRESSIONS[compression]((b"x" * (2**20 - 1) + b"\n") * 128))
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    try:
        assert sum(len(text) + 1 for text in readers.documents(readers.Source("", path))) == 2**27
        # zstd unpacks a whole chunk at once
        assert tracemalloc.get_traced_memory()[1] < (2**27 if compression == ".zst" else 2**25)
    finally:
        tracemalloc.stop()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0\ufeff"), max_size=30)
    )
)
def test_lines_may_cross_chunk_borders(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    wanted = [*(line for line in lines if line and not line.isspace()), "end"]
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes("\r\n".join([*lines, "end"]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", 7)
        assert read(path) == wanted


def test_globs_and_directories_are_sorted_and_literal_names_win(tmp_path: Path) -> None:
    """Hidden files and folders in a directory are skipped. The directory itself may be hidden."""
    folder = tmp_path / ".above"
    for name in ("b.txt", "a.txt", "[x].txt", "sub/c.jsonl", "sub/skipped.py", ".hidden.txt", ".git/HEAD"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_jsonl([name]) if name.endswith("jsonl") else name.encode())
    assert read(folder / "*.txt") == ["[x].txt", "a.txt", "b.txt"]
    assert read(folder) == ["[x].txt", "a.txt", "b.txt", "sub/c.jsonl"]
    assert read(folder / "[x].txt") == ["[x].txt"]
    assert read(folder / "b.txt", folder / "a.txt") == ["b.txt", "a.txt"]


BAD: list[tuple[str, bytes, str, str]] = [
    # file, content, kind of the issue, position
    ("bad.txt", b"good\nna\xefve", "unsupported", "line 2, byte 3"),
    ("bad.txt", "text".encode("utf-16"), "unsupported", "line 1"),
    ("bad.json", '[{"text": "na\u00efve"}]'.encode("latin1"), "unsupported", "0xef"),
    ("empty.txt", b"\n \n\t\n", "missing", ""),
    ("bad.jsonl", b'{"text": "fine"}\n\n{"text": "cut\n', "damaged", "line 3"),
    ("bad.jsonl", b'{"text": "fine"}\n\n{"content": "x"}\n', "missing", "line 3"),
    ("bad.jsonl", b'{"text": "\\ud800"}\n', "damaged", "line 1"),
    ("bad.json", b"[" * 100_000, "damaged", ""),
    ("bad.json", b"[]", "missing", ""),
    ("long.txt", b"short\n" + b"a" * 3 * 2**20, "out_of_range", "line 2"),
]


@pytest.mark.parametrize(("name", "content", "kind", "place"), BAD, ids=lambda value: repr(value)[:30])
def test_bad_content_is_refused_with_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, kind: str, place: str
) -> None:
    """A line that does not end is refused before it fills the memory."""
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 2**20)
    (tmp_path / name).write_bytes(content)
    fails(tmp_path / name, kind, place)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([form + compression for form in (*FORMATS, ".json") for compression in COMPRESSIONS]),
    st.booleans(),
    st.binary(max_size=300) | st.text(max_size=100).map(str.encode) | st.just(b'[{"text": "a"}, 1'),
)
def test_any_bytes_give_documents_or_one_issue(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, packed: bool, content: bytes
) -> None:
    """`packed`: compress the bytes by the suffix, so that they reach the reader of the format."""
    folder = tmp_path_factory.mktemp("any")
    path = folder / f"a{suffix}"
    path.write_bytes(COMPRESSIONS[readers.suffixes(path)[1]](content) if packed else content)
    try:
        assert all(text.strip() for text in read(path))
    except ConfigError as error:
        (issue,) = error.issues
        assert issue.setting.startswith(str(path))
        assert issue.kind in ("damaged", "missing", "wrong_type", "unsupported", "out_of_range")
        assert str(issue).isprintable()
    assert [*folder.iterdir()] == [path]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_whole_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    docs = [*DOCS[:3], 'a ] "quote", a } and a \\ in a text', "\u4e16\u754c"]
    path = tmp_path / "array.json"
    records = [{"id": [i, {}], "body": d} for i, d in enumerate(docs)]
    path.write_text("\ufeff \n" + json.dumps(records, indent=indent, ensure_ascii=False) + "\n", "utf-8")
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7)
    assert read(path, text_field="body") == docs
    monkeypatch.setattr(readers, "MAX_ARRAY_BYTES", path.stat().st_size - 1)
    assert "JSONL" in (fails(path, "out_of_range").hint or "")


def test_a_key_may_be_a_path_of_nested_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that contains dots takes precedence."""
    records = [{"a": {"b": "nested", "c": {"d.e": "both"}}, "a.x": "dotted"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(records[0]))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    fake_hub(monkeypatch, records)
    for source in (tmp_path / "a.jsonl", tmp_path / "a.parquet", "hub:org/name"):
        for key, text in (("a.b", "nested"), ("a.c.d.e", "both"), ("a.x", "dotted")):
            assert read(source, text_field=key) == [text]
        for key in ("a.y", "a.b.z", "a", "b"):
            with pytest.raises(ConfigError):
                read(source, text_field=key)


def test_an_unknown_suffix_is_refused_unless_its_format_is_given(tmp_path: Path) -> None:
    path, packed = tmp_path / "big.csv", tmp_path / "compressed.csv.gz"
    path.write_text("id,text\n1,one\n")
    packed.write_bytes(gzip.compress(b"one\n"))
    (tmp_path / "part-00000").write_text("no suffix is text\n")
    *unknown, gone = raised_issues(read, path, packed, tmp_path / "gone.txt")
    assert [(issue.setting, issue.kind, issue.value, issue.other) for issue in unknown] == [
        ("data.sources", "unknown", str(each), "data.build.source_format") for each in (path, packed)
    ]
    assert gone.kind == "not_found"
    assert read(tmp_path / "part-00000") == ["no suffix is text"]
    assert read(tmp_path, source_format="text") == ["id,text", "1,one", "one", "no suffix is text"]


def test_bad_parquet_files_are_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bad.parquet"
    path.write_bytes(as_parquet(DOCS)[:-9])
    fails(path, "damaged")
    parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    assert fails(path, "missing", "body").value == "text"
    parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    fails(path, "wrong_type", "row 2", "NoneType")


def test_missing_packages_give_an_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = {"a.parquet": "pyarrow", "a.txt.zst": "zstandard", "hub:some/set": "datasets"}
    for name, module in modules.items():
        for package in (module, f"{module}.parquet"):
            monkeypatch.setitem(sys.modules, package, None)
        if module != "datasets":
            Path(name).write_bytes(b"anything")
        (issue,) = raised_issues(read, name)
        assert (issue.setting, issue.kind, issue.value) == (name, "needs_package", module)
        assert (issue.hint or "").startswith(f"pip install '{module}>=")


def fake_hub(monkeypatch: pytest.MonkeyPatch, rows: list[object]) -> list[object]:
    calls: list[object] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        calls.append((name, config, split, streaming))
        if name == "no/such":
            raise FileNotFoundError("no/such is not on the hub")
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_hub_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, [{"text": d} for d in DOCS])
    assert read("hub:org/name:en", "hub:plain") == DOCS * 2
    assert calls == [("org/name", "en", "train", True), ("plain", None, "train", True)]
    fake_hub(monkeypatch, [{"text": "fine"}, {"body": "x"}])
    fails("hub:org/name", "missing", "row 2")
    fails("hub:no/such", "not_found", "FileNotFoundError")


def test_builtin_is_two_megabytes_of_prose_and_imports_nothing() -> None:
    before = {*sys.modules}
    docs = read("builtin")
    assert 1_000_000 < sum(map(len, docs)) < 6_000_000
    assert len(docs) > 3000
    assert any("Return True if" in doc for doc in docs)
    assert {*sys.modules} - before <= {"_ast"}
