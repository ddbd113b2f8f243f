"""Test that `make faults` also runs the cases that the short form omits."""

import subprocess
import sys

from tests.faults.__main__ import ROOT, collect, row_of


def test_the_full_table_has_more_cases_than_the_short_form() -> None:
    full = collect()
    short = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/faults"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    more = {test.split("::")[1] for test in set(full) - set(short)}
    assert {test for test in short if "::" in test} <= set(full)
    assert {row_of(test) for test in more} == {2, 3, 5, 7, 11, 12, 13, 15, 19}
    assert sum(row_of(test) == 13 for test in full) == 12, "every change between 1 and 4 ranks"
    assert {row_of(test) for test in full} == {*range(27)}
