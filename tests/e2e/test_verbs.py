"""The other verbs, every help text, and the worker without our launcher."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.training import checkpoint
from launcher.machine import doctor
from tests.e2e.cli import bert_dp, here, refused, train
from tests.helpers import write_lines
from tests.scaling_fixture import scaling
from tests.states import FACTS
from tests.tune_fixture import batch


@pytest.mark.quick
def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['bert-dp', '--version']; from launcher.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.startswith("bert-dp ")


def test_data_build_inspect_and_train_on_own_text(tmp_path: Path) -> None:
    text = tmp_path / "text.json"
    words = "the quick brown fox jumps over a lazy dog while seven old ships sail slowly past".split()
    documents = [" ".join(words[(i * j) % len(words)] for j in range(1, 30)) for i in range(1, 900)]
    text.write_text(json.dumps([{"body": document} for document in documents]))
    out = tmp_path / "shards"
    settings = "data.build.max_tokens_per_char=0 data.build.dedup=none --set data.build.held_out_fraction=0.1"
    options = f"--vocab-size 200 --sequence-length 16 --text-key body {settings}".split()
    built = bert_dp("data", "build", str(text), "--out", str(out), *options)
    assert built.returncode == 0, built.stderr
    shown = bert_dp("data", "inspect", str(out), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    assert bert_dp("data", "inspect", str(out)).returncode == 0
    train(out, tmp_path / "run", "model.vocab_size=200", nproc=1)
    with (out / "train-00000.bin").open("r+b") as file:
        file.write(b"\xff")
    broken = bert_dp("data", "inspect", str(out))
    assert broken.returncode != 0
    assert "train-00000.bin" in broken.stdout + broken.stderr


@pytest.mark.quick
def test_checkpoints_are_verified(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (0, 1, 2):
        weight = torch.full((4,), float(step))
        state = {"model": {"w": weight}, "optimizer": {"w/m": weight}, "scaler": {}}
        checkpoint.save_checkpoint(run / "checkpoints", step, state, {**FACTS, "samples": 8 * step}, keep=3)
    write_lines(run / "evals.jsonl", [{"step": step, "loss": 7.5 - step} for step in (1, 2, 3)])
    sound = here("checkpoints", str(run), "--json")
    assert sound.returncode == 0, sound.stderr
    listed = json.loads(sound.stdout)
    facts = [tuple(each[k] for k in ("step", "samples", "heldout_loss", "problem")) for each in listed]
    assert facts == [(2, 16, 5.5, None), (1, 8, 6.5, None), (0, 0, None, None)]
    weights = run / "checkpoints" / "step-00000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    damaged = here("checkpoints", str(run))
    assert damaged.returncode == 1
    assert f"damaged: {weights}" in damaged.stdout
    (weights.parent / "optimizer.safetensors").unlink()
    (weights.parent / "manifest.json").write_text("[]")
    (run / "evals.jsonl").write_text('{"step": 2, "loss": NaN}\n')
    torn = here("checkpoints", str(run), "--json")
    assert torn.returncode == 1
    newest, middle, _ = json.loads(torn.stdout, parse_constant=pytest.fail)
    assert newest["heldout_loss"] is None
    assert middle["problem"].startswith(f"{weights.parent / 'manifest.json'}: ")
    for name in (str(tmp_path), "nothing"):
        (issue,) = json.loads(here("checkpoints", name, "--json").stdout)["issues"]
        assert (issue["setting"], issue["kind"]) == ("RUN", "not_found")


def test_doctor_reports_and_measures_an_all_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON: tests/golden; without options: test_readme.py. A busy machine has the time that it needs."""
    monkeypatch.setattr(doctor, "all_reduce", functools.partial(doctor.all_reduce, 300.0))
    done = here("doctor", "--run-dir", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr
    assert "all-reduce: 2 gloo ranks" in done.stdout


def test_report_of_runs_and_of_nothing(tmp_path: Path, shards: Path) -> None:
    train(shards, tmp_path / "a", nproc=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    done = bert_dp("report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both.html"))
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "both.html").read_text()
    assert bert_dp("report", str(tmp_path / "none")).returncode == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "content", "figure", "following"),
    [
        ("scaling.json", scaling(), "Speed-up, weak scaling", "bert-dp plan scaling --from PATH"),
        ("tune.json", batch(), "Throughput against micro batch", "bert-dp train"),
    ],
)
def test_report_of_a_benchmark_or_a_search(
    tmp_path: Path, name: str, content: dict[str, Any], figure: str, following: str
) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / name).write_text(json.dumps(content))
    done = here("report", str(folder))
    assert done.returncode == 0, done.stderr
    page, line = done.stdout.splitlines()
    assert page == f"page: {folder / 'report.html'}"
    assert line.startswith(f"next: {following.replace('PATH', str(folder / name))}")
    assert figure in (folder / "report.html").read_text()
    (tmp_path / "config.yaml").write_text("{}")
    for extra, said in (([str(tmp_path)], "RUN_DIRS: only runs"), (["--out", "/proc/nothing/x"], "--out: ")):
        assert said in refused("report", str(folder), *extra)
    (folder / name).write_text("{" if name == "scaling.json" else "{}")
    assert f"{name}: " in refused("report", str(folder))
