"""Test the console display of a growing run directory."""

import io
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from bert_dp import files
from bert_dp.files import Tail
from launcher.cli.options import console as make_console
from launcher.log import PLAIN, show
from launcher.watch import display as display_module
from launcher.watch.display import Display, eta_s, progress_line, readable
from tests.helpers import make_config, write_lines
from tests.report_fixture import evaluation, metrics

CONFIG = make_config("schedule.steps=100")


def test_tail_returns_whole_lines_once_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.lines() == ([], False)
    path.write_text("one\ntw")
    assert tail.lines()[0] == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == (["two", "three"], False)
    files.write_text(path, "new\n")  # replaced, as by `cut_back`
    assert tail.lines() == (["new"], True)
    assert Tail(Path("/proc/self/mem")).lines() == ([], False), "a read error (EIO) must not raise"
    tail = Tail(path, skip_present=True)
    assert tail.lines() == ([], False)
    files.append_line(path, {})
    assert tail.lines()[0] == ["{}"]
    monkeypatch.setattr("bert_dp.files.json_lines.READ_BYTES", 1000)
    numbers = [f"{number:09}" for number in range(700)]
    with path.open("a") as file:
        file.write("".join(f"{number}\n" for number in numbers))
        file.flush()
        portions = [tail.lines()[0] for _ in range(8)]
        assert ([line for portion in portions for line in portion], portions[-1]) == (numbers, [])
        file.write("x" * 2500 + "\nafter\n")
    assert [len(line) for _ in range(3) for line in tail.lines()[0]] == [1000, 1000, 500, 5]


def run_of(tmp_path: Path) -> tuple[io.StringIO, Display]:
    (tmp_path / "logs").mkdir(exist_ok=True)
    out = io.StringIO()
    return out, Display(tmp_path, Console(file=out, width=200), CONFIG)


def test_every_logged_line_and_every_held_out_loss_is_shown_once(tmp_path: Path) -> None:
    """Lines of an earlier attempt, and lines kept when the records are cut back, are not shown again."""
    logged, evals = tmp_path / "metrics.jsonl", tmp_path / "evals.jsonl"
    write_lines(logged, map(metrics, range(10, 91, 10)))
    write_lines(evals, [evaluation(10, 1000, 7.0)])
    out, display = run_of(tmp_path)
    with display:
        display.poll()
        write_lines(tmp_path / "new", [metrics(10)])
        (tmp_path / "new").replace(logged)
        display.poll()
        assert not out.getvalue()
        for step in (20, 30):
            files.append_line(logged, metrics(step))
            files.append_line(logged, metrics(step + 5))
            files.cut_back(evals, step - 1)  # as the trainer does
            files.append_line(evals, evaluation(step, 1000, 6.0))
            display.poll()
    shown = [line.split(" | ") for line in out.getvalue().splitlines()]
    steps = ["step 20", "step 25", "step 20", "step 30", "step 35", "step 30"]
    assert [line[0] for line in shown] == steps
    what = ["held-out loss 6.0000 nats ± 0.0392", "4,096 masked tokens in 216 sequences, 15.0 % masked"]
    assert shown[2][1:] == what


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the display's clock by one that stands still at `s` seconds."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


def beat(tmp_path: Path, phase: str, step: int = 0, done: int = 0) -> None:
    """Write the heartbeat of rank 0."""
    path = files.heartbeat_path(tmp_path, 0)
    path.parent.mkdir(exist_ok=True)
    fields = (1, step, files.PHASES.index(phase), done, 0, 0, 0)
    path.write_bytes(struct.pack(f"@{len(files.BEAT_SLOTS)}q", *fields))


def test_a_bar_names_the_phase_and_moves_between_log_lines(tmp_path: Path, now: SimpleNamespace) -> None:
    """A step in metrics.jsonl takes 0.5 s and is 1 % of the run."""
    out = io.StringIO()
    console = Console(file=out, width=90, force_terminal=True, color_system=None)
    with Display(tmp_path, console, CONFIG) as display:
        for seconds, compiled, line, at, text in (
            (2.0, False, 0, (), "starting"),
            (0.0, False, 0, ("setup",), "setting up"),
            (1.0, False, 0, ("setup", 0, 3), "setting up for 1 s"),
            (0.5, False, 0, ("compile",), "running a trial step"),
            (3.0, True, 0, ("compile",), "compiling"),
            (3.0, True, 0, ("compile",), "compiling for 3 s"),
            (0.0, True, 10, ("step", 11), "training step 11 | 10.0 % | loss 7.8000 nats"),
            (0.0, True, 20, ("data", 21), "training step 21 | 20.0 % | left 40.0 s"),
            (10.0, True, 0, ("step", 21, 7), "training step 21, micro batch 7 | 40.0 % | left 30.0 s"),
            (2.0, True, 0, ("step", 21, 8), "training step 21, micro batch 8 | 44.0 % | left 28.0 s"),
            (0.0, True, 0, ("evaluate", 21), "evaluating | 44.0 %"),
            (1.0, True, 0, ("evaluate", 21, 3), "evaluating, batch 3 | 46.0 %"),
            (28.0, True, 0, ("step", 22), "training step 22 | 100.0 %"),  # less than a second is left
            (0.0, True, 0, ("save", 22), "saving | 100.0 %"),
        ):
            now.s += seconds
            files.write_json(tmp_path / "environment.json", {"worker": {"compiled": compiled}})
            if line:
                files.append_line(tmp_path / "metrics.jsonl", metrics(line))
            if at:
                beat(tmp_path, *at)
            display.poll()
            task = display._bar.tasks[0]
            assert task.description.replace(" | loss 7.6000 nats", "") == text
        assert task.completed == pytest.approx(1.0)
    assert out.getvalue().count("global steps/s") == 1  # the full line appears at most once in ten seconds


def test_the_phase_is_printed_to_a_pipe_after_a_long_silence(tmp_path: Path, now: SimpleNamespace) -> None:
    out, display = run_of(tmp_path)
    with display:
        for seconds, *at in ((29.0, "save", 0), (1.0, "save", 0), (9.0, "step", 5, 2), (21.0, "step", 5, 3)):
            now.s += seconds
            beat(tmp_path, *at)
            display.poll()
    assert out.getvalue().splitlines() == ["saving", "training step 5"]


def append_log(tmp_path: Path, rank: int, text: str) -> None:
    with (tmp_path / "logs" / f"rank-{rank}.log").open("a") as file:
        file.write(text)


def test_the_lines_of_rank_0_are_shown_including_the_last_ones(tmp_path: Path) -> None:
    out, display = run_of(tmp_path)
    with display:
        for rank in range(2):
            append_log(tmp_path, rank, f"\x1b[31mrank {rank}\x1b[0m\n10 %\r20 %\n\n")
        files.append_line(tmp_path / "metrics.jsonl", metrics(10))
        display.poll()
        append_log(tmp_path, 0, "last\n")
        files.write_json(tmp_path / "summary.json", {"status": "done"})
    first, second, step, last = out.getvalue().splitlines()
    assert (first, second, last) == ("rank 0", "20 %", "last")
    assert step.startswith("step 10 | "), "earlier lines must come first"


def test_no_line_is_shown_after_a_rank_has_failed(tmp_path: Path) -> None:
    """A rank writes its error file before its traceback, and its stack before it ends in a crash."""
    out, display = run_of(tmp_path)
    with display:
        (tmp_path / "logs" / "rank-1.error.json").write_text("{}")
        append_log(tmp_path, 0, "Traceback\n")
        display.poll()
    assert out.getvalue() == ""
    (tmp_path / "logs" / "rank-1.error.json").unlink()
    out, display = run_of(tmp_path)
    with display:
        append_log(tmp_path, 0, "before\nFatal Python error: Segmentation fault\n")
        display.poll()  # before the launcher has noticed that the rank exited
        append_log(tmp_path, 0, "Current thread 0x1 (most recent call first):\n")
        display.poll()
        files.write_json(tmp_path / "summary.json", {"status": "failed"})
    assert out.getvalue() == "before\n"


def test_output_to_a_pipe_is_not_wrapped_and_may_be_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, table = io.BytesIO(), Table(box=None, show_header=False, padding=0)
    table.add_row("1 ± 2")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.delenv("COLUMNS", raising=False)
    for what in ("▂█ " + "word " * 100, table):
        show(make_console(), what, **PLAIN)
    assert raw.getvalue().decode() == "?? " + "word " * 100 + "\n1 ? 2\n"
    monkeypatch.setenv("COLUMNS", "40")
    assert make_console().width == 40


def test_lines_are_made_readable() -> None:
    assert [readable(line) for line in ("\x1b[1;32mok\x1b[0m\r", "\x07bell", "")] == ["ok", "\ufffdbell", ""]
    assert len(readable("x" * 10**6)) < 1100
    line = progress_line(metrics(10), eta=125)
    numbers = ("step 10", "10.0 %", "7.8000 nats", "1.00e-03", "16.4 k tokens/s", "8 global", "2 min 05 s")
    assert all(number in part for number, part in zip(numbers, line.split(" | "), strict=True))
    assert "left" not in progress_line({})
    assert progress_line(metrics(10)) == progress_line(metrics(10), eta=0.9), "saving still follows"


def test_the_time_left_follows_the_pace_of_the_last_lines() -> None:
    lines: list[Any] = [{"elapsed_s": 10.0 + t, "progress": t / 100} for t in range(1, 51)]
    # only the pace of the last twenty lines counts
    slow = [{"elapsed_s": 1.0, "progress": 0.001}, {"elapsed_s": 9.0, "progress": 0.002}]
    unknown = {"elapsed_s": 59.5, "progress": None}
    assert eta_s(lines) == eta_s([*slow, *lines]) == eta_s([*lines[:-1], unknown, lines[-1]]) == 50
    still = [{"elapsed_s": second, "progress": 0.5} for second in (1.0, 2.0)]
    assert [eta_s(each) for each in ([], lines[:1], still)] == [None] * 3
    assert eta_s([], hours=2.0) is None
    assert eta_s([{"progress": 0.25}], hours=2.0) == 1.5 * 3600


def test_a_flood_of_lines_is_cut_with_one_note(tmp_path: Path) -> None:
    out, display = run_of(tmp_path)
    note, newest = "some lines are omitted; see logs/rank-0.log", [f"line {n}" for n in range(950, 1000)]
    with display:
        for count in (1000, 1000, 3, 1000):
            append_log(tmp_path, 0, "".join(f"line {number}\n" for number in range(1000 - count, 1000)))
            display.poll()
    shown = out.getvalue().splitlines()
    assert shown == [note, *newest, *newest, *newest[-3:], note, *newest], "each flood needs its own note"
