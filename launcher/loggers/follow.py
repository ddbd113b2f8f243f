"""A run's record files, followed line by line, and what of them goes to a service."""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bert_dp import record
from bert_dp.config import ConfigError, flat, read_yaml
from bert_dp.record.models import Summary
from launcher import results
from launcher.loggers import STATE, Beginning, MetricsWriter, Scalar, destination, open_writer
from launcher.redact import redact
from launcher.results import LoggerRun

POLL_S = 1.0
# record file -> what the names of its numbers begin with, and those that are no measurement of it
FOLLOWED = {"metrics.jsonl": ("", ("step",)), "evals.jsonl": ("heldout_", ("step", "tokens", "elapsed_s"))}


class Tail:
    """The whole lines of a record file as they come, each step once, also after the file was cut back."""

    def __init__(self, path: Path, sent: int):
        """`sent`: the last step that needs no sending."""
        self.sent = sent
        self._path = path
        self._inode, self._offset = 0, 0
        self._prefix, self._left_out = FOLLOWED[path.name]

    def read(self) -> Iterator[tuple[int, str, dict[str, float]]]:
        """(step, file, numbers) of the lines that stand there at the moment of this call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return iter(())
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:  # cut back: another file
            self._inode, self._offset = status.st_ino, 0
        return self._lines(file, status.st_size)

    def _lines(self, file: IO[bytes], end: int) -> Iterator[tuple[int, str, dict[str, float]]]:
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") or self._offset + len(line) > end:
                    return
                self._offset += len(line)
                facts = _parse(line)
                if facts is not None and facts["step"] > self.sent:
                    self.sent = facts["step"]
                    yield self.sent, self._path.name, self._numbers(facts)

    def _numbers(self, facts: Mapping[str, Any]) -> dict[str, float]:
        return {
            f"{self._prefix}{key}": value
            for key, value in facts.items()
            if key not in self._left_out and isinstance(value, int | float)
        }


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None of a damaged one, after which others may be whole."""
    try:
        facts = record.parse_json(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and type(facts.get("step")) is int else None


def send(run_dir: Path, name: str, over: threading.Event) -> None:
    """All records of the run to the service `name`, as they come until `over`, then how it has ended.

    Goes on with the service's run of an earlier call. Raises what the service raises, and ConfigError.
    """
    folder = run_dir / name
    folder.mkdir(exist_ok=True)
    with record.lock(folder / ".lock") or _busy(folder):
        earlier, target = results.find(folder / STATE, LoggerRun), destination(name)
        if earlier is not None and earlier.destination != target:
            earlier = None
        writer = open_writer(name, Beginning(run_dir, earlier.id if earlier else None, settings_of(run_dir)))
        state = LoggerRun(id=writer.run_id, where=record.hide(writer.where), destination=target)
        sent = earlier.sent if earlier else {}
        tails = [Tail(run_dir / file, sent.get(file, 0)) for file in FOLLOWED]
        sent = _send_lines(writer, tails, folder / STATE, state, over)
        writer.finish(max(sent.values()), *ending(run_dir))
        # some services lose what they write to a full disk without a word; this does not
        results.write(folder / STATE, state.model_copy(update={"sent": sent}))


def _busy(folder: Path) -> IO[str]:
    raise ConfigError([f"another process sends what {folder} holds"])


def _send_lines(
    writer: MetricsWriter, tails: list[Tail], path: Path, state: LoggerRun, over: threading.Event
) -> dict[str, int]:
    """Keeps what was sent in `path`, and returns it: record file -> last step."""
    before = None
    while True:
        is_last = over.is_set()  # asked before reading: all that was written until then is sent
        # metrics.jsonl is looked at first: what is held out before its last line then stands in evals.jsonl
        for step, _, numbers in heapq.merge(*[tail.read() for tail in tails], key=lambda line: line[0]):
            writer.write(step, numbers)
        sent = {file: tail.sent for file, tail in zip(FOLLOWED, tails, strict=True)}
        if sent != before:
            results.write(path, state.model_copy(update={"sent": sent}))
            before = sent
        if is_last:
            return sent
        over.wait(POLL_S)


def settings_of(run_dir: Path) -> dict[str, Scalar]:
    """config.yaml by `section.name`, lists as JSON, without what is null or a secret. Raises ConfigError."""
    config = flat(redact(read_yaml(run_dir / "config.yaml")))
    return {k: json.dumps(v) if isinstance(v, list) else v for k, v in config.items() if v is not None}


def ending(run_dir: Path) -> tuple[dict[str, Scalar], int]:
    """The values of summary.json with paths to the page and the checkpoint, and the exit code; nothing and 1
    of a run that left no summary."""
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is None:
        return {}, 1
    known = flat(results.plain(summary)).items()
    facts = {k: v for k, v in known if v is not None and not isinstance(v, list)}
    facts["report"] = str(run_dir / "report.html")
    if summary.checkpoint:
        facts["checkpoint"] = str(run_dir / summary.checkpoint)
    return {f"summary/{key}": value for key, value in facts.items()}, summary.exit_code
