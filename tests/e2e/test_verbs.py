"""Test the output of `checkpoints` and `report`, and the imports of `--version`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.training import checkpoint
from tests.e2e.cli import accepted, ended, here, refused
from tests.helpers import write_lines
from tests.scaling_fixture import scaling
from tests.states import FACTS
from tests.tune_fixture import batch


@pytest.mark.quick
def test_version_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['bert-dp', '--version']; from launcher.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.startswith("bert-dp ")


@pytest.mark.quick
def test_checkpoints_are_verified(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (0, 1, 2):
        weight = torch.full((4,), float(step))
        state = {"model": {"w": weight}, "optimizer": {"w/m": weight}, "scaler": {}}
        checkpoint.save_checkpoint(run / "checkpoints", step, state, {**FACTS, "samples": 8 * step}, keep=3)
    write_lines(run / "evals.jsonl", [{"step": step, "loss": 7.5 - step} for step in (1, 2, 3)])
    listed = json.loads(accepted("checkpoints", str(run), "--json"))
    facts = [tuple(each[k] for k in ("step", "samples", "heldout_loss", "problem")) for each in listed]
    assert facts == [(2, 16, 5.5, None), (1, 8, 6.5, None), (0, 0, None, None)]
    weights = run / "checkpoints" / "step-00000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"damaged: {weights}" in ended(here("checkpoints", str(run)), 1).stdout
    (weights.parent / "optimizer.safetensors").unlink()
    (weights.parent / "manifest.json").write_text("[]")
    (run / "evals.jsonl").write_text('{"step": 2, "loss": NaN}\n')
    torn = ended(here("checkpoints", str(run), "--json"), 1)
    newest, middle, _ = json.loads(torn.stdout, parse_constant=pytest.fail)
    assert newest["heldout_loss"] is None
    assert middle["problem"].startswith(f"{weights.parent / 'manifest.json'}: ")
    for name in (str(tmp_path), "nothing"):
        (issue,) = json.loads(here("checkpoints", name, "--json").stdout)["issues"]
        assert (issue["setting"], issue["kind"]) == ("RUN", "not_found")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "content", "figure", "following"),
    [
        ("scaling.json", scaling(), "Speed-up, weak scaling", "bert-dp plan scaling --from PATH"),
        ("tune.json", batch(), "Throughput against micro batch", "bert-dp train"),
    ],
)
def test_a_benchmark_or_a_search_is_reported(
    tmp_path: Path, name: str, content: dict[str, Any], figure: str, following: str
) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / name).write_text(json.dumps(content))
    page, line = accepted("report", str(folder)).splitlines()
    assert page == f"page: {folder / 'report.html'}"
    assert line.startswith(f"next: {following.replace('PATH', str(folder / name))}")
    assert figure in (folder / "report.html").read_text()
    (tmp_path / "config.yaml").write_text("{}")
    for extra, text in (
        ([str(tmp_path)], "RUN_DIRS: runs can be compared"),
        (["--out", "/proc/nothing/x"], "--out: "),
    ):
        assert text in refused("report", str(folder), *extra)
    (folder / name).write_text("{" if name == "scaling.json" else "{}")
    assert f"{name}: " in refused("report", str(folder))
