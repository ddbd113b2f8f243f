"""Tests of the pages of the micro batch and learning rate searches: complete, partial, empty."""

import math
from pathlib import Path
from typing import Any

import pytest

from bert_dp import files
from launcher.report.page import Report
from launcher.stats import half_width
from launcher.tune import tune_page
from launcher.tune.lr_search import TuneLr
from launcher.tune.throughput import TuneBatch
from launcher.tune.tune_page import batch_page, lr_page
from tests.helpers import raised_issues
from tests.report_fixture import figure_of, read_page
from tests.tune_fixture import batch, lr, unmeasured

OUT = Path("OUT")
MEMORY = "Peak memory against micro batch"


def of(data: dict[str, Any]) -> Report:
    if data["kind"] == "lr":
        return lr_page(TuneLr.model_validate(data), OUT)
    return batch_page(TuneBatch.model_validate(data), OUT)


def change(data: dict[str, Any], key: str, **entries: Any) -> dict[str, Any]:
    return {**data, key: {**data[key], **entries}}


SMALLER = {"micro_batch": 4, "fastest_micro_batch": 8, "share_of_best": 0.98}


def test_the_page_follows_the_kind_of_search(tmp_path: Path) -> None:
    for data in (batch(), lr()):
        files.write_json(tmp_path / "tune.json", data)
        assert tune_page.tune_page(tmp_path / "tune.json").title == of(data).title
    files.write_json(tmp_path / "tune.json", {"kind": "other"})
    (issue,) = raised_issues(tune_page.tune_page, tmp_path / "tune.json")
    assert (issue.setting, issue.kind) == (str(tmp_path / "tune.json"), "damaged")


@pytest.mark.parametrize(
    ("data", "level", "values"),
    [
        (batch(), "ok", ["8", "203", "fastest"]),
        (change(batch(), "choice", **SMALLER), "ok", ["98.0 %"]),
        (change(batch(), "choice", limited_by="budget"), "ok", ["--budget"]),
        (change(batch(), "choice", not_settled=[4, 2]), "warn", ["4, 2"]),
        (batch(status="partial"), "warn", ["Partial"]),
        (batch(status="failed", reason="micro batch 1 fails", choice=None), "fail", ["micro batch 1 fails"]),
        (batch(choice=None), "warn", ["No micro batch"]),
        (lr(), "ok", ["5.70e-02", "4.822", "2 seeds"]),
        (change(lr(), "choice", edge_side="high"), "warn", ["higher"]),
        (change(lr(), "choice", edge_side="low"), "warn", ["lower"]),
        (change(lr(), "choice", tied=[0.002]), "ok", ["2.00e-03"]),
        (lr(choice=None), "warn", ["OUT/trials"]),
    ],
)
def test_the_choice_and_its_limits(data: dict[str, Any], level: str, values: list[str]) -> None:
    report = of(data)
    verdict = report.verdicts[0]
    assert verdict.level == level
    text = " ".join([verdict.text, *verdict.notes])
    assert [value for value in values if value not in text] == []
    assert verdict.text in read_page(report).text


def test_a_mean_over_seeds_has_the_interval_of_the_mean() -> None:
    """The spread between seeds and the error of the held-out text add like independent errors."""
    data = lr()
    last = data["rungs"][-1]["trials"]
    seeds = half_width([4.7074, 4.9367])
    assert f"\u00b1 {seeds:.4f}, mean of 2 seeds" in of(data).verdicts[0].text
    for each in last:
        each["heldout"] = {"loss_se": 0.2, "masked_tokens": 2048, "sequences": 128, "mask_rate": 0.15}
    assert f"\u00b1 {math.hypot(seeds, 1.96 * 0.2):.4f}, mean of 2 seeds" in of(data).verdicts[0].text
    for each in last:
        each["status"] = "ok" if each["seed"] == last[0]["seed"] else "failed"
    assert f"\u00b1 {1.96 * 0.2:.4f}" in of(data).verdicts[0].text, "only one seed ended well"


def test_a_distant_memory_limit_is_noted_but_not_drawn() -> None:
    assert [rule.value for rule in figure_of(of(batch()), MEMORY).levels] == pytest.approx([0.45])
    far = figure_of(of(batch(memory_limit_gib=64.0)), MEMORY)
    assert not far.levels
    assert "64.00 GiB" in far.note


def test_missing_values_are_not_shown_as_zero() -> None:
    for data in (unmeasured(), lr(status="partial", tokens=None, range_test=None, rungs=[], choice=None)):
        page = read_page(of({**data, "environment": {}, "config": {}}))
        assert page.labels == []
        assert "0.0" not in page.text
