"""`bert-dp plan` and `plan fit` from options to files: what is refused, what is written."""

import csv
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files
from bert_dp.config import ConfigError, changed_settings, dump_config, load_config
from launcher import results
from launcher.plan import budget, fit, loss_fit
from launcher.plan.budget import BudgetOptions, plan_budget, sourced_values
from launcher.plan.frontier import Frontier
from launcher.plan.gpu_speed import gpu_rate, recorded_rate
from launcher.report.formats import format_si
from tests.e2e.cli import here
from tests.helpers import raised_issues
from tests.unit.test_budget import BASE, LAW, own_fit

TODAY = datetime.date(2026, 6, 1)
H100 = "H100-SXM-80G"


def issue(options: dict[str, Any], tmp_path: Path) -> tuple[str, str]:
    """Setting and kind of the first issue; nothing is written."""
    with pytest.raises(ConfigError) as refused:
        plan_budget(BudgetOptions(**options), tmp_path / "planned.yaml", today=TODAY)
    assert not (tmp_path / "planned.yaml").exists()
    return refused.value.issues[0].setting, refused.value.issues[0].kind


@pytest.mark.parametrize(
    ("options", "setting", "kind"),
    [
        ({}, "--hours", "missing"),
        ({"hours": 1.0, "kwh": 2.0}, "--hours", "missing"),
        ({"dollars": 9.0, "gpu": "T4-16G", "precision": "fp16"}, "--price", "missing"),
        ({"hours": 1.0}, "--gpu", "missing"),
        ({"hours": 1.0, "gpu": "H100-SXM-80"}, "--gpu", "unknown"),
        ({"hours": 1.0, "gpu": H100, "grid": "Atlantis"}, "--grid", "unknown"),
        ({"hours": 1.0, "gpu": "V100-32G"}, "--precision", "unsupported"),
        ({"hours": 1.0, "gpu": H100, "config": "no-such"}, "--config", "not_found"),
        (
            {"hours": 9.0, "gpu": H100, "gpus": 3, "tokens_per_parameter": 200.0},
            "batch.global_size",
            "does_not_divide",
        ),
        ({"hours": 1e-3, "gpu": H100, "tokens_per_parameter": 200.0}, "--hours", "out_of_range"),
    ],
)
def test_refused(options: dict[str, Any], setting: str, kind: str, tmp_path: Path) -> None:
    assert issue(options, tmp_path) == (setting, kind)


def test_a_file_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_budget(BudgetOptions(hours=24.0, gpu=H100), tmp_path / "none" / "planned.yaml")
    assert (refused.value.issues[0].setting, refused.value.issues[0].kind) == ("--out", "not_found")


def test_the_nearest_gpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_budget(BudgetOptions(hours=1.0, gpu="H100-SXM-80"), tmp_path / "x.yaml")
    assert H100 in (refused.value.issues[0].hint or "")


def test_a_plan_writes_a_configuration_that_train_takes(tmp_path: Path) -> None:
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


def test_published_answers_write_no_configuration(tmp_path: Path) -> None:
    plan, written = plan_budget(BudgetOptions(hours=24.0, gpu=H100), tmp_path / "planned.yaml")
    assert (plan.is_chosen, written) == (False, None)
    assert not (tmp_path / "planned.yaml").exists()


def test_factors_have_their_origin_and_old_ones_are_said(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError) as refused:
        sourced_values(tmp_path / "prices.yaml")
    assert refused.value.issues[0].kind == "damaged"
    assert "source" in refused.value.issues[0].message


def run(directory: Path, loss: float, **summary: Any) -> Path:
    directory.mkdir(parents=True)
    mask_rate = summary.pop("mask_rate", 0.25)
    objective = BASE.objective.model_copy(update={"mask_rate": mask_rate})
    files.write_text(directory / "config.yaml", dump_config(BASE.model_copy(update={"objective": objective})))
    facts = {"status": "done", "parameters": 10**8, "tokens": 10**9, "heldout_loss": loss, **summary}
    (directory / "summary.json").write_text(json.dumps(facts))
    return directory


MEASURED = {"parameters": 119_589_889, "precision": "bf16", "world_size": 2, "tokens_per_s": 5e5}


def record(folder: Path, kind: str, **changes: Any) -> Path:
    """A run directory or a scaling.json of the model of BASE on two devices, with `changes`."""
    facts = {**MEASURED, **changes}
    if kind == "run":
        return run(folder / "run", 2.0, **facts)
    shape = {
        "micro_batch": 128,
        "sequence_length": 128,
        "num_layers": 16,
        "hidden_size": 768,
        "num_heads": 12,
    }
    cell = {"micro_batch": 128, "accumulation": 1, "global_batch": 256, "engine": "ddp", "status": "ok"}
    rates = {"world_size": facts["world_size"], "tokens_per_s": facts["tokens_per_s"]}
    gradients = [{"bytes": 4, "ready_s": 0.1}]
    settings = {"parameters": facts["parameters"], "precision": facts["precision"], "sequence_length": 128}
    data = {
        "profile": {**shape, "micro_s": 0.2, "backward_s": 0.1, "gradients": gradients},
        "settings": settings,
        "cells": [{"id": "a", **cell, **rates}, {"id": "b", **cell, **rates, "kind": "ceiling"}],
    }
    path = folder / "scaling.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("kind", ["run", "scaling"])
def test_a_measured_speed_comes_first(kind: str, tmp_path: Path) -> None:
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
        ({"gpus": 4}, {}, "--nproc"),
        ({"keep_model": False, "tokens_per_parameter": 20.0}, {}, "--from"),
        ({"gpu": H100}, {}, "--gpu"),
    ],
)
def test_a_record_of_something_else_is_refused(kind, options, changes, setting, tmp_path: Path) -> None:
    given = {"hours": 2.0, "gpus": 2, "keep_model": True, "from_": record(tmp_path, kind, **changes)}
    assert issue({**given, **options}, tmp_path) == (setting, "conflict")


def test_another_sequence_length_is_refused(tmp_path: Path) -> None:
    data = BASE.data.model_copy(update={"sequence_length": 64})
    with pytest.raises(ConfigError) as refused:
        recorded_rate(record(tmp_path, "run"), BASE.model_copy(update={"data": data}), "bf16", 2)
    assert [issue.setting for issue in refused.value.issues] == ["data.sequence_length"]


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def own_rows() -> list[dict[str, Any]]:
    return [
        {"budget_flops": run.budget_flops, "parameters": run.parameters, "loss": run.loss}
        for run in own_fit().runs
    ]


def test_a_table_is_fitted_and_planned_with(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError) as refused:
        fit.fit_runs(fit.read_table(table(tmp_path / "runs.csv", change(own_rows()))))
    assert refused.value.issues[0].kind == kind


def test_a_law_that_contradicts_its_runs_is_not_planned_with(
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
    assert issue(options, tmp_path) == ("--frontier", "unsupported")


def test_a_fit_without_scipy_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = own_fit().runs
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    (found,) = raised_issues(loss_fit.fit, runs)
    assert (found.kind, found.value) == ("needs_package", "scipy")


@pytest.mark.parametrize(
    ("changes", "setting", "kind"),
    [
        ({"status": "stopped"}, "RUNS", "unsupported"),
        ({"heldout_loss": None}, "RUNS", "unsupported"),
        ({"mask_rate": 0.15}, "objective.mask_rate", "conflict"),
    ],
)
def test_runs_that_do_not_compare_are_refused(changes, setting, kind, tmp_path: Path) -> None:
    loss = changes.pop("heldout_loss", 2.0)
    runs = [run(tmp_path / "a", 2.0), run(tmp_path / "b", loss, **changes)]
    with pytest.raises(ConfigError) as refused:
        fit.read_runs(runs)
    assert (refused.value.issues[0].setting, refused.value.issues[0].kind) == (setting, kind)


def test_runs_of_nearly_equal_compute_share_a_budget(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(i), 2.0, tokens=tokens) for i, tokens in enumerate((10**9, 11 * 10**8, 10**10))
    ]
    rows = fit.grouped(fit.read_runs(runs)[0])
    assert len({row.budget_flops for row in rows}) == 2
    assert rows[0].budget_flops == pytest.approx(6e17 * 1.1**0.5)
    assert rows[0].parameters_without_embedding == 10**8 - BASE.model.vocab_size * BASE.model.hidden_size


DRY = ("train", "crammed-bert", "data.sources=builtin", "--dry-run")


def test_a_dry_run_on_gpus_that_are_not_there(tmp_path: Path) -> None:
    done = here(*DRY, "--gpu", H100, "--nproc", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert "accumulation 8 x dp 8" in lines["batch"]
    assert lines["micro"].startswith("128 ")
    rate = gpu_rate(BASE, H100, 8, "bf16").tokens_per_s
    assert lines["speed"].startswith(format_si(rate, "tokens"))
    assert lines["reach"].startswith(format_si(rate * 24 * 3600, "tokens"))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_tokens_has_a_time_and_auto_precision_follows_the_gpu(tmp_path: Path) -> None:
    done = here(*DRY, "schedule.tokens=1000000000", "--gpu", "T4-16G", cwd=tmp_path)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (done.returncode, "fp16" in lines["memory"], "time" in lines) == (0, True, True)


def test_a_dry_run_of_dollars_reaches_what_their_hours_do(tmp_path: Path) -> None:
    dollars = ("schedule.hours=null", "schedule.dollars=80", "run.price_per_device_hour=2.5")
    done = here(*DRY, *dollars, "batch.micro_size=256", "--gpu", H100, "--nproc", "4", cwd=tmp_path)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    rate = gpu_rate(BASE, H100, 4, "bf16").tokens_per_s
    assert lines["reach"].startswith(format_si(rate * 8 * 3600, "tokens"))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--gpu", "h100"), H100),
        (("--gpu", "H100-SXM"), H100),
        (("--gpu", H100, "--nproc", "3"), "batch.global_size"),
        (("--gpu", "V100-16G", "precision=bf16"), "precision"),
        (("--gpu", "T4-16G", "batch.micro_size=1024"), "batch.micro_size"),
    ],
)
def test_a_dry_run_that_is_refused(more: tuple[str, ...], word: str, tmp_path: Path) -> None:
    done = here(*DRY, *more, cwd=tmp_path)
    assert (done.returncode, word in done.stderr) == (2, True), done.stderr


def test_a_gpu_is_of_a_dry_run_alone(tmp_path: Path) -> None:
    done = here(*DRY[:3], "--gpu", H100, cwd=tmp_path)
    assert (done.returncode, "--dry-run" in done.stderr) == (2, True)
