"""What of a run's records goes to a service, without the services: lines as they come, a cut, a failure; and
the child process that sends them."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bert_dp import record
from bert_dp.config import schema
from launcher import job, loggers, results
from launcher.loggers import Beginning, __main__, follow
from launcher.options import loggers as parse_loggers
from launcher.results import LoggerRun
from launcher.run import loggers as child
from launcher.run.processes import stop_signals
from tests.e2e.cli import here, is_alive, refused, wait_for
from tests.helpers import failed, issues_of, make_config, read_json, write_lines
from tests.report_fixture import make_run, metrics

ABSENT = "trackio"


class Fake:
    """A service that keeps what it gets."""

    def __init__(self, beginning: Beginning):
        self.beginning = beginning
        self.run_id, self.where = beginning.run_id or "new", "nowhere"
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended: tuple[int, dict[str, Any], int] | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def finish(self, step: int, facts: Mapping[str, Any], exit_code: int) -> None:
        self.ended = step, dict(facts), exit_code


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    """The fake runs, in the order in which they were opened."""
    runs: list[Fake] = []

    def open_writer(name: str, beginning: Beginning) -> Fake:
        runs.append(Fake(beginning))
        return runs[-1]

    monkeypatch.setattr(follow, "open_writer", open_writer)
    return runs


def send_all(run_dir: Path) -> None:
    """As `report --log-to` does: what is there, and the end."""
    over = threading.Event()
    over.set()
    follow.send(run_dir, "wandb", over)


def steps(run: Fake, key: str = "loss") -> list[int]:
    return [step for step, values in run.rows if key in values]


def test_a_run_is_sent_with_its_settings_numbers_summary_and_links(
    tmp_path: Path, opened: list[Fake]
) -> None:
    run_dir = make_run(tmp_path / "run", log={"to": ["wandb"]}, schedule={"hours": None})
    send_all(run_dir)
    (run,) = opened
    assert run.beginning == Beginning(run_dir, None, {"optim.lr": 1e-3, "log.to": '["wandb"]'})
    assert steps(run) == list(range(10, 101, 10))
    first = dataclasses.asdict(metrics(10))
    del first["step"], first["mfu"]  # null: not known
    assert run.rows[0] == (10, first)
    (evaluation,) = record.read_lines(run_dir / "evals.jsonl")
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


def test_a_secret_among_the_settings_is_not_sent(tmp_path: Path, opened: list[Fake]) -> None:
    send_all(make_run(tmp_path / "run", hub={"api_key": "abcdef-123456"}))
    assert "abcdef-123456" not in str(opened[0].beginning)


def test_lines_are_sent_by_step_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = follow.Tail(path, 0)
    assert list(tail.read()) == []
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert [(step, numbers) for step, _, numbers in tail.read()] == [(1, {"loss": 3.0})]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write('ss": 2.5}\nnot JSON\n{"step": 3, "loss": null}\n')
    assert [(step, numbers) for step, _, numbers in tail.read()] == [(2, {"loss": 2.5}), (3, {})]


def test_what_a_resumed_run_repeats_is_not_sent_twice(tmp_path: Path) -> None:
    """It is cut back to its checkpoint and logs the same steps again."""
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        record.append_line(path, metrics(step))
    tail = follow.Tail(path, 0)
    assert [step for step, *_ in tail.read()] == [1, 2, 3, 4]
    record.cut_back(path, 2)
    for step in (3, 4, 5, 6):
        record.append_line(path, metrics(step, loss=1.0))  # a shorter line than before
    assert [step for step, *_ in tail.read()] == [5, 6]


def test_a_held_out_loss_goes_between_the_lines_it_was_measured_between(
    tmp_path: Path, opened: list[Fake]
) -> None:
    """Services drop, or misplace, a step below the last."""
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "evals.jsonl", [{"step": step, "loss": 6.0} for step in (50, 70, 100)])
    send_all(run_dir)
    assert [step for step, _ in opened[0].rows] == sorted(step for step, _ in opened[0].rows)
    assert steps(opened[0], "heldout_loss") == [50, 70, 100]


def test_a_second_start_goes_on_in_the_same_run(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir = make_run(tmp_path / "run")
    send_all(run_dir)
    record.append_line(run_dir / "metrics.jsonl", metrics(110))
    send_all(run_dir)
    first, second = opened
    assert (first.beginning.run_id, second.beginning.run_id) == (None, "new")
    assert (steps(second), steps(second, "heldout_loss")) == ([110], [])
    assert second.ended is not None
    assert second.ended[0] == 110, "a service drops a summary before its last step"
    state = results.read(run_dir / "wandb" / "run.json", LoggerRun)
    assert state == LoggerRun(id="new", where="nowhere", sent={"metrics.jsonl": 110, "evals.jsonl": 100})


def test_another_destination_gets_the_whole_run_anew(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent offline first, then to a server; the state holds no password."""
    run_dir = make_run(tmp_path / "run")
    send_all(run_dir)
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:a-long-password-1@host")
    for _ in range(2):
        send_all(run_dir)
    assert [(run.beginning.run_id, len(steps(run))) for run in opened] == [(None, 10), (None, 10), ("new", 0)]
    assert "a-long-password-1" not in (run_dir / "wandb" / "run.json").read_text()


def test_what_a_service_loses_without_a_word_is_not_taken_for_sent(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the last line on, and the service says nothing of it."""

    def full(path: Path, file: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(Fake, "finish", lambda *_: monkeypatch.setattr(results, "write", full))
    with pytest.raises(OSError, match="full"):
        send_all(make_run(tmp_path / "run"))


def test_a_run_without_a_summary_has_failed(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    send_all(run_dir)
    assert opened[0].ended == (100, {}, 1)
    send_all(make_run(tmp_path / "failed", summary=failed("optim.lr: no", "bad_input")))
    assert opened[1].ended is not None
    assert opened[1].ended[2] == 2


def test_the_end_of_a_run_links_what_there_is(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", summary={"status": "stopped", "signal": 15, "checkpoint": None})
    facts, code = follow.ending(run_dir)
    assert (facts["summary/status"], code) == ("stopped", 143)
    assert "summary/checkpoint" not in facts
    assert facts["summary/report"] == f"{run_dir}/report.html"


def test_lines_are_sent_while_the_run_goes_on(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    run_dir, over = make_run(tmp_path / "run", 1), threading.Event()
    thread = threading.Thread(target=follow.send, args=(run_dir, "wandb", over))
    thread.start()
    wait_for(lambda: opened and steps(opened[0]) == [10], 10)
    record.append_line(run_dir / "metrics.jsonl", metrics(20))
    wait_for(lambda: steps(opened[0]) == [10, 20], 10)
    assert opened[0].ended is None
    over.set()
    thread.join(10)
    assert opened[0].ended is not None


def test_two_processes_do_not_send_the_same_run(tmp_path: Path, opened: list[Fake]) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "wandb").mkdir()
    with record.lock(run_dir / "wandb" / ".lock") or pytest.fail("the lock is free"):
        (issue,) = issues_of(send_all, run_dir)
    assert "another process" in issue
    assert opened == []


@pytest.mark.parametrize(
    "error", [RuntimeError("service down\nand more"), OSError(28, "full"), ImportError()]
)
def test_a_service_that_fails_is_one_warning_and_is_given_up(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where its traceback finds the log's disk full."""

    def fail(*_: object) -> None:
        raise error

    def full(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(Fake, "write", fail)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=full))
    run_dir, warnings, incomplete = make_run(tmp_path / "run"), io.StringIO(), set[str]()
    __main__.send_or_warn(run_dir, "wandb", threading.Event(), warnings, incomplete)
    (line,) = warnings.getvalue().splitlines()
    assert line.startswith(f"wandb gets no more of this run ({type(error).__name__}: ")
    assert f"`bert-dp report {run_dir} --log-to wandb`" in line
    assert incomplete == {"wandb"}


# --- the services' own files, on packages that only note what they are asked


class Noted:
    """Whatever is asked of it, noted as (name, arguments); a name in `answers` gives that."""

    def __init__(self, **answers: Any):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: self.calls.append((name, given, named))

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for called, given, named in self.calls if called == name]


def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a writer sets some for its service


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (1, "FAILED"), (143, "FAILED")])
def test_mlflow_gets_every_parameter_numbers_as_metrics_and_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: str
) -> None:
    client = Noted(
        create_experiment=lambda name: f"made {name}",
        get_experiment_by_name=lambda name: None,
        create_run=lambda of, run_name: SimpleNamespace(info=SimpleNamespace(run_id=f"{of}/{run_name}")),
    )
    where: list[str] = []
    entities = {name: lambda *given: given for name in ("Param", "Metric", "RunTag")}
    package = SimpleNamespace(MlflowClient=lambda tracking_uri: where.append(tracking_uri) or client)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(**entities))
    without_variables(monkeypatch)
    settings = {f"s{number}": number for number in range(250)} | {"long": "x" * 9000}
    writer = loggers.open_writer("mlflow", Beginning(tmp_path, None, settings))
    assert (writer.run_id, writer.where) == (f"made bert-dp/{tmp_path.name}", f"{tmp_path.as_uri()}/mlflow")
    assert where == [writer.where]
    sent = [named["params"] for _, named in client.of("log_batch")]
    assert max(map(len, sent)) <= 100
    flat = {name: value for batch in sent for name, value in batch}
    assert flat == {name: str(value)[:6000] for name, value in settings.items()}
    client.calls.clear()
    writer.write(7, {"loss": 2.5})
    writer.finish(9, {"summary/loss": 2.0, "summary/status": "done"}, code)
    assert client.of("set_terminated") == [((writer.run_id, status), {})]
    metrics = [(key, value, step) for given, _ in client.of("log_batch") for key, value, _, step in
               (given[1] if len(given) > 1 else [])]  # fmt: skip
    assert metrics == [("loss", 2.5, 7), ("summary/loss", 2.0, 9)]
    assert [named["tags"] for _, named in client.of("log_batch") if "tags" in named] == [
        [("summary/status", "done")]
    ]
    client.calls.clear()
    os.environ["MLFLOW_TRACKING_URI"] = "http://there"
    again = loggers.open_writer("mlflow", Beginning(tmp_path, "known", settings))
    assert (again.run_id, again.where) == ("known", "http://there")
    assert client.calls == [("update_run", ("known",), {"status": "RUNNING"})]


@pytest.mark.parametrize("offline", [True, False])
def test_wandb_is_offline_unless_it_is_told_and_goes_on_in_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    summary = Noted()
    run = Noted(
        id="abc", offline=offline, url="https://there", dir=str(tmp_path / "x" / "f"), summary=summary
    )
    asked: list[dict[str, Any]] = []
    package = SimpleNamespace(init=lambda **named: asked.append(named) or run, Settings=lambda **named: named)
    monkeypatch.setitem(sys.modules, "wandb", package)
    without_variables(monkeypatch)
    if not offline:
        os.environ |= {"WANDB_MODE": "online", "WANDB_PROJECT": "mine"}
    writer = loggers.open_writer("wandb", Beginning(tmp_path, "abc", {"optim.lr": 1.0}))
    expected = {"id": "abc", "resume": "allow", "dir": str(tmp_path), "config": {"optim.lr": 1.0}}
    expected |= {"name": tmp_path.name, "project": "bert-dp" if offline else "mine"}
    assert expected.items() <= asked[0].items()
    assert {"console": "off", "save_code": False, "disable_git": True}.items() <= asked[0]["settings"].items()
    assert os.environ["WANDB_MODE"] == ("offline" if offline else "online")
    assert ("WANDB_ERROR_REPORTING" in os.environ) == offline
    assert (writer.run_id, writer.where) == ("abc", str(tmp_path / "x") if offline else "https://there")
    writer.write(7, {"loss": 2.5})
    writer.finish(9, {"summary/status": "failed"}, 3)
    assert run.of("log") == [(({"loss": 2.5},), {"step": 7})]
    assert summary.of("update") == [(({"summary/status": "failed"},), {})]
    assert run.of("finish") == [((), {"exit_code": 3})]


def test_trackio_has_a_name_of_its_own_for_each_run_and_says_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = Noted(), list[dict[str, Any]]()
    monkeypatch.setitem(
        sys.modules, "trackio", SimpleNamespace(init=lambda **named: asked.append(named) or run)
    )
    without_variables(monkeypatch)
    first, second, again = (
        loggers.open_writer("trackio", Beginning(tmp_path, name, {"a": 1})) for name in (None, None, "known")
    )
    assert first.where == os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
    assert first.run_id.startswith(f"{tmp_path.name}-")
    assert len({first.run_id, second.run_id}) == 2
    assert [each["name"] for each in asked] == [first.run_id, second.run_id, "known"]
    assert (again.run_id, asked[-1]["resume"], asked[-1]["config"]) == ("known", "allow", {"a": 1})
    first.write(7, {"loss": 2.5})
    first.finish(9, {"summary/loss": 2.0}, 0)
    assert run.of("log") == [(({"loss": 2.5},), {"step": 7}), (({"summary/loss": 2.0},), {"step": 9})]
    run.finish = lambda: warnings.warn("the disk is full", stacklevel=1)
    with pytest.raises(OSError, match="the disk is full"):
        first.finish(9, {}, 0)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        *(("wandb", f"WANDB_{word}") for word in ("MODE", "BASE_URL", "ENTITY", "PROJECT")),
        ("mlflow", "MLFLOW_TRACKING_URI"),
        *(("trackio", f"TRACKIO_{word}") for word in ("DIR", "SPACE_ID", "SERVER_URL", "PROJECT")),
    ],
)
def test_whatever_says_where_a_run_goes_makes_another_destination(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    without_variables(monkeypatch)
    assert loggers.destination(name) == ""
    os.environ[variable] = "there"
    assert loggers.destination(name) == f"{variable}=there"
    assert loggers.destination("tensorboard") == ""


# --- the child


def test_a_sender_that_cannot_be_started_is_a_warning_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(child, "module_command", lambda _: [str(tmp_path / "none")])
    with child.Loggers(tmp_path, ["wandb", "mlflow"], said.append) as sender:
        sender.poll()
    assert said == ["warning: nothing is sent to wandb, mlflow (No such file or directory)"]
    assert sender.exit_code == 1


needs_absent = pytest.mark.skipif(
    importlib.util.find_spec(ABSENT) is not None, reason=f"{ABSENT} is installed here"
)


@needs_absent
def test_a_missing_package_keeps_no_other_service_from_its_records(tmp_path: Path) -> None:
    run_dir, said = make_run(tmp_path / "run"), list[str]()
    with child.Loggers(run_dir, [ABSENT, "tensorboard"], said.append) as sender:
        wait_for(lambda: sender.poll() or said, 30)  # at once, not at the end
    (line,) = said
    assert line.startswith(f"warning: {ABSENT} gets no more of this run (ModuleNotFoundError: ")
    assert sender.exit_code == 1
    assert read_json(run_dir / "tensorboard" / "run.json")["sent"]["metrics.jsonl"] == 100


def test_signals_to_every_process_of_a_job_do_not_cost_the_summary(tmp_path: Path) -> None:
    run_dir, said = make_run(tmp_path / "run"), list[str]()
    (run_dir / "summary.json").rename(tmp_path / "summary.json")
    with child.Loggers(run_dir, ["tensorboard"], said.append) as sender:
        wait_for((run_dir / "tensorboard" / "run.json").exists, 30)
        (process,) = [p for p in psutil.Process().children() if "launcher.loggers" in p.cmdline()]
        assert os.getpgid(process.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        (tmp_path / "summary.json").rename(run_dir / "summary.json")
    assert (said, sender.exit_code) == ([], 0)
    assert b"summary/final_loss" in b"".join(
        p.read_bytes() for p in (run_dir / "tensorboard").glob("events*")
    )


STUCK = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_a_service_that_never_ends_is_ended_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, said = tmp_path / "ready", list[str]()
    monkeypatch.setattr(child, "module_command", lambda _: [sys.executable, "-c", STUCK, str(ready)])
    monkeypatch.setattr(child, "GRACE_S", 0.1)
    monkeypatch.setattr(child, "HELPERS_S", 0.1)
    before = set(psutil.Process().children(recursive=True))
    with child.Loggers(tmp_path, ["wandb"], said.append) as sender:
        wait_for(ready.exists, 30)
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 2
    wait_for(lambda: not any(map(is_alive, started)), 10)
    assert sender.exit_code == 1
    (line,) = said
    assert line.startswith("warning: not all was sent to wandb")


SENDER = """
import os, sys, time
open(sys.argv[1], "w").write(" ".join(sys.argv[3:]))
sys.stdin.read()
{}
"""


@pytest.mark.parametrize(
    ("wait", "end", "code"),
    [
        (True, "time.sleep(0.3)", 0),  # however long
        (False, f"sys.exit({loggers.INCOMPLETE})", 1),  # it has said itself what was not sent
        (True, "while True: os.kill(os.getppid(), 15); time.sleep(0.05)", 143),
    ],
)
def test_how_long_the_sender_has_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool, end: str, code: int
) -> None:
    asked, said = tmp_path / "asked", list[str]()
    command = [sys.executable, "-I", "-S", "-c", SENDER.format(end), str(asked)]
    monkeypatch.setattr(child, "module_command", lambda _: command)
    monkeypatch.setattr(child, "GRACE_S", 0.0 if wait else 30.0)
    with stop_signals(), child.Loggers(tmp_path, ["wandb", "mlflow"], said.append, wait=wait) as sender:
        wait_for(lambda: asked.exists() and asked.read_text(), 30)
    assert asked.read_text() == f"{'inf' if wait else child.OWN_GRACE_S} wandb mlflow"
    assert (sender.exit_code, len(said)) == (code, code == 143)


def test_a_late_service_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the child itself: it ends although a service does not."""
    held = threading.Event()
    ended: list[int] = []
    monkeypatch.setattr(__main__, "send", lambda *_: held.wait(30))
    monkeypatch.setattr(__main__, "take_output", lambda _: warnings)
    monkeypatch.setattr(record, "STOP_SIGNALS", ())
    monkeypatch.setattr(__main__.os, "nice", lambda _: 0)
    monkeypatch.setattr(__main__.os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    warnings = io.StringIO()
    with pytest.raises(SystemExit):
        __main__.main(tmp_path, 0.01, ["mlflow"])
    held.set()
    assert ended == [loggers.INCOMPLETE]
    assert warnings.getvalue().startswith("mlflow gets no more of this run (not done ")


def test_without_services_no_process_is_started(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with child.Loggers(tmp_path, [], pytest.fail) as sender:
        sender.poll()
        assert psutil.Process().children() == before
    assert list(tmp_path.iterdir()) == []


# --- what is asked for


def test_the_older_setting_means_tensorboard() -> None:
    def asked(*settings: str) -> tuple[str, ...]:
        return make_config(*settings).log.loggers

    assert asked() == ()
    assert asked("log.tensorboard=true") == ("tensorboard",)
    assert asked("log.to=[wandb,tensorboard]", "log.tensorboard=true") == ("wandb", "tensorboard")
    assert asked("log.to=mlflow") == ("mlflow",)
    (issue,) = issues_of(make_config, "log.to=[tensorbord]")
    assert issue.startswith("log.to.0: ")
    assert "'tensorboard', 'wandb', 'mlflow' or 'trackio'" in issue


def test_where_nothing_is_sent_the_configuration_has_the_hash_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output directories that older versions have started hold it."""
    plain, sent = (make_config(*settings).hash() for settings in ((), ("log.to=[tensorboard]",)))
    assert plain != sent
    monkeypatch.setattr(schema.LogConfig, "added_later", ())
    assert make_config().hash() != plain


@needs_absent
def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(f"log.to=[{ABSENT},tensorboard]")
    lines = [line for line in job.input_issues(config) if line.startswith("log.to")]
    assert lines == [f"log.to: {ABSENT} needs `pip install 'trackio>=0.43'`"]
    run_dir = make_run(tmp_path / "run")
    said = refused("report", str(run_dir), "--log-to", f"tensorboard,{ABSENT}")
    assert said == f"error: --log-to: {ABSENT} needs `pip install 'trackio>=0.43'`\n"
    assert not (run_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("tensorbord", "unknown logger tensorbord; choose from tensorboard, wandb"),
        ("", "unknown logger nothing;"),
    ],
)
def test_an_unknown_service_is_refused(tmp_path: Path, names: str, said: str) -> None:
    run_dir = make_run(tmp_path / "run")
    assert said in refused("report", str(run_dir), "--log-to", names)
    assert parse_loggers("tensorboard, tensorboard") == ("tensorboard",)


def test_only_a_run_can_be_sent(tmp_path: Path) -> None:
    said = refused("report", str(tmp_path), "--log-to", "tensorboard")
    assert said == f"error: --log-to: {tmp_path} is not a run directory (no config.yaml)\n"


def test_a_run_that_was_not_sent_is_sent_by_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    done = here("report", str(run_dir), "--log-to", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"tensorboard: {run_dir / 'tensorboard'}"
    assert (run_dir / "report.html").exists()
    assert read_json(run_dir / "tensorboard" / "run.json")["sent"] == {
        "metrics.jsonl": 100,
        "evals.jsonl": 100,
    }
