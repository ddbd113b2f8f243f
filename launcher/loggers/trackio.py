"""trackio: a database in RUN/trackio unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says
otherwise."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping

from launcher.loggers import PROJECT, Beginning, Scalar


class Writer:
    """trackio finds a run by its name, so that is made unique; the summary is the last row."""

    def __init__(self, beginning: Beginning):
        self.where = os.environ.setdefault("TRACKIO_DIR", str(beginning.run_dir / "trackio"))
        import trackio

        self.run_id = beginning.run_id or f"{beginning.run_dir.name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.run_id,
            config=dict(beginning.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        if facts:
            self._run.log(dict(facts), step=step)
        with warnings.catch_warnings(record=True) as said:  # of its threads too: what could not be stored
            warnings.simplefilter("always")
            self._run.finish()
        if said:
            raise OSError(str(said[0].message))
