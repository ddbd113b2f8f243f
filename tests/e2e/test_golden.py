"""The verbs do with fixed inputs, and with directories that earlier code began, what they did before."""

from __future__ import annotations

import pytest

from tests.golden.__main__ import check
from tests.golden.values import SLOW


@pytest.mark.parametrize("section", SLOW)
def test_values_are_as_recorded(section: str) -> None:
    assert check(section) == []
