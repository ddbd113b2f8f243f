"""Tests of trials (short runs in separate processes): repetition, cores and stop signals."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bert_dp import files
from bert_dp.config import Config, dump_config
from bert_dp.files.models import Failure
from launcher import children
from launcher.log import Log
from launcher.run import processes, trials
from launcher.run.processes import RunOutcome
from launcher.run.starters import RankStart
from launcher.run.trials import Runner, SearchOutcome, Slot, Stopped, Trial, TrialsFailed, run_to_end
from tests.helpers import failed, make_config, read_json, write_lines

FAILED = failed("rank 0: it broke")


def killed(number: int, oom_kills: int) -> dict[str, Any]:
    memory = {"curves_gib": {}, "interval_s": 1.0, "oom_kills": oom_kills, "counter": None}
    return failed("killed by a signal", "killed", killed_by=number, memory=memory)


PARTS = {name: [0.5, 0.5] for name in trials.PARTS}


def config(global_size: int = 8, *overrides: str) -> Config:
    return make_config(
        f"batch.global_size={global_size}", "batch.micro_size=1", "schedule.steps=2", *overrides
    )


def write(trial: Trial, summary: dict[str, Any], seconds: float | None = None) -> None:
    """Write the files that a run of this trial leaves."""
    trial.directory.mkdir(parents=True, exist_ok=True)
    (trial.directory / "config.yaml").write_text(dump_config(trial.config))
    (trial.directory / "summary.json").write_text(json.dumps(summary))
    if seconds is not None:
        (trial.directory / "trial.json").write_text(json.dumps({"seconds": seconds}))


def runner(out: Path, *slots: Slot, log: Log = print) -> AbstractContextManager[Runner]:
    return trials.runner(out, slots, launcher="torchrun", on_gpu=False, log=log)


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"status": "done"}, "ok"),
        (failed("rank 0: ValueError"), "failed"),
        (failed("x", "device_memory"), "oom"),
        (failed("x", "host_memory"), "oom"),
        (failed("rank 0: KeyError: 'out of memory'"), "failed"),
        (failed("MemoryError"), "failed"),
        (killed(9, oom_kills=1), "failed"),
        # damaged
        ({"status": "done", "tokens": "many"}, None),
        # ended from outside, which says nothing about the settings
        *((killed(number, oom_kills=0), None) for number in (1, 2, 9, 15)),
        (killed(11, oom_kills=0), "failed"),
        *((failed("x", kind), None) for kind in ("disk", "peer_gone")),
        *((failed("x", kind), "failed") for kind in ("hang", "not_finite", "bad_input")),
        ({"status": "stopped", "signal": 2}, None),
        ({**failed("SIGTERM: stopped", "stopped"), "signal": 15}, None),
    ],
)
def test_an_ended_trial_is_not_repeated(tmp_path: Path, summary: dict[str, Any], status: str | None) -> None:
    trial = Trial(tmp_path / "t", config(8, "data.path=/one"), 2)
    assert trials.earlier_outcome(trial) is None
    write(trial, summary, 9.0)
    outcome = trials.earlier_outcome(trial)
    assert (outcome and outcome.status) == status
    assert outcome is None or outcome.seconds == 9.0
    assert trials.earlier_outcome(Trial(trial.directory, config(16), 2)) is None, "other settings"
    moved = dataclasses.replace(trial, config=config(8, "data.path=/two"))
    assert trials.earlier_outcome(moved) == outcome, "the directory keeps the hash of its data"


WHOLE = json.dumps({"step": 2, **PARTS, "peak_memory_gib": 1.0}) + "\n"
SHORT, ZERO = WHOLE.replace("[0.5, 0.5]", "[0.5]"), WHOLE.replace("0.5,", "0.0,")
STEPS = {
    "torn": WHOLE[:-40],
    "gone": "",
    "short": SHORT,
    "list": f"[1]\n{WHOLE}",
    "zero": ZERO,
    "whole": WHOLE,
}


@pytest.mark.parametrize("text", STEPS.values(), ids=STEPS)
def test_a_run_with_incomplete_step_records_is_repeated(tmp_path: Path, text: str) -> None:
    trial = Trial(tmp_path / "t", config(8, "log.step_times=true"), 2)
    write(trial, {"status": "done"})
    (trial.directory / "steps").mkdir()
    for rank, lines in enumerate((WHOLE, text)):
        (trial.directory / "steps" / f"rank-{rank}.jsonl").write_text(lines)
    assert (trials.earlier_outcome(trial) is None) == (text != WHOLE)


def test_a_finetuning_run_without_predictions_is_repeated(tmp_path: Path) -> None:
    """A full disk may prevent the predictions although the run ends well."""
    finetuned = make_config("objective.name=finetune", "finetune.labels=[a,b]", "data.path=x")
    write(trial := Trial(tmp_path, finetuned, 1), {"status": "done"})
    assert trials.earlier_outcome(trial) is None
    (tmp_path / "predictions.jsonl").write_text("")
    assert trials.earlier_outcome(trial) is not None


@pytest.mark.parametrize(
    ("compiled", "on_gpu", "expected"),
    [("auto", False, "off"), ("auto", True, "auto"), ("on", False, "on"), ("off", True, "off")],
)
def test_a_timed_run_has_the_users_settings_and_saves_nothing(
    compiled: str, on_gpu: bool, expected: str
) -> None:
    ramp = ("batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    user = config(8, *ramp, f"compile={compiled}", "log.to=[wandb]")
    sizes: dict[str, Any] = {"steps": 41, "global_size": 16, "micro_size": 4, "noise_scale": True}
    run = trials.timed_config(user, on_gpu=on_gpu, parallel={"engine": "zero1"}, **sizes)
    assert (run.model, run.optim, run.data) == (user.model, user.optim, user.data)
    assert (run.batch.global_size, run.batch.micro_size, run.batch.ramp_fraction) == (16, 4, 0)
    assert (run.schedule.steps, run.checkpoint.keep, run.eval.every_steps) == (41, 0, 0)
    assert (run.log.step_times, run.log.noise_scale, run.log.every_steps) == (True, True, 5)
    assert (run.compile, run.log.to, run.parallel.engine) == (expected, (), "zero1")


@pytest.mark.parametrize(("warm_up", "exposed"), [(0, [0.1, 0.2, 0.3]), (2, [0.3])])
def test_a_run_is_read_without_its_warm_up(tmp_path: Path, warm_up: int, exposed: list[float]) -> None:
    """`exposed` comes from rank 0 only. The memory is the highest of all lines."""
    none = dict.fromkeys(trials.PARTS, ())
    for rank in range(2):
        lines = [
            {"step": 2, **PARTS, "step_s": [9.0, 8.0], "peak_memory_gib": 1.0, "ddp_exposed_s": 0.1 + rank},
            {"step": 2, **none, "peak_memory_gib": 3.0, "ddp_exposed_s": 0.2 + rank},
            {"step": 4, **PARTS, "step_s": [2.0, 1.0], "peak_memory_gib": 2.0, "ddp_exposed_s": 0.3 + rank},
            {"step": 4, **none, "peak_memory_gib": 1.0},
        ]
        write_lines(tmp_path / "steps" / f"rank-{rank}.jsonl", lines)
    losses = [
        {"step": step, "tokens": 8 * step, "loss": loss} for step, loss in enumerate((4.0, None, 3.0), 1)
    ]
    write_lines(tmp_path / "metrics.jsonl", losses)
    run = trials.read_repeat(tmp_path, 2, warm_up, 4 - warm_up)
    assert run.parts["step_s"] == [[9.0, 8.0, 2.0, 1.0][warm_up:]] * 2
    assert (run.memory_gib, run.exposed_s, run.curve) == ([3.0, 3.0], exposed, [(8, 4.0), (24, 3.0)])
    with pytest.raises(ValueError, match="4 steps instead of 5"):
        trials.read_repeat(tmp_path, 2, warm_up, 5 - warm_up)


def test_the_end_of_a_search_has_a_status_and_an_exit_code(tmp_path: Path) -> None:
    def end(error: Exception) -> None:
        raise error

    logs: list[str] = []
    assert run_to_end(lambda: None, tmp_path, logs.append) == SearchOutcome("complete")
    for error, outcome in ((Stopped(2), ("partial", None, 130)), (TrialsFailed("no"), ("failed", "no", 1))):
        assert run_to_end(lambda error=error: end(error), tmp_path, logs.append) == SearchOutcome(*outcome)
    assert logs == [f"stopped: the results so far are in {tmp_path}; the same command resumes from them"]


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda n, _: print(n, file=open(sys.argv[1], "a"), flush=True))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(0.5)
"""


class Started(list[list[str]]):
    """Arguments of the started processes, each of which runs `code`."""

    code, words, environ, begin = "", list[str](), None, staticmethod(lambda: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()

    def start(_: str, arguments: list[str], *, scratch: str, environ: Any, **options: Any) -> Any:
        made.append(arguments)
        made.environ = environ
        made.begin()
        command = [sys.executable, "-I", "-S", "-c", made.code, *made.words]
        return subprocess.Popen(command, text=True, **options)

    monkeypatch.setattr(children, "start_module", start)
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    return made


def test_a_trial_that_ends_without_a_summary_runs_twice(tmp_path: Path, started: Started) -> None:
    logs: list[str] = []
    trial = Trial(tmp_path / "t", config(), 2, cores=(1,), data_bytes=5)
    with runner(tmp_path, Slot(cores=(0, 1)), log=logs.append) as runs:
        assert runs.run_one(trial).status == "failed"
        assert runs.scratch.is_dir()
    assert not runs.scratch.exists()
    assert [line.strip() for line in logs] == ["t: interrupted or incomplete; restarted"]
    directory, ranks, options, limit = started[0]
    assert (directory, ranks, limit) == (str(trial.directory), "2", "5")
    assert json.loads(options) == {"launcher": "torchrun", "on_gpu": False, "cores": [1]}
    assert started == [started[0]] * 2
    assert trials.cause(trial.directory) == "both attempts ended without writing summary.json"


def test_a_trial_uses_its_slot_and_logs_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """The trial ends once its step has been logged."""
    trial, shown, logs = Trial(tmp_path / "t", config(), 2), tmp_path / "shown", list[str]()

    def log(line: str) -> None:
        logs.append(line)
        shown.touch()

    def begin() -> None:
        assert read_json(trial.directory / "environment.json") == {"bf16_units": []}
        write_lines(trial.directory / "metrics.jsonl", [{"step": 1}])
        write(trial, {"status": "done"})

    started.code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    started.words, started.begin = [str(shown)], begin
    monkeypatch.setattr(trials, "PROGRESS_S", 0.0)
    files.write_json(tmp_path / "environment.json", {"bf16_units": []})
    slots = [Slot((0, 3), ("2", "5"))]
    with trials.runner(tmp_path, slots, launcher="accelerate", on_gpu=True, log=log) as runs:
        assert runs.run_one(trial).status == "ok"
    assert logs[0].startswith("  t: step 1 of 2, running for ")
    ((_, ranks, options),) = started
    assert (ranks, started.environ) == ("2", {"CUDA_VISIBLE_DEVICES": "2,5"})
    assert json.loads(options) == {"launcher": "accelerate", "on_gpu": True, "cores": [0, 3]}


def test_the_process_of_a_trial_follows_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mock.Mock(return_value=RunOutcome(3, Failure(rank=1, message="ValueError: no")))
    limit = mock.Mock()
    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(trials.resource, "setrlimit", limit)
    (tmp_path / "config.yaml").write_text(dump_config(config(8, "run.hang_after_s=7")))
    options = {"launcher": "deepspeed", "on_gpu": True, "cores": [4, 5]}
    assert trials.main([str(tmp_path), "2", json.dumps(options), "99"]) == 3
    run.assert_called_once_with(tmp_path, RankStart(2, ["--resume", "never"], **options), watch=mock.ANY)
    assert run.call_args.kwargs["watch"]._limits.hang_after_s == 7.0
    limit.assert_called_once_with(resource.RLIMIT_DATA, (99, 99))
    assert capsys.readouterr().out == "rank 1: ValueError: no\n"


def test_the_next_trial_is_taken_when_a_slot_is_free(tmp_path: Path, started: Started) -> None:
    ended: list[str] = []
    write(Trial(tmp_path / "earlier", config(), 1), {"status": "done"}, 2.0)

    def due() -> Iterator[Trial]:
        for number, name in enumerate(("earlier", "a", "b")):
            assert ended == ["earlier", "a"][:number]
            yield Trial(tmp_path / name, config(), 1)

    with runner(tmp_path, Slot()) as runs:
        for trial, _ in runs.run(due()):
            ended.append(trial.name)
    assert ended == ["earlier", "a", "b"]
    assert [Path(line[0]).name for line in started] == ["a", "a", "b", "b"]


def test_a_stop_signal_is_passed_to_a_trial_once(tmp_path: Path, started: Started) -> None:
    """A second signal would end the trial before it writes its summary."""
    notes = tmp_path / "signals"
    started.code, started.words = STUBBORN, [str(notes)]
    with runner(tmp_path, Slot()) as runs:
        with pytest.raises(Stopped):
            runs.run_one(Trial(tmp_path / "t", config(), 2))
    assert notes.read_text() == "15\n"


def test_helpers_answer_or_stop(tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    core = min(os.sched_getaffinity(0))
    started.code = "import os; print('{\"cores\": %s}' % list(os.sched_getaffinity(0)), flush=True)"
    before = os.sched_getaffinity(0)
    with runner(tmp_path) as runs:
        assert runs.helper("m", ["x"], [core]) == [{"cores": [core]}]
        assert os.sched_getaffinity(0) == before
        assert capsys.readouterr().err == ""
        assert started.environ == {"CUDA_VISIBLE_DEVICES": ""}, "trials on CPU ranks see no GPU"
        started.code = f"print('noise'); {started.code}; os._exit(3)"
        assert runs.helper("m", ["x"], [core]) == [{"cores": [core]}]
        assert "warning: m exited with code 3" in capsys.readouterr().err
        started.code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
        with pytest.raises(Stopped) as stopped:
            runs.helper("m", [])
    assert stopped.value.number == signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_cause_and_the_kind_of_a_failure_are_read(tmp_path: Path) -> None:
    assert (trials.failure_kind(tmp_path), trials.heldout_losses(tmp_path)) == ("no_cause", {})
    (tmp_path / "summary.json").write_text(json.dumps(failed("full", "disk")))
    assert (trials.cause(tmp_path), trials.failure_kind(tmp_path)) == ("full", "disk")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))
    assert trials.cause(tmp_path) == "its records are incomplete"
    lines = [{"step": 1, "loss": 3.0}, {"step": 2}, {"step": 3, "loss": None}]
    write_lines(tmp_path / "evals.jsonl", lines)
    assert trials.heldout_losses(tmp_path) == {1: 3.0, 3: None}


def test_ranks_have_as_many_threads_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    monkeypatch.setattr(processes, "start_command", lambda *_: command)
    cores = sorted(os.sched_getaffinity(0))
    for share in (1, len(cores)):
        processes.run(tmp_path, RankStart(1, [], cores=cores[:share]))
        assert (tmp_path / "logs" / "torchrun.log").read_text().splitlines()[-1] == str(share)


def test_the_time_left_follows_from_the_shares_and_seconds_of_this_call() -> None:
    """A third of this call's work took 60 s. An earlier call has run most of the search."""
    logs: list[str] = []
    for at_a_time in (1, 2):
        progress = trials.Progress([5.0, 5.0, 2.0, 4.0], logs.append, at_a_time)
        progress.skip(5.0)
        progress.skip(5.0)
        progress.ended(2.0, 60.0, "a: ok")
    assert logs == ["[3/4] a: ok; 2 min 00 s left", "[3/4] a: ok; 60.0 s left"]
