"""The verbs say of fixed inputs what they said before: what needs no ranks."""

from __future__ import annotations

import pytest

from tests.golden import compare
from tests.golden.__main__ import check
from tests.golden.values import QUICK


@pytest.mark.parametrize("section", QUICK)
def test_values_are_as_recorded(section: str) -> None:
    assert check(section) == []


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


def test_a_meant_change_moves_or_drops_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"a": {"x": 1}, "b": 2, "ab": 3}
    monkeypatch.setattr(compare, "CHANGED", {"s/a": "s/c", "s/b": None})
    assert compare.differences(before, {"c": {"x": 1}, "ab": 3}, "s") == []
    assert compare.differences(before, {"c": {"x": 2}}, "s") == [
        "s/c/x: expected 1, got 2",
        "s/ab: expected 3, got 'nothing'",
    ]
