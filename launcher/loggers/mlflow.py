"""MLflow: a file store in RUN/mlflow unless MLFLOW_TRACKING_URI names a server; mlflow-skinny suffices."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from launcher.loggers import PROJECT, Beginning, Scalar

MOST_PARAMS = 100  # of one request
MOST_CHARACTERS = 6000  # of a parameter's value; of a tag's 8000


class Writer:
    """Settings are parameters, which MLflow never changes: they are those of the first start."""

    def __init__(self, beginning: Beginning):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the only local store of mlflow-skinny
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.where = os.environ.get("MLFLOW_TRACKING_URI") or (beginning.run_dir / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=self.where)
        if beginning.run_id is not None:
            self.run_id = beginning.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=beginning.run_dir.name)
        self.run_id = run.info.run_id
        params = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in beginning.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + MOST_PARAMS])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [Metric(key, value, now, step) for key, value in values.items()])

    def finish(self, step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        from mlflow.entities import RunTag

        numbers = {k: v for k, v in facts.items() if isinstance(v, int | float)}
        if numbers:
            self.write(step, numbers)
        tags = [RunTag(k, str(v)[:MOST_CHARACTERS]) for k, v in facts.items() if k not in numbers]
        self._client.log_batch(self.run_id, tags=tags)
        self._client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")
