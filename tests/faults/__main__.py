"""`python -m tests.faults`: every fault test with its full count, resumable; prints a line per row.

Results go to .faults/results.jsonl, one line per test with the rounds that it observed; a test that has
passed there with this code (launcher, bert_dp, tests/faults) is not run again. `--rows 1,4` runs some;
`--list` runs none. Then a table by row.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.harness import RECORD

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".faults" / "results.jsonl"
FULL = {**os.environ, "BERT_DP_FAULTS": "full"}


def collect() -> list[str]:
    """Node ids of the fault tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/faults"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=FULL,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def row_of(test: str) -> int:
    """The number in the test's name: test_row_07_..."""
    found = re.search(r"test_row_(\d+)", test)
    return int(found[1]) if found else 0


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def code_version() -> str:
    """Changes with any committed file that a fault test runs."""
    trees = [f"HEAD:{folder}" for folder in ("launcher", "bert_dp", "tests/faults")]
    done = subprocess.run(["git", "rev-parse", *trees], cwd=ROOT, capture_output=True, text=True, check=True)
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:12]


def run(test: str, code: str) -> dict[str, Any]:
    observed = RESULTS.with_name("observed.jsonl")
    observed.unlink(missing_ok=True)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=7200", test],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**FULL, RECORD: str(observed)},
    )
    skipped = re.search(r"^SKIPPED.*", done.stdout, re.MULTILINE)
    return {
        "row": row_of(test),
        "test": test.split("::", 1)[1],
        "code": code,
        "outcome": "failed" if done.returncode else "skipped" if skipped else "passed",
        "why": done.stdout[-2000:] if done.returncode else skipped[0] if skipped else None,
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "observed": [json.loads(line) for line in observed.read_text().splitlines()]
        if observed.exists()
        else [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", help="numbers of the fault table, by commas; default: all")
    parser.add_argument("--list", action="store_true", help="show what is done and run nothing")
    arguments = parser.parse_args()
    code = code_version()
    RESULTS.parent.mkdir(exist_ok=True)
    wanted = {int(n) for n in arguments.rows.split(",")} if arguments.rows else None
    for test in [] if arguments.list else sorted(collect(), key=row_of):
        done = {r["test"] for r in results() if r["outcome"] != "failed" and r["code"] == code}
        if test.split("::", 1)[1] in done or (wanted is not None and row_of(test) not in wanted):
            continue
        result = run(test, code)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        sys.stdout.write(
            f"row {result['row']:2} {result['outcome']:7} {result['seconds']:7.1f} s  {result['test']}\n"
        )
        sys.stdout.flush()
    latest = {r["test"]: r for r in results()}
    print_table(list(latest.values()))
    return 1 if any(r["outcome"] == "failed" for r in latest.values()) else 0


def print_table(latest: list[dict[str, Any]]) -> None:
    """By row: tests, rounds observed, outcomes, and the greatest of the seconds that were observed."""
    sys.stdout.write("row  tests  rounds  passed  skipped  failed  greatest, s\n")
    for row in sorted({r["row"] for r in latest}):
        of_row = [r for r in latest if r["row"] == row]
        observed = [o for r in of_row for o in r["observed"]]
        seconds = [o["seconds"] for o in observed if "seconds" in o]
        counts = [sum(r["outcome"] == name for r in of_row) for name in ("passed", "skipped", "failed")]
        greatest = f"{max(seconds):.1f}" if seconds else "-"
        sys.stdout.write(
            f"{row:3}  {len(of_row):5}  {len(observed):6}  {counts[0]:6}  {counts[1]:7}  "
            f"{counts[2]:6}  {greatest:>11}\n"
        )


if __name__ == "__main__":
    sys.exit(main())
