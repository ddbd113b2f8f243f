"""What lies in the folder that a verb is started from is data, never code."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.run import trials
from launcher.run.starters import LAUNCHERS
from tests.e2e.cli import bert_dp, train

MODULES = ("random", "json", "numpy", "psutil", "tokenizers", "torch", "safetensors", "yaml")
PACKAGES = ("launcher", "bert_dp", "accelerate", "deepspeed")
CODE = "open({marker!r}, 'a').write(__name__ + ' ')\nraise ImportError('a file of the current folder')\n"

Executed = Callable[[], str]


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executed:
    """The current folder is full of modules that note their import; this gives those that were imported."""
    folder, marker = tmp_path / "here", tmp_path / "executed"
    for name in MODULES:
        (folder / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(CODE.format(marker=str(marker)))
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.chdir(folder)
    return lambda: marker.read_text() if marker.exists() else ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_train_imports_nothing_from_there(
    tmp_path: Path, shards: Path, executed: Executed, launcher: str
) -> None:
    done = train(shards, tmp_path / "run", nproc=1, options=("--launcher", launcher), code=None)
    assert executed() == ""
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_and_the_data_room_import_nothing_from_there(tmp_path: Path, executed: Executed) -> None:
    bert_dp("doctor")
    assert executed() == ""
    text = tmp_path / "a.txt"
    text.write_text("".join(f"one line of words, number {i}\n" for i in range(2000)))
    options = "--vocab-size 64 --sequence-length 16 --processes 2 data.build.max_tokens_per_char=0".split()
    options += ["data.build.held_out_fraction=0.2"]
    done = bert_dp("data", "build", str(text), "--out", str(tmp_path / "out"), *options)
    assert executed() == ""
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_that_scale_starts_imports_nothing_from_there(tmp_path: Path, executed: Executed) -> None:
    with trials.runner(tmp_path, [], launcher="torchrun", on_gpu=False, log=print) as runs:
        (line,) = runs.helper("bert_dp.measure.disk", [str(tmp_path)])
    assert executed() == ""
    assert line["bytes"] > 0
