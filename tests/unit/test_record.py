"""Tests of record files: whole lines, null for NaN and infinity, atomic writes, locks, process identity."""

import errno
import json
import os
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp import files
from bert_dp.config.errors import read_regular
from tests.e2e.cli import wait_for
from tests.helpers import write_files
from tests.states import FACTS


def evaluation(step: int, loss: float = 1.5) -> dict[str, Any]:
    return {"step": step, "tokens": step * 10, "loss": loss, "mask_rate": 0.15, "masked_tokens": 7}


def steps(path: Path) -> list[int]:
    return [line["step"] for line in files.read_lines(path)]


def test_lines_are_appended_read_and_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "evals.jsonl"
    files.cut_back(path, 3)
    assert (list(files.read_lines(path)), path.exists()) == ([], False)
    lines = [evaluation(step, 0.1 + 0.2) for step in (2, 4, 6, 8)]
    for line in lines:
        files.append_line(path, line)
    before = path.read_bytes()
    for until, kept in ((8, 4), (5, 2), (4, 2), (-1, 0)):
        files.cut_back(path, until)
        assert list(files.read_lines(path)) == lines[:kept]
        assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:kept]), "unchanged"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_become_null(tmp_path: Path, value: float) -> None:
    files.append_line(tmp_path / "a", evaluation(1, value))
    (line,) = files.read_lines(tmp_path / "a")
    assert line["loss"] is None
    files.write_json(tmp_path / "b", {"a": [value, {"b": (value, 1.5)}], "c": "NaN"})
    assert json.loads((tmp_path / "b").read_text()) == {"a": [None, {"b": [None, 1.5]}], "c": "NaN"}


@given(cut=st.integers(0, 400))
def test_a_truncated_file_gives_its_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "evals.jsonl"
    for step in (1, 2, 3):
        files.append_line(path, evaluation(step))
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    assert steps(path) == [1, 2, 3][:whole]
    files.cut_back(path, 99)
    assert path.read_bytes() == b"".join(data.splitlines(keepends=True)[:whole])
    files.append_line(path, evaluation(9))
    assert steps(path) == [*[1, 2, 3][:whole], 9]


DAMAGED = [
    b"",
    b"{",
    b"1",
    b"\xff\xfe",
    b'{"step": "\xff"}',
    b'{"step": ' + b"9" * 400 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a": ' * 500 + b"1" + b"}" * 500,
]
NO_STEP = [b"{}", b'{"step": null}', b'{"step": "1"}', b'{"step": true}', b'{"step": 1.5}']


@pytest.mark.parametrize("content", [*DAMAGED, *NO_STEP], ids=lambda content: repr(content[:20]))
def test_damaged_json_is_none_and_ends_the_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert (files.read_json(path) is None) == (content in DAMAGED)
    path.write_bytes(b'{"step": 1}\n' + content + b'\n{"step": 3}\n')
    assert list(files.read_lines(path)) == [{"step": 1}]
    files.cut_back(path, 9)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_only_a_regular_file_is_read_as_a_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", Path("/dev/zero"), Path("a\0b")):
        assert files.read_json(path) is None
    assert list(files.read_lines(tmp_path / "pipe")) == []


def test_a_failed_write_names_its_file_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    files.write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bert_dp.files.json_lines.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_json(path, {"a": 2})
    assert caught.value.filename == str(path)
    assert files.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_lock_whose_file_was_removed_is_taken_on_a_new_file(tmp_path: Path) -> None:
    """On the removed file, the waiting process and the next one would both hold the lock."""
    path, taken = tmp_path / ".lock", []
    held = files.lock(path)
    assert held is not None
    waiting = threading.Thread(target=lambda: taken.append(files.lock(path, wait=True)))
    waiting.start()
    # the holder and the waiting thread have the file open
    wait_for(lambda: [each.path for each in psutil.Process().open_files()].count(str(path)) == 2, 10)
    path.unlink()
    held.close()
    waiting.join(10)
    (second,) = taken
    assert os.path.samestat(os.fstat(second.fileno()), path.stat())
    assert files.lock(path) is None
    second.close()


def test_a_file_of_exactly_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for size in (5, 2**20, 2**20 + 1):
        path.write_bytes(b"x" * size)
        assert len(read_regular(path, size)) == size
        with pytest.raises(OSError, match=f"larger than {size - 1} bytes") as caught:
            read_regular(path, size - 1)
        assert caught.value.errno == errno.EFBIG


def test_start_ticks_are_read_for_a_name_with_brackets_and_spaces(tmp_path: Path) -> None:
    (program := tmp_path / "a ) b").symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "30"]) as process:
        assert int(files.start_ticks(process.pid)) >= int(files.start_ticks(os.getpid()))
        process.kill()


def test_the_newest_readable_checkpoint_is_found(tmp_path: Path) -> None:
    """The path is a run, its checkpoints or one checkpoint. Remains of an interrupted save do not count."""
    folder = tmp_path / "checkpoints"

    def leave(name: str, step: int | None) -> Path:
        facts = "{" if step is None else json.dumps({**FACTS, "step": step})
        return write_files(folder / name, {"state.json": facts})

    leave("step-00000009.tmp-12345678", 9)
    leave("step-00000008.abandoned-12345678", 8)
    assert files.newest_checkpoint_facts(tmp_path) is None
    good, torn = leave("step-00000003", 3), leave("step-00000005", None)
    for place in (tmp_path, folder, good):
        found = files.newest_checkpoint_facts(place)
        assert found is not None
        assert (found[0], found[1].step) == (good, 3)
    assert files.newest_checkpoint_facts(torn) is None
    later = leave("step-100000000", 10**8)
    assert (files.newest_checkpoint_facts(tmp_path) or [None])[0] == later


def test_a_failed_append_leaves_no_partial_line(tmp_path: Path) -> None:
    """A partial line would hide all later lines. A limit on the file size simulates a full disk."""
    path = tmp_path / "evals.jsonl"
    files.append_line(path, evaluation(1))
    unlimited, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, unlimited[1]))
    try:
        with pytest.raises(OSError, match=r"large|space"):
            files.append_line(path, evaluation(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, before)
    files.append_line(path, evaluation(3))
    assert steps(path) == [1, 3]


def test_a_card_shows_file_names_without_folders() -> None:
    words = "/usr/bin/bert-dp hf:/data/rope data.sources=[/data/a/x.txt,/data/y.txt] ../runs/crammed 1/2"
    cut = "bert-dp hf:rope data.sources=[x.txt,y.txt] ../runs/crammed 1/2"
    assert " ".join(map(files.without_folders, words.split())) == cut
