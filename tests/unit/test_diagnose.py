"""Test the verdicts of the scaling benchmark and the thresholds between them."""

from typing import Any

import pytest

from launcher.scale.analyze import diagnose, diagnose_cell
from launcher.scale.models import CellMeasurement


def cell(**facts: Any) -> CellMeasurement:
    """Return a measured cell whose efficiency of 80 % has no known cause."""
    named = {"id": "c", "status": "ok", "world_size": 4, "engine": "ddp"}
    batch = {"micro_batch": 8, "accumulation": 1, "global_batch": 8}
    efficiency = {"tokens_per_s": 10.0, "efficiency": 0.8, "efficiency_ci95": [0.78, 0.82]}
    ceiling = {"ceiling_efficiency": 0.98, "ceiling_efficiency_ci95": [0.9, 0.99]}
    sent = {"communication_efficiency": 0.99, "communication_efficiency_ci95": [0.9, 0.99]}
    step = {"data_wait_fraction": 0.01, "data_wait_fraction_ci95": [0.0, 0.02]}
    step |= {"step_time_s": {"mean": 1.0, "ci95": [0.99, 1.01]}}
    return CellMeasurement.model_validate(
        {**named, **batch, **efficiency, **ceiling, **sent, **step, "straggler_ratio": 1.0, **facts}
    )


PATHS = {
    "loader_bound": "data_wait_fraction",
    "straggler": "straggler_ratio",
    "hardware_ceiling": "ceiling_efficiency",
    "communication_bound": "communication_efficiency",
    "launch_bound": "launch_fraction",
}


def loss(kind: str, value: float, low: float, high: float) -> dict[str, Any]:
    """Return the facts of one cause of lost efficiency, with its interval."""
    facts: dict[str, Any] = {PATHS[kind]: value, f"{PATHS[kind]}_ci95": [low, high]}
    return facts | ({"straggler_rank": 2} if kind == "straggler" else {})


def reached(value: float, low: float, high: float) -> dict[str, Any]:
    return {"efficiency": value, "efficiency_ci95": [low, high]}


SENT = loss("communication_bound", 0.7, 0.6, 0.9)


@pytest.mark.parametrize(
    ("facts", "kind", "values"),
    [
        ({"status": "oom", "cause": "rank 1"}, "out_of_memory", ["rank 1"]),
        ({"status": "failed", "cause": "rank 1"}, "failed", ["rank 1"]),
        ({"efficiency": None}, "no_baseline", []),
        ({"efficiency_ci95": None}, "one_repeat", ["80.0 %"]),
        (reached(1.3, 1.01, 1.4), "above_baseline", ["130.0 % [101.0 % to 140.0 %]"]),
        (reached(0.96, 0.95, 0.97), "scales", ["96.0 % [95.0 % to 97.0 %]"]),
        (reached(0.96, 0.949, 1.02), "intervals_overlap", ["[94.9 % to 102.0 %]"]),
        (reached(0.9, 0.7, 1.1), "intervals_overlap", ["[70.0 % to 110.0 %]"]),
        (reached(0.9, 0.8, 1.0), "intervals_overlap", ["[80.0 % to 100.0 %]"]),
        ({}, "no_single_cause", ["80.0 % [78.0 % to 82.0 %]"]),
        ({"ceiling_efficiency": None, "communication_efficiency": None}, "no_single_cause", []),
        (loss("loader_bound", 0.3, 0.06, 0.5), "loader_bound", ["30.0 % [6.0 % to 50.0 %]"]),
        (loss("straggler", 1.5, 1.3, 1.7), "straggler", ["rank 2", "1.50 [1.30 to 1.70]"]),
        (loss("hardware_ceiling", 0.7, 0.6, 0.9), "hardware_ceiling", ["70.0 % [60.0 % to 90.0 %]"]),
        (SENT | {"exposed_comm_ddp_fraction": 0.25}, "communication_bound", ["70.0 % [60.0 %", "25.0 %"]),
        (loss("launch_bound", 0.99, 0.96, 1.0), "launch_bound", ["99.0 % [96.0 % to 100.0 %]"]),
        # no cause is named if its interval includes the threshold
        (loss("loader_bound", 0.3, 0.05, 0.5), "no_single_cause", []),
        (loss("hardware_ceiling", 0.7, 0.6, 0.95), "no_single_cause", []),
        (loss("communication_bound", 0.7, 0.6, 0.95), "no_single_cause", []),
        (loss("launch_bound", 0.99, 0.95, 1.0), "no_single_cause", []),
        *(({path: 0.7, f"{path}_ci95": None}, "no_single_cause", []) for path in PATHS.values()),
        ({"straggler_ratio": 1.5, "straggler_rank": None}, "no_single_cause", []),
    ],
)
def test_the_verdict_of_a_cell_has_its_figures(facts: dict[str, Any], kind: str, values: list[str]) -> None:
    judged = diagnose_cell(cell(**facts))
    assert (judged.cell, judged.kind) == ("c", kind)
    assert all(value in judged.evidence for value in values), judged.evidence
    assert judged.next


WIDE = [0.006, 371.506]


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, "not_measurable"),
        ({"efficiency_ci95": [0.5, 1.01]}, "not_measurable"),
        ({"efficiency_ci95": [0.5, 1.0]}, "intervals_overlap"),
        (loss("straggler", 1.5, 1.3, 1.7), "straggler"),
        (loss("straggler", 1.7677, 1.3, 2.7), "straggler"),
        ({"ceiling_efficiency_ci95": WIDE, "communication_efficiency_ci95": WIDE}, "not_measurable"),
    ],
)
def test_a_ratio_that_is_not_measurable_is_shown_without_digits(facts: dict[str, Any], kind: str) -> None:
    repeat = {"run": "r", "steps": 5, "steps_per_s": 1.0, "tokens_per_s": 1.0, "step_time_s": {}}
    judged = diagnose_cell(cell(**{**reached(0.9577, *WIDE), "repeats": [repeat] * 2, **facts}))
    assert judged.kind == kind
    assert ("95.8 %" in judged.evidence) == (kind == "intervals_overlap")
    assert "1.77" not in judged.evidence
    assert "37150" not in judged.evidence


def test_the_largest_of_several_losses_is_the_verdict_and_the_others_follow_by_size() -> None:
    facts = loss("communication_bound", 0.8, 0.79, 0.81) | loss("hardware_ceiling", 0.85, 0.84, 0.86)
    facts |= loss("straggler", 1.5, 1.4, 1.6) | loss("loader_bound", 0.1, 0.09, 0.11)
    judged = diagnose_cell(cell(**facts))
    assert judged.kind == "straggler"  # the loss is 1 - 1 / 1.5
    others = ("communication-bound", "hardware ceiling", "loader-bound")
    places = [judged.evidence.index(f"also {name}") for name in others]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("wait", "kind", "also"), [(0.1, "launch_bound", "loader-bound"), (0.6, "loader_bound", "launch-bound")]
)
def test_the_loss_to_launching_excludes_the_wait_for_data(wait: float, kind: str, also: str) -> None:
    """0.97 - 0.1 exceeds every other loss; 0.97 - 0.6 is below the wait for data."""
    facts = loss("loader_bound", wait, wait - 0.01, wait + 0.01) | loss("launch_bound", 0.97, 0.96, 0.98)
    judged = diagnose_cell(cell(**facts, **loss("communication_bound", 0.7, 0.6, 0.8)))
    assert judged.kind == kind
    assert f"also {also}" in judged.evidence
    assert "also communication-bound" in judged.evidence


def engine(name: str, tokens_per_s: float, interval: list[float] | None, **facts: Any) -> CellMeasurement:
    step = {"mean": 1.0, "ci95": interval}
    return cell(id=name, engine=name, tokens_per_s=tokens_per_s, step_time_s=step, **facts)


def test_the_fastest_engine_is_named_if_intervals_do_not_overlap() -> None:
    fast, middle = engine("fast", 10.0, [0.99, 1.01]), engine("middle", 8.0, [1.2, 1.3])
    *each, last = diagnose([engine("slow", 5.0, [2.0, 2.1]), fast, middle])
    assert [t.cell for t in each] == ["slow", "fast", "middle"]
    assert (last.cell, last.kind, last.verdict) == ("fast", "fastest", "fastest of 3 engines at N = 4")
    assert last.evidence == "throughput relative to middle: 1.250 [1.188 to 1.313]"
    assert last.next == "nothing"
    # engines are compared by time per sequence, so twice the batch in 1.6 times the seconds is faster
    cells = [engine("a", 10.0, [1.6, 1.62], global_batch=16), engine("b", 8.0, [1.0, 1.1])]
    assert diagnose(cells)[-1].verdict == "fastest of 2 engines at N = 4"


@pytest.mark.parametrize("second", [[1.01, 1.3], [0.9, 1.3], None])
def test_an_engine_with_an_overlapping_interval_is_not_called_slower(second: list[float] | None) -> None:
    judged = diagnose([engine("a", 10.0, [0.99, 1.01]), engine("b", 8.0, second)])[-1]
    assert (judged.cell, judged.kind) == ("a", "intervals_overlap")
    assert ("1.250 [" in judged.evidence) == (second is not None)
    for first, other in ((None, [1.2, 1.3]), ([0.5, 0.6], None)):
        cells = [engine("a", 10.0, first), engine("b", 8.0, other)]
        assert diagnose(cells)[-1].kind == "intervals_overlap"


def test_only_similar_cells_are_compared_and_only_finished_runs_get_a_verdict() -> None:
    unlike: dict[str, dict[str, Any]] = {
        "alone": {"world_size": 1},
        "two": {"world_size": 2},
        "strong": {"mode": "strong"},
        "weak": {},
        "broken": {"status": "failed", "cause": "x"},
        "out of memory": {"status": "oom", "cause": "x"},
        "not yet": {"status": "pending"},
        "ceiling": {"kind": "ceiling"},
    }
    cells = [engine(name, 10.0, [1.0, 1.1], **facts) for name, facts in unlike.items()]
    judged = diagnose(cells)
    assert [t.cell for t in judged] == ["two", "strong", "weak", "broken", "out of memory"]
    later = [engine("x", 10.0, [1.0, 1.1], world_size=8), engine("y", 9.0, [1.2, 1.3], world_size=8)]
    assert diagnose([*cells, *later])[-1].verdict == "fastest of 2 engines at N = 8"
