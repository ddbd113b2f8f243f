"""The page of a search of the micro batch or the learning rate: whole, partial, hostile, torn, empty."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_dp import record
from bert_dp.config import ConfigError
from launcher import plots
from launcher.report.numbers import format_lr_tick, number
from launcher.tune import FILE, figures_batch, figures_lr, page
from tests.scaling_fixture import HOSTILE
from tests.tune_fixture import CHOSEN, GLOBAL, NOISE, RATES, batch, gib, lr, transfer, unmeasured
from tests.unit.test_scaling_page import check, labels, numbers, spoil, text_of

BATCH_FIGURES = {
    "Throughput against micro batch",
    "Peak memory against micro batch",
    "What the memory of a rank is made of",
    "Noise scale and what a sequence is worth",
    "Goodput against global batch",
    "Squared gradient norms",
}
LR_FIGURES = {"Held-out loss against learning rate", "Range test", "Learning curves of the last rung"}
MAKERS: list[Callable[..., dict[str, Any]]] = [batch, lr]
VALUES = [
    None,
    "x",
    True,
    math.nan,
    math.inf,
    -1.0,
    0,
    1e300,
    1.7e308,
    10**400,
    5e-324,
    [],
    [1],
    {"a": 1},
    HOSTILE,
]


def of(series: list[plots.Series], label: str) -> plots.Series:
    return next(s for s in series if s.label == label)


def cards(whole: str) -> list[tuple[str, str]]:
    """(level, text) of each verdict."""
    return re.findall(r'<div class="verdict (\w*)">([^<]*)<', whole)


@pytest.mark.parametrize(
    ("data", "figures"), [(batch(), BATCH_FIGURES), (lr(), LR_FIGURES)], ids=["batch", "lr"]
)
def test_every_figure_is_there(data: dict[str, Any], figures: set[str]) -> None:
    whole = page.html(data)
    check(whole)
    assert labels(whole) == figures
    assert not re.search(r"https?://", whole)
    for words in ("Settings", "Environment", "Configuration", "bert-dp train OUT/tuned.yaml", "5f2c9a1e"):
        assert words in whole
    assert "no data recorded" not in whole


def test_the_choice_stands_first() -> None:
    level, text = cards(page.html(batch()))[0]
    assert level == "ok"
    assert text == "Micro batch 16, accumulation 4: 221 sequences/s, 98.1 % of the best (32)"
    level, text = cards(page.html(lr()))[0]
    assert level == "ok"
    assert text.startswith("Learning rate 1.00e-03 (adamw, weight decay 0.01): held-out loss 5.6")
    assert "mean of 3 seeds (5.6" in text


def change(data: dict[str, Any], key: str, **entries: Any) -> dict[str, Any]:
    return {**data, key: {**data[key], **entries}}


@pytest.mark.parametrize(
    ("data", "level", "words"),
    [
        (change(batch(), "choice", micro_batch=32), "ok", ": 221 sequences/s, the best<"),
        (change(batch(), "choice", flat=True), "ok", "The curve is flat"),
        (change(batch(), "choice", limited_by="budget"), "ok", "--budget raises it"),
        (change(batch(), "choice", not_settled=[4, 8]), "warn", "Not settled: micro batch 4, 8 may also"),
        (change(batch(), "drift", ratio=0.96), "warn", "The machine drifted: micro batch 8"),
        (change(batch(), "drift", ratio=1.04), "warn", "The machine drifted: micro batch 8"),
        (batch(cached=True), "ok", "From the cache"),
        (batch(status="partial"), "warn", "Partial: stopped before its end"),
        (batch(status="failed", why="micro batch 1 fails", choice=None), "fail", "Failed: micro batch 1"),
        (batch(schema_version=2), "warn", "schema version 2; this page reads version 1"),
        (batch(kind="other"), "warn", "of kind other"),
        (change(lr(), "choice", at_edge=True, edge_side="high"), "warn", "was measured on the higher side"),
        (change(lr(), "choice", tied=[["adamw", 0.01, 0.002]]), "ok", "Cannot be told apart from 2.00e-03"),
        (lr(), "ok", "Of 14 trials: 1 diverged."),
        (lr(choice=None), "warn", "No learning rate was chosen."),
    ],
)
def test_what_limits_the_choice_is_told(data: dict[str, Any], level: str, words: str) -> None:
    whole = page.html(data)
    assert cards(whole)[0][0] == level
    assert words in whole


def test_a_steady_machine_is_not_doubted() -> None:
    assert "drifted" not in page.html(change(batch(), "drift", ratio=0.971))


def test_throughput_shows_each_size_and_each_run() -> None:
    data = batch()
    figure = figures_batch.throughput(data)
    line, dots = figure.series
    assert dict(line.points) == RATES
    assert [b for b in line.band if math.isfinite(b[1])] == [
        (s["micro_batch"], *s["samples_per_s_ci95"]) for s in data["sizes"] if s["samples_per_s_ci95"]
    ]
    run = data["sizes"][3]["runs"][0]
    assert dots.points[3] == (8, pytest.approx(GLOBAL * len(run["step_s"]) / sum(run["step_s"])))
    assert len(dots.points) == sum(len(s["runs"]) for s in data["sizes"])
    assert figure.levels[0].value == pytest.approx(0.97 * 225.3)
    assert [mark.value for mark in figure.marks] == [CHOSEN]
    assert figure.x.ticks == list(RATES)


def test_an_interval_of_any_width_leaves_the_curve_visible() -> None:
    data = batch()
    data["sizes"][0]["samples_per_s_ci95"] = [1.0, 9e5]
    figure = figures_batch.throughput(data)
    assert figure.series[0].band[0] == (1, 1.0, pytest.approx(3 * RATES[32], rel=0.02))
    assert "Ends of intervals above" in figure.note


def test_a_shorter_trial_counts_the_update_once() -> None:
    """Half the sequences: a step of the declared batch has twice the passes and one update."""
    run = {"step_s": [1.0, 1.2], "forward_backward_s": [0.8, 0.9]}
    data = {"trial_samples": 64, "global_batch": 128}
    assert figures_batch.run_rate(data, run) == pytest.approx(128 / ((1.8 + 2.1) / 2))
    assert figures_batch.run_rate(data, {**run, "forward_backward_s": []}) is None
    assert figures_batch.run_rate({**data, "trial_samples": 128}, run) == pytest.approx(128 / 1.1)


def test_memory_shows_the_line_the_peaks_and_the_limits() -> None:
    data = batch()
    figure = figures_batch.memory(data)
    assert of(list(figure.series), "predicted").points == [
        (0.0, pytest.approx(gib(0))),
        (51, pytest.approx(gib(51))),
    ]
    assert of(list(figure.series), "out of memory").points == [(51, pytest.approx(gib(51)))]
    measured = of(list(figure.series), "measured, greatest rank").points
    assert {x for x, _ in measured} == {*RATES, 45}
    assert [round(level.value, 6) for level in figure.levels] == [4.0, 3.6]
    wide = figures_batch.memory(change(data, "memory", predicted_limit=5000))
    assert max(x for s in wide.series for x, _ in s.points) == 51  # what was tried stays apart
    far = figures_batch.memory(change(data, "memory", limit_gib=64.0))
    assert far.levels == []
    assert "The limit, 64.00 GiB, is far above" in far.note
    bar = figures_batch.parts(data)[0]
    assert sum(bar.parts.values()) == pytest.approx(gib(CHOSEN))


def test_noise_scale_with_its_equation_or_why_there_is_none() -> None:
    whole = page.html(batch())
    assert "B_simple = tr(Sigma) / |G|^2 = 0.62 / 0.002 = 310 sequences, 95 % interval 255 to 391" in whole
    assert f"is worth {100 / (1 + GLOBAL / NOISE[0]):.1f} % of one in a small batch" in whole
    scale = of(list(figures_batch.efficiency(batch()).series), "noise scale, 95 % interval")
    assert {x for x, _ in scale.points} == {NOISE[0]}
    assert [x for x, _, _ in scale.band] == list(NOISE[1:])
    none = page.html(batch(inconclusive="fewer than 50 steps"))
    assert "Inconclusive: fewer than 50 steps." in none
    assert labels(none) == BATCH_FIGURES - {
        "Noise scale and what a sequence is worth",
        "Goodput against global batch",
    }
    assert "310" not in text_of(none)


def test_goodput_marks_the_declared_and_the_recommended_batch() -> None:
    data = batch()
    series = list(figures_batch.goodput(data).series)
    points = {p["global_batch"]: p for p in data["goodput"]["points"]}
    curve = of(series, "goodput, 95 % interval")
    assert dict(curve.points) == {b: p["goodput"] for b, p in points.items()}
    assert list(curve.band) == [(b, p["low"], p["high"]) for b, p in points.items()]
    assert {x for x, _ in of(series, "declared global batch").points} == {GLOBAL}
    assert {x for x, _ in of(series, "recommended").points} == {64}
    assert "wants another learning rate" in page.html(data)


def test_norms_stand_at_their_steps() -> None:
    small, big = figures_batch.norms(batch()).series
    assert [x for x, _ in small.points] == list(range(1, 81))
    assert (small.label, big.label) == ("batch 64", "batch 128")


def test_loss_by_rate_has_the_band_of_the_last_rung_and_what_diverged() -> None:
    data = lr()
    figure = figures_lr.by_rate(data)
    first, last = figure.series[0], figure.series[2]
    losses = {t["lr"]: t["heldout_loss"] for t in data["rungs"][0]["trials"]}
    assert {x for x, y in first.points if math.isnan(y)} == {0.004}
    assert {x: y for x, y in first.points if x != 0.004} == {x: y for x, y in losses.items() if x != 0.004}
    assert first.band == []
    at = [t["heldout_loss"] for t in data["rungs"][2]["trials"] if t["lr"] == 0.001]
    assert (0.001, min(at), max(at)) in last.band
    assert dict(last.points)[0.001] == pytest.approx(sum(at) / 3)
    assert len(of(list(figure.series), "a seed of the last rung").points) == 6
    diverged = of(list(figure.series), "diverged (drawn at the top)")
    assert [x for x, _ in diverged.points] == [0.004]
    assert diverged.points[0][1] > max(y for x, y in first.points if x != 0.004)
    assert [mark.value for mark in figure.marks] == [0.001]


def test_optimizers_are_lines_of_their_own() -> None:
    names = [s.label for s in figures_lr.by_rate(lr(optimizers=("adamw", "lamb"))).series]
    assert names[:2] == ["131 k tokens, 1 seed, adamw", "131 k tokens, 1 seed, lamb"]
    assert figures_lr.by_rate(lr()).series[0].label == "131 k tokens, 1 seed"


def test_range_test_marks_the_edge_and_cuts_what_is_far_above() -> None:
    data = lr()
    figure = figures_lr.range_test(data)
    assert [mark.value for mark in figure.marks] == [data["range_test"]["edge"]]
    assert max(y for _, y in figure.series[0].points) == pytest.approx(1.5 * 9.6)
    assert "Losses above 14.4 are drawn there" in figure.note
    never = {**data, "range_test": {**data["range_test"], "edge": None, "why": "no divergence up to 0.1"}}
    assert figures_lr.range_test(never).marks == []
    assert "no divergence up to 0.1" in page.html(never)


def test_a_curve_for_each_trial_of_the_last_rung() -> None:
    figure = figures_lr.curves(lr())
    assert [s.label for s in figure.series] == ["1.00e-03"] * 3 + ["2.00e-03"] * 3
    assert figure.levels[0].value == 6.9


def test_tables_hold_every_number() -> None:
    data = batch()
    exact = {float(n) for n in re.findall(r'<td title="([-\d.e+]+)"', page.html(data))}
    sizes = [{key: value for key, value in size.items() if key != "runs"} for size in data["sizes"]]
    assert numbers([sizes, data["memory"]["tried"], data["goodput"]["points"]]) <= exact
    data = lr(transfer=transfer())
    whole = page.html(data)
    exact = {float(n) for n in re.findall(r'<td title="([-\d.e+]+)"', whole)}
    trials = [{**t, "curve": None} for rung in data["rungs"] for t in rung["trials"]]
    assert numbers([trials, data["transfer"]["rules"]]) <= exact
    assert all(t["trial"] in whole for t in trials)
    assert "sqrt (as configured)" in whole
    assert "7.4 nats, above the unigram entropy 6.9" in whole
    assert "Transfer" not in page.html(lr())
    assert f"{100 * data['cost']['tokens'] / data['cost']['grid_tokens']:.1f} % of the full grid" in whole


def test_finalists_say_which_is_chosen_and_which_is_tied() -> None:
    whole = page.html(change(lr(), "choice", tied=[["adamw", 0.01, 0.002]]))
    assert "<th>1.00e-03 (chosen)</th>" in whole
    assert "<th>2.00e-03 (tied)</th>" in whole
    assert "(tied)" not in page.html(lr())


def test_nothing_measured_is_never_zero() -> None:
    for data in (unmeasured(), {"kind": "lr"}):
        whole = page.html(data)
        check(whole)
        assert labels(whole) == set()
        shown = re.sub(r"<[^>]*>", " ", text_of(whole))
        assert not re.search(r"\b0\.0|None|nan", shown)


@pytest.mark.parametrize("kind", ["batch", "lr", None, 3, HOSTILE])
@pytest.mark.parametrize(
    "data",
    [{}, {"sizes": [None, 3, {}], "rungs": [None, 3, {}]}, {"memory": 3, "range_test": [], "noise": {}}],
)
def test_a_torn_or_foreign_record_renders(kind: Any, data: dict[str, Any]) -> None:
    check(page.html({**data, "kind": kind}))


@pytest.mark.parametrize("value", VALUES, ids=lambda v: str(v)[:12].encode("ascii", "replace").decode())
@pytest.mark.parametrize("make", MAKERS)
def test_any_value_in_every_place_renders(make: Callable[..., dict[str, Any]], value: Any) -> None:
    data = make(transfer=transfer())
    check(page.html({**spoil(data, value), "kind": data["kind"]}))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, child in items for place in [(tree, key), *places(child)]]


@pytest.mark.parametrize("make", MAKERS)
def test_any_value_in_some_places_renders(make: Callable[..., dict[str, Any]]) -> None:
    """Beside whole neighbours, where one number meets another."""
    rng, whole = random.Random(0), make(transfer=transfer())
    whole |= {"config": {}, "environment": {}, "rungs": whole.get("rungs", [])[1:]}
    for _ in range(60):
        data = copy.deepcopy(whole)
        for container, key in rng.sample(places(data), 12):
            container[key] = rng.choice(VALUES)
        check(page.html({**data, "kind": whole["kind"]}))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    for data in (batch(transfer=transfer()), lr(transfer=transfer())):
        spoiled = spoil(data, HOSTILE) | {
            "kind": data["kind"],
            "sizes": data.get("sizes"),
            "rungs": data.get("rungs"),
        }
        spoiled["environment"] = {"cpu_model": HOSTILE, "HF_TOKEN": "hf_secret", "gpu_topology": HOSTILE}
        spoiled["config"] = {HOSTILE: HOSTILE, "api_key": "hf_secret"}
        for size in spoiled["sizes"] or []:
            size |= {"status": HOSTILE, "why": HOSTILE}
        for trial in [t for rung in spoiled["rungs"] or [] for t in rung["trials"]]:
            trial |= {"trial": HOSTILE, "optimizer": HOSTILE, "cause": HOSTILE}
        out = tmp_path / data["kind"] / "page.html"
        page.write(spoiled, out)
        whole = out.read_text(encoding="utf-8")
        check(whole)
        assert "&lt;script&gt;" in whole
        assert "hf_secret" not in whole
        assert not re.search(r"[\x00\x1b]", whole)
        assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def test_reading(tmp_path: Path) -> None:
    record.write_json(tmp_path / FILE, lr())
    assert page.read(tmp_path)["kind"] == "lr"
    (tmp_path / FILE).write_text('{"sizes": [')
    with pytest.raises(ConfigError, match="not a JSON object"):
        page.read(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(1e-3, "1e-3"), (2.5e-4, "2.5e-4"), (1.0, "1e+0"), (3e-12, "3e-12"), (None, "n/a")]
)
def test_a_rate_on_an_axis(value: float | None, text: str) -> None:
    assert format_lr_tick(value) == text


def test_a_whole_number_beyond_any_float_is_not_known() -> None:
    assert number(10**400) is None
    assert number(10**15) == 1e15


def test_fixtures_are_json() -> None:
    for data in (batch(), lr(transfer=transfer())):
        assert json.loads(json.dumps(data, allow_nan=False)) == data
