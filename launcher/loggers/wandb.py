"""Weights & Biases: offline in RUN/wandb unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher.loggers import PROJECT, Beginning, Scalar


class Writer:
    """The step of wandb is the optimizer step; the summary of the run stands under `summary/`."""

    def __init__(self, beginning: Beginning):
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own errors, over the network
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=beginning.run_dir.name,
            id=beginning.run_id,
            resume="allow",
            dir=str(beginning.run_dir),
            config=dict(beginning.settings),
            # what it would find of this process (host, code, output, load) is not the run's
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        self.run_id = self._run.id
        self.where = str(Path(self._run.dir).parent) if self._run.offline else self._run.url

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        self._run.summary.update(dict(facts))
        self._run.finish(exit_code=exit_code)
