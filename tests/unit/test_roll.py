"""The roll of a run's workers, without any."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher import roll


def test_a_wait_for_workers_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll(2) takes milliseconds; without them the launcher would look 5,000 times a second."""
    waited: list[float] = []

    class Poller:
        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waited.append(milliseconds)
            return []

    monkeypatch.setattr(roll.select, "poll", Poller)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        roll.Roll(process, 0).wait(0.2)
    assert waited == [200.0]
