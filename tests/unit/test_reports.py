"""Tests of properties that every report has, on the page and on the console."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.datasets import shards_report
from launcher.machine.doctor import Finding, doctor_report
from launcher.machine.environment import probe
from launcher.report import html
from launcher.report.figures import HOVER, drawing
from launcher.report.page import (
    Axis,
    Bars,
    Figure,
    Line,
    Report,
    ReportSection,
    Table,
    TableCell,
    TableRow,
    show_report,
)
from launcher.report.run_page import of_directories
from launcher.scale.scale_page import scale_page
from tests.golden.told import REPORTS
from tests.helpers import failed
from tests.report_fixture import HOSTILE, make_run, read_page, shown, unfolded, with_strings
from tests.scaling_fixture import nulls
from tests.tune_fixture import unmeasured
from tests.unit.test_scale_page import parsed
from tests.unit.test_tune_page import of

SOURCE = {"bytes": 9, "sha256": "", "documents": 600, "letters": 1000, "tokens": 500}
SHARDS: dict[str, Any] = {
    "manifest": {
        "sources": [
            {**SOURCE, "name": "[red]a.txt", "lost_letters": 0, "unknown_tokens": 0},
            {**SOURCE, "name": "b.txt", "lost_letters": 123, "unknown_tokens": 10},
        ],
        "sequence_length": 128,
        "vocab_size": 4096,
        "unigram_entropy_nats": 6.75,
        "uniform_entropy_nats": 8.3178,
        "train": {"documents": 1200, "tokens": 128_000, "sequences": 1000, "shards": [{}]},
        "held_out": {"documents": 12, "tokens": 1280, "sequences": 10, "shards": [{}]},
        "dropped": {"empty": 3, "tokens_per_char": 0, "exact_duplicate": 7, "near_duplicate": 0},
    },
    "samples": ["a [bold]sample[/bold]\x1b[31m\nof text", "x" * 1000],
    "problems": [],
}
FINDINGS = [Finding("ok", "python"), Finding("fail", "no torch", "ranks stop", "pip install [torch]")]
FAILED = failed("no", rank=1, fix=["do", "or do"])

MAKERS: dict[str, Callable[[Path], Report]] = {
    **REPORTS,
    "failed run": lambda path: of_directories([make_run(path / "run", summary=FAILED)]),
    "empty run": lambda path: of_directories([path]),
    "doctor": lambda path: doctor_report(probe(path), FINDINGS),
    "shards": lambda path: shards_report(SHARDS, Path("shards")),
    "scaling, begun": lambda path: scale_page(parsed(nulls())),
    "search, begun": lambda path: of(unmeasured()),
}


@pytest.fixture(params=MAKERS, ids=str)
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Report:
    return MAKERS[request.param](tmp_path)


def test_the_page_is_one_file_that_runs_only_bert_dps_scripts(report: Report) -> None:
    page = read_page(report)
    assert "scattergl" not in json.dumps(page.data)
    assert "n/a" not in json.dumps([trace.get("x") for figure in page.data for trace in figure["data"]])


def test_page_and_console_have_the_same_findings(report: Report) -> None:
    page, console = read_page(report).text, unfolded(shown(report))
    texts = [text for v in report.verdicts for text in (v.name, v.text, *v.notes)]
    assert texts or not report.verdicts
    for text in texts:
        assert unfolded([text]) in page
        assert unfolded([text]) in console


def test_rows_have_a_cell_for_every_column_and_the_console_stays_within_its_width(report: Report) -> None:
    for table in [table for section in report.sections for table in section.tables]:
        assert {len(row.cells) for row in table.rows} <= {len(table.columns) or 1}
    for width in (60, 80, 120):
        assert max(map(len, shown(report, width))) <= width


def test_hostile_text_stays_text(report: Report) -> None:
    evil = with_strings(report, lambda text: HOSTILE + text)
    page = read_page(evil)
    whole = html.html(evil)
    assert "<script>alert" not in whole.replace((page.scripts or ["\x00"])[0], "")
    assert not re.search(r"[\x00\x1b]", re.sub(r"<script.*</script>", "", whole, flags=re.DOTALL))
    assert "<script>alert(1)" in page.text
    texts = [text for figure in page.data for text in strings({**figure, "name": "", "switch": ""})]
    assert {text for text in texts if "<" in text} <= {HOVER}  # because plotly would read it as a tag
    assert "\\u001b" not in json.dumps(page.data)
    assert "\x1b" not in "\n".join(shown(evil))


def strings(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [text for child in tree.values() for text in strings(child)]
    if isinstance(tree, list):
        return [text for child in tree for text in strings(child)]
    return [tree] if isinstance(tree, str) else []


def test_missing_values_are_not_shown_as_none_or_nan(report: Report) -> None:
    assert not re.search(r"\b(None|nan|inf)\b", read_page(report).text + unfolded(shown(report)))


def of_figure(*traces: Line | Bars, rows: tuple[str, ...] = ()) -> Report:
    figure = Figure("title", traces, Axis("x"), Axis("y"), rows)
    return Report("report", sections=[ReportSection("", [figure])])


def test_a_figure_without_data_says_that_none_were_recorded() -> None:
    ideal = Line("ideal", [1.0, 2.0], [1.0, 2.0], style="dotted")
    for trace, rows in ((ideal, ()), (Line("a", [1.0], [None]), ()), (Bars("part", [0.0, None]), ("a", "b"))):
        assert "no data recorded" in read_page(of_figure(trace, rows=rows)).text


def test_a_line_is_drawn_with_gaps_and_error_bars() -> None:
    low, high = [0.5, None, 2.0, 3.5], [2.0, None, 4.0, 4.5]
    line = Line("a", [1, 2, 3, 4], [1.0, None, 3.0, 4.0], 9, "both", low, high)
    (drawn,) = read_page(of_figure(line)).data[0]["data"]
    assert drawn["y"] == [1.0, None, 3.0, 4.0]
    assert drawn["error_y"]["array"] == [1.0, None, 1.0, 0.5]
    assert drawn["error_y"]["arrayminus"] == [0.5, None, 1.0, 0.5]
    assert drawn["marker"]["symbol"] != "circle"  # because another line has the same colour
    assert drawn["line"]["color"] == "c1"


def test_hover_text_shows_value_interval_and_position_with_units() -> None:
    line = Line("ddp", [2.0, 4.0], [0.5, 0.25], low=[0.4, None], high=[0.6, None])
    figure = Figure("t", [line], Axis("N", "count"), Axis("y", "percent"))
    (drawn,) = [each for each in drawing(figure)["data"] if "text" in each]
    assert drawn["text"] == ["ddp: 50.0 % [40.0 %, 60.0 %] at 2", "ddp: 25.0 % at 4"]
    bars = [Bars("a", [0.5, 1.5]), Bars("b", [0.25, None], ["one", "two"])]
    drawn = drawing(Figure("t", bars, Axis("time", "seconds"), Axis(""), ["x", "y"]))
    texts = [text for each in drawn["data"] for text in each["text"]]
    assert texts == ["x, a: 500 ms", "y, a: 1.50 s", "x, b: one", "y, b: two"]
    assert [trace["x"] for trace in drawn["data"]] == [[0.5, 1.5], [0.25, 0.0]]
    assert [note["text"] for note in drawn["layout"]["annotations"]] == ["x", "y"]
    low, high = drawn["layout"]["yaxis"]["range"]
    assert low > 1 > 0 > high, "the first row is at the top"


def test_an_axis_is_drawn_with_its_scale_unit_and_start() -> None:
    line = Line("a", [1.0, 2.0], [1.0, 2.0])
    x = Axis("N", "count", log=True, ticks=[1.0, 1024.0])
    layout = drawing(Figure("t", [line], x, Axis("share", "percent", from_zero=True)))["layout"]
    shown_x = {"type": "log", "tickvals": [1.0, 1024.0], "ticktext": ["1", "1,024"], "rangemode": "normal"}
    assert layout["xaxis"].items() >= {**shown_x, "title": {"text": "N"}}.items()
    assert layout["yaxis"].items() >= {"type": "linear", "rangemode": "tozero", "tickformat": "~%"}.items()
    assert layout["title"]["text"] == "share"
    seconds = drawing(Figure("t", [line], Axis("time", "seconds"), Axis("y")))["layout"]["xaxis"]
    assert (seconds["ticksuffix"], seconds["exponentformat"]) == ("s", "SI")


def test_a_page_that_cannot_be_written_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert not html.write_or_warn(Report("r"), tmp_path / "file" / "report.html")
    assert f"warning: the page {tmp_path / 'file' / 'report.html'} was not written" in capsys.readouterr().err
    assert html.write_or_warn(Report("r"), tmp_path / "new" / "report.html")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]


def test_only_a_page_or_an_empty_file_is_overwritten(tmp_path: Path) -> None:
    page, empty, other = (tmp_path / name for name in ("page.html", "empty.html", "other.html"))
    html.write(Report("r"), page)
    empty.write_text("")
    other.write_text("<html>mine</html>")
    refused = {path: bool(html.page_issues("--out", path)) for path in (page, empty, other, tmp_path)}
    assert refused == {page: False, empty: False, other: True, tmp_path: True}
    assert html.page_issues("--out", tmp_path / "new.html") == []


def test_a_table_that_is_too_wide_is_split_and_each_part_names_its_rows() -> None:
    heads = [f"a long head {i}" for i in range(6)]
    rows = [TableRow(name, [TableCell(f"{name}{i}") for i in range(6)]) for name in ("x", "y")]
    table = Table(rows, heads, title="wide", corner="cell")
    report = Report("r", sections=[ReportSection("", tables=[table])])
    text = unfolded(shown(report, 60))
    assert text.count("cell ") > 1
    for words in ("wide:", "x x0", "y y0", *heads, *(f"{name}{i}" for name in "xy" for i in range(6))):
        assert text.count(words) == 1
    assert unfolded(shown(report, 200)).count("cell ") == 1


def test_rows_and_sections_can_be_on_the_page_only() -> None:
    rows = [TableRow("seen", (TableCell("1"),)), TableRow("unseen", (TableCell("2"),), console=False)]
    sections = [
        ReportSection("", tables=[Table(rows)], notes=["one note"]),
        ReportSection("", tables=[Table([TableRow("hidden", (TableCell("3"),))])], console=False),
        ReportSection("", notes=["first", "second"]),
    ]
    report = Report("r", sections=sections)
    text = unfolded(shown(report))
    assert text.endswith("seen 1 one note * first * second")
    for words in ("unseen", "hidden"):
        assert words not in text
        assert words in read_page(report).text


def test_the_report_of_shards() -> None:
    report = shards_report(SHARDS, Path("my shards"))
    text = unfolded(shown(report, 100))
    for words in ("b.txt 600 1,000 12.3 % 2.0 %", "train 1,200 128,000 1,000", "held-out 12 1,280 10"):
        assert words in text
    assert "a [bold]sample[/bold] of text" in text
    assert [v.level for v in report.verdicts] == ["ok", "warn"]
    assert "data.path='my shards'" in report.next
    report = shards_report({**SHARDS, "problems": ["train-00000.bin: found cd [x]"]}, Path("shards"))
    assert (report.verdicts[0].level, report.next) == ("fail", "")
    assert "found cd [x]" in unfolded(shown(report))


def test_a_report_ends_with_its_page_and_the_next_command() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    show_report(console, Report("t", next="bert-dp train [x] " + 30 * "y"), Path("a/report.html"))
    assert out.getvalue() == f"page: a/report.html\nnext: bert-dp train [x] {30 * 'y'}\n"
    show_report(console, Report("t"))
    assert out.getvalue().count("\n") == 2
    assert "next: <code>bert-dp train &lt;x&gt;</code>" in html.html(Report("t", next="bert-dp train <x>"))
