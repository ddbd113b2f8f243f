"""Tests of sending records to logging services: new lines, truncation, failures and the child process."""

import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_dp import files
from launcher import job
from launcher.cli.options import loggers as parse_loggers
from launcher.run import loggers
from launcher.run.processes import stop_signals
from tests.e2e.cli import here, is_alive, refused, wait_for
from tests.helpers import failed, make_config, write_lines
from tests.report_fixture import make_run, metrics

ABSENT = "trackio"


class Fake:
    """A fake service that stores everything it receives."""

    where = "nowhere"

    def __init__(self, run_dir: Path, name: str, settings: Mapping[str, Any]):
        self.run_dir, self.name, self.settings = run_dir, name, settings
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended: tuple[int, dict[str, Any], int] | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def finish(self, step: int, facts: Mapping[str, Any], exit_code: int) -> None:
        self.ended = step, dict(facts), exit_code


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    """Return the fake runs in the order in which they were opened."""
    runs: list[Fake] = []
    monkeypatch.setitem(loggers.OPENERS, "wandb", lambda *given: runs.append(Fake(*given)) or runs[-1])
    return runs


def send_all(run_dir: Path) -> None:
    """Send all records and the end of the run, like `report --log-to`."""
    (run_dir / "logs").mkdir(exist_ok=True)
    loggers.send(run_dir, "wandb", lambda seconds: True, lambda line: None)


def steps(run: Fake, key: str = "loss") -> list[int]:
    return [step for step, values in run.rows if key in values]


def test_a_run_is_sent_with_settings_numbers_summary_and_links(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir = make_run(tmp_path / "run", log={"to": ["wandb"]}, schedule={"hours": None})
    send_all(run_dir)
    (run,) = opened
    assert (run.run_dir, run.settings) == (run_dir, {"optim.lr": 1e-3, "log.to": '["wandb"]'})
    assert re.fullmatch(r"run-\d{8}-\d{6}", run.name)
    assert steps(run) == list(range(10, 101, 10))
    first = metrics(10)
    del first["step"], first["mfu"]  # null, because the peak is unknown
    assert run.rows[0] == (10, first)
    (evaluation,) = files.read_lines(run_dir / "evals.jsonl")
    measured = evaluation.keys() - {"step", "tokens", "elapsed_s"}
    assert run.rows[-1] == (100, {f"heldout_{key}": evaluation[key] for key in measured})
    assert "heldout_loss" in run.rows[-1][1]
    assert run.ended is not None
    step, facts, code = run.ended
    assert (step, code, facts["summary/status"], facts["summary/heldout_loss"]) == (100, 0, "done", 6.25)
    assert facts["summary/time_s.train"] == 75.0
    assert facts["summary/report"] == str(run_dir / "report.html")
    assert facts["summary/checkpoint"] == str(run_dir / "checkpoints/step-00000100")
    assert all(isinstance(value, str | int | float) for value in facts.values())


def test_an_incomplete_line_is_sent_once_complete_and_a_repeated_step_only_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = loggers.StepReader(path)
    assert list(reader.rows()) == []
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert list(reader.rows()) == [(1, {"loss": 3.0})]
    assert list(reader.rows()) == []
    with path.open("a") as file:
        file.write('ss": 2.5}\nnot JSON\n{"step": 3, "loss": null}\n')
    assert list(reader.rows()) == [(2, {"loss": 2.5}), (3, {})]
    files.cut_back(path, 2)  # like a run that resumes from step 2
    for step in (3, 4):
        files.append_line(path, {"step": step})
    assert [step for step, _ in reader.rows()] == [4]


def test_held_out_losses_are_sent_in_the_order_of_steps(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services drop or misplace a step lower than the last one. A run directory that vanishes is an error."""
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "evals.jsonl", [{"step": step, "loss": 6.0} for step in (50, 70, 100)])
    monkeypatch.setattr(Fake, "finish", lambda *_: shutil.rmtree(run_dir))
    with pytest.raises(FileNotFoundError):
        send_all(run_dir)
    assert [step for step, _ in opened[0].rows] == sorted(step for step, _ in opened[0].rows)
    assert steps(opened[0], "heldout_loss") == [50, 70, 100]


def test_the_end_of_a_run_has_its_exit_code_and_links(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    send_all(run_dir)
    assert opened[0].ended == (100, {}, 1), "a run without a summary has failed"
    stopped = make_run(tmp_path / "stopped", summary={"status": "stopped", "signal": 15, "checkpoint": None})
    facts, code = loggers.summary_facts(stopped)
    assert (facts["summary/status"], code) == ("stopped", 143)
    assert "summary/checkpoint" not in facts
    assert loggers.summary_facts(make_run(tmp_path / "bad", summary=failed("no", "bad_input")))[1] == 2


def test_lines_are_sent_during_the_run(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir, seen = make_run(tmp_path / "run", 1), list[list[int]]()
    (run_dir / "logs").mkdir()

    def wait_for_end(seconds: float) -> bool:
        seen.append(steps(opened[0]))
        assert opened[0].ended is None
        files.append_line(run_dir / "metrics.jsonl", metrics(10 + 10 * len(seen)))
        return len(seen) == 3

    loggers.send(run_dir, "wandb", wait_for_end, lambda line: None)
    assert [*seen, steps(opened[0])] == [[], [10, 20], [10, 20, 30], [10, 20, 30, 40]]
    assert opened[0].ended is not None


needs_absent = pytest.mark.skipif(
    importlib.util.find_spec(ABSENT) is not None, reason=f"{ABSENT} is installed"
)


@needs_absent
def test_a_missing_package_does_not_affect_other_services(tmp_path: Path) -> None:
    run_dir, messages = make_run(tmp_path / "run"), list[str]()
    with loggers.Loggers(run_dir, [ABSENT, "tensorboard"], messages.append) as sender:
        wait_for(lambda: len(messages) == 2, 30)  # during the run, not at its end
    assert sorted(messages)[0].startswith(f"tensorboard: {run_dir / 'tensorboard'}")
    unsent = f"warning: no more records of this run will be sent to {ABSENT} (ModuleNotFoundError: "
    assert sorted(messages)[1].startswith(unsent)
    assert sender.exit_code == 1
    assert b"summary/final_loss" in events(run_dir)


def events(run_dir: Path) -> bytes:
    """Return the bytes of all event files."""
    return b"".join(path.read_bytes() for path in (run_dir / "tensorboard").rglob("events*"))


CHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
open(sys.argv[1], "w").write(sys.argv[-1])
sys.stdin.read()
{}
"""


@pytest.mark.parametrize(
    ("wait", "end", "code", "words"),
    [
        (True, "time.sleep(0.3)", 0, None),  # without a time limit
        (False, f"sys.exit({loggers.INCOMPLETE})", 1, None),  # the child itself reports unsent records
        (False, "time.sleep(600)", 1, "timed out"),
        (True, "while True: os.kill(os.getppid(), 15); time.sleep(0.05)", 143, "timed out"),
        (True, "os.abort()", 1, "killed by signal 6"),
    ],
)
def test_a_service_is_waited_for_or_killed_and_its_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool, end: str, code: int, words: str | None
) -> None:
    """Processes that a service started are killed if the service does not exit."""
    ready, messages = tmp_path / "ready", list[str]()
    command = [sys.executable, "-I", "-S", "-c", CHILD.format(end), str(ready)]
    monkeypatch.setattr(loggers, "module_command", lambda _: command)
    monkeypatch.setattr(loggers, "SERVICES_S", 0.0 if wait else 0.5)
    before = set(psutil.Process().children(recursive=True))
    with stop_signals(), loggers.Loggers(tmp_path, ["wandb"], messages.append, wait=wait) as sender:
        wait_for(lambda: ready.exists() and ready.read_text() == "wandb", 30)
        started = set(psutil.Process().children(recursive=True)) - before
    if words == "timed out":
        wait_for(lambda: not any(map(is_alive, started)), 10)
    for left in filter(is_alive, started):
        left.kill()
    assert (sender.exit_code, len(messages)) == (code, words is not None)
    assert all(line.startswith("warning: ") and f"to wandb ({words}" in line for line in messages)


@needs_absent
def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(f"log.to=[{ABSENT},tensorboard]")
    (issue,) = [i for i in job.input_issues(config) if not isinstance(i, str)]
    assert (issue.setting, issue.kind, issue.value) == ("log.to", "needs_package", ABSENT)
    assert issue.hint == "`pip install 'trackio>=0.43'`"
    run_dir = make_run(tmp_path / "run")
    messages = refused("report", str(run_dir), "--log-to", f"tensorboard,{ABSENT}")
    assert messages.startswith(f"error: --log-to: {ABSENT} ")
    assert not (run_dir / "report.html").exists()


def test_an_unknown_service_is_refused(tmp_path: Path) -> None:
    issues = job.logger_issues(unknown := ["tensorbord", ""], "log.to")
    assert [(i.setting, i.kind, i.value) for i in issues] == [("log.to", "unknown", name) for name in unknown]
    messages = refused("report", str(tmp_path), "--log-to", "tensorboard")
    assert messages.startswith(f"error: --log-to: {tmp_path} is not a run directory")
    assert parse_loggers("tensorboard, tensorboard") == ("tensorboard",)


def test_report_sends_a_run_that_was_not_sent(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    done = here("report", str(run_dir), "--log-to", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"tensorboard: {run_dir / 'tensorboard' / 'run-'}")
    assert (run_dir / "report.html").exists()
    assert b"summary/final_loss" in events(run_dir)
