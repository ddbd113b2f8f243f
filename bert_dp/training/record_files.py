"""Write records and log of a rank. A write that fails is counted and never ends the run. Torch-free."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_dp import files


class WriteErrors:
    """Failed writes of this process, for summary.json."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, error: OSError) -> None:
        self.count += 1


class TolerantFile(io.FileIO):
    """An open file descriptor whose failed writes are counted and dropped."""

    def __init__(self, descriptor: int, errors: WriteErrors):
        super().__init__(descriptor, "w", closefd=False)
        self._errors = errors

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._errors.note(error)
            return len(data)


class LogStream(io.TextIOWrapper):
    """A text stream on a descriptor: masks secrets, is flushed at the end of each line, raises no OSError."""

    def __init__(self, descriptor: int, errors: WriteErrors):
        raw = io.BufferedWriter(TolerantFile(descriptor, errors))
        super().__init__(raw, "utf-8", "backslashreplace", line_buffering=True)
        self._secrets = files.secret_values(os.environ)

    def write(self, text: str) -> int:
        super().write(files.hide(text, self._secrets))
        return len(text)


class Records:
    """Appends lines to the records of a run directory."""

    def __init__(self, run_dir: Path, log_rank0: Callable[[str], None], errors: WriteErrors):
        self._run_dir, self._log, self._errors = run_dir, log_rank0, errors
        self._incomplete: set[str] = set()

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append `line`, which has a `step`, to the record `name`. Warn of its first line that is lost."""
        try:
            files.append_line(self._run_dir / name, line)
        except OSError as error:
            self._errors.note(error)
            if name not in self._incomplete:
                self._incomplete.add(name)
                self._log(f"warning: step {line['step']} is missing in {name}: {error}")
