"""For every test."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.browser import Browser, find
from tests.shards import write_shards

LONG = ("e2e", "faults", "nodes", "parity")  # rooms of tests that start ranks
LAST = ("e2e", "faults")  # the longest files stand elsewhere: one that came last would run alone

# a thread that waits sleeps: one that spins takes the core from the thread it waits for, and a step of one
# rank on two busy cores took 14 times as long
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # has bert-dp
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in a script's background, or under nohup
        signal.signal(number, usual)

settings.register_profile("no timing decides a test", deadline=None)
settings.load_profile("no timing decides a test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts ranks is slow unless it is marked quick: `make test` and `make test-long` are disjoint."""
    for item in items:
        if room(item) in LONG and not item.get_closest_marker("quick"):
            item.add_marker("slow")
    items.sort(key=lambda item: LAST.index(room(item)) + 1 if room(item) in LAST else 0)


def room(item: pytest.Item) -> str:
    return Path(item.path).parent.name


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small shards that no test changes."""
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run is to be made."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no chromium or google-chrome on PATH")
    with Browser(program) as opened:
        yield opened
