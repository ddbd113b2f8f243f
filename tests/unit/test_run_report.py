"""Tests of the report of a run, complete or crashed, and of the comparison of several runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bert_dp import files
from bert_dp.config import dump_config
from launcher.log import runnable
from launcher.report.page import Report
from launcher.report.run_page import of_directories
from tests.e2e.cli import here
from tests.helpers import failed, make_config, write_lines
from tests.report_fixture import SUMMARY, evaluation, figure_of, make_run, read_page, shown, unfolded

SCORED = {"loss": 0.5, "examples": 277, "scores": {"dev/accuracy": 0.7123, "test/f1": 0.8012}}
UNUSUAL = {"failed_saves": 3, "failed_writes": 7, "loss_spikes": 1, "skipped_steps": 2, "energy_j": 2.1e7}


def report_of(path: Path, **summary: Any) -> Report:
    """Return the report of a run with `summary` added to its summary."""
    return of_directories([make_run(path, summary=summary)])


def rows_of(report: Report, title: str = "Numbers") -> dict[tuple[str, str], list[str]]:
    """Return the value and the note of each column by (topic, label)."""
    section = next(section for section in report.sections if section.title == title)
    rows = [row for table in section.tables for row in table.rows]
    return {(row.topic, row.label): [f"{c.text} | {c.note}" for c in row.cells] for row in rows}


def test_every_number_is_shown_with_its_denominator(tmp_path: Path) -> None:
    """tests/golden records the values of every row."""
    report = report_of(tmp_path / "run", energy_j=4096.0, straggler_ratio=1.05)
    rows = {key: cells[0] for key, cells in rows_of(report).items()}
    bare = [label for (_, label), cell in rows.items() if cell.endswith("| ")]
    assert bare == ["checkpoint"]
    loss, basis, interval = rows["Outcome", "held-out loss"].replace("; ", " | ").split(" | ")
    assert (loss, interval) == ("6.2500 nats ± 0.0392", "±: 95 % interval over sequences")
    assert basis == "mean over 4,096 masked tokens in 216 sequences, 15.0 % masked"
    assert rows["Work", "optimizer steps"].endswith("global batch 64 = micro 16 x accumulation 2 x dp 2")
    assert rows["Throughput", "token rate"] == "16.4 k tokens/s | summed over 2 CPU ranks"
    assert rows["Throughput", "MFU"] == "n/a | model FLOP/s divided by the fp32 peak of the device (unknown)"
    assert rows["Time (rank 0)", "data wait"] == "3.0 s | 3.0 % of the wall time, part of train"
    assert rows["Resources and files", "energy"] == "4.1 kJ | 3.33 kJ per million tokens, 2 CPU ranks"
    losses = ("final_loss", "heldout_loss", "unigram_entropy_nats", "uniform_entropy_nats")
    speeds = ("steps_per_s", "global_steps_per_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu")
    assert {SUMMARY[key] for key in (*losses, *speeds, "peak_memory_gib")} <= read_page(report).exact


def test_the_console_is_compact_and_shows_unusual_values(tmp_path: Path) -> None:
    quiet = shown(report_of(tmp_path / "quiet", skipped_steps=0))
    loud = unfolded(shown(report_of(tmp_path / "loud", **UNUSUAL)))
    assert len(quiet) <= 28
    for words in ("failed saves 3", "loss spikes 1", "skipped steps 2", "21 MJ"):
        assert words in loud
        assert words[:-2] not in unfolded(quiet)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "ok", "held-out loss 6.2500 nats ± 0.0392 (a context-free model: 6.7500 nats)."),
        (
            {"heldout_loss": 7.0},
            "ok",
            "6.7500 nats). The model predicts no better than word frequencies do; train longer.",
        ),
        ({"heldout_loss": None}, "ok", "not recorded"),
        ({"unigram_entropy_nats": None}, "ok", "held-out loss 6.2500 nats ± 0.0392."),
        ({"heldout": None}, "ok", "held-out loss 6.2500 nats (a context-free"),
        (failed("OOM\nmore"), "fail", "exit code 1): OOM"),
        ({"status": "failed"}, "fail", "cause not recorded"),
        (
            {"status": "stopped", "signal": 15},
            "warn",
            "Stopped by SIGTERM at step 100, after saving a checkpoint.",
        ),
        ({"status": "stopped", "signal": None, "checkpoint": None}, "warn", "by a signal at step 100."),
        ({"heldout": SCORED}, "ok", "step 100: dev accuracy 0.7123, test f1 0.8012 on 277 examples."),
        ({"heldout": {**SCORED, "scores": {}}}, "ok", "no score: a logit was not finite on 277 examples."),
        (
            {"heldout": {**SCORED, "one_class": ["dev", "test"]}},
            "warn",
            "Every example in dev, test is assigned",
        ),
    ],
)
def test_the_verdict_of_a_run(tmp_path: Path, change: dict[str, Any], level: str, words: str) -> None:
    (verdict,) = report_of(tmp_path / "run", **change).verdicts
    assert verdict.level == level
    assert words in verdict.text


def test_comparison_names_the_runs_and_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", run={"seed": 7})]
    report = of_directories(runs)
    assert [verdict.name for verdict in report.verdicts] == ["run (1)", "run (2)"]
    assert rows_of(report, "Settings that differ") == {("", "run.seed"): ["n/a | ", "7 | "]}


def test_a_finetuned_run_has_its_own_loss_unit(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", heldout={**SCORED, "loss_unit": "squared error"}, compiled=True)
    assert rows_of(report)["Work", "parameters"] == ["1.23 M | precision fp32, compiled"]
    assert figure_of(report, "Loss").y.label == "loss per example (squared error)"
    assert not [section for section in report.sections if section.title == "Classes"], "no predictions"


def test_spikes_of_a_long_run_stay_visible(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_lines=0)
    unlike: dict[int, float | None] = {7777: 99.0, 4444: None, 3333: 0.5}
    lines = [{"step": i, "tokens": i, "loss": unlike.get(i, 1.0)} for i in range(20_000)]
    write_lines(run / "metrics.jsonl", lines)
    report = of_directories([run])
    training = figure_of(report, "Loss").traces[0]
    assert len(training.x) < 2100
    points = dict(zip(training.x, training.y, strict=True))
    assert points.items() >= {**unlike, 0: 1.0, 19_999: 1.0}.items()
    assert read_page(report).data[0]["switch"] == "tokens"


def test_the_next_command_of_a_diverged_run_halves_the_rate(tmp_path: Path) -> None:
    for checkpoint in ("", "checkpoints/step-00000090"):
        facts = {**failed("the model has diverged", "not_finite"), "checkpoint": checkpoint or None}
        run = make_run(tmp_path / f"run{checkpoint[-1:]}", summary=facts, optim={"lr": 0.003})
        assert of_directories([run]).next == f"bert-dp train {run}/config.yaml optim.lr=0.0015"


def test_a_killed_run_shows_its_logged_values_and_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("summary.json", "evals.jsonl", "environment.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "los')
    report = of_directories([run])
    (verdict,) = report.verdicts
    assert verdict.text == "No end recorded: the run is still running or was killed. Last logged: step 100."
    missing = [note.partition(":")[0] for note in verdict.notes]
    assert missing == [
        "summary.json is missing or truncated",
        "environment.json is missing",
        "metrics.jsonl is truncated or empty",
    ]
    assert verdict.notes[-1].endswith(": 10 complete lines read")
    assert "last training loss 6.0000 nats" in unfolded(shown(report))
    files.append_line(run / "evals.jsonl", evaluation(200, 819200, 5.5))
    (run / "checkpoints" / "step-00000090").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(make_config("precision=fp32")))
    rows = {label: cells[0] for (_, label), cells in rows_of(of_directories([run])).items()}
    assert rows["held-out loss"].startswith("5.5000 nats")
    assert rows["checkpoint"].startswith("checkpoints/step-00000090")
    unknown = {label for label, cell in rows.items() if cell.startswith("n/a")}
    logged_nowhere = {"unigram entropy", "ln V", "parameters", "straggler ratio", "MFU", "energy", "wall"}
    assert unknown == logged_nowhere | {"cost", "total energy", "CO2"}
    assert rows["parameters"].endswith("| precision fp32")
    gpu = {"worker": {"precision": "bf16"}, "gpus": [{"name": "H100"}], "git_dirty": True, "git_commit": "a"}
    files.write_json(run / "environment.json", gpu)
    (run / "config.yaml").write_text(dump_config(make_config("precision=auto")))
    report = of_directories([run])
    assert report.subtitle[0].startswith("2 x H100")
    assert report.subtitle[0].endswith("commit a + uncommitted changes")
    assert rows_of(report)["Work", "parameters"][0].endswith("| precision bf16")


# additions to summary.json; None: no summary.json
ENDINGS: dict[str, dict[str, Any] | None] = {
    "done": {},
    "failed": failed("no", rank=1),
    "failed early": {"status": "failed", "step": 0, "heldout_loss": None},
    "stopped": {"status": "stopped", "signal": 15, "exit_code": 143},
    "rank killed": {**failed("killed by signal 9", "killed", rank=1), "step": 100},
    "killed": None,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_has_a_report_and_a_next_command(tmp_path: Path, ending: str) -> None:
    summary = ENDINGS[ending]
    run = make_run(tmp_path / "a run", summary=summary)
    if ending == "rank killed":  # only the launcher has written a summary
        files.write_json(run / "summary.json", summary)
    (run / "checkpoints" / "step-00000100").mkdir(parents=True)
    if summary is None:
        (run / "summary.json").unlink()
    report = of_directories([run])
    goes_on = f"bert-dp train --run-dir '{run}' --nproc 2"
    exports = f"bert-dp export onnx '{run}' --out '{run}-onnx'"
    assert report.next == (exports if ending == "done" else goes_on)
    shown_rows = rows_of(report)
    unknown = {label for (_, label), cells in shown_rows.items() if cells[0].startswith("n/a")}
    rates = {"token rate", "token rate per device", "optimizer step rate", "sample rate"}
    logged = {"last training loss", "tokens", "optimizer steps", "samples", *rates}
    assert not unknown & {*logged, "peak memory", "checkpoint"}
    assert not any(tile.cells[0].text == "n/a" for tile in report.tiles) or ending == "failed early"
    from_log = "last logged interval" in shown_rows["Throughput", "token rate"][0]
    assert from_log == (ending in ("rank killed", "killed"))
    if ending == "rank killed":
        assert shown_rows["Outcome", "cause"] == ["rank 1: killed by signal 9 | "]
        (run / "metrics.jsonl").write_text("")  # before the first logged step
        facts = json.loads((run / "environment.json").read_text())
        files.write_json(run / "environment.json", {**facts, "worker": {"world_size": 2}})
        assert of_directories([run]).next == goes_on


def test_more_than_four_passes_are_noted_and_own_code_needs_allow_code(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**json.loads(line), "epoch": 5} for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", lines)
    (verdict,) = of_directories([run]).verdicts
    assert any("5 passes" in note for note in verdict.notes)
    config = {"data": {"sources": ["builtin"]}, "optim": {"lr": 1e-3, "name": "/own/lion.py:make"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    files.write_json(run / "summary.json", {**SUMMARY, "status": "stopped", "checkpoint": "checkpoints/x"})
    report = of_directories([run])
    assert not any("5 passes" in note for note in report.verdicts[0].notes)
    assert report.next == f"bert-dp train --run-dir {run} --nproc 2 --allow-code"
    machine = json.loads((run / "environment.json").read_text())
    files.write_json(run / "environment.json", {**machine, "nodes": {"node 0 (a)": 1, "node 1 (b)": 1}})
    assert of_directories([run]).next == f"bert-dp train --run-dir {run} --allow-code"


def test_a_command_works_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).with_name("bert-dp")
    assert runnable("bert-dp eval") == "bert-dp eval"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runnable("bert-dp eval") == f"{own} eval"
    (tmp_path / "bert-dp").write_text("of another environment")
    (tmp_path / "bert-dp").chmod(0o755)
    assert runnable("bert-dp eval") == f"{own} eval"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    assert runnable("bert-dp eval") == f"{sys.executable} -P -m launcher eval"
    assert runnable("python -c 1") == "python -c 1"


def with_losses(path: Path, losses: list[float], text: str = "a", **config: Any) -> Path:
    """Write a run with the loss of each held-out sequence."""
    loss = sum(losses) / len(losses)
    summary = {"heldout_loss": loss, "heldout": {**SUMMARY["heldout"], "loss": loss}}
    run = make_run(path, summary=summary, **config)
    facts = {"text_sha256": text, "mask_rate": 0.15, "losses": losses}
    files.write_json(run / "heldout_losses.json", facts)
    return run


def test_a_comparison_leads_with_settings_then_ranks_by_paired_differences(tmp_path: Path) -> None:
    """The losses vary by 1 nat between sequences, but their difference only by 0.01."""
    easy, worse = [5.0, 6.0, 7.0, 6.5], [5.1, 6.12, 7.1, 6.62]
    runs = [
        with_losses(tmp_path / "worse", worse),
        with_losses(tmp_path / "best", easy, optim={"lr": 2e-3}),
        with_losses(tmp_path / "elsewhere", [loss + 1 for loss in easy], text="b"),
    ]
    report = of_directories(runs)
    assert [section.title for section in report.sections[:2]] == ["Settings that differ", "Held-out loss"]
    (table,) = report.sections[1].tables
    assert [row.label for row in table.rows] == ["best", "worse", "elsewhere"]
    differences = [row.cells[1] for row in table.rows]
    assert [cell.text for cell in differences] == ["", "+0.1100 ± 0.0113", "+1.0000"]  # 1.96 x 0.01155 / 2
    assert [bool("same tokens" in cell.note) for cell in differences] == [False, True, False]
    assert [figure.title for figure in report.sections[2].figures].count("Loss") == 1
    assert "+0.1100 ± 0.0113" in here("report", *map(str, runs), "--out", str(tmp_path / "p.html")).stdout
    stale = {**json.loads((runs[0] / "heldout_losses.json").read_text()), "losses": easy}
    files.write_json(runs[0] / "heldout_losses.json", stale)  # from another evaluation
    assert of_directories(runs).sections[1].tables[0].rows[1].cells[1].text == "+0.1100"


def test_losses_that_are_not_comparable_share_no_axis(tmp_path: Path) -> None:
    runs = [
        with_losses(tmp_path / "a", [5.0, 6.0]),
        with_losses(tmp_path / "b", [5.0, 6.0], objective={"mask_rate": 0.5}),
        with_losses(tmp_path / "c", [4.0, 6.0]),
        with_losses(tmp_path / "d", [4.0, 6.0]),
    ]
    (runs[3] / "tokenizer.json").write_text("another vocabulary")
    report = of_directories(runs)
    titles = ["Loss of a, c", "Loss of b", "Loss of d"]
    assert [figure.title for figure in report.sections[2].figures if "Loss" in figure.title] == titles
    assert [[row.label for row in t.rows] for t in report.sections[1].tables] == [["c", "a"], ["b"], ["d"]]
    assert "bits per byte" in report.sections[1].notes[0]
    colours = {line.label: line.colour for figure in report.sections[2].figures[:3] for line in figure.traces}
    assert colours["c: training"] == 2
