"""Test checkpoints: exact round trips, atomic saves, and a named problem for every damaged file."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_dp import files
from bert_dp.config import ConfigError
from bert_dp.parallel import State
from bert_dp.training import checkpoint
from tests.helpers import read_json
from tests.states import FACTS
from tests.tensors import bits, flat


def make_state(seed: int = 0) -> State:
    g = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "a.weight": torch.randn(3, 5, generator=g),
            "b": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
            "wide": torch.randn(4, generator=g, dtype=torch.float64),
            "half": torch.randn(4, generator=g).bfloat16(),
        },
        "optimizer": {"a.weight/exp_avg": torch.randn(3, 5, generator=g), "a.weight/step": torch.tensor(7.0)},
        "scaler": {
            "scale": torch.tensor(65536.0, dtype=torch.float64),
            "growth_factor": torch.tensor(2.0).double(),
        },
    }


def save(folder: Path, step: int, keep: int = 9) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**FACTS, "samples": step * 8, "elapsed_s": 0.1}
    return checkpoint.save_checkpoint(folder, step, make_state(step), facts, keep)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    """The checkpoint includes the tokenizer of the run, which is verified too."""
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    path = save(tmp_path / "checkpoints", 100)
    assert path.name == "step-00000100"
    tensors = {"model.safetensors", "optimizer.safetensors"}
    assert names(path) == {*tensors, "state.json", "manifest.json", "tokenizer.json"}
    state, facts = checkpoint.load(path)
    assert bits(flat(state)) == bits(flat(make_state(100)))
    assert (facts.step, facts.samples, facts.elapsed_s) == (100, 800, 0.1)
    assert checkpoint.check(path) is None
    assert read_json(path / "manifest.json")["files"] == {
        name: {"bytes": (path / name).stat().st_size, "sha256": checkpoint.sha256(path / name)}
        for name in names(path) - {"manifest.json"}
    }
    assert (path / "tokenizer.json").read_text() == '{"a": 1}'
    (path / "tokenizer.json").write_text('{"a": 2}')
    assert "tokenizer.json: SHA-256 differs" in str(checkpoint.check(path))


def test_newest_checkpoints_by_step_number_are_kept_and_listed_first(tmp_path: Path) -> None:
    for step in (1, 2, 99_999_999, 100_000_000):
        save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-100000000", "step-99999999"]
    assert names(tmp_path) == {"step-100000000", "step-99999999"}


def test_a_save_keeps_foreign_names_and_deletes_leftovers_of_interrupted_saves(tmp_path: Path) -> None:
    """Neither kind is listed as a checkpoint."""
    for name in ("step-7", "best", "step-00000005.tmp-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000009").write_text("a file")
    assert checkpoint.list_checkpoints(tmp_path) == []
    save(tmp_path, 1, keep=1)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000001"]
    assert names(tmp_path) == {"step-7", "best", "step-00000009", "step-00000001"}


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name"), [(checkpoint, "sha256"), (checkpoint, "_fsync"), (Path, "rename")]
)
def test_a_failed_save_leaves_only_the_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    save(tmp_path, 1)
    before = tree(tmp_path)
    monkeypatch.setattr(place, name, fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_checkpoint(tmp_path, 2, make_state(2), FACTS, 9)
    assert tree(tmp_path) == before
    assert names(tmp_path) == {"step-00000001"}


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = checkpoint.save_checkpoint(tmp_path, 1, make_state(5), FACTS, 9)
    assert bits(flat(checkpoint.load(path)[0])) == bits(flat(make_state(5)))
    assert names(tmp_path) == {"step-00000001"}


def test_abandoned_checkpoints_are_deleted_once_the_run_reaches_their_step_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoint.set_aside_after(tmp_path, 1)
    save(tmp_path, 2)
    left = sorted(name.partition(".")[0] for name in names(tmp_path))
    assert left == ["step-00000001", "step-00000002", "step-00000003"]
    save(tmp_path, 3)
    assert not [name for name in names(tmp_path) if "abandoned" in name]


@pytest.mark.parametrize(("keep", "left"), [(1, {5}), (2, {5, 3}), (3, {5, 4, 3}), (4, {5, 4, 3, 2})])
def test_a_broken_checkpoint_does_not_displace_a_valid_one(tmp_path: Path, keep: int, left: set[int]) -> None:
    """Step 4 is broken. With keep = 2, the valid steps 5 and 3 stay, and step 4 as one of the newest."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    flip(tmp_path / "step-00000004")
    save(tmp_path, 5, keep=keep)
    found = {int(p.name[5:]) for p in checkpoint.list_checkpoints(tmp_path)}
    assert found == left | ({4} if keep > 1 else set())


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_with_a_value_that_is_not_finite_is_named(part: str, bad: float, dtype: torch.dtype) -> None:
    state: State = {
        "model": {"a": torch.randn(3, 70).to(dtype), "count": torch.tensor(3), "none": torch.empty(0)},
        "optimizer": {
            "a/step": torch.tensor(1.0),
            "a/m": torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype),
        },
        "scaler": {"scale": torch.tensor(float("inf"))},
    }
    assert checkpoint.first_not_finite(state) is None
    name = {"model": "a", "optimizer": "a/m"}[part]
    state[part][name][1, 1] = bad
    assert checkpoint.first_not_finite(state) == name


# --- damage


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def flip(path: Path) -> None:
    file = path / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def name_in_manifest(path: Path, name: str, entry: Any) -> None:
    """Set the manifest's entry of a file, or remove the entry if it is None."""
    manifest = read_json(path / "manifest.json")
    manifest["files"] = {k: v for k, v in {**manifest["files"], name: entry}.items() if v is not None}
    (path / "manifest.json").write_text(json.dumps(manifest))


def points_outside(path: Path) -> None:
    """List a file outside the checkpoint with its correct size and hash."""
    secret = path.parent.parent / "secret"
    secret.write_bytes(b"outside")
    name_in_manifest(path, "../../secret", {"bytes": 7, "sha256": checkpoint.sha256(secret)})


def a_pipe(path: Path) -> None:
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    name_in_manifest(path, "state.json", {"bytes": 0, "sha256": "0" * 64})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "model.safetensors: .* bytes, but the manifest lists"),
    "flipped": (flip, "optimizer.safetensors: SHA-256 differs"),
    "missing file": (lambda p: (p / "state.json").unlink(), "state.json: No such file"),
    "entry is a number": (lambda p: name_in_manifest(p, "model.safetensors", 3), "TypeError"),
    "missing entry": (lambda p: name_in_manifest(p, "model.safetensors", None), "list model.safetensors"),
    "file outside": (points_outside, "secret"),
    "a pipe": (a_pipe, "state.json: not a regular file"),
    "newer version": (lambda p: (p / "manifest.json").write_text('{"version": 2, "files": {}}'), "version 2"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_broken_newest_checkpoint_is_skipped_and_named(
    tmp_path: Path, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    good = save(folder, 1)
    broken = save(folder, 2)
    damage(broken)
    found, problems = checkpoint.newest_valid(folder)
    assert found == good
    (problem,) = problems
    assert broken.name in problem
    assert re.search(message, problem), problem
    assert checkpoint.resolve(str(tmp_path / "run")) == good
    assert capsys.readouterr().err == f"warning: {problem}; using {good.name}\n"
    shutil.rmtree(good)
    with pytest.raises(ConfigError, match="contains no valid checkpoint") as caught:
        checkpoint.resolve(str(tmp_path / "run"))
    assert list(map(str, caught.value.issues[1:])) == [problem]


def test_resolve_accepts_a_checkpoint_a_run_directory_and_its_checkpoints_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    old, new = save(run / "checkpoints", 1), save(run / "checkpoints", 2)
    for source, resolved in ((old, old), (run, new), (run / "checkpoints", new)):
        assert checkpoint.resolve(str(source)) == resolved
    flip(new)
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        checkpoint.resolve(str(new))  # named explicitly, so no other checkpoint replaces it
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "file", tmp_path / "empty", tmp_path / "none", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError) as caught:
            checkpoint.resolve(str(source))
        message = "contains no valid checkpoint" if source.exists() else "does not exist"
        assert caught.value.issues[0].message == message


# --- edited checkpoints


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint and correct the manifest, as anyone who knows the format can."""
    (path / name).write_bytes(data)
    name_in_manifest(path, name, {"bytes": len(data), "sha256": checkpoint.sha256(path / name)})


BAD_FACTS: list[tuple[str, Any]] = [
    ("step", 10**400),
    ("samples", True),
    ("recent_losses", [1.0, float("nan")]),
    ("config", ["a", "list"]),
    ("data_hash", "\x1b[2J"),
    ("scaler", {"scale": "x"}),
    ("step", None),
]


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps(text).encode()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_in_a_json_file_give_one_printable_line(tmp_path: Path, data: bytes) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    if not path.exists():
        save(tmp_path, 1)
    before = {name: (path / name).read_bytes() for name in ("state.json", "manifest.json")}
    for name, text in before.items():
        (path / name).write_bytes(data)
        if name == "manifest.json":
            assert str(checkpoint.check(path)).startswith(str(path))
        else:
            with pytest.raises(ConfigError, match="not a checkpoint") as caught:
                checkpoint.load(path)
            assert str(caught.value).isprintable()
        (path / name).write_bytes(text)


@pytest.mark.parametrize(("key", "value"), BAD_FACTS)
def test_a_missing_or_mistyped_field_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = save(tmp_path, 1)
    facts = {k: v for k, v in {**read_json(path / "state.json"), key: value}.items() if v is not None}
    rewrite(path, "state.json", json.dumps(facts).encode())
    assert checkpoint.check(path) is None  # the hash is correct, so only the content can be refused
    with pytest.raises(ConfigError, match=rf"state\.json: {key}") as caught:
        checkpoint.load(path)
    assert str(caught.value).isprintable()
    assert files.newest_checkpoint_facts(path) is None


def test_an_empty_optimizer_state_is_refused_only_after_steps(tmp_path: Path) -> None:
    """Otherwise the moments would start from zero without a warning."""
    bare: State = {**make_state(), "optimizer": {}}
    state, _ = checkpoint.load(checkpoint.save_checkpoint(tmp_path, 0, bare, FACTS, 9))
    assert state["optimizer"] == {}
    checkpoint.load(checkpoint.save_checkpoint(tmp_path, 4, bare, {**FACTS, "skipped_steps": 4}, 9))
    path = checkpoint.save_checkpoint(tmp_path, 5, bare, {**FACTS, "skipped_steps": 4}, 9)
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors is empty after 5 steps"):
        checkpoint.load(path)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False)


def two_state() -> State:
    weights = dict(Two().state_dict())
    moments = {f"{name}/m": torch.zeros_like(tensor) for name, tensor in weights.items()}
    steps = {f"{name}/step": torch.tensor(3.0) for name in weights}
    return {"model": weights, "optimizer": {**moments, **steps}, "scaler": {}}


TENSORS: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("model", "a.weight", torch.zeros(5, 3).double(), r"a.weight: expected float32 \(5, 3\), found float64"),
    ("model", "a.bias", torch.zeros(1), r"a.bias: expected float32 \(5,\), found float32 \(1,\)"),
    ("model", "b.weight", None, "model.safetensors has no b.weight"),
    ("model", "c\x1b[2J", torch.zeros(1), r"no tensor 'c\\x1b"),
    ("optimizer", "a.bias/m", torch.zeros(5).double(), r"a.bias/m: expected float32 .* found float64"),
    ("optimizer", "c/m", torch.zeros(1), "no such parameter"),
    ("optimizer", "b.weight/", None, "optimizer.safetensors has no state for b.weight"),
]


@pytest.mark.parametrize(("part", "name", "tensor", "message"), TENSORS)
def test_tensors_that_do_not_match_the_model_are_refused_by_name(
    tmp_path: Path, part: str, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    state = two_state()
    assert checkpoint.state_issues(tmp_path, state, Two()) == []
    assert checkpoint.state_issues(tmp_path, {**state, "optimizer": {}}, Two()) == []
    if tensor is None:
        state[part] = {k: v for k, v in state[part].items() if not k.startswith(name)}
    else:
        state[part][name] = tensor
    (issue,) = checkpoint.state_issues(tmp_path, state, Two())
    assert re.search(message, str(issue)), issue
    assert str(issue).isprintable()


# --- order of writes


def test_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync, a power cut can leave a file name without its content. The test checks the order of
    calls, and that each file already has its final size when it is synced."""
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 1)
    calls: list[tuple[str, str, int]] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", recorded)
    for name in ("rename", "replace"):
        plain = getattr(os, name)

        def moved(source: Any, target: Any, plain: Any = plain, **options: Any) -> None:
            calls.append(("rename", str(target), os.stat(source).st_size))
            plain(source, target, **options)

        monkeypatch.setattr(os, name, moved)
    path = save(folder, 2)
    named = calls.index(next(call for call in calls if call[:2] == ("rename", str(path))))
    before, after = calls[:named], calls[named + 1 :]
    temporary = Path(before[-1][1])
    assert [call[0] for call in before] == ["fsync"] * 5
    assert temporary.parent == folder
    assert temporary.name.startswith(f"{path.name}.tmp-")
    assert {(place, size) for _, place, size in before[:-1]} == {
        (str(temporary / file.name), file.stat().st_size) for file in path.iterdir()
    }
    assert [call[:2] for call in after[:2]] == [("fsync", str(folder)), ("fsync", str(folder.parent))]
