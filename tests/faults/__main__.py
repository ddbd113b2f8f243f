"""`python -m tests.faults`: run every fault test with its full number of rounds, and print a line per test.

Each result is a line of .faults/results.jsonl with the rounds that the test observed. A test that passed with
this code (launcher, bert_dp, tests/faults) is not run again. `--rows 1,4` runs only these rows; `--list` runs
none. At the end a table of the rows is printed.
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from typing import Any

from tests.faults.harness import RECORD
from tests.helpers import read_lines
from tests.resumable import ROOT, Results

OUT = ROOT / ".faults"
FULL = {**os.environ, "BERT_DP_FAULTS": "full"}


def collect() -> list[str]:
    """Return the node ids of the fault tests."""
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
    """Return the row number in a test's name (7 for test_row_07_...), or 0."""
    match = re.search(r"test_row_(\d+)", test)
    return int(match[1]) if match else 0


def run(test: str) -> dict[str, Any]:
    """Run the test with this node id and return its result line."""
    observed = OUT / "observed.jsonl"
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
        "outcome": "failed" if done.returncode else "skipped" if skipped else "passed",
        "reason": done.stdout[-2000:] if done.returncode else skipped[0] if skipped else None,
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "observed": read_lines(observed) if observed.exists() else [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", help="row numbers of the fault table, separated by commas; default: all")
    parser.add_argument("--list", action="store_true", help="show the results so far and run nothing")
    arguments = parser.parse_args()
    results = Results(
        OUT, "test", lambda line: line["outcome"] != "failed", code_of=("launcher", "bert_dp", "tests/faults")
    )
    rows = {int(n) for n in arguments.rows.split(",")} if arguments.rows else None
    for test in [] if arguments.list else sorted(collect(), key=row_of):
        if results.has_passed(test.split("::", 1)[1]) or (rows is not None and row_of(test) not in rows):
            continue
        line = results.add(run(test))
        print(f"row {line['row']:2} {line['outcome']:7} {line['seconds']:7.1f} s  {line['test']}", flush=True)
    newest = list(results.newest.values())
    print_table(newest)
    return 1 if any(line["outcome"] == "failed" for line in newest) else 0


def print_table(results: list[dict[str, Any]]) -> None:
    """Print, for each row, the number of tests and rounds, the outcomes, and the longest observed time."""
    print("row  tests  rounds  passed  skipped  failed  greatest, s")
    for row in sorted({result["row"] for result in results}):
        tests = [result for result in results if result["row"] == row]
        rounds = [one for result in tests for one in result["observed"]]
        seconds = [one["seconds"] for one in rounds if "seconds" in one]
        passed, skipped, failed = (
            sum(result["outcome"] == name for result in tests) for name in ("passed", "skipped", "failed")
        )
        greatest = f"{max(seconds):.1f}" if seconds else "-"
        print(
            f"{row:3}  {len(tests):5}  {len(rounds):6}  {passed:6}  {skipped:7}  {failed:6}  {greatest:>11}"
        )


if __name__ == "__main__":
    sys.exit(main())
