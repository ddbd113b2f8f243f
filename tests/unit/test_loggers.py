"""Records sent to services, with fakes in their place: lines as they come, a cut, a failure, the child."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bert_dp import files
from launcher import job
from launcher.cli.options import loggers as parse_loggers
from launcher.run import loggers
from launcher.run.loggers import Writer
from launcher.run.processes import stop_signals
from tests.e2e.cli import here, is_alive, refused, wait_for
from tests.helpers import failed, make_config, raised_issues, write_lines
from tests.report_fixture import make_run, metrics

ABSENT = "trackio"


class Fake:
    """A service that keeps what it gets."""

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
    """The fake runs, in the order in which they were opened."""
    runs: list[Fake] = []

    def open_fake(*given: Any) -> Writer:
        runs.append(run := Fake(*given))
        return Writer("nowhere", lambda *row: run.write(*row), lambda *end: run.finish(*end))

    monkeypatch.setitem(loggers.OPENERS, "wandb", open_fake)
    return runs


def send_all(run_dir: Path) -> None:
    """Send like `report --log-to`: all records, and the end."""
    over = threading.Event()
    over.set()
    (run_dir / "logs").mkdir(exist_ok=True)
    loggers.send(run_dir, "wandb", over, lambda line: None)


def steps(run: Fake, key: str = "loss") -> list[int]:
    return [step for step, values in run.rows if key in values]


def test_a_run_is_sent_with_its_settings_numbers_summary_and_links(
    tmp_path: Path, opened: list[Fake]
) -> None:
    run_dir = make_run(tmp_path / "run", log={"to": ["wandb"]}, schedule={"hours": None})
    send_all(run_dir)
    (run,) = opened
    assert (run.run_dir, run.settings) == (run_dir, {"optim.lr": 1e-3, "log.to": '["wandb"]'})
    assert re.fullmatch(r"run-\d{8}-\d{6}", run.name)
    assert steps(run) == list(range(10, 101, 10))
    first = metrics(10)
    del first["step"], first["mfu"]  # null: not known
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


def test_lines_are_sent_by_step_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = loggers.StepReader(path)
    assert list(reader.rows()) == []
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert list(reader.rows()) == [(1, {"loss": 3.0})]
    assert list(reader.rows()) == []
    with path.open("a") as file:
        file.write('ss": 2.5}\nnot JSON\n{"step": 3, "loss": null}\n')
    assert list(reader.rows()) == [(2, {"loss": 2.5}), (3, {})]


def test_what_a_resumed_run_repeats_is_not_sent_twice(tmp_path: Path) -> None:
    """It is cut back to its checkpoint and logs the same steps again."""
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        files.append_line(path, metrics(step))
    reader = loggers.StepReader(path)
    assert [step for step, _ in reader.rows()] == [1, 2, 3, 4]
    files.cut_back(path, 2)
    for step in (3, 4, 5, 6):
        files.append_line(path, metrics(step, loss=1.0))  # a shorter line than before
    assert [step for step, _ in reader.rows()] == [5, 6]


def test_a_held_out_loss_goes_between_the_lines_it_was_measured_between(
    tmp_path: Path, opened: list[Fake]
) -> None:
    """Services drop, or misplace, a step below the last."""
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "evals.jsonl", [{"step": step, "loss": 6.0} for step in (50, 70, 100)])
    send_all(run_dir)
    assert [step for step, _ in opened[0].rows] == sorted(step for step, _ in opened[0].rows)
    assert steps(opened[0], "heldout_loss") == [50, 70, 100]


def test_a_lost_directory_is_noticed_where_the_service_ignores_it(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run")
    monkeypatch.setattr(Fake, "finish", lambda *_: shutil.rmtree(run_dir))
    with pytest.raises(FileNotFoundError):
        send_all(run_dir)


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
    facts, code = loggers.summary_facts(run_dir)
    assert (facts["summary/status"], code) == ("stopped", 143)
    assert "summary/checkpoint" not in facts
    assert facts["summary/report"] == f"{run_dir}/report.html"


def test_lines_are_sent_while_the_run_goes_on(
    tmp_path: Path, opened: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "POLL_S", 0.01)
    run_dir, over = make_run(tmp_path / "run", 1), threading.Event()
    (run_dir / "logs").mkdir()
    thread = threading.Thread(target=loggers.send, args=(run_dir, "wandb", over, lambda line: None))
    thread.start()
    wait_for(lambda: opened and steps(opened[0]) == [10], 10)
    files.append_line(run_dir / "metrics.jsonl", metrics(20))
    wait_for(lambda: steps(opened[0]) == [10, 20], 10)
    assert opened[0].ended is None
    over.set()
    thread.join(10)
    assert opened[0].ended is not None


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
    run_dir, said = make_run(tmp_path / "run"), list[str]()
    assert not loggers.send_or_warn(run_dir, "wandb", threading.Event(), said.append)
    assert said[0] == "wandb: nowhere"
    (line,) = said[1:]
    assert line.startswith(f"warning: wandb gets no more of this run ({type(error).__name__}: ")
    assert f"`bert-dp report {run_dir} --log-to wandb`" in line


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
    writer = loggers.open_mlflow(tmp_path, "mine", settings)
    run_id = "made bert-dp/mine"
    assert where == [writer.where] == [f"{tmp_path.as_uri()}/mlflow"]
    sent = [named["params"] for _, named in client.of("log_batch")]
    assert max(map(len, sent)) <= 100
    flat = {name: value for batch in sent for name, value in batch}
    assert flat == {name: str(value)[:6000] for name, value in settings.items()}
    client.calls.clear()
    writer.write(7, {"loss": 2.5})
    writer.finish(9, {"summary/loss": 2.0, "summary/status": "done"}, code)
    assert client.of("set_terminated") == [((run_id, status), {})]
    batches = [named for _, named in client.of("log_batch")]
    sent = [(key, value, step) for batch in batches for key, value, _, step in batch.get("metrics", ())]
    assert sent == [("loss", 2.5, 7), ("summary/loss", 2.0, 9)]
    assert [batch["tags"] for batch in batches if "tags" in batch] == [[("summary/status", "done")]]
    os.environ["MLFLOW_TRACKING_URI"] = "http://there"
    assert loggers.open_mlflow(tmp_path, "mine", settings).where == "http://there"


# --- the child


needs_absent = pytest.mark.skipif(
    importlib.util.find_spec(ABSENT) is not None, reason=f"{ABSENT} is installed here"
)


@needs_absent
def test_a_missing_package_keeps_no_other_service_from_its_records(tmp_path: Path) -> None:
    run_dir, said = make_run(tmp_path / "run"), list[str]()
    with loggers.Loggers(run_dir, [ABSENT, "tensorboard"], said.append) as sender:
        wait_for(lambda: len(said) == 2, 30)  # at once, not at the end
    assert sorted(said)[0].startswith(f"tensorboard: {run_dir / 'tensorboard'}")
    assert sorted(said)[1].startswith(f"warning: {ABSENT} gets no more of this run (ModuleNotFoundError: ")
    assert sender.exit_code == 1
    assert b"summary/final_loss" in events(run_dir)


def events(run_dir: Path) -> bytes:
    """The bytes of all event files."""
    return b"".join(path.read_bytes() for path in (run_dir / "tensorboard").rglob("events*"))


def test_signals_to_every_process_of_a_job_do_not_cost_the_summary(tmp_path: Path) -> None:
    run_dir, said = make_run(tmp_path / "run"), list[str]()
    (run_dir / "summary.json").rename(tmp_path / "summary.json")
    with loggers.Loggers(run_dir, ["tensorboard"], said.append) as sender:
        wait_for(lambda: b"loss" in events(run_dir), 30)
        (process,) = [p for p in psutil.Process().children() if "launcher.run.loggers" in p.cmdline()]
        assert os.getpgid(process.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        (tmp_path / "summary.json").rename(run_dir / "summary.json")
    assert (len(said), sender.exit_code) == (1, 0)
    assert b"summary/final_loss" in events(run_dir)


STUCK = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_a_service_that_never_ends_is_ended_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, said = tmp_path / "ready", list[str]()
    monkeypatch.setattr(loggers, "module_command", lambda _: [sys.executable, "-c", STUCK, str(ready)])
    monkeypatch.setattr(loggers, "SERVICES_S", 0.1)
    monkeypatch.setattr(loggers, "CHILD_S", 0.1)
    before = set(psutil.Process().children(recursive=True))
    with loggers.Loggers(tmp_path, ["wandb"], said.append) as sender:
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
    monkeypatch.setattr(loggers, "module_command", lambda _: command)
    monkeypatch.setattr(loggers, "SERVICES_S", 0.0 if wait else 30.0)
    with stop_signals(), loggers.Loggers(tmp_path, ["wandb", "mlflow"], said.append, wait=wait) as sender:
        wait_for(lambda: asked.exists() and asked.read_text(), 30)
    assert asked.read_text() == f"{loggers.NO_LIMIT_S if wait else 30.0} wandb mlflow"
    assert (sender.exit_code, len(said)) == (code, code == 143)


STUCK_SERVICE = """
import sys, threading
from pathlib import Path
from launcher.run import loggers
loggers.OPENERS["wandb"] = lambda *_: threading.Event().wait(600)
sys.exit(loggers.main(Path(sys.argv[1]), 0.1, ["wandb"]))
"""


def test_a_late_service_is_named_and_left(tmp_path: Path) -> None:
    """The child itself ends although a service does not."""
    run_dir = make_run(tmp_path / "run")
    command = [sys.executable, "-c", STUCK_SERVICE, str(run_dir)]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == loggers.INCOMPLETE
    assert done.stdout.startswith("warning: wandb gets no more of this run (not done ")


def test_without_services_no_process_is_started(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with loggers.Loggers(tmp_path, [], pytest.fail):
        assert psutil.Process().children() == before
    assert list(tmp_path.iterdir()) == []


# --- what is asked for


def test_services_are_asked_for_by_name() -> None:
    assert make_config("log.to=mlflow").log.to == ("mlflow",)
    (issue,) = raised_issues(make_config, "log.to=[tensorbord]")
    assert issue.setting == "log.to.0"


@needs_absent
def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(f"log.to=[{ABSENT},tensorboard]")
    (issue,) = [i for i in job.input_issues(config) if not isinstance(i, str)]
    assert (issue.setting, issue.kind, issue.value) == ("log.to", "needs_package", ABSENT)
    assert issue.hint == "`pip install 'trackio>=0.43'`"
    run_dir = make_run(tmp_path / "run")
    said = refused("report", str(run_dir), "--log-to", f"tensorboard,{ABSENT}")
    assert said.startswith(f"error: --log-to: {ABSENT} ")
    assert not (run_dir / "report.html").exists()


@pytest.mark.parametrize("name", ["tensorbord", ""])
def test_an_unknown_service_is_refused(tmp_path: Path, name: str) -> None:
    (issue,) = job.logger_issues([name], "log.to")
    assert (issue.setting, issue.kind, issue.value) == ("log.to", "unknown", name)
    said = refused("report", str(make_run(tmp_path / "run")), "--log-to", name)
    assert said.startswith("error: --log-to: ")
    assert parse_loggers("tensorboard, tensorboard") == ("tensorboard",)


def test_only_a_run_can_be_sent(tmp_path: Path) -> None:
    said = refused("report", str(tmp_path), "--log-to", "tensorboard")
    assert said.startswith(f"error: --log-to: {tmp_path} is not a run directory")


def test_a_run_that_was_not_sent_is_sent_by_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    done = here("report", str(run_dir), "--log-to", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"tensorboard: {run_dir / 'tensorboard' / 'run-'}")
    assert (run_dir / "report.html").exists()
    assert b"summary/final_loss" in events(run_dir)
    first = {path.name for path in (run_dir / "tensorboard").iterdir()}
    time.sleep(1.1)  # a run is named by the second
    assert here("report", str(run_dir), "--log-to", "tensorboard").returncode == 0
    assert len({path.name for path in (run_dir / "tensorboard").iterdir()} - first) == 1, "a new run, whole"
