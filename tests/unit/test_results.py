"""Tests of the outcome that the launcher records after a failure, a stop signal or both."""

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bert_dp import files
from bert_dp.config import ConfigError
from bert_dp.config.checks import parse_profile
from bert_dp.files.models import Failure
from bert_dp.training.process import HeartbeatWriter
from launcher import job
from launcher.run import processes, train
from launcher.run.processes import RunOutcome
from launcher.run.restarts import RunOptions
from launcher.run.starters import RankStart
from tests.e2e.cli import TINY
from tests.helpers import read_json
from tests.states import FACTS

UNKNOWN = Failure(message="torchrun: exited with code 1 without a summary")
RAISED = Failure(rank=1, message="ValueError: no", where="a.py:1")
LR = {"setting": "optim.lr", "kind": "out_of_range", "message": "no"}
STOPPED = "SIGTERM: stopped before this run saved its next checkpoint"


def result(run_dir: Path, cause: Failure | None) -> tuple[processes.RunOutcome, dict]:
    found = processes.outcome_of(run_dir, cause, UNKNOWN, [signal.SIGTERM])
    return found, json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    ("cause", "is_hidden"),
    [
        (RAISED, False),
        (Failure(rank=0, message="killed by signal 9 (SIGKILL)", killed_by=9), False),
        (Failure(rank=1, message="hang in step 3"), False),
        (None, True),
        (Failure(rank=1, message="killed by signal 15 (SIGTERM)", killed_by=15), True),
        (Failure(rank=1, message="exited with code 1 without recording an error", kind="no_cause"), True),
        (Failure(rank=1, message="RuntimeError: Connection closed by peer", kind="peer_gone"), True),
    ],
)
def test_a_stop_signal_hides_only_the_failures_that_it_causes(
    tmp_path: Path, cause: Failure | None, is_hidden: bool
) -> None:
    found, summary = result(tmp_path, cause)
    expected = ("stopped", STOPPED) if cause is None or is_hidden else (cause.kind, cause.message)
    assert (summary["failure"]["kind"], summary["failure"]["message"]) == expected
    assert found.exit_code == summary["exit_code"] == (143 if is_hidden else 1)
    assert (found.signal, summary["signal"]) == (signal.SIGTERM, signal.SIGTERM)
    assert is_hidden or found.failure == cause


def test_a_failure_recorded_during_a_stop_is_kept(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "exit_code": 1, "step": 66}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 60}\n')
    found, summary = result(tmp_path, Failure(rank=0, message="RunFailed: step-00000066 could not be saved"))
    assert summary["step"] == 66, "the step of the summary is kept"
    assert (found.exit_code, summary["exit_code"], found.signal) == (1, 1, signal.SIGTERM)


def test_a_run_without_a_summary_counts_the_steps_that_its_ranks_completed(tmp_path: Path) -> None:
    for rank, (step, phase) in enumerate([(7, "step"), (8, "data"), (6, "log")]):
        beat = HeartbeatWriter(files.heartbeat_path(tmp_path, rank))
        beat.enter(phase, step)
        beat.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    assert result(tmp_path, RAISED)[1]["step"] == 6
    (tmp_path / "summary.json").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n')
    assert result(tmp_path, RAISED)[1]["step"] == 10


def test_bad_input_found_by_the_ranks_is_in_the_summary(tmp_path: Path) -> None:
    refused = Failure(rank=0, message="ConfigError: optim.lr: no", kind="bad_input", issues=[LR])
    found, summary = result(tmp_path, refused)
    assert (found.exit_code, summary["status"], summary["exit_code"]) == (2, "failed", 2)
    assert summary["failure"]["issues"] == [LR]


# --- the verb around the ranks


class Verb:
    """`train` on one rank with scripted outcomes and recorded starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shards: Path, run_dir: Path):
        self.shards, self.run_dir, self.out = shards, run_dir, io.StringIO()
        self.starts: list[dict[str, Any]] = []
        self.ends: list[RunOutcome] = []
        monkeypatch.setattr(train, "prepare_data", lambda config: Path(config.data.path))
        monkeypatch.setattr(processes, "run", self.start)

    def start(self, run_dir: Path, start: RankStart, poll: Any, **more: Any) -> RunOutcome:
        self.starts.append({"path": run_dir, "start": start, **more})
        poll()
        end = self.ends.pop(0)
        summary = {"status": "failed" if end.failure else "done", "exit_code": end.exit_code}
        files.write_json(self.run_dir / "summary.json", summary)
        return end

    def go(self, *ends: RunOutcome, settings: tuple[str, ...] = (), **options: Any) -> int:
        self.ends, self.out = list(ends), io.StringIO()
        words = [*TINY, f"data.path={self.shards}", "run.device=cpu", *settings]
        loaded = job.load("quickstart", words, self.run_dir)
        console = Console(file=self.out, width=300)
        return train.train(loaded, RunOptions("1", self.run_dir, **{"force": True, **options}), console)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, shards: Path, tmp_path: Path) -> Verb:
    return Verb(monkeypatch, shards, tmp_path / "run")


def test_the_ranks_are_started_as_the_run_is_configured(verb: Verb) -> None:
    settings = ("run.hang_after_s=7", "run.end_hung_after_s=70", "schedule.steps=9")
    plan = parse_profile("2:4", "0")
    assert verb.go(RunOutcome(0, None), settings=settings, launcher="accelerate", profile=plan) == 0
    (call,) = verb.starts
    words = ["--resume", "auto", "--profile", "2:4", "--profile-ranks", "0"]
    assert (call["path"], call["start"]) == (verb.run_dir, RankStart(1, words, "accelerate"))
    assert (call["watch"]._limits.hang_after_s, call["watch"]._limits.end_hung_after_s) == (7.0, 70.0)
    facts = read_json(verb.run_dir / "environment.json")
    assert (facts["launcher"], "command" in facts, "cpu_model" in facts) == ("accelerate", True, True)
    assert "hang_after_s: 7" in (verb.run_dir / "config.yaml").read_text()
    output = verb.out.getvalue()
    assert output.startswith(f"run directory: {verb.run_dir}\nlauncher: accelerate\n")
    assert f"page: {verb.run_dir}/report.html" in output


def test_a_failure_gives_a_card_and_a_page_and_bad_input_only_error_lines(verb: Verb) -> None:
    assert verb.go(RunOutcome(1, RAISED)) == 1
    output = verb.out.getvalue()
    assert "failed: rank 1: ValueError: no\n  at a.py:1\n" in output
    assert f"page: {verb.run_dir}/report.html" in output
    issues = [LR, {**LR, "setting": "data.path"}]
    bad = Failure(rank=0, message="ConfigError", kind="bad_input", issues=issues)
    assert verb.go(RunOutcome(2, bad)) == 2
    output = verb.out.getvalue()
    assert "error: optim.lr: no\nerror: data.path: no\n" in output
    assert "failed:" not in output
    assert "page:" not in output


def test_past_steps_are_not_profiled_and_a_complete_run_is_not_started(verb: Verb) -> None:
    config = job.load("quickstart", [*TINY, f"data.path={verb.shards}", "run.device=cpu"]).config
    place = verb.run_dir / "checkpoints" / "step-00000002"
    place.mkdir(parents=True)
    data_hash = json.loads((verb.shards / "manifest.json").read_text())["hash"]
    facts = {**FACTS, "step": 2, "samples": 16, "data_hash": data_hash}
    files.write_json(place / "state.json", {**facts, "config": config.model_dump(mode="json")})
    files.write_json(verb.run_dir / "summary.json", {"status": "done", "exit_code": 0, "step": 2})
    with pytest.raises(ConfigError, match="--profile"):
        verb.go(profile=parse_profile("1:2", "0"), settings=("schedule.steps=9",))
    assert verb.go() == 0
    assert "this run is complete" in verb.out.getvalue()
    assert not verb.starts
    assert not (verb.run_dir / "config.yaml").exists(), "the run directory is unchanged"
    other = {**facts, "data_hash": "1" * 64, "config": config.model_dump(mode="json")}
    files.write_json(place / "state.json", other)
    with pytest.raises(ConfigError, match="was trained on different data"):
        verb.go(settings=("schedule.steps=9",))
    assert not verb.starts
