"""Check what the real logging packages store of a run, offline (`make test-loggers`)."""

import dataclasses
import importlib.util
import json
import shutil
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_dp import files
from launcher.run.loggers import Loggers
from tests.e2e.cli import here, wait_for
from tests.report_fixture import make_run, metrics

pytestmark = pytest.mark.loggers


@dataclasses.dataclass(frozen=True)
class Stored:
    """Data that a service has stored of one run."""

    rows: list[tuple[int, dict[str, Any]]]  # (step, values); a step may have several rows
    config: dict[str, Any]
    summary: dict[str, Any]
    ended: str | None

    def steps(self, key: str) -> list[int]:
        return [step for step, values in self.rows if key in values]


def read_wandb(run_dir: Path) -> Stored:
    """Read the transaction log, which is in LevelDB's log format: blocks of 32 KiB with records that start
    with a checksum, a length and a type (1 whole, 2 first part, 3 middle part, 4 last part)."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config, summary, ended = [], {}, {}, None
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))[-1:]:
        data = path.read_bytes()
        whole, place = b"", 7  # the file's header has 7 bytes
        while place + 7 <= len(data):
            if (left := 2**15 - place % 2**15) < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (2, 3):
                continue
            entry, whole = Record.FromString(whole), b""
            values = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in entry.history.item}
            if values:
                rows.append((values["_step"], values))
            for update in [*entry.run.config.update, *entry.config.update]:
                config[update.key] = json.loads(update.value_json)
            for update in entry.summary.update:
                summary[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
            if entry.HasField("exit"):
                ended = str(entry.exit.exit_code)
    return Stored(rows, config, summary, ended)


def read_mlflow(run_dir: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir / "mlflow").as_uri())
    experiment = str(client.get_experiment_by_name("bert-dp").experiment_id)
    run = max(client.search_runs([experiment]), key=lambda run: run.info.start_time)
    rows = [
        (point.step, {key: point.value})
        for key in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, key)
    ]
    return Stored(rows, run.data.params, {**run.data.metrics, **run.data.tags}, run.info.status)


def read_trackio(run_dir: Path) -> Stored:
    with sqlite3.connect(run_dir / "trackio" / "bert-dp.db") as database:
        (run_id,) = database.execute("select run_name from metrics order by id desc limit 1").fetchone()
        found = database.execute("select step, metrics from metrics where run_name = ? order by id", [run_id])
        rows = [(step, json.loads(values)) for step, values in found]
        (config,) = database.execute("select config from configs where run_name = ?", [run_id]).fetchone()
    summary = {key: value for _, values in rows for key, value in values.items() if key[:8] == "summary/"}
    return Stored(rows, json.loads(config), summary, None)


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.fixture(params=READERS)
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of each service, with its environment variables unset."""
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; `make test-loggers` uses an environment with it")
    own = "WANDB_MODE MLFLOW_TRACKING_URI TRACKIO_DIR TRACKIO_SPACE_ID TRACKIO_SERVER_URL"
    for variable in own.split():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # read_mlflow needs it
    return name


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Check that no process of a service is left."""
    before = helpers()
    yield
    assert helpers() - before == set()


def helpers() -> set[psutil.Process]:
    return {p for p in psutil.process_iter(["name"]) if "wandb" in p.info["name"]}


def send(run_dir: Path, service: str) -> Stored:
    done = here("report", str(run_dir), "--log-to", service)
    assert done.returncode == 0, (done.stdout, done.stderr, (run_dir / "logs" / "loggers.log").read_text())
    return READERS[service](run_dir)


def test_a_run_is_stored_completely_and_a_killed_one_as_failed(tmp_path: Path, service: str) -> None:
    run_dir = make_run(tmp_path / "run", settings={f"s{number}": number for number in range(250)})
    (run_dir / "summary.json").rename(tmp_path / "summary.json")
    assert send(run_dir, service).ended in {"wandb": ["1"], "mlflow": ["FAILED"], "trackio": [None]}[service]
    (tmp_path / "summary.json").rename(run_dir / "summary.json")
    time.sleep(1.1)  # the name of a run has a resolution of 1 s
    stored = send(run_dir, service)
    assert len([name for name in stored.config if name.startswith("settings.s")]) == 250
    assert stored.steps("loss") == list(range(10, 101, 10))
    assert stored.steps("heldout_loss") == [100]
    losses = {step: values["loss"] for step, values in stored.rows if "loss" in values}
    assert losses == {step: metrics(step)["loss"] for step in losses}
    assert float(stored.config["optim.lr"]) == 1e-3
    assert stored.summary["summary/heldout_loss"] == 6.25
    assert stored.summary["summary/checkpoint"] == str(run_dir / "checkpoints" / "step-00000100")
    assert stored.ended in {"wandb": ["0"], "mlflow": ["FINISHED"], "trackio": [None]}[service]


def test_lines_arrive_during_the_run_and_it_survives_a_deleted_store(tmp_path: Path, service: str) -> None:
    """The run directory, with the store of the service in it, is deleted during the run."""
    run_dir, lines = make_run(tmp_path / "run", 1), list[str]()
    with Loggers(run_dir, [service], lines.append) as sender:
        wait_for(lambda: lines, 60)  # the first line names the service's run
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        for step in (10, 20):
            files.append_line(run_dir / "metrics.jsonl", metrics(step))
    _, line = lines
    assert line.startswith(f"warning: no more records of this run will be sent to {service} (")
    assert sender.exit_code == 1
