"""Tests of the models of result files: files are read back unchanged, and a damaged or foreign file gives one
line that names it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.files.models import FailureKind, kind_of_error, kind_of_text
from launcher import results
from launcher.evaluate.glue_scores import Glue
from launcher.scale import models
from launcher.tune.lr_search import TuneLr
from launcher.tune.throughput import TuneBatch
from tests import scaling_fixture, tune_fixture
from tests.glue_fixture import evaluation, scored_task
from tests.helpers import raised_issues, read_json

RAW = Path(__file__).parents[2] / "benchmarks" / "raw"
SCALING = RAW / "2026-11-21-scaling"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every leaf."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, (dict, list)):
        for key, inside in items:
            yield from flat(inside, f"{path}.{key}")
    else:
        yield path, value


FILES = [
    (read_json(SCALING / "grid.json"), models.GridFile),
    (scaling_fixture.scaling()["profile"], models.StepProfile),
    (tune_fixture.batch(), TuneBatch),
    (tune_fixture.batch(inconclusive="no signal"), TuneBatch),
    (tune_fixture.unmeasured(), TuneBatch),
    (tune_fixture.lr(), TuneLr),
    (scaling_fixture.scaling(prediction=True, modes=("weak", "strong")), models.Scaling),
    (scaling_fixture.nulls(), models.Scaling),
    (results.plain(evaluation([scored_task("RTE", [0.5, None])])), Glue),
]


@pytest.mark.parametrize(("data", "model"), FILES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_file_is_read_back_unchanged(data: Any, model: type[results.StoredFile], tmp_path: Path) -> None:
    file = results.parse(data, model, "it")
    assert dict(flat(json.loads(json.dumps(data)))).items() <= dict(flat(results.plain(file))).items()
    results.write(tmp_path / "it.json", file)
    assert results.read(tmp_path / "it.json", model) == file
    assert json.loads(results.to_json(file)) == read_json(tmp_path / "it.json")


def test_unknown_keys_are_ignored() -> None:
    data = scaling_fixture.scaling() | {"of_tomorrow": {"x": [1]}}
    data["cells"][0]["of_tomorrow"] = 1
    assert not hasattr(results.parse(data, models.Scaling, "it"), "of_tomorrow")


def damaged(**changes: Any) -> bytes:
    """Return a scaling.json whose second cell has `changes`."""
    data = scaling_fixture.scaling()
    data["cells"][1] |= changes
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"\xff", "is not JSON"),
        (b'"text"', "valid dictionary"),
        (damaged(world_size="2"), "cells.1.world_size: "),
        (damaged(efficiency=float("nan")), "cells.1.efficiency: "),
        (damaged(tensor=7), "cells.1: tensor: 7 does not divide"),
        (json.dumps(scaling_fixture.scaling() | {"schema_version": 2}).encode(), "schema_version: "),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_damaged_file_gives_one_line_with_a_hint(tmp_path: Path, text: bytes | None, problem: str) -> None:
    path = tmp_path / "scaling.json"
    if text is not None:
        path.write_bytes(text)
    (issue,) = raised_issues(results.read, path, models.Scaling)
    kind = "not_found" if text is None else "damaged"
    assert (issue.setting, issue.kind, issue.hint) == (str(path), kind, models.Scaling.hint)
    assert problem in issue.message
    assert "\n" not in str(issue)
    assert len(str(issue)) < 400
    assert results.find(path, models.Scaling) is None


def test_a_large_or_special_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 100)
    (tmp_path / "large.json").write_text(" " * 101)
    for path in (tmp_path / "large.json", tmp_path, Path("/dev/zero")):
        (issue,) = raised_issues(results.read, path, models.Scaling)
        assert issue.kind == "not_found"


def test_the_result_of_another_verb_is_refused() -> None:
    (issue,) = raised_issues(results.parse, tune_fixture.batch(), TuneLr, "it")
    assert issue.message.startswith("kind: ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device_memory"),
        ("AcceleratorError: CUDA error: out of memory", "device_memory"),
        ("MemoryError", "host_memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "host_memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "host_memory"),
        ("OSError: [Errno 28] No space left on device", "disk"),
        ("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1", "peer_gone"),
        ("DistBackendError: NCCL error: ncclRemoteError: a peer", "peer_gone"),
        ("ConfigError: optim.lr: no", "bad_input"),
        ("ValueError: the shelf is out of memory foam", "error"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "error"),
    ],
)
def test_the_kind_of_an_exception_follows_from_its_text(text: str, kind: FailureKind) -> None:
    assert kind_of_text(text) == kind


def test_the_kind_of_an_exception_follows_from_its_attribute_or_errno() -> None:
    errors = [OSError(28, "disk full"), OSError(122, "over the quota"), OSError(2, "no such file")]
    assert [kind_of_error(error) for error in errors] == ["disk", "disk", "error"]
    assert kind_of_error(MemoryError()) == "host_memory"
    assert kind_of_error(ConfigError([Issue("optim.lr", "conflict", "no")])) == "bad_input"
    known = ValueError("5 steps in a row")
    known.failure_kind = "not_finite"  # type: ignore[attr-defined]
    assert kind_of_error(known) == "not_finite"
