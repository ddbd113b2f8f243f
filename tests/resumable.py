"""Long lists of cases whose results are JSON lines: a list that was stopped goes on where it stood."""

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
    """results.jsonl of a folder: a line for each case that has run; the newest of a case counts."""

    def __init__(
        self, folder: Path, key: str, passed: Callable[[Result], bool], *, code_of: Sequence[str] = ()
    ):
        """`key` names the case in a line; `passed` says whether a line is one that needs no second run.
        `code_of`: folders of the repository that a case runs; a line keeps their committed state as `code`,
        and one of other code counts for nothing. () = any code will do."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._key, self._passed = folder / "results.jsonl", key, passed
        self._code = {"code": code_version(code_of)} if code_of else {}
        self.newest = newest_results(self._path, key)
        """By case, those of other code too."""

    def add(self, result: Result) -> Result:
        """Write the result of a case; returns the line."""
        line = {**result, **self._code}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.newest[line[self._key]] = line
        return line

    def has_passed(self, case: str, **facts: Any) -> bool:
        """Whether the newest line of a case has passed, with this code and these facts."""
        line = self.newest.get(case)
        if line is None or not self._passed(line):
            return False
        return all(line[name] == value for name, value in {**self._code, **facts}.items())


def newest_results(path: Path, key: str) -> dict[str, Result]:
    """Case -> its newest line; {} of a file that is not there."""
    return {line[key]: line for line in read_lines(path)} if path.exists() else {}


def code_version(folders: Sequence[str]) -> str:
    """Changes with any committed file of these folders; without a repository, with the commit."""
    trees = git("rev-parse", *(f"HEAD:{folder}" for folder in folders))
    return hashlib.sha256((trees or commit()).encode()).hexdigest()[:12]
