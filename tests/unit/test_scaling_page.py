"""The page, the table, the CSV and the plots of a scaling benchmark: whole, partial, hostile, huge, empty."""

from __future__ import annotations

import builtins
import copy
import csv
import html.parser
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bert_dp import record
from bert_dp.config import ConfigError
from launcher import figures
from launcher.report.numbers import (
    NA,
    format_percent,
    format_ratio,
    format_si,
    format_step_time,
    format_time_tick,
)
from launcher.scaling import figures as scaling_figures
from launcher.scaling import page as scaling_page
from launcher.scaling import png, view
from launcher.scaling import report as scaling_report
from tests.scaling_fixture import HOSTILE, nulls, scaling

EVERY_MODE = ("Speed-up", "Efficiency", "Communication efficiency", "Peak memory", "Where a step's time goes")
ONCE = ("All-reduce bus bandwidth", "Training loss", "Step times of each rank")


VOID = {"meta", "input", "br"}


class Checker(html.parser.HTMLParser):
    """Fails on a tag that is not closed; collects attributes that could load something."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [
            f"{k}={v}" for k, v in attrs if k in ("href", "src", "srcset", "action") or k.startswith("on")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.links == []
    assert "script" not in checker.tags
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    text.encode("utf-8")
    return checker


def lines_of(renderable, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


def titles(modes: tuple[str, ...]) -> set[str]:
    return {f"{name}, {mode} scaling" for name in EVERY_MODE for mode in modes} | set(ONCE)


def labels(whole: str) -> set[str]:
    found = re.findall(r'role="img" aria-label="([^"]*)"', whole)
    return {label.replace("&#x27;", "'") for label in found}


def text_of(whole: str) -> str:
    return re.sub(r"<style>.*?</style>", "", whole, flags=re.DOTALL)


def numbers(tree: Any) -> set[float]:
    if isinstance(tree, dict):
        return set().union(*(numbers(value) for value in tree.values()))
    if isinstance(tree, list):
        return set().union(*(numbers(value) for value in tree))
    return {tree} if isinstance(tree, float) else set()


def test_every_figure_is_there_with_units() -> None:
    modes = ("weak", "strong")
    whole = scaling_page.html(scaling(modes=modes))
    check(whole)
    assert not re.search(r"https?://", whole)
    missing = titles(modes) - labels(whole)
    assert not missing
    for words in (
        "(GiB)",
        "nats per masked token",
        "GB/s",
        "message (bytes)",
        "N, ranks",
        "time of a step",
        "ideal",
        "ceiling",
        "size of a gradient bucket",
        "95 % interval",
        "Settings",
        "Environment",
        "prefers-color-scheme",
        "@media print",
    ):
        assert words in whole
    assert "no data recorded" not in whole


def test_every_number_of_the_cells_stands_in_the_page() -> None:
    data = scaling(modes=("weak", "strong"))
    exact = {float(n) for n in re.findall(r'<td title="([-\d.e+]+)"', scaling_page.html(data))}
    cells = copy.deepcopy(data["cells"])
    for cell in cells:
        cell["loss"].pop("curve")  # drawn, not printed
    assert numbers(cells) <= exact


def test_a_table_prints_what_it_holds() -> None:
    data = scaling()
    cell = next(c for c in data["cells"] if c["id"] == "weak-ddp-n2")
    row = {column.path: column.text(view.entry(cell, column)) for t in view.TOPICS.values() for column in t}
    assert row["efficiency"] == format_percent(cell["efficiency"])
    assert row["speedup"] == format_ratio(cell["speedup"])
    assert row["tokens_per_s"] == format_si(cell["tokens_per_s"])
    assert row["step_time_s.ci95.low"] == format_step_time(cell["step_time_s"]["ci95"][0])
    assert row["repeats"] == "3"
    assert row["mfu"] == NA
    for text in row.values():
        assert f">{text}</td>" in scaling_page.html(data).replace("&#x27;", "'")


def test_a_figure_shows_the_numbers_of_the_cells() -> None:
    data = scaling(engines=("ddp",))
    cells = {c["world_size"]: c for c in data["cells"] if c["engine"] == "ddp" and c["kind"] == "run"}
    line = next(s for s in scaling_figures.speedup(data, "weak").series if s.label == "ddp")
    assert dict(line.points) == {n: c["speedup"] for n, c in cells.items()}
    for n, low, high in line.band:
        assert [low, high] == pytest.approx([n * end for end in cells[n]["efficiency_ci95"]])
    ceiling = next(s for s in scaling_figures.speedup(data, "weak").series if s.label == "ceiling")
    assert dict(ceiling.points) == pytest.approx({n: n * cells[n]["ceiling_efficiency"] for n in (2, 4)})
    memory = [s for s in scaling_figures.memory(data, "weak").series if s.label == "ddp"]
    assert dict(memory[0].points) == {n: c["peak_memory_gib"] for n, c in cells.items()}
    assert len(memory[1].points) == 1 + 2 + 4
    runs, controls = scaling_figures.step_bars(data, "weak")
    for bar in runs:
        cell = next(c for c in data["cells"] if c["id"] == bar.label)
        assert sum(bar.parts.values()) == pytest.approx(cell["step_time_s"]["median"])
    assert [bar.label for bar in controls] == [
        "weak-ceiling-n2",
        "weak-ddp-synthetic-n2",
        "weak-ceiling-n4",
        "weak-ddp-synthetic-n4",
    ]
    buckets = {mark.value for mark in scaling_figures.bandwidth(data).marks}
    assert buckets == {p["bytes"] for p in data["links"][0]["points"] if p["bucket"]}


@pytest.mark.parametrize("shared", [False, True], ids=["a baseline of each mode", "one baseline"])
def test_the_baseline_is_a_point_of_every_mode(shared: bool) -> None:
    data = scaling(modes=("weak", "strong"), engines=("ddp", "zero1"))
    if shared:
        data["baselines"]["single"] = "weak-single-n1"
        data["cells"] = [cell for cell in data["cells"] if cell["id"] != "strong-single-n1"]
    assert view.modes(data) == ["weak", "strong"]
    for mode in ("weak", "strong"):
        groups = view.groups(data, mode)
        assert [g.label for g in groups] == ["single", "ddp", "zero1"]
        assert [g.index for g in groups] == [0, 1, 2]
        assert len(groups[0].cells) == 1
    assert view.modes(scaling(engines=())) == ["weak"]


def test_cells_of_an_engine_that_differ_are_lines_of_their_own() -> None:
    data = scaling(engines=("ddp",), controls=False)
    data["cells"].append({**data["cells"][-1], "id": "tensor", "tensor": 2})
    found = [group.label for group in view.groups(data, "weak")]
    assert found == ["single, tensor 1", "ddp, tensor 1", "ddp, tensor 2"]


def test_different_ceilings_are_drawn_apart() -> None:
    data = scaling(engines=("ddp", "zero1"))
    names = [s.label for s in scaling_figures.efficiency(data, "weak").series]
    assert [name for name in names if "ceiling" in name] == ["ceiling"]
    next(c for c in data["cells"] if c["id"] == "weak-zero1-n4")["ceiling_efficiency"] = 0.5
    names = [s.label for s in scaling_figures.efficiency(data, "weak").series]
    assert [name for name in names if "ceiling" in name] == ["ceiling of ddp", "ceiling of zero1"]


def test_losses_are_compared_where_the_global_batch_is_the_same() -> None:
    data = scaling(modes=("weak", "strong"), engines=("ddp",))
    batches = {cell["global_batch"] for cell in scaling_figures.compared(data)}
    assert batches == {128}  # also of the weak cell that has the same
    assert "4 of 4 compared cells agrees" in scaling_figures.loss_note(data)
    assert "relative deviation 1.2e-06" in scaling_figures.loss_note(data)
    next(c for c in data["cells"] if c["id"] == "strong-ddp-n4")["loss_agrees"] = False
    assert "3 of 4" in scaling_figures.loss_note(data)
    assert "Not of: strong-ddp-n4" in scaling_figures.loss_note(data)
    weak = scaling_page.html(scaling())
    assert "Losses are not compared: under weak scaling the global batch grows with N" in weak
    assert "Training loss" not in labels(weak)


def test_what_failed_is_said_with_its_cause() -> None:
    cause = "rank 1: out of memory\nsecond line"
    data = scaling(
        failed={"weak-zero1-n4": ("oom", cause), "weak-ddp-n4": ("pending", None)}, status="partial"
    )
    whole = scaling_page.html(data)
    check(whole)
    assert "weak-zero1-n4: oom: rank 1: out of memory</li>" in whole
    assert "second line" in whole  # in the table of causes
    done, total = sum(c["status"] == "ok" for c in data["cells"]), len(data["cells"])
    assert f"Partial: {done} of {total} cells have a result, 1 have not run yet." in whole
    line = next(s for s in scaling_figures.efficiency(data, "weak").series if s.label == "zero1")
    assert math.isnan(dict(line.points)[4])  # a gap, and its N stays on the axis
    assert scaling_figures.efficiency(data, "weak").x.ticks == [1, 2, 4]


def test_verdicts_stand_once_worst_first() -> None:
    data = scaling(modes=("weak", "strong"), sizes=(1, 2, 4, 8, 16, 32))
    data["verdicts"].append({"cell": "c", "verdict": "out of memory", "evidence": "e", "next": "n"})
    data["cells"][0]["flags"] = ["a flag"]
    whole = scaling_page.html(data)
    heads = re.findall(r'<div class="verdict (\w*)">([^<]*)<', whole)
    assert heads == [
        ("fail", "Out of memory. Next: n"),
        ("warn", "Hardware ceiling. Next: nothing in software: the devices slow each other"),
        ("warn", "Flags: look at these numbers before using them"),
        ("ok", "Scales"),
        ("", "No claim: intervals overlap. Next: more --repeats or --steps"),
    ]
    assert "2 more</summary>" in whole
    assert all(f"{v['cell']}: {v['evidence']}" in whole for v in data["verdicts"])
    data["cells"][0]["flags"] = ["efficiency above 100 %"]
    assert "weak-single-n1: efficiency above 100 %" in scaling_page.html(data)


def test_nothing_measured_is_never_zero() -> None:
    whole = scaling_page.html(nulls())
    check(whole)
    assert labels(whole) == set()
    for title in titles(("weak",)) - {"Training loss"}:
        assert f"{title}: no data recorded".replace("'", "&#x27;") in whole
    assert "no cell has run" in whole
    assert "n/a / n/a" in whole
    shown = re.sub(r"<[^>]*>", " ", text_of(whole))
    assert not re.search(r"\b0\.0|None|nan", shown)


def test_unknown_peaks_are_explained() -> None:
    assert "data-sheet peak of CPU unknown; matmul peak measured here" in scaling_page.html(scaling())


@pytest.mark.parametrize("data", [{}, {"cells": None}, {"cells": [None, 3, {}]}, {"cells": {}, "links": 3}])
def test_a_torn_or_foreign_record_renders(data: dict[str, Any], tmp_path: Path) -> None:
    check(scaling_page.html(data))
    lines_of(scaling_report.Summary(data))
    scaling_report.csv_rows(data)
    png.write(data, tmp_path)


def spoil(tree: Any, value: Any) -> Any:
    if isinstance(tree, dict):
        return {key: spoil(child, value) for key, child in tree.items()}
    if isinstance(tree, list):
        return [spoil(child, value) for child in tree]
    return value


@pytest.mark.parametrize(
    "value", [None, "x", True, math.nan, math.inf, -1.0, 0, 1e300, [], [1], {"a": 1}, HOSTILE]
)
def test_any_value_in_every_place_renders(value: Any, tmp_path: Path) -> None:
    data = spoil(scaling(modes=("weak", "strong"), engines=("ddp",), prediction=True), value)
    check(scaling_page.html(data))
    lines_of(scaling_report.Summary(data))
    scaling_report.write_csv(data, tmp_path / "scaling.csv")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    data = scaling(engines=("ddp", "zero1"), failed={"weak-zero1-n4": ("failed", HOSTILE)}, prediction=True)
    for cell in data["cells"]:
        cell |= {"id": cell["id"] + HOSTILE, "engine": HOSTILE, "launcher": HOSTILE, "flags": [HOSTILE]}
    data["links"][0]["backend"] = HOSTILE
    data["verdicts"] = [{"cell": HOSTILE, "verdict": HOSTILE, "evidence": HOSTILE, "next": HOSTILE}]
    data |= {
        "mode": HOSTILE,
        "command": HOSTILE,
        "settings": {**data["settings"], "model": HOSTILE, HOSTILE: 1},
    }
    data["environment"] |= {"cpu_model": HOSTILE, "HF_TOKEN": "hf_secret", "gpu_topology": HOSTILE}
    out = tmp_path / "new" / "page.html"
    scaling_page.write(data, out)
    whole = out.read_text(encoding="utf-8")
    check(whole)
    assert "<script" not in whole
    assert "&lt;script&gt;" in whole
    assert "hf_secret" not in whole
    assert not re.search(r"[\x00\x1b]", whole)
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]
    png.write(data, tmp_path / "png")
    assert "\x1b" not in "\n".join(lines_of(scaling_report.Summary(data)))


@pytest.mark.parametrize(
    ("engines", "sizes"),
    [
        ((), (1,)),
        (("ddp",), (4,)),
        (tuple(f"engine-number-{i}" for i in range(20)), (1, 2)),
        (("ddp", "zero1", "fsdp", "accelerate", "deepspeed"), (1, 2, 3, 4, 6, 8, 12, 16)),
        (("ddp",), (1, 64, 1024)),
    ],
)
def test_any_size(engines: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    data = scaling(engines=engines, sizes=sizes)
    whole = scaling_page.html(data)
    check(whole)
    assert labels(whole) >= {"Speed-up, weak scaling", "Efficiency, weak scaling"}
    assert all(c["id"] in whole for c in data["cells"])
    assert len(whole) < 4e6
    axis = scaling_figures.speedup(data, "weak").x
    assert axis.log == (max(sizes) > 16)


def test_of_many_ranks_the_extremes_are_drawn() -> None:
    data = scaling(engines=("ddp",), sizes=(64,), controls=False)
    cell = data["cells"][1]
    cell["ranks"][40]["own_work_s"]["median"] *= 2
    found = {rank["rank"] for rank in scaling_figures.extremes(cell)}
    assert len(found) == 16
    assert 40 in found
    assert "16 of 64 ranks: the fastest and the slowest" in scaling_page.html(data)


def test_prediction_stands_beside_measurement() -> None:
    assert "Prediction and measurement" not in scaling_page.html(scaling())
    data = scaling(prediction=True)
    row = next(r for r in data["prediction"]["measured"] if r["cell"] == "weak-ddp-n2")
    cell = next(c for c in data["cells"] if c["id"] == "weak-ddp-n2")
    whole = scaling_page.html(data)
    median, (low, high) = cell["step_time_s"]["median"], cell["step_time_s"]["ci95"]
    off = format_percent(row["predicted_step_s"] / median - 1)
    times = [format_step_time(s) for s in (row["predicted_step_s"], median, low, high)]
    assert "</td><td>".join([*times[:2], f"{times[2]} to {times[3]}", off]) in whole
    assert "<th>N = 64</th>" in whole
    assert "<li>all-reduce as measured over 2 ranks</li>" in whole
    check(scaling_page.html(scaling(prediction={"anything": ["else"]}) | {"prediction": {"anything": [1]}}))


def test_another_schema_is_named() -> None:
    assert "schema version 2; this page reads version 1" in scaling_page.html(scaling(schema_version=2))


# --- parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_step_time(0.0123), "12.3 ms"),
        (format_step_time(4.6), "4.60 s"),
        (format_step_time(0.9999), "1.00 s"),
        (format_step_time(123.4), "123 s"),
        (format_step_time(4567.0), "4567 s"),
        (format_step_time(None), NA),
        (format_step_time(0.0), "0 s"),
        (format_time_tick(0.05), "50 ms"),
        (format_time_tick(0.0), "0 s"),
        (format_time_tick(2.5), "2.5 s"),
        (format_ratio(1.9), "1.90"),
        (format_ratio(17.56), "17.6"),
        (format_ratio(1024.0), "1,024"),
        (format_ratio(9.999), "10.0"),
    ],
)
def test_format(text: str, expected: str) -> None:
    assert text == expected


def test_bars_are_in_proportion_to_the_longest() -> None:
    rows = [
        figures.Bar("a", {"x": 1.0, "y": 1.0}),
        figures.Bar("b", {"x": 4.0}),
        figures.Bar("none", {"x": 0.0}),
    ]
    drawn = figures.bars("t", "seconds", rows, format_step_time, format_time_tick)
    assert re.findall(r'<rect class="f\d" x="([\d.]+)%" y="2" width="([\d.]+)%"', drawn) == [
        ("0.00", "25.00"),
        ("25.00", "25.00"),
        ("0.00", "100.00"),
    ]
    assert "none" not in drawn
    assert figures.bars("t", "s", [], format_step_time, format_time_tick) == figures.empty("t")


def test_boxes_draw_what_is_known() -> None:
    box = {"min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "max": 5.0}
    panels = [("cell", [figures.Box("0", {"step": box}), figures.Box("1", {"step": {"median": 3.0}})], "")]
    drawn = figures.boxes("t", panels, format_step_time, format_time_tick, "unit")
    assert drawn.count('class="median"') == 2
    assert drawn.count("<rect class") == 2  # a box, and the key of the legend
    same = [("cell", [figures.Box("0", {"step": dict.fromkeys(box, 2.0)})], "")]
    check(figures.boxes("t", same, format_step_time, format_time_tick, "unit"))


# --- table and CSV


@pytest.mark.parametrize("width", [80, 100, 120])
def test_table_fits(width: int) -> None:
    data = scaling(modes=("weak",), failed={"weak-zero1-n4": ("oom", "rank 1: out of memory")})
    lines = lines_of(scaling_report.Summary(data), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    cell = next(c for c in data["cells"] if c["id"] == "weak-ddp-n2")
    for words in (
        format_si(cell["tokens_per_s"]),
        f"{format_percent(cell['efficiency'])} +-1.5",
        format_percent(cell["communication_efficiency"]),
        "weak-zero1-n4: oom: rank 1: out of memory",
        "weak-ddp-n4: hardware ceiling.",
        "MAMFU",
    ):
        assert words in text
    assert len([line for line in lines if line.startswith("cell ")]) == (1 if width == 120 else 2)
    assert "ceiling " not in "".join(line for line in lines if line.startswith("weak-ddp-n2-"))


def test_csv_keeps_every_number(tmp_path: Path) -> None:
    data = scaling(
        modes=("weak", "strong"), failed={"weak-ddp-n4": ("failed", 'a "quoted", cause\nof two lines')}
    )
    scaling_report.write_csv(data, tmp_path / "scaling.csv")
    with (tmp_path / "scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [cell["id"] for cell in data["cells"]]
    for row, cell in zip(rows, data["cells"], strict=True):
        for path in ("tokens_per_s", "split_s.optimizer", "step_time_s.median", "peak_memory_gib", "mfu"):
            known = view.value(cell, path)
            assert row[path] == ("" if known is None else str(known))
        for end, low_high in zip(("low", "high"), cell["efficiency_ci95"] or ("", ""), strict=True):
            assert row[f"efficiency_ci95.{end}"] == str(low_high)
    assert next(row for row in rows if row["status"] == "failed")["cause"].endswith("of two lines")


def test_reading(tmp_path: Path) -> None:
    record.write_json(tmp_path / scaling_report.FILE, scaling())
    assert scaling_report.read(tmp_path)["mode"] == "weak"
    (tmp_path / scaling_report.FILE).write_text('{"cells": [')
    with pytest.raises(ConfigError, match="not a JSON object"):
        scaling_report.read(tmp_path)


# --- PNG


@pytest.mark.parametrize(
    "data", [scaling(modes=("weak", "strong")), nulls(), scaling(engines=(), sizes=(1,))]
)
def test_png(data: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = png.write(data, tmp_path / "plots")
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == sorted(
        f"{name}.png" for name in png.NAMES
    )
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_png_leaves_nothing_global(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys, matplotlib; from pathlib import Path; from launcher.scaling import png\n"
        "from tests.scaling_fixture import scaling\n"
        "before = matplotlib.rcParams.copy()\n"
        f"png.write(scaling(), Path({str(tmp_path)!r})); assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert dict.items(before) == dict.items(matplotlib.rcParams)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'bert-dp\[plots\]'"):
        png.write(scaling(), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_fixture_is_json() -> None:
    assert json.loads(json.dumps(scaling(prediction=True), allow_nan=False)) == scaling(prediction=True)
