"""Helpers of the fault tests: numbers of rounds, broken workers, and a record of observations.

`make faults` sets BERT_DP_FAULTS=full for the numbers of rounds in the fault table; CI runs each row at least
once. Times are recorded; their limits are wide enough for a busy machine.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FULL = os.environ.get("BERT_DP_FAULTS") == "full"
RECORD = "BERT_DP_FAULTS_RECORD"  # variable with the path of a file that gets a JSON line per observation
INJECT = Path(__file__).parent / "inject"
ROOT = Path(__file__).parents[2]


def rounds(short: int, full: int) -> range:
    """Return `full` rounds under `make faults`, `short` rounds otherwise."""
    return range(full if FULL else short)


def observe(row: int, **facts: Any) -> None:
    """Record the facts of one round of a row of the fault table."""
    path = os.environ.get(RECORD)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row, **facts}) + "\n")


def broken(what: str, *, rank: int = 1, place: str = "step", step: int = 3, **more: Any) -> dict[str, str]:
    """Return environment variables that make one worker fail; see inject/sitecustomize.py."""
    fault = {"what": what, "rank": rank, "place": place, "step": step, **more}
    path = os.pathsep.join(filter(None, [str(INJECT), str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"BERT_DP_TEST_FAULT": json.dumps(fault), "PYTHONPATH": path}


def on_small_disk(folder: Path, size: int | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a file system of `size` bytes at `folder`, and copy `folder` to folder-left."""
    folder.mkdir()
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && "$@"; code=$?; cp -a "$0" "$0-left"; exit $code'
    command = ["unshare", "-m", "sh", "-c", script, str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def _can_mount() -> bool:
    script = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    command = ["unshare", "-m", "sh", "-c", script, "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not _can_mount(), reason="mounting needs root")
