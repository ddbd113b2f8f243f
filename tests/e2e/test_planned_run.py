"""Plan a run from a measured run and check that its output and its page show the predictions."""

import json
import re
from pathlib import Path

import pytest

from bert_dp.config import dump_config, find_config, load_config
from launcher import results
from tests.e2e.cli import TINY, accepted, bert_dp
from tests.helpers import read_json
from tests.unit.test_budget import fitted_frontier

pytestmark = pytest.mark.slow
HOURS = 0.002


def test_a_planned_run_shows_measured_and_predicted_values(tmp_path: Path, shards: Path) -> None:
    settings = [*TINY, f"data.path={shards}", "run.device=cpu", "schedule.steps=20", "log.every_steps=10"]
    (tmp_path / "tiny.yaml").write_text(dump_config(load_config(find_config("quickstart"), settings)))
    results.write(tmp_path / "frontier.json", fitted_frontier())
    one = ("--nproc", "1", "--run-dir")
    assert "predicted" not in bert_dp("train", "tiny.yaml", *one, "first", cwd=tmp_path).stdout
    plan = "plan --from first --config tiny.yaml --keep-model --frontier frontier.json --precision fp32"
    costs = ("--hours", str(HOURS), "--price", "3", "--watts", "10")
    figures = json.loads(accepted(*plan.split(), *costs, "--json", cwd=tmp_path))["figures"]
    rate = read_json(tmp_path / "first" / "summary.json")["tokens_per_s"]
    assert figures["tokens"]["value"] == pytest.approx(rate * 3600 * HOURS)
    assert figures["tokens"]["origin"] == "measured"

    done = bert_dp("train", "planned.yaml", *one, "second", cwd=tmp_path)
    kept = load_config(tmp_path / "second" / "config.yaml").prediction
    assert kept["tokens"].value == figures["tokens"]["value"]
    assert kept["loss"].ci95[0] < kept["loss"].value < kept["loss"].ci95[1]
    assert kept["dollars"].value == pytest.approx(3 * HOURS)
    rows = re.findall(r"^plan: (\w+) +(.*), predicted (.*), (\w+) *$", done.stdout, re.MULTILINE)
    stated = dict.fromkeys(("hours", "dollars", "kwh"), "stated")
    origins = {"tokens": "measured", "steps": "measured", "loss": "fitted", **stated}
    assert {name: origin for name, _, _, origin in rows} == origins
    hours = next(float(measured) for name, measured, _, _ in rows if name == "hours")
    assert hours == pytest.approx(HOURS, rel=0.5)
    page = (tmp_path / "second" / "report.html").read_text()
    assert "Measured and predicted" in page
    assert all(f"predicted {predicted}" in page for _, _, predicted, _ in rows)
