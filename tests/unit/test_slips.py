"""The list of slips (tests/slips.py) fits the code."""

import pytest

from tests.mutants import ROOT, only_strict
from tests.slips import SLIPS, Slip


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_what_a_slip_replaces_stands_once_in_its_file(slip: Slip) -> None:
    assert (ROOT / slip.file).read_text().count(slip.old) == 1
    assert slip.old != slip.new
    for path in slip.tests.split():
        file, _, test = path.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_slips_have_names_of_their_own() -> None:
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
def test_a_mutant_of_zips_strict_alone_is_known(changed: str, same: bool) -> None:
    assert only_strict(f"- x = zip(a, b, strict=True)\n+ x = {changed}") == same
