"""The numbers of ten fixed reports are the recorded ones."""

from __future__ import annotations

from tests.golden import compare
from tests.golden.__main__ import check


def test_the_numbers_of_reports_are_as_recorded() -> None:
    assert check() == []


def test_a_difference_is_named_by_its_path() -> None:
    before = {"rate": 1.0, "cells": [{"id": "a", "n": 2}], "flag": True}
    assert compare.differences(before, {**before, "new": 1, "rate": 1.000001}, "scale") == []
    found = compare.differences(
        before, {"rate": 1.1, "cells": [{"id": "a"}, {"id": "b"}], "flag": 1}, "scale"
    )
    assert found == [
        "scale/rate: expected 1.0, got 1.1",
        "scale/cells/0/n: expected 2, got 'nothing'",
        "scale/cells/length: expected 1, got 2",
        "scale/flag: expected True, got 1",
    ]
