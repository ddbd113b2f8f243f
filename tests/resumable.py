"""Store results of long lists of cases as JSON lines, so that an interrupted list can be resumed."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import commit, git
from tests.helpers import read_lines

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]


class Results:
    """File results.jsonl of a folder, with a line per result. The newest line of a case counts."""

    def __init__(
        self, folder: Path, key: str, passed: Callable[[Result], bool], *, code_of: Sequence[str] = ()
    ):
        """`key` is the field with the case of a line. `passed` returns True for the line of a finished case.
        `code_of` are the folders of the repository that a case runs. A line stores a hash of their committed
        files as `code`; lines with another hash are ignored. If `code_of` is empty, no hash is compared."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._key, self._passed = folder / "results.jsonl", key, passed
        self._code = {"code": code_version(code_of)} if code_of else {}
        self.newest = newest_results(self._path, key)
        """Case -> its newest line, of any code."""

    def add(self, result: Result) -> Result:
        """Write the result of a case and return its line."""
        line = {**result, **self._code}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.newest[line[self._key]] = line
        return line

    def has_passed(self, case: str, **facts: Any) -> bool:
        """Return True if the newest line of a case has passed with this code and these facts."""
        line = self.newest.get(case)
        if line is None or not self._passed(line):
            return False
        return all(line[name] == value for name, value in {**self._code, **facts}.items())


def newest_results(path: Path, key: str) -> dict[str, Result]:
    """Return the newest line of each case, or {} if the file does not exist."""
    return {line[key]: line for line in read_lines(path)} if path.exists() else {}


def code_version(folders: Sequence[str]) -> str:
    """Return a hash of the committed files of these folders, or of the commit if there is no repository."""
    trees = git("rev-parse", *(f"HEAD:{folder}" for folder in folders))
    return hashlib.sha256((trees or commit()).encode()).hexdigest()[:12]
