"""manifest.json of shards is read as a stranger's: what does not hold together is refused in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_dp.config import Config, ConfigError, read_manifest
from bert_dp.corpus import builder, command, shards
from bert_dp.data import Shards
from launcher.job import input_issues
from tests.helpers import issues_of, make_config
from tests.shards import edited_manifest, write_manifest, write_shards

Edit = Callable[[dict[str, Any]], Any]
VOCAB, LENGTH = 64, 16


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory beside which a private file stands."""
    (tmp_path / "private.txt").write_bytes(bytes(96 * LENGTH * 2))
    return write_shards(tmp_path / "s", vocab_size=VOCAB, length=LENGTH)


def config(place: Path) -> Config:
    return make_config(f"data.path={place}", f"data.sequence_length={LENGTH}", f"model.vocab_size={VOCAB}")


def shard(manifest: dict[str, Any], **changed: Any) -> None:
    manifest["train"]["shards"][0].update(changed)


def no_shards(manifest: dict[str, Any]) -> None:
    manifest["train"] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}


EDITS: dict[str, tuple[Edit, str]] = {
    "a path upwards": (lambda m: shard(m, file="../private.txt"), "train.shards.0.file"),
    "an absolute path": (lambda m: shard(m, file="/etc/passwd"), "train.shards.0.file"),
    "the directory itself": (lambda m: shard(m, file=".."), "train.shards.0.file"),
    "a NUL in a name": (lambda m: shard(m, file="a\0b"), "train.shards.0.file"),
    "a long name": (lambda m: shard(m, file="a" * 300), "train.shards.0.file"),
    "an escape in a name": (lambda m: shard(m, file="\x1b]0;owned\x07"), r"got '\x1b]0;owned\x07'"),
    "a path to the tokenizer": (lambda m: m["tokenizer"].update(file="../private.txt"), "tokenizer.file"),
    "a file named twice": (lambda m: shard(m, file="held_out-00000.bin", sequences=20, bytes=640), "twice"),
    "more sequences than bytes": (lambda m: shard(m, sequences=10**9), "sequences take 32000000000"),
    "a fraction of sequences": (lambda m: shard(m, sequences=1e9), "train.shards.0.sequences"),
    "a true number": (lambda m: shard(m, sequences=True), "train.shards.0.sequences"),
    "a text for a number": (lambda m: m.update(vocab_size="64"), "vocab_size"),
    "fewer bytes than there are": (lambda m: shard(m, bytes=0), "0 bytes, 96 sequences take 3072"),
    "a sum that is none": (lambda m: m["train"].update(sequences=10**9), "train.sequences: 1000000000"),
    "tokens that are none": (lambda m: m["held_out"].update(tokens=1), "held_out.tokens: 1"),
    "no shards": (no_shards, "train: holds no sequences"),
    "no documents": (lambda m: m["train"].update(documents=0), "train: holds no sequences"),
    "a negative count": (lambda m: m["train"].update(documents=-1), "train.documents"),
    "no split": (lambda m: m.pop("held_out"), "held_out: Field required"),
    "a split that is a list": (lambda m: m.update(train=[]), "train: "),
    "too few blocks": (lambda m: shard(m, block_bytes=64, blocks=["0" * 16] * 9), "3072 bytes need 48"),
    "no block hashes at all": (lambda m: shard(m, block_bytes=64, blocks=[]), "3072 bytes need 48"),
    "blocks of no size": (lambda m: shard(m, blocks=[]), "stand together"),
    "blocks of nothing": (lambda m: shard(m, block_bytes=0, blocks=[]), "block_bytes"),
    "blocks of all memory": (lambda m: shard(m, block_bytes=2**62, blocks=["0" * 16]), "block_bytes"),
    "an id beyond": (lambda m: shard(m, greatest_id=64), "token id 64, but the vocabulary has 64"),
    "a mask beyond": (lambda m: m["special_tokens"].update(mask=64), "special_tokens.'mask': token id 64"),
    "no mask": (lambda m: m["special_tokens"].pop("mask"), "no mask"),
    "only special tokens": (lambda m: m.update(num_special=64), "num_special: 64"),
    "another type of token": (lambda m: m.update(dtype="float64"), "dtype"),
    "an endless sequence": (lambda m: m.update(sequence_length=10**400), "sequence_length"),
    "a sequence of nothing": (lambda m: m.update(sequence_length=0), "sequence_length"),
    "an entropy that is none": (lambda m: m.update(unigram_entropy_nats=float("nan")), "unigram_entropy"),
    "a hash that is none": (lambda m: shard(m, sha256="0"), "sha256"),
    "sources that are none": (lambda m: m.update(sources=[3]), "sources.0"),
    "counts that are none": (lambda m: m.update(dropped={"empty": "x"}), "dropped.empty"),
    "a build that is a tree": (lambda m: m.update(build={"a": {"b": []}}), "build.a"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_does_not_hold_together_is_refused_by_every_reader(
    place: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, message = EDITS[name]
    with edited_manifest(place) as edited:
        edit(edited)
    issues = issues_of(read_manifest, place)
    text = "\n".join(issues)
    assert message in text
    assert "manifest.json" in text
    assert "data build" in text
    assert text.isprintable() or "\n" in text
    assert shards.verify(place) == list(issues)
    assert [i.removeprefix("data.path: ") for i in input_issues(config(place))] == list(issues)
    assert issues_of(builder.ensure, config(place)) == issues_of(shards.inspect, place) == issues
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert builder.main(["inspect", str(place)]) == 2
    assert "error: " in capsys.readouterr().err


def test_what_holds_together_is_read_by_every_reader(place: Path) -> None:
    manifest = read_manifest(place)
    assert shards.verify(place) == input_issues(config(place)) == []
    assert builder.ensure(config(place)) == place
    assert len(Shards(place, manifest, "train")) == manifest.train.sequences == 96


def test_a_key_of_a_later_version_and_a_manifest_of_an_earlier_one_open(place: Path) -> None:
    with edited_manifest(place) as edited:
        edited["licence"] = {"of": ["the", "text"]}
        assert "greatest_id" not in edited["train"]["shards"][0]
        assert "blocks" not in edited["train"]["shards"][0]
    assert read_manifest(place).train.shards[0].greatest_id is None


MAKE: dict[str, Callable[[Path], None]] = {
    "a fifo": lambda file: os.mkfifo(file),
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a directory": lambda file: file.mkdir(),
    "a link to nothing": lambda file: file.symlink_to("gone"),
    "a link out": lambda file: file.symlink_to(file.parent.parent / "private.txt"),
    "a relative link out": lambda file: file.symlink_to("../private.txt"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in ("manifest.json", "tokenizer.json", "train-00000.bin")
        for what in MAKE
        if not (name == "manifest.json" and "link out" in what)  # what it says is checked
    ],
)
def test_what_is_no_file_of_the_directory_is_refused_and_never_waited_for(
    place: Path, name: str, what: str
) -> None:
    private = place.parent / "private.txt"
    private.write_bytes((place / name).read_bytes())  # even with the right bytes
    (place / name).unlink()
    MAKE[what](place / name)
    with pytest.raises(ConfigError, match=name):
        read_manifest(place)
    assert shards.verify(place)
    assert input_issues(config(place))


def test_links_within_the_directory_are_followed(place: Path) -> None:
    (place / "train-00000.bin").rename(place / "data")
    (place / "train-00000.bin").symlink_to("data")
    assert shards.verify(place) == []


def beyond(place: Path, at: int = -1, **told: Any) -> None:
    """Put an id of 64 + 936 into the shards, with the right hash."""
    file = place / "train-00000.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[at] = 1000
    file.write_bytes(tokens.tobytes())
    with edited_manifest(place) as edited:
        shard(edited, sha256=hashlib.sha256(tokens.tobytes()).hexdigest(), **told)


def test_an_id_beyond_the_vocabulary_is_found_by_the_start_and_by_inspect(place: Path) -> None:
    beyond(place, greatest_id=63)
    manifest = read_manifest(place)  # no token is read
    (problem,) = shards.check_blocks(place, manifest)
    assert "train-00000.bin: token id 1000, but the vocabulary has 64" in problem
    (problem,) = shards.verify(place)
    assert "token id 1000" in problem
    with pytest.raises(ConfigError, match="token id 1000"):
        builder.ensure(config(place))


def test_an_id_beyond_the_vocabulary_is_found_in_any_part_of_a_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond(place, greatest_id=63, at=0)
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)
    (problem,) = shards.verify(place)
    assert "token id 1000" in problem


def test_a_greatest_id_and_block_hashes_that_are_not_the_files_are_found_by_inspect(place: Path) -> None:
    with edited_manifest(place) as edited:
        shard(edited, greatest_id=63, block_bytes=1024, blocks=["0" * 16] * 3)
        edited["held_out"]["shards"][0]["greatest_id"] = 8
    problems = "\n".join(shards.verify(place))
    assert "the block hashes of the manifest are not those of the file" in problems
    assert "expected greatest token id 8, found" in problems


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([-1, 0, 10**400, 2**63, "../../private.txt", "\x1b[2J", 1e9, "a" * 300, [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value in a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [p for key, value in items for p in places(value, (*path, key))]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere_gives_a_manifest_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("any")
    write_shards(place, vocab_size=VOCAB, length=LENGTH)
    manifest = json.loads((place / "manifest.json").read_text())
    changed = copy.deepcopy(manifest)
    path = data.draw(st.sampled_from(places(manifest)))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON)
    write_manifest(place, changed)
    issues: tuple[str, ...] = ()
    try:
        read_manifest(place)
    except ConfigError as error:
        issues = list(map(str, error.issues))
    assert all(issue.isprintable() for issue in issues), issues
    assert shards.verify(place) == list(issues)
    shutil.rmtree(place)


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, "\0"])
def test_what_is_no_object_is_no_manifest(place: Path, text: str) -> None:
    (place / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        read_manifest(place)
