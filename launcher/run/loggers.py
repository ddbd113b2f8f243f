"""Send a run's records to TensorBoard, Weights & Biases, MLflow or trackio.

Each service has its own child process, `python -m launcher.run.loggers RUN SERVICE`. The child runs until the
launcher exits or closes the child's standard input. The launcher shows the lines that the child prints; the
output of the service's library goes to logs/loggers.log. A child exits with code 0 if it sent everything, or
INCOMPLETE if it printed a warning.
"""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from bert_dp import files
from bert_dp.config import flat, read_yaml
from bert_dp.files.models import Summary
from bert_dp.files.reaper import describe_exit_code, module_command
from launcher import results
from launcher.log import Log
from launcher.run.processes import stop_signals

INCOMPLETE = 3  # exit code of a child that printed a warning
SERVICES_S = 8.0  # time limit for all services to finish after the run
POLL_S = 1.0  # interval at which a child reads new records
WAIT_S = 0.02  # interval at which the launcher checks for exited children
LOG = "logs/loggers.log"
PROJECT = "bert-dp"
MLFLOW_PARAMS = 100  # maximum number of parameters per request
MLFLOW_CHARACTERS = 6000  # maximum length of a parameter value; also used for tags, whose maximum is 8000
# record file -> (prefix added to its keys, keys that are not sent)
RECORDS = {"metrics.jsonl": ("", ("step",)), "evals.jsonl": ("heldout_", ("step", "tokens", "elapsed_s"))}

Scalar = str | int | float | bool


class Loggers:
    """Context manager that sends a run's records to services. A child's errors do not affect the run."""

    def __init__(self, run_dir: Path, names: Sequence[str], log: Log, *, wait: bool = False):
        """`log`: function that prints a line. `wait`: on exit, wait for the services without a time limit."""
        self._run_dir, self._names, self._log = run_dir, names, log
        self._limit_s = math.inf if wait else SERVICES_S
        self._children: list[tuple[str, subprocess.Popen[str], threading.Thread]] = []
        # set on exit: 0 = everything was sent, 1 = some records were not, 128 + N = signal N ended the wait
        self.exit_code = 0

    def __enter__(self) -> Self:
        for name in self._names:
            child = subprocess.Popen(
                [*module_command("launcher.run.loggers"), str(self._run_dir), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in the terminal must not stop the child
            )
            relay = threading.Thread(target=self._print_lines, args=(child.stdout,), daemon=True)
            relay.start()
            self._children.append((name, child, relay))
        return self

    def _print_lines(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._log(line.rstrip("\n"))

    def __exit__(self, *_: object) -> None:
        """Close the children's input. After the time limit or a stop signal, kill any child still running."""
        children = [child for _, child, _ in self._children]
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + self._limit_s
        with stop_signals() as received:
            while any(child.poll() is None for child in children):
                if received or time.monotonic() > deadline:
                    break
                time.sleep(WAIT_S)
        for name, child, relay in self._children:
            if is_late := child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
            relay.join(1.0)
            if code not in (0, INCOMPLETE):
                end = "timed out" if is_late else describe_exit_code(code, "without a message")
                self._log(incomplete(self._run_dir, name, end))
            self.exit_code = int(self.exit_code or code != 0)
        if received:
            self.exit_code = 128 + received[0]


def send_run(run_dir: Path, names: Sequence[str], log: Log) -> int:
    """Send all records of a run to each service as a new run. Return `Loggers.exit_code`."""
    with Loggers(run_dir.resolve(), names, log, wait=True) as loggers:
        pass
    return loggers.exit_code


def incomplete(run_dir: Path, service: str, problem: str) -> str:
    """Format the warning that records were not sent."""
    return (
        f"warning: no more records of this run will be sent to {service} ({problem}; see {run_dir / LOG}); "
        f"`bert-dp report {run_dir} --log-to {service}` sends the whole run"
    )


def main(run_dir: Path, service: str) -> int:
    """Send a run's records until standard input closes. Return 0, or INCOMPLETE if sending failed."""
    for number in files.STOP_SIGNALS:  # the launcher decides when this process exits
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)  # gives priority to the ranks
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    (run_dir / LOG).parent.mkdir(exist_ok=True)
    with (run_dir / LOG).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    log = partial(print, file=lines)
    try:
        send(run_dir, service, lambda seconds: bool(select.select([0], [], [], seconds)[0]), log)
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        log(incomplete(run_dir, service, f"{type(error).__name__}: {first}"))
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exc()
        return INCOMPLETE
    return 0


def send(run_dir: Path, service: str, wait_for_end: Callable[[float], bool], log: Log) -> None:
    """Send the settings, each new record, and finally the summary. Errors from the service propagate.
    `wait_for_end(seconds)` waits for `seconds` or until the run ends, and returns whether it has ended."""
    config = flat(read_yaml(run_dir / "config.yaml"))
    settings = {k: json.dumps(v) if isinstance(v, list) else v for k, v in config.items() if v is not None}
    name = f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    writer = OPENERS[service](run_dir, name, settings)
    log(f"{service}: {writer.where}")
    readers = [StepReader(run_dir / file) for file in RECORDS]
    is_over = False
    while not is_over:
        is_over = wait_for_end(POLL_S)  # checked before reading, so that the last lines are sent too
        # metrics.jsonl is read first; evals.jsonl then contains every evaluation before the last step read
        for step, values in sorted((row for reader in readers for row in reader.rows()), key=itemgetter(0)):
            writer.write(step, values)
    last = max(reader.sent for reader in readers)
    writer.finish(last, *summary_facts(run_dir))
    with (run_dir / LOG).open("a") as file:  # raises if the disk is full; some services do not
        file.write(f"{service}: sent up to step {last}\n")


class StepReader:
    """Reader of new lines in a record file. It skips steps that are repeated after a restart."""

    def __init__(self, path: Path):
        self.sent = 0
        self._tail = files.Tail(path)
        self._prefix, self._left_out = RECORDS[path.name]

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the numeric values of each new complete line. Skip damaged lines."""
        while lines := self._tail.lines()[0]:
            for line in lines:
                try:
                    facts = files.parse_json(line)
                    step = int(facts["step"])
                except (ValueError, KeyError, TypeError):
                    continue
                if step > self.sent:
                    self.sent = step
                    kept = {k: v for k, v in facts.items() if k not in self._left_out}
                    numbers = {k: v for k, v in kept.items() if isinstance(v, int | float)}
                    yield step, {f"{self._prefix}{k}": v for k, v in numbers.items()}


def summary_facts(run_dir: Path) -> tuple[dict[str, Scalar], int]:
    """Return a run's final facts and its exit code; ({}, 1) if it has no summary. The facts are the values of
    summary.json and the paths of the report page and the checkpoint."""
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is None:
        return {}, 1
    known = {**flat(results.plain(summary)), "report": str(run_dir / "report.html")}
    if summary.checkpoint:
        known["checkpoint"] = str(run_dir / summary.checkpoint)
    facts = {key: value for key, value in known.items() if value is not None and not isinstance(value, list)}
    return {f"summary/{key}": value for key, value in facts.items()}, summary.exit_code


class Writer(NamedTuple):
    """Location of a run in a service, and functions that write to the run. They may raise any exception."""

    where: str  # path or address of the run
    write: Callable[[int, Mapping[str, float]], object]  # sends the values of a step; steps never decrease
    finish: Callable[[int, Mapping[str, Scalar], int], object]
    """Function that sends the summary, which may be empty, and ends the run. Arguments: last step, summary,
    exit code."""


def open_tensorboard(run_dir: Path, name: str, settings: Mapping[str, Scalar]) -> Writer:
    """Open event files in RUN/tensorboard. TensorBoard's Text tab shows the settings and the summary."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as Scalars
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    events = EventFileWriter(str(run_dir / "tensorboard" / name))

    def add(step: int, summary: Any) -> None:
        events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        events.flush()  # raises if the disk is full

    def add_table(step: int, tag: str, rows: Mapping[str, Scalar]) -> None:
        lines = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
        add(step, text_pb(tag, "\n".join(lines)))

    def write(step: int, values: Mapping[str, float]) -> None:
        each = [Scalars.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        add(step, Scalars(value=each))

    def finish(step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        if facts:
            add_table(step, "summary", facts)
        events.close()

    add_table(0, "config", settings)
    return Writer(str(run_dir / "tensorboard" / name), write, finish)


def open_wandb(run_dir: Path, name: str, settings: Mapping[str, Scalar]) -> Writer:
    """Open a Weights & Biases run. Unless WANDB_MODE is set, the run is offline, in RUN/wandb."""
    if os.environ.setdefault("WANDB_MODE", "offline") == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise wandb sends error reports
    import wandb

    # by default, wandb records the output, git state and resource usage of this process, which is not a rank
    off = {"console": "off", "disable_git": True, "x_disable_meta": True, "x_disable_stats": True}
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=name,
        dir=str(run_dir),
        config=dict(settings),
        settings=wandb.Settings(silent=True, save_code=False, **off),
    )

    def finish(step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        run.summary.update(dict(facts))
        run.finish(exit_code=exit_code)

    where = str(Path(run.dir).parent) if run.offline else run.url
    return Writer(where, lambda step, values: run.log(dict(values), step=step), finish)


def open_mlflow(run_dir: Path, name: str, settings: Mapping[str, Scalar]) -> Writer:
    """Open an MLflow run in the file store RUN/mlflow, or at MLFLOW_TRACKING_URI if that is set."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other local store
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    where = os.environ.get("MLFLOW_TRACKING_URI") or (run_dir / "mlflow").as_uri()
    client = MlflowClient(tracking_uri=where)
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    existing = client.get_experiment_by_name(project)
    experiment = existing.experiment_id if existing else client.create_experiment(project)
    run_id = client.create_run(experiment, run_name=name).info.run_id
    params = [Param(key, str(value)[:MLFLOW_CHARACTERS]) for key, value in settings.items()]
    for first in range(0, len(params), MLFLOW_PARAMS):
        client.log_batch(run_id, params=params[first : first + MLFLOW_PARAMS])

    def write(step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def finish(step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        write(step, {key: value for key, value in facts.items() if isinstance(value, int | float)})
        texts = {key: value[:MLFLOW_CHARACTERS] for key, value in facts.items() if isinstance(value, str)}
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in texts.items()])
        client.set_terminated(run_id, "FAILED" if exit_code else "FINISHED")

    return Writer(where, write, finish)


def open_trackio(run_dir: Path, name: str, settings: Mapping[str, Scalar]) -> Writer:
    """Open a trackio run in RUN/trackio, unless the environment names another directory or a server."""
    where = os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project=project, name=name, config=dict(settings), **off)

    def finish(step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        if facts:
            run.log(dict(facts), step=step)  # the summary is the last row
        run.finish()

    return Writer(where, lambda step, values: run.log(dict(values), step=step), finish)


OPENERS: dict[str, Callable[[Path, str, Mapping[str, Scalar]], Writer]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
