"""Services that a run's records are also sent to: a file for each, one protocol, all in one child process."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, get_args

from bert_dp import record
from bert_dp.config.extras import install_command
from bert_dp.config.schema import Logger

LOGGERS: tuple[str, ...] = get_args(Logger)
INCOMPLETE = 3
"""Exit code of the child when its warnings say what was not sent."""
STATE = "run.json"
"""In a folder named like the service, in the run directory: which run of the service is this run's."""
DESTINATION = {
    "tensorboard": (),
    "wandb": ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT"),
    "mlflow": ("MLFLOW_TRACKING_URI",),
    "trackio": ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_PROJECT"),
}
"""The services' own variables that say where a run goes: without them into the run directory."""
PROJECT = "bert-dp"
"""What the project, or experiment, is called where the service's own variable does not say."""

Scalar = str | int | float | bool


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a service's run is begun with, or gone on with."""

    run_dir: Path
    run_id: str | None
    """Of the service's run to go on with; None = a new one."""
    settings: Mapping[str, Scalar]
    """config.yaml by `section.name`."""


class MetricsWriter(Protocol):
    """A run in one service. `Writer(beginning)` of the service's file opens it; whatever it raises ends this
    writer and nothing else."""

    run_id: str
    where: str
    """Where the run can be seen: a path or an address."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one optimizer step; steps never go back."""

    def finish(self, step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        """The run has ended at `step`. `facts`: its summary and links, empty when it left none."""


def open_writer(name: str, beginning: Beginning) -> MetricsWriter:
    """A run in the service `name`, one of LOGGERS. Raises what the service raises."""
    writer: MetricsWriter = importlib.import_module(f"launcher.loggers.{name}").Writer(beginning)
    return writer


def destination(name: str) -> str:
    """Where the environment sends runs of this service, without passwords; empty = into the run directory."""
    given = {variable: os.environ.get(variable) for variable in DESTINATION[name]}
    return record.hide(" ".join(f"{variable}={value}" for variable, value in given.items() if value))


def logger_issues(names: Iterable[str]) -> list[str]:
    """Why nothing can be sent to these services; one line each."""
    issues = []
    for name in names:
        if name not in LOGGERS:
            issues.append(f"unknown logger {name or 'nothing'}; choose from {', '.join(LOGGERS)}")
        elif importlib.util.find_spec(name) is None:
            issues.append(f"{name} needs `{install_command(name)}`")
    return issues
