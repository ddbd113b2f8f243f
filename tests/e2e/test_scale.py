"""`bert-dp scale` on real runs: killed and gone on with, every figure recomputed from the raw files."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.cli import bert_dp, here, interrupted, refused, tiny
from tests.faults.harness import broken
from tests.helpers import read_json, read_lines

WARM_UP, STEPS, SEQUENCE, REPEATS = 2, 6, 16, 2


def command(shards: Path, out: Path, *more: str) -> list[str]:
    grid = "--nproc 1,2 --tensor 1,2 --mode strong"
    size = f"--repeats {REPEATS} --steps {STEPS} --warm-up {WARM_UP}"
    return ["scale", "quickstart", *tiny(shards), *grid.split(), *size.split(), "--out", str(out), *more]


def whole_runs(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("runs/*/trial.json")}


@pytest.fixture(scope="module")
def out(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid whose launcher was killed after its second run, and was started again once a run and two side
    files were damaged."""
    where = tmp_path_factory.mktemp("scaling") / "out"
    interrupted(command(shards, where), where, signal.SIGKILL, lambda: len(whole_runs(where)) >= 2)
    before = {name: (where / "runs" / name / "metrics.jsonl").read_text() for name in whole_runs(where)}
    torn = "strong-ddp-n2-r0"
    steps = where / "runs" / torn / "steps" / "rank-1.jsonl"
    steps.write_text(steps.read_text()[:-40])
    (where / "links-2.json").write_text("{")
    (where / "peak.json").write_text('{"matmul_flops": "x"}')
    done = bert_dp(*command(shards, where), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming: {len(before) - 1} of 10 runs already done" in done.stdout
    for name, text in before.items():
        ran_again = (where / "runs" / name / "metrics.jsonl").read_text() != text
        assert ran_again == (name == torn), name
    return where


@pytest.fixture(scope="module")
def scaling(out: Path) -> dict[str, Any]:
    return read_json(out / "scaling.json")


def steps_of(out: Path, run: str, ranks: int) -> list[dict[str, list[float]]]:
    """Per rank: the timed steps, by part."""
    found = []
    for rank in range(ranks):
        lines = read_lines(out / run / "steps" / f"rank-{rank}.jsonl")
        parts = [key for key, value in lines[0].items() if isinstance(value, list)]
        found.append({part: [s for line in lines for s in line[part]][WARM_UP:] for part in parts})
    return found


def test_every_cell_ran_as_often_as_asked(scaling: dict[str, Any], out: Path) -> None:
    assert scaling["status"] == "complete"
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    assert set(cells) == {
        "strong-single-n1",
        "strong-ddp-n1",
        "strong-ddp-n2",
        "strong-ddp-n2-tp2",
        "strong-ceiling-n2",
    }
    for cell in cells.values():
        assert [r["run"] for r in cell["repeats"]] == [f"runs/{cell['id']}-r{k}" for k in range(REPEATS)]
        assert all(r["steps"] == STEPS for r in cell["repeats"])
        assert not list((out / "runs").glob(f"{cell['id']}*/checkpoints/step-*"))
    assert not (out / ".scratch").exists()


def steps_of_copies(seconds: list[list[float]]) -> list[float]:
    """The harmonic mean of the copies' mean steps, and what each step moves it by, to first order."""
    means = np.mean(seconds, axis=1)
    job = len(means) / np.sum(1 / means)
    return list(job + (job**2 / len(means) / means**2) @ (np.array(seconds) - means[:, None]))


def test_every_number_is_recomputed_from_the_raw_records(scaling: dict[str, Any], out: Path) -> None:
    means: dict[str, float] = {}
    peak = read_json(out / "peak.json")["matmul_flops"]
    for cell in scaling["cells"]:
        n, tokens = cell["world_size"], cell["global_batch"] * SEQUENCE
        runs = [steps_of(out, r["run"], n) for r in cell["repeats"]]
        if cell["kind"] == "ceiling":  # copies that do not wait for each other: their throughputs add up
            jobs = [steps_of_copies([rank["step_s"] for rank in run]) for run in runs]
        else:
            jobs = [max((rank["step_s"] for rank in run), key=sum) for run in runs]
        mean = means[cell["id"]] = statistics.median(sum(job) / STEPS for job in jobs)
        assert cell["steps_per_s"] == pytest.approx(1 / mean)
        assert cell["samples_per_s"] == pytest.approx(cell["global_batch"] / mean)
        assert cell["tokens_per_s"] == pytest.approx(tokens / mean)
        assert cell["tokens_per_s_per_gpu"] == pytest.approx(tokens / mean / n)
        assert cell["global_steps_per_s"] == pytest.approx(cell["accumulation"] * n / cell["tensor"] / mean)
        assert cell["step_time_s"]["mean"] == pytest.approx(mean)
        assert cell["step_time_s"]["median"] == pytest.approx(statistics.median(s for j in jobs for s in j))
        low, high = cell["step_time_s"]["ci95"]
        assert low <= mean <= high
        assert cell["step_time_s"]["p95"] == pytest.approx(np.percentile([s for j in jobs for s in j], 95))
        if (n, cell["tensor"]) == (2, 1):
            ratios = [
                sum(run[1]["compute_before_reduction_s"]) / sum(run[0]["compute_before_reduction_s"])
                for run in runs
            ]
            ratio = statistics.geometric_mean(ratios)
            assert cell["straggler_ratio"] == pytest.approx(max(ratio, 1 / ratio))
        else:
            assert cell["straggler_ratio"] is None
        flops = cell["tokens_per_s_per_gpu"] * scaling["settings"]["flops_per_token"]
        assert cell["mamfu"] == pytest.approx(flops / peak)
    one = means["strong-single-n1"]
    for cell in scaling["cells"]:
        speedup = one / means[cell["id"]]
        assert cell["speedup"] == pytest.approx(speedup)
        assert cell["efficiency"] == pytest.approx(speedup / cell["world_size"])
        assert cell["efficiency_ddp1"] == pytest.approx(
            means["strong-ddp-n1"] / means[cell["id"]] / cell["world_size"]
        )
        low, high = cell["efficiency_ci95"]
        assert low <= cell["efficiency"] <= high
    ddp = next(cell for cell in scaling["cells"] if cell["id"] == "strong-ddp-n2")
    reached = means["strong-ceiling-n2"] / means["strong-ddp-n2"]
    assert ddp["communication_efficiency"] == pytest.approx(reached)
    assert ddp["exposed_comm_fraction"] == pytest.approx(1 - reached)
    assert ddp["ceiling_efficiency"] == pytest.approx(one / means["strong-ceiling-n2"] / 2)
    samples = []
    for r in ddp["repeats"]:
        lines = read_lines(out / r["run"] / "steps" / "rank-0.jsonl")
        samples.append([line["ddp_exposed_s"] for line in lines if line["step"] > WARM_UP])
    exposed = statistics.median(statistics.median(each) for each in samples) / means["strong-ddp-n2"]
    assert ddp["exposed_comm_ddp_fraction"] == pytest.approx(exposed)


def test_cells_of_one_global_batch_train_one_model(scaling: dict[str, Any]) -> None:
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    for name in ("strong-ddp-n2", "strong-ddp-n2-tp2"):
        assert cells[name]["loss_agrees"] is True
        assert cells[name]["loss_deviation"] < 1e-5
    assert cells["strong-ceiling-n2"]["loss_agrees"] is None


def test_links_profile_and_peak_are_there(scaling: dict[str, Any]) -> None:
    (links,) = scaling["links"]
    assert (links["world_size"], links["backend"]) == (2, "gloo")
    for point in links["points"]:
        assert point["busbw_gb_s"] == pytest.approx(
            point["bytes"] / point["seconds"] / 1e9
        )  # 2 (n - 1) / n = 1
    profile = scaling["profile"]
    ready = [g["ready_s"] for g in profile["gradients"]]
    assert ready == sorted(ready)
    assert 0 < ready[0] <= ready[-1] <= profile["backward_s"] * 1.05
    assert sum(g["bytes"] for g in profile["gradients"]) == 4 * profile["parameters"]
    assert profile["parameters"] == scaling["settings"]["parameters"]


def test_the_prediction_stands_beside_what_was_measured(scaling: dict[str, Any]) -> None:
    told = {entry["cell"]: entry for entry in scaling["prediction"]["measured"]}
    assert {"strong-single-n1", "strong-ddp-n1", "strong-ddp-n2", "strong-ddp-n2-tp2"} <= set(told)
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    for name, entry in told.items():
        assert entry["measured_step_s"] == cells[name]["step_time_s"]["mean"]
        assert entry["predicted_step_s"] > 0


def test_one_more_call_measures_nothing_again(out: Path, shards: Path) -> None:
    before = (out / "scaling.json").read_text()
    done = here(*command(shards, out, "--json"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cells"] == json.loads(before)["cells"]


def test_another_grid_is_refused_where_one_stands(out: Path, shards: Path) -> None:
    assert "(optim.lr: " in refused(*command(shards, out, "--set", "optim.lr=0.5"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("more", "texts"),
    [
        (["--nproc", "1,3"], ["cell strong-ddp-n3", "batch.global_size", "6, 12"]),
        (["--out", "/proc/nothing/here"], ["--out", "/proc"]),
    ],
)
def test_a_grid_with_an_impossible_cell_is_refused(
    tmp_path: Path, shards: Path, more: list[str], texts: list[str]
) -> None:
    said = refused(*command(shards, tmp_path / "out", *more))
    assert all(text in said for text in texts), said
    assert not (tmp_path / "out").exists()


def test_a_cell_that_fails_is_a_result_and_a_signal_stops(out: Path, tmp_path: Path, shards: Path) -> None:
    """Weak, of one repeat: rank 1 raises in the first run, the ceiling's; the other cells stand."""
    where = tmp_path / "out"
    options = "--nproc 2 --mode weak --engines zero1 --tensor 1 --repeats 1 --steps 3".split()
    grid, fault = command(shards, where, *options), broken("raise", step=1, once=str(tmp_path / "once"))
    stopped = interrupted(grid, where, signal.SIGINT, lambda: list(where.glob("runs/*/trial.json")), **fault)
    assert stopped.returncode == 130
    assert "the same command goes on" in stopped.stdout
    assert read_json(where / "scaling.json")["status"] == "partial"
    for name in ("links-2.json", "profile.json", "peak.json"):  # of the same machine and model
        shutil.copy(out / name, where)
    done = bert_dp(*grid, **fault, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    scaling = read_json(where / "scaling.json")
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "weak-single-n1": "ok",
        "weak-ddp-n1": "ok",
        "weak-zero1-n2": "ok",
        "weak-ceiling-n2": "failed",
    }
    assert "injected by a test" in cells["weak-ceiling-n2"]["cause"]
    assert "failed" in done.stdout
    zero1 = cells["weak-zero1-n2"]
    assert (zero1["global_batch"], zero1["efficiency_ci95"]) == (4, None)
    assert zero1["global_steps_per_s"] == pytest.approx(2 * zero1["steps_per_s"])
    assert zero1["communication_efficiency"] is None
    assert [v["verdict"] for v in scaling["verdicts"]] == ["one repeat"]
