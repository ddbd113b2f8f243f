"""Tests that the seeded bugs of tests/slips.py match the code."""

import pytest

from tests.mutants import ROOT, only_strict
from tests.slips import SLIPS, Slip


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_seeded_bug_replaces_text_that_occurs_once_in_its_file(slip: Slip) -> None:
    assert (ROOT / slip.file).read_text().count(slip.old) == 1
    assert slip.old != slip.new
    for path in slip.tests.split():
        file, _, test = path.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_seeded_bugs_have_unique_names() -> None:
    assert len({slip.name for slip in SLIPS}) == len(SLIPS)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ("zip(a, b, strict=None)", True),
        ("zip(a, b, )", True),
        ("zip(a, None, strict=True)", False),
        ("zip(a, strict=True)", False),
    ],
)
def test_a_mutant_that_changes_only_zips_strict_is_recognised(changed: str, same: bool) -> None:
    assert only_strict(f"- x = zip(a, b, strict=True)\n+ x = {changed}") == same
