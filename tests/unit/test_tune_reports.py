"""The reports of the searches of the micro batch and of the learning rate: whole, partial, empty."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from launcher import results
from launcher.report.model import Line, Report
from launcher.tune.batch_report import batch_report, run_rate
from launcher.tune.rate_report import rate_report
from tests.report_fixture import figure_of, read_page, shown, unfolded
from tests.tune_fixture import DECLARED, NOISE, TOO_LARGE, batch, lr, predicted_gib, transfer, unmeasured
from tests.unit.test_scale_page import numbers, points

OUT = Path("OUT")


def of(data: dict[str, Any]) -> Report:
    if data["kind"] == "lr":
        return rate_report(results.parse(data, results.TuneLr, "tune.json"), OUT)
    return batch_report(results.parse(data, results.TuneBatch, "tune.json"), OUT)


def change(data: dict[str, Any], key: str, **entries: Any) -> dict[str, Any]:
    return {**data, key: {**data[key], **entries}}


def line(report: Report, title: str, label: str) -> Line:
    return next(t for t in figure_of(report, title).traces if isinstance(t, Line) and t.label == label)


THROUGHPUT, MEMORY = "Throughput against micro batch", "Peak memory against micro batch"
PARTS, GOODPUT = "What the memory of a rank is made of", "Goodput against global batch"
LOSS, RANGE = "Held-out loss against learning rate", "Range test"
CURVES = "Learning curves of the last rung"


@pytest.mark.parametrize(
    ("data", "figures"),
    [(batch(), {THROUGHPUT, MEMORY, PARTS, GOODPUT}), (lr(), {LOSS, RANGE, CURVES})],
    ids=["batch", "lr"],
)
def test_every_figure_is_there(data: dict[str, Any], figures: set[str]) -> None:
    page = read_page(of(data))
    assert set(page.labels) == figures
    for words in (
        "Settings",
        "Environment",
        "Configuration",
        "bert-dp train OUT/tuned.yaml",
        data["config_hash"],
    ):
        assert words in page.text
    assert "no data recorded" not in page.text


@pytest.mark.parametrize(
    ("data", "level", "words"),
    [
        (batch(), "ok", "Micro batch 8, accumulation 1: 221 sequences/s, the best."),
        (
            change(batch(), "choice", micro_batch=4, share_of_best=0.98),
            "ok",
            "Micro batch 4, accumulation 1: 221 sequences/s, 98.0 % of the best (8).",
        ),
        (change(batch(), "choice", why="the curve is flat"), "ok", "The curve is flat."),
        (change(batch(), "choice", limited_by="budget"), "ok", "--budget raises it"),
        (
            change(batch(), "choice", limited_by="memory"),
            "ok",
            "Larger sizes do not fit the memory of a rank.",
        ),
        (change(batch(), "choice", not_settled=[4, 8]), "warn", "Not settled: micro batch 4, 8 may also"),
        (change(batch(), "drift", ratio=0.96), "warn", "The machine drifted: micro batch 4"),
        (change(batch(), "drift", ratio=1.04), "warn", "The machine drifted: micro batch 4"),
        (batch(cached=True), "ok", "From the cache"),
        (batch(status="partial"), "warn", "Partial: stopped before its end"),
        (batch(status="failed", why="micro batch 1 fails", choice=None), "fail", "Failed: micro batch 1"),
        (batch(choice=None), "warn", "No micro batch was chosen."),
        (batch(schema_version=2), "warn", "schema version 2; this page reads version 1"),
        (
            lr(),
            "ok",
            "Learning rate 5.70e-02 (adamw, weight decay 0.01): held-out loss 4.8221 nats ± 1.4568, "
            "mean of 2 seeds (4.7074 nats to 4.9367 nats).",
        ),
        (change(lr(), "choice", at_edge=True, edge_side="high"), "warn", "was measured on the higher side"),
        (change(lr(), "choice", at_edge=True, edge_side="low"), "warn", "was measured on the lower side"),
        (change(lr(), "choice", tied=[["adamw", 0.01, 0.002]]), "ok", "Cannot be told apart from 2.00e-03"),
        (lr(), "ok", "Of 9 trials: 1 diverged."),
        (lr(), "ok", "4.97 nats, above the unigram entropy 4.925"),
        (lr(), "ok", "56.7 % of the full grid"),
        (lr(choice=None), "warn", "No learning rate was chosen; the logs stand below OUT/trials."),
    ],
)
def test_the_choice_and_what_limits_it_are_told(data: dict[str, Any], level: str, words: str) -> None:
    report = of(data)
    assert report.verdicts[0].level == level
    assert words in read_page(report).text
    assert words in unfolded(shown(report, 200))


@pytest.mark.parametrize("ratio", [0.971, 1.029])
def test_a_steady_machine_is_not_doubted(ratio: float) -> None:
    assert "drifted" not in read_page(of(change(batch(), "drift", ratio=ratio))).text


def test_throughput_shows_each_size_and_each_run() -> None:
    data = batch()
    report = of(data)
    figure = figure_of(report, THROUGHPUT)
    median, runs = (t for t in figure.traces if isinstance(t, Line))
    sizes = data["sizes"]
    assert points(median) == {s["micro_batch"]: s["samples_per_s"] for s in sizes}
    assert list(zip(median.low, median.high, strict=True)) == [tuple(s["samples_per_s_ci95"]) for s in sizes]
    rates = [DECLARED / statistics.fmean(run["step_s"]) for size in sizes for run in size["runs"]]
    assert (runs.x, runs.y) == ([2, 4, 4, 8], pytest.approx(rates))
    assert figure.levels[0].value == pytest.approx(0.97 * sizes[-1]["samples_per_s"])
    assert [mark.value for mark in figure.marks] == [8]
    assert figure.x.ticks == [2, 4, 8]
    sizes[0]["samples_per_s_ci95"] = [1.0, 9e5]
    wide = of(data)
    high = line(wide, THROUGHPUT, median.label).high[0]
    assert high == pytest.approx(3 * max(rates)), "the curve stays visible"
    assert "Ends of intervals above" in figure_of(wide, THROUGHPUT).note


def test_a_shorter_trial_counts_the_update_once() -> None:
    """Half the sequences: a step of the declared batch has twice the passes and one update."""
    run = results.TimedRun(name="r", step_s=[1.0, 1.2], forward_backward_s=[0.8, 0.9], peak_gib=[1.0])
    tune = results.TuneBatch(trial_samples=64, global_batch=128)
    assert run_rate(tune, run) == pytest.approx(128 / ((1.8 + 2.1) / 2))
    assert run_rate(tune.model_copy(update={"trial_samples": 128}), run) == pytest.approx(128 / 1.1)
    assert run_rate(tune.model_copy(update={"trial_samples": None}), run) is None


def test_memory_shows_the_line_the_peaks_and_the_limits() -> None:
    data = batch()
    report = of(data)
    expected = {micro: predicted_gib(data, micro) for micro in (0, TOO_LARGE, 20)}
    ends = points(line(report, MEMORY, "predicted"))
    assert ends == pytest.approx({0: expected[0], 20: expected[20]})
    assert points(line(report, MEMORY, "out of memory")) == pytest.approx({TOO_LARGE: expected[TOO_LARGE]})
    assert set(line(report, MEMORY, "measured, greatest rank").x) == {2, 4, 8}
    assert [rule.value for rule in figure_of(report, MEMORY).levels] == pytest.approx([0.5, 0.45])
    wide = of(change(data, "memory", predicted_limit=5000))
    assert max(x for t in figure_of(wide, MEMORY).traces if isinstance(t, Line) for x in t.x) == TOO_LARGE
    far = figure_of(of(change(data, "memory", limit_gib=64.0)), MEMORY)
    assert not far.levels
    assert "The limit, 64.00 GiB, is far above" in far.note
    parts = [bar.parts[0] for bar in figure_of(report, PARTS).traces]  # type: ignore[union-attr]
    assert math.fsum(parts) == pytest.approx(predicted_gib(data, 8))  # type: ignore[arg-type]


def test_noise_scale_with_its_equation_or_why_there_is_none() -> None:
    report = of(batch())
    verdict = next(v for v in report.verdicts if v.text.startswith("Noise scale"))
    assert verdict.text == "Noise scale: 310 sequences, 95 % interval 255 to 391."
    assert "B_simple = tr(Sigma) / |G|^2 = 0.62 / 0.002, 170 of 170 steps" in verdict.notes[0]
    assert f"is worth {100 / (1 + DECLARED / NOISE):.1f} % of one in a small batch" in verdict.notes[1]
    assert "steps from random weights; it grows in training" in verdict.notes[0]
    longer = change(batch(), "noise", init_from="runs/a", of_steps=400)
    assert any("170 of 400 steps from runs/a;" in n for v in of(longer).verdicts for n in v.notes)
    none = of(batch(inconclusive="fewer than 50 steps"))
    assert none.tiles[3].note == "fewer than 50 steps"
    assert "Noise scale: inconclusive: fewer than 50 steps." in [v.text for v in none.verdicts]
    page = read_page(none)
    assert set(page.labels) == {THROUGHPUT, MEMORY, PARTS}
    assert "No noise scale, so no goodput." in page.text
    assert "310" not in page.text


def test_goodput_marks_the_declared_and_the_recommended_batch() -> None:
    data = batch()
    report = of(data)
    batches = data["goodput"]["points"]
    curve = line(report, GOODPUT, "goodput, 95 % interval")
    assert points(curve) == {p["global_batch"]: p["goodput"] for p in batches}
    assert list(zip(curve.low, curve.high, strict=True)) == [(p["low"], p["high"]) for p in batches]
    marks = {mark.label: mark.value for mark in figure_of(report, GOODPUT).marks}
    assert marks == {"declared global batch": DECLARED, "recommended": 32}
    wide = change(data, "goodput", recommended_interval=[16, 64])
    assert "At the ends of the noise scale's interval: 16 and 64." in read_page(of(wide)).text
    same = change(data, "goodput", recommended=DECLARED)
    assert "wants another learning rate" not in read_page(of(same)).text
    assert "wants another learning rate" in read_page(report).text
    assert "end of what was looked at" not in read_page(report).text
    at_edge = of(change(data, "goodput", at_edge=True))
    assert "It is the end of what was looked at" in read_page(at_edge).text


def test_loss_by_rate_has_the_band_of_the_last_rung_and_what_diverged() -> None:
    data = lr()
    figure = figure_of(of(data), LOSS)
    first, last, seeds, diverged = (t for t in figure.traces if isinstance(t, Line))
    assert points(first) == {t["lr"]: t["heldout_loss"] for t in data["rungs"][0]["trials"]}
    assert not first.low
    losses = [t["heldout_loss"] for t in data["rungs"][1]["trials"]]  # 0.057, 0.0285, one diverged, 0.057
    band = [losses[0], losses[3]]
    assert (0.057, min(band), max(band)) in zip(last.x, last.low, last.high, strict=True)
    assert points(last) == pytest.approx({0.0285: losses[1], 0.057: sum(band) / 2, 0.114: None})
    assert (seeds.label, len(seeds.x)) == ("a seed of the last rung", 3)
    assert (diverged.label, diverged.x) == ("diverged (drawn at the top)", [0.114])
    assert diverged.values[0] > max(first.values)
    assert [mark.value for mark in figure.marks] == [0.057]


def test_range_test_marks_the_edge_and_cuts_what_is_far_above() -> None:
    data = lr()
    figure = figure_of(of(data), RANGE)
    first_loss = data["range_test"]["points"][0][1]
    assert [mark.value for mark in figure.marks] == [data["range_test"]["edge"]]
    assert max(figure.traces[0].values) == pytest.approx(1.5 * first_loss)
    assert f"Losses above {1.5 * first_loss:.2f} are drawn there" in figure.note
    figure = figure_of(of(change(data, "range_test", edge=None, why="no divergence up to 0.1")), RANGE)
    assert not figure.marks
    assert "; no divergence up to 0.1." in figure.note


def test_a_curve_for_each_trial_of_the_last_rung() -> None:
    data = lr()
    figure = figure_of(of(data), CURVES)
    assert [t.label for t in figure.traces] == ["2.85e-02", "5.70e-02", "5.70e-02", "1.14e-01"]
    assert figure.levels[0].value == data["unigram_entropy_nats"]


def test_tables_hold_every_number() -> None:
    data = batch()
    sizes = [{key: value for key, value in size.items() if key != "runs"} for size in data["sizes"]]
    tables = [sizes, data["memory"]["tried"], data["goodput"]["points"]]
    assert numbers(tables) <= read_page(of(data)).exact
    data = lr(transfer=transfer())
    page = read_page(of(data))
    trials = [{**t, "curve": None} for rung in data["rungs"] for t in rung["trials"]]
    assert numbers([trials, data["transfer"]["rules"]]) <= page.exact
    assert all(t["trial"] in page.text for t in trials)
    assert "sqrt (as configured)" in page.text
    assert "Transfer" not in read_page(of(lr())).text


@pytest.mark.parametrize(("se", "warned"), [(0.2, True), (0.01, False)])
def test_a_lead_that_the_held_out_text_cannot_carry_is_warned_of(se: float, warned: bool) -> None:
    """The next rate is 0.1869 nats behind; the interval of one loss is 1.96 standard errors. That of a mean
    of two seeds has their spread too, by Student's t of one degree of freedom."""
    data = lr()
    data["rungs"][-1]["trials"][2] |= {"status": "ok", "heldout_loss": 5.5}  # further behind
    for trial in data["rungs"][-1]["trials"]:
        trial["heldout"] = {"loss_se": se, "masked_tokens": 2048, "sequences": 128, "mask_rate": 0.15}
    report = of(data)
    notes = [note for note in report.verdicts[0].notes if "held-out text is small" in note]
    assert [note[47:58] for note in notes] == ["0.1869 nats"] * warned
    last = data["rungs"][-1]["trials"]
    losses = [trial["heldout_loss"] for trial in last if trial["lr"] == data["choice"]["lr"]]
    seeds = 12.706204736 * statistics.stdev(losses) / math.sqrt(2)
    assert len(losses) == 2
    assert f"4.8221 nats ± {math.hypot(seeds, 1.96 * se):.4f}" in report.verdicts[0].text
    for trial in last:
        trial["status"] = "ok" if trial["seed"] == last[0]["seed"] else "failed"
    assert f" nats ± {1.96 * se:.4f}" in of(data).verdicts[0].text, "of one seed that ended well"
    assert "2,048 masked tokens of 128 sequences, 15.0 % masked" in report.tiles[1].note


def test_a_run_is_told_by_its_means_and_a_lost_size_by_its_reason() -> None:
    run = {"name": "r", "step_s": [0.1, 0.3], "forward_backward_s": [0.1, 0.2], "peak_gib": [0.5, 0.75]}
    size = batch()["sizes"][0] | {"runs": [run | {"alloc_retries": 2}], "status": "thrash", "why": "w"}
    text = read_page(of(batch(sizes=[size], global_batch=16, trial_samples=16))).text
    assert "r 2 80 200 ms 150 ms 0.75 GiB 2" in text
    assert "micro batch 2: thrash: w" in text
    lost = of(batch(sizes=[{**size, "runs": [], "samples_per_s": None, "samples_per_s_ci95": None}]))
    assert "Without a throughput: 2 (allocator retried)." in figure_of(lost, THROUGHPUT).note


def test_finalists_say_which_is_chosen_and_which_is_tied() -> None:
    text = unfolded(shown(of(change(lr(), "choice", tied=[["adamw", 0.01, 0.0285]])), 120))
    assert "5.70e-02 (chosen) 4.8" in text
    assert "2.85e-02 (tied) 5.0" in text
    assert "(tied)" not in unfolded(shown(of(lr())))


@pytest.mark.parametrize("data", [unmeasured(), {"kind": "lr", "status": "partial"}], ids=["batch", "lr"])
def test_nothing_measured_is_never_zero(data: dict[str, Any]) -> None:
    page = read_page(of(data))
    assert page.labels == []
    assert "0.0" not in page.text
    assert "0 tokens" not in page.text


def test_the_command_that_takes_the_choice_can_be_pasted() -> None:
    tuned = results.TuneLr.model_validate(lr())
    assert rate_report(tuned, Path("my out")).next == "bert-dp train 'my out/tuned.yaml'"
