"""TensorBoard: event files in RUN/tensorboard, by its own package and without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from launcher.loggers import Beginning, Scalar


class Writer:
    """Numbers are scalars, settings and summary are tables under Text."""

    def __init__(self, beginning: Beginning):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = beginning.run_dir.name
        self.where = str(beginning.run_dir / "tensorboard")
        self._events = EventFileWriter(self.where)
        self._add_table("config", beginning.settings, 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        each = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Summary(value=each), step)

    def finish(self, step: int, facts: Mapping[str, Scalar], exit_code: int) -> None:
        if facts:
            self._add_table("summary", facts, step)
        self._events.close()

    def _add_table(self, tag: str, rows: Mapping[str, Scalar], step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
        self._add(text_pb(tag, table), step)

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()  # a disk that is full then says so
