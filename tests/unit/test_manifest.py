"""Tests of reading manifest.json as untrusted input: each fault is refused in one line."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_dp.config import Config, ConfigError, Issue, Manifest, no_effect, read_manifest
from bert_dp.data import build, shards
from bert_dp.data.stream import Shards
from bert_dp.files.run_facts import CheckpointFacts
from launcher.job import input_issues
from launcher.run.train import change_issues
from tests.e2e.cli import refused
from tests.helpers import make_config, raised_issues
from tests.shards import edited_manifest, write_manifest, write_shards
from tests.states import FACTS

Edit = Callable[[dict[str, Any]], Any]
VOCAB, LENGTH = 64, 16


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "s", vocab_size=VOCAB, length=LENGTH)


def config(place: Path) -> Config:
    return make_config(f"data.path={place}", f"data.sequence_length={LENGTH}", f"model.vocab_size={VOCAB}")


def shard(manifest: dict[str, Any], **changed: Any) -> None:
    manifest["train"]["shards"][0].update(changed)


NO_SHARDS: dict[str, Any] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}
EDITS: dict[str, tuple[Edit, str]] = {
    "a path to a parent directory": (lambda m: shard(m, file="../private.txt"), "train.shards.0.file"),
    "a tokenizer in a parent directory": (
        lambda m: m["tokenizer"].update(file="../private.txt"),
        "tokenizer.file",
    ),
    "more sequences than bytes": (lambda m: shard(m, sequences=10**9), "32000000000"),
    "a wrong total": (lambda m: m["train"].update(sequences=10**9), "train: 1000000000 sequences"),
    "no shards": (lambda m: m.update(train=NO_SHARDS), "train"),
    "a mask token out of range": (lambda m: m["special_tokens"].update(mask=64), "special_tokens: 'mask'"),
    "no mask token": (lambda m: m["special_tokens"].pop("mask"), "special_tokens"),
    "only special tokens": (lambda m: m.update(num_special=64), "num_special"),
    "an unknown build value": (lambda m: m.update(build={"dedup": "some"}), "build.dedup"),
    "another version": (lambda m: m.update(version=2), "version 2"),
    "an entropy of NaN": (lambda m: m.update(unigram_entropy_nats=float("nan")), "unigram_entropy"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_faulty_manifest_is_refused_by_every_reader(place: Path, name: str) -> None:
    edit, field = EDITS[name]
    with edited_manifest(place) as edited:
        edit(edited)
    issues = raised_issues(read_manifest, place)
    kind = "unsupported" if name == "another version" else "damaged"
    assert {(i.setting, i.kind, i.hint) for i in issues} == {
        (str(place / "manifest.json"), kind, Manifest.hint)
    }
    assert any(field in i.message for i in issues)
    assert raised_issues(build.ensure, config(place)) == raised_issues(shards.inspect, place) == issues
    lines = [*map(str, issues)]
    assert [str(i).removeprefix("data.path: ") for i in input_issues(config(place))] == lines
    assert refused("data", "inspect", str(place)).splitlines() == [f"error: {line}" for line in lines]


def test_a_run_takes_its_build_settings_from_its_shards(place: Path) -> None:
    with edited_manifest(place) as edited:
        edited["build"] = {"dedup": "near", "normalize": False, "sequence_length": LENGTH}
    manifest, run = read_manifest(place), config(place)
    assert not any("data.build" in line for line in manifest.warnings(run))
    built = manifest.with_build(run)
    assert (built.data.build.dedup, built.data.build.normalize) == ("near", False)
    assert no_effect(built) == []
    assert manifest.warnings(built) == manifest.warnings(run)
    other = make_config("data.build.dedup=none", data={"sources": None, "path": str(place)})
    (line,) = [line for line in manifest.warnings(other) if "data.build" in line]
    assert line == f"data.build.dedup: none has no effect; {place} was built with near"
    facts = CheckpointFacts(**{**FACTS, "step": 1, "config": built.model_dump(mode="json")})
    assert change_issues(facts, run, "auto") == [], "a resumed run keeps its first configuration"


def test_a_valid_manifest_and_linked_shards_are_read_by_every_reader(place: Path) -> None:
    (place / "train-00000.bin").rename(place / "data")
    (place / "train-00000.bin").symlink_to("data")
    manifest = read_manifest(place)
    assert input_issues(config(place)) == []
    assert build.ensure(config(place)) == place
    assert len(Shards(place, manifest, "train")) == manifest.train.sequences == 96


MAKE: dict[str, Callable[[Path], None]] = {
    "a fifo": lambda file: os.mkfifo(file),
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a directory": lambda file: file.mkdir(),
    "a link to nothing": lambda file: file.symlink_to("gone"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train-00000.bin"])
@pytest.mark.parametrize("what", MAKE)
def test_anything_but_a_regular_file_is_refused_without_waiting(place: Path, name: str, what: str) -> None:
    (place / name).unlink()
    MAKE[what](place / name)
    (issue,) = raised_issues(read_manifest, place)
    assert (issue.setting, issue.kind in ("not_found", "damaged")) == (str(place / name), True)
    assert shards.verify(place)
    assert input_issues(config(place))


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
    """Return the paths of all values in a JSON tree."""
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
    issues: tuple[Issue, ...] = ()
    try:
        read_manifest(place)
    except ConfigError as error:
        issues = error.issues
    assert all(str(issue).isprintable() for issue in issues), issues
    assert shards.verify(place) == list(issues)
    shutil.rmtree(place)
