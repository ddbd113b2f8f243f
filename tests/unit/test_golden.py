"""Test that the numbers of fixed reports equal the recorded ones."""

from tests.golden.__main__ import check


def test_the_numbers_of_reports_equal_the_recorded_ones() -> None:
    assert check() == []
