"""`python -m tests.faults`: every fault test with its full count, resumable; prints a line per row.

Results go to .faults/results.jsonl, one line per test with the rounds that it observed; a test that has
passed there with this code (launcher, bert_dp, tests/faults) is not run again. `--rows 1,4` runs some;
`--list` runs none. Then a table by row.
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
    match = re.search(r"test_row_(\d+)", test)
    return int(match[1]) if match else 0


def run(test: str) -> dict[str, Any]:
    """The line of a test, by its node id."""
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
    parser.add_argument("--rows", help="numbers of the fault table, by commas; default: all")
    parser.add_argument("--list", action="store_true", help="show what is done and run nothing")
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
    """By row: tests, rounds observed, outcomes, and the greatest of the seconds that were observed."""
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
