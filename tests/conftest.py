"""For every test."""

from pathlib import Path

import pytest
from hypothesis import settings

LONG = ("e2e", "faults", "parity")  # rooms of tests that start ranks

settings.register_profile("no timing decides a test", deadline=None)
settings.load_profile("no timing decides a test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts ranks is slow unless it is marked quick: `make test` and `make test-long` are disjoint."""
    for item in items:
        if Path(item.path).parent.name in LONG and not item.get_closest_marker("quick"):
            item.add_marker("slow")
