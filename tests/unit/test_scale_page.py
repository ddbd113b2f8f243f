"""Tests of the page and console report of a scaling benchmark: complete, partial, empty, of any size."""

from typing import Any

import pytest

from launcher import results
from launcher.report.page import Line, Report
from launcher.scale import models
from launcher.scale.analyze import diagnose
from launcher.scale.scale_page import scale_page
from tests.report_fixture import figure_of, read_page, shown, unfolded
from tests.scaling_fixture import scaling


def parsed(data: dict[str, Any]) -> models.Scaling:
    return results.parse(data, models.Scaling, "scaling.json")


def of(data: dict[str, Any]) -> Report:
    return scale_page(parsed(data))


def lines(report: Report, title: str) -> dict[str, Line]:
    return {t.label: t for t in figure_of(report, title).traces if isinstance(t, Line)}


def points(line: Line) -> dict[float, float | None]:
    return dict(zip(line.x, line.y, strict=True))


def cell_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(cell for cell in data["cells"] if cell["id"] == name)


def test_failed_cells_are_listed_with_their_cause() -> None:
    oom = ("oom", "rank 1: out of memory\nsecond line")
    data = scaling(
        failed={"weak-zero1-n4": oom, "weak-ddp-n4": ("pending", None)}, status="partial", verdicts=[]
    )
    report = of(data)
    done, total = sum(c["status"] == "ok" for c in data["cells"]), len(data["cells"])
    partial, lost = report.verdicts[:2]
    assert partial.text == f"Partial: {done} of {total} cells have a result; cells pending: 1."
    assert (lost.level, lost.notes) == ("fail", ["weak-zero1-n4: oom: rank 1: out of memory"])
    efficiency = figure_of(report, "Efficiency, weak scaling")
    assert points(lines(report, efficiency.title)["zero1"])[4] is None  # a gap; its N stays on the axis
    assert efficiency.x.ticks == [1, 2, 4]


def test_verdicts_appear_once_and_worst_first() -> None:
    kinds = ("intervals_overlap", "scales", "hardware_ceiling", "out_of_memory", "hardware_ceiling")
    verdicts = [
        {"cell": cell, "kind": kind, "verdict": kind.replace("_", " "), "evidence": "e", "next": "do so"}
        for cell, kind in zip("abcde", kinds, strict=True)
    ]
    verdicts[1]["next"] = "nothing"
    data = scaling(verdicts=verdicts)
    data["cells"][0]["flags"] = ["a flag"]
    assert [(v.level, v.text, v.notes) for v in of(data).verdicts] == [
        ("fail", "Out of memory. Next: do so.", ["d: e"]),
        ("warn", "Hardware ceiling. Next: do so.", ["c: e", "e: e"]),
        ("warn", "Check these figures before you use them.", ["weak-single-n1: a flag"]),
        ("ok", "Scales.", ["b: e"]),
        ("info", "Intervals overlap. Next: do so.", ["a: e"]),
    ]


MANY = [f"engine-{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("engines", "sizes"), [([], (1,)), (["ddp"], (4,)), (MANY, (1, 2)), (["ddp"], (1, 64, 1024))]
)
def test_a_report_of_any_size(engines: list[str], sizes: tuple[int, ...]) -> None:
    data = scaling(engines=engines, sizes=sizes)
    report = of(data)
    page = read_page(report)
    assert {"Speed-up, weak scaling", "Efficiency, weak scaling"} <= set(page.labels)
    assert all(c["id"] in page.text for c in data["cells"] if c["kind"] == "run")
    assert figure_of(report, "Speed-up, weak scaling").x.log == (max(sizes) > 16)


def test_a_ratio_with_an_interval_beyond_a_factor_of_two_is_not_measurable() -> None:
    data = scaling(engines=("ddp",), sizes=(1, 2), prediction=True)
    wide, width = cell_of(data, "weak-ddp-n2"), [0.006, 371.506]
    for path in ("efficiency", "efficiency_ddp1", "ceiling_efficiency", "communication_efficiency"):
        wide |= {path: 0.9577, f"{path}_ci95": width}
    wide |= {"speedup": 1.9153, "straggler_ratio": 1.7677, "straggler_ratio_ci95": [0.013, 116.0]}
    wide |= {"exposed_comm_fraction": 0.0423}
    data["verdicts"] = [results.plain(verdict) for verdict in diagnose(parsed(data).cells)]
    for row in data["prediction"]["measured"]:
        row |= {"measured_efficiency": 0.9577, "measured_efficiency_ci95": width}
    report = of(data)
    texts = [read_page(report).text, unfolded(shown(report, 120))]
    digits = ("95.8", "0.9577", "1.92", "1.9153", "1.77", "1.7677", "371.5", "37150")
    for text in texts:
        assert "not measurable with 3 repeats" in text
        assert [n for n in digits if n in text] == []
    assert points(lines(report, "Efficiency, weak scaling")["ddp"])[2] is None
    narrow = [end * 2 for end in (0.4, 0.8)]  # a factor of two is measurable
    wide |= {"efficiency_ci95": narrow}
    assert points(lines(of(data), "Efficiency, weak scaling")["ddp"])[2] == 0.9577
