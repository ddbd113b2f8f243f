"""Each verdict of the scaling benchmark word for word, and the bounds between them."""

from typing import Any

import pytest

from launcher.results import Cell, Verdict
from launcher.scale.verdict import judge, verdicts

REACHED = "efficiency 80.0 % [78.0 %, 82.0 %]"
MEASURE_MORE = "more --repeats or --steps"


def cell(**facts: Any) -> Cell:
    """A cell without any loss but its efficiency of 80 %."""
    named = {"id": "c", "status": "ok", "world_size": 4, "engine": "ddp"}
    batch = {"micro_batch": 8, "accumulation": 1, "global_batch": 8}
    efficiency = {"tokens_per_s": 10.0, "efficiency": 0.8, "efficiency_ci95": [0.78, 0.82]}
    ceiling = {"ceiling_efficiency": 0.98, "ceiling_efficiency_ci95": [0.9, 0.99]}
    sent = {"communication_efficiency": 0.99, "communication_efficiency_ci95": [0.9, 0.99]}
    step = {"data_wait_fraction": 0.01, "step_time_s": {"mean": 1.0, "ci95": [0.99, 1.01]}}
    return Cell.model_validate(
        {**named, **batch, **efficiency, **ceiling, **sent, **step, "straggler_ratio": 1.0, **facts}
    )


def twin(mean: float, interval: list[float] | None, **facts: Any) -> Cell:
    whole = {"id": "t", "kind": "synthetic", "of": "c", "step_time_s": {"mean": mean, "ci95": interval}}
    return cell(**whole | facts)


UNKNOWN = "no single bottleneck stands out beyond the measurement's doubt: 1.0 % of a step waits for data"
NO_CEILING = f"{REACHED}; {UNKNOWN}; there is no ceiling to compare with"
LOOK_AT_SPLIT = f"{MEASURE_MORE}, and look at the split of the step"
OVERLAP = "no claim: intervals overlap"
SENT = f"{REACHED}: 30.0 % of the ceiling is lost once ranks exchange gradients"
SEND_LESS = "more accumulation, 16-bit reduction, or a faster link"


@pytest.mark.parametrize(
    ("facts", "verdict", "evidence", "remedy"),
    [
        (
            {"status": "oom", "cause": "rank 1"},
            "out of memory",
            "rank 1",
            "lower batch.micro_size, or use zero1 or fsdp",
        ),
        ({"status": "failed", "cause": "rank 1"}, "failed", "rank 1", "see the logs of its run"),
        ({"efficiency": None}, "no baseline", "the single-rank cell did not run", "see its cause"),
        (
            {"efficiency_ci95": None},
            "no claim: one repeat",
            "efficiency 80.0 %; how much runs differ is not known",
            "--repeats 3 or more",
        ),
        (
            {"efficiency": 1.3, "efficiency_ci95": [1.01, 1.4]},
            "above 100 %",
            "efficiency 130.0 % [101.0 %, 140.0 %]: one rank alone was slower than each of these",
            "measure the baseline again, on the same machine in the same state",
        ),
        (
            {"efficiency": 0.96, "efficiency_ci95": [0.95, 0.97]},
            "scales",
            "efficiency 96.0 % [95.0 %, 97.0 %]; no loss above 5.0 % found",
            "nothing",
        ),
        (
            {"efficiency": 0.96, "efficiency_ci95": [0.949, 1.02]},
            OVERLAP,
            "efficiency 96.0 % [94.9 %, 102.0 %] includes less than 95.0 %, from which a cell scales",
            MEASURE_MORE,
        ),
        *(
            (
                {"efficiency": 0.9, "efficiency_ci95": [low / 100, high / 100]},
                OVERLAP,
                f"efficiency 90.0 % [{low}.0 %, {high}.0 %] includes 100 %",
                MEASURE_MORE,
            )
            for low, high in ((70, 110), (80, 100))
        ),
        (
            {},
            "no single cause",
            f"{REACHED}; {UNKNOWN}, 1.0 % of the ceiling is lost to communication, the ceiling itself is "
            "2.0 % below as many single ranks",
            LOOK_AT_SPLIT,
        ),
        (
            {"ceiling_efficiency": None, "communication_efficiency": None},
            "no single cause",
            NO_CEILING,
            LOOK_AT_SPLIT,
        ),
        ({"communication_efficiency": None}, "no single cause", NO_CEILING, LOOK_AT_SPLIT),
        (
            {"data_wait_fraction": 0.3},
            "loader-bound",
            f"{REACHED}: 30.0 % of a step waits for data",
            "raise data.workers",
        ),
        (
            {"straggler_rank": 2, "straggler_ratio": 1.5},
            "straggler rank 2",
            f"{REACHED}: rank 2 works 1.50 x as long as the others' median before any reduction",
            "look at that device: clocks, links, who else uses it (bert-dp doctor)",
        ),
        (
            {"ceiling_efficiency": 0.7},
            "hardware ceiling",
            f"{REACHED}: 4 independent copies reach 70.0 % of as many single ranks",
            "shared memory bandwidth, power or clocks, which no engine changes",
        ),
        ({"communication_efficiency": 0.7}, "communication-bound", SENT, SEND_LESS),
        (
            {"communication_efficiency": 0.7, "exposed_comm_ddp_fraction": 0.25},
            "communication-bound",
            f"{SENT} (DDP's own counters: 25.0 % of a step)",
            SEND_LESS,
        ),
        (
            {"launch_fraction": 0.99},
            "launch-bound",
            f"{REACHED}: the host needs 99.0 % of a step to enqueue it",
            "compile: on, or a larger micro batch",
        ),
    ],
)
def test_a_cell_is_judged_with_its_figures_and_a_remedy(
    facts: dict[str, Any], verdict: str, evidence: str, remedy: str
) -> None:
    judged = judge(cell(**facts), [])
    assert (judged.cell, judged.verdict, judged.evidence, judged.next) == ("c", verdict, evidence, remedy)
    # and a reader has the kind from a file that does not hold it
    assert judged.kind == Verdict.model_validate(judged.model_dump(exclude={"kind"})).kind


@pytest.mark.parametrize(
    "facts",
    [
        {"data_wait_fraction": 0.05},
        {"ceiling_efficiency": 0.9501},
        {"ceiling_efficiency": 0.7, "ceiling_efficiency_ci95": [0.6, 1.0]},
        {"ceiling_efficiency": 0.7, "ceiling_efficiency_ci95": None},
        {"communication_efficiency": 0.9501},
        {"communication_efficiency": 0.7, "communication_efficiency_ci95": [0.6, 1.0]},
        {"communication_efficiency": 0.7, "communication_efficiency_ci95": None},
        {"launch_fraction": 0.95},
    ],
)
def test_a_loss_at_its_bound_or_in_doubt_is_not_named(facts: dict[str, Any]) -> None:
    assert judge(cell(**facts), []).verdict == "no single cause"


def test_the_greatest_of_several_losses_is_the_verdict_and_the_others_follow_by_size() -> None:
    judged = judge(
        cell(
            communication_efficiency=0.8,
            ceiling_efficiency=0.85,
            data_wait_fraction=0.1,
            straggler_rank=1,
            straggler_ratio=1.5,
        ),
        [],
    )
    assert judged.verdict == "straggler rank 1"  # 1 - 1 / 1.5
    assert judged.evidence == (
        f"{REACHED}: rank 1 works 1.50 x as long as the others' median before any reduction; "
        "also communication-bound: 20.0 % of the ceiling is lost once ranks exchange gradients; "
        "also hardware ceiling: 4 independent copies reach 85.0 % of as many single ranks; "
        "also loader-bound: 10.0 % of a step waits for data"
    )


@pytest.mark.parametrize(
    ("wait", "named", "also"), [(0.1, "launch-bound", "loader-bound"), (0.6, "loader-bound", "launch-bound")]
)
def test_a_step_as_long_as_the_hosts_part_is_lost_to_launching_but_for_its_wait_for_data(
    wait: float, named: str, also: str
) -> None:
    """0.97 - 0.1 is beyond all that the device loses, 0.97 - 0.6 is below the wait."""
    judged = judge(cell(launch_fraction=0.97, data_wait_fraction=wait, communication_efficiency=0.7), [])
    assert judged.verdict == named
    assert f"also {also}" in judged.evidence
    assert "also communication-bound" in judged.evidence


def test_a_straggler_counts_by_what_the_others_wait() -> None:
    """1 - 1 / 1.25 = 20 % is below the ceiling's 30 %."""
    judged = judge(cell(straggler_rank=1, straggler_ratio=1.25, ceiling_efficiency=0.7), [])
    assert judged.verdict == "hardware ceiling"


def test_a_loss_goes_before_a_good_efficiency() -> None:
    good = {"efficiency": 0.97, "efficiency_ci95": [0.9, 1.05], "data_wait_fraction": 0.06}
    assert judge(cell(**good), []).verdict == "loader-bound"


def test_a_synthetic_twin_tells_what_the_loader_costs() -> None:
    judged = judge(cell(), [cell(), twin(0.8, [0.7, 0.98])])
    assert judged.verdict == "loader-bound"
    assert judged.evidence == f"{REACHED}: 1.0 % of a step waits for data, 20.0 % faster without the loader"
    both = judge(cell(data_wait_fraction=0.3, ceiling_efficiency=0.75), [twin(0.8, [0.7, 0.98])])
    assert both.verdict == "loader-bound"  # the greater of 30 % and 20 % is beyond the ceiling's 25 %
    less = judge(cell(data_wait_fraction=0.1, ceiling_efficiency=0.85), [twin(0.8, [0.7, 0.98])])
    assert less.verdict == "loader-bound"
    slight = judge(cell(data_wait_fraction=0.06), [twin(0.96, [0.95, 0.97])])
    assert "4.0 % faster without the loader" in slight.evidence


def test_a_twin_saves_its_share_of_the_cells_own_step() -> None:
    judged = judge(cell(step_time_s={"mean": 2.0, "ci95": [1.9, 2.1]}), [twin(1.5, [1.4, 1.6])])
    assert "25.0 % faster without the loader" in judged.evidence


@pytest.mark.parametrize(
    "other",
    [
        twin(0.8, [0.7, 0.99]),  # reaches the cell's own
        twin(0.8, [0.7, 1.2]),
        twin(0.8, None),
        twin(0.8, [0.7, 0.9], status="failed"),
        twin(0.9501, [0.94, 0.96]),  # 5 % is the bound
        twin(0.8, [0.7, 0.9], of="another"),
        twin(0.8, [0.7, 0.9], kind="run"),
    ],
)
def test_a_twin_that_says_nothing(other: Cell) -> None:
    assert judge(cell(), [other]).verdict == "no single cause"
    assert judge(cell(step_time_s={"mean": 1.0, "ci95": None}), [other]).verdict == "no single cause"


def engine(name: str, tokens_per_s: float, interval: list[float] | None, **facts: Any) -> Cell:
    step = {"mean": 1.0, "ci95": interval}
    return cell(id=name, engine=name, tokens_per_s=tokens_per_s, step_time_s=step, **facts)


def test_the_fastest_engine_is_named_where_intervals_part() -> None:
    slow, fast, middle = (
        engine("slow", 5.0, [2.0, 2.1]),
        engine("fast", 10.0, [0.99, 1.01]),
        engine("middle", 8.0, [1.2, 1.3]),
    )
    judged = verdicts([slow, fast, middle])
    assert [t.cell for t in judged] == ["slow", "fast", "middle", "fast"]
    assert judged[-1] == Verdict(
        cell="fast",
        kind="fastest",
        verdict="fastest of 3 at N = 4",
        evidence="1.250 x the throughput of middle",
        next="nothing",
    )


def test_an_engine_is_the_fastest_only_where_it_is_apart_from_every_other() -> None:
    apart, noisy = engine("b", 9.0, [1.15, 1.25]), engine("c", 8.0, [0.9, 1.9])
    judged = verdicts([engine("a", 10.0, [1.0, 1.1]), apart, noisy])[-1]
    assert judged.kind == "intervals_overlap"
    assert judged.evidence == "1.250 x the throughput of c, whose interval overlaps"


@pytest.mark.parametrize("second", [[1.01, 1.3], [0.9, 1.3], None])
def test_an_engine_whose_interval_overlaps_is_not_called_slower(second: list[float] | None) -> None:
    judged = verdicts([engine("a", 10.0, [0.99, 1.01]), engine("b", 8.0, second)])[-1]
    assert judged == Verdict(
        cell="a",
        kind="intervals_overlap",
        verdict="no claim: intervals overlap",
        evidence="1.250 x the throughput of b, whose interval overlaps",
        next=MEASURE_MORE,
    )
    unknown = [engine("a", 10.0, None), engine("b", 8.0, [1.2, 1.3])]
    assert verdicts(unknown)[-1].verdict == "no claim: intervals overlap"
    fast = [engine("a", 10.0, [0.5, 0.6]), engine("b", 8.0, None)]
    assert verdicts(fast)[-1].verdict == "no claim: intervals overlap"


def test_engines_are_compared_by_the_time_of_a_sequence() -> None:
    """Twice the batch in 1.6 times the seconds is faster."""
    cells = [engine("a", 10.0, [1.6, 1.62], global_batch=16), engine("b", 8.0, [1.0, 1.1])]
    assert verdicts(cells)[-1].verdict == "fastest of 2 at N = 4"


def test_only_like_cells_are_compared_and_only_runs_judged() -> None:
    cells = [
        engine("alone", 99.0, [0.1, 0.2], world_size=1),
        engine("two", 10.0, [1.0, 1.1], world_size=2),
        engine("strong", 10.0, [1.0, 1.1], mode="strong"),
        engine("weak", 10.0, [1.0, 1.1]),
        engine("broken", 10.0, [1.0, 1.1], status="failed", cause="x"),
        engine("no room", 10.0, [1.0, 1.1], status="oom", cause="x"),
        engine("not yet", 10.0, [1.0, 1.1], status="pending"),
        engine("ceiling", 10.0, [1.0, 1.1], kind="ceiling"),
    ]
    judged = verdicts(cells)
    assert [t.cell for t in judged] == ["two", "strong", "weak", "broken", "no room"]
    later = [engine("x", 10.0, [1.0, 1.1], world_size=8), engine("y", 9.0, [1.2, 1.3], world_size=8)]
    assert verdicts([*cells, *later])[-1].verdict == "fastest of 2 at N = 8"
