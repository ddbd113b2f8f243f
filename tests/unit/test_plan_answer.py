"""Tests of `bert-dp plan` and `plan fit` from options to files, including refusals."""

import csv
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files
from bert_dp.config import Issue, changed_settings, dump_config, find_config, load_config
from bert_dp.config.manifest import read_manifest
from launcher import results
from launcher.plan import budget, fit, loss_fit
from launcher.plan.budget import BudgetOptions, budget_page, plan_budget, sourced_values
from launcher.plan.frontier import Frontier
from launcher.plan.gpu_speed import gpu_rate
from launcher.report.formats import format_si
from tests.e2e.cli import here
from tests.helpers import raised_issues
from tests.plan_fixture import cell, measured, profile
from tests.unit.test_budget import BASE, LAW, fitted_frontier

TODAY = datetime.date(2026, 6, 1)
H100 = "H100-SXM-80G"


def issue(options: dict[str, Any], tmp_path: Path) -> Issue:
    """Return the first issue of a plan, and check that nothing is written."""
    options = {"out": "planned.yaml", **options}
    out = tmp_path / options.pop("out")
    found = raised_issues(plan_budget, BudgetOptions(**options), out, today=TODAY)
    assert not (tmp_path / "planned.yaml").exists()
    return found[0]


@pytest.mark.parametrize(
    ("options", "setting", "kind", "hint"),
    [
        ({}, "--hours", "missing", ""),
        ({"hours": 1.0, "kwh": 2.0}, "--hours", "missing", ""),
        ({"dollars": 9.0, "gpu": "T4-16G", "precision": "fp16"}, "--price", "missing", ""),
        ({"hours": 1.0}, "--gpu", "missing", H100),
        ({"hours": 1.0, "gpu": "H100-SXM-80"}, "--gpu", "unknown", H100),
        ({"hours": 1.0, "gpu": H100, "grid": "Atlantis"}, "--grid", "unknown", "world"),
        ({"hours": 1.0, "gpu": "V100-32G"}, "--precision", "unsupported", "fp16"),
        ({"hours": 1.0, "gpu": H100, "config": "no-such"}, "--config", "not_found", ""),
        ({"hours": 24.0, "gpu": H100, "out": "none/planned.yaml"}, "--out", "not_found", ""),
        (
            {"hours": 9.0, "gpu": H100, "gpus": 3, "tokens_per_parameter": 200.0},
            *("batch.global_size", "does_not_divide", ""),
        ),
    ],
)
def test_invalid_plans_are_refused(options, setting, kind, hint, tmp_path: Path) -> None:
    found = issue(options, tmp_path)
    assert (found.setting, found.kind) == (setting, kind)
    assert hint in (found.hint or "")


def test_a_plan_writes_a_configuration_that_train_accepts(tmp_path: Path) -> None:
    options = BudgetOptions(dollars=50.0, gpu=H100, price=2.5, tokens_per_parameter=200.0)
    plan, written = plan_budget(options, tmp_path / "planned.yaml", tmp_path / "page.html", TODAY)
    config = load_config(written)
    assert (plan.hours, config.schedule.dollars, config.run.price_per_device_hour) == (20.0, 50.0, 2.5)
    assert config.model.hidden_size == plan.models[0].hidden_size
    assert config.optim.lr == pytest.approx(1e-3 * 768 / config.model.hidden_size, rel=0.01)
    assert config.batch.ramp_quantum % config.batch.micro_size == 0
    predicted = config.prediction
    assert predicted["tokens"] == plan.models[0].tokens
    assert (predicted["hours"].value, predicted["hours"].origin) == (20.0, "stated")
    assert (predicted["dollars"].value, predicted["loss"].value) == (50.0, None)
    other = config.model_copy(update={"prediction": None})
    assert changed_settings(config.model_dump(mode="json"), other) == []
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert plan.figures["micro batch"].value == config.batch.micro_size


def test_a_plan_without_a_chosen_model_writes_no_configuration(tmp_path: Path) -> None:
    plan, written = plan_budget(BudgetOptions(hours=24.0, gpu=H100), tmp_path / "planned.yaml")
    assert (plan.is_chosen, written, list(tmp_path.iterdir())) == (False, None, [])
    assert "no configuration was written" in budget_page(plan, written).verdicts[-1].text


def test_factors_have_an_origin_and_old_ones_give_a_warning(tmp_path: Path) -> None:
    options = BudgetOptions(hours=24.0, gpu=H100, keep_model=True, grid="world")
    plan, _ = plan_budget(options, tmp_path / "a.yaml", today=TODAY)
    assert plan.figures["dollars"].origin == plan.figures["kwh"].origin == "published"
    assert plan.figures["kwh"].value == pytest.approx(24 * 0.7)
    assert [w.partition(":")[0] for w in plan.warnings] == ["world"], "the grid is older than 180 days"
    plan, _ = plan_budget(options, tmp_path / "a.yaml", today=datetime.date(2026, 12, 1))
    assert [w.partition(":")[0] for w in plan.warnings] == [H100, "world"]


def test_every_listed_value_has_a_date_and_a_source(tmp_path: Path) -> None:
    assert H100 in sourced_values(budget.PRICES)
    assert "world" in sourced_values(budget.GRID)
    (tmp_path / "prices.yaml").write_text("H100: {value: 2, unit: $/h, date: 2026-01-01}\n")
    (found,) = raised_issues(sourced_values, tmp_path / "prices.yaml")
    assert (found.kind, "source" in found.message) == ("damaged", True)


def run(directory: Path, loss: float | None = 2.0, *settings: str, **summary: Any) -> Path:
    """Write a completed pretraining run of BASE with `settings`."""
    directory.mkdir(parents=True)
    config = load_config(find_config("crammed-bert"), settings)
    files.write_text(directory / "config.yaml", dump_config(config))
    facts = {"status": "done", "parameters": 10**8, "tokens": 10**9, "heldout_loss": loss, **summary}
    (directory / "summary.json").write_text(json.dumps(facts))
    return directory


MEASURED = {"parameters": 119_589_889, "precision": "bf16", "world_size": 2, "tokens_per_s": 5e5}


def record(folder: Path, kind: str, length: int = 128, **changes: Any) -> Path:
    """Write a run directory or a scaling.json of BASE's model on two devices, with `changes`."""
    facts = {**MEASURED, **changes}
    if kind == "run":
        return run(folder / "run", 2.0, f"data.sequence_length={length}", **facts)
    rate = {"tokens_per_s": facts["tokens_per_s"]}
    cells = [cell(k, facts["world_size"], 1.0, kind=k, **rate) for k in ("run", "ceiling")]
    settings = {"sequence_length": length, **{name: facts[name] for name in ("parameters", "precision")}}
    shape = profile(num_layers=16, hidden_size=768, num_heads=12)
    files.write_json(path := folder / "scaling.json", measured(settings=settings, cells=cells, profile=shape))
    return path


@pytest.mark.parametrize("kind", ["run", "scaling"])
def test_a_measured_speed_takes_precedence(kind: str, tmp_path: Path) -> None:
    path = record(tmp_path, kind)
    options = BudgetOptions(hours=2.0, gpus=2, from_=path, keep_model=True, price=1.0)
    plan, written = plan_budget(options, tmp_path / "planned.yaml")
    assert plan.figures["tokens"].value == pytest.approx(5e5 * 7200)
    assert {plan.figures[name].origin for name in ("tokens", "steps", "compute")} == {"measured"}
    assert load_config(written).batch.micro_size == BASE.batch.micro_size
    assert load_config(written).prediction["kwh"].value is None


@pytest.mark.parametrize("kind", ["run", "scaling"])
@pytest.mark.parametrize(
    ("options", "changes", "setting"),
    [
        ({}, {"parameters": 10**8}, "model"),
        ({}, {"precision": "fp32"}, "--precision"),
        ({}, {"length": 64}, "data.sequence_length"),
        ({"gpus": 4}, {}, "--nproc"),
        ({"keep_model": False, "tokens_per_parameter": 20.0}, {}, "--from"),
        ({"gpu": H100}, {}, "--gpu"),
    ],
)
def test_a_record_of_another_setup_is_refused(kind, options, changes, setting, tmp_path: Path) -> None:
    given = {"hours": 2.0, "gpus": 2, "keep_model": True, "from_": record(tmp_path, kind, **changes)}
    found = issue({**given, **options}, tmp_path)
    assert (found.setting, found.kind) == (setting, "conflict")


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def own_rows() -> list[dict[str, Any]]:
    return [{name: getattr(run, name) for name in fit.COLUMNS[:3]} for run in fitted_frontier().runs]


def test_a_table_of_runs_is_fitted_and_used_for_a_plan(tmp_path: Path) -> None:
    found = fit.fit_runs(fit.read_table(table(tmp_path / "runs.csv", own_rows())))
    assert found.exponent == pytest.approx(LAW.exponent, abs=0.005)
    assert not found.contradicts
    assert found.outside == []
    results.write(tmp_path / "frontier.json", found)
    assert results.read(tmp_path / "frontier.json", Frontier) == found
    options = BudgetOptions(hours=24.0, gpu=H100, frontier=tmp_path / "frontier.json")
    plan, written = plan_budget(options, tmp_path / "planned.yaml", today=TODAY)
    best = LAW.best_parameters(plan.figures["compute"].value)
    assert plan.figures["best parameters"].value == pytest.approx(best, rel=0.02)
    assert written is not None
    assert fit.fit_page(found).sections


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda rows: rows[:5], "missing"),
        (lambda rows: [{**row, "loss": ""} for row in rows], "damaged"),
        (lambda rows: [{**row, "parameters": "-1"} for row in rows], "damaged"),
        (lambda rows: [{"parameters": 1, "loss": 2} for _ in rows], "missing"),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(change, kind, tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", change(own_rows()))
    assert raised_issues(lambda: fit.fit_runs(fit.read_table(path)))[0].kind == kind


def test_a_law_that_contradicts_its_runs_is_not_used_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_fit, "fit", functools.partial(loss_fit.fit, draws=2))
    rows = [
        {"budget_flops": c, "parameters": n, "loss": 2 - 0.1 * i + 0.3 * (j - 1) ** 2}
        for i, c in enumerate((1e17, 1e18, 1e19))
        for j, n in enumerate((1e6, 1e8, 1e10))
    ]
    found = fit.fit_runs(fit.read_table(table(tmp_path / "runs.csv", rows)))
    assert found.contradicts
    results.write(tmp_path / "frontier.json", found)
    options = {"hours": 1.0, "gpu": H100, "frontier": tmp_path / "frontier.json"}
    refused = issue(options, tmp_path)
    assert (refused.setting, refused.kind) == ("--frontier", "unsupported")


def test_a_fit_without_scipy_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fitted_frontier().runs
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    (found,) = raised_issues(loss_fit.fit, runs)
    assert (found.kind, found.value) == ("needs_package", "scipy")


@pytest.mark.parametrize(
    ("loss", "settings", "status", "setting", "kind"),
    [
        (2.0, (), "stopped", "RUNS", "unsupported"),
        (None, (), "done", "RUNS", "unsupported"),
        (2.0, ("objective.mask_rate=0.15",), "done", "objective.mask_rate", "conflict"),
    ],
)
def test_incomparable_runs_are_refused(loss, settings, status, setting, kind, tmp_path: Path) -> None:
    runs = [run(tmp_path / "a"), run(tmp_path / "b", loss, *settings, status=status)]
    (found,) = raised_issues(fit.read_runs, runs)
    assert (found.setting, found.kind) == (setting, kind)


def test_runs_of_nearly_equal_compute_share_a_budget(tmp_path: Path) -> None:
    sizes = (10**9, 11 * 10**8, 10**10)
    runs = [run(tmp_path / str(tokens), tokens=tokens) for tokens in sizes]
    rows = fit.grouped(fit.read_runs(runs)[0])
    assert len({row.budget_flops for row in rows}) == 2
    assert rows[0].budget_flops == pytest.approx(6e17 * 1.1**0.5)
    assert rows[0].parameters_without_embedding == 10**8 - BASE.model.vocab_size * BASE.model.hidden_size


DRY = ("train", "crammed-bert", "data.sources=builtin", "--dry-run")
PRICE = "run.price_per_device_hour=2.5"


@pytest.mark.parametrize(
    ("settings", "gpu", "nproc", "expected"),
    [
        ("", H100, 8, {"batch": "accumulation 8 x dp 8", "micro": "128 is", "tokens": 24}),
        ("batch.ramp_fraction=0", H100, 8, {"micro": "1024 is the largest that divides a replica's share"}),
        # a token budget gives a time, and auto precision follows the GPU
        ("schedule.tokens=1000000000", "T4-16G", 1, {"memory": "fp16", "time": "of training"}),
        # a dollar budget gives the tokens of the hours that it pays for
        (f"schedule.hours=null schedule.dollars=80 {PRICE} batch.micro_size=256", H100, 4, {"tokens": 8}),
    ],
)
def test_a_dry_run_on_gpus_of_another_machine(settings, gpu, nproc, expected, tmp_path: Path) -> None:
    done = here(*DRY, *settings.split(), "--gpu", gpu, "--nproc", str(nproc), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    if hours := expected.pop("tokens", None):
        rate = gpu_rate(BASE, gpu, nproc, "bf16").tokens_per_s
        assert lines["speed"].startswith(format_si(rate, "tokens"))
        assert lines["tokens"].startswith(format_si(rate * hours * 3600, "tokens"))
    assert [name for name, text in expected.items() if text not in lines[name]] == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_on_gpus_shows_passes_and_no_speed_for_several_nodes(shards: Path, tmp_path: Path) -> None:
    settings = ("schedule.hours=1", f"data.path={shards}", "data.sequence_length=16")
    small = ("train", "one-gpu", "--dry-run", "--gpu", H100, *settings)
    size = f"{read_manifest(shards).train.tokens:,}"
    assert f" passes over {size} tokens of data" in here(*small, cwd=tmp_path).stdout
    nodes = (
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--rendezvous",
        "10.0.0.1:29400",
        "--run-dir",
        "run",
        "batch.micro_size=16",
    )
    done = here(*small, "--nproc", "1", *nodes, cwd=tmp_path)
    assert ("dp 2" in done.stdout, "per second" in done.stdout) == (True, False), done.stderr


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--dry-run", "--gpu", "h100"), H100),
        (("--dry-run", "--gpu", "H100-SXM"), H100),
        (("--dry-run", "--gpu", H100, "--nproc", "3"), "batch.global_size"),
        (("--dry-run", "--gpu", "V100-16G", "precision=bf16"), "precision"),
        (("--dry-run", "--gpu", "T4-16G", "batch.micro_size=1024"), "batch.micro_size"),
        (("--gpu", H100), "--dry-run"),  # a real run cannot use --gpu
    ],
)
def test_an_impossible_dry_run_is_refused(more: tuple[str, ...], word: str, tmp_path: Path) -> None:
    done = here(*DRY[:3], *more, cwd=tmp_path)
    assert (done.returncode, word in done.stderr) == (2, True), done.stderr
