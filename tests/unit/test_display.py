"""What the console shows of a growing run directory."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from bert_dp import record
from launcher.display import Display, Tail
from launcher.report import eta_s


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.lines() == ([], False)
    path.write_text("one\ntw")
    assert tail.lines()[0] == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == (["two", "three"], False)
    record.write_text(path, "new\n")  # replaced, as `cut_back` does
    assert tail.lines() == (["new"], True)


def test_tail_can_skip_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old\n")
    tail = Tail(path, skip_present=True)
    assert tail.lines() == ([], False)
    with path.open("a") as file:
        file.write("new\n")
    assert tail.lines()[0] == ["new"]


def test_display_follows_a_run_that_was_cut_back(tmp_path: Path) -> None:
    def line(step: int) -> str:
        return json.dumps({"step": step, "progress": step / 100, "elapsed_s": float(step)}) + "\n"

    (tmp_path / "metrics.jsonl").write_text("".join(line(i) for i in range(1, 91)))
    out = io.StringIO()
    with Display(tmp_path, Console(file=out, width=200), None) as display:
        display.poll()
        assert "step 90" in out.getvalue()
        record.write_text(tmp_path / "metrics.jsonl", line(50))
        display._last_plain = -1e9
        display.poll()
    assert "step 50" in out.getvalue()


def test_a_budget_in_hours_tells_what_is_left() -> None:
    assert eta_s([{"progress": 0.25}], hours=2.0) == 1.5 * 3600
    assert eta_s([{"progress": None}], hours=2.0) is None
    assert eta_s([], hours=2.0) is None
