"""The numbers of fixed reports are the recorded ones."""

from tests.golden.__main__ import check


def test_the_numbers_of_reports_are_as_recorded() -> None:
    assert check() == []
