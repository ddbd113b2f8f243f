"""Test `bert-dp scale` on real runs: resume after a kill and recompute every figure from the raw files."""

import json
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.cli import accepted, bert_dp, interrupted, refused, tiny
from tests.faults.harness import broken
from tests.helpers import read_json, read_lines

WARM_UP, STEPS, SEQUENCE, REPEATS = 2, 6, 16, 2


def command(shards: Path, out: Path, *more: str) -> list[str]:
    grid = "--nproc 1,2 --tensor 1,2 --mode strong"
    size = f"--repeats {REPEATS} --steps {STEPS} --warm-up {WARM_UP}"
    return ["scale", "quickstart", *tiny(shards), *grid.split(), *size.split(), "--out", str(out), *more]


def completed_runs(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("runs/*/trial.json")}


@pytest.fixture(scope="module")
def out(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a grid that was killed after its second run and resumed after a run and two other files were
    damaged."""
    where = tmp_path_factory.mktemp("scaling") / "out"
    interrupted(command(shards, where), where, signal.SIGKILL, lambda: len(completed_runs(where)) >= 2)
    before = {name: (where / "runs" / name / "metrics.jsonl").read_text() for name in completed_runs(where)}
    torn = "strong-ddp-n2-r0"
    steps = where / "runs" / torn / "steps" / "rank-1.jsonl"
    steps.write_text(steps.read_text()[:-40])
    (where / "links-2.json").write_text("{")
    (where / "peak.json").write_text('{"matmul_flops": "x"}')
    done = bert_dp(*command(shards, where))
    assert f"resuming: {len(before) - 1} of 10 runs already done" in done.stdout
    for name, text in before.items():
        ran_again = (where / "runs" / name / "metrics.jsonl").read_text() != text
        assert ran_again == (name == torn), name
    return where


@pytest.fixture(scope="module")
def scaling(out: Path) -> dict[str, Any]:
    return read_json(out / "scaling.json")


def steps_of(out: Path, run: str, ranks: int) -> list[dict[str, list[float]]]:
    """Return, for each rank, the seconds of the timed steps by part."""
    found = []
    for rank in range(ranks):
        lines = read_lines(out / run / "steps" / f"rank-{rank}.jsonl")
        parts = [key for key, value in lines[0].items() if isinstance(value, list)]
        found.append({part: [s for line in lines for s in line[part]][WARM_UP:] for part in parts})
    return found


def test_every_cell_has_the_requested_repeats(scaling: dict[str, Any], out: Path) -> None:
    assert scaling["status"] == "complete"
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    assert set(cells) == {
        f"strong-{n}" for n in ("single-n1", "ddp-n1", "ddp-n2", "ddp-n2-tp2", "ceiling-n2")
    }
    for cell in cells.values():
        assert [r["run"] for r in cell["repeats"]] == [f"runs/{cell['id']}-r{k}" for k in range(REPEATS)]
        assert all(r["steps"] == STEPS for r in cell["repeats"])
        assert not list((out / "runs").glob(f"{cell['id']}*/checkpoints/step-*"))
    assert not (out / ".scratch").exists()


def steps_of_replicas(seconds: list[list[float]]) -> list[float]:
    """Return the harmonic mean of the replicas' mean step times plus the first-order change of each step."""
    means = np.mean(seconds, axis=1)
    job = len(means) / np.sum(1 / means)
    return list(job + (job**2 / len(means) / means**2) @ (np.array(seconds) - means[:, None]))


def test_every_number_is_recomputed_from_the_raw_records(scaling: dict[str, Any], out: Path) -> None:
    means: dict[str, float] = {}
    peak = read_json(out / "peak.json")["matmul_flops"]
    for cell in scaling["cells"]:
        n, tokens = cell["world_size"], cell["global_batch"] * SEQUENCE
        runs = [steps_of(out, r["run"], n) for r in cell["repeats"]]
        if cell["kind"] == "ceiling":  # replicas do not wait for each other, so their throughputs are summed
            jobs = [steps_of_replicas([rank["step_s"] for rank in run]) for run in runs]
        else:
            jobs = [max((rank["step_s"] for rank in run), key=sum) for run in runs]
        mean = means[cell["id"]] = statistics.median(sum(job) / STEPS for job in jobs)
        expected = {
            "steps_per_s": 1 / mean,
            "samples_per_s": cell["global_batch"] / mean,
            "tokens_per_s": tokens / mean,
            "tokens_per_s_per_gpu": tokens / mean / n,
            "global_steps_per_s": cell["accumulation"] * n / cell["tensor"] / mean,
            "mamfu": tokens / mean / n * scaling["settings"]["flops_per_token"] / peak,
        }
        if (n, cell["tensor"]) == (2, 1):
            own = [[sum(rank["compute_before_reduction_s"]) for rank in run] for run in runs]
            ratio = statistics.geometric_mean(second / first for first, second in own)
            expected["straggler_ratio"] = max(ratio, 1 / ratio)
        else:
            assert cell["straggler_ratio"] is None
        assert {name: cell[name] for name in expected} == pytest.approx(expected)
        steps, times = [s for job in jobs for s in job], dict(cell["step_time_s"])
        low, high = times.pop("ci95")
        assert low <= mean <= high
        quantiles = np.percentile(steps, [50, 95])
        assert times == pytest.approx({"median": quantiles[0], "p95": quantiles[1], "mean": mean})
    for cell in scaling["cells"]:
        single, ddp1 = (means[f"strong-{name}-n1"] / means[cell["id"]] for name in ("single", "ddp"))
        n = cell["world_size"]
        found = [cell[name] for name in ("speedup", "efficiency", "efficiency_ddp1")]
        assert found == pytest.approx([single, single / n, ddp1 / n])
        low, high = cell["efficiency_ci95"]
        assert low <= cell["efficiency"] <= high
    ddp = next(cell for cell in scaling["cells"] if cell["id"] == "strong-ddp-n2")
    samples = []
    for r in ddp["repeats"]:
        lines = read_lines(out / r["run"] / "steps" / "rank-0.jsonl")
        samples.append(statistics.median(line["ddp_exposed_s"] for line in lines if line["step"] > WARM_UP))
    reached = means["strong-ceiling-n2"] / means["strong-ddp-n2"]
    expected = {
        "communication_efficiency": reached,
        "exposed_comm_fraction": 1 - reached,
        "ceiling_efficiency": means["strong-single-n1"] / means["strong-ceiling-n2"] / 2,
        "exposed_comm_ddp_fraction": statistics.median(samples) / means["strong-ddp-n2"],
    }
    assert {name: ddp[name] for name in expected} == pytest.approx(expected)


def test_cells_with_the_same_global_batch_have_the_same_loss(scaling: dict[str, Any]) -> None:
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    for name in ("strong-ddp-n2", "strong-ddp-n2-tp2"):
        assert cells[name]["loss_agrees"] is True
        assert cells[name]["loss_deviation"] < 1e-5
    assert cells["strong-ceiling-n2"]["loss_agrees"] is None


def test_links_and_profile_are_recorded(scaling: dict[str, Any]) -> None:
    (links,) = scaling["links"]
    assert (links["world_size"], links["backend"]) == (2, "gloo")
    for point in links["points"]:  # the bus bandwidth has the factor 2 (n - 1) / n = 1
        assert point["busbw_gb_s"] == pytest.approx(point["bytes"] / point["seconds"] / 1e9)
    profile = scaling["profile"]
    ready = [g["ready_s"] for g in profile["gradients"]]
    assert ready == sorted(ready)
    assert 0 < ready[0] <= ready[-1] <= profile["backward_s"] * 1.05
    assert sum(g["bytes"] for g in profile["gradients"]) == 4 * profile["parameters"]
    assert profile["parameters"] == scaling["settings"]["parameters"]


def test_every_measured_cell_has_a_prediction(scaling: dict[str, Any]) -> None:
    predictions = {entry["cell"]: entry for entry in scaling["prediction"]["measured"]}
    assert {"strong-single-n1", "strong-ddp-n1", "strong-ddp-n2", "strong-ddp-n2-tp2"} <= set(predictions)
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    for name, entry in predictions.items():
        assert entry["measured_step_s"] == cells[name]["step_time_s"]["mean"]
        assert entry["predicted_step_s"] > 0


def test_a_repeated_command_measures_nothing(out: Path, shards: Path) -> None:
    before = read_json(out / "scaling.json")
    assert json.loads(accepted(*command(shards, out, "--json")))["cells"] == before["cells"]
    assert "(optim.lr: " in refused(*command(shards, out, "--set", "optim.lr=0.5"))


@pytest.mark.quick
def test_a_grid_with_an_impossible_cell_is_refused(tmp_path: Path, shards: Path) -> None:
    errors = refused(*command(shards, tmp_path / "out", "--nproc", "1,3"))
    assert all(text in errors for text in ("cell strong-ddp-n3", "batch.global_size", "6, 12")), errors
    assert refused(*command(shards, Path("/proc/nothing/here"))).startswith("error: --out: ")
    assert not (tmp_path / "out").exists()


def test_failed_cells_are_recorded_and_a_signal_stops_a_grid(out: Path, tmp_path: Path, shards: Path) -> None:
    """Rank 1 raises in the first run, which is the run of the ceiling; the other cells are measured."""
    where = tmp_path / "out"
    options = "--nproc 2 --mode weak --engines zero1 --tensor 1 --repeats 1 --steps 3".split()
    grid, fault = command(shards, where, *options), broken("raise", step=1, once=str(tmp_path / "once"))
    stopped = interrupted(grid, where, signal.SIGINT, lambda: list(where.glob("runs/*/trial.json")), **fault)
    assert stopped.returncode == 130
    assert "the same command resumes" in stopped.stdout
    assert read_json(where / "scaling.json")["status"] == "partial"
    for name in ("links-2.json", "profile.json", "peak.json"):  # measured on this machine with this model
        shutil.copy(out / name, where)
    done = bert_dp(*grid, **fault)
    scaling = read_json(where / "scaling.json")
    cells = {cell["id"]: cell for cell in scaling["cells"]}
    ok = {"weak-single-n1", "weak-ddp-n1", "weak-zero1-n2"}
    assert {name for name, cell in cells.items() if cell["status"] == "ok"} == ok
    assert cells.keys() - ok == {"weak-ceiling-n2"}
    assert cells["weak-ceiling-n2"]["status"] == "failed"
    assert "injected by a test" in cells["weak-ceiling-n2"]["cause"]
    assert "failed" in done.stdout
    zero1 = cells["weak-zero1-n2"]
    assert (zero1["global_batch"], zero1["efficiency_ci95"]) == (4, None)
    assert zero1["global_steps_per_s"] == pytest.approx(2 * zero1["steps_per_s"])
    assert zero1["communication_efficiency"] is None
    assert [v["verdict"] for v in scaling["verdicts"]] == ["one repeat"]
